"""Examples of operators over planes: pools, resizes, paddings, windows, grids."""

from __future__ import annotations

from tests.operators.drawing import Example, buffer, ex, places, t

LINE, PLANE, SPACE = t(2, 4, 6), t(2, 4, 6, 8), t(2, 4, 6, 4, 8)


def resizes(name: str, whole: object, size: tuple[int, ...], *corners: bool) -> dict[str, list[Example]]:
    """Both spellings of a resize, the second by a factor as well."""
    factors = tuple(2.0 for _ in size)
    return {
        f"aten.{name}.default": [ex(whole, size, *corners)],
        f"aten.{name}.vec": [ex(whole, size, *corners, None), ex(whole, None, *corners, factors)],
    }


TABLE: dict[str, list[Example]] = {
    "aten.pad.default": [ex(t(4, 6), (0, 1)), ex(t(4, 6), (1, 0), "constant", 2.5), ex(t(4, 6, 10), (0, 0, 2, 1))],
    "aten.constant_pad_nd.default": [ex(t(4, 6), (0, 1)), ex(t(4, 6), (1, 0, 0, 2), 2.5)],
    "aten.reflection_pad1d.default": [ex(t(4, 6), (1, 2))],
    "aten.reflection_pad2d.default": [ex(t(2, 4, 6), (1, 2, 0, 0)), ex(PLANE, (1, 2, 3, 1))],
    "aten.reflection_pad3d.default": [ex(SPACE, (1, 2, 0, 0, 3, 1))],
    "aten.replication_pad1d.default": [ex(t(4, 6), (1, 2))],
    "aten.replication_pad2d.default": [ex(t(2, 4, 6), (1, 2, 0, 0)), ex(PLANE, (1, 2, 3, 1))],
    "aten.replication_pad3d.default": [ex(SPACE, (1, 2, 0, 0, 3, 1))],
    # pools
    "aten.max_pool1d.default": [ex(LINE, (2,))],
    "aten.max_pool2d.default": [ex(PLANE, (2, 2)), ex(t(4, 6, 8), (2, 2))],
    "aten.max_pool3d.default": [ex(SPACE, (2, 2, 2))],
    "aten.max_pool1d_with_indices.default": [ex(LINE, (2,))],
    "aten.max_pool2d_with_indices.default": [ex(PLANE, (2, 2)), ex(PLANE, (3, 3), (2, 2), (1, 1))],
    "aten.max_pool3d_with_indices.default": [ex(SPACE, (2, 2, 2))],
    "aten.adaptive_max_pool1d.default": [ex(LINE, (3,))],
    "aten.adaptive_max_pool2d.default": [ex(PLANE, (2, 4))],
    "aten.adaptive_max_pool3d.default": [ex(SPACE, (2, 4, 2))],
    "aten.avg_pool1d.default": [ex(LINE, (2,))],
    "aten.avg_pool2d.default": [ex(PLANE, (2, 2))],
    "aten.avg_pool3d.default": [ex(SPACE, (2, 2, 2))],
    "aten.adaptive_avg_pool1d.default": [ex(LINE, (1,))],
    "aten.adaptive_avg_pool2d.default": [ex(PLANE, (1, 1)), ex(t(4, 6, 8), (3, 4))],
    "aten.adaptive_avg_pool3d.default": [ex(SPACE, (1, 2, 2))],
    "aten._adaptive_avg_pool2d.default": [ex(PLANE, (3, 4))],
    "aten._adaptive_avg_pool3d.default": [ex(SPACE, (3, 2, 2))],
    "aten.fractional_max_pool2d.default": [
        ex(PLANE, (2, 2), (4, 5), buffer(2, 4, 2)),
        ex(t(4, 6, 8), (2, 2), (4, 5), buffer(1, 4, 2)),
    ],
    "aten.fractional_max_pool3d.default": [ex(SPACE, (2, 2, 2), (4, 2, 5), buffer(2, 4, 3))],
    "aten.max_unpool2d.default": [ex(t(2, 4, 3, 5), places(2, 4, 3, 5, high=60, dims=2), (6, 10))],
    "aten.max_unpool3d.default": [
        ex(t(2, 4, 3, 2, 5), places(2, 4, 3, 2, 5, high=240, dims=3), (6, 4, 10), (2, 2, 2), (0, 0, 0))
    ],
    # resizes
    **resizes("upsample_nearest1d", LINE, (12,)),
    **resizes("upsample_nearest2d", PLANE, (12, 8)),
    **resizes("upsample_nearest3d", SPACE, (12, 8, 8)),
    **resizes("_upsample_nearest_exact1d", LINE, (12,)),
    **resizes("_upsample_nearest_exact2d", PLANE, (12, 8)),
    **resizes("_upsample_nearest_exact3d", SPACE, (12, 8, 8)),
    **resizes("upsample_linear1d", LINE, (12,), False),
    **resizes("upsample_bilinear2d", PLANE, (12, 8), True),
    **resizes("upsample_trilinear3d", SPACE, (12, 8, 8), False),
    **resizes("upsample_bicubic2d", PLANE, (12, 8), False),
    **resizes("_upsample_bilinear2d_aa", PLANE, (3, 8), False),
    **resizes("_upsample_bicubic2d_aa", PLANE, (3, 8), False),
    # shuffles, windows, grids
    "aten.pixel_shuffle.default": [ex(t(2, 16, 4, 6), 2)],
    "aten.pixel_unshuffle.default": [ex(t(2, 4, 12, 20), 2), ex(t(6, 4, 8), 2)],
    "aten.channel_shuffle.default": [ex(t(2, 12, 5), 6), ex(t(2, 24, 3, 5), 4)],
    "aten.native_channel_shuffle.default": [ex(buffer(2, 12, 3, 5), 6)],
    "aten.im2col.default": [ex(PLANE, (2, 3), (1, 1), (0, 1), (2, 1)), ex(t(4, 6, 8), (2, 3), (1, 1), (0, 0), (1, 1))],
    "aten.col2im.default": [ex(t(2, 24, 35), (6, 9), (2, 3), (1, 1), (0, 0), (1, 1))],
    "aten.grid_sampler.default": [ex(PLANE, t(2, 3, 10, 2), 0, 0, False), ex(SPACE, t(2, 3, 10, 5, 3), 0, 1, True)],
    "aten.grid_sampler_2d.default": [ex(PLANE, t(2, 3, 10, 2), 0, 0, False), ex(PLANE, t(2, 3, 10, 2), 2, 1, True)],
    "aten.grid_sampler_3d.default": [ex(SPACE, t(2, 3, 10, 5, 3), 0, 0, False)],
    "aten.affine_grid_generator.default": [ex(t(4, 2, 3), (4, 6, 3, 5), False), ex(t(4, 3, 4), (4, 6, 3, 5, 7), True)],
}
