"""Train a Hugging Face model from its checkpoint with the library's Trainer, save it, and let it generate.

    torchrun --nproc-per-node 2 examples/hugging_face.py [folder]          needs transformers, accelerate and safetensors

No process has the whole weights before they are saved: the model is built on meta, and every process reads its parts of the
files. A folder of your own may hold any causal language model's safetensors; without one a small Llama is written first.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainingArguments

import autopar
from autopar.integrations.safetensors import load_pretrained
from autopar.integrations.transformers import Trainer

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
BATCH, LENGTH = 8, 16


def checkpoint() -> Path:
    """A folder with a small model, which rank 0 writes."""
    place = [tempfile.mkdtemp()]
    if WORLD > 1:
        dist.broadcast_object_list(place, src=0)
    if RANK == 0:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(place[0])
    if WORLD > 1:
        dist.barrier()
    return Path(place[0])


def main(folder: str | None = None) -> None:
    """Load, train, save, load again, generate."""
    if WORLD > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    source = Path(folder) if folder else checkpoint()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))

    texts = (torch.arange(LENGTH) + torch.arange(64)[:, None]) % 64  # each word is the next one's number less one
    data = [{"input_ids": words, "labels": words} for words in texts]
    sample = {"input_ids": texts[:BATCH], "labels": texts[:BATCH]}
    parallel = autopar.parallelize(model, sample, (WORLD,), strategy="fsdp" if WORLD > 1 else "auto", inputs="sharded")
    load_pretrained(parallel, model, source)

    arguments = TrainingArguments(
        output_dir=str(source / "trained"),
        per_device_train_batch_size=BATCH // parallel.data_world,
        per_device_eval_batch_size=BATCH // parallel.data_world,
        num_train_epochs=4,
        learning_rate=1e-2,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(parallel, model, args=arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    trainer.save_model()
    if RANK == 0:
        print(
            "evaluation loss by epoch:", *(f"{log['eval_loss']:.3f}" for log in trainer.state.log_history if "eval_loss" in log)
        )
        whole = AutoModelForCausalLM.from_pretrained(source / "trained").eval()
        print("counted on:", *whole.generate(texts[:1, :8], max_new_tokens=4, do_sample=False)[0].tolist())


if __name__ == "__main__":
    main(*sys.argv[1:2])
    if dist.is_initialized():
        dist.destroy_process_group()
