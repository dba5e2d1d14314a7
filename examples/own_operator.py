"""An operator of one's own: its sharding rule found by execution, registered, checked, and used in a parallel module.

    python examples/own_operator.py

`autopar.verify` starts processes that import this file, so what it does is guarded by `if __name__ == "__main__"`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import autopar


@torch.library.custom_op("example::scaled_linear", mutates_args=())
def scaled_linear(x: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    """What a kernel of one's own would compute."""
    return scale * (x @ weight.t())


@scaled_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    if x.shape[-1] != weight.shape[1]:
        raise ValueError("x and weight do not fit")
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, ctx.scale = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    scaled = ctx.scale * grad
    return scaled @ weight, scaled.flatten(0, -2).t() @ x.flatten(0, -2), None


scaled_linear.register_autograd(_backward, setup_context=_setup)

# Which dims belong together, and in which arguments it is linear: registered where the operator is defined.
autopar.register_rule("example::scaled_linear", "... k, n k -> ... n", linear="x, weight")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(64, 16) / 4)
        self.down = nn.Parameter(torch.randn(16, 64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(scaled_linear(x, self.up, 0.5))
        return scaled_linear(hidden, self.down, 2.0).square().mean()


def main() -> None:
    """Find the rule, check the registered one, and verify a model that uses the operator."""
    arguments = (torch.randn(4, 6), torch.randn(10, 6), 0.5)
    print(autopar.discover_rule("example::scaled_linear", arguments), end="\n\n")
    print(autopar.check_rule("example::scaled_linear", arguments), end="\n\n")
    report = autopar.verify(Model(), torch.randn(8, 16), mesh=(2,), strategy="megatron")
    print(f"equal numbers on two processes: {report.ok}")


if __name__ == "__main__":
    main()
