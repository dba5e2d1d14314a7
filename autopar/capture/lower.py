"""Lowers the exported fx graph to a Program: regions are inlined, in-place writes become values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind

from autopar.capture import autocast, buffers, functionalize, nodes, strided, traced_losses
from autopar.capture.cpu_tensors import not_contained
from autopar.capture.emission import Emission, Region
from autopar.capture.functionalize import Handle, Held, Storage, View
from autopar.capture.grouped_experts import grouped
from autopar.capture.meta_copy import MetaCopy
from autopar.capture.selected_ops import SelectedOp
from autopar.capture.selection import Selections, fixed, symbolic
from autopar.capture.signature import ModelCall
from autopar.capture.trace import Traced, varying
from autopar.errors import CaptureError
from autopar.ir.builder import Builder, Keywords
from autopar.ir.program import Argument, Output, Parameter, Program, Ref, Value, aten
from autopar.operators import writes

_COUNTER = "num_batches_tracked"  # written in place, like the running statistics that batch_norm updates


def lower(traced: Traced, skeleton: MetaCopy, call: ModelCall, empty: frozenset[sympy.Symbol] = frozenset()) -> Program:
    """The program of an exported model, with the row counts in `empty` taken as 0; raises CaptureError for anything that a
    program cannot express."""
    exported = traced.exported
    for spec in exported.graph_signature.output_specs:
        if spec.kind is not OutputKind.USER_OUTPUT:
            raise CaptureError(f"forward changes {spec.target}", fix="return the new value instead of storing it")
    inputs = [
        Value(name=path, shape=tuple(leaf.shape), dtype=leaf.dtype, requires_grad=leaf.requires_grad)
        for path, leaf in call.tensors
    ]
    builder = Builder(inputs, skeleton.parameters, skeleton.buffers)
    mutates = any(map(nodes.writes_in_place, nodes.graphs(exported.graph_module)))
    lowering = Lowering(builder=builder, mutates=mutates, selections=Selections(builder=builder, empty=empty))
    given = list(_given(traced, skeleton, call, builder))
    results = lowering.run(exported.graph_module, given, Region())
    if varies := next(filter(symbolic, exported.graph.output_node().all_input_nodes), None):
        raise varying("the shape of a result of forward", nodes.source(varies))
    buffers.keep(builder, [held for held in given if isinstance(held, Handle)])
    values = [functionalize.read(result) for result in results if isinstance(result, Handle)]
    program = builder.program(Output(value=ref.name, path=path) for ref, path in zip(values, traced.returned.ends, strict=True))
    return _marked(_kept(grouped(lowering.apart(program), lowering.selections)))


def _given(traced: Traced, skeleton: MetaCopy, call: ModelCall, builder: Builder) -> Iterator[Held]:
    """The values of the exported graph's placeholders, in order."""
    leaves, inputs = iter(call.leaves), dict(call.tensors)
    places = [node for node in traced.exported.graph.nodes if node.op == "placeholder"]
    for spec, place in zip(traced.exported.graph_signature.input_specs, places, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            path, _ = next(leaves)
            yield Handle(ref=Ref(path), storage=Storage(f"the input {path}")) if path in inputs else None
            continue
        target = spec.target or ""
        name = skeleton.first.get(target) or skeleton.names.get(id(traced.exported.constants.get(target)))
        if name is None:
            if place.users:
                raise not_contained(
                    traced.exported.constants.get(target), traced.left.trained, nodes.source(next(iter(place.users)))
                )
            yield None
            continue
        trained = spec.kind is InputKind.PARAMETER and builder.values[name].requires_grad
        owner = "the parameter " if trained else buffers.OWNER
        yield Handle(ref=Ref(name), storage=Storage(f"{owner}{name}"))


@dataclass(slots=True, kw_only=True)
class Lowering:
    """The walk over the exported graph and its regions."""

    builder: Builder
    mutates: bool
    selections: Selections
    emission: Emission = field(init=False)
    envs: list[dict[fx.Node, Held]] = field(default_factory=list)  # of the graph and the regions around the current position

    def __post_init__(self) -> None:
        self.emission = Emission(builder=self.builder)

    def run(self, module: fx.GraphModule, given: Sequence[Held], region: Region) -> tuple[Held, ...]:
        """Lower one graph whose placeholders are `given`; returns its results."""
        env: dict[fx.Node, Held] = {}
        places, needed = iter(given), nodes.needed(module.graph)
        self.envs.append(env)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(places)
            elif node.op == "output":
                self.envs.pop()
                results = _leaf(node.args[0], env, node)
                return results if isinstance(results, tuple) else (results,)
            elif node.op == "call_function" and node in needed:
                env[node] = self.call(node, module, env, region)
        raise AssertionError("a graph without output")

    def call(self, node: fx.Node, module: fx.GraphModule, env: dict[fx.Node, Held], region: Region) -> Held:
        """Lower one call: a region, an item of a tuple of results, an in-place write, or a plain op."""
        if node.target is operator.getitem:
            source, index = node.args
            held = env[source] if isinstance(source, fx.Node) else None
            if isinstance(held, tuple) and isinstance(index, int):
                return held[index]
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self.inline(node, module, env, region)
        nodes.refuse_transform(node)
        sized = isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))
        if sized and (number := fixed(node.meta["val"])) is not None:
            return number
        if sized or not isinstance(node.target, torch._ops.OpOverload):
            return Handle(ref=self.selected(node, region).number())
        if not nodes.mutates(node) and (any(map(symbolic, (node, *node.all_input_nodes))) or nodes.selects(node)):
            return self.rows(node, env, region)
        args = tuple(_leaf(argument, env, node) for argument in node.args)
        kwargs = tuple((name, _leaf(argument, env, node)) for name, argument in node.kwargs.items())
        if "as_strided" in str(node.target):
            return self.strided(node, args, region)
        if torch.Tag.inplace_view in node.target.tags:
            return self.turn(node, args, region)
        if nodes.writes(node.target):
            return self.mutate(node, args, kwargs, region)
        target = nodes.without_generator(traced_losses.meant(node.target), node.kwargs)
        if target != str(node.target):
            kwargs = tuple((name, held) for name, held in kwargs if name != "generator")
        return self.plain(node, target, args, kwargs, region)

    def selected(self, node: fx.Node, region: Region) -> SelectedOp:
        """A node that produces or uses rows selected by a mask."""

        def emit(target: str, args: tuple[Argument, ...], kwargs: Keywords) -> tuple[Ref, ...]:
            return self.emission.emit(node, target, args, kwargs, region)[0]

        return SelectedOp(selections=self.selections, node=node, emit=emit)

    def rows(self, node: fx.Node, env: dict[fx.Node, Held], region: Region) -> Held:
        """Lower an op that produces or uses rows selected by a mask."""
        args = tuple(_now(_leaf(argument, env, node)) for argument in node.args)
        kwargs = tuple((name, _now(_leaf(argument, env, node))) for name, argument in node.kwargs.items())
        found = tuple(Handle(ref=ref) for ref in self.selected(node, region).lower(args, kwargs))
        return found if isinstance(node.meta.get("val"), (list, tuple)) else found[0]

    def inline(self, node: fx.Node, module: fx.GraphModule, env: dict[fx.Node, Held], region: Region) -> Held:
        """Lower the graph of a region in place."""
        at = next((i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr"), -1)
        statics = node.args[:at]
        if str(node.target) == "wrap_with_set_grad_enabled":
            region = replace(region, grad=bool(statics[0]))
        elif str(node.target) == "wrap_with_autocast":
            region = replace(region, cast=autocast.dtype(statics) if statics[2] else None)
        else:
            fix = "write it without torch.cond, while_loop and the like"
            raise CaptureError(f"{node.target} contains a graph of its own", at=nodes.source(node), fix=fix)
        body = node.args[at]
        assert isinstance(body, fx.Node)
        inner = module.get_submodule(str(body.target))
        assert isinstance(inner, fx.GraphModule)
        return self.run(inner, [_leaf(argument, env, node) for argument in node.args[at + 1 :]], region)

    def plain(
        self, node: fx.Node, target: str, args: tuple[Held, ...], kwargs: tuple[tuple[str, Held], ...], region: Region
    ) -> Held:
        """Lower an op that does not write."""
        now = tuple(_now(a) for a in args)
        results, several = self.emission.emit(node, target, now, tuple((name, _now(a)) for name, a in kwargs), region)
        parent = _parent(node, args) if self.mutates else None
        handles = tuple(Handle(ref=ref) for ref in results)
        if parent is not None:
            handles = self.views(node, target, handles, parent, now[1:], region)
        return handles if several else handles[0]

    def views(
        self,
        node: fx.Node,
        target: str,
        fresh: tuple[Handle, ...],
        parent: Handle,
        rest: tuple[Argument, ...],
        region: Region,
    ) -> tuple[Handle, ...]:
        """The results as views of the op's first operand."""
        shapes = tuple(self.builder.values[handle.ref.name].shape for handle in fresh)

        def take(index: int) -> Callable[[Ref], Ref]:
            return lambda whole: self.emission.emit(node, target, (whole, *rest), (), region)[0][index]

        return tuple(
            Handle(
                ref=handle.ref,
                storage=parent.storage,
                seen=parent.storage.version,
                view=View(parent=parent, target=target, rest=rest, index=i, shapes=shapes, take=take(i)),
            )
            for i, handle in enumerate(fresh)
        )

    def strided(self, node: fx.Node, args: tuple[Held, ...], region: Region) -> Held:
        """Lower a view of memory as an index into its operand."""
        found, parent = strided.reading(node), args[0]
        sizes = tuple(node.meta["val"].shape)
        assert isinstance(parent, Handle)

        def emit(target: str, *arguments: Argument, **kwargs: Argument) -> Ref:
            return self.emission.emit(node, target, arguments, tuple(kwargs.items()), region)[0][0]

        def take(whole: Ref) -> Ref:
            return strided.taken(whole, found, sizes, emit)

        view = View(parent=parent, target=str(node.target), rest=(), index=0, shapes=(sizes,), take=take)
        ref = take(functionalize.read(parent))
        return Handle(ref=ref, storage=parent.storage, seen=parent.storage.version, view=view)

    def turn(self, node: fx.Node, args: tuple[Held, ...], region: Region) -> Held:
        """Lower an in-place change of a tensor's shape: from here on the tensor is a view of its former self.

        unsqueeze_(y, 0); use(y)        ->        use(unsqueeze(y, 0))
        """
        place, rest = args[0], tuple(map(_now, args[1:]))
        assert isinstance(place, Handle)
        if place.storage.owner and place.view is None:
            fix = "take the form that returns its result"
            raise CaptureError(f"{node.target} changes {place.storage.owner}", at=nodes.source(node), fix=fix)
        target = nodes.viewing(node)
        (ref,), _ = self.emission.emit(node, target, (functionalize.read(place), *rest), (), region)
        (view,) = self.views(node, target, (Handle(ref=ref),), place, rest, region)
        for env in self.envs:
            env.update((at, functionalize.replaced(held, place, view)) for at, held in env.items())
        return view

    def mutate(self, node: fx.Node, args: tuple[Held, ...], kwargs: tuple[tuple[str, Held], ...], region: Region) -> Held:
        """Lower an in-place write: compute the new value, and assign it to the tensor and all of its aliases.

        A buffer is left with its last value when the program ends.
        """
        place = dict(kwargs).get("out", args[0] if args else None)
        if not aten(str(node.target)):
            fix = "make it an operator that returns what it computes (mutates_args=())"
            raise CaptureError(f"{node.target} writes into an argument", at=nodes.source(node), fix=fix)
        if not isinstance(place, Handle) or not nodes.writes_one(node):
            said = f"{node.target} writes into {nodes.written(node)}"
            raise CaptureError(said, at=nodes.source(node), fix="use an operator that returns its result")
        now = tuple(_now(a) for a in args)
        keywords = tuple((name, _now(a)) for name, a in kwargs)
        if place.storage.owner.endswith(_COUNTER):
            self.emission.emit(node, str(node.target), now, keywords, region)
            return place
        buffer = place.storage.owner.startswith(buffers.OWNER)
        if place.storage.owner and not buffer:
            fix = "compute a new tensor instead of writing in place; or freeze the parameter, if no optimizer trains it"
            raise CaptureError(f"{node.target} changes {place.storage.owner}", at=nodes.source(node), fix=fix)
        before = functionalize.read(place)
        old = self.builder.values[before.name]
        self.refuse_unseen(node, place)
        self.refuse_rows(node, place, region)

        def emit(target: str, arguments: tuple[Argument, ...]) -> Ref:
            return self.emission.emit(node, target, arguments, (), Region())[0][0]

        new = self.result_in_place(node, now, keywords, region, old)
        if old.requires_grad and not region.grad:
            new = functionalize.straight_through(new, before, emit)
        if buffer and self.builder.values[new.name].requires_grad and not functionalize.detached(place):
            fix = "write it under torch.no_grad(), or what was detached"
            raise CaptureError(
                f"{node.target} writes what has a gradient into {place.storage.owner}", at=nodes.source(node), fix=fix
            )
        try:
            functionalize.write(place, new, emit, lambda ref: self.builder.values[ref.name])
        except LookupError as view:
            fix = "write into the whole tensor, or build it with torch.where, cat or stack"
            raise CaptureError(f"{node.target} writes through a view by {view}", at=nodes.source(node), fix=fix) from None
        return place

    def refuse_unseen(self, node: fx.Node, place: Handle) -> None:
        """Raise CaptureError for a write through `.data` into a tensor with a gradient: autograd does not notice it, and would
        compute the gradients of earlier ops from the new values."""
        if functionalize.detached(place) > 1 and any(
            self.builder.values[handle.ref.name].requires_grad for handle in functionalize.upwards(place)
        ):
            fix = "write it under no_grad, or build it with torch.where, cat or stack"
            raise CaptureError(
                f"{node.target} writes through .data into a tensor with a gradient", at=nodes.source(node), fix=fix
            )

    def refuse_rows(self, node: fx.Node, place: Handle, region: Region) -> None:
        """Raise CaptureError for a write into rows of a selection that have other readers."""
        if symbolic(node) and (
            not isinstance(node.args[0], fx.Node)
            or nodes.shares_memory(node, node.args[0])
            or (self.builder.values[place.ref.name].requires_grad and not region.grad)
        ):
            raise varying(f"the shape of what {node.target} writes", nodes.source(node))

    def result_in_place(self, node: fx.Node, args: tuple[Argument, ...], kwargs: Keywords, region: Region, old: Value) -> Ref:
        """The value of a tensor after an in-place write, in its shape and dtype."""
        name = aten(str(node.target))
        source = args[1] if len(args) > 1 else None
        if any(map(symbolic, (node, *node.all_input_nodes))):
            return self.selected(node, region).lower(args, kwargs)[0]
        match name, source:
            case (("copy_" | "fill_"), Ref()):
                new = source
            case (("copy_" | "fill_" | "zero_"), _):
                number = 0 if name == "zero_" else source
                ((new,), _) = self.emission.emit(node, "aten.full_like.default", (args[0], number), (), region)
            case "fill_diagonal_", _ if len(old.shape) == 2:
                ((line,), _) = self.emission.emit(node, "aten.diagonal.default", args[:1], (), region)
                ((full,), _) = self.emission.emit(node, "aten.full_like.default", (line, source), (), region)
                ((new,), _) = self.emission.emit(node, "aten.diagonal_scatter.default", (args[0], full), (), region)
            case "bernoulli_", None:
                ((new,), _) = self.emission.emit(node, "aten.bernoulli.p", (*args, 0.5), (), region)
            case _:
                target = nodes.returning(node)
                kwargs = (*((name, held) for name, held in kwargs if name != "out"), *nodes.as_made(target, old.dtype))
                ((new,), _) = self.emission.emit(node, target, args, kwargs, region)
        if self.builder.values[new.name].dtype != old.dtype:
            ((new,), _) = self.emission.emit(node, "aten.to.dtype", (new, old.dtype), (), region)
        if self.builder.values[new.name].shape != old.shape:
            ((new,), _) = self.emission.emit(node, "aten.expand.default", (new, old.shape), (), region)
        return new

    def apart(self, program: Program) -> Program:
        """If a scalar is differentiated, alias every other output that has a gradient, to make it a separate value."""
        kinds = [self.builder.values[output.value] for output in program.outputs]
        if not any(value.shape == () and value.requires_grad for value in kinds):
            return program
        outputs = []
        for output, value in zip(program.outputs, kinds, strict=True):
            if value.shape != () and value.requires_grad:
                producer = program.producer.get(output.value)
                at = (producer.module, producer.source) if producer else ("", "")
                (ref,) = self.builder.emit("aten.alias.default", (Ref(output.value),), module=at[0], source=at[1])
                output = replace(output, value=ref.name)
            outputs.append(output)
        return self.builder.program(outputs)


def _kept(program: Program) -> Program:
    """The program with those frozen parameters that it writes counted as buffers."""
    written = {name for op in program.ops for name in writes(op)}
    parameters = tuple(one for one in program.parameters if one.value.name not in written)
    moved = tuple(one for one in program.parameters if one.value.name in written)
    return replace(program, parameters=parameters, buffers=(*program.buffers, *moved))


def _marked(program: Program) -> Program:
    """The program with `used` set for its parameters and buffers."""
    used = {name for op in program.ops for name in op.operands} | {output.value for output in program.outputs}

    def mark(held: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
        return tuple(replace(one, used=one.value.name in used) for one in held)

    return replace(program, parameters=mark(program.parameters), buffers=mark(program.buffers))


def _leaf(argument: object, env: dict[fx.Node, Held], node: fx.Node) -> Held:
    """An fx argument as an argument of the program."""
    if isinstance(argument, fx.Node):
        return env.get(argument)
    if isinstance(argument, (list, tuple)):
        return tuple(_leaf(part, env, node) for part in argument)
    if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise varying("a number", nodes.source(node))
    return argument  # type: ignore[return-value]


def _now(held: Held) -> Argument:
    if isinstance(held, Handle):
        return functionalize.read(held)
    return tuple(map(_now, held)) if isinstance(held, tuple) else held


def _parent(node: fx.Node, args: tuple[Held, ...]) -> Handle | None:
    """The first operand, if the results are views of it."""
    first = args[0] if args else None
    source = node.args[0] if node.args else None
    if not isinstance(first, Handle) or not isinstance(source, fx.Node):
        return None
    result, operand = node.meta.get("val"), source.meta.get("val")
    result = result[0] if isinstance(result, (list, tuple)) and result else result
    if not isinstance(result, torch.Tensor) or not isinstance(operand, torch.Tensor):
        return None
    if not result.layout == operand.layout == torch.strided:  # a sparse tensor has no storage
        return None
    return first if result.untyped_storage()._cdata == operand.untyped_storage()._cdata else None
