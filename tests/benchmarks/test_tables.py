"""Published measurements are read completely, and an invalid row raises an error with its location."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.fidelity.models import Decoder, Model
from benchmarks.fidelity.tables import MEASURED, READERS, Run, Skipped, TableError, runs

SMALL = Decoder(width=16, heads=4, key_heads=2, hidden=40, layers=3, vocabulary=32, length=8)


def test_every_row_of_every_table_is_a_run_or_has_a_reason() -> None:
    rows = list(runs())
    found = {table: sum(isinstance(row, Run) and row.table == table for row in rows) for table in READERS}
    assert found == {"mpt": 155, "titan": 8, "oneflow_gpt": 16, "aceso": 2, "mist": 4, "misc": 1}
    staged = [row for row in rows if isinstance(row, Run) and row.stages]
    assert [(row.table, row.stages, row.microbatches) for row in staged] == [
        ("mist", (13, 11), 32), ("mist", (13, 11), 16), ("mist", (13, 11), 16), ("misc", (16, 16), 4),
    ]  # fmt: skip


def test_published_utilization_is_that_of_the_decoder_and_its_step() -> None:
    """llm-foundry prints MFU to two digits after the point, in percent, by the same count of operations."""
    lines = (MEASURED / "mpt.csv").read_text().splitlines()
    column, peaks = lines[0].split(",").index("mfu_percent"), {"h100": 989.5e12}
    for run in runs(tables=("mpt",)):
        assert isinstance(run, Run)
        flops = run.decoder.flops(run.sequences)
        said = float(lines[run.line - 1].split(",")[column])
        assert 100 * flops / (run.seconds * run.devices * peaks.get(run.device, 312e12)) == pytest.approx(
            said, rel=0.01, abs=0.02
        )


@pytest.mark.parametrize(
    "sizes",
    [
        {"key_heads": 4},
        {"gated": True, "tied": False, "biases": False},
        {"key_heads": 4, "biases": False, "tied": False},
        {"key_heads": 4, "post_norm": True, "one_hot": True, "tied": False},
    ],
)
def test_parameters_are_those_of_the_module(sizes: dict[str, object]) -> None:
    decoder = Decoder(**{**{f: getattr(SMALL, f) for f in SMALL.__dataclass_fields__}, **sizes})  # type: ignore[arg-type]
    module: nn.Module = decoder.module()
    assert sum(parameter.numel() for parameter in module.parameters()) == decoder.parameters


def test_one_hot_products_look_up_what_an_embedding_does() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(SMALL.vocabulary, (2, SMALL.length))
    sizes = replace(SMALL, key_heads=4, compute=torch.float32, post_norm=True)
    module = Model(sizes)
    looked_up = module(tokens, tokens)[0]
    module.of = replace(sizes, one_hot=True)
    torch.testing.assert_close(module(tokens, tokens)[0], looked_up)


def _with(tmp_path: Path, table: str, column: str, said: str | None) -> Path:
    """A folder with the first row of a table, in which a column says something else, or is missing."""
    header, first = (line.split(",") for line in (MEASURED / f"{table}.csv").read_text().splitlines()[:2])
    place = header.index(column)
    if said is None:
        header.pop(place)
        first.pop(place)
    else:
        first[place] = said
    (tmp_path / f"{table}.csv").write_text(",".join(header) + "\n" + ",".join(first) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    "column, said, message",
    [
        ("d_model", None, "line 2 of mpt.csv has no column 'd_model'"),
        ("step_time_s_from_total", "nan", "line 2 of mpt.csv has 'nan' as step_time_s_from_total"),
        ("step_time_s_from_total", "0", "line 2 of mpt.csv has '0' as step_time_s_from_total"),
        ("step_time_s_from_total", "inf", "line 2 of mpt.csv has 'inf' as step_time_s_from_total"),
        ("n_layers", "-3", "line 2 of mpt.csv has '-3' as n_layers"),
        ("n_layers", "", "line 2 of mpt.csv has '' as n_layers"),
        ("n_layers", "3.5", "line 2 of mpt.csv has '3.5' as n_layers"),
        ("n_layers", "__import__('os')", "as n_layers"),
        ("n_heads", "7", "heads that do not share the width: 2560 is not a multiple of 7"),
        ("n_params", "1000", "contradicts itself: n_params is not that of its sizes"),
        ("grad_accum", "3", "contradicts itself: microbatch x grad_accum x n_gpus is not global_batch"),
        ("activation_checkpointing", "maybe", "line 2 of mpt.csv has 'maybe' as activation_checkpointing"),
    ],
)
def test_a_row_that_cannot_be_read_is_an_error(tmp_path: Path, column: str, said: str | None, message: str) -> None:
    with pytest.raises(TableError) as raised:
        list(runs(_with(tmp_path, "mpt", column, said), ("mpt",)))
    assert message in str(raised.value)


def test_a_row_that_ends_early_and_a_table_that_is_missing_are_errors(tmp_path: Path) -> None:
    (tmp_path / "mpt.csv").write_text("hardware,d_model,n_heads\nA100-40,64\n")
    with pytest.raises(TableError, match=r"line 2 of mpt\.csv has no column"):
        list(runs(tmp_path, ("mpt",)))
    with pytest.raises(TableError, match=r"cannot read the table titan\.csv"):
        list(runs(tmp_path, ("titan",)))
    (tmp_path / "titan.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TableError, match=r"cannot read the table titan\.csv"):
        list(runs(tmp_path, ("titan",)))


def test_a_device_without_catalog_entry_is_a_reason(tmp_path: Path) -> None:
    (row,) = runs(_with(tmp_path, "mpt", "hardware", "A10G"), ("mpt",))
    assert isinstance(row, Skipped)
    assert row.reason == "A10G is not in the catalog"
