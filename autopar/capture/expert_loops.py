"""Recognises loops over experts in a program: for each expert the rows of its tokens are taken, computed and put back.

mask of expert e       eq(chosen, e), or one_hot(chosen)[..., e]; any(eq(chosen, e), -1) of tokens that chose it anywhere
chosen                 the indices of the largest of as many scores as there are experts
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.capture.equal_values import whole
from autopar.capture.selected_places import Exit
from autopar.capture.selection import Selections
from autopar.ir.program import Argument, Op, Program, Ref, aten
from autopar.ir.schema import bound
from autopar.operators import row_of
from autopar.operators.facts import Alias, OpKind


@dataclass(frozen=True, slots=True)
class Expert:
    """An exit of rows, for the tokens (n) that chose an expert (n, k), or (n): `dims` are the dims of the mask for n and k.

    The mask may also be true once for each token that chose the expert in any place.
    """

    exit: Exit
    chosen: Ref
    number: int
    dims: tuple[int, ...]


def loops(program: Program, selections: Selections) -> Iterator[list[Expert]]:
    """The consecutive exits of rows that have one for every expert that tokens can choose."""
    chain, made = list[Expert](), program.producer
    for one in selections.exits:
        expert = _expert(program, one)
        if not chain or expert is None or whole(made, one.into) != whole(made, chain[-1].exit.result):
            chain = []
        chain += [expert] if expert is not None else []
        count = _classes(program, chain[0].chosen) if chain else None
        if count == len(chain) and {expert.number for expert in chain} == set(range(len(chain))):
            yield chain
            chain = []


def _expert(program: Program, one: Exit) -> Expert | None:
    """The expert whose rows an exit puts back; None unless its mask is true for the tokens that chose one expert."""
    selection, made, values = one.places.selection, program.producer, program.values
    op = made.get(selection.mask.name)
    while op is not None and (row_of(op).kind in (OpKind.RESHAPE, OpKind.SAME) or aten(op.target) == "permute"):
        op = made.get(op.operands[0])  # as the selection flattened it
    if op is not None and op.target == "aten.ne.Scalar" and op.args[1] == 0:
        op = made.get(op.operands[0])
    while op is not None and row_of(op).kind is OpKind.RESHAPE:
        op = made.get(op.operands[0])
    anywhere = (
        op is not None and op.target == "aten.any.dim" and op.args[1:] in ((-1,), (len(values[op.operands[0]].shape) - 1,))
    )
    if op is not None and anywhere:
        op = made.get(op.operands[0])
    dim, dims = 0, tuple(range(len(selection.shape)))
    match (op.target, op.args) if op is not None else ("", ()):
        case (("aten.eq.Scalar" | "aten.eq.Tensor"), (Ref() as chosen, said)):
            pass
        case "aten.select.int", (Ref(name=hot), int() as dim, said):
            pass
        case "aten.index.Tensor", (Ref(name=hot), (said,)):
            pass
        case _:
            return None
    if op is not None and aten(op.target) != "eq":
        source, order = made.get(hot), list(range(len(values[hot].shape)))
        while source is not None and row_of(source).kind in (OpKind.SAME, OpKind.CAST):
            source = made.get(source.operands[0])
        if source is not None and source.target == "aten.permute.default" and isinstance(source.args[1], tuple):
            order = [at % len(source.args[1]) for at in source.args[1] if isinstance(at, int)]
            source = made.get(source.operands[0])
        if source is None or source.target != "aten.one_hot.default" or order[dim] != len(order) - 1:
            return None
        left = [at for at in order if at != len(order) - 1]
        chosen, dims = Ref(source.operands[0]), tuple(map(left.index, range(len(left))))
    number = _said(made.get(said.name)) if isinstance(said, Ref) else said
    shape = values[chosen.name].shape
    if anywhere:
        shape = (math.prod(shape[:-1]),) if _distinct(program, chosen) else ()
    alike = selection.order == dims and tuple(selection.shape[dim] for dim in dims) == shape and len(dims) <= 2
    return Expert(one, chosen, number, dims) if alike and isinstance(number, int) else None


def _said(op: Op | None) -> Argument:
    """The number that fills a one-element tensor."""
    fills = row_of(op).fills if op is not None else None
    if op is None or fills is None or math.prod(op.results[0].shape) != 1:
        return None
    return bound(op)[fills] if isinstance(fills, str) else fills


def _classes(program: Program, chosen: Ref) -> int | None:
    """How many experts tokens choose from: the size of the dim that `chosen` indexes."""
    op = program.producer.get(chosen.name)
    while op is not None and (row_of(op).alias is not Alias.NEVER or row_of(op).kind is OpKind.SAME):  # part of them
        chosen = Ref(op.operands[0])
        op = program.producer.get(chosen.name)
    if op is None or row_of(op).kind is not OpKind.PLACES or op.results[-1].name != chosen.name:
        return None
    dim = bound(op)["dim"]
    return program.values[op.operands[0]].shape[dim] if isinstance(dim, int) else None


def _distinct(program: Program, chosen: Ref) -> bool:
    """Whether each token chooses an expert at most once: the indices of the largest values in the last dim."""
    op, values = program.producer.get(chosen.name), program.values
    while (
        op is not None and row_of(op).kind is OpKind.RESHAPE and values[op.operands[0]].shape[-1:] == op.results[0].shape[-1:]
    ):
        op = program.producer.get(op.operands[0])
    if op is None or op.target != "aten.topk.default":
        return False
    return bound(op)["dim"] in (-1, len(op.results[1].shape) - 1)


__all__ = ["Expert", "loops"]
