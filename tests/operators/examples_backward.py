"""Examples of backward operators."""

from __future__ import annotations

import torch

from tests.operators.drawing import Example, bools, buffer, ex, ints, places, pos, t

PAIR = (t(4, 6), t(4, 6))
ONCE = (buffer(4, 6), buffer(4, 6))  # without a second derivative
ALL = (True, True, True)
LINE, PLANE, SPACE = t(2, 4, 6), t(2, 4, 6, 8), t(2, 4, 6, 4, 8)
VOCABULARY = 7
ELEMENTWISE: dict[str, tuple[object, ...]] = {
    "gelu": PAIR,
    "silu": ONCE,
    "sigmoid": PAIR,
    "tanh": PAIR,
    "threshold": (*PAIR, 0.1),
    "elu": (t(4, 6), 1.5, 1.0, 1.0, False, t(4, 6)),
    "leaky_relu": (*PAIR, 0.3, False),
    "hardtanh": (*PAIR, -0.5, 0.5),
    "hardswish": PAIR,
    "hardsigmoid": ONCE,
    "mish": ONCE,
    "softplus": (*PAIR, 1.0, 20.0),
    "hardshrink": (*PAIR, 0.5),
    "softshrink": (*PAIR, 0.5),
    "logit": ONCE,
    "native_dropout": (t(4, 6), bools(4, 6), 2.0),
}


def losses(*more: object) -> list[Example]:
    """The gradient of no reduction, mean and sum."""
    return [ex(t(4, 6) if n == 0 else t(), t(4, 6), buffer(4, 6), *more[:1], n, *more[1:]) for n in range(3)]


def convolutions() -> list[Example]:
    """One group and several, in both directions."""
    one, zero = (1, 1), (0, 0)
    return [
        ex(t(2, 4, 3, 5), t(2, 6, 5, 7), t(4, 6, 3, 3), (4,), one, zero, one, False, zero, 1, ALL),
        ex(t(2, 20, 3, 5), t(2, 12, 5, 7), t(20, 3, 3, 3), (20,), one, zero, one, False, zero, 4, ALL),
        ex(t(2, 4, 7, 9), t(2, 6, 5, 7), t(6, 4, 3, 3), (4,), one, zero, one, True, zero, 1, ALL),
        ex(t(2, 20, 7, 9), t(2, 12, 5, 7), t(12, 5, 3, 3), (20,), one, zero, one, True, zero, 4, ALL),
        ex(t(2, 4, 3), t(2, 6, 5), t(4, 6, 3), (4,), (1,), (0,), (1,), False, (0,), 1, ALL),
    ]


TABLE: dict[str, list[Example]] = {
    **{f"aten.{name}_backward.default": [ex(*arguments)] for name, arguments in ELEMENTWISE.items()},
    "aten.mse_loss_backward.default": losses(),
    "aten.smooth_l1_loss_backward.default": [ex(*e.args, 1.0) for e in losses()],
    "aten.huber_loss_backward.default": [ex(*e.args, 1.0) for e in losses()],
    "aten.binary_cross_entropy_backward.default": [
        ex(t(4, 6) if n == 0 else t(), pos(4, 6), buffer(4, 6), buffer(4, 6), n) for n in range(3)
    ],
    "aten.glu_backward.default": [ex(t(4, 3), t(4, 6), 1)],
    "aten._softmax_backward_data.default": [ex(t(4, 6, 10), t(4, 6, 10), 1, torch.float64)],
    "aten._log_softmax_backward_data.default": [ex(t(4, 6, 10), t(4, 6, 10), 1, torch.float64)],
    "aten.convolution_backward.default": convolutions(),
    "aten.native_layer_norm_backward.default": [
        ex(t(4, 10, 6), t(4, 10, 6), (6,), buffer(4, 10, 1), buffer(4, 10, 1), t(6), t(6), ALL),
        ex(t(4, 10, 6), t(4, 10, 6), (10, 6), buffer(4, 1, 1), buffer(4, 1, 1), t(10, 6), t(10, 6), ALL),
    ],
    "aten.native_group_norm_backward.default": [
        ex(buffer(2, 12, 5), buffer(2, 12, 5), buffer(2, 4), buffer(2, 4), buffer(12), 2, 12, 5, 4, ALL),
        ex(buffer(2, 12, 3, 5), buffer(2, 12, 3, 5), buffer(2, 4), buffer(2, 4), buffer(12), 2, 12, 15, 4, ALL),
    ],
    "aten.native_batch_norm_backward.default": [
        ex(t(4, 6, 10), t(4, 6, 10), t(6), buffer(6), buffer(6), buffer(6), buffer(6), True, 1e-5, ALL),
        ex(t(4, 6, 10), t(4, 6, 10), t(6), buffer(6), buffer(6), buffer(0), buffer(0), False, 1e-5, ALL),
    ],
    # planes
    "aten.avg_pool2d_backward.default": [ex(t(2, 4, 3, 4), PLANE, (2, 2), (2, 2), (0, 0), False, True, None)],
    "aten.avg_pool3d_backward.default": [ex(t(2, 4, 3, 2, 4), SPACE, (2, 2, 2), (2, 2, 2), (0, 0, 0), False, True, None)],
    "aten._adaptive_avg_pool2d_backward.default": [ex(t(2, 4, 3, 4), PLANE)],
    "aten._adaptive_avg_pool3d_backward.default": [ex(t(2, 4, 3, 2, 4), SPACE)],
    "aten.max_pool2d_with_indices_backward.default": [
        ex(t(2, 4, 3, 4), PLANE, (2, 2), (2, 2), (0, 0), (1, 1), False, places(2, 4, 3, 4, high=48, dims=2))
    ],
    "aten.max_pool3d_with_indices_backward.default": [
        ex(
            t(2, 4, 3, 2, 4),
            SPACE,
            (2, 2, 2),
            (2, 2, 2),
            (0, 0, 0),
            (1, 1, 1),
            False,
            places(2, 4, 3, 2, 4, high=192, dims=3),
        )
    ],
    "aten.adaptive_max_pool2d_backward.default": [ex(t(2, 4, 3, 4), PLANE, places(2, 4, 3, 4, high=48, dims=2))],
    "aten.adaptive_max_pool3d_backward.default": [ex(t(2, 4, 3, 2, 4), SPACE, places(2, 4, 3, 2, 4, high=192, dims=3))],
    "aten.upsample_nearest1d_backward.default": [ex(t(2, 4, 12), (12,), (2, 4, 6))],
    "aten.upsample_nearest2d_backward.default": [ex(t(2, 4, 12, 8), (12, 8), (2, 4, 6, 4))],
    "aten.upsample_nearest3d_backward.default": [ex(t(2, 4, 12, 8, 6), (12, 8, 6), (2, 4, 6, 4, 3))],
    "aten.upsample_linear1d_backward.default": [ex(t(2, 4, 12), (12,), (2, 4, 6), False)],
    "aten.upsample_bilinear2d_backward.default": [ex(t(2, 4, 12, 8), (12, 8), (2, 4, 6, 4), True)],
    "aten.grid_sampler_2d_backward.default": [ex(t(2, 4, 3, 10), PLANE, t(2, 3, 10, 2), 0, 0, False, (True, True))],
    "aten.grid_sampler_3d_backward.default": [ex(t(2, 4, 3, 10, 5), SPACE, t(2, 3, 10, 5, 3), 0, 0, False, (True, True))],
    # look-ups
    "aten.embedding_dense_backward.default": [
        ex(t(4, 10, 6), ints(4, 10, high=VOCABULARY), VOCABULARY, -1, False),
        ex(t(4, 10, 6), ints(4, 10, high=VOCABULARY), VOCABULARY, 2, False),
        ex(t(4, 10, 6), ints(4, 10, high=VOCABULARY), VOCABULARY, -1, True),
    ],
    "aten.select_backward.default": [ex(t(4, 6), (4, 10, 6), 1, 3)],
    "aten.slice_backward.default": [ex(t(4, 3, 6), (4, 10, 6), 1, 0, 9, 3)],
}
