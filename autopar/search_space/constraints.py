"""The user's constraints: which values a name or a glob stands for, and which layouts it asks of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from autopar.errors import ConstraintError, LayoutError
from autopar.ir.layout import AWAY, I, State, parse
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program, Value
from autopar.ir.training_step import TrainingStep

LayoutPattern = tuple[State | None, ...]  # a layout, None where an axis is free


def targets(program: Program) -> Iterator[tuple[str, str]]:
    """`(name that a constraint may use, value that it constrains)`: parameters, inputs, modules, ops and their results."""
    for value in program.inputs:
        yield value.name, value.name
    for stored in (*program.parameters, *program.buffers):
        for name in stored.names:
            yield name, stored.value.name
    for op in program.ops:
        if op.several:
            yield op.name, op.results[0].name
        for result in op.results:
            yield result.name, result.name
            yield result.name.rpartition("#")[0], result.name
    yield from _modules(program)


def _modules(program: Program) -> Iterator[tuple[str, str]]:
    """Every module path with its first result that is used outside the module."""
    readers: dict[str, list[str]] = {name: [] for name in program.values}
    for op in program.ops:
        for operand in op.operands:
            readers[operand].append(_path(op.name))
    for output in program.outputs:
        readers[output.value].append("")
    seen: set[str] = set()
    for op in program.ops:
        parts = _path(op.name).split(".")
        for depth in range(1, len(parts) + 1):
            module = ".".join(parts[:depth])
            leaves = [r.name for r in op.results if any(not _inside(reader, module) for reader in readers[r.name])]
            if module and module not in seen and leaves:
                seen.add(module)
                yield module, leaves[0]


def _path(name: str) -> str:
    return name.partition(":")[0]


def _inside(path: str, module: str) -> bool:
    return path == module or path.startswith(module + ".")


def constrained(step: TrainingStep, mesh: Mesh, constraints: Mapping[str, str]) -> dict[str, LayoutPattern]:
    """The constrained layouts, by value."""
    if not isinstance(constraints, Mapping):
        raise ConstraintError(
            f"constraints is a {type(constraints).__name__}", fix='a dict name -> layout, {"*.weight": "I, S(0)"}'
        )
    found: dict[str, LayoutPattern] = {}
    program, origin = step.program, dict[str, str]()
    known = list(targets(program)) if constraints else []
    for glob, line in constraints.items():
        if not isinstance(glob, str):
            raise ConstraintError(f"constraints names {glob!r}, which is not text", fix='a name: {"*.weight": "I, S(0)"}')
        if not isinstance(line, str):
            raise ConstraintError(f"the constraint {glob!r} is {line!r}, which is not text", fix='a layout such as "I, S(1)"')
        hits = [value for name, value in known if fnmatchcase(name, glob)]
        if not hits:
            close = [name for name, _ in known if glob.strip("*") and glob.strip("*") in name][:3]
            raise ConstraintError(
                f"the constraint {glob!r} names nothing in the model",
                close=", ".join(close),
                fix='a parameter, a module path, or "module.path:op#n"; * matches any part',
            )
        for value in dict.fromkeys(hits):
            pattern = _pattern(program, program.values[value], mesh, glob, line)
            if value in found and found[value] != pattern:
                raise ConstraintError(
                    f"two constraints contradict each other on {value}",
                    first=f"{origin[value]!r}: {constraints[origin[value]]!r}",
                    second=f"{glob!r}: {line!r}",
                    fix="drop one of them, or make its name match less",
                )
            found[value], origin[value] = pattern, glob
    return found | dict.fromkeys(_read_by_hoisted(step, found), (I,) * len(mesh.sizes))


def _read_by_hoisted(step: TrainingStep, constrained: Mapping[str, LayoutPattern]) -> Iterator[str]:
    """The buffers that must be whole on every device, because each computes what micro-batches share from them."""
    ops = step.loop.hoisted.ops if step.loop and step.loop.hoisted else ()
    read = {name for op in ops for name in op.operands}
    for buffer in step.program.buffers:
        if buffer.value.name in read:
            if any(state not in (None, I) for state in constrained.get(buffer.value.name, ())):
                what = f"{buffer.value.name} cannot be split: what micro-batches share is computed with all of it"
                raise ConstraintError(what, fix="drop its constraint, or microbatches=1")
            yield buffer.value.name


def _pattern(program: Program, value: Value, mesh: Mesh, glob: str, line: str) -> LayoutPattern:
    short = mesh.has_memories and line.count(",") + 1 == len(mesh.sizes) - 1
    try:
        pattern = parse(f"{line}, *" if short else line, value.shape, mesh.sizes, value.name)
    except LayoutError as error:
        raise ConstraintError(f"the constraint {glob!r} cannot be met: {error.what}", **error.details) from error
    given = value.name not in program.producer
    for state in pattern:
        if state is not None and given and state.kind not in "ISHD":
            raise ConstraintError(
                f"the constraint {glob!r} stores {value.name} in state {state.kind}", fix="stored tensors are I or S"
            )
    weight = value.name in {p.value.name for p in program.parameters}
    elsewhere = [state for state in pattern if state in AWAY]
    if elsewhere and not (elsewhere == [pattern[-1]] and elsewhere[0].kind in mesh.places and weight):
        raise ConstraintError(
            f"the constraint {glob!r} has {value.name} in state {elsewhere[0]}",
            fix="parameters only, in an entry for the axis of memories after those of the mesh, with offload='host' or 'disk'",
        )
    return pattern
