"""The emitted graph: one ATen call per op on local shapes, conversions where layouts change, one comment per module.

    layer_norm = aten.layer_norm(x, [768], weight, bias, 1e-05)
    gathered = all_gather__reduce_scatter(layer_norm, tp, 1)
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from autopar.conversion import COLLECTIVES, Conversion
from autopar.decisions import Decisions
from autopar.ir import Argument, Op, Program, Ref, Value, overload
from autopar.layout import I, Layout, local_shape
from autopar.passes.candidates import Candidate
from autopar.rules import Fitted, localise, scale
from autopar.runtime import collectives, random, regather, storage
from autopar.runtime.world import Context

TRAINING = {"aten.dropout.default": 2, "aten.feature_dropout.default": 2, "aten.batch_norm.default": 5}  # place of the flag
STATE = "autopar"  # the one attribute of the emitted module that is not the user's
ATTENTION = "aten.scaled_dot_product_attention.default"


def emit(program: Program, decisions: Decisions, fits: dict[str, Fitted | None], context: Context) -> fx.Graph:
    """The graph that one rank runs; its inputs are whole tensors, its outputs the local parts of the program's outputs."""
    return _Emitter(program, decisions, fits, context).graph


class _Emitter:
    """Builds one graph; `values` holds the node of each value in each layout that it already has."""

    def __init__(self, program: Program, decisions: Decisions, fits: dict[str, Fitted | None], context: Context) -> None:
        self.program, self.decisions, self.fits, self.context = program, decisions, fits, context
        self.sizes = context.mesh.sizes
        self.graph = fx.Graph()
        self.values: dict[tuple[str, Layout], fx.Node] = {}
        self.weights = {p.value.name for p in program.parameters if p.value.requires_grad}
        self.draws = 0
        self._prelude(program)
        for op in program.ops:
            self._op(op, decisions.ops[op.name])
        results = [self._value(o.value, decisions.outputs[o.path]) for o in program.outputs]
        self.graph.output(tuple(results))
        self.graph.on_generate_code(lambda _: _Comments(self.graph).insert)

    def _prelude(self, program: Program) -> None:
        for value in program.inputs:
            node = self.graph.placeholder(_identifier(value.name))
            self.values[value.name, (I,) * len(self.sizes)] = node
        self.axes = [self._state(f"axis_{axis.name}") for axis in self.context.axes]
        drawn = any(fitted and fitted.random for fitted in self.fits.values())
        self.draw_state = self._state("draws") if drawn else None
        flagged = drawn or any(op.target in TRAINING for op in program.ops)
        self.training = self.graph.create_node("get_attr", "training") if flagged else None
        gathered = any(self._regathers(name, step) for name in self.weights for step in self.decisions.routes.get(name, ()))
        self.gathers = self._state("gathers") if gathered else None
        for value in program.inputs:  # an input that a strategy takes split is sliced at once
            layout = self.decisions.given[value.name]
            for axis in (a for a, state in enumerate(layout) if state.kind == "S"):
                before = next(known for name, known in reversed(self.values) if name == value.name)
                after = (*before[:axis], layout[axis], *before[axis + 1 :])
                self._convert(value, Conversion(axis=axis, source=before, target=after))

    def _state(self, attribute: str) -> fx.Node:
        """What the module keeps beside its parameters: an axis, the random draws, the gathered weights."""
        return self.graph.create_node("get_attr", f"{STATE}.{attribute}", name=attribute)

    def _value(self, name: str, layout: Layout) -> fx.Node:
        """The value in this layout, converted from what there is along its route."""
        if (name, layout) not in self.values:
            value = self.program.values[name]
            if name not in self.program.producer and layout == self.decisions.given[name]:
                self._stored(value)
            else:
                step = next(s for s in self.decisions.routes[name] if s.target == layout)
                self._value(name, step.source)
                self._convert(value, step)
        return self.values[name, layout]

    def _stored(self, value: Value) -> None:
        """The local part of a parameter or buffer."""
        attribute = self.graph.create_node("get_attr", value.name, name=_identifier(value.name))
        node = self.graph.call_function(storage.local, (attribute,)) if self.context.device_mesh else attribute
        self.values[value.name, self.decisions.given[value.name]] = node

    def _convert(self, value: Value, step: Conversion) -> None:
        function, places = collectives.call(step, value.shape, self.sizes)
        source = self.values[value.name, step.source]
        arguments = (source, self.axes[step.axis], *places)
        if self._regathers(value.name, step):
            node = self.graph.call_function(regather.regathered, (self.gathers, function.__name__, *arguments))
        else:
            node = self.graph.call_function(function, arguments)
        self.values[value.name, step.target] = node

    def _regathers(self, name: str, step: Conversion) -> bool:
        """Whether a conversion of a weight is run again for the backward: a gather, and what follows one on its route."""
        if name not in self.weights:
            return False
        if step.primitives[0] in COLLECTIVES:
            return True
        before = next((s for s in self.decisions.routes.get(name, ()) if s.target == step.source), None)
        return before is not None and self._regathers(name, before)

    def _op(self, op: Op, candidate: Candidate) -> None:
        fitted = self.fits[op.name]
        values = self.program.values
        operands = [self._value(name, layout) for name, layout in zip(op.operands, candidate.operands, strict=True)]
        inside = [local_shape(values[n].shape, x, self.sizes) for n, x in zip(op.operands, candidate.operands, strict=True)]
        outside = [local_shape(r.shape, x, self.sizes) for r, x in zip(op.results, candidate.results, strict=True)]
        parts = _parts(fitted, candidate, self.sizes)
        args, kwargs = localise(op, fitted, inside, outside, parts) if fitted else (op.args, op.kwargs)
        feed = iter(operands)
        arguments = [self._argument(argument, feed) for argument in args]
        named = {name: self._argument(argument, feed) for name, argument in kwargs}
        node = self._call(op, candidate, arguments, named)
        if fitted and (divisor := scale(op, fitted, parts)) > 1:
            node = self.graph.call_function(torch.ops.aten.div.Tensor, (node, divisor))
        node.meta["module"] = op.module
        self._results(op, candidate, node)

    def _call(self, op: Op, candidate: Candidate, arguments: list[object], named: dict[str, object]) -> fx.Node:
        fitted = self.fits[op.name]
        target = overload(op.target)
        if op.target in TRAINING and arguments[TRAINING[op.target]] is True:
            arguments[TRAINING[op.target]] = self.training
        if not (fitted and fitted.random):
            return self.graph.create_node("call_function", target, tuple(arguments), named, _identifier(op.name))  # type: ignore[arg-type]
        if op.target == ATTENTION:
            rate = (arguments[4] if len(arguments) > 4 else named["dropout_p"], self.training)
            active = self.graph.call_function(random.rate, rate)  # type: ignore[arg-type]
            if len(arguments) > 4:
                arguments[4] = active
            else:
                named["dropout_p"] = active
        split = [self.axes[a] for a, form in enumerate(candidate.forms) if form[0] == "S"]
        index, self.draws = self.draws, self.draws + 1
        seeded = (target, self.draw_state, index, split, *arguments)
        return self.graph.create_node("call_function", random.seeded, seeded, named, _identifier(op.name))  # type: ignore[arg-type]

    def _results(self, op: Op, candidate: Candidate, node: fx.Node) -> None:
        if len(op.results) == 1:
            self.values[op.results[0].name, candidate.results[0]] = node
            return
        for place, (result, layout) in enumerate(zip(op.results, candidate.results, strict=True)):
            self.values[result.name, layout] = self.graph.call_function(operator.getitem, (node, place))

    def _argument(self, argument: Argument, feed: Iterable[fx.Node]) -> object:
        """An argument as fx has it: nodes for values, in order; this rank's device for devices; lists for tuples."""
        if isinstance(argument, tuple):
            return [self._argument(part, feed) for part in argument]
        if isinstance(argument, Ref):
            return next(iter(feed))
        return self.context.device if isinstance(argument, torch.device) else argument


def _parts(fitted: Fitted | None, candidate: Candidate, sizes: Sequence[int]) -> list[int]:
    """Into how many parts each factor is split."""
    parts = [1] * (len(fitted.factors) if fitted else 0)
    for (kind, factor, _), size in zip(candidate.forms, sizes, strict=True):
        if kind == "S":
            parts[factor] *= size
    return parts


def _identifier(name: str) -> str:
    """A name that Python accepts: "h.0.attn:addmm#0" becomes h_0_attn_addmm_0."""
    plain = re.sub(r"\W+", "_", name).strip("_")
    return plain if plain and not plain[0].isdigit() else f"_{plain}"


class _Comments:
    """Puts a comment with the original module's name before its first line."""

    def __init__(self, graph: fx.Graph) -> None:
        self.modules = {node.name: node.meta["module"] for node in graph.nodes if "module" in node.meta}

    def insert(self, lines: list[str]) -> list[str]:
        """The generated body with the comments in place."""
        result, current = [], None
        for line in lines:
            match = re.match(r"(\w+)(?::[^=]*)? = ", line)
            module = self.modules.get(match[1]) if match else None
            if module is not None and module != current:
                result.append(f"# {module or 'model'}\n")
                current = module
            result.append(line)
        return result


__all__ = ["emit"]
