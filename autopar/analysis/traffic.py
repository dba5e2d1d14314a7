"""Counts the bytes that kernels read and write from the operators that torch dispatches, on meta tensors.

Views and bare allocations move nothing. An element is read once, however often a broadcast repeats it. A pointwise kernel whose
operands are broadcast, or have other strides than its result, computes an address for every element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.ir.device import Bytes

# Name prefixes of operators that move nothing, and of operators that use only the shape of a tensor.
NOTHING = ("aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::detach", "aten::lift")
LIKE = ("aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::new_zeros", "aten::new_ones", "aten::new_full")
SHAPE_OF_FIRST = ("aten::nll_loss_backward", "aten::nll_loss2d_backward", "aten::max_pool2d_with_indices_backward")


class Traffic(TorchDispatchMode):
    """Counts kernels, and the bytes of each tensor that they move, as pairs of bytes and elements.

    For kernels that compute addresses, `strided` has the bytes once more, and `computed` the number of elements.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved: list[tuple[Bytes, int]] = []
        self.strided: list[tuple[Bytes, int]] = []
        self.computed: list[int] = []
        self.kernels = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        found = func(*args, **(kwargs or {}))
        name = func._schema.name
        views = any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
        if not views and not name.startswith(NOTHING):
            read = args[1:] if name.startswith(SHAPE_OF_FIRST) else args[: 0 if name.startswith(LIKE) else None]
            given = {id(leaf): leaf for leaf in _tensors((*read, *(kwargs or {}).values()))}
            moved = [(_bytes(leaf), leaf.numel()) for leaf in (*given.values(), *_tensors(found))]
            self.moved += moved
            self.kernels += 1
            if torch.Tag.pointwise in func.tags and isinstance(found, torch.Tensor) and _apart(given.values(), found):
                self.strided += moved
                self.computed.append(found.numel())
        return found


def _tensors(data: object) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(data) if isinstance(leaf, torch.Tensor))


def _apart(operands: Iterable[torch.Tensor], result: torch.Tensor) -> bool:
    """Whether an operand, other than a scalar, has another shape or other strides than the result."""
    return any(x.dim() and (x.shape != result.shape or x.stride() != result.stride()) for x in operands)


def _bytes(tensor: torch.Tensor) -> Bytes:
    """The bytes of a tensor's own elements."""
    own = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(own) * tensor.element_size()


__all__ = ["Traffic"]
