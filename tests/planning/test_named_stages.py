"""Where stages begin: between layers outside of any container, and at any named module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import ConstraintError
from autopar.plan.options import Options
from autopar.verify.verification import verify
from tests.planning.test_pipeline_plan import Halving, Skipping
from tests.support.threads import Threads


class Plain(nn.Module):
    """Layers by names of their own, and no residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x).relu()).relu()).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "path"), [(Halving(), "layers.1"), (Halving(), "layers.0.1"), (Skipping(), "layers.1.1"), (Plain(), "second")]
)
def test_a_stage_begins_with_any_module_that_is_named(threads: Threads, model: nn.Module, path: str) -> None:
    x, options = torch.randn(4, 8), Options(device="h100", pipeline="pp")
    plan = autopar.plan(model, x, {"pp": 2}, device="h100", pipeline="pp", stages=[path], microbatches=2)
    assert plan.pipeline is not None
    assert plan.pipeline.modules[1].startswith(path)
    report = verify(model, x, {"pp": 2}, plan, options, threads)
    assert report.ok, str(report)


def test_the_modules_that_are_proposed_are_those_at_which_stages_can_begin() -> None:
    model, sample = Halving(), torch.randn(4, 8)
    asked = {"device": "h100", "pipeline": "pp", "microbatches": 2}
    with pytest.raises(ConstraintError, match=r"no stage of the pipeline can begin at 'layers\.9'") as caught:
        autopar.plan(model, sample, {"pp": 2}, stages=["layers.9"], **asked)
    known = caught.value.details["known"].split(", ")
    assert "layers.1" in known
    for path in known:
        assert autopar.plan(model, sample, {"pp": 2}, stages=[path], **asked).pipeline is not None


def test_a_model_whose_layers_are_in_no_container_is_cut_between_them() -> None:
    plan = autopar.plan(Plain(), torch.randn(4, 8), {"pp": 3}, device="h100", pipeline="pp", microbatches=4)
    assert plan.pipeline is not None
    assert plan.pipeline.modules[1:] == ("second", "third")
