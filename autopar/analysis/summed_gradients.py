"""Which gradients autograd adds up, each in its own kernel: those of a value that several ops use."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.program import Program


def with_sums(program: Program, *, sends: bool = False) -> Program:
    """The program, of which every op knows for which operands its gradient is added to that of later ops (`Op.summed`).

    With `sends` the outputs are sent to the next stage of a pipeline, from which a gradient of each comes first.
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
