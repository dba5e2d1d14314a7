"""Code generation: a program and its assignment become a `torch.fx.GraphModule` that runs on the local shards.

emit          the graph: local ATen calls with conversions between them
buckets       the calls that start a bucket of weights and wait for it
recomputed    which ops are called so that the backward can repeat them
names         identifiers
source        the printed code, which is the code that runs
module        the GraphModule: parameters under their original names, calls checked, results rebuilt
module_state  what that module knows beside its parameters
profiled      the graph in ranges of its modules, under torch.profiler
variants      the modules for other dynamic sizes
steps         micro-batches: the batch cut, and the outputs joined
"""

from autopar.codegen.emit import emit
from autopar.codegen.module import ParallelModule
from autopar.codegen.module_state import ModuleState, OutputLayout
from autopar.codegen.steps import Steps

__all__ = ["ModuleState", "OutputLayout", "ParallelModule", "Steps", "emit"]
