"""One pool of worker processes for the whole test session, and the golden texts."""

import signal
from collections.abc import Iterator

import pytest

from autopar.operators.registry import REGISTERED
from autopar.runtime.workers import WorkerPool
from tests.support.golden import Golden


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="write the golden texts anew")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden.check("name.txt", text)` compares with tests/goldens/name.txt."""
    return Golden(update=bool(request.config.getoption("--update-goldens")))


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Eight gloo workers; `pool.run(f"{__name__}:function", payload, ranks=4)` uses fewer."""
    with WorkerPool(8, preload=["autopar.verify.verification", "tests.support.models"]) as workers:
        yield workers


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C as Python handles it, also where a shell started the tests in its background and so has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def registry() -> Iterator[None]:
    """Rules that a test registers are forgotten after it."""
    kept = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(kept)
