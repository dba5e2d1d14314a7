"""Threaded ranks use private parts of torch: these tests show which of them a release has changed."""

from __future__ import annotations

import time
from datetime import timedelta
from operator import attrgetter

import pytest
import torch
import torch.distributed as dist

from autopar.ir.mesh import Mesh
from autopar.runtime import collectives, threaded_ranks
from autopar.runtime.threaded_ranks import ThreadedRanks
from autopar.runtime.world import Context

PRIVATE = {
    dist: (
        "ProcessGroupGloo.create_default_device",
        "ProcessGroupGloo._Options._devices",
        "ProcessGroupGloo._Options._timeout",
    ),
    dist.ProcessGroup: ("_register_backend", "_set_default_backend", "_set_group_name", "abort", "BackendType.GLOO"),
    torch._C._distributed_c10d: ("HashStore", "PrefixStore", "_register_process_group", "_unregister_process_group"),
}
NAMES = [(owner, name) for owner, names in PRIVATE.items() for name in names]


@pytest.mark.parametrize("owner, name", NAMES, ids=[name for _, name in NAMES])
def test_torch_has_what_ranks_in_threads_are_made_of(owner: object, name: str) -> None:
    try:
        attrgetter(name)(owner)
    except AttributeError as error:
        pytest.fail(f"torch {torch.__version__} has moved {name}, by which autopar.runtime.threaded_ranks joins ranks: {error}")


def test_the_options_of_gloo_keep_what_they_are_given() -> None:
    options, device = dist.ProcessGroupGloo._Options(), threaded_ranks._device()
    options._devices, options._timeout = [device], timedelta(seconds=7)
    assert options._devices == [device]
    assert options._timeout == timedelta(seconds=7)


def test_a_rank_gives_up_on_another_that_does_not_come_when_its_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threaded_ranks, "PATIENCE", timedelta(seconds=1))

    def alone(context: Context) -> torch.Tensor | None:
        if context.axes[0].index:
            return None  # without an error, by which the others would be stopped
        return collectives.all_reduce_sum(torch.ones(2), context.axes[0])

    with ThreadedRanks() as world:
        sums = world.run(Mesh(axes=("a",), sizes=(2,)), lambda own: collectives.all_reduce_sum(torch.ones(2), own.axes[0]))
        assert [found.tolist() for found in sums] == [[2.0, 2.0]] * 2
        started = time.monotonic()
        with pytest.raises(Exception, match=r"all_reduce over axis a|[Tt]imed out"):
            world.run(Mesh(axes=("a",), sizes=(2,)), alone)
        assert time.monotonic() - started < 15  # the default of gloo is half an hour
