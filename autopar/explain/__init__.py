"""Explains plans: what a plan does and why, what it costs compared with others, and the code emitted for it.

    found = autopar.explain.explain(model, sample, mesh=(2, 4), device="h100")
    print(found)                                                       # the whole report
    found.why("transformer.h.0.mlp.c_fc")                              # candidates with their prices
    found.why_not({"transformer.h.*.mlp.c_fc.weight": "*, S(0)"})      # what another layout would change
    found.compared                                                     # every named strategy
    print(found.code)                                                  # the emitted module

`report(plan)` has the sections that need only a plan, perhaps from a file. On the command line: `python -m autopar.explain
--help`.
"""

from autopar.explain.cli_arguments import parse_mesh
from autopar.explain.command import main
from autopar.explain.difference import Difference, difference
from autopar.explain.explanation import Explanation, explain
from autopar.explain.report import report

__all__ = ["Difference", "Explanation", "difference", "explain", "main", "parse_mesh", "report"]
