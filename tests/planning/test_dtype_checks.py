"""A sample is refused for its dtypes exactly where torch refuses it: torch runs every case too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.errors import CaptureError, InputError
from autopar.ir.program import Op, Program, Value, filled, overload
from autopar.ir.shape_inference import Kind, infer
from autopar.planning.dtype_checks import refuse_dtypes
from tests.operators.examples import EXAMPLES

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)
X = torch.randn(8, 4)
TOKENS = torch.arange(8) % 5


class Calls(nn.Module):
    """A layer and a table, called by a function."""

    def __init__(self, body: Callable[[Calls, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fc, self.table, self.conv, self.norm = nn.Linear(4, 6), nn.Embedding(5, 4), nn.Conv1d(1, 2, 3), nn.LayerNorm(4)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def linear(m: Calls, x: torch.Tensor) -> torch.Tensor:
    return m.fc(x)


def embedded(m: Calls, x: torch.Tensor) -> torch.Tensor:
    return m.table(x)


def convolved(m: Calls, x: torch.Tensor) -> torch.Tensor:
    return m.conv(x[:, None])


def normed(m: Calls, x: torch.Tensor) -> torch.Tensor:
    return m.norm(x)


def labelled(m: Calls, x: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(m.fc.weight.sum() + torch.zeros(8, 5, device=x.device), x)


def attended(m: Calls, x: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(x[None], m.norm.weight.expand(1, 8, 4), m.norm.weight.expand(1, 8, 4))


def picked(m: Calls, x: torch.Tensor) -> torch.Tensor:
    return m.table.weight[x]


def added(m: Calls, x: torch.Tensor) -> torch.Tensor:
    return x + m.norm.weight


def joined(m: Calls, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, m.fc.weight], 0)


def cast_inside(m: Calls, x: torch.Tensor) -> torch.Tensor:
    return m.fc(x.to(m.fc.weight.dtype))


def under_autocast(m: Calls, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return m.fc(x)


def mismatched_inside(m: Calls, x: torch.Tensor) -> torch.Tensor:
    return m.fc(x) @ torch.ones(6, 2, dtype=torch.float64, device=x.device)


CASES = [
    *((body, X.to(dtype)) for body in (linear, convolved, normed, attended, added, joined, cast_inside) for dtype in DTYPES),
    *((body, TOKENS.to(dtype)) for body in (embedded, labelled, picked) for dtype in (*DTYPES, torch.int32)),
    *((under_autocast, X.to(dtype)) for dtype in DTYPES),
    (mismatched_inside, X),
]


def said_by(call: Callable[[], object]) -> str | None:
    """The first line of what a call raises."""
    try:
        call()
    except NotImplementedError:  # on a CPU
        return None
    except (RuntimeError, IndexError, TypeError) as error:
        return str(error).partition("\n")[0]
    return None


@pytest.mark.one_in(3)
@pytest.mark.parametrize("model_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("body, x", CASES, ids=[f"{body.__name__}-{x.dtype}" for body, x in CASES])
def test_a_sample_is_refused_where_torch_refuses_it(
    body: Callable[[Calls, torch.Tensor], torch.Tensor], x: torch.Tensor, model_dtype: torch.dtype
) -> None:
    model = Calls(body).to(model_dtype)
    said = said_by(lambda: model(x))
    if said is None:
        autopar.plan(model, x, (1,), device="h100")
        return
    with pytest.raises((InputError, CaptureError)) as refusal:
        autopar.plan(model, x, (1,), device="h100")
    if not refusal.value.what.startswith("Calls cannot be captured"):  # by the trace, in other words
        assert said in refusal.value.what
    assert "above" not in refusal.value.details["fix"] or "mask" in said
    assert __file__ in refusal.value.details["at"]


def test_the_refusal_says_where_it_is_and_what_the_input_should_be() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).to(torch.bfloat16)
    with pytest.raises(InputError) as refusal:
        autopar.plan(model, X, (1,), device="h100")
    assert refusal.value.what == (
        "torch refuses the dtypes of linear in 0: mat1 and mat2 must have the same dtype, but got Float and BFloat16"
    )
    assert refusal.value.details["operands"] == "input: float32[8, 4], 0.weight: bfloat16[6, 4], 0.bias: bfloat16[6]"
    assert refusal.value.details["fix"] == 'give input as bfloat16, or plan with precision="bf16", which casts inputs'
    autopar.plan(model, X, (1,), device="h100", precision="bf16")


def test_where_no_input_is_to_blame_the_model_is() -> None:
    with pytest.raises(CaptureError, match="torch refuses the dtypes of matmul: ") as refusal:
        autopar.plan(Calls(mismatched_inside), X, (1,), device="h100")
    assert refusal.value.details["fix"] == "cast fc:linear#0 in forward: .to(torch.float64)"


@pytest.mark.parametrize("divided", [torch.remainder, torch.floor_divide, torch.fmod])
def test_integers_are_divided_by_integers(divided: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    model = Calls(lambda m, x: m.table(divided(x, x + 1).clamp(0, 4)))
    assert autopar.plan(model, TOKENS, (1,), device="h100")


def test_autocast_and_mixed_precision_cast_no_double() -> None:
    with pytest.raises(InputError, match="Double") as refusal:
        autopar.plan(Calls(linear), X.double(), (1,), device="h100", precision="bf16-mixed")
    assert refusal.value.details["fix"].startswith("give x as ")
    autopar.plan(Calls(linear), X, (1,), device="h100", precision="bf16-mixed")


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """The real part: torch warns of a conversion that leaves the other out."""
    return tensor.real if tensor.is_complex() else tensor


def beside(target: str) -> Iterator[tuple[str | None, str | None]]:
    """What torch says of calls of an operator that were traced, of which one operand has another dtype; and what we say."""
    for example in EXAMPLES[target][:2]:
        op, values, tensors = example.build(target)
        for name, value in values.items():
            for dtype in {torch.float32, torch.int64} - {value.dtype}:
                other = {**values, name: replace(value, dtype=dtype, requires_grad=False)}
                if (traced := traced_call(op, other)) is not None:
                    held = {**tensors, name: _real(tensors[name]).to(dtype)}
                    args, kwargs = filled(op.args, op.kwargs, lambda ref, held=held: held[ref.name])
                    said = said_by(lambda args=args, kwargs=kwargs: overload(target)(*args, **kwargs))
                    program = Program(ops=(traced,), inputs=(*other.values(),), parameters=(), buffers=(), outputs=())
                    yield said, refused(program)


def traced_call(op: Op, values: dict[str, Value]) -> Op | None:
    """The op with the results that a trace has; None where it refuses the operands itself."""
    try:
        found = infer(op.target, op.args, op.kwargs, values.__getitem__)
    except Exception:
        return None
    kinds = (found,) if isinstance(found, Kind) else found
    results = (Value(name=f"y{i}", shape=kind.shape, dtype=kind.dtype) for i, kind in enumerate(kinds))
    return replace(op, results=tuple(results))


def refused(program: Program) -> str | None:
    try:
        refuse_dtypes(program, None)
    except InputError as error:
        return error.what
    return None


UNSEEN = ("aten.multinomial.default",)  # of zeros there is no draw


@pytest.mark.one_in(8)
@pytest.mark.parametrize("target", sorted({*EXAMPLES} - {*UNSEEN}))
def test_operators_refuse_on_small_zeros_what_they_refuse_at_all(target: str) -> None:
    for said, ours in beside(target):
        assert (said is None) == (ours is None), said or ours
