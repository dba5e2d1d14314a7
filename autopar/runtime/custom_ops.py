"""The user's operators in worker processes: what defines them is imported there, and their rules come along."""

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
    """Operators that a fresh process does not know: where each is defined, and the rules that were registered."""

    modules: Mapping[str, str] = field(default_factory=dict)  # target -> module, "" where that is not known
    script: str = ""  # the file of the main module
    libraries: tuple[str, ...] = ()  # loaded by torch.ops.load_library
    rules: Mapping[str, Rule] = field(default_factory=dict)

    @staticmethod
    def of(targets: Iterable[str]) -> Operators:
        """What these targets need; raises InputError for an operator that is defined in a notebook, or typed in."""
        main = sys.modules[MAIN]
        spec, script = main.__spec__, str(main.__dict__.get("__file__", ""))
        modules = {target: _module(target) for target in dict.fromkeys(targets) if target.split(".")[0] not in BUILT_IN}
        for target, module in modules.items():
            if module == MAIN and spec is not None:
                modules[target] = spec.name
            elif module == MAIN and not script.endswith(".py"):
                raise InputError(
                    f"{qualified(target)} is defined where other processes cannot import it from",
                    fix="put it into a file of its own, and import that",
                )
        return Operators(
            modules=modules,
            script=script,
            libraries=tuple(sorted(torch.ops.loaded_libraries)) if modules else (),
            rules=dict(REGISTERED),
        )

    def unpack(self) -> None:
        """Make this process know them; raises InputError where what was imported does not define them."""
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
                    f"a fresh process does not know {qualified(target)}",
                    imported=self.script if module == MAIN else module or "nothing: it is not known where it is defined",
                    fix="define it with torch.library.custom_op, in a module that can be imported",
                )


def _known(target: str) -> bool:
    try:
        overload(target)
    except AttributeError:
        return False
    return True


def _module(target: str) -> str:
    """The module that defines an operator, as far as torch knows."""
    name = qualified(target)
    if name in OPDEFS:
        return str(OPDEFS[name]._init_fn.__module__)
    kernels = singleton.find(name).fake_impl.kernels
    file = kernels[-1].source.rpartition(":")[0] if kernels else None
    return next((name for name, module in sys.modules.items() if file and module.__dict__.get("__file__") == file), "")
