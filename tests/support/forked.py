"""Separate processes without the seconds that importing torch takes: they are forked from a server that has imported it."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["autopar", "tests.support.elastic_training"])


def ended(function: Callable[..., object], *arguments: object, timeout: float = 300.0) -> int:
    """The exit code of a process that ran a function: negative where a signal ended it."""
    process = FORKED.Process(target=function, args=arguments)
    process.start()
    try:
        process.join(timeout)
        assert process.exitcode is not None, f"it did not end within {timeout:g} s"
        return process.exitcode
    finally:
        process.kill()
        process.join()


def printed_by(module: str, *words: str, log: Path) -> str:
    """What `python -m module words` prints, which must succeed."""
    code = ended(_as_main, log, module, words)
    said = log.read_text()
    assert code == 0, said
    return said


def run_script(script: Path, log: Path) -> None:
    """What `python script` does, in this process, which prints into a file."""
    prints_into(log)
    sys.argv = [str(script)]
    runpy.run_path(str(script), run_name="__main__")


def prints_into(log: Path) -> None:
    """From now on this process prints into a file, after what stands there."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _as_main(log: Path, module: str, words: tuple[str, ...]) -> None:
    prints_into(log)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
