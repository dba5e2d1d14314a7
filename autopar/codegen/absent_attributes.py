"""What a parallel module has not of its model: what other libraries ask for, each with the way out, and what its class has."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import InputError

_TRAINER = "autopar.integrations.transformers.Trainer(parallel, model, ...), which has the model beside the parallel module"
WAYS_OUT: Mapping[str, str] = {
    "config": f"{_TRAINER}; trainers of other libraries (trl) reach into the model, and cannot train a graph",
    "generate": "autopar.integrations.generation.parallel_generator",
    "generation_config": _TRAINER,
    "get_input_embeddings": "change embeddings before parallelize",
    "get_output_embeddings": "change embeddings before parallelize",
    "gradient_checkpointing_enable": 'parallelize(..., recompute="blocks")',
    "module": "the parallel module itself: nothing is wrapped around it",
    "no_sync": "accumulate in a plain loop, or by microbatches= and step(); ranks hold parts of one model and take no steps of "
    "their own (LocalSGD)",
    "resize_token_embeddings": "change embeddings before parallelize",
    "save_pretrained": "autopar.integrations.transformers.save_pretrained(parallel, model, folder)",
    "set_requires_gradient_sync": "accumulate in a plain loop, or by microbatches= and step()",
}


class AbsentAttributeError(InputError, AttributeError):
    """A parallel module has no such attribute; `hasattr`, and `getattr` with a default, find none."""


def absent(name: str) -> AbsentAttributeError | None:
    """The error for an attribute that a parallel module has not; None for a private one, which is not the user's."""
    if name.startswith("_"):
        return None
    fix = WAYS_OUT.get(name, f"model.{name}: a parallel module has the tensors and the forward of the model, and no more of it")
    return AbsentAttributeError(f"a parallel module has no attribute {name!r}", fix=fix)


__all__ = ["absent"]
