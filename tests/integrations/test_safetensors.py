"""Weights from safetensors files: every rank reads its parts of the tensors, and never a whole one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, PreTrainedModel

import autopar
from autopar.errors import CheckpointError, InputError
from autopar.integrations.safetensors import SafetensorsReader, full_state_dict, load_pretrained
from autopar.integrations.transformers import save_pretrained
from autopar.ir.mesh import Mesh
from autopar.runtime.storage import full_tensor
from autopar.runtime.streamed_load import ranges
from autopar.runtime.workers import WorkerPool

LLAMA = LlamaConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=50,
    tie_word_embeddings=True,
)
GPT2 = GPT2Config(n_embd=12, n_layer=1, n_head=2, n_positions=8, vocab_size=50, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
NESTED = {"strategy": "megatron", "constraints": {"*proj.weight": "S(0), *"}}
STAGES = {"pipeline": "pp", "strategy": "fsdp", "microbatches": 2}
PLANS = {
    "fsdp, a vocabulary that is not divided": (LLAMA, (4,), {"strategy": "fsdp"}, 0.27),
    "nested and tensor parallel": (LLAMA, (2, 2), NESTED, 0.65),
    "blocked: query, key and value in one weight": (GPT2, (2,), {"strategy": "megatron"}, 0.75),
    "in stages, with a shared embedding": (LLAMA, {"pp": 2, "dp": 2}, STAGES, 0.38),
    "two stages a rank": (GPT2, {"pp": 1, "dp": 2}, STAGES | {"stages": 2}, 0.55),
}


def made(sizes: PretrainedConfig) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(sizes)


def hollow(sizes: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return made(sizes)


def loaded(payload: tuple[Path, PretrainedConfig, object, dict[str, object]]) -> tuple[list[str], float, float]:
    """What differs from the whole weights, the loss's difference, and the share of the weights that this rank holds."""
    folder, sizes, mesh, options = payload
    model, words = hollow(sizes), torch.arange(4 * 6).view(4, 6)
    batch = {"input_ids": words, "labels": words}
    parallel = autopar.parallelize(model, batch, mesh, device="h100", **options)
    assert load_pretrained(parallel, model, folder) == ()
    whole = type(model).from_pretrained(folder)
    expected = whole.state_dict()
    named = dict(parallel.named_parameters(remove_duplicate=False))
    wrong = [name for name, held in named.items() if not torch.equal(full_tensor(held.detach()), expected[name])]
    read = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parallel.parameters())
    with torch.no_grad():
        loss = float(abs(parallel(**batch).loss - whole(**batch).loss))
    kept = full_state_dict(parallel)
    assert not kept or kept.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in kept.items())
    assert bool(kept) == (torch.distributed.get_rank() == 0)
    return wrong, loss, read / sum(p.numel() for p in whole.parameters())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", PLANS)
def test_every_rank_has_its_parts_of_the_weights(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    sizes, mesh, options, share = PLANS[name]
    torch.manual_seed(0)
    made(sizes).save_pretrained(tmp_path, max_shard_size="4KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    ranks = Mesh.of(mesh).size
    found = pool.run(f"{__name__}:loaded", (tmp_path, sizes, mesh, options), ranks=ranks, keep=True)
    assert [one[0] for one in found] == [[]] * ranks
    assert max(one[1] for one in found) < 1e-6
    assert max(one[2] for one in found) <= share


def test_a_checkpoint_without_the_head_is_found_by_its_own_names(tmp_path: Path) -> None:
    model, words = hollow(LLAMA), torch.arange(12).view(2, 6)
    torch.manual_seed(0)
    whole = made(LLAMA)
    save_file({**whole.model.state_dict(), "extra": words}, tmp_path / "model.safetensors")
    parallel = autopar.parallelize(model, {"input_ids": words, "labels": words}, (1,))
    assert load_pretrained(parallel, model, tmp_path) == ("extra",)
    assert torch.equal(parallel(input_ids=words, labels=words).loss, whole(input_ids=words, labels=words).loss)


def unwritable(folder: Path) -> None:
    """The folder cannot be made; a rank that did not hear of it would be in a collective of its own."""
    model, words = made(LLAMA), torch.arange(12).view(2, 6)
    parallel = autopar.parallelize(model, {"input_ids": words, "labels": words}, (2,), device="h100", strategy="fsdp")
    with pytest.raises(CheckpointError, match="the weights were not written") as refusal:
        save_pretrained(parallel, model, folder / "file" / "weights")
    assert "NotADirectoryError" in refusal.value.details["error"]
    assert "on rank 0" in refusal.value.details["error"]
    parallel(input_ids=words, labels=words).loss.backward()
    save_pretrained(parallel, model, folder / "weights")


def test_where_rank_0_cannot_write_every_rank_says_so(pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    pool.run(f"{__name__}:unwritable", tmp_path, ranks=2, keep=True)
    assert (tmp_path / "weights" / "model.safetensors").exists()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


DAMAGED = {
    "has neither": lambda folder: None,
    "has no layer.bias": lambda folder: save_file({"layer.weight": torch.ones(2, 3)}, folder / "model.safetensors"),
    r"layer.bias has the shape \(2,\), but \(3,\) in the checkpoint": lambda folder: save_file(
        {"layer.weight": torch.ones(2, 3), "layer.bias": torch.ones(3)}, folder / "model.safetensors"
    ),
    "cannot be read": lambda folder: (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}"),
    "names '../x', which is not a file of its folder": lambda folder: (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"layer.weight": "../x"}})
    ),
    "is damaged: KeyError": lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
}


@pytest.mark.parametrize("pattern", DAMAGED)
def test_what_is_no_checkpoint_of_the_model_is_refused_and_nothing_is_loaded(tmp_path: Path, pattern: str) -> None:
    DAMAGED[pattern](tmp_path)
    model = Small()
    parallel = autopar.parallelize(model, torch.ones(4, 3), (1,))
    with pytest.raises(InputError, match=pattern):
        load_pretrained(parallel, model, tmp_path)
    assert all(torch.equal(*pair) for pair in zip(parallel.parameters(), model.parameters(), strict=True))


def test_a_whole_tensor_is_one_range_and_a_scalar_is_read_at_once(tmp_path: Path) -> None:
    assert ranges(torch.ones(2, 3)) == [((slice(0, 2), slice(0, 3)), (slice(0, 2), slice(0, 3)))]
    save_file({"s": torch.tensor(3.0)}, tmp_path / "model.safetensors")
    with SafetensorsReader(tmp_path) as reader:
        assert reader.read("s", ()) == 3.0
