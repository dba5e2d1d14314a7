"""autopar: an automatic-parallelization compiler for PyTorch.

parallel = autopar.parallelize(model, sample_input, mesh=(2, 4))
"""

from typing import TYPE_CHECKING

from autopar import elastic, explain
from autopar.allocate import Cluster, ClusterAllocation, TrainingJob, allocate
from autopar.api import (
    check_rule,
    discover_rule,
    initialize,
    launch,
    parallelize,
    plan,
    register_rule,
    step_in_backward,
    verify,
)
from autopar.codegen.compiled import inductor_options
from autopar.errors import AutoparError
from autopar.ir.device import Device, Disk, Link
from autopar.ir.dynamic_dims import Dynamic
from autopar.ir.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.runtime.gathered_steps import step_gathered
from autopar.runtime.grad_scaler import GradScaler
from autopar.runtime.local_steps import step_locally
from autopar.verify import testing
from autopar.verify.report import Report

__all__ = [
    "AutoparError", "Cluster", "ClusterAllocation", "Device", "Disk", "Dynamic", "GradScaler", "Link", "Mesh", "Plan", "Report",
    "TrainingJob", "allocate", "check_rule", "discover_rule", "elastic", "explain", "inductor_options", "initialize", "launch",
    "parallelize", "plan", "register_rule", "step_gathered", "step_in_backward", "step_locally", "testing", "verify",
]  # fmt: skip

__version__: str  # of the installed package; read when it is asked for

if not TYPE_CHECKING:  # to which every name would be known

    def __getattr__(name: str) -> str:
        from importlib.metadata import version

        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return version(__name__)
