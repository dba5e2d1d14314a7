"""Building programs op by op, and rewriting them.

Names are assigned in one place: the results of an op are called `module.path:op#n`, where n counts the ops of this short name
in this module from 0, and `module.path:op#n.0`, `.1`, ... if the op returns several tensors. A copied op keeps the part before
its number, as does one whose operator is replaced (`autopar.passes.no_dropout`): plans refer to ops by that.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from autopar.ir.program import Argument, Op, Output, Parameter, Program, Ref, Static, Value, substitute, text
from autopar.ir.shape_inference import Kind, infer, kind

Keywords = tuple[tuple[str, Argument], ...]


class Builder:
    """Collects the ops of a program in order, names them and infers what they return."""

    def __init__(self, inputs: Iterable[Value], parameters: Iterable[Parameter], buffers: Iterable[Parameter]) -> None:
        self.inputs = tuple(inputs)
        self.parameters = tuple(parameters)
        self.buffers = tuple(buffers)
        self.ops: list[Op] = []
        given = (*self.inputs, *(p.value for p in self.parameters), *(b.value for b in self.buffers))
        self.values = {value.name: value for value in given}
        self._count: Counter[str] = Counter()
        self._known: dict[str, Kind | tuple[Kind, ...]] = {}

    def emit(
        self,
        target: str,
        args: tuple[Argument, ...],
        kwargs: Keywords = (),
        *,
        module: str = "",
        source: str = "",
        results: Kind | tuple[Kind, ...] | None = None,
        stem: str = "",
    ) -> tuple[Ref, ...]:
        """Append an op and return its results, whose kinds are inferred on the meta device unless given.

        `stem` is its name up to the number; by default, its module and short name.
        """
        if results is None:
            results = self.infer(target, args, kwargs)
        stem = stem or f"{module}:{short(target)}"
        while (name := f"{stem}#{self._count[stem]}") in self.values:  # an input or a parameter may have this name
            self._count[stem] += 1
        self._count[stem] += 1
        if isinstance(results, Kind):
            values: tuple[Value, ...] = (_value(name, results),)
        else:
            values = tuple(_value(f"{name}.{i}", result) for i, result in enumerate(results))
        self.values.update((value.name, value) for value in values)
        self.ops.append(Op(name=name, target=target, args=args, kwargs=kwargs, results=values, module=module, source=source))
        return tuple(Ref(value.name) for value in values)

    def infer(self, target: str, args: tuple[Argument, ...], kwargs: Keywords = ()) -> Kind | tuple[Kind, ...]:
        """The kinds of `target`'s results for these operands; inferred once for all calls that look alike."""
        key = f"{target}({', '.join(self._alike(a) for a in args)}; {', '.join(f'{k}={self._alike(a)}' for k, a in kwargs)})"
        if key not in self._known:
            self._known[key] = infer(target, args, kwargs, self.values.__getitem__)
        return self._known[key]

    def _alike(self, argument: Argument) -> str:
        if isinstance(argument, Ref):
            return str(kind(self.values[argument.name]))
        if isinstance(argument, tuple):
            return f"[{', '.join(map(self._alike, argument))}]"
        return text(argument)

    def program(self, outputs: Iterable[Output]) -> Program:
        """The finished program."""
        return Program(
            ops=tuple(self.ops),
            inputs=self.inputs,
            parameters=self.parameters,
            buffers=self.buffers,
            outputs=tuple(outputs),
        )


class Rewriter(Builder):
    """Builds a program from another one, op by op: each old op is kept, replaced or forwarded to a value that exists."""

    def __init__(self, old: Program) -> None:
        super().__init__(old.inputs, old.parameters, old.buffers)
        self.old = old
        self._now = {name: name for name in self.values}

    def new(self, argument: Argument) -> Argument:
        """An argument of the old program, translated to values of the new one."""

        def change(leaf: Ref | Static) -> Argument:
            return Ref(self._now[leaf.name]) if isinstance(leaf, Ref) else leaf

        return substitute(argument, change)

    def keep(
        self, op: Op, *, target: str = "", args: tuple[Argument, ...] | None = None, kwargs: Keywords | None = None
    ) -> None:
        """Copy an op, perhaps with another target or arguments (given as old values); its results keep their kinds."""
        self.put(
            op,
            target or op.target,
            tuple(self.new(a) for a in (op.args if args is None else args)),
            tuple((name, self.new(a)) for name, a in (op.kwargs if kwargs is None else kwargs)),
            kinds(op),
        )

    def put(self, op: Op, target: str, args: tuple[Argument, ...], kwargs: Keywords, results: Kind | tuple[Kind, ...]) -> None:
        """Emit an op in place of an old one, with as many results; its arguments refer to new values."""
        known = stem(op) if target == op.target else ""
        refs = self.emit(target, args, kwargs, module=op.module, source=op.source, results=results, stem=known)
        for result, ref in zip(op.results, refs, strict=True):
            self._now[result.name] = ref.name

    def beside(self, op: Op, target: str, args: tuple[Argument, ...], kwargs: Keywords = ()) -> Ref:
        """Emit an additional op next to `op`, with one result; its arguments refer to new values."""
        (ref,) = self.emit(target, args, kwargs, module=op.module, source=op.source)
        return ref

    def forward(self, old: str, new: Ref) -> None:
        """Replace an old value by an existing new one from here on."""
        self._now[old] = new.name

    def finish(self) -> Program:
        """The new program, with the old one's outputs."""
        return self.program(Output(value=self._now[o.value], path=o.path) for o in self.old.outputs)


def kinds(op: Op) -> Kind | tuple[Kind, ...]:
    """The kinds of an op's results, in the form that `infer` returns."""
    return tuple(map(kind, op.results)) if op.several else kind(op.results[0])


def stem(op: Op) -> str:
    """An op's name up to its number."""
    return op.name.rpartition("#")[0]


def short(target: str) -> str:
    """The short name of an operator: `aten.__and__.Tensor` is `and`."""
    return re.sub(r"^_+|_+$", "", target.split(".")[1])


def _value(name: str, found: Kind) -> Value:
    return Value(name=name, shape=found.shape, dtype=found.dtype, requires_grad=found.requires_grad)
