"""torch's own parallel training, as its documentation tells a user to set it up for each of the models.

torch-ddp    DistributedDataParallel, as it comes: each rank has the mean loss of its own samples
torch-ddp-whole  the same with the mean over all samples, as a single process reports it and as autopar's plans do: the ranks
             add up the number of samples that count, and the loss
torch-fsdp   fully_shard on every block and on the root
torch-tp     parallelize_module: column- and row-wise weights, the head and the loss over the vocabulary; between the blocks
             the text models are split along the sequence, the ViT (65 tokens) is whole

Compiled, DistributedDataParallel has the whole model compiled inside it
(https://docs.pytorch.org/docs/stable/compile/programming_model.where_to_apply_compile.html), fully_shard every block inside it
(as torchtitan has; a whole model is slower, its graph being cut at every hook), and torch-tp a function that returns the loss
alone (where logits are returned too, torch fails in the backward: https://github.com/pytorch/pytorch/issues/172556).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from models import Batch, blocks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from transformers.pytorch_utils import Conv1D
from transformers.utils import ModelOutput

Built = tuple[nn.Module, Batch, Callable[[], contextlib.AbstractContextManager[None]]]


def build(name: str, model: nn.Module, batch: Batch, *, compiled: bool = False) -> Built:
    """The module, this rank's batch, and the context in which its step runs."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("axis0",))
    if name == "torch-tp":
        module = tensor_parallel(model, mesh)
        return _Loss(module) if compiled else module, batch, loss_parallel if _text(model) else contextlib.nullcontext
    for module in _compiled(name, model) if compiled else ():
        module.compile()
    rows = {key: value.chunk(dist.get_world_size())[dist.get_rank()] for key, value in batch.items()}
    if name == "torch-ddp":
        return DistributedDataParallel(model), rows, contextlib.nullcontext
    if name == "torch-ddp-whole":
        return _WholeLoss(DistributedDataParallel(model)), rows, contextlib.nullcontext
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh), rows, contextlib.nullcontext


def _compiled(name: str, model: nn.Module) -> Sequence[nn.Module]:
    """The parts of a model that are compiled, each by itself."""
    return [model] if name.startswith("torch-ddp") else blocks(model)


class _Loss(nn.Module):
    """A model of which the loss alone is computed, compiled."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.loss = torch.compile(lambda **batch: module(**batch).loss)

    def forward(self, **batch: torch.Tensor) -> ModelOutput:
        return ModelOutput(loss=self.loss(**batch))


class _WholeLoss(nn.Module):
    """A data-parallel model whose loss is the mean over all ranks' labels, but for those that are ignored."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **batch: torch.Tensor) -> ModelOutput:
        mine = (batch["labels"] != -100).sum().float()
        whole = mine.clone()
        dist.all_reduce(whole)
        result = self.module(**batch)
        share = result.loss * (mine / whole)
        whole = share.detach().clone()
        dist.all_reduce(whole)
        result.loss = share * dist.get_world_size() + (whole - share * dist.get_world_size()).detach()  # gradients are averaged
        return result


def _text(model: nn.Module) -> bool:
    return hasattr(model, "lm_head")


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The hand-written plan of a model."""
    plans: dict[str, Callable[[nn.Module, int], dict[str, ParallelStyle]]] = {
        "GPT2LMHeadModel": _gpt2,
        "LlamaForCausalLM": _llama,
        "ViTForImageClassification": _vit,
    }
    tied = _text(model) and model.lm_head.weight is model.get_input_embeddings().weight
    parallelize_module(model, mesh, plans[type(model).__name__](model, mesh.size()))
    if tied:  # each was distributed by itself
        model.lm_head.weight = model.get_input_embeddings().weight
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            parameter.register_post_accumulate_grad_hook(_summed)
    return model


def _summed(parameter: torch.Tensor) -> None:
    """Add up a gradient that is left Partial (of a norm's weight) once: else each operation of the optimizer does it again."""
    assert isinstance(parameter, DTensor)
    assert isinstance(parameter.grad, DTensor)
    parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


def _ends(embedding: str, norm: str) -> dict[str, ParallelStyle]:
    """A vocabulary split over the axis at both ends, a sequence split over it in between."""
    return {
        embedding: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        norm: SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }


def _rows() -> ParallelStyle:
    """The second weight of a pair, whose result goes back to the split sequence."""
    return RowwiseParallel(output_layouts=Shard(1), use_local_output=False)


def _gathered(*, keyword: str | None = None) -> ParallelStyle:
    """The whole sequence, for attention or a unit."""
    if keyword:
        return PrepareModuleInput(
            input_kwarg_layouts={keyword: Shard(1)}, desired_input_kwarg_layouts={keyword: Replicate()}, use_local_output=False
        )
    return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=False)


class _Fused(nn.Module):
    """Query, key and value by a weight each, since a fused one cannot be cut column-wise."""

    def __init__(self, fused: Conv1D) -> None:
        super().__init__()
        self.parts = nn.ModuleList(_linear(w, b) for w, b in zip(fused.weight.chunk(3, 1), fused.bias.chunk(3), strict=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def _linear(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    """A linear of a Conv1D's weight, which is stored transposed."""
    made = nn.Linear(*weight.shape, device="meta")
    made.weight = nn.Parameter(weight.detach().t().contiguous())
    made.bias = nn.Parameter(bias.detach().clone())
    return made


def _gpt2(model: nn.Module, size: int) -> dict[str, ParallelStyle]:
    plan = _ends("transformer.wte", "transformer.ln_f")
    plan["transformer.wpe"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False)
    for number, block in enumerate(blocks(model)):
        at = f"transformer.h.{number}"
        block.attn.c_attn = _Fused(block.attn.c_attn)
        block.attn.split_size //= size
        for module, name in ((block.attn, "c_proj"), (block.mlp, "c_fc"), (block.mlp, "c_proj")):
            conv = getattr(module, name)
            setattr(module, name, _linear(conv.weight, conv.bias))
        plan |= {f"{at}.ln_1": SequenceParallel(), f"{at}.ln_2": SequenceParallel()}
        plan |= {f"{at}.attn": _gathered(), f"{at}.mlp": _gathered()}
        plan |= {f"{at}.attn.c_attn.parts.{part}": ColwiseParallel() for part in range(3)}
        plan |= {f"{at}.mlp.c_fc": ColwiseParallel(), f"{at}.attn.c_proj": _rows(), f"{at}.mlp.c_proj": _rows()}
    return plan


def _llama(model: nn.Module, size: int) -> dict[str, ParallelStyle]:
    plan = _ends("model.embed_tokens", "model.norm")
    for number, _ in enumerate(blocks(model)):
        at = f"model.layers.{number}"
        plan |= {f"{at}.input_layernorm": SequenceParallel(), f"{at}.post_attention_layernorm": SequenceParallel()}
        plan |= {f"{at}.self_attn": _gathered(keyword="hidden_states"), f"{at}.mlp": _gathered()}
        plan |= _columns(at, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"))
        plan |= {f"{at}.self_attn.o_proj": _rows(), f"{at}.mlp.down_proj": _rows()}
    return plan


def _vit(model: nn.Module, size: int) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {}
    for number, _ in enumerate(blocks(model)):
        at = f"vit.layers.{number}"
        plan |= _columns(at, ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.fc1"))
        plan |= {f"{at}.attention.o_proj": RowwiseParallel(), f"{at}.mlp.fc2": RowwiseParallel()}
    return plan


def _columns(at: str, names: Iterable[str]) -> dict[str, ParallelStyle]:
    return {f"{at}.{name}": ColwiseParallel() for name in names}
