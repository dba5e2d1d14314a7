"""What made a rank fail, told to the others: they wait for its messages, and would say only that these do not come.

The first rank that fails leaves its reason in the store of the process group. When its process ends its connections close, and
what the other ranks wait for fails: they then raise the reason that they find.
"""

from __future__ import annotations

import traceback

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from autopar.errors import RankError
from autopar.runtime.lost_ranks import lost

FAILED = "autopar/failed"


def announce(where: str, action: str, error: Exception) -> RankError:
    """The error to raise for an action that failed; other ranks raise it too, in the place of what they wait for."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    reason = str(error).partition("\n")[0][:200] or type(error).__name__
    mine = f"{where} failed at {action} on rank {rank}"
    found = told(f"{mine}: {type(error).__name__}: {reason} ({_line(error)})")
    return RankError(found.partition(": ")[0], reason=found.partition(": ")[2], fix="see the log of that rank")


def _line(error: Exception) -> str:
    """Where an error was raised: file, line and its text, in emitted code too."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{last.filename}:{last.lineno}: {(last.line or '').strip()[:100]}"


def failed(error: RuntimeError, where: str) -> RankError:
    """The error to raise for a message that failed: the reason that another rank has told, or which ranks died."""
    found = told("") if dist.is_initialized() else ""
    if not found:
        return lost(error, where)
    what, _, reason = found.partition(": ")
    return RankError(f"{what}: rank {dist.get_rank()} waited in {where}", reason=reason, fix="see the log of that rank")


def told(reason: str) -> str:
    """The reason of the first rank that failed: this one's, if there is none yet."""
    if not dist.is_initialized():
        return reason
    store = _get_default_store()
    try:
        if reason or store.check([FAILED]):
            return str(store.compare_set(FAILED, "", reason).decode())
    except RuntimeError:  # the process that holds the store has ended
        pass
    return reason


__all__ = ["announce", "failed"]
