"""What autocast casts, so that the casts can be written into the program.

The lists are those of "Autocast Op Reference" in PyTorch's documentation of torch.amp, for operators as they are called (before
they are decomposed).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.ir.program import aten

LOWER = frozenset(
    "linear matmul mm bmm addmm addbmm baddbmm addmv mv addr chain_matmul multi_dot einsum prelu conv1d conv2d conv3d conv_tbc "
    "conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention __matmul__".split()
)
SINGLE = frozenset(
    "acos asin cosh cosine_embedding_loss cdist cosine_similarity cross_entropy_loss cumprod cumsum dist erfinv exp expm1 "
    "group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log10 log_softmax log1p log2 margin_ranking_loss mse_loss "
    "multi_margin_loss nll_loss nll_loss_nd nll_loss2d norm nuclear_norm poisson_nll_loss pow prod reciprocal renorm rsqrt "
    "sinh smooth_l1_loss huber_loss soft_margin_loss softmax softmin softplus sum tan binary_cross_entropy_with_logits".split()
)
WIDEST = frozenset("addcdiv addcmul atan2 bilinear cat cross dot grid_sample index_put scatter_add stack tensordot".split())


def dtype(statics: Sequence[object]) -> torch.dtype:
    """The dtype of a region `wrap_with_autocast(device type, dtype, enabled, ...)`."""
    device, given = statics[0], statics[1]
    return given if isinstance(given, torch.dtype) else torch.get_autocast_dtype(str(device))


def operand_dtype(target: str, operands: Sequence[torch.dtype], lower: torch.dtype) -> torch.dtype | None:
    """The dtype to which an op's floating operands are cast; None if autocast leaves them."""
    name = aten(target)
    if name in LOWER:
        return lower
    if name in SINGLE:
        return torch.float32
    if name in WIDEST:
        return torch.float32 if torch.float32 in operands else lower
    return None


def castable(given: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether autocast touches a tensor of this dtype: floating, not double, and not what it should be."""
    return given.is_floating_point and given not in (torch.float64, wanted)
