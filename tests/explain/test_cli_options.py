"""Command line options that make no sense together are refused; none is silently ignored."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.explain import main
from autopar.explain.cli_arguments import (
    UsageError,
    parse_answer,
    parse_count,
    parse_devices,
    parse_dynamic,
    parse_mesh,
    parse_seconds,
    parse_stages,
)

DIFF, CHECK, PAGE = "--diff a.json b.json", "--check baselines", "model.py:build --mesh 2 --html page.html"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"{DIFF} --html page.html", "--diff compares two saved plans: --html cannot be combined"),
        (f"{DIFF} --devices 8 --within 2s --price 3", "two saved plans: --devices, --within, --price cannot be combined"),
        (f"{DIFF} --price 0", "--price cannot be combined"),
        (f"{CHECK} --html page.html", "--check prints no report: --html cannot be combined"),
        (f"{CHECK} --within 2s --price 0", "--within, --price cannot be combined"),
        (f"{CHECK} --devices 8", "--check compares one plan: --devices cannot be combined"),
        (f"{CHECK} --mesh auto --devices 8", "baselines name their own: --mesh, --devices only with a TARGET"),
        (f"{CHECK} --precision bf16 --microbatches 2", "--precision, --microbatches only with a TARGET"),
        ("model.py:build --mesh 2 --devices 8 --check a.json", "--check compares one plan: --devices cannot be combined"),
        ("model.py:build --mesh 2 --price 0", "no numbers of devices: --price only with --devices"),
        ("model.py:build --mesh 2 --tolerance 0", "nothing is checked: --tolerance only with --check"),
        ("model.py:build --mesh auto", "--mesh auto does not say how many devices there are"),
        (f"{PAGE} --json", "--html writes a page: --json cannot be combined"),
        (f"{PAGE} --why x --code --sensitivity", "--html writes a page: --why, --sensitivity, --code cannot be combined"),
        (f"{PAGE} --devices 8 --within 2s", "--html writes a page: --within cannot be combined"),
        (f"{PAGE} --price 3", "no numbers of devices: --price only with --devices"),
        (f"{PAGE} --devices 8 --price -1", "is not a price"),
        ("model.py:build --mesh 2 --trace model.py", "--trace model.py would write over what this command reads"),
        ("model.py:build --mesh 2 --save x.json --trace ./x.json", "--trace ./x.json would write over what this command"),
        ("plan.json --html plan.json", "--html plan.json would write over what this command reads or writes"),
        ("model.py:build --mesh 2 --trace=", "--trace names no file"),
    ],
)
def test_options_that_say_nothing_together_are_refused(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert said in " ".join(capsys.readouterr().err.split())


ODD = """
import warnings
import torch
def build():
    warnings.warn("of the user")
    return torch.nn.Linear(5, 7), torch.zeros(5, 5)
"""


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--strategy nope", "no strategy is called 'nope'"),
        ("--budget abc", "'abc' is not a memory budget"),
        ("--offload host --host-memory abc", "'abc' is not an amount of the host's memory"),
        ("--precision fp8", "precision='fp8' is unknown"),
        ("--device h1000", "no device is called 'h1000'; did you mean 'h100'?"),
        ("--microbatches 0", "microbatches=0 is not a number of micro-batches"),
        ("--plan=", "--plan names no file"),
        ("--microbatches abc", "microbatches='abc' is not a number"),
        ("--offload True", "--offload True is not known fix activations, host, disk, auto, no"),
        ("--recompute maybe", "no recomputation is called 'maybe'"),
        ("--mode serve", "mode='serve' is not known"),
        ("--time-limit -1", "time_limit=-1.0 is not a number of seconds"),
        ("--optimizer foo", "no optimizer is called 'foo'"),
        ("--pipeline axis0 --schedule foo", "'foo' is not a pipeline schedule"),
        ("--pipeline axis0 --schedule gpipe+2", "'gpipe+2' is not a pipeline schedule"),
        ("--pipeline axis0 --schedule nowhere.csv", "cannot read the pipeline schedule nowhere.csv"),
        ("--pipeline axis0 --stages 0", "stages=0 is not a number of stages"),
        ("--dynamic b=0 --dynamic b=1", "two sizes of one name given b=0; b=1"),
        ("--assume m.py:1=True --assume m.py:1=False", "two answers to one name given m.py:1=True; m.py:1=False"),
        ("--pipeline nope", "the mesh has no axis 'nope' for the pipeline"),
        ("--pipeline axis0 --mesh auto --devices 4", "mesh='auto' has no axis 'axis0' for the pipeline"),
    ],
)
def test_a_value_that_an_option_does_not_have_is_an_error_of_the_command_line(
    option: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any model is built; by 1, the code of a cost above its baseline, a check in CI told it as that."""
    assert main(f"nowhere.py:build --mesh 2 {option}".split()) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (".:build", "'.:build' does not name a function"),
        ("..models:build", "'..models:build' does not name a function"),
        (
            "os.path:join",
            "os.path:join failed: TypeError: join() missing 1 required positional argument: 'a' fix a function",
        ),
    ],
)
def test_a_target_that_cannot_be_called_is_refused_by_what_is_wrong_with_it(
    target: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, with a TypeError of importlib, and with the line of autopar that called it."""
    assert main([target, "--mesh", "2"]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_tolerance_is_a_fraction(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--check", "baselines", "--tolerance", "abc"])
    assert "argument --tolerance: invalid fraction value: 'abc'" in capsys.readouterr().err


def test_a_plan_on_an_open_mesh_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For one number of devices: several have no one plan."""
    (tmp_path / "one_linear.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(64, 64), torch.empty(32, 64)\n"
    )
    target, baseline = f"{tmp_path}/one_linear.py:build", f"{tmp_path}/open.json"
    asked = [target, "--mesh", "auto", "--device", "h100", "--check", baseline, "--devices"]
    assert main([*asked, "2", "--update"]) == 0
    assert main([*asked, "2"]) == 0
    assert "ok" in capsys.readouterr().out
    assert main([*asked, "2,4"]) == 2
    assert "--devices 2,4 is several meshes: one plan is compared" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_mesh, "{0}"),
        (parse_mesh, "dp={0}"),
        (parse_answer, "model.py:1={0}"),
        (parse_dynamic, "batch={0}"),
        (parse_dynamic, "batch=x:{0}"),
        (parse_seconds, "{0}s"),
        (parse_devices, "{0}"),
    ],
)
def test_numbers_of_thousands_of_digits_are_refused(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(UsageError):
        parse(text.format("9" * 5000))


def test_a_number_of_thousands_of_digits_is_no_number_but_a_word() -> None:
    assert parse_count("9" * 5000) == "9" * 5000
    assert parse_stages("9" * 5000) == ["9" * 5000]


def test_a_file_that_is_no_python_is_refused_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wrong.py").write_text("import torch\ndef build(:\n")
    assert main([f"{tmp_path}/wrong.py:build", "--mesh", "2"]) == 2
    assert f"at {tmp_path}/wrong.py:2" in " ".join(capsys.readouterr().err.split())


def test_warnings_of_autopar_are_printed_without_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = list[str]()
    (tmp_path / "odd.py").write_text(ODD)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda *args: printed.append(warnings.formatwarning(*args[:4])))
        assert main([f"{tmp_path}/odd.py:build", "--mesh", "3", "--device", "h100"]) == 0
    theirs, own = sorted(text for text in printed if "no dim of the model" in text or "of the user" in text)
    assert own.startswith("warning: no dim of the model can be split over the 3 devices")
    assert theirs.startswith(f"{tmp_path}/odd.py:5: UserWarning: of the user")
