"""Runs torch.export, and explains its errors in terms of the user's model."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from autopar.capture import source_location
from autopar.capture.assumptions import NOTHING, Answers, Assumptions
from autopar.capture.empty_selections import UNASKED, Answered, AskedForRows, EmptySelections, Nothing, some
from autopar.capture.returned import ReturnSpec, read_result
from autopar.capture.signature import ModelCall
from autopar.capture.static_inputs import as_literals
from autopar.capture.trace_guards import Traces, watched
from autopar.errors import AutoparError, CaptureError

_BRANCH = (
    "express the choice with torch.where, or decide it outside of forward; static=[...] makes an input of integers a constant, "
    'and assume={"model.py:12": False} a line whose answer is always the same'
)
_DEVICE = (
    "make new tensors on the device of an input (device=x.device), or register them as buffers; parameters and modules in "
    "nn.ParameterList, nn.ModuleList and the like, not in lists"
)
_CAST = "give inputs the dtypes that the model computes with, or cast them in forward: x.to(dtype)"
_OF_DTYPES = re.compile(r"dtype|scalar type|type \(|tensors used as indices")  # in torch's errors about operand dtypes
_FAKE = "give it one that makes an empty tensor of the result's shape: @op.register_fake, or torch.library.register_fake"
_NO_FAKE = re.compile(  # in torch's errors about operators of other libraries that it cannot trace
    r"no fake impl registered for <CustomOpDef\(([\w:.]+)\)|([\w:.]+): attempted to run this operator with Meta tensors"
    r"|Could not run '(?!aten)([\w:.]+)' with arguments from the 'Meta' backend"
)
_SIZE = (
    "keep every size fixed: torch.where, masked_fill or padding instead of selecting a varying number of elements; "
    "or reduce what one mask selects, x[mask], by a sum, a mean or a loss over its rows; static=[...] makes an input "
    "of integers a constant"
)
_NUMBER = re.compile(r"Size-like symbols: u")  # in torch's errors about branches on a number of elements
_SAID = {  # torch's error: what it means, and the way out
    "fake tensor in the exported program constant's list": (
        "forward uses a tensor that is neither an argument, nor in a module, nor made in forward",
        "register it as a buffer",
    ),
    "at least two devices, meta and cpu": (
        "forward uses a CPU tensor that it makes there, or that is neither an argument nor in a module",
        _DEVICE,
    ),
    "Cannot cast tensor(": (
        "forward asks a tensor for its value, which a graph does not have",
        "keep it as a number of Python, or compute with the tensor",
    ),
    ".numpy() is not supported for tensor subclasses": (
        "forward converts a tensor to a NumPy array, and a graph has no values to convert",
        "compute with functions of torch, or in an operator of your own: torch.library.custom_op",
    ),
    "The only supported seed types are": (
        "forward seeds Python's random generator with a tensor, whose value a graph does not have",
        "draw with torch (torch.rand), or seed with a Python number",
    ),
    "FlexAttention is only supported on": (
        "flex_attention is not an operator that can be planned",
        "call scaled_dot_product_attention with a mask",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """The exported graph, whose flat outputs are the tensors of `returned`, and the state that its call left behind."""

    exported: torch.export.ExportedProgram
    returned: ReturnSpec
    left: Traces


def trace(
    module: nn.Module,
    call: ModelCall,
    assumptions: Assumptions = NOTHING,
    values: Mapping[str, torch.Tensor] | None = None,
    answered: Answered = UNASKED,
    nothing: Nothing = some,
) -> Traced:
    """Export a module on the meta device; warns once of results that are left out, raises CaptureError with the line.

    With the questions `answered` in an earlier tracing, `nothing` says for each whether nothing is selected below it.
    """
    lines = answered.lines
    while True:
        try:
            return _traced(module, call, assumptions, values or {}, EmptySelections(lines=lines, nothing=nothing))
        except AskedForRows as asked:
            lines |= asked.lines


def _traced(
    module: nn.Module, call: ModelCall, assumptions: Assumptions, values: Mapping[str, torch.Tensor], rows: EmptySelections
) -> Traced:
    """The module exported once; raises AskedForRows if torch needs to know of more selections whether they have rows."""
    found: list[tuple[ReturnSpec, tuple[str, ...]]] = []

    def flatten(_module: nn.Module, _args: object, result: object) -> tuple[torch.Tensor, ...]:
        tensors, returned, lost = read_result(result)
        asked, assumed = answers.taken()
        found.append((replace(returned, assumed=assumed), lost))
        return (*tensors, *asked)

    def spelt(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return as_literals(places, args, kwargs)

    places, answers = call.static_places, Answers(assumptions.assume)
    hooks = [
        module.register_forward_hook(flatten),
        module.register_forward_pre_hook(spelt, prepend=True, with_kwargs=True),
    ]
    try:
        with (
            watched(module, answers, values, rows) as made,
            _quiet(),
            _use_lazy_graph_module(True),  # no code is generated for graphs that nobody runs
            torch.device("meta"),
            torch.enable_grad(),
        ):
            exported = torch.export.export(module, call.args, call.kwargs, strict=False)
    except AutoparError:
        raise
    except Exception as error:
        if asked := rows.asked_for(error):
            raise AskedForRows(asked) from None
        raise explained(error, type(module).__name__) from error
    finally:
        for hook in hooks:
            hook.remove()
    returned, lost = found[-1]
    answers.tell_unused()
    if lost:
        warnings.warn(f"{type(module).__name__} returns values that are not tensors; left out: {', '.join(lost)}", stacklevel=4)
    return Traced(exported=exported, returned=returned, left=made[0])


def explained(error: Exception, model: str) -> AutoparError:
    """The CaptureError for an error from torch.export; our own errors inside it are returned unchanged."""
    ours = next((link for link in source_location.chain(error) if isinstance(link, AutoparError)), None)
    if ours is not None:
        return ours
    at = source_location.from_error(error)
    kinds = {type(link).__name__ for link in source_location.chain(error)}
    said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    for part, (what, fix) in _SAID.items():
        if part in said:
            return CaptureError(what, at=at, fix=fix)
    if kinds & {"DynamicOutputShapeException"} or _NUMBER.search(str(error)):
        return CaptureError(f"a shape in {model} depends on the values of a tensor", at=at, fix=_SIZE)
    if kinds & {"GuardOnDataDependentSymNode", "DataDependentOutputException"} or "data-dependent" in str(error).lower():
        return branching(model, at)
    if unknown := next((found for link in source_location.chain(error) if (found := _NO_FAKE.search(str(link)))), None):
        name = next(filter(None, unknown.groups()))
        fix = "torch has none for it: write what it computes with other operators" if name.startswith("aten") else _FAKE
        return CaptureError(f"{name} has no fake implementation, so the shapes of its results are unknown", at=at, fix=fix)
    fix = "call the model on this sample without autopar: if it fails there, too, mend it there; if not, see the __cause__"
    if "FakeTensorDeviceMismatchError" in kinds or "on the same device" in said:
        fix = _DEVICE
    elif _OF_DTYPES.search(said):
        fix = _CAST
    return CaptureError(f"{model} cannot be captured: {said}", error=type(error).__name__, at=at, fix=fix)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's output, logs and warnings while it traces; output of the model is shown afterwards."""
    names = ("export._trace", "fx.experimental.symbolic_shapes", "_subclasses.fake_tensor")
    loggers = [logging.getLogger(f"torch.{name}") for name in names]
    levels = [logger.level for logger in loggers]
    said = io.StringIO()
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stderr(said):
            warnings.filterwarnings("ignore", module=r"torch\.")
            warnings.filterwarnings("ignore", message=r"The tensor attributes? self\.")  # see `carried_tensors`
            yield
        sys.stderr.write(said.getvalue())
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def branching(model: str, at: str) -> CaptureError:
    """The error for a branch that depends on values."""
    return CaptureError(f"the control flow of {model} depends on the values of a tensor", at=at, fix=_BRANCH)


def varying(what: str, at: str) -> CaptureError:
    """The error for a size or a number that is only known at run time."""
    return CaptureError(f"{what} depends on the values of a tensor", at=at, fix=_SIZE if "shape" in what else _BRANCH)
