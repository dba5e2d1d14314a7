"""Recurrent layers with split gates: every rank holds some rows of the weight matrices (`autopar.runtime.parallel_ops`).

    gates = all_gather(W x) + all_gather(U h)          W x for the whole sequence at once, U h at each time step

The elementwise rest of the cell is computed on every rank, so states and results are replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from autopar.runtime.collectives import all_gather__slice, identity__all_reduce, identity__keep
from autopar.runtime.world import Axis

HiddenState = tuple[Tensor, ...]
Cell = Callable[[Tensor, Tensor, HiddenState], HiddenState]  # gates of the input, gates of the state, state -> next state
RecurrentArguments = tuple[bool, int, float, bool, bool, bool]  # biases, layers, dropout, training, bidirectional, batch first


def lstm_cell(input_gates: Tensor, state_gates: Tensor, state: HiddenState) -> HiddenState:
    """`aten.lstm_cell` after its matrix products."""
    input_gate, forget_gate, cell_gate, output_gate = (input_gates + state_gates).chunk(4, -1)
    memory = forget_gate.sigmoid() * state[1] + input_gate.sigmoid() * cell_gate.tanh()
    return output_gate.sigmoid() * memory.tanh(), memory


def gru_cell(input_gates: Tensor, state_gates: Tensor, state: HiddenState) -> HiddenState:
    """`aten.gru_cell` after its matrix products."""
    (reset, update, new), (resets, updates, news) = input_gates.chunk(3, -1), state_gates.chunk(3, -1)
    fresh = (new + (reset + resets).sigmoid() * news).tanh()
    return (fresh.lerp(state[0], (update + updates).sigmoid()),)


def tanh_cell(input_gates: Tensor, state_gates: Tensor, state: HiddenState) -> HiddenState:
    """`aten.rnn_tanh_cell` after its matrix products."""
    return ((input_gates + state_gates).tanh(),)


def relu_cell(input_gates: Tensor, state_gates: Tensor, state: HiddenState) -> HiddenState:
    """`aten.rnn_relu_cell` after its matrix products."""
    return ((input_gates + state_gates).relu(),)


def _layers(
    axis: Axis, cell: Cell, x: Tensor, initial: HiddenState, weights: Sequence[Tensor], arguments: RecurrentArguments
) -> tuple[Tensor, ...]:
    """The replicated results of a recurrent network: the outputs of the last layer, then the final states."""
    biases, layers, _, _, bidirectional, batch_first = arguments
    x = x.transpose(0, 1) if batch_first else x
    per_layer, directions = 4 if biases else 2, 2 if bidirectional else 1
    final_states: list[HiddenState] = []
    for layer in range(layers):
        layer_input = identity__all_reduce(x, axis) if layer else x
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            layer_weights = weights[number * per_layer : (number + 1) * per_layer]
            steps, state = _direction(
                axis, cell, layer_input, tuple(one[number] for one in initial), layer_weights, reverse=direction == 1
            )
            outputs.append(steps)
            final_states.append(state)
        x = torch.cat(outputs, -1)
    return x.transpose(0, 1) if batch_first else x, *(torch.stack(states) for states in zip(*final_states, strict=True))


def _direction(
    axis: Axis, cell: Cell, x: Tensor, initial: HiddenState, weights: Sequence[Tensor], *, reverse: bool
) -> tuple[Tensor, HiddenState]:
    """One layer in one direction: the outputs of all time steps, and the final state."""
    input_weight, state_weight, *biases = weights
    input_gates = all_gather__slice(torch.nn.functional.linear(x, input_weight, *biases[:1]), axis, 2)
    state = tuple(identity__keep(one, axis) for one in initial)  # its gradient is partial
    previous, outputs = initial[0], []
    steps = reversed(range(len(x))) if reverse else range(len(x))
    for step in steps:
        state_gates = all_gather__slice(torch.nn.functional.linear(previous, state_weight, *biases[1:]), axis, 1)
        state = cell(input_gates[step], state_gates, state)
        outputs.append(state[0])
        previous = identity__all_reduce(state[0], axis) if len(outputs) < len(x) else state[0]
    return torch.stack(outputs[::-1] if reverse else outputs), state


def gate_parallel_lstm(
    axis: Axis, x: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *arguments: *RecurrentArguments
) -> tuple[Tensor, ...]:
    """`aten.lstm` with the rows of all weights split over gates."""
    return _layers(axis, lstm_cell, x, tuple(hx), params, arguments)


def gate_parallel_gru(
    axis: Axis, x: Tensor, hx: Tensor, params: Sequence[Tensor], *arguments: *RecurrentArguments
) -> tuple[Tensor, ...]:
    """`aten.gru` with the rows of all weights split over gates."""
    return _layers(axis, gru_cell, x, (hx,), params, arguments)


def gate_parallel_rnn_tanh(
    axis: Axis, x: Tensor, hx: Tensor, params: Sequence[Tensor], *arguments: *RecurrentArguments
) -> tuple[Tensor, ...]:
    """`aten.rnn_tanh` with the rows of all weights split over gates."""
    return _layers(axis, tanh_cell, x, (hx,), params, arguments)


def gate_parallel_rnn_relu(
    axis: Axis, x: Tensor, hx: Tensor, params: Sequence[Tensor], *arguments: *RecurrentArguments
) -> tuple[Tensor, ...]:
    """`aten.rnn_relu` with the rows of all weights split over gates."""
    return _layers(axis, relu_cell, x, (hx,), params, arguments)
