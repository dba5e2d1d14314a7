"""Runs a module's emitted program: one micro-batch after the other, forward or both passes, eager or compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import fx

from autopar.capture.returned import ReturnSpec
from autopar.codegen.compiled import Untraced, around, compiling, eager
from autopar.codegen.graph_module import GraphModule
from autopar.codegen.module_state import ModuleState
from autopar.codegen.profiled import ProfiledRun
from autopar.runtime.call_agreement import CallAgreement
from autopar.runtime.first_message import runs_eagerly
from autopar.runtime.profiler_ranges import profiling
from autopar.runtime.rematerialize.policy import recomputing
from autopar.runtime.storage import to_dtensor


class ProgramModule(GraphModule):
    """One rank's emitted program over its stored tensors."""

    autopar: ModuleState

    @around
    def _accumulate(
        self,
        inputs: Sequence[torch.Tensor],
        loss: Callable[[Sequence[torch.Tensor]], torch.Tensor | None],
        agreement: CallAgreement,
    ) -> None:
        parts, accumulator = self._parts(inputs), self.autopar.accumulator
        with Untraced(accumulator.step):
            if self.autopar.shared_weights is not None and compiling():
                self._share_weights()
            for part in parts:
                with Untraced(nullcontext if part is parts[-1] else accumulator.no_sync):
                    self._differentiate(self._checked(part), loss, agreement)

    @eager
    def _differentiate(
        self,
        outputs: Sequence[torch.Tensor],
        loss: Callable[[Sequence[torch.Tensor]], torch.Tensor | None],
        agreement: CallAgreement,
    ) -> None:
        """The backward of one micro-batch."""
        found = loss(outputs)
        agreement.settle()
        self.autopar.accumulator.hand_over()
        if found is not None:
            found.backward()  # type: ignore[no-untyped-call]

    @eager
    def _share_weights(self) -> None:
        """Compute the weights that all micro-batches of this step share, before the first of them is traced."""
        with self.autopar.accumulator.no_sync():
            fx.Interpreter(self, graph=self.autopar.shared_weights).run()

    @around
    def _outputs(self, inputs: Sequence[torch.Tensor], agreement: CallAgreement) -> list[torch.Tensor | None]:
        outputs = [*map(self._checked, self._parts(inputs))]
        agreement.settle()
        return self.joined(outputs)

    @eager
    def joined(self, outputs: Sequence[Sequence[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        """The outputs of all micro-batches, joined for the user; None for those that were not kept."""
        steps, state = self.autopar.steps, self.autopar
        return [
            to_dtensor(result, output.shape, output.layout, state.context) if output.split and result is not None else result
            for result, output in zip(steps.join(outputs) if steps else outputs[0], state.outputs, strict=True)
        ]

    @eager
    def _parts(self, inputs: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        """The inputs, one sequence for each micro-batch."""
        if self.autopar.steps is None:
            return [inputs]
        paths = [planned.path for planned in self.autopar.signature.tensors]
        return [*self.autopar.steps.parts(self, inputs, lambda n, part: self.autopar.inputs.whole(paths[n], part))]

    @around
    def _checked(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The forward of one micro-batch, with its assumptions checked."""
        outputs = self._once(inputs)
        if self.autopar.signature.returned.assumed:
            _check(self.autopar.signature.returned, outputs)
        return outputs

    @around
    def _once(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The forward of one micro-batch: this rank's part of the outputs."""
        self.autopar.rng_state.advance(draws=self.autopar.draws)
        program = self.autopar.compiled_program or self.autopar.program
        return program(self, inputs) if self.autopar.traceable else self._untraced(inputs)

    @eager
    def _untraced(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.autopar.program(self, inputs)

    def _emitted(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        runs_eagerly()
        return list(ProfiledRun(self).outputs(inputs) if profiling() else self.emitted(*inputs))


def run_program(module: ProgramModule, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a module's emitted program, the part that `torch.compile` traces; its backward may recompute."""
    if not (module.autopar.recomputes and torch.is_grad_enabled()):
        return module._emitted(inputs)
    if torch.compiler.is_compiling():
        return list(recomputing(module.emitted, *inputs))
    with module.autopar.rematerializer.active():
        return module._emitted(inputs)


@eager
def _check(returned: ReturnSpec, outputs: Sequence[torch.Tensor]) -> None:
    """Raise if an assumption fails: every rank has these scalars whole, so all of them raise."""
    returned.check(outputs)
