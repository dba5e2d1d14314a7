"""Properties of the nodes of an exported fx graph."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from autopar.capture import source_location
from autopar.errors import CaptureError
from autopar.ir.program import Argument, overload
from autopar.ir.shape_inference import Kind
from autopar.operators import rule_of
from autopar.operators.registry import RETURNING


def refuse_transform(node: fx.Node) -> None:
    """Raise CaptureError for a node that enters or leaves a level of differentiation, outside of transforms of `torch.func`."""
    if str(getattr(node.target, "__module__", "")).startswith("torch._functorch"):
        fix = "torch.func.jvp, grad, vjp and others of torch.func, which are captured, or the formula written out"
        raise CaptureError("levels of forward-mode differentiation are no operators", at=source(node), fix=fix)


def graphs(module: fx.GraphModule) -> Iterator[fx.Graph]:
    """The graph of a module and those of its regions."""
    yield from (part.graph for part in module.modules() if isinstance(part, fx.GraphModule))


def writes_in_place(graph: fx.Graph) -> bool:
    """Whether any op of a graph writes in place."""
    return any(map(mutates, graph.nodes))


def writes(target: torch._ops.OpOverload) -> bool:
    """Whether an operator writes in place, by its schema (batch_norm, which does not declare its writes, does not count)."""
    return bool(target._schema.is_mutable)


def mutates(node: fx.Node) -> bool:
    """Whether a node writes in place."""
    return isinstance(node.target, torch._ops.OpOverload) and writes(node.target)


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def shares_memory(writer: fx.Node, place: fx.Node) -> bool:
    """Whether a node before the writer shares memory with what it writes, other than nodes that write it themselves."""
    while mutates(place) and isinstance(place.args[0], fx.Node):
        place = place.args[0]
    lies = memory(place)
    before = itertools.takewhile(lambda one: one is not writer, writer.graph.nodes)
    return lies is None or any(memory(one) == lies for one in before if one is not place and not mutates(one))


def memory(node: fx.Node) -> int | None:
    """An id of the memory of a node's tensor: see `memory_of`."""
    return memory_of(node.meta.get("val"))


def memory_of(traced: object) -> int | None:
    """An id of a tensor's memory, which a tensor shares with its views; None for other objects."""
    return traced.untyped_storage()._cdata if isinstance(traced, torch.Tensor) else None


def same_tensor(one: object, other: object) -> bool:
    """Whether two traced tensors are one view of the same memory: `w.data = w.data.to(w.device)`."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or memory_of(one) != memory_of(other):
        return False
    seen = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset()) for tensor in (one, other)]
    return seen[0] == seen[1]


def returns_operand(node: fx.Node) -> bool:
    """Whether a node's operator returns its first operand itself, as `x.to(dtype)` does for an x of that dtype."""
    place, found = node.args[0] if node.args else None, node.meta.get("val")
    given = place.meta.get("val") if isinstance(place, fx.Node) else None
    if not isinstance(given, torch.Tensor) or not isinstance(found, torch.Tensor) or len(node.all_input_nodes) > 1:
        return False
    if mutates(node) or (given.shape, given.stride(), given.dtype) != (found.shape, found.stride(), found.dtype):
        return False
    assert isinstance(node.target, torch._ops.OpOverload)
    x = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")
    try:
        return node.target(x, *node.args[1:], **node.kwargs) is x
    except Exception:  # there is no meta kernel, or the tensor goes to another device
        return False


def selects(node: fx.Node) -> bool:
    """Whether a node selects by a mask, so that the length of its result depends on values."""
    aten = torch.ops.aten
    index = node.args[1] if node.target == aten.index.Tensor else ()
    of = [one.meta["val"].dtype for one in (index if isinstance(index, (list, tuple)) else ()) if isinstance(one, fx.Node)]
    return node.target in (aten.masked_select.default, aten.nonzero.default) or torch.bool in of


def written(node: fx.Node) -> str:
    """The arguments that a node's operator writes into, by their names in its schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    return ", ".join(a.name for a in node.target._schema.arguments if a.is_write)


def writes_one(node: fx.Node) -> bool:
    """Whether a node's operator writes into one tensor: its first argument, or `out`."""
    assert isinstance(node.target, torch._ops.OpOverload)
    return written(node) in (node.target._schema.arguments[0].name, "out")


def needed(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes that results or in-place writes depend on; nodes that are only used in assertions are not needed."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in found or node.op == "output" or _acts(node):
            found.update((node, *node.all_input_nodes))
    return frozenset(found)


def _acts(node: fx.Node) -> bool:
    """Whether a node has side effects."""
    if isinstance(node.target, torch._ops.OpOverload):
        rule = rule_of(str(node.target))
        return writes(node.target) or (rule is not None and bool(rule.writes))
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def returning(node: fx.Node) -> str:
    """The functional variant of a node's in-place operator: add.Tensor for add_.Tensor, and for add.out."""
    if str(node.target) in RETURNING:
        return RETURNING[str(node.target)]
    assert isinstance(node.target, torch._ops.OpOverload)
    _, name, variant = str(node.target).split(".")
    plain = re.sub(r"^__i", "__", name) if name.endswith("__") else name.removesuffix("_")
    packet = getattr(torch.ops.aten, plain, None)
    forms = {form: getattr(packet, form)._schema for form in (packet.overloads() if packet else ())}
    taken = _taken([a for a in node.target._schema.arguments if not a.is_out])
    alike = [form for form, s in forms.items() if not s.is_mutable and taken in (_taken(s.arguments), _taken(_unless_made(s)))]
    if variant not in alike:  # pow_.Scalar becomes pow.Tensor_Scalar
        variant = next(iter(alike), "")
    if not variant:
        fix = f"use the form of {plain} that returns its result"
        raise CaptureError(f"{node.target} has no functional variant", at=source(node), fix=fix)
    return f"aten.{plain}.{variant}"


def _taken(arguments: Sequence[torch.Argument]) -> list[tuple[str, str]]:
    """Names and types of arguments; the first one of `dropout_(self, p, train)` is called `input` in `dropout`."""
    return [(a.name if place else "", str(a.type)) for place, a in enumerate(arguments)]


_OF_MADE = {"dtype", "layout", "device", "pin_memory"}  # arguments of factory operators, given by `out` itself


def _unless_made(schema: torch.FunctionSchema) -> list[torch.Argument]:
    return [a for a in schema.arguments if a.name not in _OF_MADE]


def as_made(target: str, out: torch.dtype) -> tuple[tuple[str, Argument], ...]:
    """The arguments of a factory operator that replace an `out` of this dtype."""
    schema = overload(target)._schema
    made = len(_unless_made(schema)) + len(_OF_MADE) == len(schema.arguments) and "Tensor" not in str(schema).partition("->")[0]
    return (("dtype", out), ("device", torch.device("meta"))) if made else ()


def without_generator(target: str, kwargs: Mapping[str, object]) -> str:
    """The variant of a random operator without a generator argument: rand.default for rand.generator when none is given."""
    name, _, variant = target.rpartition(".")
    if "generator" not in variant or kwargs.get("generator") is not None:
        return target
    return f"{name}.{variant.replace('_generator', '').replace('generator', 'default')}"


def viewing(node: fx.Node) -> str:
    """The view variant of a node that changes a tensor's shape in place; `resize_` has none."""
    target = returning(node)
    if overload(target)._schema.returns[0].alias_info is None:
        fix = "make a new tensor: reshape, or torch.nn.functional.pad"
        raise CaptureError(f"{node.target} changes the size of a tensor", at=source(node), fix=fix)
    return target


def traced_kind(tensor: torch.Tensor, grad: bool) -> Kind:
    """The kind of a traced tensor; `grad` says whether an operand of its op requires grad."""
    differentiable = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return Kind(tuple(tensor.shape), tensor.dtype, grad and differentiable)


def module(node: fx.Node) -> str:
    """The path of the module whose forward made the node; a second call of a module has the same path."""
    stack = node.meta.get("nn_module_stack")
    path = next(reversed(stack.values()))[0] if stack else ""
    return re.sub(r"@\d+", "", str(path))


def source(node: fx.Node) -> str:
    """The line of the user's model that made the node."""
    return source_location.from_text(node.meta.get("stack_trace") or "")
