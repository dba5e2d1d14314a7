"""Rules of operators that look beyond their own place in a plane: the plane stays whole, batch and channels split."""

from __future__ import annotations

import math
import re

from autopar.ir.program import Argument
from autopar.operators.call import Call, Local
from autopar.operators.pattern_text import term
from autopar.operators.rule import OpSharding, Rule, op


def space(call: Call) -> str:
    """The dims over which a window moves, by the operator's name: 2d has two."""
    found = re.search(r"([123])d", call.op.target)
    return " ".join("_" * int(found[1])) if found else "_ _"


def plane(call: Call) -> OpSharding:
    """... y! x! -> ... y! x!; a window looks beyond its own place, so both stay whole"""
    words = f"... {space(call)}"
    return call.fit(f"{', '.join(words for _ in call.operands)} -> {', '.join(words for _ in call.op.results)}")


def sampled_plane(call: Call) -> OpSharding:
    """b c y! x!, b c s! -> b c y! x!, twice; s says where the windows of a channel begin"""
    batched = call.rank("self") == len(space(call).split()) + 2
    words, samples = ("b c", "b c _") if batched else ("c", "_ c _")
    return call.fit(f"{words} {space(call)}, {samples} -> {words} {space(call)}, {words} {space(call)}")


def pad(call: Call) -> OpSharding:
    """padded dims stay whole"""
    amounts, rank = call.numbers("pad") or call.numbers("padding"), call.rank("self")
    padded = {rank - 1 - i // 2 for i, amount in enumerate(amounts) if amount}
    words = term("_" if d in padded else f"d{d}" for d in range(rank))
    return call.fit(f"{words} -> {words}")


def pixel_shuffle(call: Call) -> OpSharding:
    """... (c r! s!) y x -> ... c (y r!) (x s!)"""
    factor = call.number("upscale_factor")
    return call.fit("... (c r! s!) y x -> ... c (y r!) (x s!)", sizes={"r": factor, "s": factor})


def pixel_unshuffle(call: Call) -> OpSharding:
    """... c (y r!) (x s!) -> ... (c r! s!) y x"""
    factor = call.number("downscale_factor")
    return call.fit("... c (y r!) (x s!) -> ... (c r! s!) y x", sizes={"r": factor, "s": factor})


def channel_shuffle(call: Call) -> OpSharding:
    """b (g c) ... -> b (c g) ..."""
    return call.fit("b (g c) ... -> b (c g) ...", sizes={"g": call.number("groups")})


def shuffled_groups(call: Call, local: Local) -> dict[str, Argument]:
    """The groups that one rank holds."""
    return {"groups": call.number("groups") // local.split("g")}


def windows(call: Call) -> OpSharding:
    """... c y! x! -> ... (c k!) l!; k stands for a window, l for its places"""
    return call.fit("... c _ _ -> ... (c k!) _", sizes={"k": math.prod(call.numbers("kernel_size"))})


def from_windows(call: Call) -> OpSharding:
    """... (c k!) l! -> ... c y! x!; windows that overlap are added up"""
    return call.fit("... (c k!) _ -> ... c _ _", sizes={"k": math.prod(call.numbers("kernel_size"))})


def sampled(call: Call) -> OpSharding:
    """b c v! u!, b y x 2! -> b c y x; every place of the grid looks anywhere"""
    deep = call.rank("input") == 5
    source, grid = ("_ _ _", "z y x") if deep else ("_ _", "y x")
    return call.fit(f"b c {source}, b {grid} _ -> b c {grid}")


def sampled_backward(call: Call) -> OpSharding:
    """b c y x, b c v! u!, b y x 2! -> b c v! u!, b y x 2!"""
    deep = call.rank("input") == 5
    source, grid = ("_ _ _", "z y x") if deep else ("_ _", "y x")
    return call.fit(f"b c {grid}, b c {source}, b {grid} _ -> b c {source}, b {grid} _")


def affine_grid(call: Call) -> OpSharding:
    """b m! n! -> b y! x! 2!; the places are counted whole"""
    return call.fit(f"b _ _ -> b {term('_' for _ in call.result[1:])}")


def affine_size(call: Call, local: Local) -> dict[str, Argument]:
    """The size for the rows that one rank holds."""
    return {"size": (local.results[0][0], *call.numbers("size")[1:])}


def input_size(call: Call, local: Local) -> dict[str, Argument]:
    """The shape of the local gradient."""
    return {"input_size": tuple(local.results[0])}


MAX_POOLS = """
    max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
"""
POOLS = """
    avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    _adaptive_avg_pool2d _adaptive_avg_pool3d max_unpool2d max_unpool3d
"""
POOLS_BACKWARD = """
    avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
    max_pool2d_with_indices_backward max_pool3d_with_indices_backward
    adaptive_max_pool2d_backward adaptive_max_pool3d_backward
"""
RESIZES = """
    upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa
"""
RESIZES_BACKWARD = "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d"
PADS = """
    pad constant_pad_nd
    reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
"""

TABLE: dict[str, Rule] = {
    **{f"aten.{name}.default": op(plane) for name in MAX_POOLS.split()},
    **{f"aten.{name}.default": op(plane, linear="self") for name in POOLS.split()},
    **{f"aten.{name}.default": op(plane, linear="grad_output") for name in POOLS_BACKWARD.split()},
    **{f"aten.{name}.{form}": op(plane, linear="self input") for name in RESIZES.split() for form in ("default", "vec")},
    **{f"aten.{name}_backward.default": op(plane, linear="grad_output", local=input_size) for name in RESIZES_BACKWARD.split()},
    **{f"aten.{name}.default": op(pad, linear="self value") for name in PADS.split()},
    "aten.fractional_max_pool2d.default": op(sampled_plane),
    "aten.fractional_max_pool3d.default": op(sampled_plane),
    "aten.pixel_shuffle.default": op(pixel_shuffle, linear="self"),
    "aten.pixel_unshuffle.default": op(pixel_unshuffle, linear="self"),
    "aten.channel_shuffle.default": op(channel_shuffle, linear="self", local=shuffled_groups),
    "aten.native_channel_shuffle.default": op(channel_shuffle, linear="self", local=shuffled_groups),
    "aten.im2col.default": op(windows, linear="self"),
    "aten.col2im.default": op(from_windows, linear="self"),
    **{f"aten.grid_sampler{form}.default": op(sampled, linear="input") for form in ("", "_2d", "_3d")},
    "aten.grid_sampler_2d_backward.default": op(sampled_backward, linear="grad_output"),
    "aten.grid_sampler_3d_backward.default": op(sampled_backward, linear="grad_output"),
    "aten.affine_grid_generator.default": op(affine_grid, linear="theta", local=affine_size),
}
