"""Finds operands whose dtypes torch rejects at run time, although tracing, which needs only shapes, accepts them.

    linear(x: float64[8, 64], w: float32[64, 64])     mat1 and mat2 must have the same dtype, but got Double and Float
    cross_entropy_loss(y: float32[8, 5], x: int32[8])     expected scalar type Long but found Int

Torch itself is the judge: an op runs on zeros, on the CPU, with its dims as small as its rule can split them. Its dtypes are
wrong if torch raises an error, but not if some operands have another dtype; that dtype is then the fix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from autopar.errors import CaptureError, InputError
from autopar.ir.builder import short
from autopar.ir.program import Argument, Op, Program, Ref, Static, Value, elements, filled, overload, substitute
from autopar.operators import fit
from autopar.operators.registry import localise
from autopar.passes.precision import DTYPES

LARGEST = 2**22  # elements of the operands with which an op is run
REFUSALS = (RuntimeError, IndexError, TypeError, ValueError)  # that torch raises for arguments
Dtypes = Mapping[str, torch.dtype]


def refuse_dtypes(program: Program, precision: str | None) -> None:
    """Raise InputError for the first op whose dtypes torch rejects; CaptureError if no input is to blame."""
    known = set[tuple[object, ...]]()
    for op in program.ops:
        given = [program.values[name] for name in op.operands]
        kind = (op.target, *((value.dtype, len(value.shape)) for value in given))
        if kind not in known and (call := SmallCall.of(op, program.values)) and (said := call.refusal()):
            stored = frozenset(held.value.name for held in (*program.parameters, *program.buffers))
            if right := next(filter(call.takes, call.others(stored)), None):
                raise _refusal(
                    program, op, said, {name: to for name, to in right.items() if to != call.dtypes[name]}, precision
                )
        known.add(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallCall:
    """An ATen operator with small operands, by name."""

    target: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Dtypes

    @staticmethod
    def of(op: Op, values: Mapping[str, Value]) -> SmallCall | None:
        """An op with every factor as small as it can be split; None if it is another library's, or still large."""
        if not op.target.startswith("aten."):
            return None
        operands, args, kwargs = [values[name].shape for name in op.operands], op.args, op.kwargs
        if fitted := fit(op, values):
            sizes = [factor.size if factor.whole else _small(factor.size) for factor in fitted.factors]
            parts = [max(1, factor.size // max(1, size)) for factor, size in zip(fitted.factors, sizes, strict=True)]
            operands, results = (
                [tuple(math.prod(sizes[f] for f in dim) for dim in dims) for dims in tensors]
                for tensors in (fitted.operands, fitted.results)
            )
            args, kwargs = localise(op, fitted, operands, results, parts)
        if sum(map(elements, operands)) > LARGEST:
            return None
        shapes = dict(zip(op.operands, operands, strict=True))
        return SmallCall(
            target=op.target, args=args, kwargs=kwargs, shapes=shapes, dtypes={name: values[name].dtype for name in shapes}
        )

    def run(self, dtypes: Dtypes) -> None:
        """Call the operator with operands of these dtypes; passes on its errors."""
        operands = {name: torch.zeros(shape, dtype=dtypes[name], device="cpu") for name, shape in self.shapes.items()}
        args = tuple(substitute(argument, _on_cpu) for argument in self.args)
        kwargs = tuple((name, substitute(argument, _on_cpu)) for name, argument in self.kwargs)
        given, named = filled(args, kwargs, lambda ref: operands[ref.name])
        with torch.no_grad(), torch.random.fork_rng(devices=()), torch.autocast("cpu", enabled=False):
            overload(self.target)(*given, **named)

    def refusal(self) -> str | None:
        """Torch's objection to the dtypes; None if it accepts them, or has no CPU kernel for them."""
        try:
            self.run(self.dtypes)
        except NotImplementedError:
            return None
        except REFUSALS as error:
            said = str(error).partition("\n")[0]
            return None if "ZeroDivisionError" in said else said  # of the zeros, not the dtypes
        return None

    def takes(self, dtypes: Dtypes) -> bool:
        """Whether torch accepts operands of these dtypes."""
        try:
            self.run(dtypes)
        except REFUSALS:
            return False
        return True

    def others(self, stored: frozenset[str]) -> Iterator[Dtypes]:
        """Other dtypes to try: for one operand, or for all with this dtype; `stored` ones last."""
        alike = [[name for name, dtype in self.dtypes.items() if dtype == one] for one in dict.fromkeys(self.dtypes.values())]
        groups = [*([name] for name in self.dtypes), *(names for names in alike if len(names) > 1)]
        for names in sorted(groups, key=lambda names: not stored.isdisjoint(names)):
            now = self.dtypes[names[0]]
            numbers, places = (*self.dtypes.values(),), (torch.int64, torch.bool)
            for wanted in (*numbers, *places) if now.is_floating_point else (*places, *numbers, torch.float32):
                if wanted != now:
                    yield {**self.dtypes, **dict.fromkeys(names, wanted)}


def _small(size: int) -> int:
    """The least size into which a dim can be split, but 1 only if others are large."""
    return next((part for part in range(min(2, size), 9) if size % max(1, part) == 0), 1)


def _on_cpu(leaf: Ref | Static) -> Argument:
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _refusal(program: Program, op: Op, said: str, right: Dtypes, precision: str | None) -> InputError | CaptureError:
    """The error for an op that torch rejects; `right` are the dtypes that some of its operands should have."""
    inputs = sorted({found for name in right for found in _inputs(program, name)})
    name, wanted = next(iter(right.items()))
    to, given = str(wanted).removeprefix("torch."), program.values[name].dtype
    cast = next(
        (key for key, dtype in DTYPES.items() if dtype == wanted and given.is_floating_point and precision is None), None
    )
    fix = f"cast {name} in forward: .to({wanted})"
    if inputs:
        fix = f"give {', '.join(inputs)} as {to}" + (f', or plan with precision="{cast}", which casts inputs' if cast else "")
    return (InputError if inputs else CaptureError)(
        f"torch refuses the dtypes of {short(op.target)}{f' in {op.module}' if op.module else ''}: {said}",
        operands=", ".join(_text(program.values[name]) for name in dict.fromkeys(op.operands)),
        at=op.source,
        fix=fix,
    )


def _text(value: Value) -> str:
    return str(value).removesuffix(" grad")


def _inputs(program: Program, name: str) -> frozenset[str]:
    """The inputs that determine a value's dtype; none if a parameter has it too."""
    dtype, seen, pending = program.values[name].dtype, {name}, [name]
    while pending:
        op = program.producer.get(pending.pop())
        found = {one for one in op.operands if program.values[one].dtype == dtype} - seen if op else set()
        seen |= found
        pending += found
    given, inputs = seen.intersection(value.name for value in program.given), {value.name for value in program.inputs}
    return frozenset(given if given <= inputs else ())


__all__ = ["refuse_dtypes"]
