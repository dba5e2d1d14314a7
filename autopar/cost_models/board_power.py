"""Power limits of the catalog's boards, from their makers' data sheets, for the energy of a step."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.device import Device

# Watts of one board: "max thermal design power" or "total board power" of the data sheets that the catalog names.
BOARD_POWER: Mapping[str, float] = {
    "v100-32gb": 300,
    "a100-40gb": 400,
    "a100-80gb": 400,
    "h100": 700,
    "h200": 700,
    "b200": 1000,
    "l4": 72,
    "l40s": 350,
    "t4": 70,
    "rtx4090": 450,
    "rtx3090": 350,
    "rtx3080-10gb": 320,
    "rtx2060-6gb": 160,
}


def board_power(device: Device) -> float | None:
    """The power limit of a device in watts; None for one that is not in the catalog, such as a CPU.

    >>> from autopar.cost_models.catalog import device
    >>> board_power(device("h100"))
    700
    """
    return BOARD_POWER.get(device.name)


__all__ = ["BOARD_POWER", "board_power"]
