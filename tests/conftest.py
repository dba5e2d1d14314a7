"""One pool of worker processes for the whole test session, and the golden texts."""

import gc
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from autopar.formulation.prices import Prices
from autopar.operators.registry import REGISTERED
from autopar.planning import planner
from autopar.runtime.threaded_ranks import ThreadedRanks
from autopar.runtime.workers import WorkerPool
from tests.support.captures import Captures
from tests.support.golden import Golden
from tests.support.threads import Threads

settings.register_profile("autopar", deadline=None)  # a busy machine is no failure
settings.load_profile("autopar")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="write the golden texts anew")


@pytest.hookimpl(tryfirst=True)  # before -m selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases as thorough that `one_in` leaves out.

    The places of a case in the lists of its parametrizations are added up, and every n-th sum runs: of a table of models and
    plans the diagonals, so that each model and each plan has a case.
    """
    seen: Counter[str] = Counter()
    for item in items:
        if sample := item.get_closest_marker("one_in"):
            test = item.nodeid.partition("[")[0]
            sizes = [len(mark.args[1]) for mark in item.iter_markers("parametrize")]  # the outermost first
            if sum(map(int, np.unravel_index(seen[test], sizes))) % sample.args[0]:
                item.add_marker("thorough")
            seen[test] += 1


def pytest_collection_finish() -> None:
    """What was imported is not searched for garbage."""
    gc.freeze()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden.check("name.txt", text)` compares with tests/goldens/name.txt."""
    return Golden(update=bool(request.config.getoption("--update-goldens")))


@pytest.fixture(scope="session")
def pools() -> list[WorkerPool]:
    """The pool, once a test has asked for it."""
    return []


@pytest.fixture(scope="session")
def pool(pools: list[WorkerPool]) -> Iterator[WorkerPool]:
    """Eight gloo workers; `pool.run(f"{__name__}:function", payload, ranks=4)` uses fewer."""
    with WorkerPool(8, preload=["autopar.verify.verification", "tests.support.models", "tests.support.preloaded"]) as workers:
        pools.append(workers)
        yield workers


@pytest.fixture(scope="session")
def users() -> list[Path]:
    """The file whose test has used the pool last."""
    return []


@pytest.fixture(autouse=True)
def no_idle_workers(request: pytest.FixtureRequest, pools: list[WorkerPool], users: list[Path]) -> None:
    """Workers that were kept end before a file that needs none: gloo's threads wake up 100 times a second."""
    if "pool" in request.fixturenames:
        users[:] = [request.path]
    elif request.path not in users:
        for workers in pools:
            workers._kill()


@pytest.fixture(scope="session")
def threads() -> Iterator[Threads]:
    """Ranks as threads, in place of `pool` where `verify` runs a plan whose processes are not the point."""
    with ThreadedRanks() as world:
        yield Threads(world)


@pytest.fixture(scope="session")
def captures() -> Captures:
    """What the tests have captured."""
    return Captures()


@pytest.fixture(autouse=True)
def captured_once(request: pytest.FixtureRequest, captures: Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of equal models share a capture; tests/capture makes its own."""
    if request.path.parent.name != "capture":
        monkeypatch.setattr(planner, "capture", captures.capture)


@pytest.fixture
def free_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for which the device copies nothing for messages: what papers count is what is sent."""
    for name in ("unpacking", "packing"):
        monkeypatch.setattr(Prices, name, lambda self, primitive, large, *rest, **more: np.zeros(len(large)))


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
