"""Rules of operators that look beyond their own place in a plane: the plane stays whole, batch and channels split."""

from __future__ import annotations

from autopar.ir.program import Argument
from autopar.operators.call import Call, Local
from autopar.operators.facts import Autocast
from autopar.operators.pattern_text import term
from autopar.operators.rule import OpSharding, Rule, op


def pad(call: Call) -> OpSharding:
    """Padded dims stay whole."""
    amounts, rank = call.numbers("pad") or call.numbers("padding"), call.rank("self")
    padded = {rank - 1 - i // 2 for i, amount in enumerate(amounts) if amount}
    words = term("_" if d in padded else f"d{d}" for d in range(rank))
    return call.fit(f"{words} -> {words}")


def shuffled_groups(call: Call, local: Local) -> dict[str, Argument]:
    """The groups that one rank holds."""
    return {"groups": call.number("groups") // local.split("g")}


def affine_size(call: Call, local: Local) -> dict[str, Argument]:
    """The size for the rows on one rank."""
    return {"size": (local.results[0][0], *call.numbers("size")[1:])}


def input_size(call: Call, local: Local) -> dict[str, Argument]:
    """The shape of the local gradient."""
    return {"input_size": tuple(local.results[0])}


TABLE: dict[str, Rule] = {
    # the largest of a window
    "aten.max_pool1d.default": op("... _ -> ... _"),
    "aten.max_pool2d.default": op("... _ _ -> ... _ _"),
    "aten.max_pool3d.default": op("... _ _ _ -> ... _ _ _"),
    "aten.max_pool1d_with_indices.default": op("... _ -> ... _, ... _"),
    "aten.max_pool2d_with_indices.default": op("... _ _ -> ... _ _, ... _ _"),
    "aten.max_pool3d_with_indices.default": op("... _ _ _ -> ... _ _ _, ... _ _ _"),
    "aten.adaptive_max_pool1d.default": op("... _ -> ... _, ... _"),
    "aten.adaptive_max_pool2d.default": op("... _ _ -> ... _ _, ... _ _"),
    "aten.adaptive_max_pool3d.default": op("... _ _ _ -> ... _ _ _, ... _ _ _"),
    "aten.fractional_max_pool2d.default": op("[b] c _ _, b c _ -> [b] c _ _, [b] c _ _"),
    "aten.fractional_max_pool3d.default": op("[b] c _ _ _, b c _ -> [b] c _ _ _, [b] c _ _ _"),
    # the mean of a window, and a window's place
    "aten.avg_pool1d.default": op("... _ -> ... _", linear="self"),
    "aten.avg_pool2d.default": op("... _ _ -> ... _ _", linear="self"),
    "aten.avg_pool3d.default": op("... _ _ _ -> ... _ _ _", linear="self"),
    "aten.adaptive_avg_pool1d.default": op("... _ -> ... _", linear="self"),
    "aten.adaptive_avg_pool2d.default": op("... _ _ -> ... _ _", linear="self"),
    "aten.adaptive_avg_pool3d.default": op("... _ _ _ -> ... _ _ _", linear="self"),
    "aten._adaptive_avg_pool2d.default": op("... _ _ -> ... _ _", linear="self"),
    "aten._adaptive_avg_pool3d.default": op("... _ _ _ -> ... _ _ _", linear="self"),
    "aten.max_unpool2d.default": op("... _ _, ... _ _ -> ... _ _", linear="self"),
    "aten.max_unpool3d.default": op("... _ _ _, ... _ _ _ -> ... _ _ _", linear="self"),
    # their gradients
    "aten.avg_pool2d_backward.default": op("... _ _, ... _ _ -> ... _ _", linear="grad_output"),
    "aten.avg_pool3d_backward.default": op("... _ _ _, ... _ _ _ -> ... _ _ _", linear="grad_output"),
    "aten._adaptive_avg_pool2d_backward.default": op("... _ _, ... _ _ -> ... _ _", linear="grad_output"),
    "aten._adaptive_avg_pool3d_backward.default": op("... _ _ _, ... _ _ _ -> ... _ _ _", linear="grad_output"),
    "aten.max_pool2d_with_indices_backward.default": op("... _ _, ... _ _, ... _ _ -> ... _ _", linear="grad_output"),
    "aten.max_pool3d_with_indices_backward.default": op("... _ _ _, ... _ _ _, ... _ _ _ -> ... _ _ _", linear="grad_output"),
    "aten.adaptive_max_pool2d_backward.default": op("... _ _, ... _ _, ... _ _ -> ... _ _", linear="grad_output"),
    "aten.adaptive_max_pool3d_backward.default": op("... _ _ _, ... _ _ _, ... _ _ _ -> ... _ _ _", linear="grad_output"),
    # planes of another size
    "aten.upsample_nearest1d.default": op("... _ -> ... _", linear="self", autocast=Autocast.FP32),
    "aten.upsample_nearest1d.vec": op("... _ -> ... _", linear="input"),
    "aten.upsample_nearest2d.default": op("... _ _ -> ... _ _", linear="self", autocast=Autocast.FP32),
    "aten.upsample_nearest2d.vec": op("... _ _ -> ... _ _", linear="input"),
    "aten.upsample_nearest3d.default": op("... _ _ _ -> ... _ _ _", linear="self", autocast=Autocast.FP32),
    "aten.upsample_nearest3d.vec": op("... _ _ _ -> ... _ _ _", linear="input"),
    "aten._upsample_nearest_exact1d.default": op("... _ -> ... _", linear="self", autocast=Autocast.FP32),
    "aten._upsample_nearest_exact1d.vec": op("... _ -> ... _", linear="input"),
    "aten._upsample_nearest_exact2d.default": op("... _ _ -> ... _ _", linear="self", autocast=Autocast.FP32),
    "aten._upsample_nearest_exact2d.vec": op("... _ _ -> ... _ _", linear="input"),
    "aten._upsample_nearest_exact3d.default": op("... _ _ _ -> ... _ _ _", linear="self", autocast=Autocast.FP32),
    "aten._upsample_nearest_exact3d.vec": op("... _ _ _ -> ... _ _ _", linear="input"),
    "aten.upsample_linear1d.default": op("... _ -> ... _", linear="self", autocast=Autocast.FP32),
    "aten.upsample_linear1d.vec": op("... _ -> ... _", linear="input"),
    "aten.upsample_bilinear2d.default": op("... _ _ -> ... _ _", linear="self", autocast=Autocast.FP32),
    "aten.upsample_bilinear2d.vec": op("... _ _ -> ... _ _", linear="input"),
    "aten.upsample_trilinear3d.default": op("... _ _ _ -> ... _ _ _", linear="self", autocast=Autocast.FP32),
    "aten.upsample_trilinear3d.vec": op("... _ _ _ -> ... _ _ _", linear="input"),
    "aten.upsample_bicubic2d.default": op("... _ _ -> ... _ _", linear="self", autocast=Autocast.FP32),
    "aten.upsample_bicubic2d.vec": op("... _ _ -> ... _ _", linear="input"),
    "aten._upsample_bilinear2d_aa.default": op("... _ _ -> ... _ _", linear="self", autocast=Autocast.FP32),
    "aten._upsample_bilinear2d_aa.vec": op("... _ _ -> ... _ _", linear="input"),
    "aten._upsample_bicubic2d_aa.default": op("... _ _ -> ... _ _", linear="self", autocast=Autocast.FP32),
    "aten._upsample_bicubic2d_aa.vec": op("... _ _ -> ... _ _", linear="input"),
    # their gradients
    "aten.upsample_nearest1d_backward.default": op("... _ -> ... _", linear="grad_output", local=input_size),
    "aten.upsample_nearest2d_backward.default": op("... _ _ -> ... _ _", linear="grad_output", local=input_size),
    "aten.upsample_nearest3d_backward.default": op("... _ _ _ -> ... _ _ _", linear="grad_output", local=input_size),
    "aten.upsample_linear1d_backward.default": op("... _ -> ... _", linear="grad_output", local=input_size),
    "aten.upsample_bilinear2d_backward.default": op("... _ _ -> ... _ _", linear="grad_output", local=input_size),
    # padding
    "aten.pad.default": op(pad, linear="self value"),
    "aten.constant_pad_nd.default": op(pad, linear="self value"),
    "aten.reflection_pad1d.default": op(pad, linear="self"),
    "aten.reflection_pad2d.default": op(pad, linear="self"),
    "aten.reflection_pad3d.default": op(pad, linear="self"),
    "aten.replication_pad1d.default": op(pad, linear="self"),
    "aten.replication_pad2d.default": op(pad, linear="self"),
    "aten.replication_pad3d.default": op(pad, linear="self"),
    # channels and places exchanged; windows side by side
    "aten.pixel_shuffle.default": op("... (c r=upscale_factor! s=upscale_factor!) y x -> ... c (y r!) (x s!)", linear="self"),
    "aten.pixel_unshuffle.default": op(
        "... c (y r=downscale_factor!) (x s=downscale_factor!) -> ... (c r! s!) y x", linear="self"
    ),
    "aten.channel_shuffle.default": op("b (g=groups c) ... -> b (c g) ...", linear="self", local=shuffled_groups),
    "aten.native_channel_shuffle.default": op("b (g=groups c) ... -> b (c g) ...", linear="self", local=shuffled_groups),
    "aten.im2col.default": op("... c _ _ -> ... (c k=kernel_size!) _", linear="self"),
    "aten.col2im.default": op("... (c k=kernel_size!) _ -> ... c _ _", linear="self"),
    # places of a grid, which look anywhere
    "aten.grid_sampler.default": op("b c _..., b [z] y x _ -> b c [z] y x", linear="input", autocast=Autocast.WIDEST),
    "aten.grid_sampler_2d.default": op("b c _ _, b y x _ -> b c y x", linear="input"),
    "aten.grid_sampler_3d.default": op("b c _ _ _, b z y x _ -> b c z y x", linear="input"),
    "aten.grid_sampler_2d_backward.default": op("b c y x, b c _ _, b y x _ -> b c _ _, b y x _", linear="grad_output"),
    "aten.grid_sampler_3d_backward.default": op(
        "b c z y x, b c _ _ _, b z y x _ -> b c _ _ _, b z y x _", linear="grad_output"
    ),
    "aten.affine_grid_generator.default": op("b _ _ -> b _...", linear="theta", local=affine_size),
}
