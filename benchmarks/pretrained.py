"""A Llama of a billion parameters from a safetensors checkpoint onto four processes: memory, seconds, and the loss.

    python benchmarks/pretrained.py            # writes benchmarks/results/pretrained.txt

The weights are random, in bfloat16, in files of at most 500 MB as the library writes them. Beside ours each process loads them
whole, as `from_pretrained` does. Memory is what a process allocated of its own (RssAnon,
sampled every 5 ms) above what it had before; files are mapped, and their pages are the system's cache, in which they lie. Wall
seconds are of a machine that may have other work; CPU seconds are each process's own.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import autopar
from autopar.files import write
from autopar.integrations.safetensors import load_pretrained
from autopar.runtime.storage import full_tensor
from autopar.runtime.workers import WorkerPool

RANKS = 4
SIZES = {
    "1b": LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=32000, max_position_embeddings=2048, dtype=torch.bfloat16,
    ),
    "tiny": LlamaConfig(
        hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, dtype=torch.bfloat16,
    ),
}  # fmt: skip
BATCH, LENGTH = 4, 16
RESULT = Path(__file__).parent / "results" / "pretrained.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a rank took to load: bytes at its peak and at rest, wall and CPU seconds."""

    peak: int
    held: int
    wall: float
    cpu: float


class Peak:
    """The most memory of its own that this process has while a block runs, sampled by a thread."""

    def __init__(self) -> None:
        self.before = own_memory()
        self.most, self.running = self.before, True
        self.thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while self.running:
            self.most = max(self.most, own_memory())
            time.sleep(0.005)

    def __enter__(self) -> Peak:
        self.wall, self.cpu = time.perf_counter(), time.process_time()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall, self.cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        self.running = False
        self.thread.join()
        held = own_memory()
        self.found = Load(peak=max(self.most, held) - self.before, held=held - self.before, wall=self.wall, cpu=self.cpu)


def own_memory() -> int:
    """Bytes of this process that no file backs."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def hollow(size: str) -> nn.Module:
    """The model without weights."""
    with torch.device("meta"):
        made: nn.Module = AutoModelForCausalLM.from_config(SIZES[size], dtype=torch.bfloat16)
    return made


def sample(size: str) -> dict[str, torch.Tensor]:
    """A batch, the same on every rank."""
    words = torch.randint(SIZES[size].vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": words, "labels": words}


def streamed(payload: tuple[str, str]) -> tuple[Load, float, int, bool]:
    """Ours: the load, the loss, the bytes of this rank's weights, and whether a weight of every kind is the file's."""
    size, folder = payload
    model, batch = hollow(size), sample(size)
    parallel = autopar.parallelize(model, batch, (RANKS,), device="h100", strategy="fsdp")
    with Peak() as peak:
        load_pretrained(parallel, model, folder)
    with torch.no_grad():
        loss = float(parallel(**batch).loss)
    bytes_of = sum(p.to_local().nbytes for p in parallel.parameters())  # type: ignore[operator]
    return peak.found, loss, bytes_of, alike(parallel, folder)


def alike(parallel: nn.Module, folder: str) -> bool:
    """Whether the whole weights are those of the files, bit by bit; rank 0 compares."""
    from autopar.integrations.safetensors import SafetensorsReader

    with SafetensorsReader(folder) as reader:
        found = []
        for name, held in parallel.named_parameters():
            whole = full_tensor(held.detach())
            there = reader.read(name, tuple(map(slice, whole.shape)))
            found.append(dist.get_rank() > 0 or (whole.dtype == there.dtype and torch.equal(whole, there)))
    return all(found)


def whole(payload: tuple[str, str]) -> tuple[Load, float, int, bool]:
    """Every process loads the whole model, as `from_pretrained` does; rank 0 runs it, in sequence."""
    size, folder = payload
    with Peak() as peak:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        touched = sum(float(p.detach().flatten()[::1024].sum()) for p in model.parameters())  # what is mapped is read
    del touched
    loss = 0.0
    if dist.get_rank() == 0:
        with torch.no_grad():
            loss = float(model(**sample(size)).loss)
    dist.barrier()
    return peak.found, loss, sum(p.nbytes for p in model.parameters()), True


def main() -> None:
    """Write the checkpoint, load it in both ways, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--folder", help="where the checkpoint is written; by default a temporary folder")
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    given = parser.parse_args()
    folder = given.folder or tempfile.mkdtemp()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(SIZES[given.size])
    torch.set_default_dtype(torch.float32)
    count = sum(p.numel() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size="500MB")
    del model
    lines = [
        f"{count / 1e9:.3f} billion parameters in bfloat16, {2 * count / 2**20:,.0f} MiB in "
        f"{len([*Path(folder).glob('*.safetensors')])} files, onto {RANKS} processes (fsdp)",
        "",
        f"{'':34} {'rank':>4} {'peak MiB':>9} {'held MiB':>9} {'weights MiB':>11} {'wall s':>7} {'CPU s':>6}",
    ]
    losses = {}
    names = {"streamed": "load_pretrained", "whole": "from_pretrained on every rank"}
    with WorkerPool(RANKS, preload=["autopar.verify.verification", "transformers"]) as pool:
        for function, name in names.items():
            found = pool.run(f"benchmarks.pretrained:{function}", (given.size, folder), timeout=1200)
            for rank, (load, _, weights, same) in enumerate(found):  # type: ignore[misc]
                assert same, f"rank {rank} has other weights than the files"
                lines.append(
                    f"{name:34} {rank:>4} {load.peak / 2**20:9,.0f} {load.held / 2**20:9,.0f} {weights / 2**20:11,.0f}"
                    f" {load.wall:7.1f} {load.cpu:6.1f}"
                )
            losses[function] = found[0][1]  # type: ignore[index]
    lines += [
        "",
        f"loss {losses['streamed']:.6f}, of the sequential model {losses['whole']:.6f}; the weights are the files', bit by bit",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if given.save:
        write(RESULT, text)
    if not given.folder:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
