"""Tools that training scripts apply to a module work on a parallel one, with the numbers of the sequential model."""

from __future__ import annotations

import copy
import gc
import math
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import fx, nn
from torch._C._distributed_c10d import _get_work_registry_size
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from autopar.errors import InputError
from autopar.runtime.storage import full_tensor, of_another_rank
from autopar.runtime.workers import WorkerPool

STEPS, PARTS = 4, 2
X = torch.ones(8, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.body(x), x.sin())


def batches() -> torch.Tensor:
    return torch.randn(STEPS, PARTS, 8, 8, generator=torch.Generator().manual_seed(0))


def trained(module: nn.Module) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and norms of a loop with all of it, and the averaged weights."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    seen = []
    for parts in batches():
        for part in parts:  # accumulation: a plain loop
            loss = module(part) / PARTS
            scaler.scale(loss).backward()
            seen.append(loss.item())
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.05)
        seen.append(float(full_tensor(norm)))
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        average.update_parameters(module)
    return seen, {name: full_tensor(tensor.detach()) for name, tensor in average.module.named_parameters()}


def compared(folder: Path) -> list[str]:
    """Trains both, and moves the weights about; the messages of warnings."""
    plain = Net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallel = autopar.parallelize(Net(), batches()[0, 0], (2,), device="h100", strategy="fsdp")
        losses, averaged = trained(parallel)
    expected, weights = trained(plain)
    assert losses == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(averaged, weights)
    there_and_back(parallel, plain, folder)
    hooks(parallel)
    return [str(warning.message).splitlines()[0] for warning in caught]


def there_and_back(parallel: fx.GraphModule, plain: nn.Module, folder: Path) -> None:
    """Weights saved in the background, whole on rank 0, and from there on all ranks again."""
    kept = copy.deepcopy(plain.state_dict())
    group = dist.new_group(backend="gloo")  # messages of the save and of the model, in one group, would be taken for each other
    saved = dcp.async_save({"model": parallel.state_dict()}, checkpoint_id=str(folder / "state"), process_group=group)
    for _ in range(3):
        parallel(batches()[0, 0]).backward()
    parallel.zero_grad()
    saved.result()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(parallel, options=options)
    assert bool(whole) == (dist.get_rank() == 0)
    if whole:
        torch.testing.assert_close(whole, kept)
    for change in ("load", "set", "whole"):
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.zero_()
        if change == "load":
            dcp.load({"model": parallel.state_dict()}, checkpoint_id=str(folder / "state"))
        elif change == "whole":  # every rank has them, as torch.load gives them
            assert str(parallel.load_state_dict(kept)) == "<All keys matched successfully>"
        else:
            back = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(parallel, whole, options=back)
        torch.testing.assert_close({name: full_tensor(p.detach()) for name, p in parallel.named_parameters()}, kept)


def hooks(parallel: fx.GraphModule) -> None:
    x, seen = batches()[0, 0], []
    own = parallel.register_forward_hook(lambda module, args, result: seen.append(float(result)))
    loss = float(parallel(x))
    own.remove()
    assert seen == [loss]
    inner = parallel.get_submodule("body.0").register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match=r"the hook on body\.0 would never run"):
        parallel(x)
    inner.remove()
    assert float(parallel(x)) == loss
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        profiled = parallel(x)
        profiled.backward()
    names = {event.key for event in profile.key_averages()}
    assert {"aten::linear", "aten::tanh"} <= names or {"aten::addmm", "aten::tanh"} <= names
    ranges = {name.removeprefix("autopar: ") for name in names if name.startswith("autopar: ")}
    assert {"body.0", "body.1", "body.2", "body.0 (backward)", "body.2 (backward)"} <= ranges
    assert {"all_gather over axis0", "wait for all_gather over axis0", "reduce_scatter over axis0"} <= ranges
    assert float(profiled) == loss


def test_a_training_loop_with_every_tool_has_the_sequential_numbers(pool: WorkerPool, tmp_path: Path) -> None:
    for messages in pool.run(f"{__name__}:compared", tmp_path, ranks=2, keep=True):
        assert messages == []  # type: ignore[comparison-overlap]


def test_a_parameter_that_is_unfrozen_afterwards_is_refused() -> None:
    model, x = Net(), batches()[0, 0]
    model.body[0].requires_grad_(False)
    parallel = autopar.parallelize(model, x, (1,))
    parallel(x).backward()
    parallel.requires_grad_()
    with pytest.raises(InputError, match=r"body\.0\.weight and 1 more require a gradient, but had requires_grad=False"):
        parallel(x)


class Spectral(Net):
    """A net with a complex weight, as layers in frequencies have it."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(2, 5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.fft.irfft(torch.fft.rfft(x) * self.filter.repeat(4, 1), n=8))


def norms(make: type[Net]) -> list[str]:
    """Compares norms of gradients that are split over both axes, over one, or not at all; the messages of warnings."""
    plain = make()
    layouts = {"body.0.weight": "S(0), S(1)", "body.0.bias": "I, S(0)", "body.2.weight": "S(1), I", "body.2.bias": "I, I"}
    layouts |= {"filter": "I, S(0)"} if make is Spectral else {}
    parallel = autopar.parallelize(make(), batches()[0, 0], (2, 2), device="h100", constraints=layouts)
    for module in (plain, parallel):
        module(batches()[0, 0]).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [parallel.clip_grad_norm_(10.0, kind) for kind in (1.0, 2.0, float("inf"))]
        parallel.clip_grad_norm_(0.01)
    expected = [nn.utils.get_total_norm([p.grad for p in plain.parameters()], kind) for kind in (1.0, 2.0, float("inf"))]
    torch.testing.assert_close(found, expected)
    nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    for one, other in zip(plain.parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(other.grad), one.grad)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("make", [Net, Spectral])
def test_the_norm_of_gradients_in_any_layout_is_that_of_the_whole_ones_and_warns_of_nothing(
    make: type[Net], pool: WorkerPool
) -> None:
    assert pool.run(f"{__name__}:norms", make, ranks=4, keep=True) == [[]] * 4


def some_ranks_have_nothing(_: None) -> None:
    """The largest gradient where the last of four ranks has no row of six."""
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8)), torch.randn(4, 8)
    parallel = autopar.parallelize(copy.deepcopy(plain), x, (4,), device="h100", constraints={"0.weight": "S(0)"})
    for module in (plain, parallel):
        module(x).square().mean().backward()
    for kind in (2.0, math.inf):
        expected = nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()], kind)
        torch.testing.assert_close(parallel.clip_grad_norm_(10.0, kind), expected)


def test_the_largest_gradient_is_found_where_a_rank_has_none(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:some_ranks_have_nothing", None, ranks=4)


def loaded_around(_: None) -> None:
    """Whole tensors, loaded into a module around a parallel one and into a submodule of one."""
    plain, other = nn.ModuleDict({"net": Net(), "head": nn.Linear(8, 2)}), nn.Linear(8, 16)
    parallel = autopar.parallelize(Net(), X, (2,), device="h100", strategy="fsdp")
    nn.ModuleDict({"net": parallel, "head": nn.Linear(8, 2)}).load_state_dict(
        {name: 2 * tensor for name, tensor in plain.state_dict().items()}
    )
    parallel.get_submodule("body.0").load_state_dict(other.state_dict())
    found = [full_tensor(parallel.get_parameter(f"body.{name}")) for name in ("0.weight", "2.weight")]
    torch.testing.assert_close(found, [other.weight, 2 * plain.get_parameter("net.body.2.weight")])


def test_whole_tensors_are_loaded_into_a_module_around_and_into_a_submodule(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:loaded_around", None, ranks=2)


def composed(_: None) -> None:
    """Two forwards before one backward, and a parallel module behind another, with the gradient of the input."""
    x, other = (batches()[0, part].requires_grad_() for part in range(PARTS))
    bodies, heads = [], []
    for parallel in (False, True):
        body, head = Net().body, Net()
        if parallel:
            body = autopar.parallelize(body, x, (2,), device="h100", strategy="fsdp", outputs="whole")
            head = autopar.parallelize(head, x, (2,), device="h100", strategy="megatron")
        bodies.append(body)
        heads.append(head)
    found = []
    for body, head in zip(bodies, heads, strict=True):
        given = [one.detach().requires_grad_() for one in (x, other)]
        sum(head(body(one)) for one in given).backward()
        weights = [full_tensor(p.grad) for p in (*body.parameters(), *head.parameters())]
        found.append(weights + [one.grad for one in given])
    torch.testing.assert_close(*found)


def test_forwards_before_one_backward_and_modules_in_a_chain_pass_gradients_on(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:composed", ranks=2, keep=True)


class Probed(nn.Module):
    """Features and what is computed of them, where zeros are added: their gradient is that of the features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 16), nn.Sequential(nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor, probe: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.body(x) + probe
        return features, self.head(features)


def probed(_: None) -> None:
    """The gradient of a probe beside that of the features of the user's module."""
    found, x = [], batches()[0, 0]
    for parallel in (False, True):
        module, probe = Probed(), torch.zeros(8, 16, requires_grad=True)
        if parallel:
            module = autopar.parallelize(module, (x, probe), (2,), device="h100", strategy="fsdp")
        features, scores = module(x, probe)
        loss = scores.square().sum() + features.sin().sum()
        (gradient,) = torch.autograd.grad(loss, probe if parallel else features)
        found.append(gradient)
    torch.testing.assert_close(*found)


def test_a_probe_has_the_gradient_of_an_output_through_the_others(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:probed", ranks=2, keep=True)


def live() -> int:
    """How many tensors there are that Python knows of."""
    gc.collect()
    return sum(isinstance(found, torch.Tensor) for found in gc.get_objects())


def forwards_without_backwards(strategy: str) -> None:
    parallel = autopar.parallelize(Net(), batches()[0, 0], (2,), strategy=strategy, device="h100")
    counts = []
    for _ in range(6):
        parallel(batches()[0, 0])
        counts.append(live())
    # of four forwards, none leaves a tensor; others of the process come and go
    assert counts[-1] < counts[1] + 4, f"tensors after each forward: {counts}"
    with torch.autograd.detect_anomaly(check_nan=False):
        parallel(batches()[0, 0]).backward()
    with (
        torch.autograd.detect_anomaly(),
        pytest.raises(InputError, match=r"set_detect_anomaly\(True, check_nan=False\)"),
    ):
        parallel(batches()[0, 0])


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_forwards_that_no_backward_follows_leave_nothing_and_anomaly_mode_is_refused(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:forwards_without_backwards", "fsdp", ranks=2, keep=True)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def raising(gradient: torch.Tensor) -> None:
    raise ArithmeticError


def backwards_that_raise(strategy: str) -> None:
    model, batch = Blocks(), batches()[0, 0]
    model(batch).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    parallel = autopar.parallelize(Blocks(), batch, (2,), strategy=strategy, device="h100")
    parallel(batch).backward()
    parallel.zero_grad()
    weight, kept = parallel.get_parameter("blocks.1.0.weight"), []
    for _ in range(4):
        handle = weight.register_hook(raising)
        with pytest.raises(ArithmeticError):
            parallel(batch).backward()
        kept.append(_get_work_registry_size())
        handle.remove()
        parallel.zero_grad()
    parallel(batch).backward()
    assert kept[0] > 0, "something was in flight"
    assert [*kept[1:], _get_work_registry_size()] == [*kept[:-1], 0]
    for name, parameter in parallel.named_parameters():
        torch.testing.assert_close(full_tensor(parameter.grad), expected[name])


def test_a_backward_that_raises_leaves_nothing_in_flight_after_the_next(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:backwards_that_raise", "zero1", ranks=2, keep=True)


def written(strategy: str) -> None:
    """Write into what a module returned, as into a plain one's result."""
    model = Net().body
    parallel = autopar.parallelize(model, X, (2,), strategy=strategy, device="h100", outputs="whole")
    for module in (model, parallel):
        result = module(X)
        result.mul_(2)
        result[:, 0] = 0.0
        result.square().sum().backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(full_tensor(parallel.get_parameter(name).grad), weight.grad)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "megatron"])
def test_results_may_be_written_to(pool: WorkerPool, strategy: str) -> None:
    pool.run(f"{__name__}:written", strategy, ranks=2, keep=True)


def parts_of_rank_0(path: str) -> None:
    """Load what rank 0 saved of its parts, into the module, a submodule and a module around it."""
    parallel = autopar.parallelize(Net(), X, (2,), strategy="fsdp", device="h100")
    whole = {name: full_tensor(tensor).clone() for name, tensor in parallel.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(parallel.state_dict(), path)
    dist.barrier()
    saved = torch.load(path, weights_only=False)
    average = AveragedModel(parallel)
    body = {name.removeprefix("body."): tensor for name, tensor in saved.items()}
    around = average.state_dict() | {f"module.{name}": tensor for name, tensor in saved.items()}
    for module, state in ((parallel, saved), (parallel.body, body), (average, around)):
        if dist.get_rank() == 0:
            module.load_state_dict(state)
        else:
            with pytest.raises(InputError, match="weight was saved on another rank, and has only that rank's part"):
                module.load_state_dict(state)
    for name, tensor in parallel.state_dict().items():
        assert torch.equal(full_tensor(tensor), whole[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: False)  # as in a process by itself
        assert all(map(of_another_rank, saved.values()))


def test_a_file_that_has_only_the_part_of_rank_0_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    """Each other rank took that part for its own."""
    pool.run(f"{__name__}:parts_of_rank_0", str(tmp_path / "state.pt"), ranks=2, keep=True)


def replaced(strategy: str) -> None:
    """Put whole tensors in the place of parameters; others may be set."""
    parallel = autopar.parallelize(Net(), X, (2,), strategy=strategy, device="h100")
    for owner, name, new in (
        (parallel, "body", Net().body),
        (parallel.body, "0", nn.Linear(8, 16)),
        (getattr(parallel.body, "0"), "weight", nn.Parameter(torch.ones(16, 8))),
    ):
        with pytest.raises(InputError, match=r"^body.0.weight cannot be replaced by a whole tensor"):
            setattr(owner, name, new)
    with pytest.raises(InputError, match="weight cannot be replaced by a whole tensor"):
        parallel.body.register_module("0", nn.Linear(8, 16))
    with pytest.raises(InputError, match="weight cannot be replaced by a whole tensor"):
        getattr(parallel.body, "0").register_parameter("weight", nn.Parameter(torch.ones(16, 8)))
    loss = parallel(X)
    parallel.load_state_dict({"body.0.weight": torch.ones(16, 8)}, strict=False)  # as the message says
    assert torch.equal(full_tensor(parallel.get_parameter("body.0.weight")), torch.ones(16, 8))
    assert parallel(X) != loss
    parallel.mine = nn.Linear(2, 2)
    parallel.body.mine = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_a_whole_tensor_does_not_take_the_place_of_parts(pool: WorkerPool, strategy: str) -> None:
    pool.run(f"{__name__}:replaced", strategy, ranks=2, keep=True)


class Halving(nn.Module):
    """Scales what a checkpoint has, as a model does that reads files of its older versions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.net.register_load_state_dict_pre_hook(lambda module, state, prefix, *rest: None)

    def get_extra_state(self) -> int:
        return 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def test_what_a_model_does_to_state_dicts_is_not_lost_without_a_word() -> None:
    said = "do not call what the model does there: get_extra_state of Halving, load_state_dict_pre_hooks of net; load a"
    with pytest.warns(UserWarning, match=said):
        autopar.parallelize(Halving(), torch.randn(8, 8), mesh=1)
    autopar.parallelize(nn.Sequential(nn.BatchNorm1d(8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))), X, mesh=1)


def test_models_that_share_a_part_are_warned_of_while_both_are_there() -> None:
    trunk = nn.Linear(8, 8)
    actor, critic = nn.Sequential(trunk, nn.Linear(8, 2)), nn.Sequential(trunk, nn.Linear(8, 1))
    first = autopar.parallelize(actor, X, mesh=1)
    assert autopar.parallelize(actor, X, mesh=1) is not first, "the same model again"
    autopar.parallelize(nn.Sequential(actor, nn.Tanh()), X, mesh=1)  # and one that contains it
    said = "0.weight, 0.bias are parameters of another model too, which was made parallel"
    with pytest.warns(UserWarning, match=said):
        autopar.parallelize(critic, X, mesh=1)
    trunk.requires_grad_(False)
    autopar.parallelize(nn.Sequential(trunk, nn.Linear(8, 3)), X, mesh=1)
    trunk.requires_grad_()
    del first
    gc.collect()
    autopar.parallelize(critic, X, mesh=1)


def test_a_function_that_asks_for_classes_of_submodules_is_warned_of() -> None:
    parallel = autopar.parallelize(Net(), X, mesh=1)
    with pytest.warns(UserWarning, match="have no classes of their own"):
        assert parallel.apply(lambda module: None) is parallel


def test_what_other_libraries_ask_of_models_is_absent_with_a_way_out() -> None:
    """LocalSGD of accelerate and SFTTrainer of trl ended in torch's AttributeError, as in that of any name."""
    parallel = autopar.parallelize(Net(), X, mesh=1)
    others = {"no_sync": "LocalSGD", "config": "trl", "module": "itself", "save_pretrained": "integrations"}
    for name, fix in (others | {"preprocess": "model.preprocess"}).items():
        with pytest.raises(InputError, match=f"^a parallel module has no attribute '{name}'") as refusal:
            getattr(parallel, name)
        assert fix in refusal.value.details["fix"]
        assert not hasattr(parallel, name)
    assert getattr(parallel, "no_sync", None) is None, "accelerate's Accelerator.no_sync does nothing then"
    with pytest.raises(AttributeError, match="'ParallelModule' object has no attribute '_nothing'"):
        _ = parallel._nothing


class Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module, self.config = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.config(self.module(x))


def test_submodules_may_have_such_names() -> None:
    parallel = autopar.parallelize(Wrapping(), X, mesh=1)
    assert parallel.config.weight is parallel.get_parameter("config.weight")
    assert parallel.module.bias is parallel.get_parameter("module.bias")
