"""The emitted graph: one ATen call per op on local shapes, conversions where layouts change, one comment per module.

    # transformer.ln_f
    transformer_ln_f_layer_norm_0 = torch.ops.aten.layer_norm.default(transformer_h_0_add_1, [768], ...)
    transformer_ln_f_layer_norm_0_gathered = all_gather__reduce_scatter(transformer_ln_f_layer_norm_0, tp, 1)

A node is named after its value ("module.path:op#n"), a converted value after what was done to it.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Callable, Iterable

import torch
from torch import fx, nn

from autopar.analysis.recomputability import aliases, draws, lies, may_copy
from autopar.analysis.weights import copies, summed
from autopar.codegen.source import CodeGraph
from autopar.ir.conversion import SUMS, Conversion, arrival
from autopar.ir.layout import I, Layout, digits, local_shape
from autopar.ir.program import Argument, Op, Output, Program, Ref, Value, overload
from autopar.memory.prefetch import PrefetchOrder
from autopar.operators import OpSharding, localise, scale
from autopar.runtime import bucketed_collectives as bucket
from autopar.runtime import collectives, random, storage
from autopar.runtime import gradient_accumulation as accumulate
from autopar.runtime.parallel_ops import FORMS
from autopar.runtime.rematerialize import manager as recompute
from autopar.runtime.world import Context
from autopar.search_space.assignment import Assignment, RecomputeChoice
from autopar.search_space.buckets import Bucket
from autopar.search_space.candidates import Candidate, distributed, parts_of

Target = str | Callable[..., object]

TRAINING = {"aten.dropout.default": 2, "aten.feature_dropout.default": 2, "aten.batch_norm.default": 5}  # place of the flag
# What a conversion does to the value, in the name of the node that it makes.
DEEDS = {
    "all_reduce": "reduced", "all_gather": "gathered", "reduce_scatter": "scattered", "all_to_all": "exchanged",
    "slice": "sliced", "pad": "padded", "keep": "kept", "identity": "shared",
}  # fmt: skip
STATE = "autopar"  # the one attribute of the emitted module that is not the user's
# Attributes of the emitted module that hide the user's.
TAKEN = frozenset((*dir(fx.GraphModule(nn.Module(), fx.Graph())), STATE, "run", "step", "accumulate", "joined"))
ATTENTION = "aten.scaled_dot_product_attention.default"


def emit(
    program: Program, assignment: Assignment, fits: dict[str, OpSharding | None], context: Context, *, training: bool = True
) -> fx.Graph:
    """The graph that one rank runs; its inputs are whole tensors, its outputs the local parts of the program's outputs.

    The flags of a program captured in `training` mode follow the module's; what is on in evaluation stays on.
    """
    return _Emitter(program, assignment, fits, context, training).graph


class _Emitter:
    """Builds one graph; `values` holds the node of each value in each layout that it already has."""

    def __init__(
        self, program: Program, assignment: Assignment, fits: dict[str, OpSharding | None], context: Context, training: bool
    ) -> None:
        self.program, self.assignment, self.fits, self.context = program, assignment, fits, context
        self.sizes = context.mesh.sizes
        self.graph: fx.Graph = CodeGraph()
        self.section = ""  # the comment under which nodes are made
        self.values: dict[tuple[str, Layout], fx.Node] = {}
        self.prefetch = PrefetchOrder(program, assignment)
        self.begun: dict[Bucket, fx.Node] = {}
        self.copies, self.summed = copies(program), summed(program)
        held = (p.value.name for p in (*program.parameters, *program.buffers))
        self.plain = storage.plain(assignment.given[name] for name in held) or context.device_mesh is None
        self.draws = 0
        self._prelude(program, training)
        for op in program.ops:
            if op.results[0].name not in self.copies:  # copies are made when they are wanted: for a bundle it may be earlier
                self._op(op)
        self.section = "the results"
        results = [self._returned(output) for output in program.outputs]
        self.graph.output(tuple(results))
        for node in (*self.axes, self.draw_state, self.training, self.anew, self.sums):
            if node is not None and not node.users:
                self.graph.erase_node(node)

    def _prelude(self, program: Program, training: bool) -> None:
        for value in program.inputs:
            node = self.graph.placeholder(identifier(value.name))
            node.target = node.name  # fx has kept a name that would hide one of the code's own, like torch
            self.values[value.name, (I,) * len(self.sizes)] = node
        self.axes = [self._state(f"axes.{identifier(axis.name)}") for axis in self.context.axes]
        drawn = any(draws(op, self.fits[op.name]) for op in program.ops)
        self.draw_state = self._state("draws") if drawn else None
        flagged = training and (drawn or any(op.target in TRAINING for op in program.ops))
        self.training = self._node("get_attr", "training", (), "training") if flagged else None
        self.anew = self._state("anew") if self.assignment.recompute != RecomputeChoice() else None
        self.sums = self._state("sums") if program.runs > 1 else None
        self.once = self.assignment.once and program.runs > 1
        self.section = "the weights"
        for one in self.prefetch.first:
            self._begin(one)
        self.section = "the batch"
        for value in program.inputs:  # an input that a strategy takes split is sliced at once
            for step in arrival(self.assignment.given[value.name]):
                self._convert(value, step)
                del self.values[value.name, step.source]  # from here on it is split, as the plan has it

    def _state(self, attribute: str) -> fx.Node:
        """What the module keeps beside its parameters: an axis, the random draws, what is made anew."""
        return self._node("get_attr", f"{STATE}.{attribute}", (), attribute.removeprefix("axes."))

    def _node(
        self, kind: str, target: Target, args: tuple[object, ...], name: str, kwargs: dict[str, object] | None = None
    ) -> fx.Node:
        """A new node under the comment of the present section."""
        node = self.graph.create_node(kind, target, args, kwargs or {}, name)  # type: ignore[arg-type]
        node.meta["section"] = self.section
        return node

    def _value(self, name: str, layout: Layout) -> fx.Node:
        """The value in this layout, converted from what there is along its route."""
        if (name, layout) not in self.values:
            value = self.program.values[name]
            if name not in self.program.producer and layout == self.assignment.given[name]:
                self._stored(value)
            elif name in self.copies and layout == self.assignment.produced(name, self.program):
                self._copy(name)
            elif (name, layout) in self.prefetch.arrives:
                self._finish(self.prefetch.arrives[name, layout])
            else:
                step = self.prefetch.into[name, layout]
                self._value(name, step.source)
                self._convert(value, step)
        return self.values[name, layout]

    def _stored(self, value: Value) -> None:
        """The local part of a parameter or buffer."""
        name, layout = identifier(value.name), self.assignment.given[value.name]
        room = (list(local_shape(value.shape, layout, self.sizes)),) if value.name in self.program.true else ()
        node = self._held(value.name, name if self.plain and not room else f"{name}_stored")
        if room or not self.plain:
            node = self._node("call_function", storage.local, (node, *room), name)
        self.values[value.name, layout] = node

    def _returned(self, output: Output) -> fx.Node:
        """The local part of an output, without padding."""
        layout, shape = self.assignment.outputs[output.path], self.program.values[output.value].shape
        node = self._value(output.value, layout)
        for dim, (size, true) in enumerate(zip(shape, self.program.true.get(output.value, shape), strict=True)):
            if size != true:
                axes = [self.axes[axis] for axis, _ in digits(layout, dim)]
                name = f"{identifier(output.value)}_beginning"
                node = self._node("call_function", storage.beginning, (node, dim, true, *axes), name)
        return node

    def _copy(self, name: str) -> None:
        """The copy of a parameter in another dtype, under the comment of the op that casts."""
        op, section = self.program.producer[name], self.section
        source, made = (*self.assignment.ops[op.name].operands, *self.assignment.ops[op.name].results)
        self._value(op.operands[0], source)
        if (name, made) not in self.values:  # a bundle that was finished for the source may have made it
            self._op(op)
        self.section = section

    def _held(self, path: str, name: str) -> fx.Node:
        """A parameter or buffer of the module; it is looked up where Python or fx has another use for its name."""
        first, *rest = path.split(".")
        if first not in TAKEN and not any(map(keyword.iskeyword, (first, *rest))):
            return self._node("get_attr", path, (), name)
        parameters = {p.value.name for p in self.program.parameters}
        table = "_modules" if rest else "_parameters" if path in parameters else "_buffers"
        held = self._node("get_attr", table, (), table)
        return self._node("call_function", storage.named, (held, path), name)

    def _convert(self, value: Value, step: Conversion) -> None:
        name, one = f"{identifier(value.name)}_{DEEDS[step.primitives[0]]}", Bucket(level=0, steps=((value.name, step),))
        function, places = collectives.call(step, value.shape, self.sizes)
        arguments = (self.values[value.name, step.source], self.axes[step.axis], *places)
        if self._sums(one):  # a bundle knows how to add up gradients in another dtype
            finished = self._finish_call(one, self._begin_call(one, f"{name}_begun"), f"{name}_finished")
            node = self._node("call_function", operator.getitem, (finished, 0), name)
        elif (value.name, step) in self.assignment.recompute.steps:
            node = self._node("call_function", recompute.convert, (self.anew, function.__name__, *arguments), name)
        else:
            node = self._node("call_function", function, arguments, name)
        self._have(value.name, step.target, node)

    def _begin(self, one: Bucket) -> fx.Node:
        """Send for the weights of a bundle."""
        for name, step in one.steps:
            self._value(name, step.source)
        if one not in self.begun:  # finishing what a source comes from may have begun it
            number = self.prefetch.buckets.index(one)
            self.begun[one] = self._begin_call(one, f"bundle_{number}_begun", *([self.sums, number] if self.once else []))
        return self.begun[one]

    def _begin_call(self, one: Bucket, name: str, *shared: object) -> fx.Node:
        sources = [self.values[weight, step.source] for weight, step in one.steps]
        arguments = ("__".join(one.primitives), sources, self.axes[one.axis], *self._sums(one))
        return self._node("call_function", accumulate.begin if shared else bucket.begin, (*shared, *arguments), name)

    def _finish(self, one: Bucket) -> None:
        """Have the weights of a bundle, and send for the next one that is gathered."""
        begun = self._begin(one)
        if all((name, step.target) in self.values for name, step in one.steps):  # what came before it has sent for it already
            return
        number = self.prefetch.buckets.index(one)
        node = self._finish_call(one, begun, f"bundle_{number}", *([self.sums, number] if self.once else []))
        if self.sums and not one.moved and not self.once:
            node = self._node("call_function", accumulate.held, (self.sums, number, node), f"bundle_{number}_held")
        for place, (name, step) in enumerate(one.steps):
            item = f"{identifier(name)}_{DEEDS[step.primitives[0]]}"
            self.values[name, step.target] = self._node("call_function", operator.getitem, (node, place), item)
        for following in self.prefetch.after.get(one, ()):
            self._begin(following)

    def _finish_call(self, one: Bucket, begun: fx.Node, name: str, *shared: object) -> fx.Node:
        anew = self.anew if self.assignment.recompute.steps.issuperset(one.steps) else None
        arguments = (anew, "__".join(one.primitives), begun, self.axes[one.axis], *self._places(one))
        return self._node("call_function", accumulate.finish if shared else bucket.finish, (*shared, *arguments), name)

    def _sums(self, one: Bucket) -> tuple[torch.dtype, ...]:
        """The dtype in which the gradients of a bundle are added up, if it is not their own."""
        dtype = self.summed.get(one.steps[0][0])
        return (dtype,) if dtype and one.primitives[1] in SUMS else ()

    def _places(self, one: Bucket) -> tuple[list[tuple[int, ...]], ...]:
        """Where each weight of a bundle is cut and joined, in a list of its own; entries that say nothing are left out."""
        places = [collectives.place_of(step, self.program.values[name].shape, self.sizes) for name, step in one.steps]
        states = [layout[one.axis].kind for layout in (one.steps[0][1].source, one.steps[0][1].target)]
        count = 4 if states == ["S", "S"] else 2 if any(place.blocks > 1 for place in places) else 1
        return ([tuple(place)[:count] for place in places],) if "S" in states else ()

    def _op(self, op: Op) -> None:
        fitted, candidate = self.fits[op.name], self.assignment.ops[op.name]
        values = self.program.values
        self.section = op.module or "the model"
        operands = [self._value(name, layout) for name, layout in zip(op.operands, candidate.operands, strict=True)]
        inside = [local_shape(values[n].shape, x, self.sizes) for n, x in zip(op.operands, candidate.operands, strict=True)]
        outside = [local_shape(r.shape, x, self.sizes) for r, x in zip(op.results, candidate.results, strict=True)]
        parts = parts_of(fitted, candidate, self.sizes)
        args, kwargs = localise(op, fitted, inside, outside, parts) if fitted else (op.args, op.kwargs)
        feed = iter(operands)
        arguments = [self._argument(argument, feed) for argument in args]
        named = {name: self._argument(argument, feed) for name, argument in kwargs}
        node = self._call(op, candidate, arguments, named)
        if fitted and (divisor := scale(op, fitted, parts)) > 1:
            node = self._run(op, torch.ops.aten.div.Tensor, [node, divisor], f"{identifier(op.name)}_scaled", {})
        self._results(op, candidate, node)

    def _call(self, op: Op, candidate: Candidate, arguments: list[object], named: dict[str, object]) -> fx.Node:
        target = overload(op.target)
        if self.training and op.target in TRAINING and arguments[TRAINING[op.target]] is True:
            arguments[TRAINING[op.target]] = self.training
        if own := distributed(self.fits[op.name], candidate):
            axis, form = own
            return self._run(op, form.name, [self.axes[axis], *arguments], identifier(op.name), named)
        if not draws(op, self.fits[op.name]):
            return self._run(op, target, arguments, identifier(op.name), named)
        if self.training and op.target == ATTENTION:
            rate = (arguments[4] if len(arguments) > 4 else named["dropout_p"], self.training)
            active = self._node("call_function", random.rate, rate, f"{identifier(op.name)}_rate")
            if len(arguments) > 4:
                arguments[4] = active
            else:
                named["dropout_p"] = active
        split = [self.axes[a] for a, form in enumerate(candidate.forms) if form[0] == "S"]
        index, self.draws = self.draws, self.draws + 1
        seeded = (target, self.draw_state, index, split, *arguments)
        return self._node("call_function", random.seeded, seeded, identifier(op.name), named)

    def _run(self, op: Op, target: Target, arguments: list[object], name: str, named: dict[str, object]) -> fx.Node:
        """Call what computes an op, or a part of it (a form by its name); once more for the backward if it is decided so."""
        if op.name in self.assignment.recompute.ops or (
            may_copy(op) and lies(op, self.program.values) and self._comes_back(op)
        ):
            made = recompute.form if isinstance(target, str) else recompute.call
            return self._node("call_function", made, (self.anew, target, *arguments), name, named)
        function = FORMS[target] if isinstance(target, str) else target
        return self._node("call_function", function, tuple(arguments), name, named)

    def _comes_back(self, op: Op) -> bool:
        """Whether the first operand of an op is made again for the backward."""
        return self._made_again(op.operands[0], self.assignment.ops[op.name].operands[0])

    def _made_again(self, name: str, layout: Layout) -> bool:
        """Whether a value is made again for the backward in a layout, or lies in the memory of one that is."""
        if (name, layout) in self.assignment.recompute.offload:
            return True
        for step in self.assignment.routes.get(name, ()):
            if step.target == layout:
                lying = aliases(step) and self._made_again(name, step.source)
                return lying or (name, step) in self.assignment.recompute.steps
        op = self.program.producer.get(name)
        if op is None:
            return False
        return op.name in self.assignment.recompute.ops or (lies(op, self.program.values) and self._comes_back(op))

    def _results(self, op: Op, candidate: Candidate, node: fx.Node) -> None:
        if len(op.results) == 1:
            self._have(op.results[0].name, candidate.results[0], node)
            return
        for place, (result, layout) in enumerate(zip(op.results, candidate.results, strict=True)):
            item = self._node("call_function", operator.getitem, (node, place), f"{identifier(op.name)}_item_{place}")
            self._have(result.name, layout, item)

    def _have(self, name: str, layout: Layout, node: fx.Node) -> None:
        """There is a value in a layout; what the host is to hold for the backward goes there."""
        if (name, layout) in self.assignment.recompute.offload:
            node = self._node("call_function", recompute.offload, (self.anew, node), f"{node.name}_away")
        self.values[name, layout] = node

    def _argument(self, argument: Argument, feed: Iterable[fx.Node]) -> object:
        """An argument as fx has it: nodes for values, in order; this rank's device for devices; lists for tuples."""
        if isinstance(argument, tuple):
            return [self._argument(part, feed) for part in argument]
        if isinstance(argument, Ref):
            return next(iter(feed))
        return self.context.device if isinstance(argument, torch.device) else argument


def identifier(name: str) -> str:
    """A name that Python accepts: "h.0.attn:addmm#0" becomes h_0_attn_addmm_0."""
    plain = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")
    return plain if plain and not plain[0].isdigit() and not keyword.iskeyword(plain) and plain != "self" else f"_{plain}"


__all__ = ["emit", "identifier"]
