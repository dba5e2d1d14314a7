"""The module that the user gets: an `fx.GraphModule` that is called, saved and trained like the original.

Parameters stand under their original names (ties, unused ones and the persistence of buffers as in the original); a call is
checked against the planned one and its results are put back into the original's structure.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import fx, nn

from autopar.capture import Signature
from autopar.codegen.emit import identifier
from autopar.errors import InputError
from autopar.ir import Program
from autopar.layout import Layout
from autopar.plan import Plan
from autopar.runtime.again import Anew
from autopar.runtime.agreement import check_alike
from autopar.runtime.random import Draws
from autopar.runtime.storage import wrap
from autopar.runtime.world import Context

HELD = ("_modules", "_parameters", "_buffers")  # what torch keeps of a module apart from its attributes


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """One output: its whole shape, how the graph leaves it, and whether the user gets it as a DTensor."""

    shape: tuple[int, ...]
    layout: Layout
    split: bool


class State:
    """What a parallel module keeps beside its parameters: `axes.NAME` for every mesh axis, random draws, what is made anew."""

    def __init__(
        self, plan: Plan | None, signature: Signature, context: Context, seed: int, outputs: Sequence[Returned]
    ) -> None:
        self.plan, self.signature, self.context, self.outputs = plan, signature, context, outputs
        self.draws, self.anew = Draws(seed), Anew()
        self.checked = False
        self.other: Callable[[ParallelModule], ParallelModule | None] | None = None  # makes the module of the other mode
        self.mode = True  # `training` when the model was captured
        self.twin: ParallelModule | None = None
        self.axes = SimpleNamespace(**{identifier(axis.name): axis for axis in context.axes})

    def __deepcopy__(self, memo: dict[int, object]) -> State:
        """A state with random draws of its own, and nothing of the forward that runs."""
        copied = copy.copy(self)
        copied.draws, copied.anew = copy.deepcopy(self.draws, memo), copy.deepcopy(self.anew, memo)
        return copied


class ParallelModule(fx.GraphModule):
    """One rank's part of a parallel model; made by `autopar.parallelize`. All that is not the user's is in `autopar`."""

    autopar: State

    def __init__(self, graph: fx.Graph, program: Program, tensors: Mapping[str, torch.Tensor], state: State) -> None:
        super().__init__(nn.Module(), fx.Graph(), "ParallelModule")
        self.autopar = state
        self.graph = graph
        held = (*program.parameters, *program.buffers)
        named = [(name, stored) for stored in held for name in stored.names]
        for name, stored in sorted(named, key=lambda pair: pair[0] != pair[1].names[0]):  # ties last: they make no new order
            _install(self, name, tensors[stored.value.name], stored.persistent)

    def __deepcopy__(self, memo: dict[int, object]) -> ParallelModule:
        """A module with parameters of its own in the same processes; fx would forget all but the graph's own attributes."""
        copied: ParallelModule = type(self).__new__(type(self))
        memo[id(self)] = copied
        return copied._holding(copy.deepcopy(self.__dict__, memo))

    def __copy__(self) -> ParallelModule:
        """A module over the same parameters."""
        copied: ParallelModule = type(self).__new__(type(self))
        return copied._holding(dict(self.__dict__))

    def _holding(self, held: dict[str, Any]) -> ParallelModule:
        """This new module with the attributes of another; what the user calls "graph" must not hide fx's graph."""
        self.__dict__.update(held | {name: {} for name in HELD})
        self.graph = held["_graph"]
        self.__dict__.update({name: held[name] for name in HELD})
        return self

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "a parallel module cannot be pickled: it holds this rank's part and the groups of running processes",
            fix="save its state_dict() with torch.distributed.checkpoint, and its plan with parallel.autopar.plan.save(path)",
        )

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run a training or evaluation step's forward on the *global* batch; every rank gives the same arguments.

        Scalars come back as plain tensors, outputs that the plan leaves split as DTensors. Raises InputError for arguments
        other than the planned ones.
        """
        tensors = self.autopar.signature.bind(args, kwargs)
        return self.autopar.signature.rebuild(self.run(tensors))

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The program's outputs for its inputs, in its own order."""
        state = self.autopar
        if self.training != state.mode and state.other is not None:
            twin = self._twin(state.other)
            if twin is not self:
                return twin.run(inputs)
        self._check(inputs)
        state.draws.advance()
        with state.anew.active() if torch.is_grad_enabled() else nullcontext():
            results = super().__call__(*inputs)
        return [
            wrap(result, output.shape, output.layout, state.context) if output.split else result
            for result, output in zip(results, state.outputs, strict=True)
        ]

    def _twin(self, make: Callable[[ParallelModule], ParallelModule | None]) -> ParallelModule:
        """The module of the other mode, over the same tensors: this one itself where only flags differ."""
        state, own = self.autopar, dict(self.named_parameters())
        if state.twin is None or any(own[name] is not held for name, held in state.twin.named_parameters()):
            state.twin = make(self) or self
        return state.twin if state.twin is self else state.twin.train(self.training)

    def _check(self, tensors: Sequence[torch.Tensor]) -> None:
        device, signature = self.autopar.context.device, self.autopar.signature
        for planned, tensor in zip(signature.tensors, tensors, strict=True):
            if tensor.device.type != device.type:
                raise InputError(
                    f"argument {planned.path} is on {tensor.device}, but the model runs on {device}",
                    fix=f"move the batch: {planned.path}.to({str(device)!r})",
                )
        if torch.is_autocast_enabled(device.type):
            raise InputError(
                "a parallel module was called under torch.autocast, which its plan does not know",
                fix='parallelize with precision="bf16-mixed", and call the module outside of autocast',
            )
        if not self.autopar.checked:
            self._check_filled()
            check_alike(dict(zip((p.path for p in signature.tensors), tensors, strict=True)), self.autopar.context)
            self.autopar.checked = True

    def _check_filled(self) -> None:
        held = (*self.named_parameters(), *self.named_buffers())
        if empty := [name for name, tensor in held if tensor.is_meta]:
            more = f" and {len(empty) - 1} more are" if len(empty) > 1 else " is"
            raise InputError(
                f"{empty[0]}{more} on meta: there are no numbers to compute with",
                names=", ".join(empty[:8]) + (", ..." if len(empty) > 8 else ""),
                fix="load a checkpoint into the parallel module, or call autopar.initialize(parallel, model)",
            )


def _install(root: nn.Module, name: str, tensor: torch.Tensor, persistent: bool) -> None:
    """Register a parameter or buffer under its dotted name, with plain modules on the way.

    Not by torch's own functions, which refuse names that an `fx.GraphModule` has, like "graph".
    """
    *path, leaf = name.split(".")
    for part in path:
        root = root._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
    if isinstance(tensor, nn.Parameter):
        root._parameters[leaf] = tensor
    else:
        root._buffers[leaf] = tensor
        if not persistent:
            root._non_persistent_buffers_set.add(leaf)
