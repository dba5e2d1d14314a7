"""The table of equal numbers in pipeline stages: models, sizes of the pipeline axis, schedules, strategies.

Models of two blocks are made deeper, so that there are regions for eight stages.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.capture import Captured
from autopar.parallelize import tensors_of
from autopar.plan.options import Options
from autopar.planning.pipeline_search import plan_pipeline
from autopar.planning.planner import connected_mesh, read_program
from autopar.runtime.workers import WorkerPool
from autopar.verify.reference import arguments
from autopar.verify.report import Report
from autopar.verify.verification import compare
from examples import zoo_models
from tests.support.models import make
from tests.support.threads import Threads

STOCK = ("gpt2", "llama", "bert", "opt", "t5", "vit")
MODELS = (*STOCK, "whisper", "unet", "mixtral", "deepseek", "mamba2")
BOTH = ("t5", "whisper")  # an encoder and a decoder, each with blocks
SCHEDULES = ("gpipe", "1f1b", "1f1b+1", "interleaved", "zb-h1", "zb-v")
RANKS = (2, 4)  # of the pipeline; as many stages, or twice as many where a rank has several
STRATEGIES = {"ddp": "dp", "megatron": "tp", "fsdp": "dp"}  # and the name of the other axis, which has two ranks
CHUNKED = ("interleaved", "zb-v")
MIXED = ("unet", "mixtral", "deepseek")  # whose batch norms, or sorted tokens, mix samples: one micro-batch
DEPTHS = ("n_layer", "num_layers", "num_decoder_layers", "num_hidden_layers", "encoder_layers", "decoder_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCase:
    """A plan in stages to verify."""

    model: str
    ranks: int
    schedule: str
    strategy: str

    def __str__(self) -> str:
        return f"{self.model} in {self.ranks} ranks by {self.schedule}, {self.strategy}"


def cases(model: str, ranks: int) -> Iterator[StageCase]:
    """The plans of a model on so many ranks of a pipeline."""
    for schedule in SCHEDULES[:3] if model in MIXED else SCHEDULES:
        for strategy in STRATEGIES:
            yield StageCase(model=model, ranks=ranks, schedule=schedule, strategy=strategy)


def verified(case: StageCase, pool: WorkerPool | Threads) -> Report:
    """The report of a case: outputs, loss, every gradient in float64, and what is communicated, against the plan."""
    model, sample, captured = _captured(case.model, case.ranks)
    count = case.ranks * (2 if case.schedule in CHUNKED else 1)
    runs = 1 if case.model in MIXED else 4
    options = Options(
        pipeline="pp", device="h100", schedule=case.schedule, stages=count, strategy=case.strategy, microbatches=runs
    )
    mesh = connected_mesh({"pp": case.ranks, STRATEGIES[case.strategy]: 2}, options)
    plan = plan_pipeline(captured.program, mesh, options)
    inputs = captured.signature.bind(*arguments(sample))
    rows, surplus, missing = compare(captured, tensors_of(model), inputs, plan, mesh, pool)
    return Report(plan=plan, rows=tuple(rows), surplus=surplus, missing=missing, notes=())


@functools.lru_cache(maxsize=1)
def _captured(name: str, ranks: int) -> tuple[nn.Module, dict[str, Any], Captured]:
    model, sample = make(name) if name in STOCK else zoo_models.make(name)
    deeper = model if name == "unet" else deepened(model, ranks if name in BOTH else 2 * ranks)
    return deeper, sample, read_program(deeper, sample)


def deepened(model: nn.Module, count: int) -> nn.Module:
    """The model with `count` blocks in each of its lists of them, new ones being copies of the last; itself without any."""
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(block) for block in module}) == 1:
            while len(module) < count:
                block = copy.deepcopy(module[-1])
                for part in block.modules():
                    if isinstance(getattr(part, "layer_idx", None), int):
                        part.layer_idx = len(module)  # type: ignore[assignment]
                module.append(block)
    for name in DEPTHS:
        config = getattr(model, "config", None)
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, count)
    return model
