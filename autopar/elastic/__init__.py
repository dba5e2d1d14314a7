"""Elastic training: it continues when the number of processes changes, and after any of them is killed."""

from autopar.elastic.run import run
from autopar.elastic.state import TrainingState

__all__ = ["TrainingState", "run"]
