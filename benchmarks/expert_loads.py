"""How unevenly routers load experts: the spread that prices of expert parallelism take (`families.contraction.LOAD_SPREAD`).

    python benchmarks/expert_loads.py --steps 200

Small mixtures of experts are trained on the standard library's sources, byte by byte, with the loss that balances their routers
(coefficients as in the libraries' configs and ten times that) and without. The spread of a batch is the standard deviation of
the rows that an expert gets, as a share of their mean. Beside it: the rows of the fullest of 2, 4 and 8 ranks, each of which
has its share of the experts, as a multiple of the mean, and what `fullest` computes of that spread. Medians over layers and the
last batches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from rounds import count
from torch import nn
from training import machine

from autopar.operators.families.contraction import fullest

WIDTH, LENGTH, BATCH, LAST = 128, 128, 16, 20
RANKS = (2, 4, 8)
SIZES = {
    "vocab_size": 256, "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": LENGTH, "num_experts_per_tok": 2, "use_cache": False,
}  # fmt: skip


def mixtral(balance: float) -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **SIZES, intermediate_size=2 * WIDTH, num_local_experts=8, output_router_logits=True, router_aux_loss_coef=balance
        )
    )


def qwen3_moe(balance: float) -> nn.Module:
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **SIZES, moe_intermediate_size=WIDTH // 2, num_experts=32, head_dim=WIDTH // 4, output_router_logits=True,
            router_aux_loss_coef=balance,
        )
    )  # fmt: skip


MODELS: dict[str, Callable[[float], nn.Module]] = {"mixtral": mixtral, "qwen3_moe": qwen3_moe}


def text() -> torch.Tensor:
    """Bytes of the standard library's modules."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def loads(model: nn.Module, steps: int) -> list[torch.Tensor]:
    """The rows that every expert of a layer gets in a batch: layers and batches in turn, as the model is trained."""
    found: list[torch.Tensor] = []
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            experts = module.weight.shape[0]
            module.register_forward_hook(
                lambda _, __, out, n=experts: found.append(torch.bincount(out[2].flatten(), minlength=n))
            )
    optimizer, words = torch.optim.AdamW(model.parameters(), lr=1e-3), text()
    for _ in range(steps):
        starts = torch.randint(len(words) - LENGTH, (BATCH,)).tolist()
        batch = torch.stack([words[start : start + LENGTH] for start in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def spread(load: torch.Tensor) -> float:
    """The deviation of experts' rows, as a share of their mean."""
    return float(load.double().std() / load.double().mean())


def busiest(load: torch.Tensor, ranks: int) -> float:
    """The rows of the fullest rank, as a multiple of the mean."""
    rows = load.double().view(ranks, -1).sum(1)
    return float(rows.max() / rows.mean())


def row(found: list[torch.Tensor]) -> str:
    """A table's row."""
    deviation = statistics.median(spread(load) for load in found)
    cells = [f"{deviation:10.2f}"]
    for ranks in RANKS:
        measured = statistics.median(busiest(load, ranks) for load in found)
        cells.append(f"{measured:10.2f} ({fullest(len(found[0]), ranks, deviation):.2f})")
    return "".join(cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=count, default=200, help="of training; default: %(default)s")
    options = parser.parse_args()
    print(machine(), flush=True)
    print(f"{'':34}{'spread':>10}" + "".join(f"{f'of {ranks}':>17}" for ranks in RANKS))
    for name, make in MODELS.items():
        for balance in (0.0, 0.001, 0.01):
            torch.manual_seed(0)
            model = make(balance)
            found = loads(model, options.steps)
            experts, layers = len(found[0]), model.config.num_hidden_layers
            title = f"{name}, {experts} experts, balance {balance}"
            print(f"{title:34}" + row(found[-LAST * layers :]), flush=True)
            if not balance:
                print(f"{f'{name}, before the first step':34}" + row(found[:layers]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
