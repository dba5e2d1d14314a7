"""How calls are bound to the signature and results are rebuilt."""

from __future__ import annotations

import collections
import dataclasses
import pickle
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import nn

from autopar.capture import Signature, capture
from autopar.errors import CaptureError, InputError
from tests.capture.models import gpt2


class Two(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None, scale: float = 2.0, **more: torch.Tensor) -> torch.Tensor:
        total = x * scale if y is None else x * scale + y
        return total + sum(more.values()) if more else total


X, Y = torch.ones(8, 4), torch.ones(4)


def signature(sample: object) -> Signature:
    return capture(Two(), sample).signature


def test_a_tensor_a_tuple_and_a_mapping_name_the_same_inputs() -> None:
    for sample in ((X, Y), [X, Y], {"y": Y, "x": X}, collections.UserDict(x=X, y=Y)):
        assert [planned.path for planned in signature(sample).tensors] == ["x", "y"]
    assert [planned.path for planned in signature(X).tensors] == ["x"]


def test_a_call_binds_by_position_and_by_name_in_any_order() -> None:
    planned = signature((X, Y))
    for args, kwargs in (((X, Y), {}), ((X,), {"y": Y}), ((), {"y": Y, "x": X}), ((X, Y, 2.0), {})):
        bound = planned.bind(args, kwargs)
        assert bound[0] is X
        assert bound[1] is Y


def test_the_program_does_not_depend_on_the_order_of_keywords() -> None:
    first = capture(Two(), {"x": X, "b": X, "a": Y})
    second = capture(Two(), {"a": Y, "b": X, "x": X})
    assert first.program.hash == second.program.hash
    assert [value.name for value in first.program.inputs] == ["x", "a", "b"]


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    more: dict[str, torch.Tensor]
    scale: float = 2.0


@dataclasses.dataclass
class Scored:
    batch: Batch
    loss: torch.Tensor
    rest: torch.Tensor | None = None


class Scores(nn.Module):
    def forward(self, batch: Batch) -> Scored:
        return Scored(batch=batch, loss=(batch.x * batch.scale + batch.more["y"]).sum())


def test_dataclasses_are_their_fields() -> None:
    planned = capture(Scores(), {"batch": Batch(x=X, more={"y": Y})}).signature
    assert [one.path for one in planned.tensors] == ["batch.x", "batch.more.y"]
    assert planned.bind((Batch(x=X, more={"y": Y}),), {})[1] is Y
    with pytest.raises(InputError, match=r"argument batch\.scale is not the planned one"):
        planned.bind((Batch(x=X, more={"y": Y}, scale=3.0),), {})
    assert planned.returned.paths == ("batch.x", "batch.more.y", "loss")
    assert planned.rebuild([X, Y, X.sum()]) == Scored(batch=Batch(x=X, more={"y": Y}), loss=X.sum())


@pytest.mark.parametrize(
    "args, kwargs, said",
    [
        ((X,), {}, "argument y is missing"),
        ((X, Y), {"z": Y}, "argument z is not in the plan"),
        ((X[:4], Y), {}, "argument x has another shape than planned: dim 0 is 4, planned 8"),
        ((X[0], Y), {}, "argument x has another shape than planned: 1 dims, planned 2"),
        ((X.long(), Y), {}, "argument x has another dtype than planned"),
        ((X, 3), {}, "argument y is not a tensor"),
        ((X, Y, 3.0), {}, "argument scale is not the planned one"),
        ((X, Y), {"x": X}, "argument x is given twice"),
        ((X, Y, 2.0, 1), {}, "4 positional arguments, but forward takes 3"),
    ],
)
def test_another_call_than_the_planned_one_is_refused_by_name(args: tuple, kwargs: dict, said: str) -> None:
    with pytest.raises(InputError, match=said):
        signature((X, Y)).bind(args, kwargs)


def test_another_batch_size_says_that_a_plan_is_made_for_one_shape() -> None:
    with pytest.raises(InputError, match="a plan is made for one shape"):
        signature((X, Y)).bind((X[:4], Y), {})


def test_nested_arguments_have_dotted_names() -> None:
    class Nested(nn.Module):
        def forward(self, batch: dict, pair: tuple) -> torch.Tensor:
            return batch["a"] + pair[0] * pair[1][0]

    captured = capture(Nested(), {"batch": {"a": X}, "pair": (X, [Y])})
    assert [value.name for value in captured.program.inputs] == ["batch.a", "pair.0", "pair.1.0"]
    assert len(captured.signature.bind(({"a": X}, (X, [Y])), {})) == 3


def test_an_argument_that_is_neither_tensor_nor_constant_is_refused() -> None:
    with pytest.raises(InputError, match="argument y is a object"):
        capture(Two(), (X, object()))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused() -> None:
    with pytest.raises(InputError, match="an input is a nested tensor"):
        capture(Two(), (torch.nested.nested_tensor([X[:2], X[:3]]), Y))


def test_a_sample_that_forward_does_not_take_is_refused() -> None:
    with pytest.raises(InputError, match=r"does not fit Two\.forward"):
        capture(Two(), {"y": Y})


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@pytest.mark.parametrize(
    "make, paths",
    [
        (lambda x: x * 2, ["0"]),
        (lambda x: (x * 2, [x * 3]), ["0", "1.0"]),
        (lambda x: {"a": x * 2, "b": {"c": x * 3}}, ["a", "b.c"]),
        (lambda x: Pair(x * 2, x * 3), ["left", "right"]),
        (lambda x: (x * 2, None, 7, "s"), ["0"]),
    ],
)
def test_results_come_back_in_the_users_structure(make: object, paths: list[str]) -> None:
    class Returns(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return make(x)

    captured = capture(Returns(), X)
    assert [output.path for output in captured.program.outputs] == paths
    expected = Returns()(X)
    leaves = torch.utils._pytree.tree_leaves(expected)
    rebuilt = captured.signature.rebuild([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    assert type(rebuilt) is type(expected)
    assert str(rebuilt) == str(expected)


def test_a_model_output_of_hugging_face_is_returned_as_its_class() -> None:
    model, sample = gpt2(layers=1)
    captured = capture(model, sample)
    rebuilt = captured.signature.rebuild([torch.zeros(()), torch.zeros(1)])
    assert type(rebuilt) is type(model(**sample))
    assert list(rebuilt.keys()) == ["loss", "logits"]


def test_results_that_are_not_tensors_are_left_out_with_one_notice() -> None:
    class Cache(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, object]:
            return {"x": x * 2, "cache": object()}

    with pytest.warns(UserWarning, match="left out: cache") as notices:
        captured = capture(Cache(), X)
    assert len(notices) == 1
    assert captured.signature.rebuild([X]) == {"x": X, "cache": None}


def test_a_model_without_tensors_to_return_is_refused() -> None:
    class Nothing(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return object()

    with pytest.raises(CaptureError, match=r"forward returns a \w+ without tensors"):
        capture(Nothing(), X)


def test_a_signature_can_be_sent_to_another_process() -> None:
    model, sample = gpt2(layers=1)
    planned = capture(model, sample).signature
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pytree's own
        sent = pickle.loads(pickle.dumps(planned))
    assert sent.tensors == planned.tensors
    assert type(sent.rebuild([torch.zeros(()), torch.zeros(1)])) is type(planned.rebuild([torch.zeros(()), torch.zeros(1)]))


def test_use_cache_is_off_unless_the_sample_says_otherwise() -> None:
    model, sample = gpt2(layers=1)
    planned = capture(model, sample).signature
    ids = [sample["input_ids"], sample["labels"]]
    assert all(a is b for a, b in zip(planned.bind((), sample | {"use_cache": False}), ids, strict=True))
    with pytest.raises(InputError, match="argument use_cache is not the planned one"):
        planned.bind((), sample | {"use_cache": True})
