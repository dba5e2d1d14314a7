"""A training that any process may leave: `run` starts it, or goes on from its last checkpoint on the ranks that there are."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from autopar.api import initialize, parallelize
from autopar.codegen import ParallelModule
from autopar.elastic.batches import Batches, Data
from autopar.elastic.checkpoints import Checkpoints
from autopar.elastic.state import OptimizerOf, SchedulerOf, TrainingState
from autopar.elastic.stop import EXIT, StopRequest, anywhere
from autopar.errors import BudgetError, ConstraintError, InputError, MeshError
from autopar.plan.declaration_file import load_declaration
from autopar.plan.options import AUTO
from autopar.runtime.process_environment import world_size

LOG = logging.getLogger("autopar")
Build = Callable[[], tuple[nn.Module, object]]
TrainStep = Callable[[TrainingState, object], object]


def run(
    build: Build,
    train_step: TrainStep,
    *,
    optimizer: OptimizerOf,
    data: Data,
    steps: int,
    checkpoints: str | Path,
    every: int = 100,
    keep: int = 2,
    scheduler: SchedulerOf | None = None,
    mesh: Callable[[int], object] | str | None = None,
    config: Mapping[str, object] | str | Path | None = None,
    **options: object,
) -> TrainingState:
    """Train for so many steps; started again, on any number of processes, it goes on from its last checkpoint.

    A script that calls it runs under `torchrun --nnodes=MIN:MAX --max-restarts=N`, which starts it anew when a process fails, a
    node leaves or one comes; also under `torchrun --nproc-per-node` with another number than before, and as one process. Each
    start plans for the ranks that there are; plans are kept in the folder `plans` of `checkpoints`. The global batch stays the
    same, and with it the schedule of the learning rate: how many micro-batches a step takes is planned.

    A checkpoint has parameters, buffers, the optimizer's and the scheduler's state, the random states of the model and of the
    host, the step, and the position in the data. It is written beside the next steps, and counts once all ranks have written:
    what was being written when a process was killed is removed. On SIGTERM, or when the process that started it has ended, all
    ranks end their step, save and leave with exit code 143.

    Args:
        build: returns the model and a sample of its global batch, as `autopar.parallelize` takes them. A model on `meta` is
            initialised by its own code.
        train_step: one step, `train_step(state, batch)`: forward, backward and `state.optimizer.step()`, and
            `state.scheduler.step()` if there is one. It returns the loss. `state.model.step(*batch)` runs forward and backward
            of one micro-batch after the other; `state.model(*batch)` and `backward()` work, too.
        optimizer: a function of the parallel model that returns its optimizer.
        data: the global batches, the same on every rank: a `DataLoader`, which begins again when it ends, or a function from
            the number of a step to its batch.
        steps: how many steps the training has in all.
        checkpoints: a folder that all ranks see.
        every: steps from one checkpoint to the next. A process that is killed costs the steps since the last one that was
            committed: at most twice as many, as a checkpoint is begun when the one before is there.
        keep: how many checkpoints are kept.
        scheduler: a function of the optimizer that returns a scheduler of its learning rate.
        mesh: a function from the number of ranks to the mesh, or "auto"; by default all are planned as `devices=` plans them.
        config: a declaration in the place of a mesh; sizes that it leaves out are those of the ranks that there are.
        **options: those of `autopar.parallelize`; `microbatches` is "auto".

    Returns:
        The state after the last step. Its checkpoint is there, too: a run that is started again returns at once.

    Raises:
        CheckpointError: a checkpoint cannot be written, is damaged, or is one of another model.
        BudgetError: the model does not fit on the ranks that there are.
        InputError: a function returns, or takes, something else; a step does not step the optimizer.
        SystemExit: it was asked to stop, and has saved.
        AutoparError: what `autopar.parallelize` raises.
    """
    _check_counts(steps=steps, every=every, keep=keep)
    _check_call("train_step", train_step, 2)
    asked = _asked(mesh, config, options)
    folder, batches, stop = Path(checkpoints), Batches(data), StopRequest()
    with _told_to_torchrun():
        model = _parallel(build, asked, folder / "plans")
        made = optimizer(model)
        if not isinstance(made, torch.optim.Optimizer):
            raise InputError(f"optimizer returned a {type(made).__name__}", fix="lambda model: AdamW(model.parameters(), ...)")
        state = TrainingState(model, made, scheduler(made) if scheduler else None, batches)
        groups = [dist.new_group(backend="gloo") if dist.is_initialized() else None for _ in range(2)]
        saved = Checkpoints(folder, keep, groups[0])
        with stop, saved:
            _begin(state, saved)
            _train(state, train_step, steps, every, saved, lambda: anywhere(stop.asked, saved.failed, group=groups[1]))
    return state


@contextmanager
def _told_to_torchrun() -> Iterator[None]:
    """An error is left where torchrun looks for it: it shows the first one of all ranks."""
    try:
        yield
    except Exception as error:
        get_error_handler().record_exception(error)
        raise


def _parallel(build: Build, asked: Mapping[str, object], plans: Path) -> ParallelModule:
    """The model on the ranks that there are."""
    made = build()
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        what = f"build returned a {type(made).__name__}, not a module and its sample"
        raise InputError(what, fix="return model, batch")
    model, sample = made
    world = world_size()
    options = {**asked, "mesh": asked["mesh"](world)} if callable(asked["mesh"]) else asked
    try:
        parallel = parallelize(model, sample, plans=plans, devices=_devices(options), **options)
    except BudgetError as error:
        fix = "raise MIN of torchrun --nnodes=MIN:MAX; the last checkpoint stays as it is"
        ranks = f"{world} process{'es' if world > 1 else ''}"
        raise BudgetError(f"on {ranks}: {error.what}", **{**error.details, "elastic": fix}) from error
    assert isinstance(parallel, ParallelModule), "what parallelize makes"
    if any(tensor.is_meta for tensor in (*parallel.parameters(), *parallel.buffers())):
        initialize(parallel, model)
    return parallel


def _devices(options: Mapping[str, object]) -> int | None:
    """How many devices are planned for, where neither a mesh nor a declaration says it."""
    return world_size() if options["mesh"] is None and options["config"] is None else None


def _begin(state: TrainingState, saved: Checkpoints) -> None:
    """Load the last checkpoint, or write the first: that of the initial values, before anything is trained."""
    reader = saved.latest()
    if reader is None:
        _save(state, saved)
        saved.wait()
    else:
        rest = reader.rest()
        tensors = state.saved_tensors(reader.read_metadata().state_dict_metadata, stepped=bool(rest["step"]))
        saved.load(reader, tensors)
        state.load_rest(rest, tensors)
    plan = state.model.autopar.plan
    assert plan is not None, "it was built from a plan"
    LOG.info("step %d on %s, %d micro-batches", state.step, plan.mesh, plan.microbatches)


def _train(
    state: TrainingState,
    train_step: TrainStep,
    steps: int,
    every: int,
    saved: Checkpoints,
    flags: Callable[[], list[bool]],
) -> None:
    """The steps that are left; `flags` says of all ranks whether one is asked to stop, and whether a checkpoint failed."""
    last = state.step
    first = True
    while state.step < steps:
        stop, failed = flags()
        if failed:
            saved.wait()
        if stop:
            if state.step > last:
                _save(state, saved)
            saved.wait()
            LOG.info("asked to stop: step %d is saved", state.step)
            sys.exit(EXIT)
        _step(state, train_step, check=first)
        first = False
        if state.step % every == 0 or state.step == steps:
            _save(state, saved)
            last = state.step
    saved.wait()


def _step(state: TrainingState, train_step: TrainStep, *, check: bool) -> None:
    """One step. Raises InputError for a step function that is wrong; the first step of a run shows it."""
    stepped: list[object] = []
    hook = state.optimizer.register_step_post_hook(lambda *_: stepped.append(None))
    try:
        loss = train_step(state, state.batches.take(state.step))
    finally:
        hook.remove()
    single = isinstance(loss, torch.Tensor) and loss.numel() == 1
    if not single and (isinstance(loss, bool) or not isinstance(loss, int | float)):
        shape = f" of {list(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        raise InputError(f"train_step returned a {type(loss).__name__}{shape}, not the loss", fix="return loss, a scalar")
    if check and not stepped:
        raise InputError("train_step did not step the optimizer", fix="state.optimizer.step() after the backward")
    state.step += 1


def _save(state: TrainingState, saved: Checkpoints) -> None:
    saved.save(state.step, state.tensors(stepped=state.step > 0), state.rest())


def _asked(mesh: object, config: Mapping[str, object] | str | Path | None, options: Mapping[str, object]) -> dict[str, object]:
    """The keywords of `parallelize`. Raises MeshError for a mesh that fits one number of ranks only."""
    if mesh is not None and mesh != AUTO and not callable(mesh):
        what = f"mesh={mesh!r} is of a fixed size, and the number of ranks is not"
        raise MeshError(what, fix="mesh=lambda ranks: (ranks,), a declaration, or nothing: all is planned")
    for name in ("plan", "plans", "devices", "over"):
        if name in options:
            raise ConstraintError(f"{name}= is not an option of an elastic run, which plans anew", fix="leave it out")
    says = config is not None and "gradient_accumulation" in load_declaration(config)
    default = {} if says else {"microbatches": AUTO}
    return {"mesh": mesh, "config": config, **default, **options}


def _check_counts(**counts: object) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(
                f"{name}={count!r} is not a number of {'steps' if name != 'keep' else 'checkpoints'}", fix="1 or more"
            )


def _check_call(name: str, function: object, arguments: int) -> None:
    """Raise InputError for a function that does not take so many arguments."""
    try:
        inspect.signature(function).bind(*[None] * arguments)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} cannot be called: {error}", fix="def train_step(state, batch): ... return loss") from error


__all__ = ["run"]
