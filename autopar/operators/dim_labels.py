"""Readable names for the factors of well-known operators: "out-features" of a linear, "heads" of attention.

addmm  n/512   ->   out-features          layer_norm  ...1/4   ->   batch
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.program import Op, Program, Value, aten
from autopar.operators.registry import RULES, row_of
from autopar.operators.rule import OpSharding


def kind_of(op: str) -> str:
    """The common name of an op's operator ("h.0.attn.c_attn:addmm#0" is a linear)."""
    name = op.rpartition(":")[2].partition("#")[0]
    return _names().get(name, name)


@functools.cache
def _names() -> Mapping[str, str]:
    """Common names of operators, by their short names."""
    return {aten(target): rule.says.name for target, rule in RULES.items() if rule.says}


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSample:
    """The sizes that identify dims of activations: rows of the batch, and the length of a sequence (1 if there is none)."""

    batch: int
    length: int

    @staticmethod
    def of(program: Program) -> LabelSample:
        """Dim 0 of the first input is the batch; dim 1 is a sequence if the input holds whole numbers."""
        shape = program.inputs[0].shape if program.inputs else ()
        words = len(shape) == 2 and not program.inputs[0].dtype.is_floating_point
        return LabelSample(batch=(shape[0] or 1) if shape else 1, length=shape[1] if words else 1)

    def role(self, value: Value, dim: int, stride: int) -> str:
        """What a split of this stride cuts of an activation: batch, sequence, features, or a dim by number."""
        shape = value.shape
        inner, rest = divmod(shape[dim], self.batch)
        if dim == 0 and self.batch > 1 and not rest and (inner in (1, self.length) or len(shape) == 2):
            if stride >= inner:
                return "batch"
            return "sequence" if inner == self.length else "rows"
        if len(shape) == 3 and shape[0] == self.batch and dim:
            return "sequence" if dim == 1 else "features"
        return f"dim {dim} (size {shape[dim]})"


def role(op: Op, fitted: OpSharding, factor: int, stride: int, values: Mapping[str, Value], sample: LabelSample) -> str:
    """The common name of an op's factor that is split with this stride."""
    said = row_of(op).says
    if said and (named := said.factor(fitted.factors[factor].name)):
        return named
    tensors = [*zip(op.results, fitted.results, strict=True)]
    tensors += [(values[name], dims) for name, dims in zip(op.operands, fitted.operands, strict=True)]
    value, dim, right = next(
        (value, dim, parts[parts.index(factor) + 1 :])
        for value, dims in tensors
        for dim, parts in enumerate(dims)
        if factor in parts
    )
    return sample.role(value, dim, stride * math.prod(fitted.factors[f].size for f in right))


def role_of_dim(op: Op, fitted: OpSharding, position: int, dim: int, values: Mapping[str, Value]) -> str:
    """What a person calls a dim of the operand at this position, a parameter, say: by the factor that it is made of."""
    value = values[op.operands[position]]
    parts = fitted.operands[position][dim]
    said = row_of(op).says
    found = next(filter(None, (said.factor(fitted.factors[f].name) for f in parts)), "") if said else ""
    return found or (f"dim {dim}" if len(value.shape) > 1 else "features")
