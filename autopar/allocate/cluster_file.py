"""A cluster and its jobs in a TOML file. It is data; only its TARGETs, the functions that make the models, are run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from autopar import files
from autopar.allocate.jobs import Cluster, TrainingJob
from autopar.explain.cli_arguments import UsageError, built
from autopar.ir.device import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of `autopar.plan` for a job."""

    precision: str | None = None
    reduce: str | None = None
    optimizer: str | None = None
    strategy: str | None = None
    budget: str | None = None
    recompute: str | None = None
    offload: bool | None = None
    microbatches: int | None = None
    pipeline: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEntry:
    """A `[[jobs]]` entry: a `TrainingJob` whose model and sample are made by `target`, as in `autopar.explain`."""

    name: str
    steps: int
    target: str | None = None
    curve: Mapping[int, Seconds] | None = None
    options: PlanOptions = PlanOptions()
    counts: tuple[int, ...] | None = None
    weight: float = 1.0
    deadline: Seconds | None = None
    present: int = 0
    migration: Seconds = 0.0
    samples: int = 0

    def job(self) -> TrainingJob:
        """The job, with the model and the sample from its `target`. Raises UsageError if it returns none."""
        if self.target is not None and self.curve is not None:
            raise UsageError(f"job {self.name!r} has both a target and a curve", fix="one of them")
        said = {name: getattr(self, name) for name in TrainingJob.__dataclass_fields__ if name in self.__dataclass_fields__}
        model, sample = built(self.target) if self.target is not None else (None, None)
        options = {name: value for name, value in asdict(self.options).items() if value is not None}
        return TrainingJob(**{**said, "options": options}, model=model, sample=sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """The contents of the file."""

    devices: int
    jobs: tuple[JobEntry, ...]
    device: str | None = None
    per_node: int | None = None
    counts: tuple[int, ...] | None = None
    goal: str = "throughput"

    @property
    def cluster(self) -> Cluster:
        """The devices."""
        return Cluster(devices=self.devices, device=self.device, per_node=self.per_node, counts=self.counts)


def read(path: str) -> ClusterFile:
    """Read a cluster file without running anything. Raises UsageError if it is missing or invalid."""
    try:
        return files.typed(ClusterFile, files.parse_toml(files.read(path)))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", fix="a TOML file: docs/allocate.md") from error
    except ValueError as error:
        raise UsageError(f"{path}: {error}", fix="a TOML file with devices and [[jobs]]: docs/allocate.md") from error


__all__ = ["ClusterFile", "read"]
