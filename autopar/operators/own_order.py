"""Own order: rows that a sort permutes, and that each rank may permute in its own way; the `own_order` of a row.

    keys, order = sort(ids)               each rank sorts the keys of its own rows:   O(0)
    rows = index(x, [order // 2])         and takes its own rows, each twice          x S(0), rows O(0)
    ends = cumsum(histc(keys, ...), 0)    where the groups of its own rows end        O
    y = grouped_mm(rows, weight, ends)    a row times the matrix of its key           O(0)
    z = index(y, [inverse])               back in the order of before                 S(0)

A row is multiplied by the matrix of its key, whatever other rows are in its group: where it stands among those of other ranks
does not matter. So an operator that treats rows one by one, counts them, or takes each back to where it was, may run on a
rank's own rows alone, where its operands are of these, too. What is known of a value for that is an `OrderFact`; what an
operator makes of it, `OwnRows`. No spelling of the whole is looked for: each operator says what it makes of what is known, and
one that says nothing keeps the rows of all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from autopar.ir.layout import OWN_ADDENDS, P, State
from autopar.ir.program import Argument
from autopar.operators.call import Call, Local
from autopar.operators.rule import OpSharding, OwnRows


class Role(Enum):
    """The role of a value in a sort of rows."""

    ORDER = "where each row was; divided by a number, where what so many rows share was"
    INVERSE = "where each row is now"
    POSITIONS = "0, 1, 2, ..., one for each row"
    ROOM = "something for each row, whatever it is"
    ROWS = "one entry of a dim for each row"
    COUNTS = "how many rows each key has"
    ENDS = "where the rows of each key end"


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderFact:
    """What is known of a value: its role to a sort, by the names of its permutation (`order`) and of what is sorted (`keys`).

    `number` is the dim of rows, how many share what the order points to, or how many keys are counted. Rows may be the `sorted`
    keys themselves.
    """

    role: Role
    order: str = ""
    keys: str = ""
    number: int = 0
    sorted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderCall:
    """A call with facts about its operands: each one's fact, and the keys that it holds in their old order.

    Keys are `whole` numbers from 0 on, as operators that find places return them: no other is in no group.
    """

    call: Call
    facts: Sequence[OrderFact | None]
    keys: Sequence[str]
    whole: Sequence[bool]

    def fact(self, name: str, *roles: Role) -> OrderFact | None:
        """What is known of the one tensor in an argument, if it has one of these roles."""
        found = self.call.positions(name)
        fact = self.facts[found[0]] if len(found) == 1 else None
        return fact if fact and fact.role in roles else None

    def plain(self, *names: str) -> bool:
        """Whether nothing is known of the tensors in these arguments."""
        return all(self.facts[position] is None for name in names for position in self.call.positions(name))

    def rows(self, given: dict[str, State], results: Sequence[State], *facts: OrderFact | None) -> OwnFound:
        """The states of the tensors in arguments, and of the results, with what is known of these."""
        states = {position: state for name, state in given.items() for position in self.call.positions(name)}
        operands = tuple(states.get(position) for position in range(len(self.call.operands)))
        return OwnFound(rows=OwnRows(operands=operands, results=tuple(results)), facts=facts or (None,) * len(results))


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFound:
    """How an op runs on own rows, and what is known of its results."""

    rows: OwnRows
    facts: tuple[OrderFact | None, ...]


# The results of operators that are places in a dim.
PLACES = {
    "aten.topk.default": 1, "aten.sort.default": 1, "aten.sort.stable": 1, "aten.argsort.default": 0,
    "aten.argsort.stable": 0, "aten.argmax.default": 0, "aten.argmin.default": 0, "aten.max.dim": 1, "aten.min.dim": 1,
}  # fmt: skip
OwnOrderRule = Callable[[OrderCall], OwnFound | None]


def _own(dim: int = 0) -> State:
    return State("S", dim, own=True)


SPLIT = State("S")  # along the dim 0


def sort(call: OrderCall) -> OwnFound | None:
    """Ascending keys of one dim; of positions sorted again, the inverse."""
    (result, *_), named = call.call.op.results, call.call.arguments
    if len(result.shape) != 1 or named.get("descending"):
        return None
    own = [_own()] * len(call.call.op.results)
    if before := call.fact("self", Role.ORDER):
        if before.number != 1:
            return None
        facts = [OrderFact(role=Role.POSITIONS), OrderFact(role=Role.INVERSE, order=before.order, keys=before.keys)]
        return call.rows({"self": _own()}, own, *facts[-len(own) :])
    if not call.plain("self") or not call.whole[0]:
        return None
    order, keys = call.call.op.results[-1].name, call.keys[0]
    facts = [
        OrderFact(role=Role.ROWS, order=order, keys=keys, sorted=True),
        OrderFact(role=Role.ORDER, order=order, keys=keys, number=1),
    ]
    return call.rows({"self": SPLIT}, own, *facts[-len(own) :])


def floor_divide(call: OrderCall) -> OwnFound | None:
    """The position shared by several rows: the token of the row, if each has equally many."""
    order, named = call.fact("self", Role.ORDER), call.call.arguments
    by = named["other"]
    if order is None or order.number != 1 or not isinstance(by, int) or by < 1 or call.call.result[0] % by:
        return None
    if named.get("rounding_mode", "floor") not in ("floor", "trunc"):
        return None
    return call.rows({"self": _own()}, [_own()], replace(order, number=by))


def index(call: OrderCall) -> OwnFound | None:
    """Rows of what lies split, in each rank's own order; or own rows, back where they were."""
    indices = call.call.arguments["indices"]
    if not isinstance(indices, tuple) or len(indices) != 1:
        return None
    return _taken(call, "indices")


def index_select(call: OrderCall) -> OwnFound | None:
    """Rows of dim 0, taken into each rank's own order or back."""
    return _taken(call, "index") if call.call.number("dim") == 0 else None


def _taken(call: OrderCall, name: str) -> OwnFound | None:
    if back := call.fact(name, Role.INVERSE):
        rows = call.fact("self", Role.ROWS)
        if rows is None or (rows.order, rows.number) != (back.order, 0):
            return None
        return call.rows({"self": _own(), name: _own()}, [SPLIT])
    order = call.fact(name, Role.ORDER)
    if order is None or not call.plain("self") or call.call.shape("self")[0] * order.number != call.call.shape(name)[0]:
        return None
    fact = replace(order, role=Role.ROWS, number=0)
    return call.rows({"self": SPLIT, name: _own()}, [_own()], fact)


def index_add(call: OrderCall) -> OwnFound | None:
    """Rows summed at their origin."""
    order, rows = call.fact("index", Role.ORDER), call.fact("source", Role.ROWS)
    if order is None or rows is None or not call.plain("self") or call.call.number("dim") != 0:
        return None
    shared = call.call.shape("self")[0] * order.number == call.call.shape("index")[0]
    if not shared or (rows.order, rows.number) != (order.order, 0):
        return None
    return call.rows({"self": SPLIT, "index": _own(), "source": _own()}, [SPLIT])


def index_put(call: OrderCall) -> OwnFound | None:
    """Positions written where each row was: the inverse."""
    order, named = call.fact("indices", Role.ORDER), call.call.arguments
    room, positions = call.fact("self", Role.ROOM, Role.ORDER), call.fact("values", Role.POSITIONS)
    if order is None or order.number != 1 or room is None or positions is None or named["accumulate"]:
        return None
    states = dict.fromkeys(("self", "indices", "values"), _own())
    return call.rows(states, [_own()], replace(order, role=Role.INVERSE, number=0))


def empty_like(call: OrderCall) -> OwnFound | None:
    """An empty tensor for each row."""
    known = call.fact("self", Role.ORDER, Role.INVERSE, Role.ROWS)
    if known is None or len(call.call.result) != 1:
        return None
    return call.rows({"self": _own()}, [_own()], OrderFact(role=Role.ROOM))


def arange(call: OrderCall) -> OwnFound | None:
    """Positions of rows, if they are counted from 0 on."""
    named = call.call.arguments
    whole = isinstance(named["end"], int) and (named.get("start", 0), named.get("step", 1)) == (0, 1)
    if not whole or call.call.op.results[0].dtype.is_floating_point:
        return None
    return call.rows({}, [_own()], OrderFact(role=Role.POSITIONS))


def arange_end(call: Call, local: Local) -> dict[str, Argument]:
    """The end of positions of which there are as many as a rank has rows."""
    return {"end": local.results[0][0]}


def histc(call: OrderCall) -> OwnFound | None:
    """How many rows have each of the keys 0, 1, 2, ...: of own rows, whether they are sorted or not."""
    named, rows = call.call.arguments, call.fact("self", Role.ROWS)
    bins = call.call.number("bins")
    if bins < 2 or (named["min"], named["max"]) != (0, bins - 1) or len(call.call.shape("self")) != 1:
        return None
    if rows is not None and rows.sorted:
        return call.rows({"self": _own()}, [OWN_ADDENDS], OrderFact(role=Role.COUNTS, keys=rows.keys, number=bins))
    if call.plain("self") and call.whole[0]:
        return call.rows({"self": SPLIT}, [OWN_ADDENDS], OrderFact(role=Role.COUNTS, keys=call.keys[0], number=bins))
    return None


def cumsum(call: OrderCall) -> OwnFound | None:
    """Where the rows of each key end."""
    counts = call.fact("self", Role.COUNTS)
    if counts is None or len(call.call.result) != 1:
        return None
    return call.rows({"self": OWN_ADDENDS}, [OWN_ADDENDS], replace(counts, role=Role.ENDS))


def cast(call: OrderCall) -> OwnFound | None:
    """Numbers of rows, in another dtype that holds them all."""
    fact = call.fact("self", Role.COUNTS, Role.ENDS)
    if fact is None or not exact(call.call.op.results[0].dtype):
        return None
    return call.rows({"self": OWN_ADDENDS}, [OWN_ADDENDS], fact)


def exact(dtype: torch.dtype) -> bool:
    """Whether a dtype holds any number of rows that there may be, and any key."""
    return dtype in (torch.int32, torch.int64, torch.float32, torch.float64)


def grouped_products(call: OrderCall) -> OwnFound | None:
    """Each row times the matrix of its key."""
    (rows, weight), (ends,) = (name for name, _ in call.call.slots[:2]), call.call.positions("offs")[:1] or (None,)
    own, known = call.fact(rows, Role.ROWS), call.fact("offs", Role.ENDS) if ends is not None else None
    if own is None or known is None or not call.plain(weight) or call.call.rank(weight) != 3 or own.number != 0:
        return None
    if own.keys != known.keys or call.call.shape(weight)[0] != known.number:
        return None
    return call.rows({rows: _own(), "offs": OWN_ADDENDS}, [_own()], replace(own, sorted=False))


def each_row(call: OrderCall, fitted: OpSharding, *, same: bool) -> OwnFound | None:
    """Operators that treat rows one by one, or sum them: the dim of rows consists of one factor that may be split.

    Split into as many parts as there are rows, the operator sees each row alone, and not which one it is. Keys stay keys where
    the result is the `same` but for the dtype.
    """
    known = {position: fact for position, fact in enumerate(call.facts) if fact is not None}
    roles = {(fact.role, fact.order) for fact in known.values()}
    dims_of_rows = {fitted.operands[position][fact.number] for position, fact in known.items() if fact.role is Role.ROWS}
    if fitted.random or len(roles) != 1 or len(dims_of_rows) != 1:
        return None
    factor, *others = (*dims_of_rows.pop(), -1)
    if len(others) != 1 or fitted.factors[factor].whole:
        return None
    first = next(iter(known.values()))
    summed, states = factor in fitted.summed, list[State | None]()
    for position, dims in enumerate(fitted.operands):
        place = _place(dims, factor)
        if (place is None) is (position in known) or place == -1:
            return None
        whole = P if summed and position in fitted.added else None
        states.append(whole if place is None else _own(place))
    places = [_place(dims, factor) for dims in fitted.results]
    if -1 in places:
        return None
    kept = first.sorted and same and exact(call.call.op.results[0].dtype)
    results = tuple(P if place is None else _own(place) for place in places)
    facts = tuple(None if place is None else replace(first, number=place, sorted=kept) for place in places)
    return OwnFound(rows=OwnRows(operands=tuple(states), results=results), facts=facts)


def _place(dims: Sequence[tuple[int, ...]], factor: int) -> int | None:
    """The dim that is a factor alone; None if there is none, -1 if it is a part of one."""
    found = [dim for dim, parts in enumerate(dims) if factor in parts]
    if not found:
        return None
    return found[0] if len(found) == 1 and len(dims[found[0]]) == 1 else -1
