"""User functions whose gradients differ from what autograd derives from their forwards, as real code bases have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd import Function


class Rounded(Function):
    """Straight through: the gradient passes as if nothing were rounded."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Reversed(Function):
    """Gradients that turn around, of adversarial training of domains; a view of its operand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strength: float) -> torch.Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return -ctx.strength * gradient, None


class Clamped(Function):
    """Whose gradient is autograd's where it is small."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clamp(-0.01, 0.01)


class Normalised(Function):
    """Whose gradient has length 1 in every row: these must stay whole."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.norm(dim=-1, keepdim=True)


class Spike(Function):
    """A threshold with the slope of a sigmoid, of spiking networks, with a context of its own step."""

    @staticmethod
    def forward(x: torch.Tensor, steep: float) -> torch.Tensor:
        return (x > 0).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        x, ctx.steep = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        slope = torch.sigmoid(ctx.steep * ctx.saved_tensors[0])
        return gradient * ctx.steep * slope * (1 - slope), None


class Exponential(Function):
    """Whose gradient stays small where its result overflows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0].clamp(max=2).exp()


class Quantized(Function):
    """The nearest rows of a codebook, straight through to both, and which they are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, book: torch.Tensor) -> Any:
        places = (x.unsqueeze(-2) - book).square().sum(-1).argmin(-1)
        ctx.save_for_backward(places, book)
        ctx.mark_non_differentiable(places)
        return book[places], places

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> Any:
        places, book = ctx.saved_tensors
        into = torch.zeros_like(book)
        return gradient, into.index_add(0, places.flatten(), gradient.flatten(0, -2))


rounded, reversed_gradient = Rounded.apply, Reversed.apply  # as most code bases call them


class Model(nn.Module):
    """All of them between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.book = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](rounded(4 * self.layers[1](x)))
        y = self.layers[2](reversed_gradient(y, 0.5)) + reversed_gradient(y, 2.0)
        y = self.layers[3](Spike.apply(y, 4.0)) + Clamped.apply(y)
        y = Normalised.apply(self.layers[4](y) + Exponential.apply(-y))
        y, places = Quantized.apply(y, self.book)
        return self.layers[5](y).square().mean() + places.to(y.dtype).mean()  # type: ignore[no-any-return]
