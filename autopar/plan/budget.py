"""The memory budget of a device."""

from __future__ import annotations

import math
import re

from autopar import files
from autopar.errors import BudgetError
from autopar.ir.device import Bytes
from autopar.ir.mesh import Mesh

GIB = 2**30
SHARE = 0.9  # of the device's memory, if no budget is given: the rest is for the allocator, the libraries and fragments
# Peak reserved by torch's caching allocator over peak allocated (`torch.cuda.max_memory_reserved`, `max_memory_allocated`):
# median of 15 pipeline stages of GPT with 1.3e9 and 2.6e9 parameters on A10G and L4, 1.02 to 1.15. Source: the runs of Aceso
# that the artifact of Mist publishes (github.com/Dazz993/Mist). A budget is of allocated bytes.
RESERVED = 1.12
UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)},
}


def parse_bytes(budget: Bytes | str | None, mesh: Mesh) -> Bytes:
    """Bytes per device: a number, a string such as "80GB" or "24GiB", or by default 90% of the mesh's device.

    Raises BudgetError for anything else.
    """
    if budget is None:
        assert mesh.device is not None
        return int(SHARE * mesh.device.memory)
    return byte_count(budget, "a memory budget")


def byte_count(budget: object, what: str, *, per: str = "device", least: Bytes = 1) -> Bytes:
    """Parse bytes: a number, or a string such as "80GB" or "24GiB".

    Raises BudgetError for anything else, and for fewer than `least`; the error says `what` the bytes are, and `per` what.
    """
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([KMGT]?i?B?)\s*", budget)
        size = float(match[1]) * UNITS[match[2]] if match and match[2] in UNITS else math.nan
    else:
        size = budget if isinstance(budget, (int, float)) and not isinstance(budget, bool) else math.nan
    if least <= size < files.LARGEST:
        return int(size)
    raise BudgetError(f"{budget!r} is not {what}", fix=f'bytes per {per} as a number, or a text such as "80GB" or "24GiB"')
