"""Emission: the fx graph that one rank runs. One ATen call per op on local shapes, conversions where layouts change.

    # transformer.ln_f
    transformer_ln_f_layer_norm_0 = torch.ops.aten.layer_norm.default(transformer_h_0_add_1, [768], ...)
    transformer_ln_f_layer_norm_0_gathered = all_gather__reduce_scatter(transformer_ln_f_layer_norm_0, tp, 1)

A node is named after its value ("module.path:op#n"), a converted value after its conversion; `node.meta["section"]` has the
module, for the comments in the printed code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import fx

from autopar.analysis.deferrable import deferrable
from autopar.analysis.recomputability import is_random
from autopar.analysis.weights import copies, weights
from autopar.codegen.buckets import BucketCalls, FunctionCall
from autopar.codegen.module_state import axis_names
from autopar.codegen.names import STATE, SUFFIXES, attributes, identifier, is_attribute
from autopar.codegen.pipeline_module import PipelineModule
from autopar.codegen.recomputed import RecomputedValues
from autopar.codegen.source import CodeGraph
from autopar.ir.conversion import COLLECTIVES, Conversion, arrival
from autopar.ir.layout import I, Layout, digits, local_shape
from autopar.ir.program import Argument, Op, Output, Program, Ref, Value, aten, overload
from autopar.ir.schema import parameters
from autopar.ir.training_step import TrainingStep
from autopar.memory.in_place_reductions import reduced_in_place
from autopar.memory.schedule import ConversionEvent, Schedule
from autopar.operators import OpSharding, localise, row_of, scale, training_flag
from autopar.runtime import collectives, random, storage
from autopar.runtime.deferred_products import cut_weights
from autopar.runtime.gradient_accumulation import accumulate_gradients
from autopar.runtime.parallel_ops import OPS
from autopar.runtime.rematerialize import manager as rematerialize
from autopar.runtime.world import Context
from autopar.search_space.assignment import Assignment, RecomputeChoice
from autopar.search_space.buckets import Bucket
from autopar.search_space.candidates import Candidate, distributed, parts_of

Target = str | Callable[..., object]
WHOLE: Mapping[str, Layout] = {}
TAKEN = attributes(PipelineModule)  # and so those of every emitted module


def emit(
    step: TrainingStep,
    assignment: Assignment,
    fits: dict[str, OpSharding | None],
    context: Context,
    *,
    training: bool = True,
    unsharded: bool | None = None,
    given: Mapping[str, Layout] = WHOLE,
    deferred: bool = False,
) -> fx.Graph:
    """The graph that one rank runs: its inputs are global tensors, its outputs the local parts of the program's outputs.

    For an input in `given` the user passes this rank's part in that layout, from which the plan's is sliced. With `deferred`
    the backward leaves weight gradients of products to `autopar.runtime.deferred_products`.

    Training flags of ops that were on in a program captured in `training` mode follow the module's `training`; flags that are
    on in evaluation mode stay on. `unsharded` says whether stored tensors are plain; by default they are if nothing is split.
    """
    if unsharded is None:
        stored = (p.value.name for p in (*step.program.parameters, *step.program.buffers))
        unsharded = storage.all_unsharded(assignment.given[name] for name in stored)
    return _Emitter(step, assignment, fits, context, training, unsharded, given, deferred).graph


class _Emitter:
    """Builds one graph; `values` has the node of each value in each of its layouts so far."""

    def __init__(
        self,
        step: TrainingStep,
        assignment: Assignment,
        fits: dict[str, OpSharding | None],
        context: Context,
        training: bool,
        unsharded: bool,
        given: Mapping[str, Layout],
        deferred: bool,
    ) -> None:
        program = step.program
        self.step, self.program, self.assignment, self.fits, self.context = step, program, assignment, fits, context
        self.sizes = context.mesh.sizes
        self.graph: fx.Graph = CodeGraph()
        self.section = ""  # the comment under which nodes are made
        self.values: dict[tuple[str, Layout], fx.Node] = {}
        self.schedule = Schedule(program, assignment)
        self.prefetch, self.in_place = self.schedule.prefetch, reduced_in_place(program, assignment, fits)
        self.pending: dict[Bucket, fx.Node] = {}
        self.copies, self.recomputed = copies(program), RecomputedValues(program=program, assignment=assignment)
        self.unsharded = unsharded or context.device_mesh is None
        self.received = {**step.received, **given}  # this rank's parts already
        self.random_ops = step.stage.random_ops if step.stage else 0  # those before this one, which number it
        self.deferrable = deferrable(program) if deferred else {}
        self._prelude(program, training)
        for section, what in self._sections():
            self.section = section
            self._scheduled(what)
        self.section = "outputs"
        results = [self._output(output) for output in program.outputs]
        self.graph.output(tuple(results))
        for node in (*self.axes.values(), self.rng_state, self.training, self.rematerializer, self.accumulator, self.deferred):
            if node is not None and not node.users:
                self.graph.erase_node(node)

    def _prelude(self, program: Program, training: bool) -> None:
        for value in program.inputs:
            node = self.graph.placeholder(identifier(value.name))
            node.target = node.name  # fx has renamed one that would hide a global of the code, like torch
            self.values[value.name, self.received.get(value.name, (I,) * len(self.sizes))] = node
        numbers = {*range(len(self.sizes)), *self.assignment.axes}
        over = {number: self.context.over(self.context.mesh.axes_over(number)) for number in sorted(numbers)}
        names = axis_names(self.context)
        self.axes = {number: self._state(f"axes.{names[axis.name]}") for number, axis in over.items()}
        random_ops = any(is_random(op, self.fits[op.name]) for op in program.ops)
        self.rng_state = self._state("rng_state") if random_ops else None
        has_flag = training and (random_ops or any(map(training_flag, program.ops)))
        self.training = self._node("get_attr", "training", (), "training") if has_flag else None
        self.rematerializer = self._state("rematerializer") if self.assignment.recompute != RecomputeChoice() else None
        self.accumulator = self._state("accumulator") if self.step.loop else None
        self.deferred = self._state("deferred") if self.deferrable else None
        self.once = self.assignment.once and self.step.loop is not None
        self.bucket_calls = BucketCalls(program=program, sizes=self.sizes, accumulator=self.accumulator)

    def _sections(self) -> Iterator[tuple[str, Op | Bucket | ConversionEvent]]:
        """The scheduled events, each with its section comment: the module of the op that it serves."""
        order, top = self.schedule.order, self.schedule.top
        yield from (("parameters", what) for time, what in order if time <= top)
        self.section = "inputs"
        self._arrive()
        section, rest = "outputs", []
        for _, what in reversed([entry for entry in order if entry[0] > top]):
            if isinstance(what, Op) and what.results[0].name not in self.copies:
                section = what.module or "the model"
            rest.append((section, what))
        yield from reversed(rest)

    def _arrive(self) -> None:
        """Slice every input that the plan splits, unless it is passed split; from here on it has only the plan's layout."""
        for value in self.program.inputs:
            for step in arrival(self.assignment.given[value.name], self.received.get(value.name)):
                self._convert(value, step)
                del self.values[value.name, step.source]

    def _scheduled(self, what: Op | Bucket | ConversionEvent) -> None:
        """Emit the next event of the schedule."""
        if isinstance(what, Op):
            self._op(what)
        elif isinstance(what, Bucket):
            self._start(what)
        elif what.bucketed:
            ((name, step), *_) = what.steps
            self._wait(self.prefetch.arrives[name, step.target])
        else:
            for name, step in what.steps:
                self._convert(self.program.values[name], step)

    def _state(self, attribute: str) -> fx.Node:
        """An attribute of the module's own state: a mesh axis, the random state, the rematerializer, the accumulator."""
        return self._node("get_attr", f"{STATE}.{attribute}", (), attribute.removeprefix("axes."))

    def _node(
        self, kind: str, target: Target, args: tuple[object, ...], name: str, kwargs: dict[str, object] | None = None
    ) -> fx.Node:
        """A new node in the current section."""
        node = self.graph.create_node(kind, target, args, kwargs or {}, name)  # type: ignore[arg-type]
        node.meta["section"] = self.section
        return node

    def _call_node(self, call: FunctionCall, name: str) -> fx.Node:
        return self._node("call_function", call.function, call.args, name, call.kwargs)

    def _value(self, name: str, layout: Layout) -> fx.Node:
        """The value in this layout; stored tensors are read at their first use."""
        if (name, layout) not in self.values:
            self._stored(self.program.values[name])
        return self.values[name, layout]

    def _stored(self, value: Value) -> None:
        """The local tensor of a parameter or buffer."""
        name, layout = identifier(value.name), self.assignment.given[value.name]
        padded = (list(local_shape(value.shape, layout, self.sizes)),) if value.name in self.step.unpadded else ()
        node = self._attribute(value.name, name if self.unsharded and not padded else f"{name}_stored")
        if padded or not self.unsharded:
            node = self._node("call_function", storage.to_local, (node, *padded), name)
        self.values[value.name, layout] = node

    def _output(self, output: Output) -> fx.Node:
        """The local part of an output, without padding."""
        layout, shape = self.assignment.outputs[output.path], self.program.values[output.value].shape
        node = self._value(output.value, layout)
        for dim, (size, true) in enumerate(zip(shape, self.step.unpadded.get(output.value, shape), strict=True)):
            if size != true:
                axes = [self.axes[axis] for axis, _ in digits(layout, dim)]
                name = f"{identifier(output.value)}_unpadded"
                node = self._node("call_function", storage.drop_padding, (node, dim, true, *axes), name)
        return node

    def _attribute(self, path: str, name: str) -> fx.Node:
        """A parameter or buffer of the module, by a function call if its name means something else to Python or fx."""
        if is_attribute(path, TAKEN):
            return self._node("get_attr", path, (), name)
        table = "_modules"
        if "." not in path:
            table = "_parameters" if path in {p.value.name for p in self.program.parameters} else "_buffers"
        entries = self._node("get_attr", table, (), table)
        return self._node("call_function", storage.tensor_by_name, (entries, path), name)

    def _convert(self, value: Value, step: Conversion) -> None:
        name, alone = f"{identifier(value.name)}_{SUFFIXES[step.primitives[0]]}", Bucket(level=0, steps=((value.name, step),))
        function, position = collectives.conversion_call(step, value.shape, self.sizes)
        axis = self.axes[step.axis]
        source = self._value(value.name, step.source)
        arguments = (source, axis, *position)
        if self.bucket_calls.reduce_dtype(alone):  # only buckets reduce gradients in another dtype
            pending = self._call_node(self.bucket_calls.start(alone, [source], axis), f"{name}_pending")
            values = self._call_node(self.bucket_calls.wait(alone, pending, axis, self._gathers_again(alone)), f"{name}_bucket")
            node = self._node("call_function", operator.getitem, (values, 0), name)
        elif (value.name, step) in self.assignment.recompute.steps:
            recompute = (self.rematerializer, function.__name__, *arguments)
            node = self._node("call_function", rematerialize.recompute_conversion, recompute, name)
        else:
            kwargs: dict[str, object] = {"in_place": True} if (value.name, step) in self.in_place else {}
            node = self._node("call_function", function, arguments, name, kwargs)
        if self.deferred and step.primitives[1] in COLLECTIVES and value.name in weights(self.program):
            cut = self._node("call_function", cut_weights, (self.deferred, [node]), f"{name}_cut")
            node = self._node("call_function", operator.getitem, (cut, 0), f"{name}_whole")
        self._add(value.name, step.target, node)

    def _start(self, bucket: Bucket) -> None:
        """Start the conversion of a bucket of weights."""
        number = self.prefetch.buckets.index(bucket)
        sources = [self._value(weight, step.source) for weight, step in bucket.steps]
        call = self.bucket_calls.start(bucket, sources, self.axes[bucket.axis], number if self.once else None)
        self.pending[bucket] = self._call_node(call, f"bucket_{number}_pending")

    def _wait(self, bucket: Bucket) -> None:
        """Wait for the weights of a bucket."""
        number, axis, pending = self.prefetch.buckets.index(bucket), self.axes[bucket.axis], self.pending[bucket]
        call = self.bucket_calls.wait(bucket, pending, axis, self._gathers_again(bucket), number if self.once else None)
        node = self._call_node(call, f"bucket_{number}")
        if self.accumulator and not bucket.moved and not self.once:
            accumulated = (self.accumulator, number, node)
            node = self._node("call_function", accumulate_gradients, accumulated, f"bucket_{number}_accumulated")
        if self.deferred and bucket.moved and not self.once:
            node = self._node("call_function", cut_weights, (self.deferred, node), f"bucket_{number}_cut")
        for index, (name, step) in enumerate(bucket.steps):
            item = f"{identifier(name)}_{SUFFIXES[step.primitives[0]]}"
            self.values[name, step.target] = self._node("call_function", operator.getitem, (node, index), item)

    def _gathers_again(self, bucket: Bucket) -> fx.Node | None:
        """The rematerializer, if the plan gathers the bucket again in the backward."""
        return self.rematerializer if self.assignment.recompute.steps.issuperset(bucket.steps) else None

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
        if self.training:
            self._switch(op, arguments, named)
        if own := distributed(self.fits[op.name], candidate):
            axis, form = own
            return self._run(op, form.name, [self.axes[axis], *arguments], identifier(op.name), named)
        if op.name in self.deferrable:
            return self._run(op, f"deferred_{aten(op.target)}", [self.deferred, *arguments], identifier(op.name), named)
        if not is_random(op, self.fits[op.name]):
            return self._run(op, target, arguments, identifier(op.name), named)
        split = [self.axes[a] for a, form in enumerate(candidate.forms) if form[0] == "S"]
        index, self.random_ops = self.random_ops, self.random_ops + 1
        seeded = (target, self.rng_state, index, split, *arguments)
        if self.recomputed.repeats(op):
            given = (self.rematerializer, *seeded)
            return self._node("call_function", rematerialize.recompute_seeded, given, identifier(op.name), named)
        return self._node("call_function", random.seeded, seeded, identifier(op.name), named)

    def _switch(self, op: Op, arguments: list[object], named: dict[str, object]) -> None:
        """Make the flag of an op, or its rate if it has no flag, follow the module's; off stays off."""
        flag, rate = training_flag(op), row_of(op).rate
        if not flag and not (rate and is_random(op, self.fits[op.name])):
            return
        name = flag or rate
        place = [parameter.name for parameter in parameters(op.target)].index(name)
        now = arguments[place] if place < len(arguments) else named.get(name)
        if flag and now is not True:
            return
        made = self.training
        if not flag:
            made = self._node("call_function", random.dropout_rate, (now, self.training), f"{identifier(op.name)}_dropout_p")
        if place < len(arguments):
            arguments[place] = made
        else:
            named[name] = made

    def _run(self, op: Op, target: Target, arguments: list[object], name: str, named: dict[str, object]) -> fx.Node:
        """Call an ATen operator, or a parallel operator by its name; recomputed in the backward if the plan says so."""
        if self.recomputed.repeats(op):
            function = rematerialize.recompute_parallel_op if isinstance(target, str) else rematerialize.recompute_op
            return self._node("call_function", function, (self.rematerializer, target, *arguments), name, named)
        function = OPS[target] if isinstance(target, str) else target
        return self._node("call_function", function, tuple(arguments), name, named)

    def _results(self, op: Op, candidate: Candidate, node: fx.Node) -> None:
        if not op.several:
            self._add(op.results[0].name, candidate.results[0], node)
            return
        for index, (result, layout) in enumerate(zip(op.results, candidate.results, strict=True)):
            item = self._node("call_function", operator.getitem, (node, index), f"{identifier(op.name)}_item_{index}")
            self._add(result.name, layout, item)

    def _add(self, name: str, layout: Layout, node: fx.Node) -> None:
        """Record the node of a value in a layout, offloaded if the plan says so."""
        if (name, layout) in self.assignment.recompute.offload:
            node = self._node("call_function", rematerialize.offload, (self.rematerializer, node), f"{node.name}_offloaded")
        self.values[name, layout] = node

    def _argument(self, argument: Argument, feed: Iterable[fx.Node]) -> object:
        """Convert an argument for fx: nodes for values, in order; this rank's device for devices; lists for tuples."""
        if isinstance(argument, tuple):
            return [self._argument(part, feed) for part in argument]
        if isinstance(argument, Ref):
            return next(iter(feed))
        return self.context.device if isinstance(argument, torch.device) else argument


__all__ = ["emit"]
