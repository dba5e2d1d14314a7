"""Discrete-event simulation of one computing stream and the messages that it issues and awaits.

Computing runs in program order. A message is issued where the program says so and put at the end of its channel (the
communicator of a mesh axis or of several, the copies to and from the host), which sends one message at a time. The program
continues meanwhile until it awaits the message. Concurrent work shares the device:

    a message in flight takes `interference` (beta) of the device, computing the rest; messages that would take more than all of
    it are slowed equally; messages of different channels over one axis, which one over several axes at once is on each of them,
    share it: of k there each goes at 1/k of its rate, and takes so much less of the device.

So computing beside k messages runs at the rate max(0, 1 - k beta), and a region that computes C seconds beside one message of M
seconds takes max(C + beta M, M) (the rows of the integer program). At beta = 1 every step takes the sum of all that it computes
and sends; at beta = 0 nothing slows anything down. In between, a step takes at least the load of its busiest stream, and at
most the sum.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from autopar.formulation.step_collectives import Message
from autopar.ir.device import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A message on a channel: it takes `seconds` if nothing else is in flight; `bytes` is its larger buffer on one rank.

    `message` is its collective, `axes` are the mesh axes that it goes over.
    """

    name: str
    kind: str
    channel: str
    axes: tuple[int, ...] = ()
    bytes: Bytes
    seconds: Seconds
    message: Message | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Computation:
    """Work of the computing stream: it takes `seconds` if nothing is in flight."""

    name: str
    kind: str
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Issue:
    """The program puts a transfer at the end of its channel and goes on."""

    transfer: Transfer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Await:
    """The program waits until a transfer that it has issued is complete."""

    issue: Issue


Instruction = Computation | Issue | Await


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What a stream did between two times, in seconds from the beginning of the step."""

    name: str
    kind: str
    start: Seconds
    stop: Seconds

    @property
    def seconds(self) -> Seconds:
        """How long it took."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Transmission:
    """A transfer that was issued at a time, and in flight from `start` to `stop`.

    For `exposed` of these seconds the computing stream waited for it, or for one behind it in its channel; the rest is `hidden`
    behind computing, or behind messages of other channels.
    """

    transfer: Transfer
    issued: Seconds
    start: Seconds
    stop: Seconds
    exposed: Seconds

    @property
    def seconds(self) -> Seconds:
        """How long it was in flight."""
        return self.stop - self.start

    @property
    def hidden(self) -> Seconds:
        """How long it was in flight while the program did not wait for it."""
        return self.seconds - self.exposed


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What every stream of a device did: computing and waiting take turns, each channel sends one message after the other.

    `sent` is in the order in which the messages were issued.
    """

    computing: tuple[Interval, ...]
    waiting: tuple[Interval, ...]
    sent: tuple[Transmission, ...]
    work: Seconds  # of all computations where nothing is in flight

    @property
    def seconds(self) -> Seconds:
        """The length: until the program has ended and every message is complete."""
        ends = [*(one.stop for one in self.computing), *(one.stop for one in self.waiting), *(one.stop for one in self.sent)]
        return max(ends, default=0.0)

    @property
    def exposed(self) -> Seconds:
        """How long the program waited for messages."""
        return sum(one.seconds for one in self.waiting)

    @property
    def slowdown(self) -> Seconds:
        """How much longer computing took because of concurrent messages."""
        return max(0.0, sum(one.seconds for one in self.computing) - self.work)


def simulate(program: Iterable[Instruction], interference: float) -> Timeline:
    """Run a program on a device.

    Args:
        program: computations, messages issued and awaited, in the order of the program.
        interference: seconds that computing loses per second of a concurrent message (beta); from 0 to 1.

    Raises ValueError if `interference` is out of range, or a message is awaited that was not issued.
    """
    if not 0 <= interference <= 1:
        raise ValueError(f"a message takes between nothing and all of a device, not {interference}")
    run = _Run(interference)
    for instruction in program:
        match instruction:
            case Computation():
                run.compute(instruction)
            case Issue():
                run.issue(instruction)
            case Await():
                run.wait(instruction.issue)
    for issue in list(run.left):
        run.wait(issue)
    return run.timeline()


class _Run:
    """The state of a simulation: the time, what is left of every message, and what has happened."""

    def __init__(self, interference: float) -> None:
        self.beta, self.now, self.work = interference, 0.0, 0.0
        self.channels: dict[str, deque[Issue]] = {}  # with something in flight: first that, then what is queued behind it
        self.left: dict[Issue, Seconds] = {}  # of what is not complete, in the order in which it was issued
        self.issued: dict[Issue, Seconds] = {}
        self.start: dict[Issue, Seconds] = {}
        self.stop: dict[Issue, Seconds] = {}
        self.exposed: dict[Issue, Seconds] = {}
        self.computing: list[Interval] = []
        self.waiting: list[Interval] = []

    def compute(self, what: Computation) -> None:
        """Compute to the end, at the rate that the messages in flight leave."""
        begun, left = self.now, what.seconds
        while left > 0:
            rate = max(0.0, 1 - self.beta * sum(self._rates().values()))
            needed = left / rate if rate > 0 else math.inf
            passed = self._pass(needed)
            left = 0.0 if passed == needed else left - rate * passed
        self.work += what.seconds
        self.computing.append(Interval(name=what.name, kind=what.kind, start=begun, stop=self.now))

    def issue(self, what: Issue) -> None:
        """Put a message at the end of its channel."""
        self.issued[what], self.left[what], self.exposed[what] = self.now, what.transfer.seconds, 0.0
        queue = self.channels.setdefault(what.transfer.channel, deque())
        queue.append(what)
        if queue[0] is what:
            self.start[what] = self.now

    def wait(self, what: Issue) -> None:
        """Wait until a message is complete; messages in flight on its channel are exposed meanwhile."""
        if what not in self.issued:
            raise ValueError(f"{what.transfer.name} is awaited before it is issued")
        begun = self.now
        while what in self.left:
            first = self.channels[what.transfer.channel][0]
            self.exposed[first] += self._pass(math.inf)
        if self.now > begun:
            self.waiting.append(Interval(name=what.transfer.name, kind="wait", start=begun, stop=self.now))

    def _pass(self, most: Seconds) -> Seconds:
        """Let the time pass until a message is complete, or for `most` seconds; returns how long that was."""
        flying = self._rates()
        device = max(1.0, self.beta * sum(flying.values()))
        passed = min(most, *(self.left[one] * device / rate for one, rate in flying.items())) if flying else most
        complete = [one for one, rate in flying.items() if self.left[one] * device / rate <= passed]
        self.now += passed
        for one, rate in flying.items():
            self.left[one] -= passed * rate / device
        for one in complete:
            self._complete(one)
        return passed

    def _rates(self) -> dict[Issue, float]:
        """The messages in flight, each with its share of its axes."""
        flying = [queue[0] for queue in self.channels.values()]
        crowd = Counter(axis for one in flying for axis in one.transfer.axes)
        return {one: 1 / max((crowd[axis] for axis in one.transfer.axes), default=1) for one in flying}

    def _complete(self, what: Issue) -> None:
        channel = what.transfer.channel
        queue = self.channels[channel]
        queue.popleft()
        del self.left[what]
        self.stop[what] = self.now
        if queue:
            self.start[queue[0]] = self.now
        else:
            del self.channels[channel]

    def timeline(self) -> Timeline:
        sent = (
            Transmission(
                transfer=one.transfer, issued=self.issued[one], start=self.start[one], stop=self.stop[one],
                exposed=self.exposed[one],
            )
            for one in self.issued
        )  # fmt: skip
        return Timeline(computing=tuple(self.computing), waiting=tuple(self.waiting), sent=tuple(sent), work=self.work)


__all__ = [
    "Await",
    "Computation",
    "Instruction",
    "Interval",
    "Issue",
    "Timeline",
    "Transfer",
    "Transmission",
    "simulate",
]  # fmt: skip
