"""`autopar` and `python -m autopar`: the commands that exist, and that each is dispatched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.__main__ import COMMANDS, main

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_the_commands_are_listed_and_an_unknown_one_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    for asked in ([], ["--help"]):
        assert main(asked) == 0
        printed = capsys.readouterr().out
        assert all(f"autopar {name}" in printed for name in COMMANDS)
    assert main(["explian"]) == 2
    assert "no such command: explian" in capsys.readouterr().err


def test_the_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert autopar.__version__ == PROJECT["version"]
    assert "__version__" not in vars(autopar)  # it is read when it is asked for
    with pytest.raises(AttributeError, match="module 'autopar' has no attribute '__versoin__'"):
        autopar.__versoin__  # type: ignore[attr-defined]  # noqa: B018
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"autopar {PROJECT['version']}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_given_what_follows_its_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert f"python -m autopar.{name}" in capsys.readouterr().out


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
def test_a_shell_completes_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    written = capsys.readouterr().out
    ask = """
        complete_words() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _shtab_autopar; echo "${COMPREPLY[*]}"; }
        complete_words autopar ex
        complete_words autopar explain --why
    """
    said = subprocess.run(["bash", "-c", written + ask], capture_output=True, text=True, check=True).stdout.split("\n")
    assert said[0].split() == ["explain"]
    assert set(said[1].split()) == {"--why", "--why-not"}
    assert main(["completion", "fish"]) == 2
    assert "no completion for the shell 'fish'" in capsys.readouterr().err


def test_the_console_script_is_this_one() -> None:
    script = EntryPoint(name="autopar", value=PROJECT["scripts"]["autopar"], group="console_scripts")
    assert script.load() is main


@pytest.mark.parametrize("arguments", [["explain", "{}/plan.json"], ["--help"], ["completion", "bash"]], ids=str)
def test_a_reader_that_has_seen_enough_is_no_error(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    autopar.plan(nn.Linear(4, 4), torch.empty(2, 4), (1,)).save(tmp_path / "plan.json")
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main([one.format(tmp_path) for one in arguments]) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_disk_that_is_full_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["--help"]) == 1
    assert capsys.readouterr().err == "cannot write the output: No space left on device\n"


def test_output_that_was_closed_before_is_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    autopar.plan(nn.Linear(4, 4), torch.empty(2, 4), (1,)).save(tmp_path / "plan.json")
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["explain", f"{tmp_path}/plan.json"]) == 0


@pytest.mark.parametrize("given, said", [
    (["--processes", "0", "--save", "x.json"], "--processes 0 is not a number of processes"),
    (["--save", "/no/such/folder/x.json"], "cannot write '/no/such/folder/x.json'"),
    (["--save", ""], "cannot write ''"),
    (["--save", "model.py"], "cannot write 'model.py'"),
    (["--save", "/"], "cannot write '/'"),
])  # fmt: skip
def test_a_profile_is_refused_before_anything_is_measured(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "none.py:build", *given]) == 2
    assert said in capsys.readouterr().err
