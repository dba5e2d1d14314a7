"""Rules of linear algebra and Fourier transforms: what acts on whole matrices, or along whole dims, splits over the others."""

from __future__ import annotations

import math

from autopar.operators.call import Call, Local
from autopar.operators.flops import Product, ProductSizes
from autopar.operators.pattern_text import term
from autopar.operators.rule import OpSharding, Rule, op


def solve(call: Call) -> OpSharding:
    """`... _ _, ... _ k -> ... _ k`: right-hand sides may be split; a single one lacks k."""
    matrix, given = (value.shape for value in call.operands)
    if len(given) == 1 or (len(given) == len(matrix) - 1 and given == matrix[:-1]):
        return call.fit("... _ _, ... _ -> ... _")
    held = "... _ k" if call.arguments["left"] else "... k _"
    return call.fit(f"... _ _, {held} -> {held}")


def spectrogram(call: Call) -> OpSharding:
    """Windows overlap in time, so that only the batch splits."""
    window = ", _" if call.positions("window") else ""
    batch = call.rank("self") - 1
    return call.fit(f"... _{window} -> {term(['...', *'_' * (len(call.result) - batch)])}")


def from_spectrogram(call: Call) -> OpSharding:
    """Windows overlap in time, so that only the batch splits."""
    window = ", _" if call.positions("window") else ""
    batch = len(call.result) - 1
    return call.fit(f"{term(['...', *'_' * (call.rank('self') - batch)])}{window} -> ... _")


def powers(call: Call, local: Local) -> list[Product]:
    """Squares, and products of squares."""
    matrix, n = local.operands[0], abs(call.number("n"))
    count = n.bit_length() + n.bit_count() - 2 if n else 0
    itself, side = frozenset({0}), matrix[-1]
    return [
        Product(sizes=ProductSizes(math.prod(matrix[:-2]), side, side, side), left=itself, right=itself) for _ in range(count)
    ]


TABLE: dict[str, Rule] = {
    # inverses, determinants and powers
    "aten.inverse.default": op("... _ _ -> ... _ _"),
    "aten.linalg_inv.default": op("... _ _ -> ... _ _"),
    "aten.linalg_inv_ex.default": op("... _ _ -> ... _ _, ..."),
    "aten.pinverse.default": op("... _ _ -> ... _ _"),
    "aten.linalg_pinv.atol_rtol_float": op("... _ _ -> ... _ _"),
    "aten.det.default": op("... _ _ -> ..."),
    "aten.linalg_det.default": op("... _ _ -> ..."),
    "aten.logdet.default": op("... _ _ -> ..."),
    "aten.slogdet.default": op("... _ _ -> ..., ..."),
    "aten.linalg_slogdet.default": op("... _ _ -> ..., ..."),
    "aten.matrix_power.default": op("... _ _ -> ... _ _", flops=powers),
    "aten.linalg_matrix_power.default": op("... _ _ -> ... _ _", flops=powers),
    "aten.matrix_exp.default": op("... _ _ -> ... _ _"),
    "aten.linalg_matrix_exp.default": op("... _ _ -> ... _ _"),
    "aten.linalg_cond.default": op("... _ _ -> ..."),
    "aten.linalg_matrix_rank.atol_rtol_float": op("... _ _ -> ..."),
    # factorisations
    "aten.cholesky.default": op("... _ _ -> ... _ _"),
    "aten.linalg_cholesky.default": op("... _ _ -> ... _ _"),
    "aten.linalg_cholesky_ex.default": op("... _ _ -> ... _ _, ..."),
    "aten.cholesky_inverse.default": op("... _ _ -> ... _ _"),
    "aten.linalg_eigh.default": op("... _ _ -> ... _, ... _ _"),
    "aten.linalg_eigvalsh.default": op("... _ _ -> ... _"),
    "aten.linalg_qr.default": op("... _ _ -> ... [_] _, ... _ _"),
    "aten.linalg_svd.default": op("... _ _ -> ... _ _, ... _, ... _ _"),
    "aten.linalg_svdvals.default": op("... _ _ -> ... _"),
    "aten.linalg_lu_factor.default": op("... _ _ -> ... _ _, ... _"),
    # solutions
    "aten.linalg_solve.default": op(solve, linear="B"),
    "aten.linalg_solve_triangular.default": op(solve, linear="B"),
    "aten.cholesky_solve.default": op("... _ k, ... _ _ -> ... _ k", linear="self"),
    # Fourier transforms along dims
    "aten.fft_fft.default": op("... _@dim ... -> ... _@dim ...", linear="self"),
    "aten.fft_ifft.default": op("... _@dim ... -> ... _@dim ...", linear="self"),
    "aten.fft_rfft.default": op("... _@dim ... -> ... _@dim ...", linear="self"),
    "aten.fft_irfft.default": op("... _@dim ... -> ... _@dim ...", linear="self"),
    "aten.fft_hfft.default": op("... _@dim ... -> ... _@dim ...", linear="self"),
    "aten.fft_ihfft.default": op("... _@dim ... -> ... _@dim ...", linear="self"),
    "aten.fft_fft2.default": op("... _@dim ... -> ... _@dim ...", linear="self"),
    "aten.fft_ifft2.default": op("... _@dim ... -> ... _@dim ...", linear="self"),
    "aten.fft_rfft2.default": op("... _@dim ... -> ... _@dim ...", linear="self"),
    "aten.fft_irfft2.default": op("... _@dim ... -> ... _@dim ...", linear="self"),
    "aten.fft_fftn.default": op("... _@dim ... -> ... _@dim ...", linear="self"),
    "aten.fft_ifftn.default": op("... _@dim ... -> ... _@dim ...", linear="self"),
    "aten.fft_rfftn.default": op("... _@dim ... -> ... _@dim ...", linear="self"),
    "aten.fft_irfftn.default": op("... _@dim ... -> ... _@dim ...", linear="self"),
    "aten.fft_fftshift.default": op("... _@dim ... -> ... _@dim ...", linear="self"),
    "aten.fft_ifftshift.default": op("... _@dim ... -> ... _@dim ...", linear="self"),
    "aten._fft_r2c.default": op("... _@dim ... -> ... _@dim ...", linear="self"),
    "aten._fft_c2r.default": op("... _@dim ... -> ... _@dim ...", linear="self"),
    "aten._fft_c2c.default": op("... _@dim ... -> ... _@dim ...", linear="self"),
    # spectrograms
    "aten.stft.default": op(spectrogram, linear="self, window"),
    "aten.stft.center": op(spectrogram, linear="self, window"),
    "aten.istft.default": op(from_spectrogram, linear="self"),
}
