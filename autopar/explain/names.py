"""Finds the operators and given tensors that a name means: a value, a parameter, a module, or a glob of these."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial

from autopar.analysis.analysis import Analysis
from autopar.errors import InputError
from autopar.formulation.cost_breakdown import told
from autopar.ir.program import Op
from autopar.search_space.constraints import targets


def choices_of(analysis: Analysis, glob: str) -> list[str]:
    """The classes of ops and given tensors that a name means, each once.

    An exact match takes precedence over a glob. A module means its own operators that the report names; if it has none, those
    inside it; if there are none, all of its operators. Raises InputError for a name that matches nothing, with the closest
    names.
    """
    program = analysis.program
    inside = _modules(program.ops)
    exact = {name: value for name, value in targets(program) if name not in inside}
    matches = glob.__eq__ if glob in exact or glob in inside else partial(fnmatchcase, pat=glob)
    hits = [program.producer[v].name if v in program.producer else v for n, v in exact.items() if matches(n)]
    hits += [op.name for module, ops in inside.items() if matches(module) for op in _telling(analysis, module, ops)]
    if not hits:
        close = difflib.get_close_matches(glob.replace("*", ""), [*exact, *inside], n=3, cutoff=0.5)
        raise InputError(
            f"nothing in the model is named {glob!r}",
            close=", ".join(close),
            fix='a module path, a parameter, or "module.path:op#n"; * matches any part',
        )
    return list(dict.fromkeys(analysis.classes.of[name] for name in hits))


def _modules(ops: Sequence[Op]) -> dict[str, list[Op]]:
    """Every module path with the ops inside it."""
    found: dict[str, list[Op]] = {}
    for op in ops:
        parts = op.name.partition(":")[0].split(".")
        for depth in range(1, len(parts) + 1):
            if parts[0]:
                found.setdefault(".".join(parts[:depth]), []).append(op)
    return found


def _telling(analysis: Analysis, module: str, ops: Sequence[Op]) -> Sequence[Op]:
    """The ops of a module that people ask about."""
    own = [op for op in ops if op.name.startswith(f"{module}:")]
    telling = [[op for op in group if told(analysis, op)] for group in (own, ops)]
    return next(filter(None, (*telling, own, ops)))
