"""What the workers of tests import when first needed: imported once, before they are forked, it costs each of them nothing."""

import numpy.ma
import torch._dynamo.precompile_context
import torch._export.non_strict_utils
import torch._export.passes.replace_autocast_with_hop_pass
import torch._export.passes.replace_set_grad_with_hop_pass
import torch._inductor.fx_passes.dedupe_symint_uses
import torch._subclasses.schema_check_mode
import torch.distributed.checkpoint.state_dict
import torch.export._trace
import torch.fx.experimental.validator
from transformers import (
    BertForMaskedLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    OPTForCausalLM,
    T5ForConditionalGeneration,
    ViTForImageClassification,
)

__all__ = [
    "BertForMaskedLM",
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "OPTForCausalLM",
    "T5ForConditionalGeneration",
    "ViTForImageClassification",
    "numpy",
    "torch",
]
