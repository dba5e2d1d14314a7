"""Guards around tracing: raise an error for what torch.export would drop silently, and work around what it rejects.

An `autograd.Function` is traced through its forward only, a tensor hook leaves no trace at all, and `torch.tensor([1, 2])` or
`x[[1, 2]]` on the meta device has no numbers. The first becomes an operator if tracing its forward is not enough
(`autopar.capture.custom_functions`), hooks are refused, and the others are built of operators that carry the numbers
(`autopar.capture.literals`). Code that inspects values only to reject them, or to classify a mask, is skipped:
`autopar.capture.assertions`. Embedding bags are written out: `autopar.capture.embedding_bag`.

All of it is one function mode, on top of those of torch.export while the traced module runs. Some functions never reach a mode:
`torch.from_numpy`, the constructor of `torch.autocast` and two queries about it, `torch.is_grad_enabled`, the `apply` of
functions, the transforms of `torch.func` (`autopar.capture.function_transforms`), and functions that draw a Python number
(`autopar.capture.drawn_numbers`). They are replaced for the duration, as is torch's lookup of the line that made a node; other
threads are not affected.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.autograd import grad_mode
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._traceback import CapturedTraceback
from torch.utils.checkpoint import CheckpointFunction

from autopar.capture import (
    assertions,
    autocast,
    checkpoint_functions,
    covariance,
    custom_functions,
    embedding_bag,
    functionalize,
    grad_modes,
    known_lengths,
    known_masks,
    nodes,
    scalar_indices,
    source_location,
    traced_losses,
)
from autopar.capture.assigned_buffers import AssignedBuffers
from autopar.capture.assigned_contents import AssignedContents
from autopar.capture.assumptions import Answers
from autopar.capture.cached_functions import clear_cached_tensors
from autopar.capture.carried_tensors import CarriedTensors
from autopar.capture.cpu_tensors import CpuTensors, asked_of_the_cpu, type_of_the_cpu
from autopar.capture.drawn_numbers import drawing
from autopar.capture.empty_selections import Answered, EmptySelections
from autopar.capture.equal_masks import Masks
from autopar.capture.function_transforms import Transforms
from autopar.capture.held_tensors import HeldTensor, held_tensors
from autopar.capture.known_values import ASKING, READING, KnownValues
from autopar.capture.literals import as_literal, literal, new_literal, with_literals
from autopar.capture.python_state import Changes, Generators, changes, plain_values
from autopar.capture.registered_tensors import RegisteredTensors, StandIns, standing_in
from autopar.capture.repairs import Repairs
from autopar.capture.scalar_indices import INDEXING
from autopar.errors import CaptureError

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@dataclass(frozen=True, slots=True)
class Traces:
    """Effects of a call: state that it changed in Python, tensors that it stored there, names of tensors that it computed with,
    tensors from outside that became literals or have a gradient, the buffers whose values it read, each with a line that read
    it, and its questions about selections.
    """

    changes: Changes
    made: Mapping[str, HeldTensor]
    read: frozenset[str]
    constants: tuple[torch.Tensor, ...]
    trained: tuple[torch.Tensor, ...]
    decided: Mapping[str, str]
    answered: Answered


@contextlib.contextmanager
def watched(
    module: nn.Module, answers: Answers, values: Mapping[str, torch.Tensor], rows: EmptySelections
) -> Iterator[list[Traces]]:
    """Context in which calls of the module run under `Guards`, and what modes do not see can be traced.

    Yields a list to which each call adds its effects. `values` has the values of buffers, by name.
    """
    made: list[Traces] = []
    call: Callable[..., object] = module._call_impl
    generators, registered = Generators(), RegisteredTensors(module)

    @functools.wraps(call)
    def guarded(*args: object, **kwargs: object) -> object:
        before = plain_values(module)
        held = {name: one.tensor for name, one in held_tensors(module).items()}
        known = KnownValues(dict(module.named_buffers()) | held, values)
        carried, buffers, contents = CarriedTensors(module), AssignedBuffers(module), AssignedContents(module)
        guards = Guards(generators, answers, known, carried, rows, registered.stand_ins())
        with guards, guards.of_the_cpu.explained(), custom_functions.intercepted(guards.applied):
            result = call(*args, **kwargs)
            buffers.write()
            contents.refuse()
        guards.repairs.refuse()
        guards.of_the_cpu.refuse_written(f"{type(module).__name__}.forward")
        new = carried.made(pytree.tree_leaves((args, kwargs)))
        left = changes(module, before), new, frozenset(carried.read)
        elsewhere = tuple(guards.of_the_cpu.constants), tuple(guards.of_the_cpu.trained.values())
        made.append(Traces(*left, *elsewhere, known.decided, rows.answered()))
        generators.refuse(f"the end of {type(module).__name__}.forward")
        return result

    module._compiled_call_impl = guarded  # the only hook of torch that runs around a module and its own hooks
    unseen: list[tuple[ModuleType | type, str, Any]] = [
        (torch.autocast, "__init__", _casting_as_the_cpu(torch.autocast.__init__)),
        (torch, "from_numpy", _from_array(torch.from_numpy)),
        (fx.proxy, "CapturedTraceback", source_location.Forwards(CapturedTraceback)),
        *((nn.Module, name, _registering(vars(nn.Module)[name])) for name in ("register_buffer", "__setattr__")),
        *Transforms().replaced(),
        *drawing(),
        (torch, "get_autocast_dtype", asked_of_the_cpu(torch.get_autocast_dtype)),
        (torch, "is_autocast_enabled", asked_of_the_cpu(torch.is_autocast_enabled)),
        (torch, "is_grad_enabled", grad_modes.asking(torch.is_grad_enabled)),
        *grad_modes.replaced(),
    ]
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in unseen]
    clear_cached_tensors(module)
    for owner, name, function in unseen:
        setattr(owner, name, function)
    try:
        yield made
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)
        del module._compiled_call_impl
        clear_cached_tensors(module)
        generators.restore()


class Guards(TorchFunctionMode):
    """Refuses functions in `_REFUSED` and those with a backward of their own, and replaces functions in `_STAND_INS`."""

    def __init__(
        self,
        generators: Generators,
        answers: Answers,
        known: KnownValues,
        carried: CarriedTensors,
        rows: EmptySelections,
        stand_ins: StandIns,
    ) -> None:
        super().__init__()
        self.generators, self.answers, self.known, self.carried, self.rows = generators, answers, known, carried, rows
        self.stand_ins, self.of_the_cpu = stand_ins, CpuTensors()
        self.inside: set[FunctionType] = set()
        self.masks, self.repairs = Masks(), Repairs()
        self.functions: dict[str, Callable[..., object]] = {}  # what is called in place of an autograd.Function
        self.applying = False  # an operator, which applies the function itself

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if torch.compiler.is_dynamo_compiling():  # the body of a torch.cond
            return func(*args, **(kwargs or {}))
        asker = sys._getframe(1)
        frame = source_location.caller(func, asker)
        args, kwargs = standing_in(self.stand_ins, args, kwargs or {})
        read = (*args, *kwargs.values())
        args, kwargs = self.of_the_cpu.moved(args, kwargs, elsewhere=source_location.by_forward(func, asker))
        _refuse_sparse(args, asker)

        def call(function: Callable[..., object], of: tuple[object, ...], given: dict[str, object]) -> object:
            return self.call(function, types, of, given, asker)

        result = self.repairs.result(lambda: self.rows.result(func, args, kwargs, call, asker), frame)
        self.carried.notice(func, read, result)
        return result

    def call(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...],
        given: dict[str, object],
        asker: FrameType,
    ) -> object:
        """The result of a torch function while the model is traced."""
        self.generators.refuse(source_location.of_frame(asker))
        args = autocast.cast(func, args)
        if func is torch._C._set_grad_enabled and _of_checkpoint(asker):
            with torch._C.DisableTorchFunction():  # hidden from torch.export: the planner decides what is recomputed
                torch._C._set_grad_enabled(True)
            return None
        if func in READING and (found := self.known.number(func, args[0], asker)) is not None:
            return found
        if func in ASKING and (answer := self.answers.answer(func, args[0], asker)) is not None:
            return answer
        if _asks(func, args):
            known = assertions.assumed(args[0], asker)
            known = self.repairs.answer(args[0], asker) if known is None else known
            if (known := self.rows.answer(args[0], asker) if known is None else known) is not None:
                return known
        if func in grad_modes.SETTING:
            grad_modes.refuse_frozen(args, given, asker)
        if func == _SETTING_DATA and nodes.same_tensor(*args):
            return None
        if func in _REFUSED:
            what, fix = _REFUSED[func]
            shape = tuple(args[0].shape) if isinstance(args[0], torch.Tensor) else ()
            raise CaptureError(what.format(shape), at=source_location.of_frame(asker), fix=fix)
        if func in INDEXING:
            x, index, *value = args
            if isinstance(x, torch.Tensor) and (at := scalar_indices.places(x, index, self.known.by_sizes)) is not None:
                return INDEXING[func](at, *value)
            args = (args[0], self.masks.behind(args[1]), *args[2:])
            args = (*(self.masks.flat(args[0], args[1]) or args[:2]), *args[2:])
        args = (*args[:1], *(self.masks.first_alike(one) for one in args[1:])) if func in _SELECTING else args
        count = functools.partial(self.known.true_values, frame=asker)
        args = known_masks.located(func, args, count)
        if (chosen := known_masks.selected(func, args, given, count)) is not None:
            return chosen
        if known_masks.put(func, args):
            return None
        if func in _LOCATING and len(args) == 1:
            self.masks.note(args[0], places := self.known.reading(func, args, given, asker))
            return places
        total = functools.partial(self.known.total, frame=asker)
        if (found := known_lengths.as_long_as_known(func, args, given, count, total)) is not None:
            return found
        if func in _STAND_INS:
            return self.known.reading(_STAND_INS[func](func), args, given, asker)
        if isinstance(func, FunctionType) and not types and func not in self.inside:
            return self.enter(func, args, given)
        return self.known.reading(func, args, given, asker)

    def applied(self, function: type[Function], args: tuple[object, ...]) -> object:
        """The result of an `autograd.Function` if tracing its forward alone is not enough: that of an operator, or of the
        callable if the function does no more than run it.

        Raises CaptureError if no operator can call the function.
        """
        if self.applying or function.__module__.partition(".")[0] == "torch":
            return NotImplemented
        if checkpoint := checkpoint_functions.checkpoint_of(function, args):
            with contextlib.suppress(checkpoint_functions.UnknownLeafError):
                return checkpoint.result(args)
        key = f"{id(function)}{[(one.shape, one.requires_grad) if isinstance(one, torch.Tensor) else one for one in args]}"
        if key not in self.functions:
            self.functions[key] = self.function(function, args)
        self.applying = True
        try:
            return self.functions[key](*(one for one in args if isinstance(one, torch.Tensor)))
        finally:
            self.applying = False

    def function(self, function: type[Function], args: tuple[object, ...]) -> Callable[..., object]:
        """The replacement of a function."""
        if custom_functions.by_autograd(function, args):
            return lambda *_: NotImplemented
        if made := custom_functions.as_operator(function, args):
            return made
        raise CaptureError(
            f"the backward of {function.__qualname__} would be lost: it is an autograd.Function, and its gradient is not "
            "autograd's of its forward",
            at=source_location.of_frame(sys._getframe(2)),
            fix="make it an operator with torch.library.custom_op and register_autograd",
        )

    def enter(self, function: FunctionType, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run a torch function written in Python so that the functions that it calls are guarded, too."""
        self.inside.add(function)  # some query modes under another name than `unasked` replaces
        try:
            with self:
                return unasked(function)(*args, **kwargs)
        finally:
            self.inside.remove(function)


def unasked(function: Any) -> Callable[..., object]:
    """A copy of a torch function that skips the query for modes, to which it would be dispatched."""
    names = function.__globals__ | dict.fromkeys(_QUESTIONS, lambda *_: False)
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _refuse_sparse(args: tuple[object, ...], frame: FrameType) -> None:
    """Raise CaptureError for a sparse operand."""
    if any(isinstance(one, torch.Tensor) and one.layout is not torch.strided for one in args):
        fix = "compute with tensor.to_dense(), or gather and scatter_add the rows that its indices name"
        raise CaptureError("forward computes with a sparse tensor", at=source_location.of_frame(frame), fix=fix)


def _asks(func: object, args: tuple[object, ...]) -> bool:
    """Whether a call reads a truth value from a tensor."""
    item = func is torch.Tensor.item and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.bool
    return item or func is torch.Tensor.__bool__


def _of_checkpoint(frame: FrameType | None) -> bool:
    """Whether torch.utils.checkpoint itself entered or left `torch.no_grad`."""
    while frame is not None and frame.f_code.co_filename == grad_mode.__file__:
        frame = frame.f_back
    return frame is not None and frame.f_code is CheckpointFunction.forward.__code__


def _casting_as_the_cpu(original: Callable[..., None]) -> Callable[..., None]:
    """The constructor of `torch.autocast`, which takes "meta" (`x.device.type` while tracing) for the CPU."""

    @functools.wraps(original)
    def made(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    return made


def _registering(original: Callable[..., None]) -> Callable[..., None]:
    """Registers a buffer, or assigns to it. While forward runs, a buffer that did not exist, or was None, becomes an attribute,
    as torch.export would write it into another tensor; the others are kept from it as well: see `AssignedBuffers`."""
    tracing, registers = threading.get_ident(), original is nn.Module.register_buffer

    @functools.wraps(original)
    def put(self: nn.Module, name: str, value: object, *rest: Any, **named: Any) -> None:
        buffers = vars(self).get("_buffers", {})
        if threading.get_ident() != tracing or not (registers or name in buffers):
            return original(self, name, value, *rest, **named)
        if buffers.get(name) is None:
            vars(self)[name] = value
        elif value is None or isinstance(value, torch.Tensor):
            buffers[name] = value
        else:
            original(self, name, value, *rest, **named)
        return None

    return put


def _from_array(original: Callable[[np.ndarray[Any, Any]], torch.Tensor]) -> Callable[[np.ndarray[Any, Any]], torch.Tensor]:
    """`torch.from_numpy` as a literal in this thread; other threads, which may load data, get the original."""
    tracing = threading.get_ident()

    def from_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor:
        return literal(torch.tensor)(array) if threading.get_ident() == tracing else original(array)

    return from_numpy


_LOCATING = (torch.where,)
_SELECTING = (torch.Tensor.__getitem__, torch.Tensor.masked_select, torch.masked_select)
_SETTING_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_REFUSED: dict[object, tuple[str, str]] = dict.fromkeys(  # what would be lost, with the shape of a tensor; the way out
    (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook),
    (
        "a hook on a tensor of shape {} would be lost",
        "write what the hook does as an operator with its own backward (torch.library.custom_op)",
    ),
) | {
    _SETTING_DATA: (
        "a tensor of shape {} is given other .data, and what shared its memory is not seen",
        "write into it: x.data.copy_(...), or x.copy_(...) under torch.no_grad()",
    ),
    torch.autograd.grad: (
        "torch.autograd.grad inside of forward would be lost: only the forward is traced",
        "write the gradient out in forward, or leave its penalty out of the parallel model",
    ),
    torch._VF._pack_padded_sequence: (
        "pack_padded_sequence makes a shape that depends on the values of a tensor",
        "run the recurrent layer over the padded batch, and select or mask what it returns",
    ),
}
_STAND_INS: dict[object, Callable[[Callable[..., Any]], Callable[..., object]]] = {
    torch.Tensor.data.__get__: lambda _: functionalize.data_of,  # type: ignore[attr-defined]
    nn.functional.embedding_bag: embedding_bag.spelt,
    torch._C._nn.cross_entropy_loss: traced_losses.of_rows,
    torch._C._nn.nll_loss_nd: traced_losses.of_rows,
    torch.ctc_loss: traced_losses.of_lengths(literal(torch.tensor)),
    **dict.fromkeys((torch.cov, torch.Tensor.cov), lambda _: covariance.covariance),
    **dict.fromkeys((torch.corrcoef, torch.Tensor.corrcoef), lambda _: covariance.correlation),
    torch.tensor: literal,
    torch.as_tensor: as_literal,
    torch.asarray: as_literal,
    torch.Tensor.new_tensor: new_literal,
    torch.Tensor.new: new_literal,
    torch.Tensor.type: type_of_the_cpu,
    torch.Tensor.__getitem__: with_literals,
    torch.Tensor.__setitem__: with_literals,
}
