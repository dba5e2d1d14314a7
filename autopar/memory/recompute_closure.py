"""The recomputation closure: which recomputations allowed by an assignment the backward really needs.

The program runs on meta tensors with the local shapes and strides of one rank, which shows what autograd saves for each op.
Saved tensors are needed in the backward, and a tensor that is recomputed needs its own inputs in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import replace

import torch
from torch.utils.weak import WeakIdKeyDictionary

from autopar.analysis.analysis import Analysis
from autopar.analysis.recomputability import is_alias, may_copy
from autopar.analysis.saved_tensors import SavedTensors, saved_here
from autopar.analysis.view_or_copy import is_view
from autopar.ir.conversion import Conversion
from autopar.ir.layout import Layout, local_shape
from autopar.ir.program import Op
from autopar.operators import localise, view_of
from autopar.search_space.assignment import Assignment, RecomputeChoice
from autopar.search_space.candidates import distributed, parts_of

Use = tuple[str, Layout]  # a value in one of its layouts


_FOUND: MutableMapping[Assignment, RecomputeChoice] = WeakIdKeyDictionary()  # prices, messages and memory all need it


def reruns(analysis: Analysis, chosen: Assignment) -> RecomputeChoice:
    """The ops and conversions that the backward recomputes, and the values that it fetches from the host."""
    if chosen.recompute == RecomputeChoice():
        return chosen.recompute
    if chosen not in _FOUND:
        _FOUND[chosen] = _Walk(analysis, chosen).asked()
    return _FOUND[chosen]


class _Walk:
    """One walk over the program; `tensors` are the local values computed so far, on the meta device."""

    def __init__(self, analysis: Analysis, chosen: Assignment) -> None:
        self.analysis, self.chosen, self.program = analysis, chosen, analysis.program
        self.into = {(name, step.target): step for name, route in chosen.routes.items() for step in route}
        self.tensors: dict[Use, torch.Tensor] = {}
        self._ran: dict[object, tuple[SavedTensors, list[torch.Tensor]]] = {}  # members of a class that run alike run once

    def asked(self) -> RecomputeChoice:
        """The closure of autograd's saved tensors under the chosen recomputations and offloads."""
        recompute, program = self.chosen.recompute, self.program
        ops: set[str] = set()
        steps: set[tuple[str, Conversion]] = set()
        offload: set[Use] = set()
        known: set[Use] = set()
        asked: list[Use] = []
        for op in program.ops:
            kept = self._kept(op)
            if any(result.name in self.analysis.backward for result in op.results):
                asked += self._saved(op, kept)
                if kept.internal_bytes and op.name in recompute.ops:
                    asked.append((op.results[0].name, self.chosen.ops[op.name].results[0]))
        while asked:
            use = asked.pop()
            if use in known:
                continue
            known.add(use)
            step, producer = self.into.get(use), program.producer.get(use[0])
            if use in recompute.offload and not self._recomputed(use):
                offload.add(use)
            elif step is not None:
                if (use[0], step) in recompute.steps:
                    steps.add((use[0], step))
                if (use[0], step) in recompute.steps or is_alias(step):
                    asked.append((use[0], step.source))
            elif producer is not None and producer.name in recompute.ops:
                ops.add(producer.name)
                asked += self._read(producer)
            elif producer is not None and view_of(producer, program.values):
                asked += self._read(producer)[:1]
        return RecomputeChoice(ops=frozenset(ops), steps=frozenset(steps), offload=frozenset(offload))

    def _recomputed(self, use: Use) -> bool:
        """Whether a value in a layout is recomputed, or is a view of storage that is restored: it need not be offloaded."""
        step, producer, recompute = self.into.get(use), self.program.producer.get(use[0]), self.chosen.recompute
        if step is not None:
            return (use[0], step) in recompute.steps or (is_alias(step) and self._restored((use[0], step.source)))
        if producer is None:
            return False
        if view_of(producer, self.program.values):
            source = self._read(producer)[0]
            copied = may_copy(producer) and not is_view(self._tensor(source), tuple(self.tensors[use].shape))
            return self._restored(source) or (copied and producer.name in recompute.ops)
        return producer.name in recompute.ops

    def _restored(self, use: Use) -> bool:
        return use in self.chosen.recompute.offload or self._recomputed(use)

    def _read(self, op: Op) -> list[Use]:
        return list(zip(op.operands, self.chosen.ops[op.name].operands, strict=True))

    def _saved(self, op: Op, kept: SavedTensors) -> Iterator[Use]:
        """The operands and results that autograd saves of an op."""
        read = self._read(op)
        yield from (read[place] for place in kept.operands)
        yield from ((op.results[place].name, self.chosen.ops[op.name].results[place]) for place in kept.results)

    def _kept(self, op: Op) -> SavedTensors:
        """What autograd saves for an op on one rank; records the results in `tensors`."""
        candidate, operands = self.chosen.ops[op.name], [self._tensor(use) for use in self._read(op)]
        specs = tuple((x.shape, x.stride(), x.dtype, x.requires_grad) for x in operands)
        key = self.analysis.classes.of[op.name], candidate, specs
        if key not in self._ran:
            self._ran[key] = self._run(op, operands)
        kept, results = self._ran[key]
        for result, layout, tensor in zip(op.results, candidate.results, results, strict=True):
            self.tensors[result.name, layout] = tensor
        return kept

    def _run(self, op: Op, operands: list[torch.Tensor]) -> tuple[SavedTensors, list[torch.Tensor]]:
        """What autograd saves for an op on one rank with these operands, and its results."""
        values, sizes, candidate = self.program.values, self.analysis.sizes, self.chosen.ops[op.name]
        fitted = self.analysis.fits[op.name]
        inside = [local_shape(values[name].shape, layout, sizes) for name, layout in self._read(op)]
        outside = [local_shape(r.shape, x, sizes) for r, x in zip(op.results, candidate.results, strict=True)]
        parallel = distributed(fitted, candidate) is not None
        if fitted and not parallel:
            args, kwargs = localise(op, fitted, inside, outside, parts_of(fitted, candidate, sizes))
            op = replace(op, args=args, kwargs=kwargs)
        return saved_here(op, values, operands, outside, cpu=self.analysis.cpu, parallel=parallel)

    def _tensor(self, use: Use) -> torch.Tensor:
        """A value on one rank: contiguous after a conversion, unless that aliases it or keeps its strides."""
        if use not in self.tensors:
            name, layout = use
            step, value = self.into.get(use), self.program.values[name]
            if step is not None and is_alias(step):
                self.tensors[use] = self._tensor((name, step.source))
            elif step is not None and step.primitives[0] == "keep":
                self.tensors[use] = torch.empty_like(self._tensor((name, step.source)), requires_grad=value.requires_grad)
            else:
                shape = local_shape(value.shape, layout, self.analysis.sizes)
                self.tensors[use] = torch.empty(shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)
        return self.tensors[use]
