"""What a random graph is made of: operators, each a condition on its first operand and an expression of it.

Every operator is drawn about as often as any other that fits, but those in CONTRACTIONS, which leave sums over ranks for the
others to meet, more often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from tests.fuzz.graphs import Growing

Fits = Callable[[torch.Tensor], bool]
Make = Callable[[Growing, str, torch.Tensor], str]
Operator = tuple[Fits, Make]
POINTWISE = (
    "torch.relu({x})", "F.gelu({x})", "F.silu({x})", "torch.tanh({x})", "torch.sigmoid({x})", "F.softplus({x})", "{x}.abs()",
    "{x} * {x}", "1 - {x}", "torch.where({x} > 0, {x}, 0.1 * {x})", "{x}.clamp(-1.0, 1.5)", "{x}.masked_fill({x} > 1, 0.5)",
    "{x}.sin() + {x}.cos()", "torch.exp(-{x} * {x})", "F.dropout({x}, 0.3)", "{x}.detach() * {x}", "torch.sqrt(1 + {x} * {x})",
    "F.hardswish({x})", "{x}.clone().mul_(0.5)", "{x} + 0.0", "{x} + 1.0", "{x} - 2", "{x} * 0.0 + {x}", "{x} / 3", "{x} ** 2",
)  # fmt: skip
BINARY = (
    "{x} + {y}", "{x} * {y}", "{x} - {y}", "{x} / (1 + {y}.abs())", "torch.maximum({x}, {y})", "torch.lerp({x}, {y}, 0.3)",
    "torch.where({x} > {y}, {x}, {y})", "torch.atan2({x}, 2 + {y}.abs())", "torch.addcmul({x}, {x}, {y}, value=0.5)",
)  # fmt: skip
ALONG = (
    "{x}.softmax({d})", "{x}.log_softmax({d})", "{x}.cumsum({d})", "{x}.flip({d})", "{x}.roll(1, {d})", "{x}.sort({d})[0]",
    "F.normalize({x}, dim={d})", "torch.logcumsumexp({x}, {d})", "torch.cat([{x}, {x} * 2], {d})",
    "torch.stack([{x}, -{x}], {d})", "{x}.repeat_interleave(2, {d})", "{x} - {x}.mean({d}, keepdim=True)",
    "{x} / (1 + {x}.abs().amax({d}, keepdim=True))", "torch.cumsum({x}, {d}).flip({d})", "{x}.gather({d}, {x}.argsort({d}))",
)  # fmt: skip
REDUCTIONS = ("sum", "mean", "amax", "logsumexp", "norm", "var", "prod", "amin")
CUTS = (
    "{x}.narrow({d}, {start}, {length})", "{x}.select({d}, {start})", "{x}.chunk(2, {d})", "{x}.split({length}, {d})",
    "{x}[..., ::2]", "{x}.unbind({d})", "{x}.topk({length}, {d})[0]", "F.pad({x}, (1, {pad}))", "{x}.unfold({d}, {length}, 1)",
    "{x}.index_select({d}, torch.tensor([0, {start}]))",
)  # fmt: skip


def _pointwise(form: str, g: Growing, x: str, t: torch.Tensor) -> str:
    return form.format(x=x)


def _binary(form: str, g: Growing, x: str, t: torch.Tensor) -> str:
    """With a value, a parameter or a buffer that broadcasts against it; residuals among them."""
    others = g.floats(lambda y: _broadcasts(y, t))
    own = tuple(1 if g.chance(4) else size for size in t.shape[g.draw_start(t) :])
    kind = g.pick("value", "value", "parameter", "buffer")
    y = (
        g.pick(*others)
        if kind == "value"
        else g.member(f"nn.Parameter(torch.randn({own}))")
        if kind == "parameter"
        else g.buffer(own)
    )
    return form.format(x=x, y=y)


def _broadcasts(y: torch.Tensor, x: torch.Tensor) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(y.shape), reversed(x.shape), strict=False))


def _along(form: str, g: Growing, x: str, t: torch.Tensor) -> str:
    return form.format(x=x, d=g.dim(t))


def _reduced(name: str, g: Growing, x: str, t: torch.Tensor) -> str:
    keep = g.pick(True, False)
    dim = g.dim(t, least=2) if name == "var" and max(t.shape) > 1 else g.dim(t)
    if name == "var" and t.shape[dim] == 1:
        return ""
    return f"{x}.{name}(dim={dim}, keepdim={keep})"


def _linear(g: Growing, x: str, t: torch.Tensor) -> str:
    """A layer of its own, one that was there, or the weight of one the other way round."""
    if g.chance(3) and (tied := g.layers(lambda weight: weight.shape[0] == t.shape[-1])):
        return f"F.linear({x}, {g.pick(*tied)}.weight.t())"
    if g.chance(3) and (shared := g.layers(lambda weight: weight.shape[1] == t.shape[-1])):
        return f"{g.pick(*shared)}({x})"
    return f"{g.member(f'nn.Linear({t.shape[-1]}, {g.size()}, bias={g.pick(False, True)})')}({x})"


def _norm(kind: str, g: Growing, x: str, t: torch.Tensor) -> str:
    dims = tuple(t.shape[-2:]) if t.ndim > 2 and g.chance(4) else (t.shape[-1],)
    return f"{g.member(f'nn.{kind}({dims})')}({x})"


def _batch_norm(g: Growing, x: str, t: torch.Tensor) -> str:
    kind = {2: "BatchNorm1d", 3: "BatchNorm1d", 4: "BatchNorm2d"}[t.ndim]
    return f"{g.member(f'nn.{kind}({t.shape[1]})')}({x})"


def _group_norm(g: Growing, x: str, t: torch.Tensor) -> str:
    groups = g.pick(*(n for n in range(1, t.shape[1] + 1) if t.shape[1] % n == 0))
    return f"{g.member(f'nn.GroupNorm({groups}, {t.shape[1]})')}({x})"


def _convolution(g: Growing, x: str, t: torch.Tensor) -> str:
    groups = t.shape[1] if g.chance(4) else 1
    channels, stride = groups * int(g.pick(1, 2, 4)), g.pick(1, 1, 2)  # type: ignore[call-overload]
    text = f"nn.Conv{t.ndim - 2}d({t.shape[1]}, {channels}, 3, stride={stride}, padding=1, groups={groups})"
    return f"{g.member(text)}({x})"


def _matmul(g: Growing, x: str, t: torch.Tensor) -> str:
    """With what has an equally long last dim: scores of attention, or a Gram matrix."""
    others = g.floats(lambda y: y.ndim >= 2 and y.shape[-1] == t.shape[-1] and _broadcasts(y[..., 0, 0], t[..., 0, 0]))
    return f"{x} @ {g.pick(*others)}.transpose(-1, -2) / {t.shape[-1]}"


def _einsum(g: Growing, x: str, t: torch.Tensor) -> str:
    own = g.member(f"nn.Parameter(torch.randn({t.shape[-2]}, {t.shape[-1]}, {g.size()}))")
    return f'torch.einsum("...ij,ijk->...{g.pick("ik", "k", "jk")}", {x}, {own})'


def _attention(g: Growing, x: str, t: torch.Tensor) -> str:
    causal, k = g.pick(False, True), g.pick(x, f"{x}.tanh()", f"({x} * 0.5)")
    return f"F.scaled_dot_product_attention({x}, {k}, {x}, is_causal={causal})"


def _multihead(g: Growing, x: str, t: torch.Tensor) -> str:
    heads = g.pick(*(n for n in range(1, t.shape[-1] + 1) if t.shape[-1] % n == 0))
    layer = g.member(f"nn.MultiheadAttention({t.shape[-1]}, {heads}, batch_first=True)")
    return f"{layer}({x}, {x}, {x}, need_weights={g.pick(False, True)})[0]"


def _recurrent(kind: str, g: Growing, x: str, t: torch.Tensor) -> str:
    return f"{g.member(f'nn.{kind}({t.shape[-1]}, {g.size()}, batch_first=True)')}({x})[0]"


def _embedded(g: Growing, x: str, t: torch.Tensor) -> str:
    """A table looked up by an input of integers, added to what it broadcasts against, or by itself."""
    rows = int(g.pick(8, 6, 7, 12))  # type: ignore[call-overload]
    words = g.input(f"torch.randint(0, {rows}, (batch, {g.size()}))")
    return f"{g.member(f'nn.Embedding({rows}, {t.shape[-1]})')}({words})"


def _viewed(g: Growing, x: str, t: torch.Tensor) -> str:
    """Another shape: two dims merged, or one taken apart; the batch's own size is not written out."""
    shape = [f"{x}.shape[0]", *map(str, t.shape[1:])]
    kind = g.pick("flatten", "split", "merge", "batch")
    at = int(g.draw_int(0, t.ndim - 1))
    if kind == "split" and at and (ways := [n for n in (2, 3, 4) if t.shape[at] % n == 0]):
        ways_of = int(g.pick(*ways))  # type: ignore[call-overload]
        parts = (str(ways_of), str(t.shape[at] // ways_of))
        shape[at : at + 1] = parts if g.pick(True, False) else parts[::-1]
        return f"{x}.reshape({', '.join(shape)})"
    if kind == "batch" and t.ndim > 1:
        return f"{x}.flatten(0, 1)"
    if kind == "merge" and at > 1:
        return f"{x}.flatten({at - 1}, {at})"
    return f"{x}.flatten(1)" if t.ndim > 2 else f"{x}.unsqueeze({at})"


def _moved(name: str, g: Growing, x: str, t: torch.Tensor) -> str:
    return f"{x}.{name}({g.dim(t)}, {g.dim(t)})"


def _cut(form: str, g: Growing, x: str, t: torch.Tensor) -> str:
    """A part of a dim, or all of its parts."""
    dim = g.dim(t, least=2)
    size = t.shape[dim]
    start = g.draw_int(0, size - 1)
    length = g.draw_int(1, size - start)
    return form.format(x=x, d=dim, start=start, length=length, pad=g.draw_int(-1, 2))


def _triangle(name: str, g: Growing, x: str, t: torch.Tensor) -> str:
    return f"{x}.{name}({g.draw_int(-1, 1)})"


def _repeated(g: Growing, x: str, t: torch.Tensor) -> str:
    return f"{x}.unsqueeze(0).expand(2, {', '.join(['-1'] * t.ndim)})"


def of_rank(*ranks: int) -> Callable[[torch.Tensor], bool]:
    return lambda x: x.ndim in ranks


def _any(x: torch.Tensor) -> bool:
    return x.ndim > 0


def _each(fits: Fits, make: Callable[[str, Growing, str, torch.Tensor], str], *kinds: str) -> tuple[Operator, ...]:
    return tuple((fits, partial(make, kind)) for kind in kinds)


_MATRIX = of_rank(2, 3, 4)
CONTRACTIONS: tuple[Operator, ...] = ((_any, _linear), (_MATRIX, _matmul), (_MATRIX, _einsum), (of_rank(3, 4), _convolution))
OPERATORS: tuple[Operator, ...] = (
    *_each(lambda x: True, _pointwise, *POINTWISE),
    *_each(lambda x: True, _binary, *BINARY),
    *_each(_any, _along, *ALONG),
    *_each(_any, _reduced, *REDUCTIONS),
    *_each(_any, _norm, "LayerNorm", "RMSNorm"),
    *[(_any, _viewed)] * 4,
    *_each(_MATRIX, _moved, "transpose", "movedim"),
    *_each(lambda x: x.ndim > 0 and max(x.shape) > 1, _cut, *CUTS),
    (lambda x: x.ndim in (2, 3, 4) and x[:, 0].numel() > 1, _batch_norm),
    (lambda x: x.ndim in (2, 3, 4) and x[0].numel() > x.shape[1], _group_norm),
    *[(of_rank(3, 4), _attention)] * 2,
    *[(of_rank(3), _multihead)] * 2,
    *_each(of_rank(3), _recurrent, "GRU", "LSTM", "RNN"),
    *[(of_rank(1, 2, 3), _embedded)] * 2,
    *_each(_MATRIX, _triangle, "tril", "triu"),
    (of_rank(1, 2, 3), _repeated),
)


def operator(g: Growing, t: torch.Tensor, turn: int) -> Make:
    """One that takes a tensor; in a third of the draws a contraction.

    Hypothesis draws the first of several far more often than the others: which is the first, `turn` decides.
    """
    kinds = CONTRACTIONS if t.ndim and g.chance(3) else OPERATORS
    fit = [make for fits, make in kinds if fits(t)]
    first = turn % len(fit)
    return g.pick(*fit[first:], *fit[:first])  # type: ignore[return-value]


def losses(g: Growing) -> Iterator[tuple[str, str]]:
    """One to three scalars of the newest values."""
    names = g.floats()
    for place in range(g.draw_int(1, 3)):
        x = names[min(place, len(names) - 1)]
        t = g.values[x]
        options = [f"{x}.pow(2).mean()", f"{x}.sum()", f"{x}.mean()", f"F.mse_loss({x}, torch.ones_like({x}))"]
        options += [f"F.smooth_l1_loss({x}, torch.zeros_like({x}))", f"{x}.logsumexp(-1).mean()" if t.ndim else f"{x} * 2"]
        if t.ndim == 2 and t.shape[1] > 1:
            rows = "batch" if t.shape[0] == g.values["x0"].shape[0] else str(t.shape[0])
            target = g.input(f"torch.randint(0, {t.shape[1]}, ({rows},))")
            options += [f"F.cross_entropy({x}, {target}{more})" for more in ("", ", ignore_index=0", ", label_smoothing=0.1")]
            options += [f'F.cross_entropy({x}, {target}, reduction="sum")', f"F.nll_loss({x}.log_softmax(1), {target})"]
            options = options[::-1]
        yield f"loss{place}", str(g.pick(*options))


__all__ = ["CONTRACTIONS", "OPERATORS", "losses", "operator"]
