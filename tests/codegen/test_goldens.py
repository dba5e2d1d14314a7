"""Golden texts of the plan and the emitted code for one GPT-2 layer under Megatron's scheme."""

from __future__ import annotations

import ast
import copy
import functools
import re

import pytest
import torch
import transformers
from torch import fx

import autopar
from autopar.analysis.analysis import analyse
from autopar.codegen import emit
from autopar.codegen.source import WIDTH, _wrapped
from autopar.ir.mesh import Mesh
from autopar.plan.assignment_text import resolve
from autopar.plan.options import Options
from autopar.planning.planner import Planned, make_plan
from autopar.runtime.world import Axis, without_processes
from tests.support.golden import Golden

MESH = Mesh.of({"dp": 2, "tp": 4})


@functools.cache
def planned(strategy: str = "megatron") -> Planned:
    """A layer wide enough, and a batch small enough, that Megatron's column-row pair is cheapest on tp."""
    config = transformers.GPT2Config(
        n_layer=1, n_embd=2048, n_head=16, n_positions=1024, vocab_size=50304, resid_pdrop=0.0, embd_pdrop=0.0
    )
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config).bfloat16()
        tokens = torch.empty(2 if strategy == "megatron" else 8, 1024, dtype=torch.long)
    return make_plan(model, {"input_ids": tokens, "labels": tokens}, MESH, Options(device="h100", strategy=strategy))


def emitted(strategy: str = "megatron") -> fx.Graph:
    """The graph of rank 0, emitted without processes: the axes name groups that do not exist."""
    axes = tuple(Axis(name=name, size=size, index=0, group=name) for name, size in zip(MESH.axes, MESH.sizes, strict=True))
    context = without_processes(MESH, axes, torch.device("cpu"))
    made = planned(strategy)
    analysis = analyse(made.resolved.step, MESH)
    return emit(analysis.step, resolve(made.plan, analysis.step, analysis.fits), dict(analysis.fits), context)


def code(strategy: str = "megatron") -> str:
    return emitted(strategy).python_code("self").src


def test_the_plan_of_a_megatron_layer_reads_as_the_golden_one(golden: Golden) -> None:
    golden.check("plan_gpt2_megatron.txt", f"{planned().plan}\n")


def test_the_code_of_a_megatron_layer_reads_as_the_golden_one(golden: Golden) -> None:
    golden.check("code_gpt2_megatron.py.txt", code())


def test_emission_repeats_itself_and_survives_a_copy() -> None:
    graph = emitted()
    assert graph.python_code("self").src == copy.deepcopy(graph).python_code("self").src == code()


@pytest.mark.parametrize("strategy", ["megatron", "fsdp"])
def test_emitted_code_imports_every_name_that_it_uses(strategy: str) -> None:
    module = ast.parse(code(strategy))
    imported = {a.asname or a.name for node in module.body if isinstance(node, ast.Import | ast.ImportFrom) for a in node.names}
    (function,) = (node for node in module.body if isinstance(node, ast.FunctionDef))
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    own = {node.id for node in names if isinstance(node.ctx, ast.Store)} | {a.arg for a in function.args.args}
    used = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    assert used - own - {"getattr"} == imported


def test_a_gathered_weight_is_named_after_the_weight() -> None:
    text = re.sub(r",\s+([)\]])", r"\1", re.sub(r"\s*\n\s+", " ", code("fsdp")))  # one line, without trailing commas
    found = re.search(r"transformer_h_0_mlp_c_fc_weight_gathered = (bucket_\d+)\[(\d+)\]", text)
    assert found
    bucket, index = found[1], int(found[2])
    started = re.search(rf"{bucket}_pending = all_gather__reduce_scatter_start\(\s*\[(.*?)\], dp_tp\)", text)
    assert started
    assert started[1].strip().split(", ").index("transformer_h_0_mlp_c_fc_weight") == index
    waited = re.search(
        rf"{bucket} = all_gather__reduce_scatter_wait\(\s*{bucket}_pending, dp_tp, splits = (\[.*?\]), "
        r"rematerializer = rematerializer\)",
        text,
    )
    assert waited
    assert ast.literal_eval(waited[1])[index] == (0,)


@pytest.mark.parametrize("strategy", ["megatron", "fsdp"])
def test_emitted_lines_fit_a_screen(strategy: str) -> None:
    assert max(map(len, code(strategy).splitlines())) <= WIDTH


def test_wrapped_code_computes_what_unwrapped_code_does() -> None:
    """Brackets in strings, tuples of one, and subscripts, whose index a trailing comma would change."""
    name, other = "a" * 60, "b" * 60
    lines = [
        f"{name} = f([({other!r}, '],), \\'', (0,)), {other!r}], (1,), 2, key = [{other!r}, {name!r}])",
        f"{other} = {name}[0]",
        f"{name}, c = {other}[0][0], ({other!r}, [1, 2, {name!r}], {name!r})",
    ]
    wrapped = [part for line in lines for part in _wrapped(line)]
    assert len(wrapped) > len(lines)
    assert ast.dump(ast.parse("\n".join(wrapped))) == ast.dump(ast.parse("\n".join(lines)))


def test_every_module_that_computes_has_a_comment_above_its_lines() -> None:
    program, text = planned().captured.program, code()
    for module in {op.module for op in program.ops if op.module}:
        assert re.search(rf"^ +# {re.escape(module)}$", text, re.MULTILINE), module


def test_a_module_of_one_device_has_no_axes_in_its_code_and_can_be_copied() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    x = torch.randn(2, 4)
    parallel = autopar.parallelize(model, x, (1,), device="h100")
    assert "axis0" not in parallel.code
    copied = copy.deepcopy(parallel)
    assert copied.code == parallel.code
    torch.testing.assert_close(copied(x), model(x))
    with torch.no_grad():
        copied.get_parameter("0.weight").zero_()
    torch.testing.assert_close(parallel(x), model(x))
    assert not torch.equal(copied(x), model(x))
