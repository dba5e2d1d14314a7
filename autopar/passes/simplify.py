"""Canonical form: ops that change nothing are dropped, and every view, cast and fill has one spelling."""

from __future__ import annotations

import math

import torch

from autopar.ir.builder import Rewriter, kinds
from autopar.ir.program import Argument, Op, Program, Ref, Value, aten
from autopar.ir.schema import bound
from autopar.operators import row_of, writes
from autopar.operators.facts import OpKind

_UNCHANGED = (OpKind.SAME, OpKind.CAST, OpKind.RESHAPE, OpKind.EXPAND)  # where shape and dtype stay
_DULL = {"pin_memory": (None, False), "layout": (None, torch.strided), "memory_format": (None, torch.preserve_format)}


def simplify(program: Program) -> Program:
    """Drop ops that change nothing, and normalise views, casts and fills to one spelling.

        a = view(x, [-1, 4])              a = reshape(x, [8, 4])
        b = contiguous(a)
        c = to.device(b, cpu, float32)    c = to.dtype(a, float32)       (none if a is float32)
        d = slice(c, -1, 0, 2**63 - 1)                                   (d is c)
        e = new_zeros(x, [3])             e = full([3], 0, dtype=...)
        g = new_empty(x, [3])             g = empty([3], dtype=...)
        f = histc(n, 4, 0, 3)             f = to.dtype(histc(to.dtype(n, float64), 4, 0, 3), int32)     (n is int32)

    Histograms of integers are computed in floats, since the CPU has no integer kernel. Clones are dropped unless the program
    writes a buffer, and `contiguous` unless its memory is read as another dtype.
    Dropout stays unless its p is 0: a model captured for evaluation may be trained.
    """
    rewriter = Rewriter(program)
    returned = {output.value for output in program.outputs}
    written, read = any(writes(op) for op in program.ops), _read_as_they_lie(program)
    for op in program.ops:
        if op.target == "aten.broadcast_tensors.default":
            _broadcast(op, program, rewriter)
            continue
        if op.target == "aten.clone.default" and written:  # the original may be written later
            rewriter.keep(op)
            continue
        if op.target == "aten.contiguous.default" and op.name in read:  # the original may lie otherwise
            rewriter.keep(op, kwargs=())
            continue
        if op.several or not op.target.startswith("aten."):
            rewriter.keep(op)
            continue
        same = _unchanged(op, program)
        if same is not None and not (op.target == "aten.alias.default" and op.name in returned):
            new = rewriter.new(same)
            assert isinstance(new, Ref)
            rewriter.forward(op.name, new)
        else:
            _spell(op, program, rewriter)
    return rewriter.finish()


def _read_as_they_lie(program: Program) -> set[str]:
    """The values whose memory is read as another dtype, in any shape."""
    read = set[str]()
    for op in reversed(program.ops):
        kind = row_of(op).kind
        if kind is OpKind.MEMORY or (kind is OpKind.RESHAPE and op.name in read):
            read.update(op.operands[:1])
    return read


def _broadcast(op: Op, program: Program, rewriter: Rewriter) -> None:
    """Replace a broadcast by an expand per operand, or by nothing where shapes agree, as in most mean-squared errors."""
    for name, result in zip(op.operands, op.results, strict=True):
        operand = rewriter.new(Ref(name))
        assert isinstance(operand, Ref)
        if program.values[name].shape != result.shape:
            operand = rewriter.beside(op, "aten.expand.default", (operand, result.shape))
        rewriter.forward(result.name, operand)


def _unchanged(op: Op, program: Program) -> Ref | None:
    """The operand that the result provably equals; None if there is none."""
    first = op.args[0] if op.args else None
    if not isinstance(first, Ref):
        return None
    operand, result = program.values[first.name], op.results[0]
    if (operand.shape, operand.dtype, operand.requires_grad) != (result.shape, result.dtype, result.requires_grad):
        return None
    name = aten(op.target)
    if row_of(op).kind in _UNCHANGED:
        return first
    if name == "slice" and (bound(op)["step"] == 1):
        return first
    if name == "dropout" and op.args[1] == 0:
        return first
    second = op.args[1] if len(op.args) == 2 and type(op.args[1]) in (int, float) else None
    if name in ("add", "sub") and second == 0 and not result.dtype.is_floating_point:  # -0.0 + 0 is 0.0
        return first
    return first if name in ("mul", "div") and second == 1 and not op.kwargs else None


def _spell(op: Op, program: Program, rewriter: Rewriter) -> None:
    """Keep an op in its canonical spelling."""
    name, row, result = aten(op.target), row_of(op), op.results[0]
    first = op.args[0] if op.args else None
    kwargs = tuple((key, value) for key, value in op.kwargs if value not in _DULL.get(key, ()))
    if row.kind is OpKind.RESHAPE:
        rewriter.keep(op, target="aten.reshape.default", args=(first, result.shape), kwargs=())
    elif row.kind is OpKind.EXPAND:
        rewriter.keep(op, target="aten.expand.default", args=(first, result.shape), kwargs=())
    elif row.kind is OpKind.CAST and isinstance(first, Ref) and program.values[first.name].shape == result.shape:
        rewriter.keep(op, target="aten.to.dtype", args=(first, result.dtype), kwargs=())
    elif name in ("slice", "slice_scatter"):
        rewriter.keep(op, args=_slice(op, program.values), kwargs=())
    elif row.fills is not None:
        fill = bound(op)[row.fills] if isinstance(row.fills, str) else row.fills
        rewriter.keep(op, target="aten.full.default", args=(result.shape, fill), kwargs=_made(op))
    elif name == "new_empty":
        rewriter.keep(op, target="aten.empty.memory_format", args=(result.shape,), kwargs=_made(op))
    elif name == "histc" and isinstance(first, Ref) and not result.dtype.is_floating_point:
        given = rewriter.beside(op, "aten.to.dtype", (rewriter.new(first), torch.float64))
        counted = rewriter.beside(op, op.target, (given, *op.args[1:]), kwargs)
        rewriter.put(op, "aten.to.dtype", (counted, result.dtype), (), kinds(op))
    else:
        rewriter.keep(op, kwargs=kwargs)


def _made(op: Op) -> tuple[tuple[str, Argument], ...]:
    """The keywords of an op that creates a tensor."""
    device = bound(op).get("device")
    return (("dtype", op.results[0].dtype), ("device", torch.device("meta") if device is None else device))


def _slice(op: Op, values: dict[str, Value]) -> tuple[Argument, ...]:
    """The arguments (x, dim, start, end[, step]) of a slice, or (x, y, dim, ...) of slice_scatter, within bounds."""
    named = bound(op)
    source, dim, step = named["self"], named["dim"], named["step"]
    assert isinstance(source, Ref)
    assert isinstance(dim, int)
    assert isinstance(step, int)
    shape = values[source.name].shape
    dim %= len(shape)
    start, end, _ = slice(_whole(named["start"]), _whole(named["end"])).indices(shape[dim])
    count = math.ceil(max(end - start, 0) / step)
    tail = (step,) if step != 1 else ()
    operands = op.args[: op.target.startswith("aten.slice_scatter") + 1]
    return (*operands, dim, start, max(start, min(end, start + count * step)), *tail)


def _whole(argument: Argument) -> int | None:
    return argument if isinstance(argument, int) else None
