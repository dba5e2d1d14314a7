"""The traced copy of a model, and what a program records about the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.capture.meta_copy import skeleton
from autopar.errors import CaptureError
from tests.capture.models import gpt2, t5


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 4, bias=False)
        self.outside = nn.Linear(4, 4, bias=False)
        self.outside.weight = self.inside.weight
        self.idle = nn.Linear(2, 2)
        self.register_buffer("kept", torch.ones(4))
        self.register_buffer("lost", torch.ones(4), persistent=False)
        self.loose = torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outside(self.inside(x)) + self.kept + self.lost + self.loose


def test_a_tied_parameter_is_one_with_several_names() -> None:
    for device in ("cpu", "meta"):
        with torch.device(device):
            program = capture(Tied(), torch.ones(8, 4)).program
        assert {p.value.name: (p.names, p.used) for p in program.parameters} == {
            "inside.weight": (("inside.weight", "outside.weight"), True),
            "idle.weight": (("idle.weight",), False),
            "idle.bias": (("idle.bias",), False),
        }
        assert program.ops[0].operands == ("x", "inside.weight")
        assert program.ops[1].operands[1] == "inside.weight"


def test_buffers_know_whether_they_are_saved_and_plain_tensors_count_as_buffers() -> None:
    program = capture(Tied(), torch.ones(8, 4)).program
    assert {b.value.name: b.persistent for b in program.buffers} == {"kept": True, "lost": False, "loose": False}


def test_ties_of_hugging_face_models_are_found() -> None:
    for build in (gpt2, t5):
        model, sample = build()
        program = capture(model, sample).program
        assert [p.value.name for p in program.parameters] == [name for name, _ in model.named_parameters()]
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        assert sorted(name for p in program.parameters for name in p.names) == sorted(names)


def test_the_copy_holds_no_weights() -> None:
    copy = skeleton(Tied()).module
    tensors = [*copy.parameters(), *copy.buffers(), copy.loose]
    assert all(tensor.is_meta for tensor in tensors)
    assert copy.inside.weight is copy.outside.weight


def test_the_users_model_is_left_untouched() -> None:
    model, sample = gpt2(layers=1)
    model.eval()
    weights = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    ids = sample["input_ids"].clone()
    capture(model, sample)
    assert not model.training
    assert not model._forward_hooks
    for name, parameter in model.named_parameters():
        assert id(parameter) == weights[name][0]
        assert parameter.grad is None
        assert torch.equal(parameter, weights[name][1])
    assert torch.equal(sample["input_ids"], ids)


def test_a_model_on_meta_has_the_program_of_the_real_one() -> None:
    model, sample = gpt2(layers=1)
    with torch.device("meta"):
        hollow = type(model)(model.config)
    assert capture(hollow, sample).program.hash == capture(model, sample).program.hash


def test_frozen_parameters_need_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    model[1].bias.requires_grad_(True)
    program = capture(model, torch.ones(8, 4)).program
    assert [op.requires_grad for op in program.ops] == [False, True]


def test_the_hook_of_a_parameter_is_refused() -> None:
    model = nn.Linear(4, 4)
    model.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(CaptureError, match="the hook on weight would be lost"):
        capture(model, torch.ones(8, 4))


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    model = nn.Linear(4, 4)
    model.lines = (line for line in ())
    with pytest.raises(CaptureError, match="Linear cannot be copied"):
        capture(model, torch.ones(8, 4))


def test_hooks_of_modules_are_captured() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[0].register_forward_hook(lambda module, given, result: result * 2)
    model.register_forward_hook(lambda module, given, result: result + 1)
    targets = [op.target for op in capture(model, torch.ones(8, 4)).program.ops]
    assert targets == ["aten.linear.default", "aten.mul.Tensor", "aten.relu.default", "aten.add.Tensor"]


def test_a_sparse_buffer_that_nothing_reads_is_left_out_and_one_of_the_state_dict_refused() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("graph", torch.eye(4).to_sparse(), persistent=False)
    assert not capture(model, torch.ones(2, 4)).program.buffers
    model.register_buffer("other", torch.eye(4).to_sparse())
    with pytest.raises(CaptureError, match="the buffer other is sparse"):
        capture(model, torch.ones(2, 4))


class Noted(nn.Module):
    """Keeps its loss in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.aux = nn.Linear(4, 4), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.aux = y.square().mean()
        return y.sum() + self.aux


def test_what_a_call_left_in_an_attribute_may_be_captured_again() -> None:
    """The copy that is kept for other lengths and for evaluation held it as a trained tensor that is no parameter."""
    model = Noted()
    model(torch.ones(8, 4)).backward()
    for copied in (model, skeleton(model).module):
        capture(copied, torch.ones(8, 4))
