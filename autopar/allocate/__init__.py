"""Allocates the devices of a cluster to several training jobs.

    jobs = [autopar.TrainingJob(name="bert", steps=10_000, model=bert, sample=batch), ...]
    print(autopar.allocate(jobs, autopar.Cluster(devices=64, device="h100"), goal="completion"))

The same from the command line: `python -m autopar.allocate cluster.toml`.
"""

from autopar.allocate.allocation import ClusterAllocation, JobShare, allocate
from autopar.allocate.command import main
from autopar.allocate.jobs import Cluster, TrainingJob

__all__ = ["Cluster", "ClusterAllocation", "JobShare", "TrainingJob", "allocate", "main"]
