"""Checks that a second call of forward gives the same program as the first, if the first changed Python state.

if self.table is None: self.table = torch.arange(9)      the same: the table depends on numbers and sizes alone
self.longest = max(self.longest, x.shape[1])             the same
self.history.append(x.mean()); y = x * len(self.history) different
if self.mean is None: self.mean = x.mean(0)              uses values of the first call, which a graph would recompute
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from autopar.capture import nodes
from autopar.capture.known_values import looked_at
from autopar.capture.python_state import CarriedTensorError
from autopar.capture.trace import Traced
from autopar.errors import CaptureError

_OF_CALLS = (InputKind.USER_INPUT, InputKind.PARAMETER)


def kept(first: Traced, again: Callable[[], Traced], same: Callable[[Traced], bool]) -> frozenset[str]:
    """The dotted names of attributes that forward computed once and kept.

    Args:
        first: the captured call, which is to stand for all calls.
        again: traces the next call, with the state that the first left in Python.
        same: whether a call that uses no tensor of the first is the same program.

    Raises CaptureError if the next call is another program, changes attributes again, or uses a tensor that depends on values
    of the first call.
    """
    changes, made = first.left.changes, first.left.made
    if not changes and not made and not first.left.constants:
        return frozenset()
    for place in changes.values():  # torch.export has undone them
        place.put(place.value)
    for held in made.values():
        held.put(torch.empty(held.tensor.shape, dtype=held.tensor.dtype, device="meta"))
    try:
        following = again()
    except CarriedTensorError:
        raise
    except CaptureError as error:
        if changes or first.left.constants:
            raise _changing(list(changes), then=error.what) from None
        return frozenset()
    read = sorted(following.left.read & made.keys())
    if name := next((name for name in read if made[name].varies), ""):
        raise CarriedTensorError(
            f"forward keeps {name} as its first call computed it, from its arguments, parameters or random numbers; the graph "
            "would compute it in every step",
            fix="compute it before the capture, into a buffer",
        )
    alike = (not changes or _variable(first) == _variable(following)) if read else same(following)
    lasting = [name for name, place in following.left.changes.items() if not place.outside or not alike]
    if lasting or not alike:
        raise _changing(lasting or [*changes, *made])
    return frozenset(name for name, place in changes.items() if not place.outside)


def _changing(names: list[str], **then: str) -> CaptureError:
    """The error for state that changes, with the names of the places, if known."""
    what = next(iter(names), "state that is not in a module")
    return CaptureError(
        f"forward changes {what}, which the graph would have as it was in the first step",
        attributes=", ".join(names) or "unknown",
        **then,
        fix="run one batch before the model is captured, if forward sets it once; else keep it in a buffer that forward "
        "writes, or change it outside of forward and give it as a tensor",
    )


def _variable(traced: Traced) -> list[object]:
    """The operators of a call whose results differ between calls, in order, with their operands; for operands that are equal in
    all calls, only their shapes."""
    kinds = [spec.kind in _OF_CALLS for spec in traced.exported.graph_signature.input_specs]
    return list(_in_order(traced.exported.graph_module, kinds))


def _in_order(module: fx.GraphModule, given: list[bool]) -> Iterator[object]:
    variable: dict[fx.Node, int] = {}
    places, needed = iter(given), nodes.needed(module.graph)

    def operand(node: fx.Node) -> str:
        shown = node.meta.get("val")
        same = (shown.dtype, shown.shape) if isinstance(shown, torch.Tensor) else shown
        return str(variable.get(node, same))

    def listed(arguments: object) -> str:
        return str(fx.map_arg(arguments, operand))  # type: ignore[type-var]

    for node in module.graph.nodes:
        if node.op == "placeholder" and next(places):
            variable[node] = len(variable)
        elif (
            node.op == "call_function"
            and node in needed
            and (nodes.draws(node) or any(map(variable.__contains__, looked_at(node))))
        ):
            variable[node] = len(variable)
            yield str(node.target), listed(node.args), listed(node.kwargs)
            for place, region in enumerate(node.args):
                if isinstance(region, fx.Node) and region.op == "get_attr":
                    inner = module.get_submodule(str(region.target))
                    assert isinstance(inner, fx.GraphModule)
                    yield list(_in_order(inner, [one in variable for one in node.args[place + 1 :]]))
        elif node.op == "output":
            yield listed(node.args)


__all__ = ["kept"]
