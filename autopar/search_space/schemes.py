"""The schemes that named strategies are: what each mesh axis does to weights, and when gathered weights are dropped."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a named strategy uses the axes of a mesh, from the outermost: `copies` of them hold the same shards, the others have
    one each if weights are `sharded`; with `tensor` the last one splits matrix products, with `sequence` also what lies between
    blocks."""

    copies: int = 0
    sharded: bool = False
    tensor: bool = False
    sequence: bool = False
    reshard: bool = False  # gathered weights are dropped after their use, and gathered again for the backward
    keep: bool = False  # they are kept until then
    once: bool = False  # they are gathered once for all micro-batches

    @property
    def axes(self) -> int:
        """How many mesh axes it needs."""
        return max(1, self.copies + self.sharded + (self.tensor and self.sharded))

    @property
    def example(self) -> str:
        """A mesh that it could have, as a user writes it."""
        names = ["replicate"] * self.copies + ["shard"] + ["tp"] * self.tensor
        return "mesh={" + ", ".join(f'"{name}": 2' for name in names) + "}"


SCHEMES = {
    "ddp": Scheme(),
    "zero1": Scheme(sharded=True, keep=True, once=True),
    "zero2": Scheme(sharded=True, keep=True),
    "fsdp": Scheme(sharded=True, reshard=True),
    "hsdp": Scheme(sharded=True, reshard=True, copies=1),
    "megatron": Scheme(tensor=True),
    "fsdp+tp": Scheme(sharded=True, reshard=True, tensor=True, sequence=True),
    "hsdp+tp": Scheme(sharded=True, reshard=True, tensor=True, sequence=True, copies=1),
}
STRATEGIES = ("auto", *SCHEMES, "replicate")


def strategies_for(mesh: Mesh) -> tuple[str, ...]:
    """The strategies that a mesh has axes for."""
    return tuple(name for name in STRATEGIES if name not in SCHEMES or SCHEMES[name].axes <= len(mesh.sizes))


__all__ = ["SCHEMES", "STRATEGIES", "Scheme", "strategies_for"]
