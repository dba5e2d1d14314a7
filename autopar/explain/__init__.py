"""Explain: what a plan does, what it costs, and whether it costs more than before."""

from autopar.explain.command import main
from autopar.explain.difference import Difference, difference
from autopar.explain.target import parse_mesh

__all__ = ["Difference", "difference", "main", "parse_mesh"]
