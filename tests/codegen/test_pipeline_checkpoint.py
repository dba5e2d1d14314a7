"""Checkpoints and initial values of models in stages: equal with another number of stages, without stages, on other meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.runtime.workers import WorkerPool
from tests.support.pipeline_checkpoints import Tensors, model

SAVED: dict[str, dict[str, Any]] = {
    "fsdp": {"mesh": {"pp": 2, "dp": 2}, "pipeline": "pp", "strategy": "fsdp", "microbatches": 2},
    "padded": {
        "mesh": {"pp": 2, "tp": 2},
        "pipeline": "pp",
        "constraints": {"transformer.wte.weight": "S(0)", "lm_head:linear": "S(2)"},
        "microbatches": 2,
    },
}
LOADED: dict[str, dict[str, Any]] = {
    "no stages": {"mesh": {"dp": 4}, "strategy": "fsdp"},
    "tensor parallel": {"mesh": {"tp": 2, "pp": 2}, "pipeline": "pp", "strategy": "megatron", "microbatches": 4},
    "four stages": {"mesh": {"pp": 4}, "pipeline": "pp", "microbatches": 4},
}
EXACT = 1e-9


@pytest.mark.parametrize("into", [["no stages"], pytest.param(["tensor parallel", "four stages"], marks=pytest.mark.thorough)])
@pytest.mark.parametrize("saved", SAVED)
def test_a_checkpoint_of_stages_is_that_of_the_model(pool: WorkerPool, tmp_path: Path, saved: str, into: list[str]) -> None:
    blocks = 4 if "four stages" in into else 2
    case = (str(tmp_path / "checkpoint"), blocks, SAVED[saved], {name: LOADED[name] for name in into})
    ranks: list[dict[str, tuple[Tensors, float]]] = pool.run(  # type: ignore[assignment]
        "tests.support.pipeline_checkpoints:saved_and_loaded", case, ranks=4, keep=True
    )
    built = model(blocks)
    trained = {f"{name}/{key}" for name, _ in built.named_parameters() for key in ("exp_avg", "exp_avg_sq", "step")}
    expected: Tensors = {name: one for rank in ranks for name, one in rank["saved"][0].items()}
    assert expected.keys() == {*built.state_dict()} | trained
    losses = {rank["saved"][1] for rank in ranks}
    assert len(losses) == 1
    for name in into:
        assert {key for rank in ranks for key in rank[name][0]} == expected.keys()
        for rank in ranks:
            held, loss = rank[name]
            assert [key for key, tensor in held.items() if not torch.equal(tensor, expected[key])] == []
            assert abs(loss - losses.copy().pop()) <= EXACT


@pytest.mark.parametrize(
    "own, alone, tolerance",
    [
        pytest.param("local", "adamw", 1e-12, marks=pytest.mark.thorough),
        # The keys' biases have gradients of rounding alone, which Adafactor scales up.
        ("gathered", "adafactor", 1e-7),
    ],
)
def test_optimizers_step_stages_and_go_on_in_others_like_the_user_s_own(
    pool: WorkerPool, tmp_path: Path, own: str, alone: str, tolerance: float
) -> None:
    """Over an embedding of odd rows, in parts, that the first and the last stage share."""
    other = {
        "mesh": {"pp": 2, "dp": 2},
        "pipeline": "pp",
        "strategy": "zero1",
        "stages": 4,
        "schedule": "interleaved",
        "microbatches": 2,
    }
    case = (str(tmp_path / "checkpoint"), own, alone, SAVED["fsdp"], other)
    ranks: list[tuple[list[float], torch.Tensor | None]] = pool.run(  # type: ignore[assignment]
        "tests.support.pipeline_checkpoints:stepped", case, ranks=4, keep=True
    )
    assert max(error for found, _ in ranks for error in found) <= tolerance
    tied = [one for _, one in ranks if one is not None]
    assert len(tied) == 4
    assert all(torch.equal(one, tied[0]) for one in tied)


def test_stages_take_their_tensors_from_those_of_the_whole_model(pool: WorkerPool) -> None:
    options = {"mesh": {"pp": 2}, "pipeline": "pp", "microbatches": 2}
    assert pool.run("tests.support.pipeline_checkpoints:whole", options, ranks=2, keep=True) == [[], []]


def test_stages_are_initialised_like_the_model_in_none(pool: WorkerPool) -> None:
    case = {"mesh": {"pp": 2, "dp": 2}, "pipeline": "pp", "strategy": "fsdp", "microbatches": 2}
    ranks: list[tuple[Tensors, Tensors, str]] = pool.run(  # type: ignore[assignment]
        "tests.support.pipeline_checkpoints:initialised", case, ranks=4, keep=True
    )
    for alone, staged, _ in ranks:
        assert [name for name, tensor in staged.items() if not torch.equal(tensor, alone[name])] == []
    assert {name for _, staged, _ in ranks for name in staged} == set(ranks[0][0])
    assert [said.partition("\n")[0] for *_, said in ranks[:2]] == ["", ""]
    assert all("transformer.h.1.mlp.c_fc.weight is computed from a weight of another pipeline stage" in x[2] for x in ranks[2:])
