"""One rank's part of a pipelined step: the actions of its schedule, in order, with messages between neighbouring stages.

    1RECV_F3   post the receives of what stage 1 needs for micro-batch 3
    1F3        wait for them, run the stage, keep the edges of the autograd graph at which the gradients will come in
    1SEND_F3   send what was computed; 1WAIT_F3 waits until that is complete, and lets go of the buffer
    1RECV_B3   post the receives of the gradients; 1B3 waits, runs the backward; 1SEND_B3 sends the gradients of what came
    1I3        1B3 without the gradients of weights in products, which 1W3 makes

Each value travels as each rank's own part, between ranks of equal coordinates on the other axes, and its gradient the same way
back. A stage on the same rank is handed the tensor. The order of messages is that of `pipeline.transfers`, by which no rank
waits forever.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from autopar.ir.layout import Shape
from autopar.pipeline.schedule import Action, ActionKind, PipelineSchedule
from autopar.runtime.deferred_products import DeferredProducts
from autopar.runtime.gradient_accumulation import GradientAccumulator
from autopar.runtime.rank_failures import StepFailures
from autopar.runtime.rematerialize.recompute import Tensors
from autopar.runtime.single_steps import local


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossingPart:
    """A rank's part of a value that crosses a cut: its local shape, and whether a gradient comes back."""

    name: str
    shape: Shape
    dtype: torch.dtype
    gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """What runs a stage: `forward` maps a micro-batch's number and what was received for it to the stage's outputs.

    `begin` computes what all micro-batches of a step share, unless the first one does so. The last stage sends
    nothing: its outputs are those of the model.
    """

    forward: Callable[[int, Tensors], Tensors]
    received: tuple[CrossingPart, ...]
    sent: tuple[CrossingPart, ...]
    accumulator: GradientAccumulator
    deferred: DeferredProducts
    begin: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRank:
    """This rank of the pipeline's axis: its place, and the process group of the ranks along the axis, None if it is alone."""

    index: int
    group: dist.ProcessGroup | None
    device: torch.device
    failures: StepFailures

    def peer(self, index: int) -> int:
        """The global rank at another place of the axis."""
        assert self.group is not None, "an axis with neighbours has a group"
        return dist.get_global_rank(self.group, index)

    def send(self, tensor: torch.Tensor, index: int) -> dist.Work:
        """Begin to send a contiguous tensor to another place of the axis."""
        assert self.group is not None, "an axis with neighbours has a group"
        return self.group.send([tensor], index, 0)

    def receive(self, tensor: torch.Tensor, index: int) -> dist.Work:
        """Begin to receive a tensor from another place of the axis."""
        assert self.group is not None, "an axis with neighbours has a group"
        return self.group.recv([tensor], index, 0)

    @contextmanager
    def exchanging(self, where: str) -> Iterator[None]:
        """Around messages: a failure reports which rank failed or died, instead of torch's error."""
        try:
            yield
        except RuntimeError as error:
            raise self.failures.failed(error, where) from error

    def described_by_all(self, own: object) -> list[Any]:
        """Exchange a description of each position of the axis with all of them."""
        if self.group is None:
            return [own]
        found: list[Any] = [None] * self.group.size()
        with self.exchanging("what each stage stores"):
            dist.all_gather_object(found, own, group=self.group)
        return found

    def from_rank(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """The tensor of the rank at a place of the axis, on all of them."""
        if self.group is not None:
            with self.exchanging("results of the pipeline's last stage"):
                self.group.broadcast(tensor, index).wait()
        return tensor

    def results_from(self, results: object, index: int) -> object:
        """The structure of tensors that the rank at a place of the axis has, on all of them."""
        if self.group is None:
            return results
        empty: Callable[[torch.Tensor], torch.Tensor] = partial(torch.empty_like, device="meta")
        told = [pytree.tree_map_only(torch.Tensor, empty, results) if self.index == index else None]
        with self.exchanging("results of the pipeline's last stage"):
            dist.broadcast_object_list(told, group=self.group, group_src=index, device=self.device)
        if self.index != index:
            results = pytree.tree_map_only(torch.Tensor, lambda one: torch.empty_like(one, device=self.device), told[0])
        return pytree.tree_map_only(torch.Tensor, lambda one: self.from_rank(one.detach().contiguous(), index), results)

    def norm(self, norm: torch.Tensor, norm_type: float) -> torch.Tensor:
        """The norm of a vector of which the ranks of the axis have a part each, by the norms of the parts."""
        if self.group is None:
            return norm
        largest = math.isinf(norm_type)
        total = norm.to(self.device, torch.float64) ** (1.0 if largest else norm_type)
        with self.exchanging("the norm of the gradients of all stages"):
            dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self.group)
        return total if largest else total ** (1.0 / norm_type)


class PipelineStep:
    """Runs the actions of one rank; `loss` takes the outputs of the last stage, once for every micro-batch in order.

    It returns what is differentiated, if anything is.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        stages: Mapping[int, StageRun],
        rank: PipelineRank,
        loss: Callable[[Tensors], torch.Tensor | None],
    ) -> None:
        self.schedule, self.stages, self.rank, self.loss = schedule, stages, rank, loss
        self._incoming: dict[Action, list[tuple[torch.Tensor, dist.Work | None]]] = {}  # by the action that needs it
        self._outgoing: dict[Action, list[torch.Tensor]] = {}  # by the action that sends it
        self._sends: dict[Action, list[tuple[torch.Tensor, dist.Work]]] = {}  # by the action that waits for it
        self._ends: dict[tuple[int, int], list[GradientEdge | torch.Tensor]] = {}  # where a micro-batch's backward begins
        self._leaves: dict[tuple[int, int], list[torch.Tensor]] = {}  # what it received

    def run(self) -> None:
        """Run all actions of this rank.

        Raises RankError, which names the stage and the action, if one fails, here or on another rank.
        """
        with self.rank.failures.told("a stage of the pipeline", "the end of the step"), ExitStack() as stack:
            for stage in self.stages.values():
                stack.callback(stage.deferred.clear)
                stack.enter_context(stage.accumulator.step())
                if stage.begin:
                    stage.begin()
            for action in self.schedule.ranks[self.rank.index]:
                self._run(action)

    def _run(self, action: Action) -> None:
        with self.rank.failures.told(f"stage {action.stage} of the pipeline", str(action)):
            match action.kind:
                case ActionKind.RECV_F:
                    self._receive(action, ActionKind.FORWARD, self.stages[action.stage].received, action.stage - 1)
                case ActionKind.RECV_B:
                    self._receive(action, ActionKind.BACKWARD, self._returning(action), action.stage + 1)
                case ActionKind.SEND_F:
                    self._send(action, ActionKind.WAIT_F, action.stage + 1)
                case ActionKind.SEND_B:
                    self._send(action, ActionKind.WAIT_B, action.stage - 1)
                case ActionKind.WAIT_F | ActionKind.WAIT_B:
                    self._wait(action)
                case ActionKind.FORWARD:
                    self._forward(action)
                case ActionKind.BACKWARD_WEIGHT:
                    self.stages[action.stage].deferred.run(action.microbatch)
                case _:
                    self._backward(action)

    def _returning(self, action: Action) -> tuple[CrossingPart, ...]:
        """What the gradients come back of, that a stage has sent."""
        return tuple(part for part in self.stages[action.stage].sent if part.gradient)

    def _receive(self, action: Action, needs: ActionKind, parts: Sequence[CrossingPart], stage: int) -> None:
        """Post the receives of an action that computes."""
        found = list[tuple[torch.Tensor, dist.Work | None]]()
        for part in parts:
            buffer = torch.empty(part.shape, dtype=part.dtype, device=self.rank.device)
            found.append((buffer, self.rank.receive(buffer, self.schedule.rank_of[stage])))
        self._incoming[_at(action, needs)] = found

    def _send(self, action: Action, waits: ActionKind, stage: int) -> None:
        """Send what was computed for the stage beside."""
        rank = self.schedule.rank_of[stage]
        self._sends[_at(action, waits)] = [(tensor, self.rank.send(tensor, rank)) for tensor in self._outgoing.pop(action)]

    def _wait(self, action: Action) -> None:
        for _, work in self._sends.pop(action):
            self._awaited(work, action)

    def _arrived(self, action: Action) -> list[torch.Tensor]:
        """The received values of a computing action."""
        found = self._incoming.pop(action, [])
        for _, work in found:
            if work is not None:
                self._awaited(work, action)
        return [tensor for tensor, _ in found]

    def _awaited(self, work: dist.Work, action: Action) -> None:
        with self.rank.exchanging(f"the message of {action} of the pipeline's stage {action.stage}"):
            work.wait()

    def _pass_on(
        self, action: Action, tensors: Sequence[torch.Tensor], stage: int, kinds: tuple[ActionKind, ActionKind]
    ) -> None:
        """Leave tensors for the next message, or hand them to the neighbouring stage if it is on this rank."""
        needs, sends = kinds
        if self.schedule.rank_of[stage] == self.rank.index:
            beside = Action(stage=stage, kind=needs, microbatch=action.microbatch)
            self._incoming[beside] = [(tensor.detach(), None) for tensor in tensors]
        else:
            self._outgoing[_at(action, sends)] = [tensor.detach().contiguous() for tensor in tensors]

    def _forward(self, action: Action) -> None:
        stage, key = self.stages[action.stage], (action.stage, action.microbatch)
        trains = torch.is_grad_enabled()
        given = self._arrived(action)
        for part, tensor in zip(stage.received, given, strict=True):
            tensor.requires_grad_(part.gradient and trains)
        with self._synchronised(action), stage.deferred.forward(action.microbatch):
            outputs = stage.forward(action.microbatch, given)
        if action.stage == self.schedule.stages - 1:
            loss = self.loss(outputs)
            self._ends[key] = [loss] if loss is not None and loss.requires_grad else []
        else:
            self._pass_on(action, outputs, action.stage + 1, (ActionKind.FORWARD, ActionKind.SEND_F))
            back = [tensor for part, tensor in zip(stage.sent, outputs, strict=True) if part.gradient]
            self._ends[key] = (
                [get_gradient_edge(tensor) if tensor.requires_grad else tensor for tensor in back] if trains else []
            )
        self._leaves[key] = given if trains else []

    def _backward(self, action: Action) -> None:
        stage, key = self.stages[action.stage], (action.stage, action.microbatch)
        ends, leaves = self._ends.pop(key), self._leaves.pop(key)
        gradients = self._arrived(_at(action, ActionKind.BACKWARD))
        if action.stage == self.schedule.stages - 1:
            gradients = [torch.ones_like(end) for end in ends if isinstance(end, torch.Tensor)]
        pairs = zip(ends, gradients, strict=True)
        trained = [(end, gradient) for end, gradient in pairs if isinstance(end, GradientEdge) or end.requires_grad]
        begins: Any = [end for end, _ in trained]  # edges, or the loss
        with self._synchronised(action), stage.deferred.collecting(action.microbatch):
            torch.autograd.backward(begins, [gradient for _, gradient in trained])
        if action.stage:
            parts = zip(stage.received, leaves, strict=True)
            back = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for part, leaf in parts if part.gradient]
            self._pass_on(action, back, action.stage - 1, (ActionKind.BACKWARD, ActionKind.SEND_B))
        if action.kind == ActionKind.BACKWARD:
            stage.deferred.run(action.microbatch)

    @contextmanager
    def _synchronised(self, action: Action) -> Iterator[None]:
        """Gradients of weights are reduced with the last micro-batch, and those of the others added up until then."""
        last = action.microbatch == self.schedule.microbatches - 1
        with nullcontext() if last else self.stages[action.stage].accumulator.no_sync():
            yield


def _at(action: Action, kind: ActionKind) -> Action:
    """The action of another kind of the same stage and micro-batch."""
    return Action(stage=action.stage, kind=kind, microbatch=action.microbatch)


@contextmanager
def tied_gradients(tied: Sequence[tuple[nn.Parameter | None, Sequence[int]]], rank: PipelineRank) -> Iterator[None]:
    """Around a step: the gradients of parameters that several ranks of the pipeline store are added up.

    Each comes with the places of the ranks that store it, in the order of its stages; None where this one does not. Partial
    sums go from one to the next, the total back: all have the same bits, so that copies never part.
    """
    before = [None if parameter is None else parameter.grad for parameter, _ in tied]
    for parameter, _ in tied:
        if parameter is not None:
            parameter.grad = None
    yield
    for (parameter, places), earlier in zip(tied, before, strict=True):
        if parameter is None:
            continue
        if not parameter.requires_grad:  # frozen since it was planned: what it has stays, as by torch
            parameter.grad = earlier
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        with rank.exchanging("the gradients of parameters that several stages share"):
            _added(local(parameter.grad), places, rank)
        if earlier is not None:
            local(earlier).add_(local(parameter.grad))
            parameter.grad = earlier


def _added(gradient: torch.Tensor, places: Sequence[int], rank: PipelineRank) -> None:
    """Make a gradient the sum of those at these places of the axis."""
    there, back = itertools.pairwise(places), itertools.pairwise(reversed(places))
    for hops, take in ((there, gradient.add_), (back, gradient.copy_)):
        for source, target in hops:
            if rank.index == source:
                rank.send(gradient.contiguous(), target).wait()
            elif rank.index == target:
                received = torch.empty_like(gradient, memory_format=torch.contiguous_format)
                rank.receive(received, source).wait()
                take(received)


__all__ = ["CrossingPart", "PipelineRank", "PipelineStep", "StageRun", "tied_gradients"]
