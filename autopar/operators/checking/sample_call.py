"""A call of an operator with sample tensors, outside of any model, for checking and finding rules.

Example.of("aten::linear", (x, weight))   ->   r0 = aten.linear.default(%x0, %x1)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.errors import RuleError
from autopar.ir.builder import Keywords
from autopar.ir.program import Argument, Op, Ref, Value, filled, overload, qualified

Arguments = Sequence[object] | Mapping[str, object]  # in the order of the schema, or by name
STATIC = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
UNDERIVED = "autograd kernel was not registered"  # torch's warning when the backward of such an operator runs


def target_of(op: object, arguments: Arguments = ()) -> str:
    """The target of an operator: an overload, a packet, what `torch.library.custom_op` returns, or "mylib::op.overload".

    With several overloads, the one that accepts the arguments, else the default one. Raises RuleError if there is none.
    """
    op = getattr(op, "_opoverload", op)
    if isinstance(op, str):
        op = _named(op)
    if isinstance(op, torch._ops.OpOverloadPacket):
        op = getattr(op, _overload_of(op, arguments))
    if not isinstance(op, torch._ops.OpOverload):
        raise RuleError(
            f"{op!r} is not an operator", fix='give torch.ops.mylib.op, "mylib::op", or what torch.library.custom_op returned'
        )
    if op._schema.is_mutable:
        raise RuleError(
            f"{qualified(str(op))} writes into an argument", fix="rules are for operators that return their results"
        )
    return str(op)


def _named(name: str) -> object:
    library, _, rest = name.replace("::", ".", 1).partition(".")
    short, _, variant = rest.partition(".")
    try:
        packet = getattr(getattr(torch.ops, library), short)
        return getattr(packet, variant) if variant else packet
    except (AttributeError, RuntimeError):
        fix = 'define it first; it is named as torch.library names it: "mylib::op"'
        raise RuleError(f"there is no operator {name}", fix=fix) from None


def _overload_of(packet: torch._ops.OpOverloadPacket, arguments: Arguments) -> str:
    names: list[str] = packet.overloads()  # type: ignore[no-untyped-call]
    schemas = {name: getattr(packet, name)._schema for name in names}
    several = [name for name, schema in schemas.items() if not schema.is_mutable and "-> Tensor" in str(schema)] or names
    if len(several) > 1 and arguments:
        positional, named = ((), dict(arguments)) if isinstance(arguments, Mapping) else (tuple(arguments), {})
        try:
            return str(torch._C._jit_resolve_packet(packet._qualified_op_name, *positional, **named)) or "default"
        except RuntimeError as error:
            said = str(error).strip().splitlines()[0]
            raise RuleError(f"no overload of {packet._qualified_op_name} takes these arguments", error=said) from None
    if len(several) == 1 or "default" in several:
        return several[0] if len(several) == 1 else "default"
    raise RuleError(
        f"{packet._qualified_op_name} has several overloads: {', '.join(several)}",
        fix=f'name one: "{packet._qualified_op_name}.{several[0]}"',
    )


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Example:
    """One call: the op, its operands by name, and their tensors, in the order of `op.operands`."""

    op: Op
    values: Mapping[str, Value]
    tensors: Mapping[str, torch.Tensor]
    results: tuple[torch.Tensor, ...]

    @staticmethod
    def of(op: object, arguments: Arguments) -> Example:
        """The call of an operator with these arguments; raises RuleError if it does not run on them.

        Gradients are computed for the tensors that require them; if none does, for all that can have one, provided that the
        operator is differentiable.
        """
        target = target_of(op, arguments)
        tensors: dict[str, torch.Tensor] = {}

        def take(part: object) -> Argument:
            if isinstance(part, torch.Tensor):
                name = f"x{len(tensors)}"
                tensors[name] = part
                return Ref(name)
            if isinstance(part, (list, tuple)):
                return tuple(map(take, part))
            if part is None or isinstance(part, STATIC):
                return part
            raise RuleError(f"{qualified(target)} is given {part!r}", fix="tensors, numbers, texts, and lists of these")

        bound = _bound(target, arguments)
        args = tuple(take(part) for part in bound[0])
        kwargs = tuple((name, take(part)) for name, part in bound[1].items())
        plain = _called(target, args, kwargs, tensors, frozenset())
        asked = {name for name, tensor in tensors.items() if tensor.requires_grad}
        grads = frozenset(asked or (name for name, t in tensors.items() if t.dtype.is_floating_point or t.dtype.is_complex))
        if not asked and not _differentiable(target, args, kwargs, tensors, grads):
            grads = frozenset()
        return plain.asking(grads)

    def on(self, tensors: Sequence[torch.Tensor], arguments: tuple[tuple[Argument, ...], Keywords] | None = None) -> Example:
        """This call with other tensors, and perhaps other static arguments; raises RuleError if it does not run."""
        grads = frozenset(name for name, value in self.values.items() if value.requires_grad)
        args, kwargs = arguments or (self.op.args, self.op.kwargs)
        return _called(self.op.target, args, kwargs, dict(zip(self.tensors, tensors, strict=True)), grads)

    def asking(self, grads: frozenset[str]) -> Example:
        """This call with gradients required of these operands."""
        return _made(self.op, self.tensors, self.results, grads)

    @property
    def gradients(self) -> bool:
        """Whether any operand requires a gradient."""
        return any(value.requires_grad for value in self.values.values())


def _called(
    target: str,
    args: tuple[Argument, ...],
    kwargs: Keywords,
    tensors: Mapping[str, torch.Tensor],
    grads: frozenset[str],
) -> Example:
    """Run an operator on operands given by name; raises RuleError if it does not run."""
    try:
        with torch.no_grad():
            results = tuple(_run(target, args, kwargs, tensors))
    except Exception as error:  # a user's operator may raise anything
        said = str(error).strip().splitlines()
        raise RuleError(
            f"{qualified(target)} does not run on these arguments",
            shapes=", ".join(str(tuple(tensor.shape)) for tensor in tensors.values()),
            error=f"{type(error).__name__}: {said[0] if said else ''}",
        ) from error
    return _made(Op(name="r0", target=target, args=args, kwargs=kwargs, results=()), tensors, results, grads)


def _made(op: Op, tensors: Mapping[str, torch.Tensor], results: tuple[torch.Tensor, ...], grads: frozenset[str]) -> Example:
    returned = tuple(Value(name=f"r{i}", shape=tuple(r.shape), dtype=r.dtype) for i, r in enumerate(results))
    return Example(
        op=Op(name=op.name, target=op.target, args=op.args, kwargs=op.kwargs, results=returned),
        values={
            name: Value(name=name, shape=tuple(x.shape), dtype=x.dtype, requires_grad=name in grads)
            for name, x in tensors.items()
        },
        tensors={name: x.detach() for name, x in tensors.items()},
        results=results,
    )


def _run(
    target: str, args: tuple[Argument, ...], kwargs: Keywords, tensors: Mapping[str, torch.Tensor]
) -> Iterator[torch.Tensor]:
    given, named = filled(args, kwargs, lambda ref: tensors[ref.name])
    found = overload(target)(*given, **named)
    for result in [found] if isinstance(found, torch.Tensor) else found:
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"it returns {type(result).__name__}, not tensors")
        yield result


def _bound(target: str, arguments: Arguments) -> tuple[list[object], dict[str, object]]:
    """The arguments as a model has them: positional ones first, defaults left out."""
    formals = overload(target)._schema.arguments
    if not isinstance(arguments, Mapping):
        return list(arguments), {}
    left = dict(arguments)
    if unknown := [name for name in left if name not in {formal.name for formal in formals}]:
        raise RuleError(
            f"{qualified(target)} has no argument {unknown[0]!r}", arguments=", ".join(formal.name for formal in formals)
        )
    positional = []
    for formal in formals:
        if formal.kwarg_only or formal.name not in left:
            break
        positional.append(left.pop(formal.name))
    return positional, left


def _differentiable(
    target: str, args: tuple[Argument, ...], kwargs: Keywords, tensors: Mapping[str, torch.Tensor], grads: frozenset[str]
) -> bool:
    """Whether the operator has a derivative: one that has none raises, or warns, when its backward runs."""
    leaves = {name: x.detach().clone().requires_grad_(name in grads) for name, x in tensors.items()}
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            ends = [result for result in _run(target, args, kwargs, leaves) if result.requires_grad]
            if not ends or not wanted:
                return False
            torch.autograd.grad(ends, wanted, [torch.zeros_like(end) for end in ends], allow_unused=True)
    except RuntimeError:
        return False
    return not any(UNDERIVED in str(one.message) for one in said)
