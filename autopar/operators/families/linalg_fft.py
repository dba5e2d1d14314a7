"""Rules of linear algebra and Fourier transforms: what acts on whole matrices, or along whole dims, splits over the others."""

from __future__ import annotations

from autopar.operators.call import Call
from autopar.operators.families.pointwise import names
from autopar.operators.families.reductions import along
from autopar.operators.pattern_text import term
from autopar.operators.rule import OpSharding, Rule, op


def matrices(call: Call) -> OpSharding:
    """... y! x! -> ...; each matrix stays whole, and so does what is made of it"""
    batch = len(call.operands[0].shape) - 2
    results = (term(["...", *"_" * (len(value.shape) - batch)]) for value in call.op.results)
    return call.fit(f"{', '.join('... _ _' for _ in call.operands)} -> {', '.join(results)}")


def solve(call: Call) -> OpSharding:
    """... n! m!, ... n! k -> ... m! k; right-hand sides split, a single one lacks k"""
    matrix, given = (value.shape for value in call.operands)
    if len(given) == 1 or (len(given) == len(matrix) - 1 and given == matrix[:-1]):
        return call.fit("... _ _, ... _ -> ... _")
    held = "... _ k" if call.arguments["left"] else "... k _"
    return call.fit(f"... _ _, {held} -> {held}")


def spectrogram(call: Call) -> OpSharding:
    """... t!, w! -> ... f! t!; windows overlap in time"""
    window = ", _" if call.positions("window") else ""
    batch = call.rank("self") - 1
    return call.fit(f"... _{window} -> {term(['...', *'_' * (len(call.result) - batch)])}")


def from_spectrogram(call: Call) -> OpSharding:
    """... f! t!, w! -> ... t!; windows overlap in time"""
    window = ", _" if call.positions("window") else ""
    batch = len(call.result) - 1
    return call.fit(f"{term(['...', *'_' * (call.rank('self') - batch)])}{window} -> ... _")


SQUARES = """
    inverse linalg_inv linalg_inv_ex det logdet slogdet linalg_det linalg_slogdet matrix_power linalg_matrix_power matrix_exp
    linalg_matrix_exp cholesky cholesky_inverse linalg_cholesky linalg_cholesky_ex linalg_eigh linalg_eigvalsh linalg_qr
    linalg_svd linalg_svdvals linalg_pinv.atol_rtol_float pinverse linalg_lu_factor linalg_cond
    linalg_matrix_rank.atol_rtol_float
"""
TRANSFORMS = """
    fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2
    fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_fftshift fft_ifftshift _fft_r2c _fft_c2r _fft_c2c
"""

TABLE: dict[str, Rule] = {
    **{target: op(matrices) for target in names(SQUARES)},
    "aten.linalg_solve.default": op(solve, linear="B"),
    "aten.linalg_solve_triangular.default": op(solve, linear="B"),
    "aten.cholesky_solve.default": op("... _ k, ... _ _ -> ... _ k", linear="self"),
    **{f"aten.{name}.default": op(along, linear="self") for name in TRANSFORMS.split()},
    "aten.stft.default": op(spectrogram, linear="self, window"),
    "aten.stft.center": op(spectrogram, linear="self, window"),
    "aten.istft.default": op(from_spectrogram, linear="self"),
}
