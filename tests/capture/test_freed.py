"""A capture keeps nothing of the user's module alive; its tensors would take as much memory as a rank's own."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

import autopar
from tests.support import models

STAGES: dict[str, Any] = {"mesh": {"pp": 1}, "pipeline": "pp", "stages": 2, "microbatches": 2}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
@pytest.mark.parametrize("options", [{"mesh": (1,)}, pytest.param(STAGES, marks=pytest.mark.thorough)], ids=["whole", "stages"])
def test_the_module_is_freed_when_the_user_lets_it_go(name: str, options: dict[str, Any]) -> None:
    model, sample = models.make(name)
    held = weakref.ref(model)
    parallel = autopar.parallelize(model, sample, **options)
    del model
    gc.collect()
    assert held() is None
    assert [*parallel.parameters()]
