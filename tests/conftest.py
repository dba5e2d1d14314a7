"""One pool of worker processes for the whole test session."""

from collections.abc import Iterator

import pytest

from autopar.runtime.workers import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Eight gloo workers; `pool.run(f"{__name__}:function", payload, ranks=4)` uses fewer."""
    with WorkerPool(8) as workers:
        yield workers
