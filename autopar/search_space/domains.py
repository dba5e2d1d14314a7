"""What each class may choose from: candidates of ops, layouts of given tensors and of outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from weakref import WeakKeyDictionary

from autopar.analysis.analysis import Analysis, representatives
from autopar.analysis.block_counts import Blocks
from autopar.errors import ConstraintError
from autopar.ir.layout import I, Layout, storable, text
from autopar.ir.program import OUTPUT, Output, Parameter, Value
from autopar.search_space.candidates import Candidate, candidates
from autopar.search_space.layout_graph import layout_graph, placeable, states
from autopar.search_space.strategies import StrategyConstraints

_LISTED: WeakKeyDictionary[Analysis, Mapping[str, list[Candidate]]] = WeakKeyDictionary()


def offers(
    analysis: Analysis, constraints: StrategyConstraints, sharded_outputs: Callable[[Output], bool]
) -> Iterator[tuple[str, list[Candidate]]]:
    """The candidates of every class that the constraints allow. Raises ConstraintError if they allow none."""
    return (
        (name, _accepted(analysis, name, found, constraints)) for name, found in _all(analysis, constraints, sharded_outputs)
    )


def _all(
    analysis: Analysis, constraints: StrategyConstraints, sharded_outputs: Callable[[Output], bool]
) -> Iterator[tuple[str, list[Candidate]]]:
    program, sizes = analysis.program, analysis.sizes
    whole = (I,) * len(sizes)
    for value in program.inputs:
        if analysis.classes.of[value.name] == value.name:
            layout = analysis.step.received.get(value.name, constraints.input_layouts.get(value.name, whole))
            yield value.name, [Candidate(forms=(), operands=(), results=(layout,))]
    for parameter in (*program.parameters, *program.buffers):
        name = parameter.value.name
        if analysis.classes.of[name] == name:
            layouts = stored(parameter, sizes, analysis.blocks[name], analysis.step.unpadded.get(name))
            if name in analysis.stored_anywhere:
                layouts = [*layouts, *((*layout[:-1], there) for there in analysis.places for layout in layouts)]
            yield name, [Candidate(forms=(), operands=(), results=(layout,)) for layout in layouts]
    yield from _of_ops(analysis).items()
    for output in program.outputs:
        value = program.values[output.value]
        if analysis.step.sends:
            yield (
                OUTPUT + output.path,
                [
                    Candidate(forms=(), operands=(layout,), results=())
                    for layout in _any_layout(value, sizes, analysis.blocks[value.name])
                ],
            )
        elif sharded_outputs(output):
            yield (
                OUTPUT + output.path,
                [
                    Candidate(forms=(), operands=(layout,), results=())
                    for layout in invariant_or_split(value.shape, sizes, ((1,),) * len(value.shape))
                    if storable(layout, analysis.step.batch_shape(value.name), sizes)
                ],
            )
        else:
            yield OUTPUT + output.path, [Candidate(forms=(), operands=(whole,), results=())]


def _of_ops(analysis: Analysis) -> Mapping[str, list[Candidate]]:
    """The candidates of every class of ops, before constraints, so that they are listed only once."""
    if analysis in _LISTED:
        return _LISTED[analysis]
    program, sizes = analysis.program, analysis.sizes
    listed: dict[str, list[Candidate]] = {}
    alike: dict[tuple[object, ...], list[Candidate]] = {}
    for name, op in representatives(program, analysis.classes).items():
        names = (*op.operands, *(r.name for r in op.results))
        kinds = tuple((program.values[n].shape, program.values[n].requires_grad, analysis.blocks[n]) for n in names)
        key = (str(analysis.fits[name]), analysis.fits[name], kinds)
        if key not in alike:
            alike[key] = [
                c
                for c in candidates(op, analysis.fits[name], program.values, sizes, analysis.blocks)
                if all(
                    placeable(layout, shape, sizes, counts)
                    for layout, (shape, _, counts) in zip((*c.operands, *c.results), kinds, strict=True)
                )
            ]
        listed[name] = alike[key]
    _LISTED[analysis] = listed
    return listed


def _any_layout(value: Value, sizes: tuple[int, ...], blocks: Blocks) -> Sequence[Layout]:
    """Every layout of a value, in all four states."""
    allowed = tuple(map(tuple, states(value.shape, sizes, blocks, value.requires_grad)))
    return layout_graph(value.shape, sizes, allowed, blocks).nodes


def _accepted(analysis: Analysis, name: str, found: list[Candidate], constraints: StrategyConstraints) -> list[Candidate]:
    """The candidates of a class that the constraints allow."""
    program = analysis.program
    results = [name] if name not in program.op else [r.name for r in program.op[name].results]
    if not any(result in constraints.patterns for result in results):
        if constraints.invariant:
            whole = [c for c in found if all(state == I for layout in (*c.operands, *c.results) for state in layout)]
            if not whole:  # what comes from another pipeline stage comes as it is
                raise ConstraintError(f"{name} is split before anything runs", fix="another strategy")
            return whole
        return _split_preferred(name, found, constraints)
    kept = [c for c in found if all(constraints.allows_layout(r, x) for r, x in zip(results, c.results, strict=True))]
    if not kept:
        value = next(program.values[r] for r in results if r in constraints.patterns)
        pattern = constraints.patterns[value.name]
        asked = text(tuple(state or I for state in pattern), value.shape, analysis.sizes).split(", ")
        wanted = ", ".join("*" if state is None else entry for state, entry in zip(pattern, asked, strict=True))
        raise ConstraintError(
            f"{value.name} cannot be {'produced' if name in program.op else 'stored'} as {wanted!r}",
            shape=value.shape,
            known="; ".join(dict.fromkeys(text(c.results[0], value.shape, analysis.sizes) for c in found[:8])),
            at=program.op[name].source if name in program.op else "",
            fix="one of the layouts above, or * on an axis that may stay free",
        )
    return _split_preferred(name, kept, constraints)


def _split_preferred(name: str, found: list[Candidate], constraints: StrategyConstraints) -> list[Candidate]:
    """The candidates that split the work over a strategy's split axes, if there are any."""
    for axis in constraints.split_axes.get(name, ()):
        found = [c for c in found if c.results[0][axis].kind in "SP"] or found
    return found


def stored(parameter: Parameter, sizes: tuple[int, ...], blocks: Blocks, true: tuple[int, ...] | None = None) -> list[Layout]:
    """The layouts in which a parameter or buffer may be stored, in its true shape if it is padded: every axis I or S."""
    if not parameter.used:
        return [(I,) * len(sizes)]
    found = invariant_or_split(parameter.value.shape, sizes, blocks)
    return [layout for layout in found if storable(layout, true, sizes)] if true else found


def invariant_or_split(shape: tuple[int, ...], sizes: tuple[int, ...], blocks: Blocks) -> list[Layout]:
    """Every layout of a shape without R and P that a DTensor can have."""
    allowed = tuple(tuple(s for s in axis if s.kind in "IS") for axis in states(shape, sizes, blocks, True))
    return [layout for layout in layout_graph(shape, sizes, allowed, blocks).nodes if storable(layout, shape, sizes)]
