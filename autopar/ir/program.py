"""The intermediate representation: a model as a straight line of operators over named tensors.

    program  := inputs, parameters, buffers, ops, outputs
    op       := results = target(arguments)          target is an overload, "aten.linear.default"
    argument := Ref(value name) | static | (argument, ...)
    static   := None | bool | int | float | complex | str | torch.dtype | torch.device | torch.layout | torch.memory_format

Everything is frozen and compares by value. `Program.hash` depends on structure only: neither devices, nor source lines, nor
versions change it, so every rank can check that it has the same program as the others.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Concatenate, ParamSpec, TypeVar, Union

import torch
from torch.utils.weak import WeakIdKeyDictionary

from autopar.ir.layout import Layout, away, local_shape

Result = TypeVar("Result")
Params = ParamSpec("Params")
Static = Union[None, bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format]
Argument = Union["Ref", Static, tuple["Argument", ...]]
OUTPUT = "output:"  # prefix of an output's path, where outputs appear among values


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of the value with this name."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor that the program computes or is given; `shape` is global."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @property
    def bytes(self) -> int:
        """Size of the whole tensor."""
        return elements(self.shape) * self.dtype.itemsize

    def local_bytes(self, layout: Layout, sizes: tuple[int, ...]) -> int:
        """Size of one rank's part on a mesh of these sizes."""
        return elements(local_shape(self.shape, layout, sizes)) * self.dtype.itemsize

    def device_bytes(self, layout: Layout, sizes: tuple[int, ...]) -> int:
        """Bytes of device memory that one rank's part takes: none if it is on the host or on the disk."""
        return 0 if away(layout) else self.local_bytes(layout, sizes)

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.name}: {kind}[{', '.join(map(str, self.shape))}]{' grad' if self.requires_grad else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """The memory traffic that remains for an op inside a fused kernel: positions of its operands and results.

    The op reads `operands` and writes `results`. Its backward reads the gradients `arriving` for its results, one from each
    kernel that reads them, and the operands `again`, and writes the gradients of the operands `gradients`.
    """

    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    arriving: tuple[int, ...] = ()
    again: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator: `results = target(*args, **kwargs)`; `module` and `source` say where it stands in the user's model."""

    name: str
    target: str
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()
    results: tuple[Value, ...]
    module: str = field(default="", compare=False)
    source: str = field(default="", compare=False)
    fused: Fused | None = field(default=None, repr=False, compare=False)  # None: the op is a kernel of its own
    # Positions of the operands whose gradients are added to those of later ops.
    summed: tuple[int, ...] = field(default=(), repr=False, compare=False)
    # Names of the tensors it reads, in argument order (each tensor of a list counts).
    operands: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        read = refs((*self.args, *(argument for _, argument in self.kwargs)))
        object.__setattr__(self, "operands", tuple(ref.name for ref in read))

    @property
    def requires_grad(self) -> bool:
        return any(value.requires_grad for value in self.results)

    @property
    def several(self) -> bool:
        """Whether it returns a tuple or list of tensors, perhaps of one; the results then have names of their own."""
        return len(self.results) != 1 or self.results[0].name != self.name

    def __str__(self) -> str:
        arguments = [text(a) for a in self.args] + [f"{name}={text(a)}" for name, a in self.kwargs]
        return f"{', '.join(map(str, self.results))} = {self.target}({', '.join(arguments)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter or buffer; `names` are all the names under which the model knows it (several when it is tied).

    `reduce` is the dtype in which the gradients of its copies in narrower dtypes are added up; None for its own.
    """

    value: Value
    names: tuple[str, ...]
    persistent: bool = True
    used: bool = True
    reduce: torch.dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One result of the model: the value's name, and its place in what `forward` returns ("loss", "logits", "0", ...)."""

    value: str
    path: str


@dataclass(frozen=True, kw_only=True)
class Program:
    """A captured model. Values are defined before they are used; inputs are in the order of `forward`'s flat arguments."""

    ops: tuple[Op, ...]
    inputs: tuple[Value, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Parameter, ...]
    outputs: tuple[Output, ...]

    @functools.cached_property
    def given(self) -> tuple[Value, ...]:
        """The values that no op computes: inputs, parameters, buffers."""
        return (*self.inputs, *(stored.value for stored in (*self.parameters, *self.buffers)))

    @functools.cached_property
    def values(self) -> dict[str, Value]:
        """Every value by name: inputs, parameters and buffers, then results in program order."""
        return {value.name: value for value in (*self.given, *(result for op in self.ops for result in op.results))}

    @functools.cached_property
    def op(self) -> dict[str, Op]:
        """Every op by name."""
        return {op.name: op for op in self.ops}

    @functools.cached_property
    def producer(self) -> dict[str, Op]:
        """The op that computes a value; inputs, parameters and buffers have none."""
        return {result.name: op for op in self.ops for result in op.results}

    @functools.cached_property
    def hash(self) -> str:
        """Hex digest of the structure."""
        return digest(self.structure)

    @property
    def structure(self) -> str:
        """The computation as text: equal for two programs that differ only in devices and source lines."""
        held = (*self.parameters, *self.buffers)
        ties = "\n".join(f"{p.names} {p.persistent} {p.used}{f' {p.reduce}' if p.reduce else ''}" for p in held)
        return f"{self._text(devices=False)}\n{ties}"

    def _text(self, *, devices: bool) -> str:
        def rows() -> Iterator[str]:
            yield from (f"input {value}" for value in self.inputs)
            yield from (f"parameter {p.value}" for p in self.parameters)
            yield from (f"buffer {b.value}" for b in self.buffers)
            yield from (str(op if devices else without_devices(op)) for op in self.ops)
            yield from (f"output {o.path} = {o.value}" for o in self.outputs)

        return "\n".join(rows())

    def __str__(self) -> str:
        return self._text(devices=True)


def remembered(function: Callable[Concatenate[Program, Params], Result]) -> Callable[Concatenate[Program, Params], Result]:
    """A function of a program whose results are cached for the program's lifetime; callers must not change them."""
    known: MutableMapping[Program, dict[object, Result]] = WeakIdKeyDictionary()

    @functools.wraps(function)
    def found(program: Program, /, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        of, key = known.setdefault(program, {}), (args, *kwargs.items())
        if key not in of:
            of[key] = function(program, *args, **kwargs)
        return of[key]

    return found


def digest(structure: str) -> str:
    """The hex digest by which plans and ranks compare structures."""
    return hashlib.sha256(structure.encode(errors="surrogatepass")).hexdigest()[:16]


def elements(shape: tuple[int, ...]) -> int:
    """The number of elements of a tensor of this shape."""
    count = 1
    for size in shape:
        count *= size
    return count


def refs(argument: Argument) -> Iterator[Ref]:
    """Every use of a value inside an argument, left to right."""
    if isinstance(argument, Ref):
        yield argument
    elif isinstance(argument, tuple):
        for part in argument:
            yield from refs(part)


def substitute(argument: Argument, change: Callable[[Ref | Static], Argument]) -> Argument:
    """The argument with every leaf replaced by what `change` makes of it."""
    if isinstance(argument, tuple):
        return tuple(substitute(part, change) for part in argument)
    return change(argument)


def with_operands(op: Op, instead: Mapping[Ref, Ref]) -> Op:
    """The op with some of the values that it reads replaced."""

    def change(leaf: Ref | Static) -> Argument:
        return instead.get(leaf, leaf) if isinstance(leaf, Ref) else leaf

    kwargs = tuple((name, substitute(argument, change)) for name, argument in op.kwargs)
    return replace(op, args=tuple(substitute(argument, change) for argument in op.args), kwargs=kwargs)


def filled(
    args: Iterable[Argument], kwargs: Iterable[tuple[str, Argument]], operand: Callable[[Ref], object]
) -> tuple[list[object], dict[str, object]]:
    """Arguments in the form that torch takes: `operand` maps values to tensors, and tuples become lists."""

    def fill(argument: Argument) -> object:
        if isinstance(argument, tuple):
            return [fill(part) for part in argument]
        return operand(argument) if isinstance(argument, Ref) else argument

    return [fill(argument) for argument in args], {name: fill(argument) for name, argument in kwargs}


def without_devices(op: Op) -> Op:
    """The op without its device arguments: they say where it runs, not what it computes."""

    def drop(leaf: Ref | Static) -> Argument:
        return None if isinstance(leaf, torch.device) else leaf

    return Op(
        name=op.name,
        target=op.target,
        args=tuple(substitute(a, drop) for a in op.args),
        kwargs=tuple((name, substitute(a, drop)) for name, a in op.kwargs),
        results=op.results,
    )


def text(argument: Argument) -> str:
    """The printed form of an argument."""
    if isinstance(argument, Ref):
        return f"%{argument.name}"
    if isinstance(argument, tuple):
        return f"[{', '.join(map(text, argument))}]"
    return repr(argument) if isinstance(argument, str) else str(argument)


def aten(target: str) -> str:
    """The name of an ATen operator, `linear` for "aten.linear.default"; empty for an operator of another library."""
    library, name, *_ = target.split(".")
    return name if library == "aten" else ""


def qualified(target: str) -> str:
    """A target as torch.library names operators: "mylib::op", or "mylib::op.overload" where it is not the default one."""
    library, name, variant = target.split(".")
    return f"{library}::{name}{'' if variant == 'default' else f'.{variant}'}"


@functools.cache
def overload(target: str) -> torch._ops.OpOverload:
    """The torch operator of a target: `overload("aten.linear.default")` is `torch.ops.aten.linear.default`."""
    namespace, name, variant = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), variant)  # type: ignore[no-any-return]
