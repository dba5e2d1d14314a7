"""Losses over classes that are split: distributed forms whose ranks put together what each finds (`runtime.forms`).

The cross-entropy of scores s, of which the classes should have the shares q (one for the target and none for the others, say):

    loss = sum q * log sum exp s - sum q s            its gradient        sum q * softmax s - q
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from autopar.runtime.collectives import largest, summed
from autopar.runtime.world import Axis

aten = torch.ops.aten
Tensor = torch.Tensor
NONE, MEAN = 0, 1  # the reductions of ATen's losses
IGNORED = -1  # a target that counts for nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shares:
    """The shares q of the classes that lie here: `rest` of each of them, and `own` in addition of that at `place`."""

    dim: int
    rest: Tensor | None
    place: Tensor | None = None
    own: Tensor | None = None

    def sums(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of q, and of q s."""
        shares = along = scores.new_zeros(())
        if self.place is not None and self.own is not None:
            shares, along = self.own, self.own * scores.gather(self.dim, self.place)
        if self.rest is not None:
            rest = self.rest.to(scores.dtype)
            shares = shares + rest.sum(self.dim, keepdim=True)
            along = along + (scores * rest).sum(self.dim, keepdim=True)
        return shares.expand_as(along), along

    def taken(self, found: Tensor, each: Tensor) -> Tensor:
        """What was found, less q times a number for each target."""
        if self.place is not None and self.own is not None:
            found = found.scatter_add_(self.dim, self.place, -(each * self.own).to(found.dtype))
        return found if self.rest is None else found - each * self.rest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """What a cross-entropy is told beside tensors."""

    axis: Axis
    dim: int  # of the classes
    reduction: int
    ignored: int
    smoothing: float

    def shares(self, scores: Tensor, target: Tensor, weight: Tensor | None) -> _Shares:
        """The shares for which targets ask, classes or probabilities."""
        count, wide = scores.shape[self.dim], torch.promote_types(scores.dtype, torch.float32)
        even = self.smoothing / (self.axis.size * count)
        each = torch.ones((), dtype=wide, device=scores.device) if weight is None else self.along(weight, scores)
        if target.is_floating_point():
            return _Shares(dim=self.dim, rest=(target * (1 - self.smoothing) + even) * each)
        place, elsewhere = within(target.unsqueeze(self.dim), self.axis.index * count, count)
        own = each.expand(place.shape) if weight is None else weight[place]
        own = (own.to(wide) * (1 - self.smoothing)).masked_fill(elsewhere, 0)
        rest = (each * even).expand_as(self.along(scores.new_empty(count), scores)) if even else None
        return _Shares(dim=self.dim, rest=rest, place=place, own=own)

    def along(self, classes: Tensor, scores: Tensor) -> Tensor:
        """A vector of classes, as it lies in the scores."""
        return classes.view([-1 if d == self.dim else 1 for d in range(scores.dim())])


class _Context(Protocol):
    said: _Said
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _Classes(torch.autograd.Function):
    """The probabilities are kept, the softmax of the chunk of classes that lies here; their logarithms if targets need them."""

    @staticmethod
    def forward(ctx: _Context, said: _Said, scores: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        ctx.said = said
        wide = torch.promote_types(scores.dtype, torch.float32)
        shifted = scores - largest(scores.amax(said.dim, keepdim=True).to(wide), said.axis)
        shares, along = said.shares(scores, target, weight).sums(shifted)
        logs = shifted.clone() if ctx.needs_input_grad[2] else None
        odds = shifted.exp_()
        found = [odds.sum(said.dim, keepdim=True), along]
        if chosen_alone(target, weight):
            total, along = summed(torch.stack(found), said.axis)
            shares, kept = torch.ones_like(total), None
        else:
            total, along, shares = summed(torch.stack([*found, shares]), said.axis)
            kept = shares
        losses = (total.log() * shares - along).squeeze(said.dim)
        ctx.save_for_backward(
            odds.div_(total).to(scores.dtype), target, weight, kept, logs if logs is None else logs.sub_(total.log())
        )
        if not target.is_floating_point():
            losses = losses.masked_fill_(target == said.ignored, 0)
        dtype = scores.dtype
        for given in (target, weight):
            dtype = torch.promote_types(dtype, given.dtype) if given is not None and given.is_floating_point() else dtype
        result: Tensor = losses if said.reduction == NONE else losses.sum()
        return result.to(dtype)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        odds, target, weight, kept, logs = ctx.saved_tensors
        said, hard = ctx.said, not target.is_floating_point()
        each = gradient.expand_as(target if hard else odds.select(said.dim, 0))
        each = (each.masked_fill(target == said.ignored, 0) if hard else each).unsqueeze(said.dim)
        shares = said.shares(odds, target, weight)
        of_scores = shares.taken(odds * (each if kept is None else each * kept), each).to(odds.dtype)
        of_target = None
        if logs is not None:  # of probabilities: what each counts for is linear in it
            counts = 1 if weight is None else said.along(weight, odds)
            of_target = (logs * (each * counts * (said.smoothing - 1))).to(target.dtype)
        return None, of_scores, of_target, None


def chosen_alone(target: Tensor, weight: Tensor | None) -> bool:
    """Whether the shares of every target add up to one: classes that weigh the same."""
    return weight is None and not target.is_floating_point()


def classes(
    axis: Axis, scores: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """`aten.cross_entropy_loss` of scores whose classes are split, like weights and probabilities, complete on every rank."""
    said = _Said(axis=axis, dim=min(1, scores.dim() - 1), reduction=reduction, ignored=ignore_index, smoothing=label_smoothing)
    return _Classes.apply(said, scores, target, weight)  # type: ignore[no-any-return, no-untyped-call]


def chosen(
    axis: Axis, scores: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN, ignore_index: int = -100
) -> Tensor:
    """`aten.nll_loss_nd` of log-probabilities whose classes are split: partial, as every target is found on one rank."""
    count = scores.shape[min(1, scores.dim() - 1)]
    place, elsewhere = within(target, axis.index * count, count)
    place.masked_fill_(elsewhere | (target == ignore_index), IGNORED)
    return aten.nll_loss_nd(scores, place, weight, reduction, IGNORED)  # type: ignore[no-any-return]


def within(indices: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """The indices counted from the start of a chunk, 0 for those outside it; and which these are."""
    place = indices - start
    elsewhere = (place < 0) | (place >= count)
    return place.masked_fill_(elsewhere, 0), elsewhere
