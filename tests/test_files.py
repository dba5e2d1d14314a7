"""A file is the old one or the new one, whole: whatever fails while it is written, and whoever else writes it."""

from __future__ import annotations

import os
import resource
import stat
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from autopar import files
from tests.support.forked import ended

OLD, NEW = "old\n" * 1000, "new\n" * 1000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "plan.json"
    made.write_text(OLD)
    return made


def alone(path: Path) -> bool:
    """Whether no temporary file is left beside it."""
    return [*path.parent.iterdir()] == [path]


def test_a_full_disk_leaves_the_old_file(path: Path) -> None:
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(NEW) // 2, most))
    try:
        with pytest.raises(OSError, match="File too large"):
            files.write(path, NEW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    assert path.read_text() == OLD
    assert alone(path)


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_what_fails_in_the_middle_leaves_the_old_file(
    path: Path, function: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(os, function, failing)
    with pytest.raises(type(error)):
        files.write(path, NEW)
    assert path.read_text() == OLD
    assert alone(path)


def killed_while_it_writes(path: Path) -> None:
    os.fsync = lambda _: os.kill(os.getpid(), 9)
    files.write(path, "new" * 9**6)


def test_a_killed_process_leaves_the_old_file(path: Path) -> None:
    assert ended(killed_while_it_writes, path) == -9
    assert path.read_text() == OLD


def test_of_many_that_write_one_file_the_last_wins_and_a_reader_sees_whole_ones(path: Path) -> None:
    texts = [str(rank) * 50_000 for rank in range(8)]
    with ThreadPoolExecutor(8) as ranks:
        running = [ranks.submit(files.write, path, text) for text in texts]
        while not all(one.done() for one in running):
            assert path.read_text() in (OLD, *texts)
        assert [one.exception() for one in running] == [None] * 8
    assert path.read_text() in texts
    assert alone(path)


def test_permissions_are_those_of_a_plain_write(path: Path) -> None:
    mask = os.umask(0o027)
    try:
        files.write(new := path.with_name("new.json"), NEW)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(new.stat().st_mode) == 0o640
    path.chmod(0o604)
    files.write(path, NEW)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


def test_links_stay_and_what_is_no_file_is_written_plainly(path: Path, tmp_path: Path) -> None:
    link, dangling = tmp_path / "link", tmp_path / "dangling"
    link.symlink_to("plan.json")
    dangling.symlink_to("later.json")
    files.write(link, NEW)
    files.write(dangling, NEW)
    assert link.is_symlink()
    assert path.read_text() == (tmp_path / "later.json").read_text() == NEW
    files.write("/dev/null", NEW)
    with pytest.raises(IsADirectoryError):
        files.write(tmp_path, NEW)
    nowhere = tmp_path / "nowhere" / "plan.json"
    with pytest.raises(FileNotFoundError) as wrong:
        files.write(nowhere, NEW)
    assert wrong.value.filename == str(nowhere)


def test_of_a_file_no_more_is_read_than_it_may_have(path: Path, tmp_path: Path) -> None:
    assert files.read(path) == files.read(path, len(OLD)) == OLD
    endless = tmp_path / "endless.json"
    endless.symlink_to("/dev/zero")
    for wrong, most in ((path, len(OLD) - 1), (endless, 1000)):
        with pytest.raises(ValueError, match=f"it has more than {most} bytes"):
            files.read(wrong, most)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="utf-8"):
        files.read(path)


@pytest.mark.parametrize(
    "text, what",
    [
        ("a = " + "[" * 50_000, "nested too deeply"),
        ("a" + ".a" * 50_000 + " = 1", "more than 1000 dots"),
        ("a = nan", "not finite"),
        ("a = [1, {b = -inf}]", "not finite"),
        ("a = " + "9" * 400, "too large"),
        ("a = " + "9" * 5000, "integer"),
        ("a = [" + "0," * 100_001 + "]", "more than 100000 entries"),
        ("a = ", "Invalid value"),
    ],
)
def test_toml_that_takes_long_or_that_nobody_means_is_refused_at_once(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        files.parse_toml(text)


def test_toml_is_what_tomllib_makes_of_it() -> None:
    text = 'a.b = [1, 2.5, "x", true]\n[[c]]\nd = 1979-05-27\n'
    assert files.parse_toml(text) == tomllib.loads(text)


def test_surrogates_are_escaped(path: Path) -> None:
    files.write(path, "layer\ud800")
    assert path.read_text() == "layer\\ud800"
