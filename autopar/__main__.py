"""`python -m autopar`, or `autopar`: the commands of the command line.

autopar explain TARGET --mesh 2,4 --device h100     plan a model and explain the plan
autopar allocate CLUSTER.toml                       divide a cluster's devices among several jobs
autopar profile TARGET --save machine.json          measure this machine, to price plans by it instead of data sheets
autopar completion bash                             a completion script: eval "$(autopar completion bash)"
autopar --version
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import autopar

COMMANDS = {"explain": "autopar.explain", "allocate": "autopar.allocate", "profile": "autopar.profile"}  # each has a `main`


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command with the arguments after its name; returns the exit code."""
    from autopar.explain.exit_code import exit_code

    return exit_code(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: Sequence[str]) -> int:
    name, *rest = [*arguments, ""]
    if name in COMMANDS:
        from autopar.planning.garbage import collect_seldom

        collect_seldom()
        code: int = importlib.import_module(COMMANDS[name]).main(rest[:-1])
        return code
    if name == "completion":
        return _complete(rest[0])
    if name == "--version":
        print(f"autopar {autopar.__version__}")
        return 0
    asked = name in ("", "-h", "--help")
    wrong = "" if asked else f"no such command: {name}\n\n"
    print(wrong + (__doc__ or "").strip(), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def _complete(shell: str) -> int:
    """Print the completion of all commands."""
    from autopar import profile
    from autopar.allocate import command
    from autopar.explain import cli_options, completion

    explain = cli_options.parser("plan a model and explain the plan")
    print(completion.script(shell, {"explain": explain, "allocate": command.parser(), "profile": profile.parser()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
