"""Recurrent networks, selective scans and mixtures of experts, split: equal numbers on processes, messages in closed form."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import transformers
from torch import nn

import autopar
from autopar.plan.options import Options
from autopar.verify.verification import verify
from tests.support import planning, table
from tests.support.planning import form
from tests.support.threads import Threads


class Told(nn.Module):
    """A recurrent network over a sequence, one row of it, and a linear layer."""

    def __init__(self, made: type[nn.RNNBase], width: int) -> None:
        super().__init__()
        self.cells, self.down = made(8, width, num_layers=2, batch_first=True), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.cells(x)[0]).square().sum()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("made, gates", [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_the_gates_of_a_recurrent_network_are_split(threads: Threads, made: type[nn.RNNBase], gates: int, ranks: int) -> None:
    """Every step gathers its gates, one after the other; the backward adds up the states' gradients."""
    torch.manual_seed(0)
    length, width, layers = 5, 128, 2
    model, x, on = Told(made, width), torch.randn(1, length, 8), table.mesh((ranks,))
    plan = autopar.plan(model, x, on)
    name = "rnn_tanh" if made is nn.RNN else made.__name__.lower()
    assert form(plan, f":{name}#") == f"gate_parallel_{name}"
    stored = {plan.layouts[f"cells.{kind}_l{layer}"] for kind in ("weight_ih", "weight_hh") for layer in range(layers)}
    assert stored == {"S(0)"}
    sent = Counter((c.kind, c.where, c.bytes) for c in plan.collectives if c.value.startswith(f"cells:{name}#"))
    assert sent == {
        ("all_gather", "forward", 4 * length * gates * width): layers,
        ("all_gather", "forward", 4 * gates * width): layers * length,
        ("all_reduce", "backward", 4 * width): layers * (length - 1),
        ("all_reduce", "backward", 4 * length * width): layers,  # of the last one the linear layer's
    }
    report = verify(model, x, on, plan, Options(), threads)
    assert report.ok, report


@pytest.mark.one_in(3)
@pytest.mark.parametrize("made, ranks", [(nn.LSTM, 8), (nn.GRU, 6), (nn.RNN, 2)])
def test_gates_may_be_split_over_more_ranks_than_there_are_units(threads: Threads, made: type[nn.RNNBase], ranks: int) -> None:
    torch.manual_seed(0)
    model, x, on = Told(made, 2), torch.randn(1, 3, 8), table.mesh((ranks,))
    name = "rnn_tanh" if made is nn.RNN else made.__name__.lower()
    plans = (autopar.testing.random_plan(model, x, on, seed=seed) for seed in range(9))
    plan = next(plan for plan in plans if form(plan, f":{name}#") == f"gate_parallel_{name}")
    report = verify(model, x, on, plan, Options(), threads)
    assert report.ok, report


class Scan(nn.Module):
    """A selective scan, as Mamba has it: step by step, or at once by sums of logarithms; every channel for itself."""

    def __init__(self, channels: int, states: int, *, stepwise: bool) -> None:
        super().__init__()
        self.stepwise = stepwise
        self.inwards, self.step, self.outwards = nn.Linear(8, channels), nn.Linear(8, channels), nn.Linear(channels, 8)
        self.write, self.read = nn.Linear(8, states), nn.Linear(8, states)
        self.decay = nn.Parameter(torch.rand(channels, states))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step, value = nn.functional.softplus(self.step(x)).unsqueeze(-1), self.inwards(x).unsqueeze(-1)
        logs = -step * self.decay.exp()  # batch, length, channels, states
        given, read = step * value * self.write(x).unsqueeze(2), self.read(x).unsqueeze(2)
        if self.stepwise:
            state, states = torch.zeros_like(given[:, 0]), []
            for t in range(x.shape[1]):
                state = state * logs[:, t].exp() + given[:, t]
                states.append(state)
            held = torch.stack(states, 1)
        else:
            total = logs.cumsum(1)
            held = total.exp() * (given * (-total).exp()).cumsum(1)
        return self.outwards((held * read).sum(-1)).square().sum()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("batch, split", [(1, "channels"), (8, "batch")])
@pytest.mark.parametrize("stepwise", [False, True])
def test_a_selective_scan_is_split_by_its_factors_alone(threads: Threads, stepwise: bool, batch: int, split: str) -> None:
    """Over channels, or over the batch: nothing is sent inside the scan, which no form of its own knows."""
    torch.manual_seed(0)
    channels = 64 if split == "channels" else 9
    model, x, on = Scan(channels, 3, stepwise=stepwise), torch.randn(batch, 5, 8), table.mesh((4,))
    plan = autopar.plan(model, x, on)
    inside = [op for op in plan.choices if op[1:].partition("#")[0] in ("cumsum", "exp", "mul", "stack", "add")]
    _, *scan = inside  # the first is of the parameter alone
    assert {plan.layouts[op] for op in scan} <= {f"S({dim})" for dim in ((1, 2) if split == "channels" else (0,))}
    assert not planning.of(plan, *inside)
    report = verify(model, x, on, plan, Options(), threads)
    assert report.ok, report


def mixture() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """One layer of attention and of eight experts, two for each token, which choose unevenly; with a batch."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.randint(64, (8, 16))
    return transformers.MixtralForCausalLM(config), {"input_ids": tokens, "labels": tokens}


PRODUCTS = {torch.float32: "grouped_mm_fallback", torch.bfloat16: "grouped_mm"}  # what transformers takes


@pytest.mark.one_in(3)
@pytest.mark.parametrize("ranks, dtype", [(4, torch.float32), (8, torch.float32), (4, torch.bfloat16)])
def test_experts_are_split_and_tokens_sent_to_them(threads: Threads, ranks: int, dtype: torch.dtype) -> None:
    """Two all-to-alls of tokens, there and back; what uneven experts misplace goes to the neighbours; no weight is sent.

    Of a model this small it is faster to gather the weights, so that each rank sorts its own tokens.
    """
    (model, sample), on = mixture(), table.mesh((ranks,))
    place = "model.layers.0.mlp.experts"
    asked = {f"{place}:{PRODUCTS[dtype]}#{number}": "S(0)" for number in range(2)}
    plan = autopar.plan(model.to(dtype), sample, on, constraints=asked)
    assert [plan.layouts[f"{place}.{name}_proj"] for name in ("gate_up", "down")] == ["S(0)", "S(0)"]
    assert not planning.of(plan, f"{place}.gate_up_proj", f"{place}.down_proj", f"{place}:transpose#0", f"{place}:transpose#1")
    rows, width, inner = 2 * 8 * 16, 16 * dtype.itemsize, 32 * dtype.itemsize
    misplaced = math.ceil(math.sqrt(rows * (1 + 0.25**2 * rows / 8) / (2 * math.pi)))  # 8 experts
    sizes = {
        "index#0": ([rows // ranks * width],) * 2,
        "index#2": ([rows // ranks * 16 * 4],) * 2,  # by then they are weighed in float32
        f"{PRODUCTS[dtype]}#0": (own := [misplaced * width, misplaced * 2 * inner], [*own, own[0]]),
        f"{PRODUCTS[dtype]}#1": (own := [misplaced * inner, misplaced * width], [*own, own[0]]),
    }
    for name, passes in sizes.items():
        sent = Counter((c.where, c.kind, c.bytes) for c in planning.of(plan, f"{place}:{name}"))
        expected = zip(("forward", "backward"), passes, strict=True)
        assert sent == Counter((where, "all_to_all", size) for where, found in expected for size in found)
    report = verify(model, sample, on, plan, Options(), threads)
    assert report.ok, report


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [(8,), (2, 2)])
def test_experts_in_bfloat16_take_a_share_of_the_memory(sizes: tuple[int, ...]) -> None:
    model, sample = mixture()
    alone = autopar.plan(model.bfloat16(), sample, table.mesh((1,)))
    share = int(1.25 * alone.peak_memory / math.prod(sizes))  # the fastest plan may gather weights for each rank's own tokens
    plan = autopar.plan(model, sample, table.mesh(sizes), budget=share)
    assert "I" not in {plan.choices[f"model.layers.0.mlp.experts:grouped_mm#{n}"] for n in range(2)}
    assert plan.peak_memory <= share
