"""Code generation: a program and its decisions become a `torch.fx.GraphModule` that runs on the local shards.

emit      the graph: local ATen calls with conversions between them
module    the GraphModule: parameters under their original names, calls checked, results rebuilt
steps     the parts of a batch that a step runs one after the other
"""

from autopar.codegen.emit import emit
from autopar.codegen.module import ModuleState, OutputLayout, ParallelModule
from autopar.codegen.steps import Steps

__all__ = ["ModuleState", "OutputLayout", "ParallelModule", "Steps", "emit"]
