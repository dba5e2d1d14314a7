"""Code generation: turns a program and its assignment into a `torch.fx.GraphModule` that runs on local shards.

emit          the graph: local ATen calls with conversions between them
buckets       the calls that start a bucket of weights and wait for it
recomputed    which ops are called in a form that the backward can repeat
names         identifiers
source        the printed code, which is the code that runs
module        the GraphModule: parameters under their original names, calls checked, results rebuilt
module_state  the state of that module besides its parameters
profiled      the graph in ranges of its modules, under torch.profiler
variants      the modules for other dynamic sizes
steps         micro-batches: cutting the batch, joining the outputs
"""

from autopar.codegen.emit import emit
from autopar.codegen.module import ParallelModule
from autopar.codegen.module_state import ModuleState, OutputLayout
from autopar.codegen.steps import Steps

__all__ = ["ModuleState", "OutputLayout", "ParallelModule", "Steps", "emit"]
