"""The module of one pipeline rank: its stages, each a parallel module over the parameters of this one.

A stage's module is an ordinary parallel module on the mesh without the pipeline's axis; it is called with this rank's parts of
the values sent by the previous stage. The rank's module has the parameters of its stages under their original names, takes the
batch, and runs the actions of its rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from autopar.analysis.fits import fit_of
from autopar.analysis.recomputability import is_random
from autopar.capture import Signature
from autopar.codegen.compiled import eager
from autopar.codegen.graph_module import HELD
from autopar.codegen.module import ParallelModule
from autopar.codegen.module_state import ModuleState
from autopar.codegen.steps import Steps
from autopar.errors import InputError
from autopar.ir.program import Program, Value
from autopar.pipeline.schedule import ActionKind, PipelineSchedule
from autopar.pipeline.transfers import with_messages
from autopar.plan.pipeline import Pipeline
from autopar.plan.plan import Plan
from autopar.plan.stages import differentiated
from autopar.runtime.call_agreement import CallAgreement
from autopar.runtime.computed_gradients import ComputedGradients, hooks_once, set_aside
from autopar.runtime.gradient_norm import norm_of
from autopar.runtime.input_parts import InputParts
from autopar.runtime.pipeline import CrossingPart, PipelineRank, PipelineStep, StageRun, tied_gradients
from autopar.runtime.random import saves_for_checkpoint
from autopar.runtime.rematerialize.recompute import Tensors
from autopar.runtime.world import Context

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModule:
    """A stage on this rank: its module and program, and the parts that it receives and sends."""

    module: ParallelModule
    program: Program
    received: tuple[CrossingPart, ...]
    sent: tuple[CrossingPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineParts:
    """A rank's view of its pipeline: its own stages by number, and the whole program of a micro-batch, with the inputs that the
    rank has.
    """

    pipeline: Pipeline
    rank: PipelineRank
    program: Program
    inputs: tuple[str, ...]
    stages: Mapping[int, StageModule]
    loss: int  # which of the model's outputs is the loss

    @property
    def outputs(self) -> list[Value]:
        """The outputs of a micro-batch."""
        return [self.program.values[output.value] for output in self.program.outputs]

    @property
    def saved(self) -> set[str]:
        """The names in the state dicts of all ranks."""
        held = (*self.program.parameters, *self.program.buffers)
        return {name for stored in held if stored.persistent for name in stored.names}

    def __deepcopy__(self, memo: dict[int, object]) -> PipelineParts:
        """A copy for the same plan and rank, with its own modules."""
        copied = {number: replace(one, module=copy.deepcopy(one.module, memo)) for number, one in self.stages.items()}
        return replace(self, stages=copied)


class PipelineState(ModuleState):
    """The state of a module in stages: its stages, what they run, and facts about the last call."""

    def __init__(
        self,
        stages: PipelineParts,
        plan: Plan,
        signature: Signature,
        context: Context,
        seed: int,
        steps: Steps | None,
        inputs: InputParts,
    ) -> None:
        super().__init__(plan, signature, context, seed, (), steps, inputs)
        self.stages = stages
        self.compiler: Compiler | None = None  # once `compile` was called
        self.differentiated = False  # whether the loss of the last call was
        order, seconds = stages.pipeline.order, stages.pipeline.seconds
        self.trained, self.forwards = with_messages(order, seconds), with_messages(_forwards(order), seconds)
        with_gradient = differentiated(stages.program, stages.program.outputs[stages.loss].value)
        self.tied = {name: of for name, of in sorted(stages.pipeline.tied.items()) if name in with_gradient}

    def __deepcopy__(self, memo: dict[int, object]) -> PipelineState:
        """A copy with its own stages, which are compiled again."""
        copied = super().__deepcopy__(memo)
        assert isinstance(copied, PipelineState)
        copied.stages, copied.compiler = copy.deepcopy(self.stages, memo), None
        return copied


class PipelineModule(ParallelModule):
    """One rank's stages of a parallel model in a pipeline, built by `autopar.parallelize`.

    Every rank of the mesh calls it with the global batch. A call with gradients also runs the backward, and `loss.backward()`
    hands its gradients over; `step` does both at once. `code` is that of the rank's first stage.
    """

    autopar: PipelineState

    def __init__(self, tensors: Mapping[str, torch.Tensor], state: PipelineState) -> None:
        first, *_ = state.stages.stages.values()
        program = state.stages.program
        super().__init__(first.module.graph, _stored_by(program, tensors), tensors, state)
        state.draws = any(is_random(op, fit_of(program, op.name)) for op in program.ops)  # on all ranks alike
        for stage in state.stages.stages.values():
            stage.module.__dict__.update({name: self.__dict__[name] for name in HELD})

    @eager
    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the model on the *global* batch, by the plan's schedule; every rank passes the same arguments.

        Scalars are returned on every rank. Other outputs are returned on the ranks of the last stage, and None elsewhere; with
        gradients they are None on all ranks, since then no rank holds more than one micro-batch's.

        With gradients, forwards and backwards alternate: both have run when the call returns. `loss.backward()` adds the
        gradients to `.grad`, times any factor that the loss was multiplied by; until then they are held separately.

        Raises:
            InputError: the arguments do not match the planned call; or it is inside of a checkpoint that is not reentrant.
            RankError: a stage failed, here or on another rank.
        """
        if saves_for_checkpoint():
            raise InputError(
                "pipeline stages cannot be called in torch.utils.checkpoint: the call runs its backward, which would repeat it",
                fix='call it outside, and plan with recompute="blocks"; or checkpoint(..., use_reentrant=True)',
            )
        found: list[Sequence[torch.Tensor | None]] = []
        with self.autopar.stages.rank.failures.watched(), self.autopar.rng_state.repeatable(self.training):
            serving, tensors = self._begun("a call", args, kwargs)
            if not torch.is_grad_enabled():
                serving._run(serving.autopar.forwards, tensors, lambda outputs: found.append(outputs))
                return serving.autopar.signature.rebuild(serving.joined(found))

            def loss(outputs: Tensors) -> torch.Tensor:
                found.append([None if output.ndim else output.detach() for output in outputs])
                return self._scaled(outputs[serving.autopar.stages.loss])

            computed, trained = self._computed(lambda: serving._accumulate(tensors, loss, self.autopar.agreement))
            joined = serving.joined(found)
        scalars = {place: output for place, output in enumerate(joined) if output is not None and output.is_floating_point()}
        for place, output in computed.attached(scalars, serving.autopar.stages.loss, trained).items():
            joined[place] = output
        return serving.autopar.signature.rebuild(joined)

    def _hooks_once(self) -> AbstractContextManager[None]:
        """Around a step: hooks see the sum over all micro-batches, and over all stages that share a parameter."""
        return hooks_once(self.parameters(), self.autopar.stepped)

    def _computed(self, step: Callable[[], None]) -> tuple[ComputedGradients, list[nn.Parameter]]:
        """Run a step; returns the gradients that it accumulates, and their parameters."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        with set_aside(trained):
            step()
            gradients = [parameter.grad for parameter in trained]
        scale = self._scaled(torch.ones((), device=self.autopar.context.device))
        return ComputedGradients(gradients, scale=scale, told=partial(setattr, self.autopar, "differentiated", True)), trained

    @eager
    def step(self, *args: object, **kwargs: object) -> torch.Tensor:
        """Forward and backward of a training step on the *global* batch, by the plan's schedule; every rank gets the loss.

        Gradients are accumulated in `.grad`; those of parameters that several stages read are summed. With `inputs="sharded"` a
        rank passes its part of the batch, the same in all stages for one `data_rank`.

        Args:
            args, kwargs: those of the module's own call.

        Raises:
            InputError: the arguments do not match the planned call.
            RankError: a stage failed, here or on another rank.
        """
        losses: list[torch.Tensor] = []

        with self.autopar.stages.rank.failures.watched():
            serving, tensors = self._begun("a step", args, kwargs)

            def loss(outputs: Tensors) -> torch.Tensor:
                found = outputs[serving.autopar.stages.loss]
                losses.append(found.detach())
                return self._scaled(found)

            with self._hooks_once():
                serving._accumulate(tensors, loss, self.autopar.agreement)
            total = torch.stack(losses).sum() if losses else None
            return self._from_last(total, self.autopar.stages.outputs[self.autopar.stages.loss].dtype)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the programs of this rank's stages in place, by `torch.compile` with these arguments; all ranks call it.

        Each is the whole program of one micro-batch, with its backward; the schedule's actions and messages stay outside.
        Gradients accumulated over micro-batches are reduced when the step ends: the last forward, whose graph would take the
        sum of the others, may run before that sum exists.

        Args:
            args, kwargs: as without stages.

        Raises:
            InputError: the schedule has backwards in halves.
        """
        pipeline = self.autopar.stages.pipeline
        if pipeline.order.deferred:
            what = f"the schedule {pipeline.schedule} defers gradients of weights, which a compiled backward makes at once"
            raise InputError(what, fix="plan with compiled=True, which chooses another; or train it as it is")
        self._compile_stages(partial(torch.compile, *args, **self._compiling(args, kwargs)))

    def _compile_stages(self, compiler: Compiler) -> None:
        self.autopar.compiler = compiler
        for stage in self.autopar.stages.stages.values():
            stage.module.autopar.compiled_program = compiler(stage.module.autopar.program)
            stage.module.autopar.accumulator.defer_all = True

    def joined(self, outputs: Sequence[Sequence[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        """The last stage's outputs of all micro-batches, joined for the user."""
        parts = self.autopar.stages
        last = parts.stages.get(parts.pipeline.order.stages - 1)
        joined: list[torch.Tensor | None] = [*last.module.joined(outputs)] if last else [None] * len(parts.outputs)
        for place, output in enumerate(parts.outputs):
            if not output.shape:
                joined[place] = self._from_last(joined[place], output.dtype)
        return joined

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> _IncompatibleKeys:
        """Load this rank's tensors, from those of the whole model or of its stages only.

        Raises RuntimeError as every module does; for a whole model's tensors, on every rank for everything missing.
        """
        elsewhere = self.autopar.stages.saved.difference(self.state_dict())
        own = {name: given for name, given in state_dict.items() if name not in elsewhere}
        lacking = sorted(elsewhere.difference(state_dict)) if len(own) < len(state_dict) else []
        missing, unexpected = super().load_state_dict(own, strict, assign)
        if strict and lacking:
            names = ", ".join(f'"{name}"' for name in lacking)
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(self).__name__}: Missing key(s) in state_dict: {names}. "
            )
        return _IncompatibleKeys([*missing, *lacking], unexpected)

    def gather(self, results: object) -> Any:
        """Gather the results of a call without gradients, which the last stage has, whole on every rank."""
        order = self.autopar.stages.pipeline.order
        return self.autopar.stages.rank.results_from(super().gather(results), order.rank_of[order.stages - 1])

    def _accumulate(
        self, inputs: Sequence[torch.Tensor], loss: Callable[[Tensors], torch.Tensor | None], agreement: CallAgreement
    ) -> None:
        """Run a step by the schedule; `loss` is called on the ranks of the last stage."""
        agreement.settle()
        order, held = self.autopar.stages.pipeline.order, dict(self.named_parameters(remove_duplicate=False))
        tied = [
            (held.get(name), sorted({order.rank_of[stage] for stage in of}, key=[order.rank_of[s] for s in of].index))
            for name, of in self.autopar.tied.items()
        ]
        with tied_gradients([(p, ranks) for p, ranks in tied if len(ranks) > 1], self.autopar.stages.rank), torch.enable_grad():
            self._run(self.autopar.trained, inputs, loss)

    def _gradient_norm(self, parameters: Mapping[str, nn.Parameter], norm_type: float) -> torch.Tensor:
        order, rank = self.autopar.stages.pipeline.order, self.autopar.stages.rank
        elsewhere = {name for name, of in self.autopar.stages.pipeline.tied.items() if order.rank_of[of[0]] != rank.index}
        counted = (parameter for name, parameter in parameters.items() if name not in elsewhere)
        return rank.norm(norm_of(counted, norm_type), norm_type)

    def _begun(
        self, kind: str, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[PipelineModule, Sequence[torch.Tensor]]:
        """The stages that serve a call, and its checked inputs, after the ranks have compared theirs."""
        after = " after loss.backward()" if self.autopar.differentiated else ""
        serving, tensors = self._agreed(kind + after, lambda: self._bound(args, kwargs))
        self.autopar.agreement.settle()
        self.autopar.differentiated = False
        assert isinstance(serving, PipelineModule), "stages are served by stages"
        if self.autopar.compiler and serving.autopar.compiler is not self.autopar.compiler:
            serving._compile_stages(self.autopar.compiler)
        return serving, tensors

    def _run(
        self, schedule: PipelineSchedule, tensors: Sequence[torch.Tensor], loss: Callable[[Tensors], torch.Tensor | None]
    ) -> None:
        """Run this rank's actions and messages of a schedule on the micro-batches of a batch."""
        parts, state = self.autopar.stages, self.autopar
        given = [dict(zip(parts.inputs, part, strict=True)) for part in self._parts(tensors)]
        first = state.rng_state.call

        def runs(stage: StageModule) -> Callable[[int, Tensors], Tensors]:
            taken = [value.name for value in stage.program.inputs]

            def forward(k: int, received: Tensors) -> Tensors:
                own = given[k] | {part.name: tensor for part, tensor in zip(stage.received, received, strict=True)}
                stage.module.autopar.rng_state.call = first + k
                stage.module.autopar.rng_state.seed = state.rng_state.seed
                once = stage.module._once if stage.sent else stage.module._checked  # only the last one has what was assumed
                outputs: Tensors = once([own[name] for name in taken])
                return outputs

            return forward

        def begins(module: ParallelModule) -> Callable[[], None] | None:
            shares = module.autopar.compiled_program and module.autopar.shared_weights and torch.is_grad_enabled()
            return module._share_weights if shares else None

        stages = {
            number: StageRun(
                begin=begins(stage.module),
                forward=runs(stage),
                received=stage.received,
                sent=stage.sent,
                accumulator=stage.module.autopar.accumulator,
                deferred=stage.module.autopar.deferred,
            )
            for number, stage in parts.stages.items()
        }
        for stage in parts.stages.values():
            stage.module.training = self.training
        PipelineStep(schedule, stages, parts.rank, loss).run()
        state.rng_state.advance(len(given), draws=state.draws)

    def _from_last(self, tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """A scalar of the last stage's ranks, on every rank."""
        order = self.autopar.stages.pipeline.order
        mine = torch.zeros((), dtype=dtype, device=self.autopar.context.device) if tensor is None else tensor.detach().clone()
        return self.autopar.stages.rank.from_rank(mine, order.rank_of[order.stages - 1])


def _forwards(order: PipelineSchedule) -> PipelineSchedule:
    """The schedule with only its forwards."""
    return PipelineSchedule(
        ranks=tuple(tuple(one for one in actions if one.kind == ActionKind.FORWARD) for actions in order.ranks)
    )


def _stored_by(program: Program, tensors: Mapping[str, torch.Tensor]) -> Program:
    """The tensors of a program that a rank stores, in the program's order, as a program without ops."""
    parameters, buffers = (
        tuple(stored for stored in held if stored.value.name in tensors) for held in (program.parameters, program.buffers)
    )
    return Program(ops=(), inputs=(), parameters=parameters, buffers=buffers, outputs=())


__all__ = ["PipelineModule", "PipelineParts", "PipelineState", "StageModule"]
