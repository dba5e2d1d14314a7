"""`generate` over a parallel module gives the tokens of the original model."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import transformers
from transformers.modeling_outputs import BaseModelOutput

import autopar
from autopar.errors import InputError
from autopar.integrations.generation import Generator
from autopar.runtime.workers import WorkerPool

WAYS = {"greedy": {}, "beams": {"num_beams": 4}, "sampled": {"do_sample": True, "top_k": 5}, "guided": {"guidance_scale": 1.5}}
WORDS = {"vocab_size": 40, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", transformers.GPT2Config, {"n_layer": 1, "n_head": 4, "n_embd": 16, "n_positions": 32}),
    "llama": ("LlamaForCausalLM", transformers.LlamaConfig, HEADS | {"hidden_size": 16, "intermediate_size": 32}),
    "mixtral": (
        "MixtralForCausalLM",
        transformers.MixtralConfig,
        HEADS | {"hidden_size": 16, "intermediate_size": 32, "num_local_experts": 2},
    ),
    "bloom": ("BloomForCausalLM", transformers.BloomConfig, {"hidden_size": 16, "n_layer": 1, "n_head": 4}),
    "roberta": ("RobertaForCausalLM", transformers.RobertaConfig, HEADS | {"hidden_size": 16, "is_decoder": True}),
    "t5": (
        "T5ForConditionalGeneration",
        transformers.T5Config,
        {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0},
    ),
    **{
        name: (
            f"{prefix}ForConditionalGeneration",
            getattr(transformers, f"{prefix}Config"),
            {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
            | {"decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32}
            | {"decoder_start_token_id": 2, "forced_eos_token_id": None, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
        )
        for name, prefix in {"bart": "Bart", "mbart": "MBart", "m2m": "M2M100"}.items()
    },
}


@dataclass(frozen=True)
class Case:
    """A model, the names of what it was planned with, and how prompts are padded; what plans take of it."""

    model: str
    planned: tuple[str, ...]
    padded: str = ""
    strategy: str = "fsdp"
    inputs: str = "whole"


MASKED, PAIR = ("input_ids", "attention_mask", "labels"), ("decoder_input_ids", "decoder_attention_mask")
CASES = {
    "llama, words alone": Case("llama", ("input_ids", "labels"), "left", inputs="sharded"),
    "mixtral, a mask": Case("mixtral", MASKED, "left"),
    "bloom, a mask": Case("bloom", MASKED, "right"),
    "roberta, positions": Case("roberta", (*MASKED, "position_ids"), "left"),
    "gpt2, a mask": Case("gpt2", MASKED, "left", strategy="megatron"),
    "t5, words alone": Case("t5", ("input_ids", "labels")),
    "bart, a mask": Case("bart", MASKED, "right", strategy="megatron"),
    "t5, a mask": Case("t5", MASKED, "right", inputs="sharded"),
    "mbart, both sequences": Case("mbart", (*MASKED, *PAIR), "right"),
    "m2m, a mask": Case("m2m", MASKED, "right"),
    "llama, stages": Case("llama", MASKED, "left", strategy="stages"),
}


def whole_model(name: str) -> transformers.PreTrainedModel:
    """A model that says many different words: its weights are large."""
    torch.manual_seed(1)
    model, config, sizes = MODELS[name]
    made: transformers.PreTrainedModel = getattr(transformers, model)(config(**WORDS, **sizes))
    for parameter in made.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.5)
    return made


def prompts(padded: str, width: int) -> dict[str, torch.Tensor]:
    """Three prompts, of which two are shorter."""
    words = torch.randint(3, 40, (3, width), generator=torch.Generator().manual_seed(3))
    missing = torch.tensor([[0], [2], [width - 2]])
    places = torch.arange(width) if padded == "left" else torch.arange(width).flip(0)
    mask = (places >= missing).long()
    return {"input_ids": words * mask, "attention_mask": mask} if padded else {"input_ids": words}


def made(case: Case) -> tuple[Generator, transformers.PreTrainedModel]:
    """A generator over a module that was planned for training, and the model."""
    model = whole_model(case.model)
    target = 8 if model.config.is_encoder_decoder else 12  # another length than the source's
    words = {name: torch.full((4, target if "decoder" in name or name == "labels" else 12), 3) for name in case.planned}
    how = {"pipeline": "axis0"} if case.strategy == "stages" else {"strategy": case.strategy}
    parallel = autopar.parallelize(model, words, (2,), device="h100", inputs=case.inputs, **how)
    return Generator(parallel, model), model


def generated(name: str) -> dict[str, tuple[list[list[int]], list[list[int]]]]:
    """The tokens of the parallel module and of the whole model, in several ways."""
    case, found = CASES[name], {}
    generator, model = made(case)
    encodes = case.model == "t5" and "attention_mask" not in case.planned
    given = prompts(case.padded, 12 if encodes else 5)
    for way, options in WAYS.items():
        if way == "guided" and model.config.is_encoder_decoder:  # which the library cannot
            continue
        tokens = []
        for one in (generator, model.eval()):
            torch.manual_seed(1)
            tokens.append(one.generate(**given, **{"max_new_tokens": 6, "do_sample": False, **options}).tolist())
        found[way] = tokens[0], tokens[1]
    assert generator.parallel.training
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_a_parallel_module_generates_what_the_whole_model_does(name: str, pool: WorkerPool) -> None:
    for found in pool.run(f"{__name__}:generated", name, ranks=2, keep=True):
        for ours, whole in found.values():  # type: ignore[attr-defined]
            assert ours == whole
        assert len({word for _, whole in found.values() for row in whole for word in row}) > 6  # type: ignore[attr-defined]


def refused(_: None) -> list[str]:
    """What is said to calls that cannot be served."""
    found = []

    def said(generator: Generator, **options: object) -> None:
        with pytest.raises(InputError) as error:
            generator.generate(**{"max_new_tokens": 6, "do_sample": False, **options})
        found.append(str(error.value).splitlines()[0])

    causal, _ = made(CASES["llama, words alone"])
    said(causal, **prompts("", 10))
    said(causal, **prompts("right", 5))
    said(causal, **prompts("", 5), use_cache=True)
    said(causal, **prompts("", 5), prompt_lookup_num_tokens=2)
    said(causal, inputs_embeds=torch.zeros(3, 5, 16))
    said(causal, **prompts("", 5), output_attentions=True, return_dict_in_generate=True)
    encoding, _ = made(CASES["t5, words alone"])
    said(encoding, **prompts("", 5))
    said(encoding, **prompts("right", 12))
    said(encoding, encoder_outputs=BaseModelOutput(last_hidden_state=torch.zeros(3, 12, 16)))
    said(encoding, **prompts("", 12), guidance_scale=1.5)
    wrapping, _ = made(Case("mbart", MASKED))
    said(wrapping, **prompts("", 5), decoder_input_ids=torch.tensor([[2, 3, 0, 4]] * 3))
    for case in (Case("roberta", MASKED), Case("bloom", (*MASKED, "token_type_ids"))):
        with pytest.raises(InputError) as error:
            made(case)
        found.append(str(error.value).splitlines()[0])
    return found


def test_what_cannot_be_generated_is_refused_on_every_rank(pool: WorkerPool) -> None:
    for found in pool.run(f"{__name__}:refused", None, ranks=2, keep=True):
        assert found == [
            "input_ids: 3 sequences of 13 tokens, but the module was planned for 4 of 12",
            "the prompts are padded on the right, or their positions are not counted from their first token",
            "a Generator has no cache",
            "assisted generation removes tokens from the cache, which a planned cache and a Generator cannot",
            "prompts are tokens: a planned call reads no embeddings",
            "generating takes output_attentions",
            "the encoder reads 5 tokens, but the module was planned for 12, without attention_mask",
            "the prompts are padded, but the module was planned without attention_mask",
            "an encoder reads embeddings, or has read before",
            "a decoder was called without an encoder's output",
            "no labels, shifted, give these decoder tokens",
            "RobertaForCausalLM uses other positions in generate() than by default",
            "the parallel module cannot generate: it takes more than tokens, or returns no logits",
        ]
