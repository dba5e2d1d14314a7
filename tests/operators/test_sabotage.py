"""Rules that were made wrong at random are caught by the law."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

KINDS = (
    "splits a whole factor",
    "swaps two dims of a result",
    "drops a factor of a result",
    "drops a factor of an operand",
    "changes what is added",
    "calls an operand linear",
    "takes a member from a group",
    "makes two groups one",
    "forgets to divide a mean",
)


def test_every_rule_that_is_made_wrong_is_caught() -> None:
    """In a process of its own: an operator may trust the sizes that it is given."""
    root = Path(__file__).parent.parent.parent
    ran = subprocess.run(
        [sys.executable, "-m", "tests.operators.sabotage", "--seed", "0", "--count", "20"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.endswith("20 of 20 were caught\n")
    assert [kind for kind in KINDS if kind not in ran.stdout] == []
