"""Passes from program to program, one rewrite per file; `normalise` runs those that every captured program goes through."""

from autopar.passes.pipeline import normalise

__all__ = ["normalise"]
