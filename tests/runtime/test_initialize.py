"""A model on meta, initialised on the shards, equals the sequential model initialised with the same seed."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from autopar.errors import InputError
from autopar.ir.layout import I, Layout, split
from autopar.ir.mesh import Mesh
from autopar.runtime.drawing import drawing
from autopar.runtime.initialize import initialize, initialized
from autopar.runtime.storage import full_tensor, storable, store
from autopar.runtime.workers import WorkerPool
from autopar.runtime.world import connect

SIZES = (2, 2)


class Net(nn.Module):
    """Modules of torch, a tied weight, a frozen one, batch norm's buffers, and code that goes back to another module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8, padding_idx=0)
        self.conv = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8))
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 12)
        self.head.weight = self.embed.weight
        self.embed.weight.requires_grad_(False)

    def reset_parameters(self) -> None:
        first, second = self.conv[0].weight.data, self.head.bias.data
        second.fill_(3.0)
        first.mul_(2.0)


def build(name: str) -> nn.Module:
    torch.manual_seed(1)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    makers = {
        "net": Net,
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=64, n_positions=32)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**small, num_key_value_heads=1, vocab_size=64)),
        "bert": lambda: BertForMaskedLM(BertConfig(**small, vocab_size=64)),
        "t5": lambda: T5ForConditionalGeneration(
            T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=64)
        ),
        "vit": lambda: ViTForImageClassification(ViTConfig(**small, image_size=16, patch_size=4)),
        "wrapped gpt2": lambda: nn.Sequential(nn.Linear(4, 4), build("gpt2")),
    }
    return makers[name]()


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def layouts(model: nn.Module) -> dict[str, Layout]:
    """Each tensor split wherever it can be, in turn on one dim and on two."""
    found = {}
    for name, tensor in tensors(model).items():
        shape = tuple(tensor.shape)
        wanted = [(split(1, shape[1] // 2), split(0, shape[0] // 2))] if len(shape) > 1 else []
        wanted += [(I, split(0, shape[0] // 2))] if shape else []
        found[name] = next((x for x in wanted if storable(x, shape, SIZES)), (I, I))
    return found


def sequential(model: nn.Module) -> None:
    """The model's own code, in the order in which a whole model would run it."""
    for child in () if isinstance(model, PreTrainedModel) else model.children():
        sequential(child)
    if isinstance(model, PreTrainedModel):
        for module in model.modules():
            vars(module).pop("_is_hf_initialized", None)
        model.initialize_weights()
    for name in ("reset_parameters", "_reset_parameters"):
        if name in dir(model):
            getattr(model, name)()


def compare(names: list[str]) -> None:
    context = connect(Mesh.of(SIZES))
    for name in names:
        with torch.device("meta"):
            model = build(name)
        found = initialized(model, layouts(model), context, seed=7)
        expected = build(name)
        with drawing(7, torch.device("cpu")):
            sequential(expected)
        wanted, originals = tensors(expected), tensors(model)
        assert list(found) == list(originals)
        for key, tensor in found.items():
            assert torch.equal(full_tensor(tensor), wanted[key]), f"{key} of {name}"
            assert isinstance(tensor, nn.Parameter) == isinstance(originals[key], nn.Parameter)
            assert tensor.requires_grad == originals[key].requires_grad
            assert originals[key].is_meta, "the user's model is left untouched"
        assert len(set(map(id, found.values()))) == len(set(map(id, originals.values()))), "ties"


@pytest.mark.parametrize(
    "names",
    [["net", "llama", "t5", "wrapped gpt2"], pytest.param(["gpt2", "bert", "vit"], marks=pytest.mark.thorough)],
    ids=str,
)
def test_every_weight_and_buffer_equals_that_of_the_sequential_model(pool: WorkerPool, names: list[str]) -> None:
    pool.run(f"{__name__}:compare", names, ranks=4, keep=True)


def fill(_: None) -> None:
    context = connect(Mesh.of(SIZES))
    with torch.device("meta"):
        model, parallel, foreign = build("net"), build("net"), nn.Linear(2, 2)
    for name, tensor in store(tensors(model), layouts(model), context).items():
        owner, _, leaf = name.rpartition(".")
        setattr(parallel.get_submodule(owner), leaf, tensor)
    parallel.autopar = SimpleNamespace(  # type: ignore[assignment]
        context=context, storage=context, alike=True, place=lambda name: I
    )
    loaded = store({"bias": nn.Parameter(torch.full((12,), 5.0))}, {"bias": (I, I)}, context)["bias"]
    parallel.head.bias = loaded  # type: ignore[union-attr, assignment]
    with pytest.raises(InputError, match="not a Linear"):
        initialize(foreign, model)
    with pytest.raises(InputError, match="Linear has no such parameter or buffer"):
        initialize(parallel, foreign)
    initialize(parallel, model)
    found = tensors(parallel)
    assert not any(tensor.is_meta for tensor in found.values())
    assert found["head.bias"] is loaded
    assert found["head.weight"] is found["embed.weight"]
    assert torch.equal(full_tensor(found["conv.1.running_var"]), torch.ones(8))
    assert list(parallel.state_dict()) == list(model.state_dict())


def test_a_parallel_module_on_meta_is_filled_in_place_and_what_was_loaded_stays(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:fill", ranks=4, keep=True)


class Rope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)


def test_what_the_models_code_leaves_on_meta_is_an_error_that_names_it() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Rope())
    with pytest.raises(InputError, match=r"0\.frequencies cannot be initialised") as raised:
        initialized(model, dict.fromkeys(tensors(model), (I,)), connect(Mesh.of(1)), seed=0)
    assert "give Rope a method reset_parameters()" in str(raised.value)


def test_what_is_not_on_meta_keeps_its_value() -> None:
    model = Rope()
    found = initialized(model, dict.fromkeys(tensors(model), (I,)), connect(Mesh.of(1)), seed=0)
    assert torch.equal(found["frequencies"], torch.arange(4.0))


def test_the_callers_random_state_is_left_alone() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    before = torch.get_rng_state()
    initialized(model, dict.fromkeys(tensors(model), (I,)), connect(Mesh.of(1)), seed=0)
    assert torch.equal(torch.get_rng_state(), before)
