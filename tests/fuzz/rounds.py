"""A round of fuzzing: graphs and settings drawn by hypothesis from a seed, and the first failure, shrunk."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from autopar.runtime.threaded_ranks import ThreadedRanks
from tests.fuzz.graphs import Graph, graphs
from tests.fuzz.trial import Setting, WrongNumber, check

DEADLINE = 300  # seconds for a graph with its plans, on however busy a machine
MESHES = ((2,), (3,), (2,), (2, 2), (2,), (3,), (2, 2), (2, 2, 2))  # with the frequency of each
PLANS = {2: 6, 3: 5, 4: 4, 8: 2}  # of a graph, by the number of ranks
NAMED = ("auto", "fsdp", "megatron", "ddp", "zero1", "zero2")
HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\nfrom tests.fuzz.rounds import repeat\n"


@st.composite
def trials(draw: DrawFn) -> tuple[Graph, Setting]:
    """A graph, and what it is tried under."""
    sizes = draw(st.sampled_from(MESHES))
    ranks = math.prod(sizes)
    extra = draw(st.integers(0, 9))  # beside plain training: which of the rest
    first = draw(st.integers(0, 999))
    plans: list[int | str] = [*range(first, first + PLANS[ranks])]
    if draw(st.integers(0, 3)) == 3 and extra < 6:
        plans[-1] = draw(st.sampled_from(NAMED))
    return draw(graphs(6 if ranks == 8 else 12)), Setting(
        sizes=sizes,
        plans=tuple(plans),
        microbatches=2 if extra in (6, 7) else 1,
        precision={8: "bf16-mixed" if first % 2 else "bf16"}.get(extra),
        dynamic=extra == 9,
        padded=draw(st.integers(0, 2)) == 2,
    )


@dataclass(slots=True)
class Round:
    """The graphs of a seed; `run` fills in the rest."""

    seed: int
    graphs: int
    shrinks: bool = True  # a failure
    pairs: int = 0
    refused: list[str] = field(default_factory=list)
    failure: str = ""
    script: str = ""

    def run(self) -> None:
        """Try the graphs; on a failure, smaller ones until none smaller fails."""

        @seed(self.seed)
        @settings(
            max_examples=self.graphs,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink) if self.shrinks else (Phase.generate,),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
        )
        @given(trials())
        def tried(trial: tuple[Graph, Setting]) -> None:
            self._try(world, *trial)

        with ThreadedRanks() as world:
            try:
                tried()
            except Exception as error:
                again = isinstance(error, ExceptionGroup)  # hypothesis has one of what failed, and did not when repeated
                said = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
                self.failure = f"{type(said).__name__}: {str(said)[:600]}{' (not when it was repeated)' * again}"

    def _try(self, world: ThreadedRanks, graph: Graph, setting: Setting) -> None:
        try:
            with deadline(DEADLINE):
                outcome = check(*graph.build(), setting, world)
        except Exception:
            self.script = script(graph, setting)
            self.failure = self.failure or "yes"
            raise
        if not self.failure:
            self.pairs += outcome.equal
            self.refused += outcome.refused


def script(graph: Graph, setting: Setting) -> str:
    """A program that repeats a trial."""
    return f"{HEAD}\n\n{graph.source()}\n\n\nrepeat(Model, sample, {setting.text()})"


def repeat(model: type, sample: object, **setting: object) -> None:
    """Repeat a trial; raises what it failed with."""
    with ThreadedRanks() as world:
        print(check(model, sample, Setting(**setting), world))  # type: ignore[arg-type]


@contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in what takes longer."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no end within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


__all__ = ["Round", "Setting", "WrongNumber", "deadline", "repeat", "script", "trials"]
