"""Micro-batches: the program of one part of the batch, which a step runs on one part after the other.

    x: float32[8, 3]                     x: float32[2, 3]
    t: int64[8]                          t: int64[2]              hoisted, of the whole batch:
    s = cross_entropy(x, t, sum)         n: float32[]             n = sum(ne(t, -100))
    n = sum(ne(t, -100))           ->    s = cross_entropy(x, t, sum)
    l = div(s, n)                        l = div(s, n)            the loss is the sum of l over four runs

The runs are a mesh axis in time: by the same rules each value is over the runs split, addends (P), or the same in all (I; its
gradient is the sum over the runs, as for R). Between runs nothing is sent, so that there are no conversions but these: what
depends on arguments and buffers alone is hoisted out of the loop where a run needs more of it than its own part, a constant is
made in part, and what is the same in every run, also the number in 1 - x, is an addend if it is divided by how many runs there
are. If an operator can then be run in none of its ways, it mixes the samples of the batch, and there are no micro-batches.

A step writes a buffer with what the whole batch would write: what it held before is hoisted, so that each run computes the same
from it, as the power iteration of a spectral norm, and writes that. What depends on the samples of a run is not the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from autopar.analysis.block_counts import block_counts
from autopar.analysis.fits import fit_of
from autopar.analysis.recomputability import is_random
from autopar.analysis.signatures import signature
from autopar.errors import ConstraintError
from autopar.ir.builder import Builder, kinds, stem
from autopar.ir.layout import I, P, R, State, local_shape, split
from autopar.ir.program import Argument, Op, Output, Program, Ref, Static, Value, elements, substitute
from autopar.ir.schema import bound, packed
from autopar.ir.training_step import MicrobatchLoop, TrainingStep
from autopar.operators import OpSharding, fit, localise, row_of, scale, writes
from autopar.passes.dead_code_elimination import dead
from autopar.search_space.candidates import INVARIANT, Candidate, candidate, candidates, parts_of

AHEAD = "ahead:"  # in the name of an input that is hoisted, before that of the value
HOISTED = 1000.0  # effort of an element that is hoisted, in conversions that a run does itself: the last resort


def microbatches(program: Program, runs: int) -> TrainingStep:
    """The step that runs the program on `runs` equal parts of the batch in turn.

    The batch is dim 0 of each input that is as long as the first one's. Raises ConstraintError if it cannot be cut into so many
    equal parts, or if the program mixes its samples, writes values that depend on them into a buffer, needs what it draws both
    whole and in parts, or returns no scalar to differentiate.
    """
    if runs == 1:
        return TrainingStep(program=program)
    _check(program, runs)
    return _Cutter(program, runs).cut()


def batch_of(program: Program) -> int:
    """The number of samples in the whole batch; 0 if the first input has no dim."""
    return next((size for value in program.inputs[:1] for size in value.shape), 0)


def _check(program: Program, runs: int) -> None:
    batch, what = batch_of(program), f"a step cannot run in {runs} micro-batches"
    if runs < 1 or not batch or batch % runs:
        raise ConstraintError(f"{what}: the batch is {batch}", fix=f"microbatches= a divisor of {batch}" if batch else "")
    outputs = [program.values[output.value] for output in program.outputs]
    if not any(value.requires_grad and not value.shape for value in outputs):
        raise ConstraintError(f"{what}: the model returns no loss", fix="return the loss from forward, or microbatches=1")


class _Cutter:
    """Builds one program; `states` holds the state of each old value over the runs, `refs` the new values for it.

    A value without a state is not computed in the runs: the needed part is hoisted, as everything in `hoistable` can be.
    """

    def __init__(self, program: Program, runs: int) -> None:
        self.program, self.runs, self.sizes = program, runs, (runs,)
        self.fits = {op.name: _undistributed(fit_of(program, op.name)) for op in program.ops}
        self.blocks = block_counts(program, self.fits)
        self.states = dict.fromkeys(program.values, I)
        self.refs = {(name, I): Ref(name) for name in program.values if name not in program.producer}
        self.makers: dict[tuple[str, State], Candidate | None] = {}
        self.known: dict[object, list[Candidate]] = {}
        batch = batch_of(program)
        for value in program.inputs:
            if value.shape[:1] == (batch,):
                self.states[value.name] = split(0, batch // runs)
                self.refs[value.name, self.states[value.name]] = self.refs.pop((value.name, I))
        self.of_batch = {value.name for value in program.inputs if self.states[value.name] != I}
        self.drawn: set[str] = set()  # what is computed from random numbers, of which each run has its own
        self.written = {name for op in program.ops for name in writes(op)}
        self.rewriting: list[Op] = []  # ops that would write a buffer in each run, with other numbers
        given = (*program.inputs, *(buffer.value for buffer in program.buffers))
        self.hoistable = {value.name for value in given if not value.requires_grad}
        self.hoisted: list[tuple[str, State]] = []
        inputs = [replace(value, shape=self._shape(value, self.states[value.name])) for value in program.inputs]
        self.builder = Builder(inputs, program.parameters, program.buffers)

    def cut(self) -> TrainingStep:
        for op in self.program.ops:
            self._op(op)
        for op in self.rewriting:
            self._refuse_write(op)
        ends = [(output, *self._output(output)) for output in self.program.outputs]
        made = dead(self.builder.program(replace(output, value=ref.name) for output, ref, _ in ends))
        self._refuse_other_draws(made)
        given = [self.states[value.name] for value in self.program.inputs]
        loop = MicrobatchLoop(
            count=self.runs,
            hoisted=self._hoisted() if self.hoisted else None,
            inputs=(*given, *(state for _, state in self.hoisted)),
            outputs=tuple(state for _, _, state in ends),
        )
        return TrainingStep(program=made, loop=loop)

    def _op(self, op: Op) -> None:
        """Emit an op in its cheapest way, and record the states of its results."""
        if self._certain(op):
            self.hoistable.update(result.name for result in op.results)
        if is_random(op, self.fits[op.name]) or not self.drawn.isdisjoint(op.operands):
            self.drawn.update(result.name for result in op.results)
        if not self.written.isdisjoint(op.operands) and not row_of(op).writes:  # which writes where it mixes
            self._of_written(op)
            return
        ways = [candidate(op, self.fits[op.name], self.program.values, (INVARIANT,))]
        if not self.of_batch.isdisjoint(op.operands):
            self.of_batch.update(result.name for result in op.results)
            ways = self._ways(op)
        chosen = min(ways, key=lambda way: self._effort_of(op, way))
        effort = self._effort_of(op, chosen)
        if effort >= HOISTED and op.results[0].name in self.hoistable:
            self._leave(op)
            return
        if math.isinf(effort):
            if op is self.program.op[op.name] and (shared := self._shared(op)):
                self._op(shared)
                return
            self._refuse_mixing(op)
        self._emit(op, chosen)
        self.states |= {result.name: _state(layout[0]) for result, layout in zip(op.results, chosen.results, strict=True)}

    def _of_written(self, op: Op) -> None:
        """Omit an op that reads a buffer before it is written; emit one that writes, if all runs write the same."""
        if self._certain(op):
            self._leave(op)
            return
        whole = candidate(op, self.fits[op.name], self.program.values, (INVARIANT,))
        if (
            op.target != "aten.copy_.default"
            or op.operands[1] in self.written | self.drawn
            or math.isinf(self._effort_of(op, whole))
        ):
            self.rewriting.append(op)
            return
        self._emit(op, whole)

    def _leave(self, op: Op) -> None:
        """Omit an op from the runs: the needed results are hoisted."""
        for result in op.results:
            del self.states[result.name]

    def _ways(self, op: Op) -> list[Candidate]:
        """All candidates of an op, shared by ops with the same signature and block counts."""
        values, names = self.program.values, (*op.operands, *(result.name for result in op.results))
        fitted = self.fits[op.name]
        told = (fitted.linear, fitted.own) if fitted else ()  # what is known of an op beside its signature
        kind = signature(op, values), told, tuple(self.blocks[name] for name in names)
        if kind not in self.known:
            self.known[kind] = candidates(op, fitted, values, self.sizes, self.blocks)
        return self.known[kind]

    def _shared(self, op: Op) -> Op | None:
        """An op that is linear except for an added number, as in 1 - x, with a share of that number per run; else None."""
        groups, named, fitted = row_of(op).linear, bound(op), self.fits[op.name]
        numbers = {name: number for name in itertools.chain(*groups) if isinstance(number := named[name], int | float)}
        without = fit(_with(op, dict.fromkeys(numbers, 0)), self.program.values) if numbers else None
        if fitted is None or without is None or without.linear == fitted.linear:
            return None
        self.fits[op.name] = replace(fitted, linear=without.linear)
        return _with(op, {name: number / self.runs for name, number in numbers.items()})

    def _certain(self, op: Op) -> bool:
        """Whether an op is deterministic, has no gradient, and needs no weights."""
        fitted = self.fits[op.name]
        able = fitted is not None and not (fitted.random or op.requires_grad or writes(op))
        return able and self.hoistable.issuperset(op.operands)

    def _refuse_mixing(self, op: Op) -> None:
        """Refuse an op that cannot run in any way, naming what it reads from the samples: the sum over them, if any."""
        if writer := self._writer(op):
            self._refuse_write(writer)
        fitted, reads = self.fits[op.name], [name for name in op.operands if self.states.get(name, I) != I]
        summed = next((self._sum(name) for name in reads if self.states[name] == P), None)
        counting = next((one for one in (summed, op) if one and bound(one).get("scale_grad_by_freq")), None)
        if counting:
            why = f"{counting.target} scales the gradient of a row by how often the batch reads it (scale_grad_by_freq=True)"
            self._refuse(why, counting, "microbatches=1, or scale_grad_by_freq=False")
        if fitted and summed:
            why = f"what {summed.target} adds up over the samples of the batch is needed whole, by {op.target}"
            fix = "microbatches=1, or a model without that sum (a router's load-balancing loss, say)"
            apart = {"summed at": summed.source} if summed.source != op.source else {}
            self._refuse(why, op, fix, value=summed.results[0], **apart)
        why = "mixes the samples of the batch" if fitted else "has no rule that says what becomes of the batch"
        value = next((self.program.values[name] for name in reads), None)
        self._refuse(f"{op.target} {why}", op, value=value)

    def _writer(self, op: Op) -> Op | None:
        """The op that writes values computed from an op's results into a buffer, if these have no gradient."""
        found = {result.name for result in op.results if not op.requires_grad}
        for later in self.program.ops:
            if not found.isdisjoint(later.operands):
                if self.written.intersection(writes(later)):
                    return later
                found.update(result.name for result in later.results)
        return None

    def _refuse_write(self, op: Op) -> None:
        """Refuse an op that writes or reads a buffer to which each run would write different numbers."""
        buffer = next(name for name in op.operands if name in self.written)
        fix = "microbatches=1; or write what depends on no sample, outside of forward (a running mean, a queue)"
        self._refuse(f"each of them would write {buffer}", op, fix)

    def _refuse_other_draws(self, made: Program) -> None:
        """Refuse what is drawn whole and once more in parts: these are other numbers."""
        for op in filter(lambda op: is_random(op, self.fits[op.name]), self.program.ops):
            names = {result.name for result in op.results}
            drawn = {state for (name, state), ref in self.refs.items() if name in names and ref.name in made.values} - {P}
            if len(drawn) > 1:
                why = f"what {op.target} draws is needed whole by some operators, and in parts by others"
                self._refuse(why, op, "microbatches=1, or no sum over what is drawn (a loss divided by a mask's)")

    def _sum(self, name: str) -> Op:
        """The op that has added up the samples, of a value that has addends in the runs."""
        earlier: str | None = name
        while earlier:
            op = self.program.producer[earlier]
            earlier = next((name for name in op.operands if self.states.get(name) == P), None)
        return op

    def _refuse(self, why: str, op: Op, fix: str = "microbatches=1, or treat every sample by itself", **where: object) -> None:
        what = f"a step cannot run in {self.runs} micro-batches: {why}"
        raise ConstraintError(what, op=op.name, module=op.module or "the model itself", **where, at=op.source, fix=fix)

    def _effort_of(self, op: Op, way: Candidate) -> float:
        """The cost of running an op in this way; running all of it in every run is refused if a part would do."""
        parted = any(self.states.get(name, I).kind == "S" for name in op.operands)
        if parted and way.forms[0][0] in "IR":
            return math.inf
        return sum(self._effort(name, _state(layout[0])) for name, layout in zip(op.operands, way.operands, strict=True))

    def _effort(self, name: str, want: State) -> float:
        """The cost of having a value in this state in every run; infinite if impossible."""
        have = self.states.get(name)
        if have == want:
            return 0.0
        if want == P:
            return 1.0 if have == I and self.program.values[name].dtype.is_floating_point else math.inf
        if maker := self._maker(name, want):
            return 1.0 + self._effort_of(self.program.producer[name], maker)
        hoists = name in self.hoistable and not want.own  # a part of what is sorted as a whole is in no order of a run's own
        return HOISTED * elements(self._shape(self.program.values[name], want)) if hoists else math.inf

    def _maker(self, name: str, want: State) -> Candidate | None:
        """How the producer of a value that does not depend on the batch makes a part of it; None if it does not."""
        if (name, want) not in self.makers:
            op = self.program.producer.get(name) if name not in self.of_batch else None
            op = op if op and self.written.isdisjoint(op.operands) else None
            self.makers[name, want] = self._making(op, name, want) if op else None
        return self.makers[name, want]

    def _making(self, op: Op, name: str, want: State) -> Candidate | None:
        fitted, place = self.fits[op.name], [result.name for result in op.results].index(name)
        if want.kind != "S" or fitted is None:
            return None
        ways = self._ways(op)
        able = [way for way in ways if way.results[place] == (want,) and math.isfinite(self._effort_of(op, way))]
        return min(able, key=lambda way: self._effort_of(op, way), default=None)

    def _ref(self, name: str, want: State) -> Ref:
        """The value in the wanted state, converted if necessary."""
        if (name, want) not in self.refs:
            if want == P:
                (self.refs[name, want],) = self.builder.emit("aten.div.Tensor", (self._ref(name, I), self.runs))
            elif maker := self._maker(name, want):
                self._emit(self.program.producer[name], maker)
            else:
                self.refs[name, want] = self._hoist(name, want)
        return self.refs[name, want]

    def _hoist(self, name: str, want: State) -> Ref:
        """A value computed once per step, as an additional input of the micro-batch program."""
        old = self.program.values[name]
        value = replace(old, name=f"{AHEAD}{name}{'' if want == I else '/part'}", shape=self._shape(old, want))
        self.hoisted.append((name, want))
        self.builder.inputs += (value,)
        self.builder.values[value.name] = value
        return Ref(value.name)

    def _emit(self, op: Op, way: Candidate) -> None:
        """Append an op on the part of one run."""
        values, fitted = self.program.values, self.fits[op.name]
        feed = iter([self._ref(name, _state(layout[0])) for name, layout in zip(op.operands, way.operands, strict=True)])
        inside = [self._shape(values[name], layout[0]) for name, layout in zip(op.operands, way.operands, strict=True)]
        outside = [self._shape(result, layout[0]) for result, layout in zip(op.results, way.results, strict=True)]
        cut = parts_of(fitted, way, self.sizes)
        args, kwargs = localise(op, fitted, inside, outside, cut) if fitted else (op.args, op.kwargs)

        def change(leaf: Ref | Static) -> Argument:
            return next(feed) if isinstance(leaf, Ref) else leaf

        part = tuple(replace(result, shape=shape) for result, shape in zip(op.results, outside, strict=True))
        refs = self.builder.emit(
            op.target,
            tuple(substitute(argument, change) for argument in args),
            tuple((name, substitute(argument, change)) for name, argument in kwargs),
            module=op.module,
            source=op.source,
            results=kinds(replace(op, results=part)),
            stem=stem(op),
        )
        if fitted and (divisor := scale(op, fitted, cut)) > 1:
            refs = self.builder.emit("aten.div.Tensor", (refs[0], divisor), module=op.module, source=op.source)
        for result, layout, ref in zip(op.results, way.results, refs, strict=True):
            self.refs[result.name, _state(layout[0])] = ref

    def _output(self, output: Output) -> tuple[Ref, State]:
        """An output and how those of the runs are combined; a gradient of a value that is the same in every run counts once."""
        value, state = self.program.values[output.value], self.states.get(output.value, I)
        if state == I and value.requires_grad and not value.shape:
            state = P
        if state == I and value.name in self.drawn:  # in the parts that the runs draw, where they do
            state = next((of for name, of in self.refs if name == value.name and of.kind == "S"), I)
            if state == I:
                self._refuse(f"each of them draws another {output.path}", self.program.producer[value.name])
        if state.own and value.name in self.hoistable:
            state = I
        mixed = state.kind == "S" and state.stride * self.runs != value.shape[state.dim]
        if state.own or mixed:
            self._refuse(f"the samples of {output.path} are not in the order of the batch", self.program.producer[value.name])
        return self._ref(value.name, state), state

    def _hoisted(self) -> Program:
        """The graph that is computed once per step, from the whole batch."""
        needed = {name for name, _ in self.hoisted}
        alive: list[Op] = []
        for op in reversed(self.program.ops):
            if not needed.isdisjoint(result.name for result in op.results):
                alive.append(op)
                needed.update(op.operands)
        outputs = tuple(Output(value=name, path=name) for name, _ in self.hoisted)
        return replace(self.program, ops=tuple(reversed(alive)), outputs=outputs)

    def _shape(self, value: Value, state: State) -> tuple[int, ...]:
        return local_shape(value.shape, (state,), self.sizes)


def _with(op: Op, arguments: Mapping[str, Argument]) -> Op:
    args, kwargs = packed(op.target, {**bound(op), **arguments})
    return replace(op, args=args, kwargs=kwargs)


def _undistributed(fitted: OpSharding | None) -> OpSharding | None:
    """Without distributed forms: runs follow each other and cannot communicate. Each may sort its own rows."""
    return replace(fitted, distributed=()) if fitted else None


def _state(state: State) -> State:
    """A state over the runs: nothing need be done for R to be I."""
    return I if state == R else state


def counts(program: Program) -> Iterator[int]:
    """Possible numbers of micro-batches, from one up to one per sample."""
    batch = batch_of(program)
    yield from (runs for runs in range(1, max(1, batch) + 1) if batch % runs == 0)


__all__ = ["batch_of", "counts", "microbatches"]
