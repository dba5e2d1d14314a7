"""The report page, read with an HTML parser: its contents, its escaping, and no references to the outside."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from autopar.explain import main
from autopar.explain.headline import headline
from autopar.explain.html_report import html_report
from autopar.plan.text import milliseconds
from tests.explain.page_models import AXIS, HOSTILE, LAYERS, asked, deep, staged

pytest.importorskip("bokeh", reason="the HTML report needs the extra [html]")

QUESTIONS = [
    "Why is it slow?",
    "What fills the memory?",
    "What if I had more devices?",
    "What if I had less memory?",
    "Why not FSDP?",
]
PLOTS = ["timeline", "memory", "strategies", "strategy-memory", "budget", "devices", "cost", "energy"]


class Page(HTMLParser):
    """The tags of a page with their attributes, its text, and what its scripts hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(asked()[1])


def test_it_opens_with_the_headline_and_the_figures_of_the_plan(page: Page) -> None:
    plan = asked()[0].plan
    assert headline(plan) in page.text
    assert f"{milliseconds(plan.step_time)} ms" in page.text
    assert f"MFU {plan.breakdown.simulated.mfu:.1%}" in page.text
    assert all(question in page.text for question in QUESTIONS)
    for entry in asked()[0].compared:
        if entry.plan:
            assert milliseconds(entry.plan.step_time) in page.text


def test_names_are_text_and_no_markup(page: Page) -> None:
    """A module and an axis have names that end a script and begin a tag."""
    assert f"inside.{HOSTILE}" in page.text
    assert AXIS in page.text
    assert page.all("i") == page.all("img") == []
    assert len(page.scripts) == len(page.all("script")) == 4
    assert all("</script" not in script.lower() for script in page.scripts)


def test_one_plan_is_always_the_same_page() -> None:
    found = asked()[0]
    assert html_report(found) == html_report(found)
    assert html_report(found.plan) == html_report(found.plan)


def test_a_large_model_is_a_small_page_on_which_layers_that_are_split_alike_are_one() -> None:
    assert len(deep().encode()) < 3e6
    page = Page(deep())
    assert f"0-{LAYERS - 1}.inside.{HOSTILE} linear" in page.text
    assert [found["title"] for found in page.all("span") if found.get("title")].count("ZeRO shards") == 4  # two axes each


def test_it_refers_to_nothing_outside(page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "img", "object", "svg")
        assert not attributes.keys() & {"src", "srcset", "data", "action"}
        assert (attributes.get("href") or "#").startswith("#")
    policy = next(found["content"] for found in page.all("meta") if found.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


def test_it_can_be_read_without_eyes_and_on_a_phone(page: Page) -> None:
    ids = [found["id"] for _, found in page.tags if found.get("id")]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.tags:
        named = attributes.get("aria-labelledby"), attributes.get("aria-describedby")
        assert all(name in ids for name in named if name)
        if tag in ("section", "figure", "nav"):
            assert attributes.get("aria-labelledby") or attributes.get("aria-label")
        if tag == "a":
            assert (attributes["href"] or "")[1:] in ids
    assert len(page.all("h1")) == len(page.all("main")) == len(page.all("header")) == 1
    assert page.all("html")[0]["lang"] == "en"
    assert any(found.get("name") == "viewport" for found in page.all("meta"))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_every_plot_has_its_place_and_its_data(page: Page) -> None:
    items = json.loads(page.scripts[0])
    assert [item["target_id"] for item in items] == [f"plot-{name}" for name in PLOTS]
    assert {item["target_id"] for item in items} <= {found.get("id") for found in page.all("div")}
    assert len(page.all("figcaption")) == len(items)


def test_the_model_is_a_tree_and_answers_why(page: Page) -> None:
    assert "Why so, and why not otherwise" in page.text
    assert re.search(rf"\b0(-\d)?\.inside\.{re.escape(HOSTILE)} linear", page.text)
    assert "the best plan with" in page.text or "nothing changes with" in page.text or "there is no plan with" in page.text


def test_a_plan_in_stages_has_the_schedule_and_every_stage() -> None:
    found = staged()
    pipeline = found.plan.pipeline
    assert pipeline is not None
    for given in (found, found.plan):
        page = Page(html_report(given))
        assert [item["target_id"] for item in json.loads(page.scripts[0])] == ["plot-timeline"]
        assert headline(found.plan) in page.text
        assert all(f"pp={rank}" in page.text for rank in range(2))
        assert all(page.text.count(pipeline.title(stage)) >= 3 for stage in range(2))  # its tree, its time and its memory
        assert page.all("img") == []
        assert "--budget-sweep" in page.text
        assert ("Why so, and why not otherwise" in page.text) == (given is found)


def test_the_command_writes_a_page_of_a_model_and_of_a_saved_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, plan, path = tmp_path / "one_linear.py", tmp_path / "plan.json", tmp_path / "report.html"
    target.write_text("import torch\ndef build():\n    return torch.nn.Linear(64, 64), torch.empty(32, 64)\n")
    asked_for = ["--mesh", "2,2", "--device", "h100", "--devices", "2,4", "--price", "2", "--save", str(plan)]
    assert main([f"{target}:build", *asked_for, "--html", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == f"the report is in {path}"
    page = Page(path.read_text())
    assert printed.splitlines()[0] in page.text
    assert "plot-cost" in path.read_text()
    assert main([str(plan), "--html", str(path)]) == 0
    assert json.loads(Page(path.read_text()).scripts[0]) == []
    assert main([str(plan), "--html", str(path), "--devices", "8", "--budget-sweep"]) == 2
    assert "is a saved plan: --budget-sweep, --devices cannot be answered without the model" in capsys.readouterr().err


def test_of_an_open_mesh_the_page_is_of_the_first_number_of_devices(tmp_path: Path) -> None:
    target, path = tmp_path / "open_mesh.py", tmp_path / "report.html"
    target.write_text("import torch\ndef build():\n    return torch.nn.Linear(64, 64), torch.empty(32, 64)\n")
    for numbers, steps in (("2", 0), ("2,4", 2)):
        asked_for = ["--mesh", "auto", "--devices", numbers, "--device", "h100", "--html", str(path)]
        assert main([f"{target}:build", *asked_for]) == 0
        page = Page(path.read_text())
        assert "2 x h100" in page.text
        assert len([item for item in json.loads(page.scripts[0]) if item["target_id"] == "plot-devices"]) == bool(steps)


def test_without_the_library_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.explain.html_report.LIBRARY", "no_such_library")
    with pytest.raises(Exception, match=r"needs Bokeh.*\n.*pip install \"autopar\[html\]\""):
        html_report(asked()[0])
