"""The hub trial: small models from the library's own tables, and a check that detects wrong numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from benchmarks import hub, hub_configs, hub_families, hub_models, trials


@pytest.mark.parametrize("kind, family", [("olmo", "text, decoder"), ("decision_transformer", "reinforcement learning")])
def test_a_type_is_built_small_and_runs(kind: str, family: str) -> None:
    built = hub_models.built(kind)
    assert built.module.training
    assert sum(one.numel() for one in built.module.parameters()) < 2_000_000
    assert hub_families.family(kind) == family


def test_a_type_that_is_called_in_its_own_way_has_the_sample_that_its_processor_makes() -> None:
    built = hub_models.built("kosmos-2")
    latent = built.module.config.latent_query_num
    assert built.sample["image_embeds_position_mask"].sum(1).tolist() == [latent] * 4


def test_images_of_any_size_in_a_text_are_trained_with_their_sizes_static_and_the_positions_given() -> None:
    """As the FAQ says of Qwen2.5-VL."""
    built = hub_models.built("qwen2_5_vl")
    sample: dict[str, Any] = dict(built.sample)
    known = {name: sample[name] for name in ("input_ids", "mm_token_type_ids", "image_grid_thw")}
    del sample["mm_token_type_ids"]
    model: Any = built.module
    sample["position_ids"], _ = model.model.get_rope_index(**known)
    assert autopar.verify(model, sample, (2,), static=["image_grid_thw"]).ok


def test_layers_are_cut_to_the_first_of_each_kind_with_what_is_listed_per_layer() -> None:
    config = hub_configs.Shrinking("small", False).config("gemma3_text")
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert config.num_hidden_layers == 2


def test_a_module_that_asks_for_single_precision_is_compared_in_double() -> None:
    with trials.Wide():
        x = torch.ones(3).double() / 3
        assert x.float().to(torch.float32).softmax(0, dtype=torch.float32).dtype is torch.float64


@pytest.mark.parametrize("scores, tied", [([3.0, 2.0, 1.0], False), ([3.0, 1.0, 1.0], True), ([3.0, 3.0, 1.0], True)])
def test_equal_scores_are_told_where_they_decide_the_largest(scores: list[float], tied: bool) -> None:
    with trials.Wide() as wide:
        torch.tensor(scores, dtype=torch.float64).topk(2)
    assert wide.tied is tied


def test_a_trial_tells_each_stage_and_what_torch_says_of_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Branches(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 0 else x

    made = hub_models.Built(module=Branches(4, 4), sample={"x": torch.ones(4, 4)}, head="Branches", size="small")
    monkeypatch.setattr(hub_models, "built", lambda kind: made)
    told: list[hub.Record] = []
    with pytest.raises(Exception, match="depends on the values"):
        hub.trial("branches", trials.Trial({}, lambda found: told.append(dict(found))))
    assert [one["stage"] for one in told] == ["built", "built"]
    assert "data-dependent" in told[-1]["exported"]


def test_the_last_that_was_found_of_a_type_counts(tmp_path: Path) -> None:
    log = tmp_path / "hub.jsonl"
    refused = {"kind": "a", "stage": "built", "head": "A", "family": "image", "reason": "no", "exported": ""}
    log.write_text(json.dumps(refused) + "\n" + json.dumps(refused | {"stage": "equal", "reason": ""}) + "\n")
    lines = hub.report(list(trials.known_of(log).values())).splitlines()
    assert ["image", "1", "0", "1", "1", "1", "1"] in [line.split() for line in lines]


def test_the_report_says_no_folder_of_this_machine_and_counts_what_torch_refuses_apart() -> None:
    reason = "CaptureError: a shape | at   /home/me/site-packages/transformers/x.py:3 in forward | fix  none"
    refused = {"kind": "a", "stage": "built", "head": "A", "family": "image", "reason": reason}
    text = hub.report([refused | {"exported": "too"}, refused | {"kind": "b", "exported": ""}])
    assert "refused by torch.export as well: 1" in text
    assert "refused, though torch.export takes it: 1" in text
    assert "b (A): CaptureError: a shape, at transformers/x.py:3 in forward" in text
    assert "/home" not in text
