"""The signature of a pipeline stage: everything that determines its solution, so that equal stages are solved once."""

from __future__ import annotations

from collections.abc import Mapping
from glob import escape

from autopar.analysis.block_names import block_names
from autopar.analysis.signatures import deciding_arguments
from autopar.ir.program import Argument, Ref, Static, digest, substitute
from autopar.ir.training_step import TrainingStep
from autopar.plan.options import Options


def signature_of(step: TrainingStep, options: Options) -> str:
    """Everything that determines a stage's solution, as text: equal for stages that differ only in names, or in irrelevant
    numbers (`deciding_arguments`).
    """
    program, ends = step.program, step.stage
    assert ends is not None, "it is a stage"
    number = {name: str(place) for place, name in enumerate(program.values)}
    block_of, blocks = block_names(program).of, dict[object, int]()
    lines: list[object] = [(v.shape, v.dtype, v.requires_grad, step.received.get(v.name)) for v in program.inputs]
    lines += [(p.value.shape, p.value.dtype, p.value.requires_grad, p.used, p.reduce) for p in program.parameters]
    lines += [(b.value.shape, b.value.dtype, b.used, b.persistent) for b in program.buffers]
    for op in program.ops:
        args, kwargs = deciding_arguments(op)
        read = substitute((args, tuple(value for _, value in kwargs)), lambda x: _numbered(x, number))
        made = [(value.shape, value.dtype, value.requires_grad) for value in op.results]
        lines.append((op.target, read, [name for name, _ in kwargs], made, _place(block_of(op.name), blocks)))
    lines += [number[output.value] for output in program.outputs]
    lines += [(number[name], shape) for name, shape in step.padding]
    loop = step.loop and (step.loop.count, step.loop.inputs, step.loop.outputs)
    held = ends.flights, sorted(map(repr, ends.moments)), ends.repeats
    asked = sorted((number[name], options.constraints[key]) for name in number if (key := escape(name)) in options.constraints)
    return digest(repr((lines, loop, ends.sends, ends.batch, held, asked, options.budget)))


def _numbered(leaf: Ref | Static, number: Mapping[str, str]) -> Argument:
    return Ref(number[leaf.name]) if isinstance(leaf, Ref) else leaf


def _place(block: object, blocks: dict[object, int]) -> int:
    return blocks.setdefault(block, len(blocks))


__all__ = ["signature_of"]
