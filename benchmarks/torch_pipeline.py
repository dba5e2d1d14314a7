"""What the processes of `pipeline_step.py` run: the same GPT-2 in four stages by autopar and by torch, steps in turn."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import transformers
from steps import WARM
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import autopar
from autopar.runtime.memory_tracker import MemoryTracker

RANKS, LAYERS, MICROBATCHES = 4, 8, 8
SHAPE = (32, 64, 256)  # sequences, tokens, width
WORDS = 2048
CUTS = [f"transformer.h.{LAYERS // RANKS * place}" for place in range(1, RANKS)]
Stepper = Callable[[], float]  # the loss where it is known, else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Seconds of each round on the slowest rank, of all processors together, and the first loss, by variant."""

    steps: dict[str, list[float]]
    processors: dict[str, list[float]]
    losses: dict[str, float]


def model() -> transformers.GPT2LMHeadModel:
    """The same weights on every rank and for both; the head is its own, as torch's pipeline adds up no tied gradients."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=LAYERS, n_embd=SHAPE[2], n_head=4, vocab_size=WORDS, n_positions=SHAPE[1], tie_word_embeddings=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    made = transformers.GPT2LMHeadModel(config)
    made.loss_type = "ForCausalLM"
    return made


def batch() -> torch.Tensor:
    return torch.randint(WORDS, SHAPE[:2], generator=torch.Generator().manual_seed(1))


class HandCut(nn.Module):
    """One of the stages, as a user of torch's pipeline writes it."""

    def __init__(self, whole: transformers.GPT2LMHeadModel, rank: int) -> None:
        super().__init__()
        each, body = LAYERS // RANKS, whole.transformer
        self.embed = nn.ModuleList([body.wte, body.wpe] if rank == 0 else [])
        self.blocks = nn.ModuleList(body.h[rank * each : (rank + 1) * each])
        self.head = nn.ModuleList([body.ln_f, whole.lm_head] if rank == RANKS - 1 else [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed:
            words, positions = self.embed
            x = words(x) + positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            found = block(x)
            x = found[0] if isinstance(found, tuple) else found
        for part in self.head:
            x = part(x)
        return x


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1))


def by_torch(compiled: bool = False) -> Stepper:
    rank, tokens = dist.get_rank(), batch()
    module = HandCut(model(), rank)
    if compiled:
        module.compile()
    stage = PipelineStage(module, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=next_token_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step() -> float:
        losses: list[torch.Tensor] = []
        given = (tokens,) if rank == 0 else ()
        schedule.step(*given, **({"target": tokens, "losses": losses} if rank == RANKS - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).detach().mean()) if losses else 0.0

    return step


def by_autopar(compiled: bool = False) -> Stepper:
    tokens = batch()
    sample = {"input_ids": tokens, "labels": tokens}
    parallel = autopar.parallelize(
        model(), sample, {"pp": RANKS}, pipeline="pp", stages=CUTS, schedule="1f1b", microbatches=MICROBATCHES, recompute="none"
    )
    if compiled:
        parallel.compile()
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)

    def step() -> float:
        loss = parallel.step(**sample)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


VARIANTS = {"autopar": by_autopar, "torch": by_torch}


def interleaved(asked: tuple[int, bool]) -> Rounds:
    """Every variant's step once a round, each after a barrier, in an order that alternates; compiled, if asked for."""
    rounds, compiled = asked
    steps = {name: build(compiled) for name, build in VARIANTS.items()}
    losses = {}
    for name, step in steps.items():
        first = torch.tensor(step(), dtype=torch.float64)
        dist.all_reduce(first, dist.ReduceOp.MAX)
        losses[name] = float(first)
    found: dict[str, list[float]] = {name: [] for name in steps}
    processors: dict[str, list[float]] = {name: [] for name in steps}
    gc.disable()  # a collection would fall on one variant or another
    for number in range(WARM + rounds):
        for name, step in sorted(steps.items(), reverse=bool(number % 2)):
            dist.barrier()
            start, begun = time.perf_counter(), time.process_time()
            step()
            slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            used = torch.tensor(time.process_time() - begun, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            dist.all_reduce(used)
            if number >= WARM:
                found[name].append(float(slowest))
                processors[name].append(float(used))
        gc.collect()
    return Rounds(steps=found, processors=processors, losses=losses)


def alive(name: str) -> dict[str, int]:
    """The most bytes of tensors that are alive on the fullest rank in a step of one variant, whoever holds them."""
    step = VARIANTS[name]()
    step()
    gc.collect()
    everything = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter) and one.device.type == "cpu"]
    with MemoryTracker(everything, "cpu") as live:
        step()
    peak = torch.tensor(live.peak().bytes)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return {name: int(peak)}
