"""Tells the other ranks why a rank failed in a step: they wait for its messages, and could only report that none arrive.

The first rank that fails, or exits by `sys.exit` or Ctrl-C, writes its reason to the store of the process group and waits until
the others have read it, because its process may host the store. In every process a thread polls for a reason once a second
while a step runs. When the failed process ends, its connections close; ranks whose messages then fail raise the reason. A rank
whose message does not fail, because the failed process lives on, say, cannot be woken: its process prints the reason and exits.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from autopar.errors import RankError
from autopar.runtime.lost_ranks import lost
from autopar.runtime.rank_consistency import from_rank_0
from autopar.runtime.world import Context

MODULES = "autopar/pipelines"  # counts the pipelines built
INTERVAL = 1.0  # seconds between polls for a reason
PATIENCE = 10.0  # seconds that a rank which knows the reason gets to leave its step by itself
HEARD = 5.0  # seconds that the other ranks get to read a reason


class StepFailures:
    """Why ranks fail in the steps of one module; `name` is unique to the module, equal on all ranks, and "" on a single rank.

    All ranks leave the failed step with an error, or the next step if they had already finished it. Reasons are numbered by
    these errors, so that a failure that every rank survives does not affect later steps.
    """

    def __init__(self, name: str) -> None:
        self._name, self._errors = name, 0
        self._store: Store | None = _get_default_store() if name else None
        self._runs, self._lock, self._found, self._since = threading.Event(), threading.Lock(), "", 0.0
        self._watcher: threading.Thread | None = None
        self._exit: BaseException | None = None  # announced to the other ranks

    @staticmethod
    def of(context: Context) -> StepFailures:
        """The failures of a module that all ranks build."""
        return StepFailures(
            from_rank_0(lambda: str(_get_default_store().add(MODULES, 1)), context) if context.device_mesh else ""
        )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Enter around a step: watch for failures of other ranks, and add their reason to an error on this rank."""
        if self._store is not None and self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="autopar-failures", daemon=True)
            self._watcher.start()
        self._since = time.monotonic()
        self._runs.set()
        try:
            yield
        except RankError as error:
            self._look()
            known, self._errors, self._found = self._found, self._errors + 1, ""
            if not known or known.partition(": ")[0] in error.what:
                raise
            raise _waited(known, error.what) from error
        except Exception:
            raise
        except BaseException as error:
            self._exits("a step of the pipeline", "its beginning or end", error)
            self._errors, self._found = self._errors + 1, ""
            raise
        finally:
            self._runs.clear()

    @contextmanager
    def told(self, where: str, action: str) -> Iterator[None]:
        """Enter around an action: announce a failure in it to the other ranks, which raise it instead of waiting.

        Exits of the process (`sys.exit`, Ctrl-C) are raised again as they are. Raises RankError for every other failure.
        """
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            raise self._announce(where, action, error) from error
        except BaseException as error:
            self._exits(where, action, error)
            raise

    def _exits(self, where: str, action: str, error: BaseException) -> None:
        """Announce an exit to the other ranks, once, however many blocks it leaves."""
        if error is not self._exit:
            self._exit = error
            self._announce(where, action, error)

    def _announce(self, where: str, action: str, error: BaseException) -> RankError:
        """Announce a failed action to the other ranks; returns the error to raise."""
        rank = dist.get_rank() if self._store is not None else 0
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        what = f"{where} failed at {action} on rank {rank}"
        told = self._told(f"{what}: {type(error).__name__}: {reason} ({_line(error)})")
        return RankError(told.partition(": ")[0], reason=told.partition(": ")[2], fix="see the log of that rank")

    def failed(self, error: RuntimeError, where: str) -> RankError:
        """The error to raise for a failed message: the reason that another rank announced, or which ranks died."""
        self._look()
        if not self._found:
            return lost(error, where)
        return _waited(self._found, f"rank {dist.get_rank()} waited in {where}")

    def _told(self, reason: str) -> str:
        """Publish a reason, unless another rank failed first, and wait until the others have read it; returns the first one."""
        if self._store is None:
            return reason
        with suppress(RuntimeError):  # the process that holds the store may have ended
            reason = self._store.compare_set(self._key, "", reason).decode()
            self._look()
            until = time.monotonic() + HEARD
            while self._store.add(f"{self._key}/heard", 0) < dist.get_world_size() and time.monotonic() < until:
                time.sleep(INTERVAL / 10)
        return reason

    @property
    def _key(self) -> str:
        return f"autopar/failed/{self._name}/{self._errors}"

    def _watch(self) -> None:
        while self._runs.wait():
            time.sleep(INTERVAL)
            if not self._runs.is_set():
                continue
            self._look()
            if self._found and time.monotonic() - self._since > PATIENCE:
                print(
                    f"autopar.errors.RankError: {self._found}\nthis process waited for a message", file=sys.stderr, flush=True
                )
                os._exit(1)

    def _look(self) -> None:
        """Read why another rank failed, if that is not known yet and a reason was published."""
        with self._lock, suppress(RuntimeError):  # the process that holds the store may have ended
            if self._store is not None and not self._found and self._store.check([self._key]):
                self._since = time.monotonic()
                self._found = self._store.get(self._key).decode()
                self._store.add(f"{self._key}/heard", 1)


def _waited(reason: str, waited: str) -> RankError:
    """The error for a rank that waited for one that failed."""
    what, _, why = reason.partition(": ")
    return RankError(f"{what}: {waited}", reason=why, fix="see the log of that rank")


def _line(error: BaseException) -> str:
    """Where an error was raised: file, line number and source text; works for emitted code too."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{last.filename}:{last.lineno}: {(last.line or '').strip()[:100]}"


__all__ = ["StepFailures"]
