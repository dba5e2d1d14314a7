"""Losses over a class dim that is split: each rank computes with its chunk of the classes (`autopar.runtime.parallel_ops`).

The cross-entropy of logits s with target probabilities q (one for the target class and zero for the others, say):

    loss = sum q * log sum exp s - sum q s            d loss / d s = sum q * softmax s - q

Only the sums over classes are all-reduced: three numbers per target at most. The logits are never gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from autopar.runtime.collectives import all_reduce_max, all_reduce_sum, identity__all_reduce
from autopar.runtime.second_derivatives import refuse_twice
from autopar.runtime.world import Axis

aten = torch.ops.aten
NONE, MEAN = 0, 1  # the `reduction` argument of ATen's losses
IGNORED = -(1 << 62)  # an `ignore_index` that is never relative to a chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class _TargetProbabilities:
    """The target probabilities q of this rank's classes: `dense` ones, plus `peak` at class `index` of each target.

    Targets that lie `outside` of this rank's classes have peak 0 at an index that means nothing.
    """

    dim: int
    dense: torch.Tensor | None
    index: torch.Tensor | None = None
    peak: torch.Tensor | None = None
    outside: torch.Tensor | None = None

    def sums(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums of q and of q s over this rank's classes, where s may be minus infinity: 0 times it would be NaN."""
        total = weighted = scores.new_zeros(())
        if self.index is not None and self.peak is not None and self.outside is not None:
            total = self.peak
            weighted = self.peak * scores.gather(self.dim, self.index).masked_fill_(self.outside, 0)
        if self.dense is not None:
            dense = self.dense.to(scores.dtype)
            total = total + dense.sum(self.dim, keepdim=True)
            weighted = weighted + (scores * dense).sum(self.dim, keepdim=True)
        return total.expand_as(weighted), weighted

    def subtract_from(self, gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """`gradient - factor * q`, with one factor for each target."""
        if self.index is not None and self.peak is not None:
            gradient = gradient.scatter_add_(self.dim, self.index, -(factor * self.peak).to(gradient.dtype))
        return gradient if self.dense is None else gradient - factor * self.dense


@dataclass(frozen=True, slots=True, kw_only=True)
class _LossArguments:
    """The arguments of a cross-entropy that are not tensors."""

    axis: Axis
    dim: int  # of the classes
    reduction: int
    ignore_index: int
    smoothing: float

    def probabilities(self, scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None) -> _TargetProbabilities:
        """The target probabilities of this rank's classes, from class indices or from probabilities."""
        count, wide = scores.shape[self.dim], torch.promote_types(scores.dtype, torch.float32)
        uniform = self.smoothing / (self.axis.size * count)
        each = torch.ones((), dtype=wide, device=scores.device) if weight is None else self.broadcast(weight, scores)
        if target.is_floating_point():
            return _TargetProbabilities(dim=self.dim, dense=(target * (1 - self.smoothing) + uniform) * each)
        index, outside = local_indices(target.unsqueeze(self.dim), self.axis, count, self.ignore_index)
        peak = each.expand(index.shape) if weight is None else weight[index]
        peak = (peak.to(wide) * (1 - self.smoothing)).masked_fill(outside, 0)
        dense = (each * uniform).expand_as(self.broadcast(scores.new_empty(count), scores)) if uniform else None
        return _TargetProbabilities(dim=self.dim, dense=dense, index=index, peak=peak, outside=outside)

    def broadcast(self, per_class: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """A vector over classes, in a shape that broadcasts with the scores."""
        return per_class.view([-1 if d == self.dim else 1 for d in range(scores.dim())])


class _Context(Protocol):
    arguments: _LossArguments
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Saves the softmax over this rank's classes; the log-softmax too if targets are probabilities that need a gradient.

    The softmax is a second result: so saved it is a function of the scores, and gradients can be differentiated again.
    """

    @staticmethod
    def forward(
        ctx: _Context, arguments: _LossArguments, scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.arguments, dim, axis = arguments, arguments.dim, arguments.axis
        wide = torch.promote_types(scores.dtype, torch.float32)
        shifted = scores - all_reduce_max(scores.amax(dim, keepdim=True).to(wide), axis)
        mass, weighted = arguments.probabilities(scores, target, weight).sums(shifted)
        log_softmax = shifted.clone() if ctx.needs_input_grad[2] else None
        exponentials = shifted.exp_()
        sums = [exponentials.sum(dim, keepdim=True), weighted]
        if sums_to_one(target, weight):
            total, weighted = all_reduce_sum(torch.stack(sums), axis)
            mass, saved_mass = torch.ones_like(total), None
        else:
            total, weighted, mass = all_reduce_sum(torch.stack([*sums, mass]), axis)
            saved_mass = mass
        losses = (total.log() * mass - weighted).squeeze(dim)
        softmax = exponentials.div_(total).to(scores.dtype)
        log_softmax = log_softmax if log_softmax is None else log_softmax.sub_(total.log())
        ctx.save_for_backward(softmax, target, weight, saved_mass, log_softmax)
        if not target.is_floating_point():
            losses = losses.masked_fill_(target == arguments.ignore_index, 0)
        dtype = scores.dtype
        for given in (target, weight):
            dtype = torch.promote_types(dtype, given.dtype) if given is not None and given.is_floating_point() else dtype
        result: torch.Tensor = losses if arguments.reduction == NONE else losses.sum()
        return result.to(dtype), softmax

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor | None, second: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        softmax, target, weight, mass, log_softmax = ctx.saved_tensors
        arguments, hard = ctx.arguments, not target.is_floating_point()
        if log_softmax is not None:
            refuse_twice("a cross-entropy over split classes whose targets need a gradient")
        if second is not None:  # of a gradient: through the softmax
            inner = softmax * second
            through = inner - softmax * all_reduce_sum(inner.sum(arguments.dim, keepdim=True), arguments.axis)
            if gradient is None:
                return None, through, None, None
        assert gradient is not None
        gradient = identity__all_reduce(gradient, arguments.axis)
        each = gradient.expand_as(target if hard else softmax.select(arguments.dim, 0))
        each = (each.masked_fill(target == arguments.ignore_index, 0) if hard else each).unsqueeze(arguments.dim)
        probabilities = arguments.probabilities(softmax, target, weight)
        scores_gradient = probabilities.subtract_from(softmax * (each if mass is None else each * mass), each)
        target_gradient = None
        if log_softmax is not None:  # the loss is linear in target probabilities
            per_class = 1 if weight is None else arguments.broadcast(weight, softmax)
            target_gradient = (log_softmax * (each * per_class * (arguments.smoothing - 1))).to(target.dtype)
        scores_gradient = scores_gradient.to(softmax.dtype)
        return None, scores_gradient if second is None else scores_gradient + through, target_gradient, None


def sums_to_one(target: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Whether the target probabilities of every target are known to sum to one: class indices without class weights."""
    return weight is None and not target.is_floating_point()


def vocab_parallel_cross_entropy(
    axis: Axis, scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = MEAN,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """`aten.cross_entropy_loss` of logits whose classes are split, like class weights and target probabilities.

    The result is the same on every rank. A mean is a sum here: the program divides (`passes.mean_losses`).
    """
    dim = min(1, scores.dim() - 1)
    arguments = _LossArguments(axis=axis, dim=dim, reduction=reduction, ignore_index=ignore_index, smoothing=label_smoothing)
    loss: torch.Tensor
    loss, _ = _VocabParallelCrossEntropy.apply(arguments, scores, target, weight)  # type: ignore[no-untyped-call]
    return loss


def vocab_parallel_nll_loss(
    axis: Axis, scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = MEAN,
    ignore_index: int = -100,
) -> torch.Tensor:  # fmt: skip
    """`aten.nll_loss_nd` of log-probabilities whose classes are split; partial, as one rank has the class of each target."""
    count = scores.shape[min(1, scores.dim() - 1)]
    index, outside = local_indices(target, axis, count, ignore_index)
    index.masked_fill_(outside | (target == ignore_index), IGNORED)
    return aten.nll_loss_nd(scores, index, weight, reduction, IGNORED)  # type: ignore[no-any-return]


def local_indices(
    indices: torch.Tensor, axis: Axis, count: int, ignored: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices relative to this rank's chunk of `count`, 0 for those in other ranks' chunks and those `ignored`; and a mask
    of the latter two.

    An index that is in no chunk stays outside of this one, so that the operator that reads with it raises as usual.
    """
    index = indices - axis.index * count
    here, possible = (index >= 0) & (index < count), (indices >= 0) & (indices < axis.size * count)
    elsewhere = (possible if ignored is None else possible | (indices == ignored)) & ~here
    return index.masked_fill_(elsewhere, 0), elsewhere
