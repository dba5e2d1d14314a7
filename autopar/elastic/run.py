"""Fault-tolerant training: `run` starts it, or resumes from the last checkpoint on the ranks that are available."""

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
from autopar.ir.mesh import Mesh
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
    """Train for a number of steps; when started again, on any number of processes, resume from the last checkpoint.

    Run the script under `torchrun --nnodes=MIN:MAX --max-restarts=N`, which restarts it when a process fails, or a node leaves
    or joins; also under `torchrun --nproc-per-node` with another number than before, or as one process. Each start plans for
    the available ranks; plans are kept in the folder `plans` of `checkpoints`. The global batch stays the same, and so does the
    learning-rate schedule; the number of micro-batches per step is planned.

    A checkpoint holds parameters, buffers, the states of optimizer and scheduler, the random states of the model and the host,
    the step, and the position in the data. It is written during the next steps, and is valid once all ranks have written; one
    interrupted by a kill is removed. On SIGTERM, or if the parent process has ended, all ranks finish their step, save and exit
    with code 143.

    Args:
        build: returns the model and a sample of its global batch, for `autopar.parallelize`. A model on `meta` is initialised
            by its own code.
        train_step: one step, `train_step(state, batch)`: forward, backward and `state.optimizer.step()`, and
            `state.scheduler.step()` if there is one. It returns the loss. `state.model.step(*batch)` runs forward and backward
            of one micro-batch after the other; `state.model(*batch)` and `backward()` work too.
        optimizer: a function of the parallel model that returns its optimizer.
        data: the global batches, the same on every rank: a `DataLoader`, which starts over when it ends, or a function from a
            step number to its batch.
        steps: the total number of steps.
        checkpoints: a folder that all ranks see.
        every: steps from one checkpoint to the next. A killed process costs the steps since the last committed one: at most
            twice as many, since a checkpoint starts when the previous one is committed.
        keep: how many checkpoints are kept.
        scheduler: a function of the optimizer that returns a learning-rate scheduler.
        mesh: a function from the number of ranks to the mesh, or "auto"; by default all ranks are planned as by `devices=`.
        config: a declaration instead of a mesh; sizes that it leaves out follow from the number of ranks.
        **options: those of `autopar.parallelize`; `microbatches` is "auto".

    Returns:
        The state after the last step. It has been saved as well: a run that is started again returns at once.

    Raises:
        CheckpointError: a checkpoint cannot be written, is damaged, or is of another model.
        BudgetError: the model does not fit on the available ranks.
        InputError: a function takes or returns the wrong thing, a step does not step the optimizer, or what the optimizer keeps
            cannot be stored, or is of an optimizer with other groups.
        SystemExit: it was asked to stop and has saved.
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
    """Leave an error where torchrun looks for it, so that it shows the first error of all ranks."""
    try:
        yield
    except Exception as error:
        get_error_handler().record_exception(error)
        raise


def _parallel(build: Build, asked: Mapping[str, object], plans: Path) -> ParallelModule:
    """Parallelize the model on the available ranks."""
    made = build()
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        what = f"build returned a {type(made).__name__}, not a module and its sample"
        raise InputError(what, fix="return model, batch")
    model, sample = made
    world = world_size()
    options = {**asked, "mesh": asked["mesh"](world)} if callable(asked["mesh"]) else asked
    _check_mesh(options["mesh"], world)
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
    """The number of devices to plan for, if neither a mesh nor a declaration says it."""
    return world_size() if options["mesh"] is None and options["config"] is None else None


def _begin(state: TrainingState, saved: Checkpoints) -> None:
    """Load the last checkpoint, or write the first one, with the initial values."""
    reader = saved.latest()
    if reader is None:
        _save(state, saved)
        saved.wait()
    else:
        rest = reader.rest()
        steps = state.steps_to_load(reader.read_metadata().state_dict_metadata, stepped=bool(rest["step"]))
        saved.load(reader, state.tensors(steps))
        state.load_rest(rest, steps)
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
    """Run the remaining steps; `flags` tells whether any rank was asked to stop, and whether a checkpoint failed."""
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
    """Run one step. Raises InputError for a wrong step function, which the first step of a run reveals."""
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
    steps = state.steps()
    saved.save(state.step, state.tensors(steps), state.rest(steps))


def _asked(mesh: object, config: Mapping[str, object] | str | Path | None, options: Mapping[str, object]) -> dict[str, object]:
    """The keywords for `parallelize`. Raises MeshError for a mesh that fits only one number of ranks."""
    if mesh is not None and mesh != AUTO and not callable(mesh):
        what = f"mesh={mesh!r} is of a fixed size, and the number of ranks is not"
        raise MeshError(what, fix="mesh=lambda ranks: (ranks,), a declaration, or nothing: all is planned")
    for name in ("plan", "plans", "devices", "over"):
        if name in options:
            raise ConstraintError(f"{name}= is not an option of an elastic run, which plans anew", fix="leave it out")
    says = config is not None and "gradient_accumulation" in load_declaration(config)
    default = {} if says else {"microbatches": AUTO}
    return {"mesh": mesh, "config": config, **default, **options}


def _check_mesh(mesh: object, world: int) -> None:
    """Raise MeshError for a mesh that has another number of devices than there are processes."""
    if not (mesh is None or isinstance(mesh, str)) and (size := Mesh.of(mesh).devices.size) != world:
        what = f"mesh= returned a mesh of {size} devices for {world} process{'es' if world > 1 else ''}"
        raise MeshError(what, fix=f"return a mesh for {world}, too, or start as many processes as it has a mesh for")


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
