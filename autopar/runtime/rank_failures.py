"""What made a rank fail in a step, told to the others: they wait for its messages, and would say only that these do not come.

The first rank that fails, or leaves by `sys.exit` or Ctrl-C, leaves its reason in the store of the process group, and waits
until the others have read it, as its process may be the one that holds the store. In every process a thread looks for a reason
once a second while a step runs. A rank whose message fails then, as connections close when a process ends, raises the reason.
Nothing wakes a rank whose message does not fail, for instance if the process of the one that did lives on: it is ended, with
the reason as its last words.
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

MODULES = "autopar/pipelines"  # how many were built
INTERVAL = 1.0  # seconds between two looks for a reason
PATIENCE = 10.0  # seconds in which a rank that knows the reason may still come out of its step by itself
HEARD = 5.0  # seconds in which the others are to read a reason


class StepFailures:
    """The reasons for which ranks fail in the steps of one module; `name` is its own, the same on all ranks, "" on one alone.

    Ranks that come out of a step by an error come out of the same one, or of the next where one had ended it before: reasons
    are numbered by these errors, so that one that all survive is none in later steps.
    """

    def __init__(self, name: str) -> None:
        self._name, self._errors = name, 0
        self._store: Store | None = _get_default_store() if name else None
        self._runs, self._lock, self._found, self._since = threading.Event(), threading.Lock(), "", 0.0
        self._watcher: threading.Thread | None = None
        self._exit: BaseException | None = None  # of which the others were told

    @staticmethod
    def of(context: Context) -> StepFailures:
        """The failures of a module that all ranks build."""
        return StepFailures(
            from_rank_0(lambda: str(_get_default_store().add(MODULES, 1)), context) if context.device_mesh else ""
        )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around a step: look for failures of other ranks beside it, and say of what fails here why it does."""
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
        """Around an action: of what fails in it the other ranks are told, and raise it in the place of what they wait for.

        An exit of the process, which `sys.exit` and Ctrl-C raise, goes on here. Raises RankError for every other failure.
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
        """Tell the others of an exit, once on its way out of all that it leaves."""
        if error is not self._exit:
            self._exit = error
            self._announce(where, action, error)

    def _announce(self, where: str, action: str, error: BaseException) -> RankError:
        """The error to raise for an action that failed, after the other ranks were told."""
        rank = dist.get_rank() if self._store is not None else 0
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        what = f"{where} failed at {action} on rank {rank}"
        told = self._told(f"{what}: {type(error).__name__}: {reason} ({_line(error)})")
        return RankError(told.partition(": ")[0], reason=told.partition(": ")[2], fix="see the log of that rank")

    def failed(self, error: RuntimeError, where: str) -> RankError:
        """The error to raise for a message that failed: the reason that another rank has told, or which ranks died."""
        self._look()
        if not self._found:
            return lost(error, where)
        return _waited(self._found, f"rank {dist.get_rank()} waited in {where}")

    def _told(self, reason: str) -> str:
        """The reason of the first rank that failed: this one's, if there is none yet; the others have read it then."""
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
        """Read the reason for which another rank failed, if it is not known and there is one."""
        with self._lock, suppress(RuntimeError):  # the process that holds the store may have ended
            if self._store is not None and not self._found and self._store.check([self._key]):
                self._since = time.monotonic()
                self._found = self._store.get(self._key).decode()
                self._store.add(f"{self._key}/heard", 1)


def _waited(reason: str, waited: str) -> RankError:
    """The error of a rank that waited for one that failed."""
    what, _, why = reason.partition(": ")
    return RankError(f"{what}: {waited}", reason=why, fix="see the log of that rank")


def _line(error: BaseException) -> str:
    """Where an error was raised: file, line and its text, in emitted code too."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{last.filename}:{last.lineno}: {(last.line or '').strip()[:100]}"


__all__ = ["StepFailures"]
