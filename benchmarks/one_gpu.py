"""One GPU: steps as they run beside their predictions, and beside the user's own module.

    python benchmarks/one_gpu.py --save                      all cases on this machine's GPU
    python benchmarks/one_gpu.py --case llama-1b --kernels   one of them, with seconds of its kernels by kind

A case is a model in a precision, planned for a mesh of one device, whose step is AdamW's (fused). Peaks are those of
`torch.cuda.max_memory_allocated`, each module alone; then the steps of both take turns. Every step ends with a synchronization,
so that a step that the host cannot issue fast enough shows what that takes.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

import torch
import transformers
from torch import nn

import autopar
from autopar import files

RESULTS = Path(__file__).with_name("results") / "one_gpu.txt"
WARM, ROUNDS = 4, 12
GIB = 2**30
LINE = "{:<26}{:>9}{:>11}{:>9}{:>11}{:>9}{:>11}{:>11}{:>9}{:>11}"
HEAD = LINE.format(
    "case", "predicted", "measured", "error", "own module", "ratio", "GiB, plan", "measured", "error", "reserved"
)
# Kinds of kernels by what their names contain; the first that fits.
KINDS = {
    "attention": "flash|fmha|attention|softmax_warp",
    "products": "gemm|cutlass|nvjet|xmma|cublas|splitK|gemv",
    "optimizer": "multi_tensor|adam",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model by its configuration and batch, and how it is planned."""

    name: str
    build: Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]
    precision: str = "bf16"
    recompute: str = "none"
    compiled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a case took: seconds and bytes."""

    case: str
    predicted: float
    measured: float
    own: float
    planned: int
    peak: int
    own_peak: int
    reserved: int
    first: tuple[float, float]  # losses of the first step, the plan's and the own module's
    kernels: dict[str, float] = field(default_factory=dict)
    groups: dict[str, float] = field(default_factory=dict)
    largest: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        def off(predicted: float, measured: float) -> str:
            return f"{predicted / measured - 1:+.1%}"

        return LINE.format(
            self.case, f"{1e3 * self.predicted:.2f}", f"{1e3 * self.measured:.2f}", off(self.predicted, self.measured),
            f"{1e3 * self.own:.2f}", f"{self.measured / self.own:.3f}", f"{self.planned / GIB:.2f}", f"{self.peak / GIB:.2f}",
            off(self.planned, self.peak), f"{self.reserved / self.peak:.2f}",
        )  # fmt: skip


def words(vocabulary: int, rows: int, length: int) -> dict[str, torch.Tensor]:
    """A batch for a language model."""
    tokens = torch.randint(2, vocabulary, (rows, length))
    return {"input_ids": tokens, "labels": tokens}


def gpt2(layers: int, width: int, heads: int, rows: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """GPT-2 over 1,024 tokens, without dropout."""
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model, words(config.vocab_size, rows, 1024)


def llama(rows: int, length: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Llama 3.2 1B."""
    config = transformers.LlamaConfig(
        num_hidden_layers=16, hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=length, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), words(config.vocab_size, rows, length)


def bert(rows: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """BERT large over 512 tokens, without dropout."""
    config = transformers.BertConfig(
        num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config), words(config.vocab_size, rows, 512)


def vit(rows: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """ViT large, 197 tokens."""
    config = transformers.ViTConfig(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096)
    batch = {"pixel_values": torch.randn(rows, 3, 224, 224), "labels": torch.randint(2, (rows,))}
    return transformers.ViTForImageClassification(config), batch


def t5(rows: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """T5 base, 512 tokens to 128, without dropout."""
    config = transformers.T5Config(
        d_model=768, d_ff=3072, num_layers=12, num_heads=12, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False
    )
    inputs, labels = (torch.randint(1, config.vocab_size, (rows, length)) for length in (512, 128))
    return transformers.T5ForConditionalGeneration(config), {"input_ids": inputs, "labels": labels}


def mlp(rows: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Wide linear layers, which products bound."""

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8192, 8192, bias=False) for _ in range(8))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            for layer in self.layers:
                x = nn.functional.relu(layer(x))
            return {"loss": nn.functional.mse_loss(x.float(), labels)}

    return Mlp(), {"x": torch.randn(rows, 8192), "labels": torch.randn(rows, 8192)}


CASES = {
    case.name: case
    for case in (
        Case(name="mlp", build=lambda: mlp(8192)),
        Case(name="gpt2", build=lambda: gpt2(12, 768, 12, 16)),
        Case(name="gpt2-medium", build=lambda: gpt2(24, 1024, 16, 8)),
        Case(name="gpt2, fp32", build=lambda: gpt2(12, 768, 12, 8), precision="fp32"),
        Case(name="gpt2, bf16-mixed", build=lambda: gpt2(12, 768, 12, 16), precision="bf16-mixed"),
        Case(name="bert-large", build=lambda: bert(16)),
        Case(name="vit-large", build=lambda: vit(64)),
        Case(name="t5-base", build=lambda: t5(32)),
        Case(name="llama-1b", build=lambda: llama(4, 2048)),
        Case(name="llama-1b, blocks", build=lambda: llama(4, 2048), recompute="blocks"),
        Case(name="llama-1b, selective", build=lambda: llama(4, 2048), recompute="selective"),
        Case(name="llama-1b, 8192 tokens", build=lambda: llama(1, 8192)),
        Case(name="gpt2, compiled", build=lambda: gpt2(12, 768, 12, 16), compiled=True),
        Case(name="llama-1b, compiled", build=lambda: llama(4, 2048), compiled=True),
        Case(name="vit-large, compiled", build=lambda: vit(64), compiled=True),
    )
}


class Training:
    """A module that trains: the plan's, or the user's own as they would run it."""

    def __init__(self, module: nn.Module, batch: dict[str, torch.Tensor], *, autocast: bool = False) -> None:
        self.module, self.batch, self.autocast = module, batch, autocast
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def __call__(self) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            loss: torch.Tensor = self.module(**self.batch)["loss"]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def seconds(self) -> float:
        """Seconds of a step, from an idle device to an idle one."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def warmed(self, before: int) -> tuple[float, int, int]:
        """The loss of the first step; then the peak beyond `before`, and what the allocator reserves."""
        first = float(self())
        for _ in range(WARM - 1):
            self()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self()
        torch.cuda.synchronize()
        return first, torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved() - before


@contextmanager
def alone() -> Iterator[None]:
    """One process at a time has the GPU; others build and plan."""
    with Path(tempfile.gettempdir(), "autopar_one_gpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(case: Case) -> Found:
    """Plan a case, then train by the plan and by the own module."""
    torch.manual_seed(0)
    model, batch = case.build()
    model.train()
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    model = model.to(dtype)
    batch = {key: x.to(dtype) if x.is_floating_point() and key != "labels" else x for key, x in batch.items()}
    precision = None if case.precision != "bf16-mixed" else case.precision
    plan = autopar.plan(model, batch, (1,), precision=precision, recompute=case.recompute, compiled=case.compiled)
    with alone():
        batch = {key: x.to("cuda") for key, x in batch.items()}
        parallel = Training(autopar.parallelize(model, batch, plan=plan), batch)
        own = Training(model.to("cuda"), batch, autocast=precision is not None)
        held = sum(parameter.nbytes for parameter in model.parameters()) + sum(buffer.nbytes for buffer in model.buffers())
        if case.compiled:
            parallel.module.compile()
            own.module.compile()
        first, peak, reserved = parallel.warmed(held)
        second, own_peak, _ = own.warmed(torch.cuda.memory_allocated() - sum(x.nbytes for x in batch.values()) - _held(own))
        rounds = [(parallel.seconds(), own.seconds()) for _ in range(ROUNDS)]
        kernels, largest = device_seconds(parallel)
    return Found(
        case=case.name, predicted=plan.step_time, measured=statistics.median(one for one, _ in rounds),
        own=statistics.median(one for _, one in rounds), planned=plan.peak_memory, peak=peak, own_peak=own_peak,
        reserved=reserved, first=(first, second), kernels=kernels, largest=largest,
        groups={group.name: group.seconds for group in plan.breakdown.simulated.kernels},
    )  # fmt: skip


def _held(training: Training) -> int:
    """Bytes of parameters, buffers and the optimizer's state."""
    state = (x for held in training.optimizer.state.values() for x in held.values())
    return sum(x.nbytes for x in (*training.module.parameters(), *training.module.buffers(), *state))


def device_seconds(training: Training) -> tuple[dict[str, float], tuple[tuple[str, float], ...]]:
    """Seconds of the device's kernels in a step by kind, and the longest by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(2):
            training()
        torch.cuda.synchronize()
    kinds, names = defaultdict[str, float](float), dict[str, float]()
    for event in found.key_averages():
        seconds = event.self_device_time_total / 2e6
        names[event.key] = seconds
        kinds[next((kind for kind, part in KINDS.items() if re.search(part, event.key, re.I)), "others")] += seconds
    longest = sorted(names.items(), key=lambda item: -item[1])[:25]
    return dict(kinds), tuple((name[:110], seconds) for name, seconds in longest)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="of these alone")
    parser.add_argument("--kernels", action="store_true", help="seconds of kernels by kind, and the longest of them")
    parser.add_argument("--json", metavar="FILE", help="write what was found, a line per case")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    lines = [
        f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, {date.today()}; milliseconds, medians of {ROUNDS}",
        HEAD,
    ]
    print("\n".join(lines), flush=True)
    for name in options.case or CASES:
        try:
            found = run(CASES[name])
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        lines.append(str(found))
        print(lines[-1], flush=True)
        if options.kernels:
            print(f"    losses {found.first}; own peak {found.own_peak / GIB:.2f} GiB")
            print("    measured ", {kind: f"{1e3 * s:.2f}" for kind, s in sorted(found.kernels.items())})
            print("    predicted", {kind: f"{1e3 * s:.2f}" for kind, s in sorted(found.groups.items())}, flush=True)
        if options.json:
            with Path(options.json).open("a") as file:
                file.write(json.dumps(asdict(found)) + "\n")
        gc.collect()
        torch.cuda.empty_cache()
    if options.save:
        files.write(RESULTS, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
