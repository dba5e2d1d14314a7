"""The code that ranks run in the tests of pipelines: a model in stages against the whole model, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
from torch import nn

import autopar
from autopar.cost_models import catalog
from autopar.runtime.pipeline import PipelineRank
from autopar.runtime.storage import full_tensor
from autopar.verify.testing import peak
from tests.support import models

Case = dict[str, Any]
SLOW = replace(
    catalog.device("h100"), flops={"float32": 1e12}, launch=0.0, bandwidth=1e11, product=None, attention=None, achieved={},
    interference=1.0, per_node=1, outer="ethernet-25g", host=None,
)  # fmt: skip
"""A made-up device without launches, at a rate at which neither messages nor computing is all that counts."""


def made(name: str) -> tuple[nn.Module, models.Sample]:
    """A model in float64 without dropout, and a batch for it."""
    model, sample = albert() if name == "albert" else models.make(name)
    if name in ("gpt2", "llama"):  # whose own loss is in float32
        model.loss_function = next_token_loss
    return model.double().eval(), sample


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: object) -> torch.Tensor:
    """The mean loss of every token's prediction by those before it."""
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))


def whole(model: nn.Module, sample: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and the gradients of the model as its library runs it."""
    loss = model(**sample)["loss"]
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), found


def largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    return float((full_tensor(found).detach() - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a rank saw: errors of the loss and of gradients by name, its plan as JSON, and the messages of a step.

    A message is the rank to which it went and its bytes, as the process group was given them.
    """

    errors: dict[str, float]
    plan: str
    sent: list[tuple[int, int]]


def trained(case: Case) -> Trained:
    """Two steps of a model in stages, whose gradients add up, and a forward without gradients."""
    case = dict(case)
    model, sample = made(case.pop("model"))
    loss, gradients = whole(model, sample)
    parallel = autopar.parallelize(model, sample, case.pop("mesh"), **({"device": "h100", "pipeline": "pp"} | case))
    errors = {"loss": largest(parallel.step(**sample), loss)}
    with recorded() as sent:
        parallel.step(**sample)
    for name, parameter in parallel.named_parameters():
        assert (parameter.grad is None) == (name not in gradients), name
        if parameter.grad is not None:
            errors[name] = largest(parameter.grad, 2 * gradients[name])
    norm = nn.utils.get_total_norm([2 * gradient for gradient in gradients.values()])
    errors["norm"] = largest(parallel.clip_grad_norm_(float(norm) / 4), norm)
    scale = norm / 4 / (norm + 1e-6)  # as torch has it
    errors["clipped norm"] = largest(parallel.clip_grad_norm_(float("inf")), scale * norm)
    steepest = torch.stack([2 * gradient.abs().max() for gradient in gradients.values()]).max()
    errors["largest entry"] = largest(parallel.clip_grad_norm_(1.0, float("inf")), scale * steepest)
    with torch.no_grad():
        found = parallel(**sample)
    errors["loss without gradients"] = largest(found["loss"], loss)
    if found.get("logits") is not None:
        errors["logits"] = largest(found["logits"], model(**sample)["logits"].detach())
    return Trained(errors=errors, plan=parallel.autopar.plan.to_json(), sent=sent)


@contextmanager
def recorded() -> Iterator[list[tuple[int, int]]]:
    """The messages that are sent inside."""
    sent: list[tuple[int, int]] = []
    send = PipelineRank.send

    def noted(self: PipelineRank, tensor: torch.Tensor, index: int) -> dist.Work:
        sent.append((self.peer(index), tensor.nbytes))
        return send(self, tensor, index)

    with patch.object(PipelineRank, "send", noted):
        yield sent


def with_dropout(case: Case) -> tuple[list[float], float]:
    """The differences of losses and of the worst gradient, of stages and of the same model on one device, with dropout."""
    case = dict(case)
    model, sample = models.make(case.pop("model"))
    model.double()

    def losses(mesh: object, **options: object) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(7)
        module = autopar.parallelize(model, sample, mesh, device="h100", microbatches=4, **options)
        found = [float(module.step(**sample)) for _ in range(5)]
        return found, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}

    alone, gradients = losses((1,))
    staged, own = losses({"pp": dist.get_world_size()}, pipeline="pp", **case)
    worst = max(largest(gradient, gradients[name]) for name, gradient in own.items())
    return [abs(a - b) for a, b in zip(alone, staged, strict=True)], worst


def other_calls(case: Case) -> dict[str, float]:
    """Errors of what a model in stages computes in calls that are not the planned one, beside the user's own module.

    It takes a step on another batch than the planned one, is evaluated, with changed weights and on a third batch, and trained
    again.
    """
    case = dict(case)
    model, sample = made(case.pop("model"))
    model.train()
    options = {"device": "h100", "pipeline": "pp", "dynamic": {"batch": 0}} | case
    parallel = autopar.parallelize(model, sample, options.pop("mesh"), **options)
    given = parallel.shard
    larger, smaller = ({name: tensor[rows] for name, tensor in sample.items()} for rows in (LARGER, SMALLER))
    parallel.step(**given(larger))
    parallel.eval()
    model.eval()
    errors = {"beside training": evaluated(parallel, model, sample)}
    with torch.no_grad():
        for module in (parallel, model):
            for parameter in module.parameters():
                parameter.mul_(0.5)
    errors |= {"changed weights": evaluated(parallel, model, sample), "smaller": evaluated(parallel, model, smaller)}
    parallel.zero_grad()
    loss, gradients = whole(model, smaller)
    errors["a step in evaluation"] = largest(parallel.step(**given(smaller)), loss)
    for name, parameter in parallel.named_parameters():
        if parameter.grad is not None:
            errors[name] = largest(parameter.grad, gradients[name])
    assert float(parallel.train().step(**given(smaller))) != float(loss)  # with dropout
    return errors


LARGER, SMALLER = torch.arange(16) % 8, torch.arange(4)


def evaluated(parallel: nn.Module, model: nn.Module, sample: models.Sample) -> float:
    """The largest error of what evaluation returns on this rank."""
    with torch.no_grad():
        found, expected = parallel(**parallel.shard(sample)), model(**sample)
    pairs = [(found[name], expected[name]) for name in ("loss", "logits") if found.get(name) is not None]
    return max(largest(one, other) for one, other in pairs)


def albert() -> models.Built:
    """Factorised embedding, tied to the head; all layers share their weights."""
    config = transformers.AlbertConfig(
        num_hidden_layers=2, hidden_size=32, embedding_size=16, num_attention_heads=8, intermediate_size=64, **models.WORDS
    )
    return transformers.AlbertForMaskedLM(config), models.words(attention_mask=models.mask())


def copies_of_ties(case: tuple[str, int]) -> list[torch.Tensor]:
    """The parameters that the stages of a model share, on every rank, after some steps of AdamW."""
    name, steps = case
    torch.manual_seed(0)
    model, sample = albert() if name == "albert" else models.make(name)
    parallel = autopar.parallelize(
        model, sample, {"pp": 2, "dp": 2}, device="h100", pipeline="pp", strategy="fsdp", microbatches=2
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    for _ in range(steps):
        parallel.step(**sample)
        parallel.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    pipeline = parallel.autopar.plan.pipeline
    assert pipeline is not None
    assert pipeline.tied
    return [full_tensor(parallel.get_parameter(shared)).detach() for shared in sorted(pipeline.tied)]


def frozen_in_between(zeroed: bool) -> dict[str, float]:
    """Errors of the gradients of parameters that stages share, which are frozen after the first of two steps."""
    model, sample = made("gpt2")
    parallel = autopar.parallelize(model, sample, {"pp": 2}, device="h100", pipeline="pp", microbatches=2)
    tied = sorted(parallel.autopar.plan.pipeline.tied)
    for step in range(2):
        parallel.step(**sample)
        model(**sample)["loss"].backward()
        for module in (parallel, model):
            for name in tied:
                module.get_parameter(name).requires_grad_(False)
            if zeroed and not step:
                module.zero_grad(set_to_none=False)
    return {name: largest(parallel.get_parameter(name).grad, model.get_parameter(name).grad) for name in tied}


class Detached(nn.Module):
    """Blocks that all read one weight, which gets no gradient of any."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x * self.scale.detach())
        return x.square().mean()


def detached(pp: int) -> tuple[tuple[int, ...], bool, torch.Tensor]:
    """The stages that read the weight of `Detached`, whether it has a gradient after a step, and what AdamW makes of it."""
    model, x = Detached(), torch.ones(8, 8)
    parallel = autopar.parallelize(model, x, {"pp": pp}, device="h100", pipeline="pp", microbatches=2)
    parallel.step(x)
    torch.optim.AdamW(parallel.parameters(), weight_decay=0.5).step()
    return parallel.autopar.plan.pipeline.tied["scale"], parallel.scale.grad is not None, parallel.scale.detach()


class Moded(nn.Module):
    """Blocks and an end with parameters that only training reads, and others that only evaluation does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ModedBlock() for _ in range(4))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        if not self.training:
            x = x / self.temperature
        return {"loss": (x - y).square().mean(), "x": x}


class ModedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale, self.shift = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.b(self.a(x).tanh())
        return x * self.scale if self.training else x + self.shift


def in_both_modes(case: Case) -> list[float]:
    """Errors of steps of `Moded` in one mode, the other, and the first again, beside the user's own."""
    case = dict(case)
    torch.manual_seed(0)
    model, first = Moded().double(), case.pop("train", True)
    sample = dict(zip("xy", torch.randn(2, 8, 8, dtype=torch.float64), strict=True))
    parallel = autopar.parallelize(model.train(first), sample, case.pop("mesh"), device="h100", **case)
    found = []
    for mode in (first, not first, first):
        parallel.train(mode).zero_grad()
        loss, gradients = whole(model.train(mode), sample)
        found.append(largest(parallel.step(**sample), loss))
        trained = {name: p.grad for name, p in parallel.named_parameters() if p.grad is not None}
        assert trained.keys() == gradients.keys() & {name for name, _ in parallel.named_parameters()}
        found += [largest(gradient, gradients[name]) for name, gradient in trained.items()]
    return found


def peaks(case: Case) -> tuple[int, int, int]:
    """The most bytes that were alive on this rank in a step, those that it was planned with, and those of the batch."""
    case = {"microbatches": 8} | ({} if "budget" in case else {"recompute": "none"}) | case
    model, sample = gpt2(case["microbatches"], n_layer=case.pop("layers", 4), tie_word_embeddings=case.pop("tied", False))
    parallel = autopar.parallelize(model, sample, pipeline="pp", **case)
    measured, planned = held_and_planned(parallel, sample)
    return measured, planned, sample["input_ids"].nbytes


def gpt2(microbatches: int, **sizes: object) -> models.Built:
    """A model without dropout whose activations are most of its memory, and a batch of four samples a micro-batch."""
    config = transformers.GPT2Config(
        n_embd=64, n_head=2, vocab_size=128, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0,
        eos_token_id=0, **sizes,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    tokens = torch.randint(128, (4 * microbatches, 64), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": tokens, "labels": tokens}


def held_and_planned(parallel: Any, sample: models.Sample) -> tuple[int, int]:
    """The most bytes that were alive on this rank in a step of AdamW, and those that it was planned with."""
    optimizer = torch.optim.AdamW(parallel.parameters())

    def step() -> None:
        parallel.step(**sample)
        optimizer.step()
        optimizer.zero_grad()

    measured = peak(parallel, optimizer, sample.values(), step).bytes
    return measured, parallel.autopar.plan.pipeline.memory[parallel.autopar.stages.rank.index]


def within_budget(case: Case) -> tuple[tuple[int, int], list[float], str]:
    """As `held_and_planned`, then errors of the loss and of gradients beside the user's module, and the plan as JSON."""
    torch.manual_seed(0)
    model, sample = gpt2(4, n_layer=2)
    parallel = autopar.parallelize(model, sample, pipeline="pp", microbatches=4, **case)
    loss, gradients = whole(model, sample)
    errors = [largest(parallel.step(**sample), loss)]
    errors += [largest(p.grad, gradients[name]) for name, p in parallel.named_parameters()]
    parallel.zero_grad()
    del gradients
    return held_and_planned(parallel, sample), errors, parallel.autopar.plan.to_json()
