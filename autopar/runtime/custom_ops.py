"""The user's custom operators in worker processes: their modules are imported there, and their rules are sent."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch._library.custom_ops import OPDEFS
from torch._library.simple_registry import singleton

from autopar.errors import InputError
from autopar.ir.program import overload, qualified
from autopar.operators import Rule
from autopar.operators.registry import REGISTERED

MAIN = "__main__"
BUILT_IN = ("aten", "prims", "prim")  # libraries that every process has


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators:
    """Custom operators, the modules that define them, and their registered rules."""

    modules: Mapping[str, str] = field(default_factory=dict)  # target -> module, "" where that is not known
    script: str = ""  # the file of the main module
    libraries: tuple[str, ...] = ()  # loaded by torch.ops.load_library
    rules: Mapping[str, Rule] = field(default_factory=dict)

    @staticmethod
    def of(targets: Iterable[str]) -> Operators:
        """The custom operators among these targets; raises InputError for one that is defined in a notebook or typed in."""
        main = sys.modules[MAIN]
        spec, script = main.__spec__, str(main.__dict__.get("__file__", ""))
        modules = {target: _module(target) for target in dict.fromkeys(targets) if target.split(".")[0] not in BUILT_IN}
        for target, module in modules.items():
            if module == MAIN and spec is not None:
                modules[target] = spec.name
            elif module == MAIN and not script.endswith(".py"):
                raise InputError(
                    f"{qualified(target)} is defined in a notebook or interactively: worker processes cannot import it",
                    fix="put it into a file of its own, and import that",
                )
        return Operators(
            modules=modules,
            script=script,
            libraries=tuple(sorted(torch.ops.loaded_libraries)) if modules else (),
            rules=dict(REGISTERED),
        )

    def unpack(self) -> None:
        """Import and register the operators in this process; raises InputError if the imports do not define them all."""
        REGISTERED.update(self.rules)
        for library in self.libraries:
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        for target, module in self.modules.items():
            if not _known(target) and module == MAIN:
                runpy.run_path(self.script, run_name="__mp_main__")  # as multiprocessing calls the main module elsewhere
            elif not _known(target) and module:
                importlib.import_module(module)
            if not _known(target):
                raise InputError(
                    f"a worker process has no operator {qualified(target)}",
                    imported=self.script if module == MAIN else module or "nothing, since its module is unknown",
                    fix="define it with torch.library.custom_op, in a module that can be imported",
                )


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
