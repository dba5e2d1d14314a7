"""Ranks that make different calls: every rank raises an error that names the ranks and the difference, and none hangs."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.errors import InputError
from autopar.runtime.call_agreement import SAMPLED, CallAgreement
from autopar.runtime.workers import WorkerPool

LIMIT = 60.0  # seconds within which every rank has its error, on however busy a machine: otherwise it hangs for minutes


class Net(nn.Module):
    """A loss of whatever is given, with dropout, so that its modes differ."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().sum()


def made(strategy: str = "fsdp", **options: object) -> tuple[fx.GraphModule, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(12, 8)
    mesh = (dist.get_world_size(),)
    return autopar.parallelize(Net(), x, mesh, device="h100", strategy=strategy, **options), x


def other_mode(parallel: fx.GraphModule, x: torch.Tensor) -> None:
    parallel(x).backward()
    parallel.train(dist.get_rank() != 1)
    parallel(x).backward()


def other_mode_at_first(parallel: fx.GraphModule, x: torch.Tensor) -> None:
    parallel.train(dist.get_rank() != 1)
    parallel(x)


def without_gradients(parallel: fx.GraphModule, x: torch.Tensor) -> None:
    parallel(x).backward()
    with torch.set_grad_enabled(dist.get_rank() != 1):
        parallel(x)


def other_frozen(parallel: fx.GraphModule, x: torch.Tensor) -> None:
    parallel.get_parameter("body.0.weight").requires_grad_(dist.get_rank() != 1)
    parallel(x).backward()


def other_size(parallel: fx.GraphModule, x: torch.Tensor) -> None:
    parallel(x).backward()
    parallel(x[:6] if dist.get_rank() == 1 else x).backward()


def other_batch(parallel: fx.GraphModule, x: torch.Tensor) -> None:
    parallel(x).backward()
    parallel(x + 1e-3 * dist.get_rank()).backward()


def other_call(parallel: fx.GraphModule, x: torch.Tensor) -> None:
    if dist.get_rank() == 1:
        parallel(x)
    else:
        parallel.step(x)


def other_random_state(parallel: fx.GraphModule, x: torch.Tensor) -> None:
    if dist.get_rank() == 1:
        parallel.autopar.rng_state.load_state_dict({"seed": 5, "call": 7})
    parallel(x)


def refused_on_one(parallel: fx.GraphModule, x: torch.Tensor) -> None:
    parallel(x).backward()
    parallel(x[:, :4] if dist.get_rank() == 1 else x)


def evaluation_on_one(parallel: fx.GraphModule, x: torch.Tensor) -> None:
    parallel(x).backward()
    if dist.get_rank() == 1:
        parallel.eval()
        parallel(x)
    parallel(x)


def clipped_on_one(parallel: fx.GraphModule, x: torch.Tensor) -> None:
    parallel(x).backward()
    if dist.get_rank() == 1:
        parallel.clip_grad_norm_(1.0)
    parallel(x)


CASES: dict[str, tuple[Callable[[fx.GraphModule, torch.Tensor], None], str]] = {
    "mode": (other_mode, r"differ in mode: train\(\) on ranks 0, 2; eval\(\) on rank 1"),
    "mode of the first call": (other_mode_at_first, r"differ in mode: train\(\) on ranks 0, 2; eval\(\) on rank 1"),
    "no_grad": (without_gradients, "differ in gradients: enabled on ranks 0, 2; no_grad on rank 1"),
    "frozen": (other_frozen, r"differ in the tensors that require a gradient: 4 of 5 \(set \w+\) on ranks 0, 2; 3 of 5"),
    "size": (other_size, r"differ in the size of x: \(12, 8\) on ranks 0, 2; \(6, 8\) on rank 1"),
    "batch": (other_batch, r"different values for x\n  ranks  \[1, 2\] differ from rank 0"),
    "step": (other_call, "differ in what is called: a step on ranks 0, 2; a forward on rank 1"),
    "clipping": (clipped_on_one, "differ in what is called: a forward on ranks 0, 2; clip_grad_norm_ on rank 1"),
    "random": (other_random_state, r"differ in random state: call 0 of seed \d+ on ranks 0, 2; call 7 of seed 5 on rank 1"),
    "refusal": (refused_on_one, "the call was refused on rank 1: |argument x has"),
    "evaluation": (evaluation_on_one, r"differ in mode: train\(\) on ranks 0, 2; eval\(\) on rank 1"),
}


def refused(name: str) -> float:
    """The seconds until the error of a case came on this rank; the module serves equal calls afterwards."""
    make_calls, pattern = CASES[name]
    parallel, x = made(dynamic={"batch": 0})
    started = time.monotonic()
    with pytest.raises(InputError, match=pattern):
        make_calls(parallel, x)
    seconds = time.monotonic() - started
    parallel.train().requires_grad_()
    parallel.autopar.rng_state.load_state_dict({"seed": 5, "call": 0})
    assert torch.isfinite(parallel(x))
    return seconds


@pytest.mark.parametrize("name", CASES)
def test_every_rank_says_which_ranks_differ_and_in_what(pool: WorkerPool, name: str) -> None:
    assert max(pool.run(f"{__name__}:refused", name, ranks=3, keep=True)) < LIMIT  # type: ignore[type-var, operator]


def refused_in_stages(_: None) -> None:
    """Clip on one rank, of two stages, after a backward; then go on."""
    torch.manual_seed(0)
    x = torch.randn(12, 8)
    parallel = autopar.parallelize(Net(), x, {"pp": 2}, pipeline="pp", microbatches=2, device="h100")
    parallel(x).backward()
    with pytest.raises(InputError, match=r"differ in what is called: a call after .*; clip_grad_norm_ on rank 1"):
        parallel.clip_grad_norm_(1.0) if dist.get_rank() else parallel(x)
    parallel(x).backward()


def test_stages_go_on_after_a_call_that_was_refused(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:refused_in_stages", ranks=2)


class Cut(Net):
    """A loss of as many rows as an input says."""

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(x[: rows.item()])


def other_static(_: None) -> str:
    """What a rank hears of a static input that has another value on rank 1."""
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    parallel = autopar.parallelize(Cut(), (x, torch.tensor(8)), (2,), device="h100", static=["rows"])
    parallel(x, torch.tensor(8)).backward()
    with pytest.raises(InputError) as caught:
        parallel(x, torch.tensor(8 - dist.get_rank()))
    parallel(x, torch.tensor(8)).backward()
    return caught.value.what


def test_every_rank_hears_of_a_static_input_that_changed_on_one(pool: WorkerPool) -> None:
    what = "argument rows is static, and has another value than planned"
    assert pool.run(f"{__name__}:other_static", ranks=2) == [f"the call was refused on rank 1: {what}", what]


class Guarded(Net):
    """A loss whose layers a branch on values chooses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 0.1 if x.sum() > 1000 else x)


def against_an_assumption(options: dict[str, object]) -> tuple[str, str]:
    """What a rank hears of a batch in which an assumption does not hold, in a call and in a step."""
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    _, first = inspect.getsourcelines(Guarded)
    assume = {f"codegen/test_ranks_that_differ.py:{first + 4}": False}
    parallel = autopar.parallelize(Guarded(), x, (2,), device="h100", assume=assume, **options)
    parallel.step(x)
    found = []
    for call in (parallel, parallel.step):
        with pytest.raises(InputError) as caught:
            call(x + 100)
        found.append(caught.value.what.partition(":")[2])
    parallel.step(x)
    return tuple(found)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [{"strategy": "ddp"}, {"strategy": "fsdp"}], ids=["ddp", "fsdp"])
def test_every_rank_hears_of_an_assumption_that_does_not_hold(pool: WorkerPool, options: dict[str, object]) -> None:
    for found in pool.run(f"{__name__}:against_an_assumption", options, ranks=2):
        assert all("is assumed to be False in every call, and is True in this one" in text for text in found)


class Spectrum(nn.Module):
    """A loss of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return (z * self.scale).imag.relu().sum()


def views_of_complex(_: None) -> None:
    """Inputs whose values are those of their memory but for a sign."""
    z = torch.randn(12, 8, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    model = Spectrum()
    parallel = autopar.parallelize(model, z, (2,), device="h100", strategy="ddp")
    for given in (z, z.conj(), torch.complex(z.real, z.conj().imag)):
        torch.testing.assert_close(parallel(given), model(given))
    with pytest.raises(InputError, match="different values for z"):
        parallel(z.conj() if dist.get_rank() else z)


def test_conjugates_are_compared_by_their_values(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:views_of_complex", ranks=2)


class Wide(nn.Module):
    """A product of a larger batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum()


def one_element(_: None) -> int:
    """How many calls are made until one element that differs is found."""
    x = torch.zeros(48, 64)
    parallel = autopar.parallelize(Wide(), x, (3,), device="h100", strategy="ddp")
    parallel(x)
    x[40, 3] = dist.get_rank()
    for calls in range(1, x.numel()):
        try:
            parallel(x)
        except InputError:
            return calls
    return x.numel()


def test_one_element_of_a_large_input_is_compared_every_few_calls(pool: WorkerPool) -> None:
    calls = pool.run(f"{__name__}:one_element", ranks=3)
    assert len(set(calls)) == 1
    assert calls[0] <= 48 * 64 // SAMPLED  # type: ignore[operator]


def compiled(_: None) -> None:
    parallel, x = made("replicate")
    fast = torch.compile(parallel.eval(), backend="eager")
    with torch.no_grad():
        found = fast(x)
        torch.testing.assert_close(found, parallel(x))
        with pytest.raises(InputError, match="different values for x"):
            fast(x + dist.get_rank())


def test_the_ranks_compare_their_calls_outside_of_a_compiled_graph(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:compiled", ranks=2)


class _Order(TorchDispatchMode):
    """Logs products ("compute") and collectives ("message") as they are called."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "linear") or (func.namespace == "_c10d_functional" and name != "wait_tensor"):
            self.log.append("message" if func.namespace == "_c10d_functional" else "compute")
        return func(*args, **(kwargs or {}))


def order_of_calls(strategy: str) -> list[list[str]]:
    """What the first call, the second one, one of another size, and two by torch.compile do: each thing once."""
    parallel, x = made(strategy, dynamic={"batch": 0})
    fast = torch.compile(parallel, backend="eager")
    settle, found = CallAgreement.settle, []

    def logged(self: CallAgreement) -> None:
        found[-1].append("settled" if self._sent is not None else "nothing")
        settle(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CallAgreement, "settle", logged)
        for call, given in ((parallel, x), (parallel, x), (parallel, x[:6]), (fast, x), (fast, x)):
            found.append([])
            with _Order(found[-1]) if call is parallel else nullcontext():
                call(given)
    return [[*dict.fromkeys(event for event in events if event != "nothing")] for events in found]


@pytest.mark.parametrize("strategy, second", [("ddp", ["compute", "settled", "message"]), ("fsdp", ["settled", "message"])])
def test_a_call_like_the_last_one_waits_for_the_others_before_its_first_message(
    pool: WorkerPool, strategy: str, second: list[str]
) -> None:
    for first, found, resized, *by_compiler in pool.run(f"{__name__}:order_of_calls", strategy, ranks=2, keep=True):
        assert first[0] == resized[0] == "settled"
        assert by_compiler == [["settled"], ["settled"]], "at once: what is traced asks nobody"
        assert found[: len(second)] == second


def other_batch_again(_: None) -> bool:
    """Whether the ranks draw alike after a call that was refused in the middle of its forward."""
    parallel, x = made("ddp")
    parallel(x)
    parallel(x)
    with pytest.raises(InputError, match="different values for x"):
        parallel(x + dist.get_rank())
    parallel(x)
    return parallel.autopar.rng_state.call == 3


def test_a_call_that_is_refused_late_draws_nothing(pool: WorkerPool) -> None:
    assert pool.run(f"{__name__}:other_batch_again", ranks=2) == [True, True]
