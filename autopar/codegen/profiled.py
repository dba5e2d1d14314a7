"""Runs the emitted graph node by node under `torch.profiler`, with a range for each captured module.

It makes the same calls in the same order as the emitted code, which has no ranges because they would cost time in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from autopar.codegen.graph_module import GraphModule
from autopar.runtime.profiler_ranges import BackwardRange, named_range


class ProfiledRun(fx.Interpreter):
    """One forward of a module's graph with ranges: "h.0.mlp", and in the backward "h.0.mlp (backward)"."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)

    def outputs(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The emitted code's outputs for these inputs."""
        found: Sequence[torch.Tensor] = self.run(*inputs, enable_io_processing=False)
        return found

    def run_node(self, node: fx.Node) -> Any:
        """Run a node in the range of its module."""
        section = node.meta.get("section")
        if section is None or node.op != "call_function":
            return super().run_node(node)
        with named_range(section):
            result = super().run_node(node)
        if torch.is_grad_enabled():
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    BackwardRange(f"{section} (backward)").around(leaf)
        return result


__all__ = ["ProfiledRun"]
