"""Program to program: one pass a file, one rewrite a pass; `normalise` runs those that every captured program goes through."""

from autopar.passes.pipeline import normalise

__all__ = ["normalise"]
