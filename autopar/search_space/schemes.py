"""The schemes that named strategies are: what each mesh axis does to weights, and when gathered weights are dropped.

A strategy may also combine a scheme for the data axes with a tensor mode, "zero1+2d", or be a mode alone: then the solver
decides whether weights are sharded over the data axes. A mode uses the innermost axes:

any        one, as the solver likes
1d         one: products of weights by columns and rows (M. Shoeybi et al., "Megatron-LM", 2019)
sequence   one: 1d with the sequence split between blocks (V. Korthikanti et al., 2022)
2d         row, column: the batch and weights over rows, features and weights over columns. A product gathers its activations
           along a row of the mesh and its weights along a column, as SUMMA broadcasts them (Q. Xu et al., "An Efficient 2D
           Method for Training Super-Large Deep Learning Models" (Optimus), 2021)
2.5d       depth, row, column: 2d with the batch over depth, too, along which weights are whole (B. Wang et al.,
           "Tesseract: Parallelize the Tensor Parallelism Efficiently", 2021)
3d         batch, row, column: weights over all three, gathered along the first; products split rows and columns of weights over
           the other two, so that no axis has whole activations between blocks (Z. Bian et al., "Maximizing Parallelism in
           Distributed Training for Huge Neural Networks", 2021)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.errors import ConstraintError
from autopar.ir.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a named strategy uses the axes of a mesh, from the outermost: `copies` of them hold the same shards; the others hold
    one each if weights are `sharded`, or the solver decides if copies are `free`. The last `tensor` axes split matrix products,
    with `between` also the activations between blocks: the sequence, the features, or batch and features over one axis each.
    `open` tensor axes may do anything.
    """

    copies: int = 0
    sharded: bool = False
    free: bool = False
    tensor: int = 0
    open: bool = False
    between: tuple[int, ...] = ()  # the dim of (batch, sequence, features) that each tensor axis splits
    reshard: bool = False  # gathered weights are dropped after their use, and gathered again for the backward
    keep: bool = False  # they are kept until then
    once: bool = False  # they are gathered once for all micro-batches

    @property
    def axes(self) -> int:
        """The number of mesh axes that it needs."""
        return max(1, self.copies + self.sharded + (self.tensor if self.sharded or self.tensor > 1 else 0))

    @property
    def example(self) -> str:
        """A mesh that it could have, as a user writes it."""
        names = ["replicate"] * self.copies + ["shard"] + ["tp"] * self.tensor
        return "mesh={" + ", ".join(f'"{name}": 2' for name in names) + "}"


SEQUENCE, FEATURES, BATCH_AND_FEATURES = (1,), (2,), (0, 2)
SCHEMES = {
    "ddp": Scheme(),
    "zero1": Scheme(sharded=True, keep=True, once=True),
    "zero2": Scheme(sharded=True, keep=True),
    "fsdp": Scheme(sharded=True, reshard=True),
    "hsdp": Scheme(sharded=True, reshard=True, copies=1),
    "megatron": Scheme(tensor=1),
    "fsdp+tp": Scheme(sharded=True, reshard=True, tensor=1, between=SEQUENCE),
    "hsdp+tp": Scheme(sharded=True, reshard=True, tensor=1, between=SEQUENCE, copies=1),
}
STRATEGIES = ("auto", *SCHEMES, "replicate")
OF_TRAINING = (
    "zero1",
    "zero2",
)  # those that shard gradients or the optimizer's state, beside another scheme's shards of weights
DATA = {
    "ddp": SCHEMES["ddp"],
    "zero1": SCHEMES["zero1"],
    "zero2": SCHEMES["zero2"],
    "fsdp": SCHEMES["fsdp"],
}
MODES = {  # what a tensor mode does, and how many axes beside its tensor axes it has: the last of them shards
    "any": (Scheme(tensor=1, open=True), 0),
    "1d": (Scheme(tensor=1), 0),
    "sequence": (Scheme(tensor=1, between=SEQUENCE), 0),
    "2d": (Scheme(tensor=1, between=FEATURES, sharded=True), 1),
    "2.5d": (Scheme(tensor=1, between=FEATURES, sharded=True), 2),
    "3d": (Scheme(tensor=2, between=BATCH_AND_FEATURES, sharded=True), 1),
}


def check_strategy(strategy: object) -> None:
    """Raise ConstraintError for a strategy that does not exist on any mesh."""
    data, _, mode = str(strategy).rpartition("+")
    if strategy in STRATEGIES or strategy == "data" or (mode in MODES and (not data or data in DATA)):
        return
    fix = f"one of {', '.join(STRATEGIES)}, or {', '.join(DATA)} + {', '.join(MODES)}"
    raise ConstraintError(f"no strategy is called {strategy!r}", fix=fix)


def scheme_of(strategy: str, mesh: Mesh) -> Scheme:
    """The scheme of a strategy that is not "auto" or "replicate", on this mesh.

    Raises ConstraintError for a strategy that does not exist, or needs more axes than the mesh has.
    """
    if strategy in SCHEMES:
        found, needed, example = SCHEMES[strategy], SCHEMES[strategy].axes, SCHEMES[strategy].example
    elif strategy == "data":
        found, needed, example = Scheme(copies=len(mesh.sizes), free=True), 1, 'mesh={"data": 2}'
    else:
        check_strategy(strategy)
        data, _, mode = strategy.rpartition("+")
        scheme, more = MODES[mode]
        needed = scheme.tensor + more
        example = "mesh={" + ", ".join(f'"{name}": 2' for name in mode_axes(mode)) + "}"
        outer = len(mesh.sizes) - scheme.tensor - scheme.sharded  # axes over which weights are not sharded by the mode
        found = _joined(scheme, data, max(0, outer))
    if len(mesh.sizes) < needed:
        what = f"strategy {strategy!r} needs {needed} mesh axes, and the mesh has {len(mesh.sizes)}"
        raise ConstraintError(what, mesh=mesh, fix=f"from the outermost: {example}")
    return found


def _joined(mode: Scheme, data: str, outer: int) -> Scheme:
    """A mode combined with a treatment of weights on `outer` axes: ZeRO, none, or decided by the solver."""
    own = DATA.get(data)
    if own is None or not own.sharded:
        return replace(mode, copies=outer, free=not data)
    return replace(mode, copies=0, sharded=True, reshard=own.reshard, keep=own.keep, once=own.once)


def mode_axes(mode: str) -> tuple[str, ...]:
    """The names of a tensor mode's own axes, from the outermost."""
    return {"2d": ("row", "column"), "2.5d": ("depth", "row", "column"), "3d": ("batch", "row", "column")}.get(
        mode, ("tensor",)
    )


def strategies_for(mesh: Mesh) -> tuple[str, ...]:
    """The strategies that a mesh has enough axes for."""
    return tuple(name for name in STRATEGIES if name not in SCHEMES or SCHEMES[name].axes <= len(mesh.sizes))


__all__ = ["MODES", "SCHEMES", "STRATEGIES", "Scheme", "check_strategy", "mode_axes", "scheme_of", "strategies_for"]
