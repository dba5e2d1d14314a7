"""Plans for generation: prefill of a prompt and decode of one token, over one set of stored weights and one cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from autopar import files
from autopar.errors import ConstraintError, InputError, PlanError
from autopar.integrations.generation_cache import CachedModel
from autopar.integrations.generation_call import check_rotary_length
from autopar.ir.device import Seconds
from autopar.plan.keyword_options import options_of
from autopar.plan.options import INFERENCE, Options
from autopar.plan.plan import Plan
from autopar.plan.text import Part, grid, milliseconds, plain, size_text
from autopar.planning.planner import connected_mesh, read_program
from autopar.planning.shared_storage import plan_both

OF_ONE_PROGRAM = ("dynamic", "static", "assume")  # options that name inputs or lines of a model that is called as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """A GenerationPlan as text."""

    prefill: str
    decode: str
    batch: int
    prompt: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """The plans of prefill and decode for a number of sequences, prompt tokens and cache positions."""

    prefill: Plan
    decode: Plan
    batch: int
    prompt: int
    length: int

    @property
    def prefill_per_token(self) -> Seconds:
        """Seconds per prompt token."""
        return self.prefill.step_time / (self.batch * self.prompt)

    @property
    def decode_per_token(self) -> Seconds:
        """Seconds per new token; a sequence waits `batch` times as long for its next one."""
        return self.decode.step_time / self.batch

    def seconds(self, new: int) -> Seconds:
        """Seconds until every sequence has so many new tokens; prefill makes the first."""
        return self.prefill.step_time + (new - 1) * self.decode.step_time

    def to_json(self) -> str:
        """One line of JSON."""
        sizes = {"batch": self.batch, "prompt": self.prompt, "length": self.length}
        return json.dumps({"prefill": self.prefill.to_json(), "decode": self.decode.to_json(), **sizes})

    @staticmethod
    def from_json(line: str) -> GenerationPlan:
        """Read the output of `to_json`. Raises PlanError for anything else."""
        try:
            data = files.typed(_Written, files.parse(line))
            if data.batch < 1 or not 1 <= data.prompt <= data.length:
                raise ValueError(f"{data.batch} sequences, prompts of {data.prompt} tokens and {data.length} positions")
        except ValueError as error:
            raise PlanError("the plan of a generation is damaged", error=error, fix="make it again") from error
        prefill, decode = (Plan.from_json(text, "the plan of a generation") for text in (data.prefill, data.decode))
        return GenerationPlan(prefill=prefill, decode=decode, batch=data.batch, prompt=data.prompt, length=data.length)

    def check(self, prompts: torch.Tensor, length: int) -> None:
        """Raise PlanError if the prompts or the number of positions are not the planned ones."""
        own, asked = ([self.batch, self.prompt], self.length), ([*prompts.shape], length)
        if own != asked:
            planned, given = (f"prompts {shape}, {positions} positions" for shape, positions in (own, asked))
            raise PlanError("the generation was planned for other sizes", planned=planned, given=given, fix="plan again")

    def parts(self) -> Iterator[Part]:
        """A table of both."""
        table = grid("", "tokens", "ms", "us per token", "tokens/s", "memory", right=(1, 2, 3, 4, 5))
        for name, plan, tokens in (("prefill", self.prefill, self.batch * self.prompt), ("decode", self.decode, self.batch)):
            each, rate = plan.step_time / tokens * 1e6, tokens / plan.step_time
            row = f"{tokens:,}", milliseconds(plan.step_time), f"{each:,.3f}", f"{rate:,.0f}", size_text(plan.peak_memory)
            table.add_row(name, *row)
        yield table
        buffers = size_text(self.prefill.breakdown.memory.get("buffers", 0))
        sizes = f"{self.batch} sequences, prompts of {self.prompt} tokens, {self.length} positions"
        yield f"{sizes}; the cache and other buffers take {buffers} per device"

    def __str__(self) -> str:
        return plain(self.parts())


def plan_generation(
    model: PreTrainedModel, prompts: torch.Tensor, mesh: object, *, length: int, **options: object
) -> GenerationPlan:
    """Plan how a Hugging Face model generates on a mesh; needs neither processes nor weights.

    Args:
        model: a causal language model or an encoder-decoder model, in evaluation mode.
        prompts: sample prompts, `[batch, tokens]`, which the encoder reads if there is one. Later prompts may be shorter, and
            those of a decoder longer.
        mesh: as for `autopar.plan`.
        length: the number of positions of the cache, for the prompt and the generated tokens.
        **options: those of `autopar.plan`, except the ones that name inputs.

    Raises:
        InputError: the model's cache does not hold keys and values for all positions, or the prompts do not fit into it.
        AutoparError: what `autopar.plan` raises.
    """
    cached, asked = cached_model(model, prompts, length), generation_options(options)
    samples = samples_of(cached, prompts)
    programs = [read_program(cached, sample, asked).program for sample in samples]
    runs = 1, length - (0 if cached.cross else prompts.shape[1])
    prefill, decode = plan_both(programs, runs, connected_mesh(mesh, asked), asked)
    return GenerationPlan(prefill=prefill, decode=decode, batch=prompts.shape[0], prompt=prompts.shape[1], length=length)


def generation_options(options: dict[str, object]) -> Options:
    """The options of both programs. Raises ConstraintError for those that name inputs, or are for training."""
    if wrong := [name for name in OF_ONE_PROGRAM if options.get(name)]:
        raise ConstraintError(f"{wrong[0]}= names inputs of a call, and generation makes calls of its own", fix="leave it out")
    if options.get("mode", INFERENCE) != INFERENCE:
        raise ConstraintError(f"mode={options['mode']!r} does not generate", fix="leave mode= out")
    return Options(**options_of({**options, "mode": INFERENCE}))  # type: ignore[arg-type]


def cached_model(model: PreTrainedModel, prompts: torch.Tensor, length: int) -> CachedModel:
    """A model with a cache for prompts of this shape. Raises InputError if they do not fit into it, or the model has none."""
    encodes = bool(model.config.is_encoder_decoder)
    if prompts.ndim != 2 or prompts.is_floating_point() or (not encodes and prompts.shape[1] >= length):
        raise InputError(
            f"prompts are {prompts.dtype} of {list(prompts.shape)}, with a cache of length={length} positions",
            fix="integers of (batch, tokens), and a length above that of the prompts",
        )
    check_rotary_length(model, length)
    return CachedModel(model, prompts.shape[0], length, prompts.shape[1] if encodes else 0).eval()


def samples_of(cached: CachedModel, prompts: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The arguments of a prefill and of a decode."""
    first = cached.sample(1, source=prompts) if cached.cross else cached.sample(prompts.shape[1])
    return first, cached.sample(1)


__all__ = ["GenerationPlan", "plan_generation"]
