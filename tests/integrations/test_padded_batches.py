"""The Trainer on batches padded by collators: ranks load samples of different lengths, and train as one process does."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sized
from dataclasses import dataclass
from pathlib import Path

import lightning
import pytest
import torch
import torch.distributed as dist
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

import autopar
from autopar.errors import InputError
from autopar.integrations.accelerate import Accelerator
from autopar.integrations.lightning import AutoparStrategy
from autopar.integrations.padded_batches import BatchPadding
from autopar.integrations.transformers import Trainer
from autopar.runtime.workers import WorkerPool
from tests.integrations.launched import launched

BATCH, STEPS, LONGEST = 4, 3, 9
WORDS = {"vocab_size": 40, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
LENGTHS = (9, 4, 6, 3, 5, 5, 7, 4, 8, 3, 4, 6)  # the longest of a batch is on one rank, then on the other


@dataclass(frozen=True)
class Case:
    """A model, the side on which its batches are padded, and whether lengths vary in the plan or are the planned ones."""

    model: str
    side: str = "right"
    dynamic: bool = False
    strategy: str = "sequential"
    inputs: str = "sharded"
    stages: bool = False


CASES = {
    "gpt_neo, padded on the left": Case("gpt_neo", side="left", dynamic=True),
    "llama, one length, grouped": Case("llama", strategy="group_by_length"),
    "t5, lengths that vary": Case("t5", dynamic=True),
    "llama, lengths that vary, whole batches": Case("llama", dynamic=True, inputs="whole"),
    "t5, lengths that vary, stages": Case("t5", dynamic=True, stages=True),
}


def made(case: Case) -> tuple[nn.Module, transformers.DataCollatorForSeq2Seq, list[dict[str, list[int]]]]:
    """A model, its collator, and samples of several lengths."""
    torch.manual_seed(0)
    model: nn.Module
    if case.model == "t5":
        sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1 + case.stages, "num_heads": 4, "dropout_rate": 0.0}
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(decoder_start_token_id=0, **sizes, **WORDS))
    elif case.model == "gpt_neo":  # whose positions are absolute
        none = dict.fromkeys(("resid_dropout", "embed_dropout", "attention_dropout"), 0.0)
        sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 4, "max_position_embeddings": 32}
        config = transformers.GPTNeoConfig(attention_types=[[["global"], 1]], **sizes, **none, **WORDS)
        model = transformers.GPTNeoForCausalLM(config)
    else:
        heads = {"num_hidden_layers": 1, "num_attention_heads": 4}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=16, intermediate_size=32, **heads, **WORDS))
    words = Tokenizer(WordLevel({f"w{word}": word for word in range(40)}, unk_token="w3"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", padding_side=case.side)
    drawn = torch.Generator().manual_seed(0)
    samples = [torch.randint(3, 40, (length,), generator=drawn).tolist() for length in LENGTHS]
    shorter = 2 if case.model == "t5" else 0
    data = [{"input_ids": words, "labels": words[shorter:]} for words in samples]
    return model.double(), transformers.DataCollatorForSeq2Seq(tokenizer), data


def arguments(case: Case, folder: Path, batch: int) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        max_steps=STEPS,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=STEPS,
        save_strategy="no",
        learning_rate=1e-2,
        train_sampling_strategy=case.strategy,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )


def right(found: transformers.EvalPrediction) -> dict[str, float]:
    logits = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
    seen = found.label_ids != -100
    return {"right": float((logits.argmax(-1) == found.label_ids)[seen].mean()), "seen": float(seen.sum())}


def history(trainer: transformers.Trainer) -> list[float]:
    names = ("loss", "grad_norm", "eval_loss", "eval_right", "eval_seen", "total_flos")
    return [value for log in trainer.state.log_history for name, value in sorted(log.items()) if name in names]


class OrderedByEpoch(transformers.Trainer):  # type: ignore[misc]
    """The library's Trainer, whose grouped order is that of the seed, and which evaluates in order."""

    def _get_train_sampler(self, train_dataset: object = None) -> object:
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, LengthGroupedSampler):
            sampler.generator = torch.Generator().manual_seed(self.args.seed)
        return sampler

    def _get_eval_sampler(self, eval_dataset: Sized) -> object:
        return SequentialSampler(eval_dataset)


def alone(payload: tuple[Path, str]) -> list[float]:
    case = CASES[payload[1]]
    model, collator, data = made(case)
    given = {"train_dataset": data, "eval_dataset": data, "data_collator": collator, "compute_metrics": right}
    trainer = OrderedByEpoch(model, args=arguments(case, payload[0], BATCH), **given)
    trainer.train()
    return history(trainer)


def together(payload: tuple[Path, str]) -> list[float]:
    launched()
    case = CASES[payload[1]]
    model, collator, data = made(case)
    sample = collator([dict(data[0]) for _ in range(BATCH)])
    lengths = (
        {"source": {"input_ids": 1, "attention_mask": 1}, "target": {"labels": 1}} if case.model == "t5" else {"length": 1}
    )
    dynamic = lengths if case.dynamic else {}
    how = {"mesh": {"pp": 2, "dp": 2}, "pipeline": "pp", "microbatches": 2} if case.stages else {"mesh": (2,)}
    parallel = autopar.parallelize(model, sample, device="h100", strategy="fsdp", inputs=case.inputs, dynamic=dynamic, **how)
    given = {"train_dataset": data, "eval_dataset": data, "data_collator": collator, "compute_metrics": right}
    trainer = Trainer(parallel, model, args=arguments(case, payload[0], BATCH // parallel.data_world), **given)
    trainer.train()
    trainer.save_model(str(payload[0]))
    if dist.get_rank() == 0:
        assert transformers.AutoTokenizer.from_pretrained(payload[0]).pad_token == "w0"  # that of the collator
    if not case.dynamic:  # the longer sample is one rank's
        with pytest.raises(InputError, match="dim 1 is 12, planned 9"):
            trainer.evaluate([*data[:3], {"input_ids": [3] * 12, "labels": [3] * 12}])
    return history(trainer)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CASES)
def test_batches_padded_to_the_longest_train_as_on_one_process(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    expected = pool.run(f"{__name__}:alone", (tmp_path / "alone", name), ranks=1)[0]
    assert len(expected) == 2 * STEPS + 4  # type: ignore[arg-type]
    for found in pool.run(f"{__name__}:together", (tmp_path / "parts", name), ranks=4 if CASES[name].stages else 2):
        assert found == pytest.approx(expected, rel=1e-5)


def looped(model: nn.Module, loader: Iterable[dict[str, torch.Tensor]]) -> list[float]:
    """The losses of a plain loop."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), list[float]()
    for batch in loader:
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def by_accelerate(name: str) -> tuple[list[float], list[float]]:
    """The losses of a loop over a prepared loader, and of one over whole batches on one process."""
    launched()
    case = CASES[name]
    model, collator, data = made(case)
    sample = collator([dict(data[0]) for _ in range(BATCH)])
    parallel = autopar.parallelize(model, sample, (2,), device="h100", strategy="fsdp", inputs=case.inputs)
    loader = DataLoader(data, batch_size=BATCH // parallel.data_world, collate_fn=collator)
    parallel, prepared = Accelerator(cpu=True).prepare(parallel, loader)
    return looped(parallel, prepared), looped(model, DataLoader(data, batch_size=BATCH, collate_fn=collator))


def test_accelerates_loaders_pad_as_the_trainers_do(pool: WorkerPool) -> None:
    for found, expected in pool.run(f"{__name__}:by_accelerate", "llama, one length, grouped", ranks=2):  # type: ignore[misc]
        assert len(found) == len(LENGTHS) // BATCH
        assert found == pytest.approx(expected, rel=1e-5)


class Training(lightning.LightningModule):
    """A language model whose batches a collator pads."""

    def __init__(self, name: str, length: int = LONGEST) -> None:
        super().__init__()
        self.model, self.collator, self.data = made(CASES[name])
        self.length = length
        self.net, self.losses = None, list[float]()

    def configure_model(self) -> None:
        words = [3] * self.length
        sample = self.collator([{"input_ids": words, "labels": words} for _ in range(BATCH)])
        self.net = self.net or autopar.parallelize(self.model, sample, (2,), device="h100", strategy="fsdp", inputs="sharded")

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        assert self.net is not None
        loss = self.net(**self.net.shard(batch, samples=True))["loss"]
        self.losses.append(loss.item())
        return loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.net is not None
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[object]:
        return DataLoader(self.data, batch_size=BATCH // 2, collate_fn=self.collator)  # type: ignore[arg-type]


def by_lightning(name: str) -> tuple[list[list[float]], list[list[float]]]:
    """The losses of two models that one Trainer of Lightning fits, and of loops over the same whole batches on one process."""
    launched()
    warnings.simplefilter("ignore")
    hidden = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=AutoparStrategy(), max_epochs=1, **hidden)
    found, expected, half = list[list[float]](), list[list[float]](), BATCH // 2
    for epoch, length in enumerate((LONGEST, LONGEST + 3)):
        training, (model, collator, data) = Training(name, length), made(CASES[name])
        trainer.fit_loop.max_epochs = epoch + 1  # which it counts over all fits
        trainer.fit(training)
        samplers = [DistributedSampler(data, num_replicas=2, rank=rank) for rank in range(2)]  # type: ignore[arg-type]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        orders = [[*sampler] for sampler in samplers]
        batches = [[order[first : first + half] for order in orders] for first in range(0, len(data) // 2, half)]
        whole = [collator([dict(data[sample]) for own in batch for sample in own]) for batch in batches]
        found.append(training.losses)
        expected.append(looped(model, whole))
    return found, expected


def test_lightnings_batches_are_padded_as_the_trainers_are_for_one_model_after_the_other(pool: WorkerPool) -> None:
    for found, expected in pool.run(f"{__name__}:by_lightning", "llama, one length, grouped", ranks=2):  # type: ignore[misc]
        assert [len(losses) for losses in found] == [len(LENGTHS) // BATCH] * 2
        assert found == [pytest.approx(losses, rel=1e-5) for losses in expected]


def test_lengths_are_rounded_up_to_what_the_plan_allows_and_nothing_is_padded_that_no_mask_hides() -> None:
    words = torch.full((2, 8), 3)
    sample = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}
    values = {"input_ids": 7, "attention_mask": 0, "labels": -100}
    model, _, _ = made(Case("llama"))
    parallel = autopar.parallelize(model, sample, (1,), dynamic={"length": autopar.Dynamic(1, least=6)})
    padding = BatchPadding(signature=parallel.autopar.signature, values=values, left=False)
    batch = {name: tensor[:, :3] for name, tensor in sample.items()}
    found = padding.padded(batch | {"other": 1}, padding.lengths(batch))
    assert found["other"] == 1
    assert found["input_ids"].tolist() == [[3, 3, 3, 7, 7, 7]] * 2  # type: ignore[attr-defined]
    assert found["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0]] * 2  # type: ignore[attr-defined]
    batch["attention_mask"][0, 0] = 0  # padded on the left: not beyond the longest
    assert padding.padded(batch, padding.lengths(batch))["input_ids"].equal(batch["input_ids"])  # type: ignore[attr-defined]
    del sample["attention_mask"]
    parallel = autopar.parallelize(model, sample, (1,))
    padding = BatchPadding(signature=parallel.autopar.signature, values=values, left=False)
    assert padding.padded(batch, padding.lengths(batch)) == batch


def test_an_order_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    case = Case("llama", strategy="batch_rebalance")
    model, collator, data = made(case)
    parallel = autopar.parallelize(model, collator([dict(data[0]) for _ in range(BATCH)]), (1,))
    trainer = Trainer(
        parallel, model, args=arguments(case, tmp_path, BATCH), train_dataset=data, eval_dataset=data, data_collator=collator
    )
    with pytest.raises(InputError, match="train_sampling_strategy='batch_rebalance' is not supported"):
        trainer.get_train_dataloader()
