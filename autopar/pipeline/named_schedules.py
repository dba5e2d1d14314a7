"""The named pipeline schedules, for any number of ranks and micro-batches.

With p ranks, m micro-batches and stages of equal time (f forward, b = i + w backward) without messages, a step takes

    gpipe         (m + p - 1) (f + b)                         in flight on rank r: m
    1f1b          (m + p - 1) (f + b)                         min(m, p - r)
    interleaved   m v (f + b) + (p - 1) (f + b)               min(m v, (v - 1) p + 2 (p - 1 - r) + 1), where p divides m
    zb-h1         m (f + b) + (p - 1) (f + i - w)             p, where w <= f, i and m >= p
    zb-h1+(p-1)   m (f + b) + (p - 1) max(f, f + i - 2 w)     2 p - 1, where w <= f, i and m >= 2 p - 1
    zb-v          6 m f + (p - 1) f                           2 p half stages, where f = i = w and m >= 2 p - 1

Sources: Huang et al., GPipe, 2019; Narayanan et al., PipeDream, SOSP 2019, and Megatron-LM, SC 2021 (interleaving by v chunks a
rank); Qi et al., Zero Bubble, ICLR 2024 (H1; H2, which is H1 with p - 1 forwards ahead; V, section 6); Zhuang et al., MLSys
2023 (forwards ahead hide messages).
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping

from autopar.errors import ConstraintError
from autopar.pipeline.schedule import Action, ActionKind, PipelineSchedule

Actions = list[Action]


def named(name: str, ranks: int, microbatches: int, *, chunks: int = 1, ahead: int = 0) -> PipelineSchedule:
    """The schedule of this name.

    Args:
        name: gpipe, 1f1b, interleaved, zb-h1 or zb-v.
        ranks: the size of the pipeline's axis.
        microbatches: the number of micro-batches of a step.
        chunks: stages per rank: at least 2 for interleaved, 2 for zb-v, 1 for the others.
        ahead: for 1f1b and zb-h1, forwards that a rank runs before its first backward beyond those that fill the pipeline; at
            most as many again. The last rank runs none ahead.

    Raises ConstraintError for an unknown name, and for numbers that the schedule does not support.
    """
    _refuse(name, ranks, microbatches, chunks, ahead)
    of: Mapping[str, Callable[[int, int, int], Actions]] = {
        "gpipe": _gpipe,
        "1f1b": functools.partial(_one_forward_one_backward, ahead=ahead),
        "interleaved": functools.partial(_interleaved, chunks=chunks),
        "zb-h1": functools.partial(_zero_bubble_h1, ahead=ahead),
        "zb-v": _zero_bubble_v,
    }
    return PipelineSchedule(ranks=tuple(tuple(of[name](rank, ranks, microbatches)) for rank in range(ranks)))


CHUNKS = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "zb-v": 2}
DEFERRED = {"zb-h1", "zb-v"}  # backwards come in halves
AHEAD = ("1f1b", "zb-h1")  # with forwards ahead, if requested
NAMES = ("interleaved", *CHUNKS)


def parts(name: str) -> tuple[str, int]:
    """The schedule and the forwards ahead in a name such as "1f1b+2". Raises ConstraintError for an unknown name.

    >>> parts("zb-h1+2"), parts("gpipe")
    (('zb-h1', 2), ('gpipe', 0))
    """
    base, plus, ahead = name.partition("+")
    if base not in NAMES or (plus and not (base in AHEAD and re.fullmatch("[0-9]{1,6}", ahead))):
        raise _unknown(name)
    return base, int(ahead or 0)


def _unknown(name: str) -> ConstraintError:
    return ConstraintError(f"{name!r} is not a pipeline schedule", fix=", ".join(NAMES))


def _refuse(name: str, ranks: int, microbatches: int, chunks: int, ahead: int) -> None:
    what = f"no pipeline schedule {name} of {ranks} ranks, {microbatches} micro-batches and {chunks} stages a rank"
    if name not in NAMES:
        raise _unknown(name)
    if ranks < 1 or microbatches < 1 or ahead < 0:
        raise ConstraintError(what, fix="at least one of each")
    if name != "interleaved" and chunks != CHUNKS[name]:
        raise ConstraintError(what, fix=f"stages={CHUNKS[name] * ranks}, or interleaved")
    if name == "interleaved" and chunks < 2:
        raise ConstraintError(what, fix=f"stages={2 * ranks}, or a larger multiple of {ranks}; or 1f1b")
    if name == "interleaved" and microbatches % (rounds := max(1, microbatches // ranks)):
        raise ConstraintError(what, rounds=f"{rounds} of equal length", fix=f"a multiple of {rounds} micro-batches")
    if ahead and name not in AHEAD:
        raise ConstraintError(f"forwards ahead are of {' and '.join(AHEAD)}, not of {name}", ahead=ahead)


def _forward(stage: int, k: int) -> Action:
    return Action(stage=stage, kind=ActionKind.FORWARD, microbatch=k)


def _backward(stage: int, k: int) -> Action:
    return Action(stage=stage, kind=ActionKind.BACKWARD, microbatch=k)


def _input(stage: int, k: int) -> Action:
    return Action(stage=stage, kind=ActionKind.BACKWARD_INPUT, microbatch=k)


def _weight(stage: int, k: int) -> Action:
    return Action(stage=stage, kind=ActionKind.BACKWARD_WEIGHT, microbatch=k)


def _gpipe(r: int, p: int, m: int) -> Actions:
    """All forwards, then all backwards."""
    return [_forward(r, k) for k in range(m)] + [_backward(r, k) for k in range(m)]


def _alternating(forwards: Actions, backwards: Actions, first: int) -> Actions:
    """The first forwards, then forward and backward in turn, then the remaining backwards."""
    pairs = zip(forwards[first:], backwards, strict=False)
    return forwards[:first] + [action for pair in pairs for action in pair] + backwards[len(forwards) - first :]


def _first(r: int, p: int, m: int, ahead: int) -> int:
    """The forwards of a rank before its first backward."""
    fill = p - 1 - r
    return min(m, fill + min(ahead, fill))


def _one_forward_one_backward(r: int, p: int, m: int, ahead: int) -> Actions:
    return _alternating([_forward(r, k) for k in range(m)], [_backward(r, k) for k in range(m)], _first(r, p, m, ahead))


def _interleaved(r: int, p: int, m: int, chunks: int) -> Actions:
    """Rounds of about p micro-batches; each round passes through the rank's chunks one after the other."""
    per, total = m // max(1, m // p), m * chunks
    places = [(n % (per * chunks) // per, n // (per * chunks) * per + n % per) for n in range(total)]
    forwards = [_forward(chunk * p + r, k) for chunk, k in places]
    backwards = [_backward((chunks - 1 - chunk) * p + r, k) for chunk, k in places]
    return _alternating(forwards, backwards, min(total, (chunks - 1) * per + 2 * (p - 1 - r)))


def _zero_bubble_h1(r: int, p: int, m: int, ahead: int) -> Actions:
    """1f1b with backwards in halves: the weight halves come r micro-batches late, which fills the end; with forwards ahead the
    last ranks hold as many more of them."""
    first, late = _first(r, p, m, ahead), r + min(ahead, r)
    actions = [_forward(r, k) for k in range(first)]
    for k in range(m):
        actions += [_forward(r, first + k)] * (first + k < m) + [_input(r, k)] + [_weight(r, k - late)] * (k >= late)
    return actions + [_weight(r, k) for k in range(max(0, m - late), m)]


def _zero_bubble_v(r: int, p: int, m: int) -> Actions:
    """Rank r has stages r and 2 p - 1 - r; built for at least 2 p - 1 micro-batches, of which the first m are kept."""
    down, up, count = r, 2 * p - 1 - r, max(2 * p - 1, m)
    done: Counter[tuple[str, int]] = Counter()
    actions: Actions = []

    def run(stage: int, *kinds: Callable[[int, int], Action]) -> None:
        for kind in kinds:
            actions.append(kind(stage, done[kind.__name__, stage]))
            done[kind.__name__, stage] += 1

    def left(stage: int) -> int:
        return done["_input", stage] - done["_weight", stage]

    run(down, *[_forward] * (2 * (p - r) - 1))
    for _ in range(r):
        run(up, _forward)
        run(down, _forward)
    for _ in range(p - r):
        run(up, _forward, _input, _weight)
    while done["_forward", up] < done["_forward", down] or done["_forward", down] < count:
        run(down, *[_forward] * (done["_forward", down] < count), _input, _weight)
        run(up, _forward, _input, _weight)
    for _ in range(r):
        run(down, _input)
        run(up, _input)
    run(down, *(_input, _weight) * (p - r))
    run(up, *[_weight] * left(up))
    run(down, *[_weight] * left(down))
    return [action for action in actions if action.microbatch < m]


__all__ = ["AHEAD", "CHUNKS", "DEFERRED", "named", "parts"]
