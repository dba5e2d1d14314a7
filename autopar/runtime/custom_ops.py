"""The user's custom operators in worker processes: their modules are imported there, and their rules are sent.

An operator that calls an `autograd.Function` is recreated from the function in its defining module.
"""

from __future__ import annotations

import functools
import importlib
import runpy
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._library.simple_registry import singleton

from autopar.errors import InputError
from autopar.ir.program import overload, qualified
from autopar.operators import Rule
from autopar.operators.autograd_functions import DEFINED, NAMESPACE, FunctionOperator, define
from autopar.operators.registry import FOUND, REGISTERED

MAIN = "__main__"
BUILT_IN = ("aten", "prims", "prim")  # libraries that every process has


@dataclass(frozen=True, slots=True, kw_only=True)
class SentFunction:
    """An operator that calls a function, without the function itself: its name in the module that defines it."""

    name: str
    operator: FunctionOperator
    rule: Rule

    @staticmethod
    def of(operator: FunctionOperator) -> SentFunction:
        """Raises InputError for a function that cannot be imported."""
        name = operator.call.function.__qualname__
        if "<locals>" in name:
            raise InputError(
                f"{name} is defined inside of a function: worker processes cannot import it",
                fix="define it at the top of its module",
            )
        without = replace(operator, call=replace(operator.call, function=torch.autograd.Function))
        return SentFunction(name=name, operator=without, rule=FOUND[operator.target])

    def define(self, namespace: Mapping[str, object]) -> None:
        """Create the operator from the function in its module. Raises InputError if the module does not define it."""
        first, *rest = self.name.split(".")
        try:
            function: Any = functools.reduce(getattr, rest, namespace[first])
        except (AttributeError, KeyError) as error:
            fix = "define it at the top of its module, outside of `if __name__`"
            raise InputError(f"a worker process has no {self.name}", fix=fix) from error
        define(replace(self.operator, call=replace(self.operator.call, function=function)))
        FOUND[self.operator.target] = self.rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators:
    """Custom operators, the modules that define them, and their registered rules."""

    modules: Mapping[str, str] = field(default_factory=dict)  # target -> module, "" where that is not known
    script: str = ""  # the file of the main module
    libraries: tuple[str, ...] = ()  # loaded by torch.ops.load_library
    rules: Mapping[str, Rule] = field(default_factory=dict)
    functions: Mapping[str, SentFunction] = field(default_factory=dict)  # by target

    @staticmethod
    def of(targets: Iterable[str]) -> Operators:
        """The custom operators among these targets; raises InputError for one that workers cannot import."""
        modules, functions = dict[str, str](), dict[str, SentFunction]()
        for target in dict.fromkeys(targets):
            library, name, _ = target.split(".")
            if library == NAMESPACE:
                functions[target] = SentFunction.of(DEFINED[name])
                modules[target] = _importable(DEFINED[name].call.function.__module__, functions[target].name)
            elif library not in BUILT_IN:
                modules[target] = _importable(_module(target), qualified(target))
        return Operators(
            modules=modules,
            script=_script(),
            libraries=tuple(sorted(torch.ops.loaded_libraries)) if modules else (),
            rules=dict(REGISTERED),
            functions=functions,
        )

    def unpack(self) -> None:
        """Import and register the operators in this process; raises InputError if the imports do not define them all."""
        REGISTERED.update(self.rules)
        for library in self.libraries:
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        for target, module in self.modules.items():
            if not _known(target) and module:
                found = _namespace(module, self.script)
                if target in self.functions:
                    self.functions[target].define(found)
            if not _known(target):
                raise InputError(
                    f"a worker process has no operator {qualified(target)}",
                    imported=self.script if module == MAIN else module or "nothing, since its module is unknown",
                    fix="define it with torch.library.custom_op, in a module that can be imported",
                )


def _importable(module: str, what: str) -> str:
    """The name by which workers import a module; raises InputError for a notebook or an interactive session."""
    if module != MAIN:
        return module
    spec = sys.modules[MAIN].__spec__
    if spec is not None:
        return spec.name
    if not _script().endswith(".py"):
        raise InputError(
            f"{what} is defined in a notebook or interactively: worker processes cannot import it",
            fix="put it into a file of its own, and import that",
        )
    return MAIN


def _script() -> str:
    return str(sys.modules[MAIN].__dict__.get("__file__", ""))


def _namespace(module: str, script: str) -> Mapping[str, object]:
    """The namespace of a module; the main module is run under the name that multiprocessing gives it in workers."""
    return _run(script) if module == MAIN else vars(importlib.import_module(module))


@functools.cache
def _run(script: str) -> Mapping[str, object]:
    return runpy.run_path(script, run_name="__mp_main__")


def _known(target: str) -> bool:
    try:
        overload(target)
    except AttributeError:
        return False
    return True


def _module(target: str) -> str:
    """The module that defines an operator, empty if torch has no record of it."""
    name = qualified(target)
    if name in OPDEFS:
        return str(OPDEFS[name]._init_fn.__module__)
    kernels = singleton.find(name).fake_impl.kernels
    file = kernels[-1].source.rpartition(":")[0] if kernels else None
    return next((name for name, module in sys.modules.items() if file and module.__dict__.get("__file__") == file), "")
