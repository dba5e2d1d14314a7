"""Examples of linear algebra, Fourier transforms, complex numbers and recurrent networks."""

from __future__ import annotations

from tests.operators.drawing import Example, buffer, cplx, definite, ex, signs, t
from tests.operators.names import SQUARES, names

MORE: dict[str, tuple[object, ...]] = {"aten.matrix_power.default": (3,), "aten.linalg_matrix_power.default": (3,)}


def squares() -> dict[str, list[Example]]:
    """Functions of batches of definite matrices."""
    return {target: [ex(definite(2, 4, 3, 3), *MORE.get(target, ()))] for target in names(SQUARES)}


def layers(gates: int, states: int, *, alone: bool) -> list[Example]:
    """Recurrent layers of width 3 over 5 steps of 4 rows of 6: one, batch first, and two in both directions."""

    def weights(inside: int, count: int) -> tuple[object, ...]:
        one = (t(gates * 3, inside), t(gates * 3, 3), t(gates * 3), t(gates * 3))
        return tuple(part for _ in range(count) for part in one)

    def hidden(count: int) -> object:
        found = tuple(t(count, 4, 3) for _ in range(states))
        return found[0] if alone else found

    two = (*weights(6, 2), *weights(6, 2))
    return [
        ex(t(5, 4, 6), hidden(1), weights(6, 1), True, 1, 0.0, True, False, False),
        ex(t(4, 5, 6), hidden(1), weights(6, 1), True, 1, 0.0, True, False, True),
        ex(t(5, 4, 6), hidden(4), two, True, 2, 0.0, True, True, False),
        ex(t(5, 4, 6), hidden(4), two, True, 2, 0.5, True, True, False),
    ]


def cells(gates: int) -> tuple[object, ...]:
    """The weights of a cell from 6 to 3."""
    return t(gates * 3, 6), t(gates * 3, 3), t(gates * 3), t(gates * 3)


TABLE: dict[str, list[Example]] = {
    **squares(),
    "aten.linalg_matrix_rank.atol_rtol_float": [ex(signs(2, 4, 3, 3))],
    "aten.linalg_solve.default": [
        ex(definite(2, 4, 3, 3), t(2, 4, 3, 10)),
        ex(definite(2, 4, 3, 3), t(2, 4, 3)),
        ex(definite(2, 4, 3, 3), t(2, 4, 10, 3), left=False),
    ],
    "aten.linalg_solve_triangular.default": [
        ex(definite(2, 4, 3, 3), t(2, 4, 3, 10), upper=True),
        ex(definite(2, 4, 3, 3), t(2, 4, 10, 3), upper=False, left=False),
    ],
    "aten.cholesky_solve.default": [ex(t(2, 4, 3, 10), definite(2, 4, 3, 3))],
    # Fourier transforms
    **{f"aten.fft_{n}.default": [ex(t(4, 6, 10)), ex(t(4, 6, 10), 8, 1)] for n in ("fft", "ifft", "rfft", "ihfft")},
    **{f"aten.fft_{n}.default": [ex(cplx(4, 6, 10)), ex(cplx(4, 6, 10), 8, 1)] for n in ("irfft", "hfft")},
    **{f"aten.fft_{n}2.default": [ex(t(4, 6, 10)), ex(t(4, 6, 10), None, (0, 1))] for n in ("fft", "ifft", "rfft", "irfft")},
    **{f"aten.fft_{n}n.default": [ex(t(4, 6, 10)), ex(t(4, 6, 10), None, (0, 1))] for n in ("fft", "ifft", "rfft", "irfft")},
    **{f"aten.fft_{n}shift.default": [ex(t(4, 6, 10), (1,)), ex(t(4, 6))] for n in ("fft", "ifft")},
    "aten._fft_r2c.default": [ex(t(4, 6, 10), (2,), 0, True), ex(t(4, 6, 10), (0, 1), 1, False)],
    "aten._fft_c2r.default": [ex(cplx(4, 6, 10), (2,), 0, 18)],
    "aten._fft_c2c.default": [ex(cplx(4, 6, 10), (2,), 0, True)],
    "aten.stft.default": [
        ex(t(4, 30), 8, 4, 8, t(8), return_complex=True),
        ex(t(30), 8, 4, return_complex=True),
    ],
    "aten.stft.center": [ex(t(4, 30), 8, 4, 8, t(8), return_complex=True)],
    "aten.istft.default": [ex(cplx(4, 5, 9), 8, 4, 8, buffer(8))],
    # complex numbers
    "aten.complex.default": [ex(t(4, 6), t(4, 1))],
    "aten.polar.default": [ex(t(4, 6), t(4, 6))],
    "aten.imag.default": [ex(cplx(4, 6))],
    "aten.view_as_real.default": [ex(cplx(4, 6))],
    "aten.view_as_complex.default": [ex(t(4, 6, 2))],
    # recurrent networks
    "aten.lstm.input": layers(4, 2, alone=False),
    "aten.gru.input": layers(3, 1, alone=True),
    "aten.rnn_tanh.input": layers(1, 1, alone=True),
    "aten.rnn_relu.input": layers(1, 1, alone=True),
    "aten.lstm_cell.default": [ex(t(4, 6), (t(4, 3), t(4, 3)), *cells(4))],
    "aten.gru_cell.default": [ex(t(4, 6), t(4, 3), *cells(3))],
    "aten.rnn_tanh_cell.default": [ex(t(4, 6), t(4, 3), *cells(1))],
    "aten.rnn_relu_cell.default": [ex(t(4, 6), t(4, 3), *cells(1)[:2])],
}
