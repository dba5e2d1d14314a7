"""Finds the gradients that autograd adds up, each in a kernel of its own: those of values that several ops use."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.program import Program


def with_sums(program: Program, *, sends: bool = False) -> Program:
    """The program with `Op.summed` set: the operands whose gradient is added to the gradient from later ops.

    With `sends`, the outputs are sent to the next pipeline stage, whose gradient of each output arrives first.
    """
    values, ops = program.values, []
    there = {output.value for output in program.outputs} if sends else set[str]()
    for op in reversed(program.ops):
        summed = []
        for position in reversed(range(len(op.operands)) if op.requires_grad else ()):
            name = op.operands[position]
            if values[name].requires_grad and name in there:
                summed.append(position)
            there.add(name)
        ops.append(replace(op, summed=tuple(reversed(summed))))
    return replace(program, ops=tuple(reversed(ops)))


__all__ = ["with_sums"]
