"""The published measurements, read: a `Run` for every row that a plan can express, a `Skipped` with its reason for the others.

Tables are data from elsewhere: each cell is checked, and a row that cannot be is an error with its table, line and column.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from autopar.cost_models.fidelity import ONE_NODE, SEVERAL_NODES
from autopar.errors import AutoparError
from autopar.ir.device import Bytes, Seconds
from benchmarks.fidelity.models import Decoder, Recompute

MEASURED = Path(__file__).parents[1] / "measured"
MIB = 2**20

# Composer's training loop beside the step that autopar plans: 28 ms of host time a step, which rows of LLM Foundry's tables
# have in common whatever their size; and the loss of the same scores once more for each of its two metrics.
COMPOSER_HOST: Seconds = 28e-3
COMPOSER_METRICS = 2

DEVICES = {
    "V100-32": "v100-32gb",
    "V100-SXM2-16": "v100-32gb",  # the same processor and links; its memory is not asked for
    "A100-40": "a100-40gb",
    "A100-80": "a100-80gb",
    "H100-SXM-80": "h100",
    "L4": "l4",
}


class TableError(AutoparError):
    """A row of a table of measurements cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published run: what was trained, how, and what was measured."""

    table: str
    line: int
    name: str
    device: str  # of the catalog
    nodes: int
    mesh: Mapping[str, int]
    strategy: str
    decoder: Decoder
    sequences: int  # of the global batch
    microbatches: int
    seconds: Seconds  # measured, of one optimizer step
    recompute: Recompute = "none"
    recomputed: tuple[str, ...] = ()  # what alone of that the run recomputes, ends of operators' names
    kept: tuple[str, ...] = ()  # or what of that it does not, likewise
    stages: tuple[int, ...] = ()  # blocks of each pipeline stage, by 1f1b over the mesh's axis "pp"
    host: Seconds = 0.0  # of its harness, beside the step
    megatron: bool = False  # whether it runs Megatron's kernels, weights in half precision beside the optimizer's own
    memory: Bytes | None = None  # measured, the largest that is allocated on one device
    excluded: str = ""  # why it does not count
    tags: tuple[str, ...] = field(default=())

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.mesh.values())

    @property
    def scale(self) -> str:
        """Whether it ran on one node or on several."""
        return ONE_NODE if self.nodes == 1 else SEVERAL_NODES


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A row that no plan stands for."""

    table: str
    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Row:
    """The cells of a row; what is asked for is checked."""

    table: str
    line: int
    cells: Mapping[str, str | None]

    def text(self, column: str) -> str:
        """A cell as it is. Raises TableError if the table has no such column, or the row ends before it."""
        found = self.cells.get(column)
        if found is None:
            raise self.error(f"has no column {column!r}", columns=", ".join(c for c in self.cells if c))
        return found.strip()

    def number(self, column: str) -> float:
        """A positive finite number. Raises TableError for anything else."""
        said = self.text(column)
        try:
            found = float(said)
        except ValueError:
            found = math.nan
        if not (math.isfinite(found) and found > 0):
            raise self.error(f"has {said!r} as {column}", fix="a positive number")
        return found

    def count(self, column: str) -> int:
        """A positive integer. Raises TableError for anything else."""
        found = self.number(column)
        if found != int(found):
            raise self.error(f"has {self.text(column)!r} as {column}", fix="a whole number")
        return int(found)

    def flag(self, column: str) -> bool:
        """True or False. Raises TableError for anything else."""
        said = self.text(column)
        if said not in ("True", "False"):
            raise self.error(f"has {said!r} as {column}", fix="True or False")
        return said == "True"

    def device(self) -> str | None:
        """The catalog's name of the device, None if the catalog has none."""
        return DEVICES.get(self.text("hardware"))

    def equal(self, what: str, left: float, right: float, tolerance: float = 0.0) -> None:
        """Raises TableError if two columns that say the same do not agree."""
        if abs(left - right) > tolerance * max(abs(left), abs(right)):
            raise self.error(f"contradicts itself: {what}", left=f"{left:.6g}", right=f"{right:.6g}")

    def divides(self, what: str, whole: int, part: int) -> None:
        """Raises TableError if something is not a whole number of parts."""
        if whole % part:
            raise self.error(f"has {what}: {whole} is not a multiple of {part}")

    def error(self, what: str, **details: object) -> TableError:
        return TableError(f"line {self.line} of {self.table}.csv {what}", **details)


def _sizes(row: Row, *, hidden: str = "d_ff", **more: object) -> Decoder:
    width, heads = row.count("d_model"), row.count("n_heads")
    row.divides("heads that do not share the width", width, heads)
    sizes = {
        "width": width, "heads": heads, "key_heads": heads, "hidden": row.count(hidden), "layers": row.count("n_layers"),
        "vocabulary": row.count("vocab"), "length": row.count("seq_len"),
    }  # fmt: skip
    return Decoder(**(sizes | more))  # type: ignore[arg-type]


def mpt(row: Row) -> Run | str:
    """LLM Foundry's MPT under Composer's FSDP: learned positions, tied embedding, flash attention, norms in half precision.

    "PURE" stores, gathers and reduces in bfloat16; "DEFAULT" stores and reduces in float32 and gathers in bfloat16.
    """
    pure = row.text("fsdp_mixed_precision") == "PURE"
    stored = torch.bfloat16 if pure else torch.float32
    decoder = _sizes(row, metrics=COMPOSER_METRICS, fused_loss=True, stored=stored)  # "fused_crossentropy" is its default
    row.equal("n_params is not that of its sizes", decoder.parameters, row.count("n_params"))
    devices, runs, batch = row.count("n_gpus"), row.count("grad_accum"), row.count("global_batch")
    row.equal("microbatch x grad_accum x n_gpus is not global_batch", row.count("microbatch") * runs * devices, batch)
    device = row.device()
    if device is None:
        return f"{row.text('hardware')} is not in the catalog"
    if row.text("sharding") != "FULL_SHARD":
        return f"sharding {row.text('sharding')}"
    again = row.flag("activation_checkpointing")
    note = row.text("note")
    return Run(
        table=row.table, line=row.line, device=device, nodes=row.count("n_nodes"), mesh={"fsdp": devices}, strategy="fsdp",
        name=f"{row.text('model')} {decoder.length} x{row.text('microbatch')}x{runs} on {devices}",
        decoder=decoder, sequences=batch, microbatches=runs, recompute="blocks" if again else "none",
        seconds=row.number("step_time_s_from_total"), host=COMPOSER_HOST,
        excluded=note if "exclude from fits" in note else "",
    )  # fmt: skip


TITAN_RECOMPUTE: dict[str, Recompute] = {
    "none": "none", "full": "blocks", "selective(op)": "blocks", "selective(every 2nd layer)": "alternate",
}  # fmt: skip
# What selective(op) keeps of a block: fused attention and every second product, the first, third, ... as they are called
# (torchtitan/parallelisms/parallelize_llama.py at that commit).
TITAN_KEPT = {"selective(op)": tuple(f"{name}:linear#0" for name in ("query", "value", "gate", "down")) + ("attention#0",)}
# Models whose `norm_type` is "rmsnorm" in train_configs at that commit, the module; it is "fused_rmsnorm" for the others. Their
# `compile` is false.
TITAN_WRITTEN_NORMS = ("llama2-70b", "llama3-70b")


def titan(row: Row) -> Run | str:
    """torchtitan's Llama under FSDP2: bfloat16 over float32 shards, reduced in float32."""
    device, said = row.device(), row.text("activation_checkpointing")
    if device is None:
        return f"{row.text('hardware')} is not in the catalog"
    if (row.count("tp"), row.count("pp"), row.count("cp")) != (1, 1, 1):
        return "tensor, pipeline or context parallel"
    if said not in TITAN_RECOMPUTE:
        raise row.error(f"has {said!r} as activation_checkpointing", known=", ".join(TITAN_RECOMPUTE))
    decoder = _sizes(
        row, key_heads=row.count("n_kv_heads"), gated=True, tied=False, biases=False,
        written_norms=row.text("model") in TITAN_WRITTEN_NORMS,
    )  # fmt: skip
    row.divides("key heads that do not share the heads", decoder.heads, decoder.key_heads)
    devices, batch = row.count("n_gpus"), row.count("global_batch")
    row.equal("local_batch x n_gpus is not global_batch", row.count("local_batch") * devices, batch)
    return Run(
        table=row.table, line=row.line, device=device, nodes=-(-devices // row.count("gpus_per_node")), mesh={"fsdp": devices},
        strategy="fsdp", name=f"{row.text('model')} {said} on {devices}", decoder=decoder, sequences=batch, microbatches=1,
        recompute=TITAN_RECOMPUTE[said], kept=TITAN_KEPT.get(said, ()), seconds=row.number("step_time_s"),
    )  # fmt: skip


def oneflow(row: Row) -> Run | str:
    """OneFlow and Megatron GPT on V100: float16 over float32 weights, dropout, no fused attention, everything recomputed."""
    device = row.device()
    if device is None:
        return f"{row.text('hardware')} is not in the catalog"
    if row.count("pp") != 1:
        return "pipeline stages"
    decoder = _sizes(row, flash=False, dropout=0.1, compute=torch.float16)
    dp, tp, runs, batch = row.count("dp"), row.count("tp"), row.count("grad_accum"), row.count("global_batch")
    row.equal("dp x tp is not n_gpus", dp * tp, row.count("n_gpus"))
    row.equal("microbatch x grad_accum x dp is not global_batch", row.count("microbatch") * runs * dp, batch)
    return Run(
        table=row.table, line=row.line, device=device, nodes=row.count("n_nodes"), mesh={"dp": dp, "tp": tp},
        strategy="megatron", name=f"{row.text('system')} {row.text('case')}", decoder=decoder, sequences=batch,
        microbatches=runs, recompute="blocks", seconds=row.number("step_time_ms") / 1e3,
        memory=round(row.number("memory_mib") * MIB) if row.text("memory_mib") else None,
    )  # fmt: skip


def aceso(row: Row) -> Run | str:
    """Aceso's GPT: float16 over float32 weights, dropout, no fused attention."""
    if row.text("strategy_known") != "yes":
        return "its strategy is not published"
    if row.text("model_kind") != "gpt":
        return f"{row.text('model_kind').split()[0]}: not a decoder"
    if row.count("pp") != 1:
        return "pipeline stages"
    device = row.device()
    if device is None:
        return f"{row.text('hardware')} is not in the catalog"
    if row.text("row_id") not in ACESO_RECOMPUTE:
        return "recomputation chosen for every operator by itself"
    recompute, alone = ACESO_RECOMPUTE[row.text("row_id")]
    tp, dp = (int(row.text(column).split("*")[0]) for column in ("stage_tp", "stage_dp"))
    batch, runs = row.count("global_batch"), row.count("n_microbatches")
    row.equal("microbatch x n_microbatches x dp is not global_batch", row.count("microbatch") * runs * dp, batch)
    return Run(
        table=row.table, line=row.line, device=device, nodes=row.count("n_nodes"), mesh={"dp": dp, "tp": tp},
        strategy="megatron", name=row.text("row_id"), sequences=batch, microbatches=runs,
        decoder=_sizes(row, flash=False, dropout=0.1, compute=torch.float16), recompute=recompute, recomputed=alone,
        megatron=True, seconds=row.number("measured_step_time_s"), memory=round(row.number("measured_peak_mb") * MIB),
    )  # fmt: skip


# Rows that recompute by a rule: "recompute enabled" in the note, or dropout and context of attention in all layers.
ACESO_RECOMPUTE: dict[str, tuple[Recompute, tuple[str, ...]]] = {
    "aceso-v100-gpt-350M": ("blocks", ()),
    "mist-l4-gpt_1_3B_1stages": ("selective", ("attention:dropout#0", "attention:matmul#1")),
}


def mist(row: Row) -> Run | str:
    """Mist's GPT and Llama: float16 over float32 weights, ZeRO-1, no dropout, 1f1b (its `benchmark/mist/configs`)."""
    device = row.device()
    if device is None:
        return f"{row.text('hardware')} is not in the catalog"
    stages = row.count("pp")
    sharded = [_of_stages(row, f"stage_{what}_sharding", stages) for what in ("weight", "grad", "opt")]
    if sharded != [0, 0, 1] or _of_stages(row, "stage_tp", stages) != 1:
        return "a mix of sharding flags without a name"
    dp, part = _of_stages(row, "stage_dp", stages), _of_stages(row, "stage_microbatch", stages)
    runs, batch = row.count("grad_accum"), row.count("global_batch")
    row.equal("stage_microbatch x grad_accum x dp is not global_batch", part * runs * dp, batch)
    blocks = tuple(int(text) for text in row.text("stage_layers").split(";"))
    row.equal("stage_layers are not n_layers", sum(blocks), row.count("n_layers"))
    gated = row.text("mlp") == "gated_mlp"
    decoder = _sizes(row, flash=row.flag("flash_attention"), gated=gated, tied=False, biases=False, compute=torch.float16)
    again = row.text("stage_ckpt_layers").split(";")
    if again not in (["0"] * stages, list(map(str, blocks))):
        return "recomputation of some layers"
    peaks = map(float, row.text("measured_stage_peak_allocated_mb").split(";"))
    return Run(
        table=row.table, line=row.line, device=device, nodes=row.count("n_nodes"), strategy="zero1",
        mesh={"pp": stages, "dp": dp} if stages > 1 else {"dp": dp}, stages=blocks if stages > 1 else (),
        name=f"{row.text('model')} {'one stage' if stages == 1 else f'{stages} stages'}", decoder=decoder, sequences=batch,
        microbatches=runs, recompute="none" if again[0] == "0" else "blocks", seconds=row.number("measured_step_time_s"),
        memory=round(max(peaks) * MIB),
    )  # fmt: skip


def _of_stages(row: Row, column: str, stages: int) -> int:
    """A whole number that all stages have; -1 where they differ. Raises TableError for anything else."""
    texts = row.text(column).split(";")
    if len(texts) != stages or not all(text.isdecimal() for text in texts):
        raise row.error(f"has {row.text(column)!r} as {column}", fix=f"{stages} whole numbers")
    return int(texts[0]) if len(set(texts)) == 1 else -1


ALPA = (  # of a line that says all that is to be known
    "gpt-2.6B (hidden 2560, layers 32, heads 32, vocab 51200)",
    "dp2 op2 pp2, 4 microbatches, remat on, reduce-scatter preferred",
)


def misc(row: Row) -> Run | str:
    """Single lines: Alpa's GPT in float16 over two equal stages; the other's device and model are not known.

    Its blocks are BERT's, whose last norm has the backward ask for the last product again; its embedding is a product with
    one-hot vectors, its head is not tied (alpa-projects/alpa: alpa/model/gpt_model.py, alpa/monkey_patch.py,
    benchmark/alpa/benchmark_one_case_gpt_bert.py).
    """
    if (row.text("model"), row.text("parallelism")) != ALPA:
        return "its device and model are ambiguous"
    layers, heads, length = 32, 32, row.count("seq_len")
    decoder = Decoder(
        width=2560, heads=heads, key_heads=heads, hidden=4 * 2560, layers=layers, vocabulary=51200, length=length, flash=False,
        compute=torch.float16, tied=False, post_norm=True, one_hot=True,
    )  # fmt: skip
    return Run(
        table=row.table, line=row.line, device="v100-32gb", nodes=1, mesh={"pp": 2, "dp": 2, "tp": 2}, strategy="megatron",
        name="Alpa gpt-2.6B dp2 op2 pp2", decoder=decoder, sequences=row.count("global_batch"), microbatches=4,
        recompute="blocks", stages=(layers // 2, layers // 2), seconds=row.number("step_time_s"),
        memory=round(row.number("peak_memory_mib") * MIB),
    )  # fmt: skip


READERS: dict[str, Callable[[Row], Run | str]] = {
    "mpt": mpt, "titan": titan, "oneflow_gpt": oneflow, "aceso": aceso, "mist": mist, "misc": misc,
}  # fmt: skip


def runs(folder: Path = MEASURED, tables: tuple[str, ...] = tuple(READERS)) -> Iterator[Run | Skipped]:
    """The rows of these tables, in order.

    Raises TableError for a table that is missing, and a row that cannot be read or contradicts itself.
    """
    for table in tables:
        path = folder / f"{table}.csv"
        try:
            lines = path.read_text().splitlines(keepends=True)
        except (OSError, UnicodeDecodeError) as error:
            raise TableError(f"cannot read the table {path.name}", error=error) from error
        for line, cells in enumerate(csv.DictReader(lines), 2):
            found = READERS[table](Row(table, line, cells))
            yield Skipped(table=table, line=line, reason=found) if isinstance(found, str) else found


__all__ = ["MEASURED", "Row", "Run", "Skipped", "TableError", "runs"]
