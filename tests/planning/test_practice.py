"""Prices reproduce what practitioners know: FSDP for long batches, tensor parallelism with the sequence split when there is
less than one sequence per device, shards instead of weights across the network, and splits that move between the axes of an
alignment.

The tables of `benchmarks/measured` have such runs: 7B models under FSDP on one to sixteen nodes of A100 (mpt.csv, titan.csv).
The last is dynamic axial parallelism (S. Cheng et al., "FastFold", 2022), which trains AlphaFold with one protein a step.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch

import autopar
from autopar.cost_models.catalog import DEVICES
from autopar.cost_models.collectives import seconds as collective_seconds
from autopar.cost_models.links import connect
from autopar.ir.mesh import Mesh
from autopar.plan.plan import Plan
from benchmarks.fidelity.models import Decoder
from examples.science_models import Evoformer

# Four blocks of a 7B model of 32, and as much of the memory.
GPT_7B = Decoder(width=4096, heads=32, key_heads=32, hidden=16384, layers=4, vocabulary=50368, length=2048)
BUDGET = 11 * 10**9
PRODUCTS = ("attention.qkv", "attention.out", "up", "down")
BLOCK = 2 * 12 * GPT_7B.width**2  # bytes of a block's matrices in half precision


@functools.cache
def planned(nodes: int, sequences: int) -> Plan:
    """The plan for nodes of eight A100, every axis used."""
    tokens = torch.empty(sequences, GPT_7B.length, dtype=torch.long, device="meta")
    return autopar.plan(GPT_7B.module(), (tokens, tokens), {"node": nodes, "gpu": 8}, device="a100-80gb", budget=BUDGET)


def block(plan: Plan, axis: str, kind: str, where: str) -> list[int]:
    """Bytes of the messages of one block in the middle."""
    found = [s for s in plan.collectives if "blocks.2." in s.value]
    return [s.bytes for s in found if (s.axis, s.kind, s.where) == (axis, kind, where)]


@pytest.mark.parametrize(("nodes", "sequences"), [pytest.param(1, 32, marks=pytest.mark.thorough), (16, 512)])
def test_long_enough_batches_take_fsdp(nodes: int, sequences: int) -> None:
    plan = planned(nodes, sequences)
    over = ["gpu"] if nodes == 1 else ["node", "gpu"]
    for product in PRODUCTS:
        stored, made = plan.layouts[f"blocks.2.{product}.weight"], plan.layouts[f"blocks.2.{product}:linear#0"]
        assert stored.count("S") == made.count("S(0)") == len(over), "weights are sharded over all devices, and so is the batch"
    sent = {(s.axis, s.kind) for s in plan.collectives if "blocks.2." in s.value}
    assert sent == {("_".join(over), kind) for kind in ("all_gather", "reduce_scatter")}, "over all devices at once"


def test_weights_cross_the_network_as_shards() -> None:
    """A block is gathered in one ring, of whose hops an eighth leaves a node: as much as of a gather of shards between nodes,
    after which nodes gather the whole. It takes no longer than these two."""
    plan = planned(16, 512)
    assert block(plan, "node_gpu", "all_gather", "forward") == [pytest.approx(BLOCK, rel=0.01)]
    (seconds,) = {
        s.seconds for s in plan.collectives if "blocks.2." in s.value and (s.kind, s.where) == ("all_gather", "forward")
    }
    mesh = connect(Mesh.of({"node": 16, "gpu": 8}), DEVICES["a100-80gb"])
    shard, whole = (
        collective_seconds("all_gather", size, ranks, link)
        for size, ranks, link in zip((BLOCK / 8, BLOCK), mesh.sizes, mesh.links, strict=True)
    )
    assert seconds < shard + whole


def test_fsdp_over_two_axes_sends_what_it_sends_over_one() -> None:
    tokens = torch.empty(64, GPT_7B.length, dtype=torch.long, device="meta")
    both, one = (
        autopar.plan(GPT_7B.module(), (tokens, tokens), mesh, device="a100-80gb", strategy="fsdp")
        for mesh in ({"node": 2, "gpu": 8}, {"all": 16})
    )
    sent = [Counter((s.kind, s.where, s.bytes, s.seconds) for s in plan.collectives if s.bytes > 2**20) for plan in (both, one)]
    assert sent[0] == sent[1]
    assert both.step_time == pytest.approx(one.step_time, rel=1e-3)


def test_less_than_one_sequence_for_a_device_takes_tensor_and_sequence_parallelism() -> None:
    plan = planned(1, 4)
    assert plan.layouts["blocks.2.up:linear#0"] == plan.layouts["blocks.2.attention.qkv:linear#0"] == "I, S(2)"  # features
    assert plan.layouts["blocks.2.norm2:layer_norm#0"] == "I, S(1)"  # tokens
    assert plan.layouts["blocks.2.down:linear#0"] == "I, P"
    assert max(block(plan, "gpu", "all_gather", "forward")) < BLOCK / 4, "the products' weights stay where they are"


def test_an_evoformer_of_one_protein_takes_dynamic_axial_parallelism() -> None:
    with torch.device("meta"):
        model = Evoformer(layers=1, msa=256, pair=128, heads=8, inner=32).bfloat16()
        msa, distances = torch.empty(1, 128, 256, dtype=torch.long), torch.empty(1, 256, 256, dtype=torch.long)
    plan, whole = (
        autopar.plan(model, (msa, msa, distances), (8,), device="a100-40gb", strategy=strategy)
        for strategy in ("auto", "replicate")
    )
    made = {name: plan.layouts[f"blocks.0.{name}:matmul#0"] for name in ("rows", "columns", "starting", "ending")}
    assert set(made.values()) == {"S(1)"}, "each attention along one dim splits the other, columns and ending edges transposed"
    moved = [sent for sent in plan.collectives if ":" in sent.value and sent.kind == "all_to_all"]
    assert len(moved) >= 4, "so that what is split moves from one dim to the other and back"
    largest = 128 * 256 * 256 * 2
    assert all(sent.bytes < largest for sent in plan.collectives if sent.value.startswith("blocks.0:")), "and is never whole"
    assert plan.step_time < whole.step_time / 4
