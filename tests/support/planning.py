"""Models on meta, meshes with made-up links, and their plans, for tests of the planner's choices."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
import torch
import transformers
from torch import nn

from autopar.capture import Captured
from autopar.cost_models import catalog
from autopar.errors import BudgetError
from autopar.ir.device import Device, Link
from autopar.ir.mesh import Mesh
from autopar.ir.program import Output
from autopar.plan.options import Options
from autopar.plan.plan import Collective, Plan
from autopar.planning.planner import plan_program, read_program

GIB = 2**30
Sample = Mapping[str, torch.Tensor]


class Layers(nn.Module):
    """Linear layers with GELU between them and a squared error: the plainest model that trains."""

    def __init__(self, widths: tuple[int, ...], bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b in itertools.pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.square().sum()


@functools.cache
def layers(batch: int, *widths: int, dtype: torch.dtype = torch.bfloat16) -> Captured:
    """Captured `Layers` of these widths."""
    with torch.device("meta"):
        return read_program(Layers(widths).to(dtype), torch.zeros(batch, widths[0], dtype=dtype))


class Canvas(nn.Module):
    """Slices of a buffer that are written one after the other, as in a loop over time: each write reads the one before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        canvas = torch.zeros_like(hidden)
        for time in range(hidden.shape[1]):
            canvas[:, time] = torch.tanh(hidden[:, time])
        return self.last(canvas.sin()).square().sum()  # type: ignore[no-any-return]


@functools.cache
def canvas(batch: int, length: int, width: int) -> Captured:
    """Captured `Canvas`."""
    with torch.device("meta"):
        return read_program(Canvas(width), torch.zeros(batch, length, width))


@functools.cache
def gpt2(batch: int, length: int, width: int, depth: int = 2, vocabulary: int = 256, masked: bool = False) -> Captured:
    """GPT-2 with its fused attention projection; heads of 64."""
    config = transformers.GPT2Config(
        n_layer=depth,
        n_embd=width,
        n_head=max(4, width // 64),
        vocab_size=vocabulary,
        n_positions=max(length, 32),
        bos_token_id=0,
        eos_token_id=0,
    )
    return _language(transformers.GPT2LMHeadModel, config, batch, length, masked)


@functools.cache
def llama(batch: int, length: int, width: int, depth: int = 2, vocabulary: int = 256, tied: bool = False) -> Captured:
    """Llama with grouped queries; heads of 64, half as many for keys and values, an inner width of twice the width."""
    heads = max(8, width // 64)
    config = transformers.LlamaConfig(
        num_hidden_layers=depth,
        hidden_size=width,
        intermediate_size=2 * width,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        vocab_size=vocabulary,
        max_position_embeddings=max(length, 32),
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _language(transformers.LlamaForCausalLM, config, batch, length, masked=False)


def _language(
    make: Callable[..., nn.Module], config: transformers.PretrainedConfig, batch: int, length: int, masked: bool
) -> Captured:
    with torch.device("meta"):
        model = make(config).to(torch.bfloat16)
        tokens = torch.zeros(batch, length, dtype=torch.long)
    sample = {"input_ids": tokens, "labels": tokens}
    return read_program(model, sample | ({"attention_mask": torch.ones_like(tokens)} if masked else {}))


def link(gigabytes: float, microseconds: float = 3.0) -> Link:
    """A made-up link: what one device sends in a second, and the latency of a message."""
    return Link(name=f"{gigabytes:g} GB/s", latency=microseconds * 1e-6, bandwidth=gigabytes * 1e9, source="made up")


NVLINK, NETWORK = link(450), link(25, 14.0)


def mesh(sizes: tuple[int, ...], *links: Link, device: str | Device = "h100") -> Mesh:
    """A mesh of catalog devices at their peaks; one link serves all axes, none the network."""
    links = links or (NETWORK,)
    made = replace(Mesh.of(sizes), links=links * len(sizes) if len(links) == 1 else links)
    return replace(made, device=catalog.device(device, processes=math.prod(sizes)).at_peak())


def plan(captured: Captured, on: Mesh, **options: object) -> Plan:
    """The plan of a captured model."""
    return plan_program(captured.program, on, Options(**options))  # type: ignore[arg-type]


def counted(plan: Plan, axis: int | None = None, values: Callable[[str], bool] = lambda name: True) -> Counter[tuple[str, str]]:
    """How many collectives of each (kind, pass) a plan has, on one axis, for some values, together with others or alone."""
    wanted = None if axis is None else plan.axes[axis]
    return Counter((c.kind, c.where) for c in plan.collectives if wanted in (None, c.axis) and any(map(values, names(c))))


def of(plan: Plan, *values: str) -> list[Collective]:
    """The collectives in which some values travel."""
    return [c for c in plan.collectives if not set(values).isdisjoint(names(c))]


def names(collective: Collective) -> tuple[str, ...]:
    """The values that travel in a collective."""
    return (collective.value, *collective.more)


@dataclass(frozen=True)
class Run:
    """A program with its plan, its weights, and batches, as they are sent to workers."""

    captured: Captured
    plan: Plan
    tensors: dict[str, torch.Tensor]
    batches: list[list[torch.Tensor]]


def smallest(captured: Captured, on: Mesh) -> int:
    """The smallest budget that works, as the error says it."""
    with pytest.raises(BudgetError) as caught:
        plan(captured, on, budget=1)
    return int(caught.value.details["smallest"].removeprefix("budget="))


def beside_scalar(output: Output) -> bool:
    """Whether an output of a language model may leave split: what stands beside its loss."""
    return output.path != "loss"


def form(plan: Plan, name: str) -> str:
    """In which form the one op of this name runs on the last axis."""
    (choice,) = (choice for op, choice in plan.choices.items() if name in op)
    return choice.rpartition(", ")[2].partition("/")[0]
