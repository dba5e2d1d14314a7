"""Colours that colour-blind readers can tell apart, on light and dark pages; everything coloured has a label too.

They are those of M. Okabe and K. Ito, "Color Universal Design", 2008, the yellow darker so that it is seen on white.
"""

from __future__ import annotations

from autopar.explain.headline import BATCH, EXPERT, PARTIAL, SAME, SEQUENCE, SHARDS, TENSOR, VOCABULARY
from autopar.explain.html.streams import WAIT

BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE, YELLOW, GREY = (
    "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#b8a700", "#8a8a8a",
)  # fmt: skip
CYCLE = BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, YELLOW, GREY

OF_SCHEME = {
    BATCH: BLUE, SEQUENCE: GREEN, TENSOR: VERMILION, VOCABULARY: PURPLE, EXPERT: ORANGE, PARTIAL: YELLOW, SHARDS: SKY,
    SAME: GREY,
}  # fmt: skip
OF_KIND = {
    "forward": BLUE, "backward": SKY, "recompute": PURPLE, "optimizer": GREEN, "conversion": YELLOW, WAIT: GREY,
    "all-gather": ORANGE, "reduce-scatter": VERMILION, "all-reduce": PURPLE, "all-to-all": GREEN, "once a step": GREEN,
    "backward of inputs": SKY, "backward of weights": YELLOW,
}  # fmt: skip
OF_PURPOSE = {
    "parameters": BLUE, "gradients": ORANGE, "optimizer state": GREEN, "saved activations": SKY,
    "recomputed activations": PURPLE, "temporary": VERMILION, "inputs": YELLOW, "buffers": GREY,
}  # fmt: skip
HATCHED = frozenset({WAIT, "all-reduce", "all-to-all", "conversion"})  # told apart from those of their colour


__all__ = ["BLUE", "CYCLE", "GREEN", "GREY", "HATCHED", "OF_KIND", "OF_PURPOSE", "OF_SCHEME", "ORANGE", "SKY", "VERMILION"]
