"""Warnings about a model before it is planned: useless axes, operators without a rule."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from autopar.analysis.analysis import Analysis
from autopar.errors import MeshError, RuleError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Op, Program, qualified, text
from autopar.operators import rule_of, writes
from autopar.passes.padding import PaddingExtent
from autopar.solver.settings import DEFAULTS


def useless_axes(analysis: Analysis, mesh: Mesh, *, padding: bool) -> None:
    """Warn about axes over which nothing in the model can be split: every device along them does the same.

    `padding` says that plans with padded dims were tried.
    """
    fits = [fitted for fitted in analysis.fits.values() if fitted]
    dims = {factor.size for fitted in fits for factor in fitted.factors if not factor.whole and factor.size > 1}
    dims |= {fitted.factors[f].size for fitted in fits for form in fitted.distributed for f in fitted.factors_of(form)}
    for axis, size in zip(mesh.axes, mesh.sizes, strict=True):
        if size > 1 and all(dim % size for dim in dims):
            longer = list(_longer(analysis.program, mesh, size))[:6] if padding else []
            error = MeshError(
                f"no dim of the model can be split over the {size} devices of mesh axis {axis!r}: planned whole there",
                mesh=mesh,
                dims=", ".join(map(str, sorted(dims)[:12])),
                padding=f"{', '.join(longer)}: no plan was found that wins {DEFAULTS.padding_gain:.1%} by it"
                if longer
                else None,
                fix=f"axes whose sizes divide the dims of the model, or a batch that is a multiple of {size}",
            )
            warnings.warn(str(error), stacklevel=4)


def _longer(program: Program, mesh: Mesh, size: int) -> Iterator[str]:
    """The dims that padding makes divisible by the size of an axis: "97 -> 104"."""
    wider = PaddingExtent.PARTS.rooms(program, mesh)
    dims = {pair for name in wider for pair in zip(program.values[name].shape, wider[name], strict=True)}
    yield from (f"{before} -> {after}" for before, after in sorted(dims) if before != after and after % size == 0)


def without_rule(analysis: Analysis, *, strict: bool) -> None:
    """Report operators without a rule: once as a warning, or as an error in strict mode."""
    missing: dict[str, Op] = {}
    for op in analysis.program.ops:
        if analysis.fits[op.name] is None and not writes(op):  # what writes a buffer is whole on purpose
            missing.setdefault(op.target, op)
    if not missing:
        return
    op = next(iter(missing.values()))
    error = RuleError(
        f"no sharding rule for {', '.join(missing)}" + ("" if strict else ": planned whole on every device"),
        module=op.module,
        at=op.source,
        fix=_to_register(op),
    )
    if strict:
        raise error
    warnings.warn(str(error), stacklevel=4)


def _to_register(op: Op) -> str:
    """How to register a rule for an operator, or why this call has none."""
    name, known = qualified(op.target), rule_of(op.target)
    if known is None:
        return f'autopar.register_rule("{name}", "..."): autopar.discover_rule("{name}", arguments) finds the line'
    if known.when:
        return f"its rule was registered for calls with {', '.join(f'{key}={text(value)}' for key, value in known.when)}"
    return f"its rule is not for calls like this one: {known}"
