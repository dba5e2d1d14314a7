"""Work that test workers do first: done once, before they are forked, it costs each of them nothing.

Otherwise each worker would import these modules when first needed, and torch would fill its operator tables in the first
capture and the first step. Ranks capture equal models once, except in tests/capture.
"""

import sys
from pathlib import Path
from typing import Any

import torch._dynamo.precompile_context
import torch._export.non_strict_utils
import torch._inductor.fx_passes.dedupe_symint_uses
import torch._subclasses.schema_check_mode
import torch.distributed.checkpoint.state_dict
import torch.export._trace
import torch.fx.experimental.validator
from transformers import BertForMaskedLM, LlamaForCausalLM, T5ForConditionalGeneration, ViTForImageClassification

import autopar
from autopar.capture import Captured
from autopar.capture import capture as captured_anew
from autopar.planning import planner
from tests.support import models
from tests.support.captures import Captures

__all__ = ["BertForMaskedLM", "LlamaForCausalLM", "T5ForConditionalGeneration", "ViTForImageClassification"]

CAPTURES = Captures(Path(sys.argv[1]).parent)  # the folder of the pool, which removes it


def capture(*asked: Any) -> Captured:
    """`autopar.capture.capture`, or what a rank has captured of the same content."""
    return captured_anew(*asked) if "tests.capture" in sys.modules else CAPTURES.capture(*asked)


planner.capture = capture

if not torch.cuda.device_count():  # CUDA that is initialised before the fork serves no worker
    with torch.random.fork_rng(devices=()):
        model, sample = models.make("gpt2")
        parallel = autopar.parallelize(model, sample, (1,), device="h100")
        parallel(**sample)["loss"].backward()
        torch.optim.AdamW(parallel.parameters()).step()
