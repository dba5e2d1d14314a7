"""The code that ranks run in the tests of checkpoints and initial values of models in stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import autopar
from autopar.errors import InputError
from autopar.integrations.safetensors import full_state_dict
from autopar.runtime.storage import full_tensor
from tests.support.pipelines import next_token_loss

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # names in the place of groups: ranks have different parameters
Tensors = dict[str, torch.Tensor]
WORDS = 61


def model(blocks: int = 4, *, tied: bool = True) -> nn.Module:
    """A model with an embedding, perhaps tied, whose rows are odd."""
    sizes = {"n_layer": blocks, "n_embd": 16, "n_head": 2, "vocab_size": WORDS, "n_positions": 32}
    made = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, tie_word_embeddings=tied)
    )
    made.loss_function = next_token_loss  # the library's own is in float32
    return made


def batch() -> dict[str, torch.Tensor]:
    """The same tokens on every rank."""
    tokens = torch.randint(WORDS, (8, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def _made(options: dict[str, Any], blocks: int) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """A model with dropout off in stages, or in none, and its optimizer."""
    sample = batch()
    parallel = autopar.parallelize(model(blocks).double().eval(), sample, device="h100", **options)
    return parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-2), sample


def _step(parallel: nn.Module, optimizer: torch.optim.Optimizer, sample: dict[str, torch.Tensor]) -> float:
    loss = parallel.step(**sample)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def _whole(parallel: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Every tensor of the module and of its optimizer that this rank has, whole."""
    held = {name: full_tensor(tensor).detach().clone() for name, tensor in parallel.state_dict().items()}
    for name, parameter in parallel.named_parameters():
        held |= {f"{name}/{key}": full_tensor(one).clone() for key, one in sorted(optimizer.state[parameter].items())}
    return held


def saved_and_loaded(case: tuple[str, int, dict[str, Any], dict[str, dict[str, Any]]]) -> dict[str, tuple[Tensors, float]]:
    """Train two steps, save, and go on; load the checkpoint by other options and go on from there.

    Each has what was saved or loaded, and the loss of the third step.
    """
    folder, blocks, first, others = case
    found: dict[str, tuple[Tensors, float]] = {}
    parallel, optimizer, sample = _made(first, blocks)
    for _ in range(2):
        _step(parallel, optimizer, sample)
    whole = _whole(parallel, optimizer)
    state = {"model": parallel.state_dict(), "optimizer": get_optimizer_state_dict(parallel, optimizer, options=FLAT)}
    dcp.save(state, checkpoint_id=folder)
    found["saved"] = whole, _step(parallel, optimizer, sample)
    for name, options in others.items():
        torch.manual_seed(3)  # other weights than those that were saved
        parallel, optimizer, sample = _made(options, blocks)
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.zero_()
        state = {"model": parallel.state_dict(), "optimizer": get_optimizer_state_dict(parallel, optimizer, options=FLAT)}
        dcp.load(state, checkpoint_id=folder)
        parallel.load_state_dict(state["model"], strict=False)
        set_optimizer_state_dict(parallel, optimizer, state["optimizer"], options=FLAT)
        found[name] = _whole(parallel, optimizer), _step(parallel, optimizer, sample)
    return found


def whole(options: dict[str, Any]) -> list[str]:
    """What this rank has otherwise than the whole model that it was given, in each of three ways; and what is refused."""
    torch.manual_seed(3)
    parallel, *_ = _made(options, 2)
    given, wrong = model(2).double().state_dict(), list[str]()
    first = not dist.get_rank()
    for way in ("load", "set", "broadcast"):
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.zero_()
        if way == "load":
            assert str(parallel.load_state_dict(given)) == "<All keys matched successfully>"
        elif way == "set":
            set_model_state_dict(parallel, given, options=StateDictOptions(full_state_dict=True))
        else:
            sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(parallel, given if first else {}, options=sent)
        held = parallel.state_dict()
        wrong += [f"{way} {name}" for name, one in held.items() if not torch.equal(full_tensor(one), given[name])]
        kept = full_state_dict(parallel)
        assert kept.keys() == (given.keys() if first else set())
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "other"'):
        parallel.load_state_dict(given | {"other": torch.zeros(())})
    with pytest.raises(RuntimeError, match=r"Missing key\(s\)"):
        parallel.load_state_dict({name: one for name, one in given.items() if name not in held})
    last = next(reversed(given))  # which one rank stores
    less = {name: one for name, one in given.items() if name != last}
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{last}"'):
        parallel.load_state_dict(less)
    assert parallel.load_state_dict(less, strict=False).missing_keys == [last]
    return wrong


OPTIMIZERS = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-2),
    "local": lambda weights: autopar.step_locally(torch.optim.AdamW(weights, lr=1e-2, fused=True)),
    "adafactor": lambda weights: torch.optim.Adafactor(weights, lr=0.1, weight_decay=0.1),
    "gathered": lambda weights: autopar.step_gathered(torch.optim.Adafactor(weights, lr=0.1, weight_decay=0.1)),
}


def stepped(case: tuple[str, str, str, dict[str, Any], dict[str, Any]]) -> tuple[list[float], torch.Tensor | None]:
    """The differences of losses and weights from those of the user's module, over four steps of these optimizers of both.

    Behind the second, the stages are saved, and loaded by other options. Then the tied embedding, if this rank stores it.
    """
    folder, own, alone, first, second = case
    torch.manual_seed(0)
    sample, user = batch(), model().double().eval()
    optimizers, found, known = OPTIMIZERS[alone](user.parameters()), list[float](), dict(user.named_parameters())

    def step(parallel: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        expected = user(**sample)["loss"]
        expected.backward()
        found.append(abs(_step(parallel, optimizer, sample) - float(expected.detach())))
        optimizers.step()
        optimizers.zero_grad()
        found.extend(float((full_tensor(p) - known[name]).detach().abs().max()) for name, p in parallel.named_parameters())

    def state(parallel: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": parallel.state_dict(), "optimizer": get_optimizer_state_dict(parallel, optimizer, options=FLAT)}

    for options, start in ((first, user), (second, model().double().eval())):
        parallel = autopar.parallelize(start, sample, device="h100", **options)
        optimizer = OPTIMIZERS[own](parallel.parameters())
        if options is second:
            loaded = state(parallel, optimizer)
            dcp.load(loaded, checkpoint_id=folder)
            parallel.load_state_dict(loaded["model"], strict=False)
            set_optimizer_state_dict(parallel, optimizer, loaded["optimizer"], options=FLAT)
        for _ in range(2):
            step(parallel, optimizer)
        if options is first:
            dcp.save(state(parallel, optimizer), checkpoint_id=folder)
    tied = dict(parallel.named_parameters()).get("transformer.wte.weight")
    return found, None if tied is None else full_tensor(tied).detach()


class Copying(transformers.GPT2LMHeadModel):
    """A model whose code computes a weight of one block from that of another."""

    def initialize_weights(self) -> None:
        super().initialize_weights()
        first, second = (self.transformer.h[place].mlp.c_fc.weight for place in (0, 1))
        second.data.copy_(2 * first.data)


def initialised(case: dict[str, Any]) -> tuple[Tensors, Tensors, str]:
    """The tensors of a model in stages and of the same in none, after `autopar.initialize`, and what is said of `Copying`."""

    def values(kind: type[nn.Module], options: dict[str, Any]) -> Tensors:
        config = transformers.GPT2Config(
            n_layer=2, n_embd=16, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0
        )
        with torch.device("meta"):
            model = kind(config)
        model.loss_type = "ForCausalLM"
        parallel = autopar.parallelize(model, batch(), device="h100", **options)
        torch.manual_seed(11)
        autopar.initialize(parallel, model)
        return {name: full_tensor(tensor).detach() for name, tensor in parallel.state_dict().items()}

    alone = values(transformers.GPT2LMHeadModel, {"mesh": (1,)})
    staged = values(transformers.GPT2LMHeadModel, case)
    try:
        values(Copying, case)
    except InputError as error:
        return alone, staged, str(error)
    return alone, staged, ""
