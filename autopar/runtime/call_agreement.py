"""Agreement of the ranks on every call, before a collective of one waits for a collective that another does not issue.

A rank describes its call by aspects: mode, gradients, sizes and values of the inputs. Their digest, one number per rank, is
all-gathered over a separate group on the host (gloo, whatever the model uses). If all are equal that is all; otherwise the
aspects themselves are gathered, and every rank raises the same error. An input that ranks pass in different parts has its own
digest, compared between ranks that pass the same part.

A rank waits for the digests at once if its call differs from its last one. Else it runs the model meanwhile: on a CPU, where a
collective would block if other ranks do something else, until the model's first collective (not at all if torch.compile has the
model, or may have); on other devices, where kernels would block but not the host, until it has issued the forward. Values on a
device are compared one call later, when they have arrived.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.errors import InputError
from autopar.runtime.first_message import awaited
from autopar.runtime.lost_ranks import exchanging
from autopar.runtime.world import Context, on_ranks

SAMPLED = 1024  # elements of each input that a call compares: other ones in every call, and all of them in the first
ON_HOST = "the comparison of the ranks' calls"  # what a rank waits for when another one has died
VALUES = "values of "
PART = "values of the part of "
FIXES = {
    "call": "make the same calls on every rank, in the same order",
    "random": "load the same random state on every rank",
    "mode": "call train() and eval() on every rank, and evaluate on all of them: a forward is a collective",
    "gradients": "call the module under torch.no_grad() on every rank or on none",
    "trained": "set requires_grad of the same parameters and inputs on every rank",
    "size": "give every rank as much: the whole batch, or parts of one size where they are sharded; pad the shorter ones",
    VALUES: "give every rank the whole batch: seed the data loader alike, and do not shard it (no DistributedSampler)",
    PART: "load this rank's part, which ranks of one data_rank share: parallel.shard(batch), or parallel.sampler(dataset)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Aspect:
    """An aspect in which calls may differ: `kind` is a key of `FIXES`, `name` names its subject, `text` is this rank's
    value.
    """

    kind: str
    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """A call whose digests are in flight."""

    described: Sequence[Aspect]
    refused: Exception | None
    undo: Callable[[], None]
    digests: torch.Tensor
    work: dist.Work


class CallAgreement:
    """Compares the calls of one parallel module between ranks; every rank makes the same calls of it."""

    def __init__(self, context: Context, owners: Mapping[str, Sequence[int]] | None = None) -> None:
        """`owners` has the inputs that ranks pass in different parts: for every rank the first one that passes the same
        part.
        """
        self.context = context
        self.owners = owners or {}
        self.calls = 0
        self._late: tuple[Mapping[str, torch.Tensor], torch.cuda.Event] | None = None  # elements on their way to the host
        self._last: Sequence[Aspect] = ()  # of the call before, without its random state and values
        self._sent: _Sent | None = None
        self.eager = False  # whether the program of the last call ran eagerly

    def begin(
        self,
        aspects: Sequence[Aspect],
        inputs: Mapping[str, torch.Tensor],
        refused: Exception | None = None,
        undo: Callable[[], None] = lambda: None,
    ) -> None:
        """Compare this call with those of the other ranks, or start to.

        Args:
            aspects: what must not differ, besides the values of the inputs.
            inputs: the tensors of the call, by path; none if it was refused.
            refused: why this rank cannot make the call; it still takes part, so that the others learn about it.
            undo: undoes this rank's part of a call that turns out to be refused.

        Raises:
            InputError: the calls differ, on every rank; `refused` itself on a rank that has it.
        """
        if self.context.control is None:
            if refused:
                raise refused
            return
        self._send((*aspects, *self._values(inputs)), refused, undo)
        steady = [aspect for aspect in aspects if aspect.kind != "random"]  # whose count goes on with every call
        on_cpu = self.context.device.type == "cpu"
        alone = self._last != steady or (on_cpu and not self.eager)
        self._last, self.calls, self.eager = steady, self.calls + 1, False
        if on_cpu:
            awaited.set(self)
        if alone:
            self.settle()

    def same(self, call: str) -> None:
        """Wait until every rank makes this call, which does not run the model; the next call is not compared with it.

        Raises InputError on every rank if another one makes a different call, such as a forward.
        """
        if self.context.control is not None:
            self._send([Aspect(kind="call", name="what is called", text=call)])
            self.settle()

    def _send(
        self, described: Sequence[Aspect], refused: Exception | None = None, undo: Callable[[], None] = lambda: None
    ) -> None:
        """Start gathering the digests of a call."""
        common = [aspect for aspect in described if aspect.kind != PART]
        parts = {aspect.name: aspect for aspect in described if aspect.kind == PART}
        told = [(common, _first_line(refused)), *map(parts.get, self.owners)]
        mine = torch.frombuffer(bytearray(b"".join(map(_number, told))), dtype=torch.int64)
        found = torch.empty(self.context.mesh.size, len(told), dtype=torch.int64)
        work = dist.all_gather([*found.unbind()], mine, group=self.context.control, async_op=True)
        self._sent = _Sent(described=described, refused=refused, undo=undo, digests=found, work=work)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def settle(self) -> None:
        """Wait for the digests of a call that has begun; raises as `begin` does."""
        sent, self._sent = self._sent, None
        if sent is None:
            return
        with exchanging(ON_HOST):
            sent.work.wait()
        firsts = torch.tensor([[0] * self.context.mesh.size, *self.owners.values()]).T
        if bool((sent.digests != sent.digests.gather(0, firsts)).any()):
            sent.undo()
            raise self._difference(sent)
        if sent.refused:
            raise sent.refused

    def _difference(self, sent: _Sent) -> Exception:
        """The error that tells which ranks differ, and how."""
        every: list[tuple[str, Sequence[Aspect]]] = [("", ())] * self.context.mesh.size
        dist.all_gather_object(every, (_first_line(sent.refused), sent.described), group=self.context.control)
        if sent.refused:
            return sent.refused
        for rank, (text, _) in enumerate(every):
            if text:
                return InputError(f"the call was refused on rank {rank}: {text}", fix=f"see the error of rank {rank}")
        found = (self._different(alike) for alike in zip(*(described for _, described in every), strict=True))
        return next(error for error in found if error)

    def _different(self, alike: Sequence[Aspect]) -> InputError | None:
        """The error for one aspect, by what every rank has of it, if it differs where it must not."""
        texts = [aspect.text for aspect in alike]
        if alike[0].kind != PART:
            return different(alike[0], texts) if len(set(texts)) > 1 else None
        firsts = self.owners[alike[0].name]
        wrong = [rank for rank, first in enumerate(firsts) if texts[rank] != texts[first]]
        if not wrong:
            return None
        what = f"ranks that give the same part of {alike[0].name} were given different values"
        said = "; ".join(f"rank {rank} differs from rank {firsts[rank]}" for rank in wrong[:8])
        return InputError(what, ranks=said, fix=FIXES[PART])

    def _values(self, inputs: Mapping[str, torch.Tensor]) -> list[Aspect]:
        """Digests of sampled elements of the inputs: of this call on a CPU, of the previous call on other devices."""
        sampled = {path: _sampled(tensor, self.calls) for path, tensor in inputs.items()}
        if self.context.device.type == "cpu" or not self.calls:
            return self._digests(sampled)
        late, self._late = self._late, None
        if inputs:
            on_host = {path: tensor.to("cpu", non_blocking=True) for path, tensor in sampled.items()}
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._late = on_host, event
        if late is None:
            return []
        late[1].synchronize()
        return self._digests(late[0])

    def _digests(self, sampled: Mapping[str, torch.Tensor]) -> list[Aspect]:
        found = []
        for path, tensor in sampled.items():
            raw = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
            kind = PART if path in self.owners else VALUES
            found.append(Aspect(kind=kind, name=path, text=hashlib.sha256(raw.data).hexdigest()))
        return found


def different(aspect: Aspect, texts: Sequence[str]) -> InputError:
    """The error for calls that differ in one aspect, with the value on each rank."""
    fix = FIXES[aspect.kind]
    if aspect.kind == VALUES:
        other = [rank for rank, text in enumerate(texts) if text != texts[0]]
        what = f"the ranks were given different values for {aspect.name}"
        return InputError(what, ranks=f"{other} differ from rank 0", fix=fix)
    return InputError(f"the calls of the ranks differ in {aspect.name}: {on_ranks(texts)}", fix=fix)


def _first_line(error: Exception | None) -> str:
    return str(error).partition("\n")[0] or type(error).__name__ if error else ""


def _number(told: object) -> bytes:
    return hashlib.sha256(repr(told).encode()).digest()[:8]


def _sampled(tensor: torch.Tensor, call: int) -> torch.Tensor:
    """Equally spaced elements of a tensor, with another start in every call; all of them in call 0."""
    tensor = tensor.detach()
    if call == 0 or tensor.numel() <= SAMPLED:
        return tensor
    distance = tensor.numel() // SAMPLED
    places = torch.arange(call % distance, tensor.numel(), distance, device=tensor.device)
    return tensor[torch.unravel_index(places, tensor.shape)]
