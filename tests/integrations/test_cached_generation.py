"""Generation with a planned cache: prefill and decode share one set of stored tensors and give the original model's tokens."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor

import autopar
from autopar.capture import Assumptions
from autopar.errors import BudgetError, ConstraintError, InputError, PlanError
from autopar.integrations.generation import CachedGenerator, Generator, SeenPositions, parallel_generator
from autopar.integrations.generation_plan import GenerationPlan, cached_model, plan_generation, samples_of
from autopar.plan.options import Options
from autopar.planning.planner import connected_mesh, plan_program, read_program
from autopar.planning.shared_storage import stored_as
from autopar.runtime.storage import to_local
from autopar.runtime.workers import WorkerPool
from autopar.verify.testing import peak
from tests.support import table

SERVED = Assumptions(inference=True)
BATCH, PROMPT, LENGTH, WORDS, NEW = 4, 8, 24, 64, 7
STOP = {"eos_token_id": WORDS, "pad_token_id": 0, "do_sample": False, "max_new_tokens": NEW}


def whole_model(name: str) -> transformers.PreTrainedModel:
    """A model that says many different words: its weights are large."""
    torch.manual_seed(1)
    words = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if name == "gpt2":
        config = transformers.GPT2Config(n_layer=1, n_head=4, n_embd=32, n_positions=256, **words)
        model = transformers.GPT2LMHeadModel(config)
    elif name == "llama":
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=32, intermediate_size=64, **heads, **words))
    else:
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **words))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def prompts(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(2, WORDS, (rows, tokens), generator=torch.Generator().manual_seed(rows * 100 + tokens))


@dataclass(frozen=True)
class Case:
    """A model and the strategy by which it is planned; `auto` on links that make small models worth splitting."""

    model: str
    strategy: str
    mesh: tuple[int, ...] = (2, 2)

    @property
    def options(self) -> dict[str, object]:
        return {"strategy": self.strategy} | ({} if self.strategy == "auto" else {"device": "h100"})

    def plan(self) -> GenerationPlan:
        mesh = table.mesh(self.mesh) if self.strategy == "auto" else self.mesh
        return plan_generation(whole_model(self.model), prompts(BATCH, PROMPT), mesh, length=LENGTH, **self.options)


CASES = [
    Case("gpt2", "megatron", (2,)),
    Case("t5", "megatron", (2,)),
    pytest.param(Case("llama", "auto"), marks=pytest.mark.thorough),
    pytest.param(Case("llama", "megatron"), marks=pytest.mark.thorough),
    pytest.param(Case("gpt2", "auto"), marks=pytest.mark.thorough),
    pytest.param(Case("t5", "auto"), marks=pytest.mark.thorough),
]


BY_RANK_0 = CASES[0]  # where no plan is given


def calls(name: str) -> dict[str, tuple[torch.Tensor, dict[str, object]]]:
    """Prompts of several lengths, fewer than were planned, padded, and drawn."""
    padded = torch.ones(2, PROMPT, dtype=torch.int64)
    padded[0, slice(5, None) if name == "t5" else slice(0, 3)] = 0
    found: dict[str, tuple[torch.Tensor, dict[str, object]]] = {
        "as planned": (prompts(BATCH, PROMPT), {}),
        "shorter": (prompts(3, 5), {}),
        "one": (prompts(1, 1), {}),
        "padded": (prompts(2, PROMPT), {"attention_mask": padded}),
        "drawn": (prompts(3, PROMPT), {"do_sample": True, "top_k": 5}),
        "drawn twice": (prompts(2, PROMPT), {"do_sample": True, "top_k": 1, "num_return_sequences": 2}),
    }
    return found if name == "t5" else {**found, "longer": (prompts(2, 17), {})}


def generated(given: tuple[Case, str]) -> dict[str, object]:
    """Tokens of both, what is stored where, and how much of it, on one rank; rank 0 plans where no plan is given."""
    transformers.logging.set_verbosity_error()
    case, line = given
    plan = GenerationPlan.from_json(line) if line else None
    model = whole_model(case.model)
    generator = parallel_generator(model, prompts(BATCH, PROMPT), case.mesh, length=LENGTH, plan=plan, **case.options)
    tokens = {}
    for name, (words, more) in calls(case.model).items():
        both = []
        for one in (generator, model):
            torch.manual_seed(3)
            said = one.generate(words, **{**STOP, **more}, return_dict_in_generate=True, output_logits=True)
            both.append((said.sequences, torch.stack(said.logits)))
        (ours, logits), (theirs, expected) = both
        tokens[name] = ours.tolist(), theirs.tolist(), float((logits - expected).abs().max() / expected.abs().max())
    return {"tokens": tokens, "plan": generator.plan.to_json(), **stored(generator)}


def stored(generator: CachedGenerator) -> dict[str, object]:
    """Whether both modules have the same memory, and bytes of the cache that this rank stores."""
    first, following = (
        {**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (generator.prefill, generator.decode)
    )
    shared = all(to_local(first[name]).data_ptr() == to_local(following[name]).data_ptr() for name in first)
    cache = [tensor for name, tensor in first.items() if name.startswith(("cache.", "cross."))]
    return {
        "shared": shared and first.keys() == following.keys(),
        "buffers": sum(to_local(tensor).nbytes for tensor in generator.prefill.buffers()),
        "split": all(isinstance(one, DTensor) and to_local(one).numel() < one.numel() for one in cache),
        "trained": any(tensor.requires_grad for tensor in first.values()),
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_processes_generate_what_the_whole_model_does(pool: WorkerPool, case: Case) -> None:
    plan = case.plan()
    line = plan.to_json()
    given = case, "" if case == BY_RANK_0 else line
    for found in pool.run(f"{__name__}:generated", given, ranks=math.prod(case.mesh), keep=True):
        assert GenerationPlan.from_json(found["plan"]) == GenerationPlan.from_json(line)  # type: ignore[index]
        for ours, theirs, error in found["tokens"].values():  # type: ignore[index]
            assert ours == theirs
            assert error < 1e-5
        said = [tuple(row[-NEW:]) for _, theirs, _ in found["tokens"].values() for row in theirs]  # type: ignore[index]
        assert len(set(said)) > 5, "whatever is read decides what is said"
        assert (found["shared"], found["split"], found["trained"]) == (True, True, False)  # type: ignore[index]
        assert found["buffers"] == plan.prefill.breakdown.memory["buffers"]  # type: ignore[index]


def test_the_prices_are_those_of_the_faster_pair() -> None:
    """Neither program planned alone is slower in the pair than where the other one's layouts are forced on it."""
    model, sample, mesh = whole_model("gpt2"), prompts(BATCH, PROMPT), table.mesh((2,))
    found = plan_generation(model, sample, mesh, length=LENGTH)
    cached = cached_model(model, sample, LENGTH)
    options = Options(mode="inference")
    first, following = (read_program(cached, one, options).program for one in samples_of(cached, sample))
    priced = connected_mesh(mesh, options)
    alone = [plan_program(program, priced, options) for program in (first, following)]
    forced = (
        plan_program(first, priced, stored_as(alone[1], first, options)),
        plan_program(following, priced, stored_as(alone[0], following, options)),
    )
    pairs = (alone[0], forced[1]), (forced[0], alone[1])
    assert found.seconds(1 + LENGTH - PROMPT) == min(p.step_time + (LENGTH - PROMPT) * d.step_time for p, d in pairs)
    assert found.prefill_per_token == found.prefill.step_time / (BATCH * PROMPT)
    assert found.decode_per_token == found.decode.step_time / BATCH
    stored = [name for name in found.prefill.layouts if name.startswith(("model.", "cache.")) and ":" not in name]
    assert stored
    assert all(found.prefill.layouts[name] == found.decode.layouts[name] for name in stored)
    assert "us per token" in str(found)


def test_a_token_under_megatron_sends_two_sums_a_layer_and_the_logits() -> None:
    plan = plan_generation(
        whole_model("llama"), prompts(BATCH, PROMPT), (2,), length=LENGTH, device="h100", strategy="megatron"
    )
    for one, tokens in ((plan.prefill, PROMPT), (plan.decode, 1)):
        sums = [("all_reduce", BATCH * tokens * 32 * 4)] * 2 * 2  # of 32 features in float32, of two layers
        assert sorted((sent.kind, sent.bytes) for sent in one.collectives) == [("all_gather", BATCH * WORDS * 4), *sums]


@pytest.fixture(scope="module")
def generator() -> CachedGenerator:
    return parallel_generator(whole_model("gpt2"), prompts(BATCH, PROMPT), (1,), length=LENGTH, device="h100")


def test_the_memory_of_a_token_is_what_the_plan_says() -> None:
    model, sample = whole_model("gpt2"), prompts(BATCH, PROMPT)
    generator = parallel_generator(model, sample, (1,), length=256, device="cpu")
    plan = generator.plan
    calls = zip((generator.prefill, generator.decode), samples_of(cached_model(model, sample, 256), sample), strict=True)
    found = [peak(module, None, given.values(), lambda m=module, g=given: m(**g)).bytes for module, given in calls]  # type: ignore[misc]
    assert [plan.prefill.peak_memory, plan.decode.peak_memory] == pytest.approx(found, rel=0.01)
    cache = sum(tensor.nbytes for name, tensor in generator.prefill.named_buffers() if name.startswith("cache."))
    assert plan.decode.peak_memory < sum(p.nbytes for p in generator.prefill.parameters()) + 1.1 * cache, "it is not copied"


ASKED = [
    ((2, PROMPT), {"num_beams": 2}, "beam search is not supported"),
    ((1, PROMPT), {"prompt_lookup_num_tokens": 2}, "assisted generation removes tokens"),
    ((1, PROMPT), {"assistant_model": whole_model("gpt2")}, "assisted generation removes tokens"),
    ((1, PROMPT), {"penalty_alpha": 0.6, "top_k": 4}, "contrastive search is not supported"),
    ((5, PROMPT), {}, "5 sequences of 8 tokens, but 4 of 24 were planned"),
    ((1, PROMPT), {"max_new_tokens": 18}, "1 sequences of 25 tokens, but 4 of 24 were planned"),
    ((1, PROMPT), {"use_cache": False}, "the cache is planned, and always used"),
    ((1, PROMPT), {"cache_implementation": "static"}, "the cache is planned, and always used"),
    (
        (1, PROMPT),
        {"output_hidden_states": True, "return_dict_in_generate": True},
        "hidden states and attentions were not planned",
    ),
    ((1, PROMPT), {"decoder_input_ids": torch.tensor([[1]])}, "the model has no encoder"),
    ((1, PROMPT), {"guidance_scale": 1.5}, "guidance is not supported with a planned cache"),
]


@pytest.mark.parametrize("shape, options, said", ASKED)
def test_more_than_was_planned_is_refused(
    generator: CachedGenerator, shape: tuple[int, int], options: dict[str, object], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        generator.generate(prompts(*shape), **{**STOP, **options})


def test_prompts_have_the_name_that_a_tokenizer_gives_them_too(generator: CachedGenerator) -> None:
    words = prompts(2, PROMPT)
    given = generator.generate(input_ids=words, attention_mask=torch.ones_like(words), **STOP)
    assert torch.equal(given, generator.generate(words, **STOP))
    with pytest.raises(InputError, match="there are no prompts"):
        generator.generate(inputs_embeds=torch.zeros(1, PROMPT, 16), **STOP)
    with pytest.raises(InputError, match="prompts are tokens"):
        generator.generate(words, inputs_embeds=torch.zeros(2, PROMPT, 16), **STOP)


@pytest.mark.parametrize("wrong", ["", "{", "[]", '{"batch": 1}', "batch", "prompt", "decode", "length"])
def test_a_damaged_plan_and_one_for_other_sizes_are_refused(generator: CachedGenerator, wrong: str) -> None:
    plan = generator.plan
    text = json.dumps({**json.loads(plan.to_json()), wrong: "x" if wrong == "decode" else 0})
    with pytest.raises(PlanError, match="damaged"):
        GenerationPlan.from_json(text if wrong.isalpha() else wrong)
    with pytest.raises(PlanError, match="was planned for other sizes"):
        plan.check(prompts(BATCH, PROMPT), LENGTH + 1)


def test_a_cache_that_others_would_shorten_or_move_is_refused() -> None:
    for change in ("crop", "reorder_cache", "batch_select_indices", "batch_repeat_interleave"):
        with pytest.raises(InputError, match="a planned cache only grows"):
            getattr(SeenPositions(), change)(1)


def test_a_call_without_generate_is_refused(generator: CachedGenerator) -> None:
    with pytest.raises(InputError, match="a planned cache serves one generate"):
        generator(prompts(1, 2))


@pytest.mark.thorough
def test_a_model_without_a_slice_of_logits_generates_too() -> None:
    """BLOOM counts positions along the mask itself."""
    config = transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=WORDS, bos_token_id=0, eos_token_id=0)
    model = transformers.BloomForCausalLM(config).eval()
    generator = parallel_generator(model, prompts(2, 4), (1,), length=16, device="h100")
    words = prompts(2, 4)
    assert torch.equal(generator.generate(words, **STOP), model.generate(words, **STOP))


REFUSED = [
    ({"length": 8}, InputError, "with a cache of length=8 positions"),
    ({"dynamic": {"batch": 0}}, ConstraintError, "dynamic= names inputs of a call"),
    ({"mode": "training"}, ConstraintError, "mode='training' does not generate"),
    ({"optimizer": "sgd"}, ConstraintError, "optimizer='sgd' is for training"),
    ({"budget": 1000}, BudgetError, "no plan fits"),
]


@pytest.mark.parametrize("options, kind, said", REFUSED)
def test_what_cannot_be_planned_is_refused(options: dict[str, object], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        plan_generation(whole_model("gpt2"), prompts(BATCH, PROMPT), (1,), **{"device": "h100", "length": LENGTH, **options})


def test_a_cache_that_forgets_is_refused() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": WORDS}
    model = transformers.MistralForCausalLM(transformers.MistralConfig(sliding_window=4, num_key_value_heads=2, **sizes)).eval()
    with pytest.raises(InputError, match="has a StaticSlidingWindowLayer, which is not planned"):
        plan_generation(model, prompts(1, 4), (1,), length=16, device="h100")


SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": WORDS,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def test_lengths_that_change_the_positions_of_all_are_refused() -> None:
    """LongRoPE has other frequencies in sequences beyond a length, which a planned call has from its first token on."""
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    config = transformers.Phi3Config(**SIZES, rope_parameters=rope, original_max_position_embeddings=16)
    model = transformers.Phi3ForCausalLM(config).eval()
    with pytest.raises(InputError, match=r"computes other positions in sequences of more than 16 tokens\n.*up to 24 tokens"):
        plan_generation(model, prompts(2, 4), (1,), length=24, device="h100")
    longer = autopar.parallelize(model, {"input_ids": prompts(2, 24)}, (1,), device="h100")
    with pytest.raises(InputError, match="computes other positions in sequences of more than 16 tokens"):
        Generator(longer, model)
    generator, words = parallel_generator(model, prompts(2, 4), (1,), length=16, device="h100"), prompts(2, 4)
    assert torch.equal(generator.generate(words, max_new_tokens=8), model.generate(words, max_new_tokens=8))


def test_a_model_that_looks_at_numbers_where_it_fills_the_cache_is_refused() -> None:
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=4, num_local_experts=2, experts_implementation="eager")
    model = transformers.MixtralForCausalLM(config).eval()
    with pytest.raises(InputError, match=r'(?s)decides by values while it fills a cache.*experts_implementation="batched_mm"'):
        plan_generation(model, prompts(2, 4), (1,), length=16, device="h100")


def test_a_mixture_of_experts_generates_as_the_refusal_says() -> None:
    config = transformers.MixtralConfig(
        **SIZES, num_key_value_heads=4, num_local_experts=2, experts_implementation="batched_mm"
    )
    model, words = transformers.MixtralForCausalLM(config).eval(), prompts(2, 4)
    generator = parallel_generator(model, words, (1,), length=16, device="h100")
    assert torch.equal(generator.generate(words, max_new_tokens=8), model.generate(words, max_new_tokens=8))
