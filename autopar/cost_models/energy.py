"""Power of a board at its limit and energy of moving a bit, each number with its source.

Nothing here was measured while training. The limit is a board's sustained maximum: a step takes no more.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.conversion import COPIES
from autopar.ir.device import Bytes

Joules = float
Watts = float
PICO = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardPower:
    """The power limit of a device's board, in watts, and the energy of a bit that its memory reads or writes, in joules."""

    watts: Watts
    memory_bit: Joules
    source: str


HBM = 3.92 * PICO  # HBM2, activation and I/O included: O'Connor et al., "Fine-Grained DRAM", MICRO 2017
GDDR = 14 * PICO  # GDDR5, ibid.; of GDDR6 it says nothing
DRAM_SOURCE = "O'Connor et al., Fine-Grained DRAM, MICRO 2017 (HBM2 3.92 pJ/bit, GDDR5 14 pJ/bit)"

BOARDS: dict[str, BoardPower] = {
    name: BoardPower(watts=watts, memory_bit=bit, source=source)
    for name, watts, bit, source in (
        ("v100-32gb", 300, HBM, "V100 SXM2 data sheet, 2018"),
        ("a100-40gb", 400, HBM, "A100 SXM4 data sheet, 2020"),
        ("a100-80gb", 400, HBM, "A100 SXM4 80GB data sheet, 2021"),
        ("h100", 700, HBM, "H100 SXM5 data sheet, 2023"),
        ("h200", 700, HBM, "H200 SXM data sheet, 2024"),
        ("b200", 1000, HBM, "Blackwell architecture technical brief, NVIDIA, 2024"),
        ("l4", 72, GDDR, "L4 data sheet, 2023"),
        ("l40s", 350, GDDR, "L40S data sheet, 2023"),
        ("t4", 70, GDDR, "T4 data sheet, 2019"),
        ("rtx4090", 450, GDDR, "NVIDIA Ada GPU architecture whitepaper, 2022"),
        ("rtx3090", 350, GDDR, "NVIDIA Ampere GA102 whitepaper v2, 2021"),
        ("rtx3080-10gb", 320, GDDR, "NVIDIA Ampere GA102 whitepaper v2, 2021"),
        ("rtx2060-6gb", 160, GDDR, "GeForce RTX 2060 specifications, NVIDIA, 2019"),
    )
}

ON_BOARD, ON_NETWORK = 10 * PICO, 250 * PICO  # joules of a bit between packages on a board, and between systems
LINK_SOURCE = "Arunkumar et al., MCM-GPU, ISCA 2017, table 2 (board 10 pJ/bit, system 250 pJ/bit)"
ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}  # how often a device sends the other parts


def between_systems(link: str) -> bool:
    """Whether a catalog link leaves the node, so that the boards do not include its energy."""
    return link.startswith(("ib-", "ethernet-"))


def link_bit(link: str) -> Joules:
    """The energy of a bit over a link of the catalog."""
    return ON_NETWORK if between_systems(link) else ON_BOARD


def sent(kind: str, buffer: Bytes, devices: int) -> float:
    """The bytes that all devices of a group together send in a collective with this larger buffer, by ring or pairwise; for a
    copy between a device and its host those of the buffer.

    >>> sent("all_reduce", 800, 4)
    4800.0
    """
    return float(buffer) if kind in COPIES else float(ROUNDS[kind] * (devices - 1) * buffer)


__all__ = ["BOARDS", "DRAM_SOURCE", "LINK_SOURCE", "BoardPower", "Joules", "Watts", "between_systems", "link_bit", "sent"]
