"""Names are data: none is executed or breaks emitted or printed text, and names that Python considers equal stay distinct."""

from __future__ import annotations

import builtins
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.codegen.names import identifiers
from autopar.codegen.pipeline_module import PipelineModule
from autopar.errors import InputError
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.runtime.workers import WorkerPool
from autopar.verify.verification import verify
from tests.support import table

HOSTILE = [
    "a\ncanary(1)\n    x = 1", 'q");canary(2);("', "q');canary(3);('", "a\rcanary(4)", "\u2028canary(5)", "nul\0", "\\",
    "''' \"\"\"", "lone \ud800", "a;  x = None", "\N{LATIN SMALL LIGATURE FI}", "fi", "\u00e9", "e\u0301", "\u00aa",
    "a", "\u0663", "3", "class", "None", "self", "print", "torch", "device", "__debug__", "_", "autopar", "graph",
    "run", "axes", "tensor_by_name", "getitem", "autopar_runtime_storage_tensor_by_name(", "all_gather__reduce_scatter",
    "[red]", "[/]", ":smile:", "a b", "a_b", "{x}", "%s", "*", "->", "0-9", "0-999999999", "a,b", "x#0", "a@1",
    "\x1b[31m",
]  # fmt: skip


class Leaf(nn.Module):
    """A product whose weight and bias have given names."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.names = name, f"{name}\nb"
        self.register_parameter(name, nn.Parameter(torch.randn(4, 4)))
        self.register_buffer(self.names[1], torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._parameters[self.names[0]], self._buffers[self.names[1]])  # type: ignore[arg-type]


class Called(nn.Module):
    """Submodules, parameters, entries of the argument and of the result under the same given names."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.names = names
        for name in names:
            self.add_module(name, Leaf(name))
            self.register_parameter(f"{name}p", nn.Parameter(torch.randn(4)))

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: self._modules[n](batch[n]) * self._parameters[f"{n}p"] for n in self.names}  # type: ignore[misc]


def drawn(count: int) -> list[str]:
    """Names of characters that mean something to Python, fx, rich or a terminal."""
    draw, letters = random.Random(0), "ab1_\n\r\0\\'\"#;:=()[]{}@%,- \t\u2028\ud800\ufb01"
    return ["".join(draw.choices(letters, k=draw.randint(1, 12))) for _ in range(count)]


NAMES = [*HOSTILE, *drawn(12)]


def batch_of(names: list[str]) -> dict[str, torch.Tensor]:
    return {name: torch.randn(8, 4) for name in names}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return autopar.plan(Called(NAMES), (batch_of(NAMES),), {"[/]\n": 1}, device="h100", strategy="replicate")


def test_no_name_is_executed_or_changes_a_value(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    monkeypatch.setattr(builtins, "canary", called.append, raising=False)
    model, batch = Called(NAMES), batch_of(NAMES)
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.warns(UserWarning, match="the model's autopar, graph, run cannot be reached as an attribute"):
        parallel = autopar.parallelize(model, (batch,), plan.mesh, plan=plan)
    torch.testing.assert_close(parallel(batch), model(batch))
    assert list(parallel.state_dict()) == list(model.state_dict())
    assert called == []


def test_a_name_prints_as_it_is_and_moves_no_cursor(plan: Plan) -> None:
    text = str(plan)
    assert all(character.isprintable() for line in text.split("\n") for character in line)
    for name in ("[red].[red]", "[/].[/]", ":smile:.:smile:", r"a\ncanary(1)\n    x = 1p", r"lone \ud800p"):
        assert re.search(rf"^{re.escape(name)}  ", text, re.MULTILINE), name
    assert str(InputError("no [red] in a\nb", name="\x1b[31m")) == "no [red] in a\\nb\n  name  \\x1b[31m"


def test_on_a_mesh_with_such_axes_numbers_are_equal_too(pool: WorkerPool) -> None:
    names = ["\ufb01", "fi", "q\n", "[red]", "\u00e4", "lone \ud800"]
    on = replace(table.mesh((2, 2)), axes=("\u00e4", "\u00f6"))
    plan = autopar.plan(Called(names), (batch_of(names),), on, strategy="fsdp")
    report = verify(Called(names), (batch_of(names),), on, plan, Options(), pool)
    assert report.ok, str(report)
    assert "[red].[red]" in str(report)


class Scaled(nn.Module):
    """Two blocks, and the product with parameters of given names."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.stages = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.rand(4) + 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.stages:
            x = block(x)
        for name in self.names:
            x = x * self._parameters[name]  # type: ignore[operator]
        return x.square().mean()


@pytest.mark.parametrize(
    "options", [{"mesh": 1}, {"mesh": {"pp": 1}, "pipeline": "pp", "stages": 2, "microbatches": 2}], ids=str
)
def test_what_is_named_like_a_method_or_attribute_of_the_parallel_module_is_trained(options: dict[str, Any]) -> None:
    """A submodule `gather` was our method, and `stages` (ConvNeXt, Swin) an attribute that torch refused to set."""
    ours = {*dir(PipelineModule), *PipelineModule.__annotations__, "compiler", "tied"} - {*dir(nn.Module)}
    names = sorted(name for name in ours if not name.startswith("__"))
    assert {"gather", "step", "_loss", "data_rank"} < {*names}
    model, x = Scaled(names), torch.randn(8, 4)
    with pytest.warns(UserWarning, match=r"the model's .* and \d+ more cannot be reached as an attribute"):
        parallel = autopar.parallelize(model, x, device="h100", **options)
    (loss := model(x)).backward()
    torch.testing.assert_close(parallel.step(x), loss.detach())
    for name, parameter in parallel.named_parameters():
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)


def test_different_names_have_different_identifiers() -> None:
    names = ["\u00e4", "\u00f6", "a-", "a", "a_1", "a.", "if"]
    assert list(identifiers(names).values()) == ["_", "__1", "a", "a_1", "a_1_1", "a_2", "_if"]


def test_an_op_is_not_called_like_a_parameter_and_a_result_not_like_a_value() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter(":mul#0", nn.Parameter(torch.randn(4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self._parameters[":mul#0"]
            assert weight is not None
            return x * weight + weight

    x = torch.randn(8, 4)
    torch.testing.assert_close(autopar.parallelize(model := Summed(), x, (1,))(x), model(x))

    class Doubled(nn.Module):
        def forward(self, **given: torch.Tensor) -> torch.Tensor:
            return 2 * given["output:0"]

    with pytest.raises(autopar.errors.CaptureError, match=r"output:0 is a value of the model, and the name of its result"):
        autopar.plan(Doubled(), {"output:0": x}, (2,), device="h100")
