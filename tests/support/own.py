"""Custom operators, made with torch.library, for tests of how autopar handles them."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import register_flop_formula


@torch.library.custom_op("own::scaled_linear", mutates_args=())
def scaled_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, scale: float) -> torch.Tensor:
    return scale * (x @ weight.t()) + bias


@scaled_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, scale: float) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    x, weight, _, scale = inputs
    ctx.save_for_backward(x, weight)
    ctx.scale = scale  # type: ignore[attr-defined]


def _back(ctx: torch.autograd.function.FunctionCtx, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
    rows, scale = g.flatten(0, -2), ctx.scale  # type: ignore[attr-defined]
    return scale * (g @ weight), scale * (rows.t() @ x.flatten(0, -2)), rows.sum(0), None


scaled_linear.register_autograd(_back, setup_context=_keep)


@register_flop_formula(torch.ops.own.scaled_linear)
def _operations(x: torch.Size, weight: torch.Size, *_: object, out_shape: torch.Size, **__: object) -> int:
    return 2 * out_shape.numel() * weight[1]


@torch.library.custom_op("own::gated", mutates_args=())
def gated(x: torch.Tensor) -> torch.Tensor:
    """One half of the last dim times the sigmoid of the other."""
    value, gate = x.chunk(2, -1)
    return value * gate.sigmoid()


@gated.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _gate_back(ctx: torch.autograd.function.FunctionCtx, g: torch.Tensor) -> torch.Tensor:
    value, gate = ctx.saved_tensors[0].chunk(2, -1)  # type: ignore[attr-defined]
    sigmoid = gate.sigmoid()
    return torch.cat([g * sigmoid, g * value * sigmoid * (1 - sigmoid)], -1)


gated.register_autograd(_gate_back, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@torch.library.custom_op("own::centred", mutates_args=())
def centred(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x - x.mean(dim, keepdim=True)


@centred.register_fake
def _(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("own::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("own::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op("own::filled", mutates_args={"x"})
def filled(x: torch.Tensor) -> None:
    x.fill_(1)


@torch.library.custom_op("own::add", mutates_args=())
def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Named like an operator of torch that does something else."""
    return x * y


@add.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Gated(nn.Module):
    """Two layers that are the user's operators."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = nn.Parameter(torch.randn(2 * width, 8)), nn.Parameter(torch.randn(2 * width))
        self.last = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = gated(scaled_linear(x, self.weight, self.bias, 0.5))
        return self.last(hidden).square().sum()  # type: ignore[no-any-return]
