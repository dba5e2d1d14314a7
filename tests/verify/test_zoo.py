"""The architectures of the zoo that no other test covers: equal numbers with the batch split, and under the best plan."""

from __future__ import annotations

import warnings

import pytest

from autopar.plan.options import Options
from autopar.verify.verification import verify
from examples.zoo_models import make
from tests.support import table
from tests.support.threads import Threads

NAMES = "mistral qwen3 roberta clip whisper mixtral_batched resnet unet lstm recommender evoformer palm".split()


@pytest.mark.one_in(16)
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_has_equal_numbers(threads: Threads, name: str, strategy: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="no sharding rule")
        report = verify(*make(name), table.mesh((2, 2)), None, Options(strategy=strategy), threads)
    assert report.ok, str(report)
