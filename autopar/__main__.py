"""`python -m autopar`, or `autopar`: the commands of the command line.

autopar explain TARGET --mesh 2,4 --device h100     plan a model and explain the plan
autopar allocate CLUSTER.toml                       give the devices of a cluster to several jobs
autopar profile TARGET --save machine.json          measure this machine, for prices in the place of data sheets
autopar --version
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

COMMANDS = {"explain": "autopar.explain", "allocate": "autopar.allocate", "profile": "autopar.profile"}  # each has a `main`


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command with the arguments after its name; returns the exit code."""
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments), ""]
    if name in COMMANDS:
        code: int = importlib.import_module(COMMANDS[name]).main(rest[:-1])
        return code
    if name == "--version":
        print(f"autopar {version('autopar')}")
        return 0
    asked = name in ("", "-h", "--help")
    wrong = "" if asked else f"no such command: {name}\n\n"
    print(wrong + (__doc__ or "").strip(), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
