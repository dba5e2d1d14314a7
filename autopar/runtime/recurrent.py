"""Recurrent layers whose gates are split: every rank computes its rows of the matrices, and all get all gates at every step.

    gates = gather(W x) for the whole sequence at once, gather(U h) for each step

What follows from the gates, element by element, every rank computes: states and results are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from autopar.runtime.collectives import all_gather__slice, identity__all_reduce, identity__keep
from autopar.runtime.world import Axis

Tensor = torch.Tensor
State = tuple[Tensor, ...]
Cell = Callable[[Tensor, Tensor, State], State]  # gates of the input, gates of the state, states before -> after
Told = tuple[bool, int, float, bool, bool, bool]  # biases, layers, dropout, training, both directions, batch first


def lstm_cell(given: Tensor, held: Tensor, state: State) -> State:
    """`aten.lstm_cell` after its products."""
    inwards, kept, new, outwards = (given + held).chunk(4, -1)
    memory = kept.sigmoid() * state[1] + inwards.sigmoid() * new.tanh()
    return outwards.sigmoid() * memory.tanh(), memory


def gru_cell(given: Tensor, held: Tensor, state: State) -> State:
    """`aten.gru_cell` after its products."""
    (reset, update, new), (resets, updates, news) = given.chunk(3, -1), held.chunk(3, -1)
    fresh = (new + (reset + resets).sigmoid() * news).tanh()
    return (fresh.lerp(state[0], (update + updates).sigmoid()),)


def tanh_cell(given: Tensor, held: Tensor, state: State) -> State:
    """`aten.rnn_tanh_cell` after its products."""
    return ((given + held).tanh(),)


def relu_cell(given: Tensor, held: Tensor, state: State) -> State:
    """`aten.rnn_relu_cell` after its products."""
    return ((given + held).relu(),)


def _layers(axis: Axis, cell: Cell, x: Tensor, first: State, weights: Sequence[Tensor], told: Told) -> tuple[Tensor, ...]:
    """All results of a recurrent network, complete on every rank."""
    biases, layers, _, _, both, batch_first = told
    x = x.transpose(0, 1) if batch_first else x
    each, ways = 4 if biases else 2, 2 if both else 1
    last: list[State] = []
    for layer in range(layers):
        given = identity__all_reduce(x, axis) if layer else x
        found = []
        for way in range(ways):
            number = layer * ways + way
            own = weights[number * each : (number + 1) * each]
            steps, state = _way(axis, cell, given, tuple(one[number] for one in first), own, backwards=way == 1)
            found.append(steps)
            last.append(state)
        x = torch.cat(found, -1)
    return x.transpose(0, 1) if batch_first else x, *(torch.stack(states) for states in zip(*last, strict=True))


def _way(
    axis: Axis, cell: Cell, x: Tensor, first: State, weights: Sequence[Tensor], *, backwards: bool
) -> tuple[Tensor, State]:
    """One layer in one direction: the states of all steps, and the last."""
    inwards, across, *biases = weights
    given = all_gather__slice(torch.nn.functional.linear(x, inwards, *biases[:1]), axis, 2)
    state = tuple(identity__keep(one, axis) for one in first)  # partial gradients are asked for
    before, found = first[0], []
    steps = reversed(range(len(x))) if backwards else range(len(x))
    for step in steps:
        held = all_gather__slice(torch.nn.functional.linear(before, across, *biases[1:]), axis, 1)
        state = cell(given[step], held, state)
        found.append(state[0])
        before = identity__all_reduce(state[0], axis) if len(found) < len(x) else state[0]
    return torch.stack(found[::-1] if backwards else found), state


def lstm_gates(axis: Axis, x: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *told: *Told) -> tuple[Tensor, ...]:
    """`aten.lstm` of which the rows of all weights are split."""
    return _layers(axis, lstm_cell, x, tuple(hx), params, told)


def gru_gates(axis: Axis, x: Tensor, hx: Tensor, params: Sequence[Tensor], *told: *Told) -> tuple[Tensor, ...]:
    """`aten.gru` of which the rows of all weights are split."""
    return _layers(axis, gru_cell, x, (hx,), params, told)


def rnn_tanh_gates(axis: Axis, x: Tensor, hx: Tensor, params: Sequence[Tensor], *told: *Told) -> tuple[Tensor, ...]:
    """`aten.rnn_tanh` of which the rows of all weights are split."""
    return _layers(axis, tanh_cell, x, (hx,), params, told)


def rnn_relu_gates(axis: Axis, x: Tensor, hx: Tensor, params: Sequence[Tensor], *told: *Told) -> tuple[Tensor, ...]:
    """`aten.rnn_relu` of which the rows of all weights are split."""
    return _layers(axis, relu_cell, x, (hx,), params, told)
