"""Capture: turns an ordinary module into a Program, and its call into a Signature.

meta_copy    a copy without weights, on the meta device
closures     functions in attributes of the model, copied with the modules that they refer to
nested       the paths of leaves in what users pass and get
signature    how the model is called
returned     what it returns
static_inputs inputs that are sizes, as literals
assumptions  values that the user vouches for, and the places that asked for them
decided      buffers of integers, or of one number, that decide a size or a branch
python_places where Python code keeps state between calls, in the model's modules and elsewhere
python_state  the state that it keeps there, which a graph would freeze
next_call    whether a second call gives the same program, if the first left state behind
empty_selections  tests whether a mask selects anything, answered as if it did
implications whether a selection below such a test is empty whenever the test says so
equal_programs  whether two programs compute the same
trace        torch.export, guarded against what it would drop silently
assigned_buffers  buffers that forward replaces, as writes into them
custom_functions  an autograd.Function as its forward under autograd, or as an operator
checkpoint_functions  one that runs a callable again in its backward, as a call of it
registered_tensors  parameters and buffers reached by other paths than the modules that register them
joined_selections  rows that a mask selects, joined with others and scattered
cpu_tensors  tensors that forward makes on the CPU, from numbers or by operators
repairs      assignments under a condition on values, as `where`
lower        the exported graph as a Program
emission     an operator of the graph, in the context of its region
selection    rows selected by a mask, whose number is unknown, and the operators that use them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from autopar.capture.assumptions import NOTHING, Assumptions
from autopar.capture.decided import Decided
from autopar.capture.empty_selections import Answered, Nothing, by_turns, none
from autopar.capture.equal_programs import same
from autopar.capture.lower import lower
from autopar.capture.meta_copy import MetaCopy, skeleton
from autopar.capture.next_call import kept
from autopar.capture.python_places import taken_back
from autopar.capture.signature import ModelCall, Signature, read_call
from autopar.capture.trace import Traced, branching, trace
from autopar.errors import CaptureError
from autopar.ir.dynamic_dims import InputDim
from autopar.ir.program import OUTPUT, Program

__all__ = ["Assumptions", "Captured", "Signature", "capture"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A model as a program, and how the user calls it.

    `training` is the mode in which it was captured, `kept` the attributes that forward sets once, `constants` the tensors from
    outside the model whose numbers are in the program, `decided` the integer buffers that decide a size or a branch, with their
    values.
    """

    program: Program
    signature: Signature
    training: bool = True
    kept: frozenset[str] = frozenset()
    constants: tuple[torch.Tensor, ...] = ()
    decided: Decided = field(default_factory=Decided)


def capture(
    model: nn.Module,
    sample_input: object,
    dtype: torch.dtype | None = None,
    places: Mapping[InputDim, int] | None = None,
    assumptions: Assumptions = NOTHING,
) -> Captured:
    """Trace a model in its current mode on a sample of the global batch (a tensor, a tuple of arguments, or a mapping).

    Neither the model nor the sample is changed, moved or computed with.

    Args:
        dtype: cast floating tensors of the program, as `model.to(dtype)` would; the signature keeps the sample's dtypes.
        places: new sizes for these dims of the sample.
        assumptions: the user's assumptions on values.

    Raises:
        CaptureError: something cannot be captured; names the line of the model.
        InputError: the sample does not fit `forward`.
    """
    call = read_call(model, sample_input, assumptions.static).at(places or {})
    if assumptions.inference:
        _refuse_training(model, call)
    copied = skeleton(model, dtype, frozen=assumptions.inference)
    held = set(copied.first)
    for path, leaf in call.leaves:
        if path in held and isinstance(leaf, torch.Tensor):
            raise CaptureError(
                f"forward's argument {path} has the name of a parameter or buffer of the model", fix="rename one of them"
            )
    cast = call.to(dtype) if dtype else call
    values = {**copied.values, **assumptions.buffers}
    with taken_back(copied.module):
        program, traced, once = _captured(copied, cast, assumptions, values)
    decided = Decided.of(traced.left.decided, {name: values[name] for name in traced.left.decided}, program)
    signature = call.signature(traced.returned)
    return Captured(
        program=program,
        signature=signature,
        training=model.training,
        kept=once,
        constants=traced.left.constants,
        decided=decided,
    )


def _captured(
    copied: MetaCopy, call: ModelCall, assumptions: Assumptions, values: Mapping[str, torch.Tensor]
) -> tuple[Program, Traced, frozenset[str]]:
    """The program of a call, its trace, and the attributes that forward sets once."""
    traced = trace(copied.module, call, assumptions, values)
    program = lower(traced, copied, call)
    copied.shared.refuse_changed(program, traced.left.constants)
    answered = traced.left.answered
    if answered.asked:

        def left_out(nothing: Nothing) -> tuple[Program, Program]:
            other = trace(copied.module, call, assumptions, values, answered, nothing)
            return lower(traced, copied, call, answered.without(nothing)), lower(other, copied, call)

        _refuse_branches(type(copied.module).__name__, answered, left_out)
    if clash := [output.path for output in program.outputs if OUTPUT + output.path in program.values]:
        raise CaptureError(f"{OUTPUT}{clash[0]} is a value of the model, and the name of its result", fix="rename one of them")

    def same(following: Traced) -> bool:
        return lower(following, copied, call).hash == program.hash

    return program, traced, kept(traced, lambda: trace(copied.module, call, assumptions, values), same)


def _refuse_branches(model: str, answered: Answered, left_out: Callable[[Nothing], tuple[Program, Program]]) -> None:
    """Raise CaptureError unless forward, where nothing is selected, only skips work on no rows.

    `left_out` returns the program without what is selected below some questions, and the one traced with these answered "none".
    """
    try:
        if all(answered.empty) and all(same(*left_out(nothing)) for nothing in (none, by_turns)[: len(answered.asked)]):
            return
    except CaptureError:
        pass
    raise branching(model, answered.asked[0])


def _refuse_training(model: nn.Module, call: ModelCall) -> None:
    """Raise CaptureError for a model or a sample that is set up for training."""
    if trained := [path or type(model).__name__ for path, module in model.named_modules() if module.training]:
        raise CaptureError(
            f"{trained[0]} is in training mode, which inference has not", fix="model.eval() before it is planned"
        )
    for path, leaf in call.leaves:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise CaptureError(f"the sample's {path} requires a gradient, and inference computes none", fix="detach it")
