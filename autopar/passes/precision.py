"""Precision: computing in half precision over float32 parameters, and inputs in another dtype than the model's.

"fp32", "bf16", "fp16"        the model is captured as `model.to(dtype)` would be; floating inputs are cast on arrival
"bf16-mixed", "fp16-mixed"    parameters, their gradients and the optimizer's state stay float32; see `mixed`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from autopar.analysis.weights import CAST
from autopar.capture import autocast
from autopar.errors import ConstraintError
from autopar.ir.builder import Keywords, Rewriter, kinds
from autopar.ir.program import Argument, Op, Program, Ref, Static, Value, aten, refs, substitute
from autopar.ir.shape_inference import Kind
from autopar.operators import row_of, writes
from autopar.operators.double_precision import torchs
from autopar.operators.facts import Mixed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MIXED = {f"{name}-mixed": dtype for name, dtype in DTYPES.items() if name != "fp32"}  # the dtype of products
PRECISIONS = (*DTYPES, *MIXED)


def stored(precision: str | None, reduce: str | None) -> torch.dtype | None:
    """The dtype in which a precision stores parameters, None for the model's own; raises ConstraintError for an unknown one."""
    if precision not in (None, *PRECISIONS):
        raise ConstraintError(f"precision={precision!r} is unknown", fix=f"None, or one of {', '.join(PRECISIONS)}")
    if reduce not in (None, *DTYPES):
        raise ConstraintError(f"reduce={reduce!r} is unknown", fix=f"None, or one of {', '.join(DTYPES)}")
    if reduce is not None and precision not in MIXED:
        raise ConstraintError(
            f"reduce={reduce!r} is the dtype of gradient reductions with a mixed precision only",
            precision=repr(precision),
            fix='precision="bf16-mixed", or leave reduce out: gradients have the dtype of their parameters',
        )
    if precision in MIXED and reduce not in (None, "fp32", precision.removesuffix("-mixed")):
        raise ConstraintError(
            f"reduce={reduce!r} is no dtype of precision={precision!r}", fix=f"None, fp32 or {precision.removesuffix('-mixed')}"
        )
    return DTYPES.get(precision) if precision else None


def received(program: Program, dtypes: Mapping[str, torch.dtype]) -> Program:
    """Give inputs these dtypes, and cast them at their first use.

    x: bfloat16[3]           x: float32[3]
    y = gelu(x)        ->    c = to(x, bfloat16)
                             y = gelu(c)
    """
    differ = {value.name: value.dtype for value in program.inputs if dtypes[value.name] != value.dtype}
    inputs = tuple(replace(value, dtype=dtypes[value.name]) for value in program.inputs)
    rewriter = Rewriter(replace(program, inputs=inputs))
    for op in program.ops:
        for name in op.operands:
            if name in differ:
                rewriter.forward(name, rewriter.beside(op, CAST, (Ref(name), differ.pop(name))))
        rewriter.keep(op)
    return rewriter.finish()


def mixed(program: Program, reduce: torch.dtype | None = None, half: torch.dtype = torch.bfloat16) -> Program:
    """The program with computations in bfloat16, or `half`, on parameters stored in float32, as under torch.autocast.

                                            c = to(w, bfloat16)
        y = linear(x, w)             ->     y = linear(x, c)              bfloat16
        z = layer_norm(y, v)                d = to(y, float32)
                                            z = layer_norm(d, v)          float32

    Matrix products run in bfloat16; losses, norms, softmax and the like in float32: autocast's own lists. Other operators
    keep the dtype of their operands, but unlike in autocast they read parameters and floating inputs in bfloat16: the
    residual stream is then bfloat16, and weights are communicated in bfloat16. Values that depend on neither, such as masks
    and rotary angles, are computed as before. Outputs keep their dtypes.

    A parameter is cast once, before it is gathered; its gradient passes through the cast and is stored in float32. Gradients
    are reduced in float32 too, unless `reduce` names another dtype (`autopar.analysis.weights.reduce_dtypes`).

    Raises ConstraintError if a parameter is floating and not float32.
    """
    for parameter in program.parameters:
        dtype = parameter.value.dtype
        if dtype.is_floating_point and dtype != torch.float32:
            raise ConstraintError(
                f"a mixed precision is for models in float32: {parameter.value.name} is {str(dtype).removeprefix('torch.')}",
                fix="model.float(), or leave precision out: the model runs as it is",
            )
    return _Mixed(program, reduce, half).program


class _Mixed:
    """One rewrite; names are the new program's, except those in an old op."""

    def __init__(self, old: Program, reduce: torch.dtype | None, half: torch.dtype) -> None:
        self.half = half
        self.rewriter = Rewriter(old)
        self.old, self.values = old, self.rewriter.values
        parameters = (replace(p, reduce=reduce) for p in old.parameters)
        self.rewriter.parameters = tuple(parameters)
        floating = (value for value in (*old.inputs, *(p.value for p in old.parameters)) if _single(value))
        self.given = {value.name for value in floating}  # values available in either dtype
        self.real = set(self.given)  # values that depend on these
        self.casts: dict[tuple[str, torch.dtype], Ref] = {}
        self.returned = {output.value for output in old.outputs}
        for op in old.ops:
            self._op(op)
        for output in old.outputs:
            self._return(old.values[output.value])
        self.program = self.rewriter.finish()

    def _op(self, op: Op) -> None:
        new = tuple(map(self.rewriter.new, op.args)), tuple((name, self.rewriter.new(a)) for name, a in op.kwargs)
        names = [ref.name for ref in refs((*new[0], *(argument for _, argument in new[1])))]
        if self.real.isdisjoint(names):
            self.rewriter.keep(op)
            return
        args, kwargs = self._cast(op, new, self._wanted(op, names))
        found = self._returned(op.target, args, kwargs)
        if found is None:
            args, kwargs = self._as_before(op)
            found = kinds(op)
        target = torchs(op.target, [self.rewriter.values[ref.name] for ref in refs(args)])
        self.rewriter.put(op, target, args, kwargs, found)
        self.real |= {self._now(result.name) for result in op.results}

    def _returned(self, target: str, args: tuple[Argument, ...], kwargs: Keywords) -> Kind | tuple[Kind, ...] | None:
        """The result types of an operator; None if it rejects mixed dtypes, or has no meta kernel.

        Operators of other libraries, whose fake implementations need not check dtypes, are assumed to reject them.
        """
        dtypes = {self.values[ref.name].dtype for ref in refs((*args, *(argument for _, argument in kwargs)))}
        if not aten(target) and sum(dtype.is_floating_point for dtype in dtypes) > 1:
            return None
        try:
            return self.rewriter.infer(target, args, kwargs)
        except RuntimeError:
            return None

    def _wanted(self, op: Op, names: list[str]) -> torch.dtype | None:
        """The dtype to which all floating operands are cast; None if they may stay as they are."""
        row = row_of(op)
        dtypes = [self.half if operand in self.given else self.values[operand].dtype for operand in names]
        fills = row.mixed is Mixed.FILL and (torch.float32 in dtypes or _huge(op, self.half))
        if row.mixed is Mixed.LOWER:
            return self.half
        if row.mixed is Mixed.FP32 or fills or writes(op):
            return torch.float32
        if op.target == "aten.alias.default" and op.results[0].name in self.returned:
            return op.results[0].dtype
        return autocast.operand_dtype(op.target, dtypes, self.half)

    def _cast(
        self, op: Op, new: tuple[tuple[Argument, ...], Keywords], wanted: torch.dtype | None
    ) -> tuple[tuple[Argument, ...], Keywords]:
        """The new arguments of an op in the dtype `wanted`; if that is None, parameters and inputs in half precision."""

        def change(leaf: Ref | Static) -> Argument:
            if not isinstance(leaf, Ref):
                return leaf
            dtype = wanted or (self.half if leaf.name in self.given else None)
            return self._as(op, leaf, dtype) if dtype else leaf

        return tuple(substitute(a, change) for a in new[0]), tuple((name, substitute(a, change)) for name, a in new[1])

    def _as_before(self, op: Op) -> tuple[tuple[Argument, ...], Keywords]:
        """The arguments of an op in the dtypes that they had in the old program."""

        def change(leaf: Ref | Static) -> Argument:
            if not isinstance(leaf, Ref):
                return leaf
            return self._as(op, Ref(self._now(leaf.name)), self.old.values[leaf.name].dtype)

        return tuple(substitute(a, change) for a in op.args), tuple((name, substitute(a, change)) for name, a in op.kwargs)

    def _as(self, op: Op, ref: Ref, dtype: torch.dtype) -> Ref:
        """A value in this dtype; the cast is inserted once, before the first op that needs it."""
        if not autocast.castable(self.values[ref.name].dtype, dtype):
            return ref
        if (ref.name, dtype) not in self.casts:
            made = self.casts[ref.name, dtype] = self.rewriter.beside(op, CAST, (ref, dtype))
            self.real.add(made.name)
        return self.casts[ref.name, dtype]

    def _return(self, old: Value) -> None:
        """Cast an output back to its dtype in the old program."""
        if old.name in self.old.producer and self.values[self._now(old.name)].dtype != old.dtype:
            self.rewriter.forward(old.name, self._as(self.old.producer[old.name], Ref(self._now(old.name)), old.dtype))

    def _now(self, old: str) -> str:
        """The new name of an old value."""
        (ref,) = refs(self.rewriter.new(Ref(old)))
        return ref.name


def _single(value: Value) -> bool:
    return value.dtype == torch.float32


def _huge(op: Op, half: torch.dtype) -> bool:
    """Whether an op has a constant that a dtype cannot represent."""
    limit = torch.finfo(half).max
    return any(isinstance(argument, float) and abs(argument) > limit for argument in (*op.args, *dict(op.kwargs).values()))
