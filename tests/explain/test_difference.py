"""Two plans compared: totals, changed communication, layouts and splits; and summaries that fold without loss."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.explain import difference
from autopar.explain.difference import ROWS, Difference, Total
from autopar.explain.summary import Summary, fold, unfold
from autopar.plan.plan import Plan
from tests.support import planning

MESH = planning.mesh((2, 4), planning.NETWORK, planning.NVLINK)
PARTS = st.one_of(st.integers(0, 12).map(str), st.sampled_from(["h", "attn", "w", "add#0", "01", "weight"]))
NAMES = st.tuples(st.lists(PARTS, min_size=1, max_size=4), st.sampled_from([".", ":"])).map(lambda made: made[1].join(made[0]))


@functools.cache
def plan(strategy: str) -> Plan:
    return planning.plan(planning.gpt2(8, 64, 256), MESH, strategy=strategy)


@given(st.dictionaries(NAMES, st.sampled_from(["I, I", "S(0), I"])))
def test_folding_loses_nothing(entries: dict[str, str]) -> None:
    assert unfold(fold(entries)) == entries


@pytest.mark.one_in(2)
@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp", "megatron"])
def test_a_summary_goes_through_json_and_is_small(strategy: str) -> None:
    made = plan(strategy)
    summary = Summary.of(made)
    text = json.dumps(summary.to_data())
    assert Summary.from_data(json.loads(text)) == summary
    assert len(text) < len(made.to_json()) / 2
    assert summary.bytes_sent == sum(entry.bytes for entry in made.collectives)
    assert sum(entry.number for entry in summary.collectives) == len(made.collectives)


def test_a_plan_does_not_differ_from_itself() -> None:
    same = difference(plan("ddp"), plan("ddp"))
    assert [total.growth for total in same.totals] == [0, 0, 0, 0]
    assert (same.sent, same.stored, same.runs) == ((), (), ())
    assert all(line.endswith("unchanged") for line in same.lines())


@pytest.mark.parametrize("pair", [("ddp", "fsdp"), ("fsdp", "megatron"), ("replicate", "auto")], ids="-".join)
def test_the_difference_of_the_totals_is_that_of_what_is_sent_and_computed(pair: tuple[str, str]) -> None:
    old, new = map(plan, pair)
    found = difference(old, new)
    assert found.totals[0].new - found.totals[0].old == pytest.approx(new.step_time - old.step_time)
    assert sum(part.new - part.old for part in found.parts) == pytest.approx(new.step_time - old.step_time)
    assert sum(n.bytes - o.bytes for o, n in found.sent) == found.totals[2].new - found.totals[2].old
    assert sum(n.seconds - o.seconds for o, n in found.sent) == pytest.approx(found.parts[1].new - found.parts[1].old)


def test_the_layouts_that_differ_are_all_told_with_repeated_blocks_as_one() -> None:
    old, new = plan("ddp"), plan("fsdp")
    found = difference(old, new).stored
    told = {name: (change.old, change.new) for change in found for name in change.names}
    stored = [name for name in old.layouts if ":" not in name or name.startswith("output:")]
    assert told == {name: (old.layouts[name], new.layouts[name]) for name in stored if old.layouts[name] != new.layouts[name]}
    assert "transformer.h.0-1.mlp.c_fc.weight" in [change.name for change in found]
    assert not [change for change in found if change.name.startswith("transformer.h.0.")]


def test_the_lines_say_figures_collectives_layouts_and_what_is_split() -> None:
    text = "\n".join(difference(plan("ddp"), plan("fsdp")).lines())
    assert "strategy    fsdp, was ddp" in text
    several = replace(plan("ddp"), options={**plan("ddp").options, "microbatches": "4"})
    assert "microbatches 4, was none" in list(difference(plan("ddp"), several).premises())
    assert "peak memory" in text
    assert "\nchanged communication\n" in text
    assert " (new)\n" in text
    assert "\nchanged layouts\n" in text
    assert "  (was I, I)\n" in text
    text = "\n".join(difference(plan("ddp"), plan("megatron")).lines())
    assert re.search(r"\n  transformer.h.0-1.mlp.c_fc:addmm#0 .*out-features  \(was batch, batch\)\n", text)


def test_the_lines_fill_a_screen_at_most() -> None:
    old = plan("ddp")
    layouts = {f"part{i}.weight": "I, I" for i in range(100)}
    found = difference(replace(old, layouts=layouts), replace(old, layouts=dict.fromkeys(layouts, "S(0), I")))
    assert list(found.lines())[-1] == f"  ... and {100 - ROWS} more"
    assert len(list(difference(old, plan("auto")).lines())) <= 40


def test_plans_of_different_models_meshes_and_devices_are_compared_and_told_apart() -> None:
    old = plan("ddp")
    other = planning.plan(planning.llama(8, 64, 256), planning.mesh((8,), device="a100-80gb"), strategy="ddp")
    found = difference(old, other)
    text = "\n".join(found.lines())
    assert f"the model or its sample changed: the program is {other.hash}, was {old.hash}" in text
    assert "mesh        axis0=8, was axis0=2,axis1=4" in text
    assert "device      a100-80gb, was h100" in text
    assert {("", True), ("I, I", False)} <= {(change.old, bool(change.new)) for change in found.stored}
    assert "  (new)" in "\n".join(map(str, found.stored))
    assert "removed  (was I, I)" in "\n".join(map(str, found.stored))


@pytest.mark.parametrize(
    "old, new, said",
    [
        (0.001, 0.0011, "1.100 ms, was 1.000 ms (+10.0%)"),
        (0.001, 0.0009, "0.900 ms, was 1.000 ms (-10.0%)"),
        (0.001, 0.05, "50.000 ms, was 1.000 ms (50 times)"),
        (0.0, 0.001, "1.000 ms, was 0.000 ms"),
        (0.001, 0.001 * (1 + 1e-9), "1.000 ms, unchanged"),
    ],
)
def test_a_total_says_how_much_it_grew(old: float, new: float, said: str) -> None:
    assert str(Total(name="step time", unit="s", old=old, new=new)) == said


def test_bytes_are_written_as_sizes_and_growth_from_nothing_is_infinite() -> None:
    total = Total(name="bytes sent", unit="B", old=0, new=3 * 2**20)
    assert str(total) == "3.00 MiB, was 0 B"
    assert total.growth == float("inf")


def test_a_difference_is_data() -> None:
    summary = Summary.of(plan("ddp"))
    assert Difference(old=summary, new=summary) == difference(plan("ddp"), plan("ddp"))
