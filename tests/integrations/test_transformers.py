"""The transformers Trainer over parallel modules has the losses of the same Trainer on one process."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import autopar
from autopar.errors import InputError
from autopar.integrations.transformers import Trainer
from autopar.ir.mesh import Mesh
from autopar.runtime.workers import WorkerPool
from tests.integrations.launched import launched
from tests.support.hostile import Hostile

WIDTHS = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 48}
SIZES = LlamaConfig(num_hidden_layers=2, **WIDTHS)
BATCH, STEPS = 8, 6
WORDS = torch.randint(48, (40, 10), generator=torch.Generator().manual_seed(0))
LABELS = WORDS.masked_fill(
    torch.arange(10) < torch.arange(40)[:, None] // 4, -100
)  # fewer in each batch than in the one before
DATA = [{"input_ids": words, "labels": labels} for words, labels in zip(WORDS, LABELS, strict=True)]
SAMPLE = {"input_ids": WORDS[:BATCH], "labels": LABELS[:BATCH]}


PLANS: dict[str, dict[str, Any]] = {
    "fsdp": {"mesh": (2,), "strategy": "fsdp"},
    "ddp": {"mesh": (2,), "strategy": "ddp"},
    "megatron": {"mesh": {"dp": 1, "tp": 2}, "strategy": "megatron"},
    "stages": {"mesh": {"pp": 2}, "pipeline": "pp", "microbatches": 2},
    "stages of fsdp": {"mesh": {"pp": 2, "dp": 2}, "pipeline": "pp", "microbatches": 2, "strategy": "fsdp"},
}


def arguments(folder: Path, batch: int, **options: object) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        max_steps=STEPS,
        logging_steps=1,
        save_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        learning_rate=1e-2,
        train_sampling_strategy="sequential",
        gradient_accumulation_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )


further = functools.partial(pytest.param, marks=pytest.mark.thorough)


def model(lora: bool) -> nn.Module:
    torch.manual_seed(0)
    made = LlamaForCausalLM(SIZES)
    return peft.get_peft_model(made, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2)) if lora else made


def history(trainer: transformers.Trainer) -> list[float]:
    names, logs = ("loss", "eval_loss", "grad_norm", "eval_right", "total_flos"), trainer.state.log_history
    return [value for log in logs for name, value in sorted(log.items()) if name in names]


def accuracy(found: transformers.EvalPrediction) -> dict[str, float]:
    return {"right": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def alone(payload: tuple[Path, bool]) -> list[float]:
    folder, lora = payload
    trainer = transformers.Trainer(
        model(lora), args=arguments(folder, BATCH), train_dataset=DATA, eval_dataset=DATA, compute_metrics=accuracy
    )
    trainer.train()
    return history(trainer)


def together(payload: tuple[Path, bool, str]) -> list[list[float]]:
    """The history of training at once, and of training that stopped after half of the steps and went on, also after the
    library's own."""
    folder, lora, strategy = payload
    launched()
    found = []
    for checkpoint in (None, folder / "checkpoint-3", *([] if lora else [folder.parent / "alone" / "checkpoint-3"])):
        source = model(lora)
        parallel = autopar.parallelize(source, SAMPLE, device="h100", inputs="sharded", **PLANS[strategy])
        args = arguments(folder, BATCH // parallel.data_world)
        trainer = Trainer(parallel, source, args=args, train_dataset=DATA, eval_dataset=DATA, compute_metrics=accuracy)
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        found.append(history(trainer))
    if not lora:
        whole = LlamaForCausalLM.from_pretrained(folder / f"checkpoint-{STEPS}")
        with torch.no_grad():
            assert torch.allclose(whole(**SAMPLE).loss, parallel.eval()(**parallel.shard(SAMPLE)).loss)
    elif dist.get_rank() == 0:
        again = peft.PeftModel.from_pretrained(LlamaForCausalLM(SIZES), folder / f"checkpoint-{STEPS}")
        lora_b = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"
        assert again.state_dict()[lora_b].abs().max() > 0
    return found


@pytest.mark.parametrize(
    "strategy, lora",
    [
        ("fsdp", False),
        further("megatron", False),
        ("ddp", True),
        ("stages", False),
        further("stages", True),
        further("stages of fsdp", False),
    ],
)
def test_training_and_resuming_have_the_losses_of_one_process(
    pool: WorkerPool, tmp_path: Path, strategy: str, lora: bool
) -> None:
    expected, ranks = (
        pool.run(f"{__name__}:alone", (tmp_path / "alone", lora), ranks=1)[0],
        Mesh.of(PLANS[strategy]["mesh"]).size,
    )
    assert len(expected) == 2 * STEPS + 2 * 2 + 1  # type: ignore[arg-type]
    for several in pool.run(f"{__name__}:together", (tmp_path / "parts", lora, strategy), ranks=ranks):
        for found in several:  # type: ignore[attr-defined]
            assert found == pytest.approx(expected, rel=2e-4)


def routed() -> nn.Module:
    """A mixture of experts that adds the loss of its router, about 1, to those of its tokens."""
    torch.manual_seed(0)
    experts = {"num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**WIDTHS, **experts, output_router_logits=True, router_aux_loss_coef=0.5)
    return transformers.MixtralForCausalLM(config)


def routed_alone(folder: Path) -> list[float]:
    trainer = transformers.Trainer(routed(), args=arguments(folder, BATCH), train_dataset=DATA, eval_dataset=DATA)
    trainer.train()
    return history(trainer)


def routed_together(payload: tuple[Path, str]) -> tuple[list[float], str]:
    """The history of a module that is planned with the library's count, and what is said where it is not."""
    folder, strategy = payload
    launched()
    found = []
    for sample in (SAMPLE | {"num_items_in_batch": torch.tensor(1)}, SAMPLE):
        parallel = autopar.parallelize(routed(), sample, device="h100", inputs="sharded", **PLANS[strategy])
        args = arguments(folder, BATCH // parallel.data_world)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found.append(Trainer(parallel, routed(), args=args, train_dataset=DATA, eval_dataset=DATA))
    found[0].train()
    return history(found[0]), str(said[0].message)


@pytest.mark.parametrize("strategy", ["fsdp", further("megatron")])
def test_a_routers_loss_is_added_up_over_a_step_as_the_library_does(pool: WorkerPool, tmp_path: Path, strategy: str) -> None:
    (expected,) = pool.run(f"{__name__}:routed_alone", tmp_path / "alone", ranks=1)
    for found, said in pool.run(f"{__name__}:routed_together", (tmp_path / "parts", strategy), ranks=2):  # type: ignore[misc]
        assert found == pytest.approx(expected, rel=2e-4)
        assert "the router's loss is averaged over the batches of a step" in said


class Uncounted(LlamaForCausalLM):
    """A model that tells the library to leave its losses means, as Gemma 3's and Qwen2.5-VL's do."""

    accepts_loss_kwargs = False


def case(name: str) -> tuple[nn.Module, dict[str, torch.Tensor], dict[str, object]]:
    """A model, its planned sample, and further arguments."""
    torch.manual_seed(0)
    if name == "norms that only their class names":  # ln_1, ln_f
        none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        words = {"vocab_size": 48, "bos_token_id": 0, "eos_token_id": 1, "loss_type": "ForCausalLM"}
        made = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=1, n_head=4, **words, **none))
        return made, SAMPLE | {"num_items_in_batch": torch.tensor(1)}, {"weight_decay": 2.0}
    return (LlamaForCausalLM(SIZES), SAMPLE, {"optim": "adafactor"}) if name == "adafactor" else (Uncounted(SIZES), SAMPLE, {})


CASES = ("norms that only their class names", "adafactor", "uncounted")


def cases_alone(folder: Path) -> list[list[float]]:
    found = []
    for name in CASES:
        made, _, options = case(name)
        args = arguments(folder, BATCH, **options)
        trainer = transformers.Trainer(made, args=args, train_dataset=DATA, eval_dataset=DATA)
        trainer.train()
        found.append(history(trainer))
    return found


def cases_together(folder: Path) -> list[list[float]]:
    launched()
    found = []
    for name in CASES:
        made, sample, options = case(name)
        parallel = autopar.parallelize(made, sample, device="h100", inputs="sharded", **PLANS["fsdp"])
        args = arguments(folder, BATCH // parallel.data_world, **options)
        trainer = Trainer(parallel, made, args=args, train_dataset=DATA, eval_dataset=DATA)
        trainer.train()
        found.append(history(trainer))
    return found


def test_what_decays_how_it_steps_and_what_counts_are_those_of_the_users_model(pool: WorkerPool, tmp_path: Path) -> None:
    (expected,) = pool.run(f"{__name__}:cases_alone", tmp_path / "alone", ranks=1)
    for found in pool.run(f"{__name__}:cases_together", tmp_path / "parts", ranks=2):
        for name, one, other in zip(CASES, found, expected, strict=True):  # type: ignore[call-overload]
            assert one == pytest.approx(other, rel=2e-4), name


@pytest.mark.parametrize(
    "options, way_out",
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 is not supported.*\n.*a forward that computes"),
        ({"activation_checkpointing": True}, 'gradient_checkpointing=True is not supported.*\n.*recompute="blocks"'),
        ({"bf16": True}, 'bf16=True is not supported.*\n.*precision="bf16-mixed"'),
    ],
)
def test_arguments_that_reach_into_the_module_are_refused(tmp_path: Path, options: dict[str, object], way_out: str) -> None:
    source = model(False)
    parallel = autopar.parallelize(source, SAMPLE, (1,))
    with pytest.raises(InputError, match=way_out):
        Trainer(parallel, source, args=arguments(tmp_path, 8, **options), train_dataset=DATA, eval_dataset=DATA)
    own = transformers.Seq2SeqTrainingArguments(str(tmp_path), predict_with_generate=True, use_cpu=True)
    with pytest.raises(InputError, match=r"predict_with_generate=True is not supported.*\n.*parallel_generator"):
        Trainer(parallel, source, args=own, train_dataset=DATA, eval_dataset=DATA)
    with pytest.raises(InputError, match="compute_loss_func is not supported"):
        Trainer(parallel, source, args=arguments(tmp_path, 8), compute_loss_func=len)


def answering() -> nn.Module:
    torch.manual_seed(0)
    sizes = {name: WIDTHS[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    none = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return transformers.BertForQuestionAnswering(transformers.BertConfig(num_hidden_layers=1, **sizes, **none))


ANSWERS = [{"input_ids": words, "end_positions": words[1] % 10, "start_positions": words[0] % 10} for words in WORDS]


def answers_alone(folder: Path) -> tuple[list[float], Any]:
    trainer = transformers.Trainer(answering(), args=arguments(folder, BATCH), train_dataset=ANSWERS, eval_dataset=ANSWERS)
    return history_and_labels(trainer)


def answers_together(folder: Path) -> tuple[list[float], Any]:
    launched()
    sample = {name: torch.stack([one[name] for one in ANSWERS[:BATCH]]) for name in ANSWERS[0]}
    parallel = autopar.parallelize(answering(), sample, device="h100", inputs="sharded", **PLANS["fsdp"])
    args = arguments(folder, BATCH // parallel.data_world)
    return history_and_labels(Trainer(parallel, answering(), args=args, train_dataset=ANSWERS, eval_dataset=ANSWERS))


def history_and_labels(trainer: transformers.Trainer) -> tuple[list[float], list[Any]]:
    trainer.train()
    return history(trainer), [labels.tolist() for labels in trainer.predict(ANSWERS).label_ids]


def test_labels_that_are_called_otherwise_are_evaluated(pool: WorkerPool, tmp_path: Path) -> None:
    """Before, question answering had no loss of evaluation, and no metrics."""
    ((expected, labels),) = pool.run(f"{__name__}:answers_alone", tmp_path / "alone", ranks=1)  # type: ignore[misc]
    for found, same in pool.run(f"{__name__}:answers_together", tmp_path / "parts", ranks=2):  # type: ignore[misc]
        assert found == pytest.approx(expected, rel=2e-4)
        assert same == labels


def classifying() -> nn.Module:
    torch.manual_seed(0)
    sizes = {name: WIDTHS[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    none = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    made = transformers.BertForSequenceClassification(
        transformers.BertConfig(num_hidden_layers=1, num_labels=3, **sizes, **none)
    )
    made.accepts_loss_kwargs = False  # of which the library, too, averages the batches of a step
    return made


KINDS = [{"input_ids": words, "label": words[0] % 3} for words in WORDS]  # which collators call labels


class WeighsClasses(transformers.Trainer):  # type: ignore[misc]
    """A loss outside of forward, as in the library's documentation."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], return_outputs: bool = False, **_: object
    ) -> object:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits, labels, weight=torch.tensor([1.0, 2.0, 3.0]))
        return (loss, outputs) if return_outputs else loss


class WeighsClassesTogether(WeighsClasses, Trainer):
    """It takes what the plan does not."""


def kinds_alone(folder: Path) -> list[list[float]]:
    found = []
    for trains in (transformers.Trainer, WeighsClasses):
        options = {"train_dataset": KINDS, "eval_dataset": KINDS, "compute_metrics": accuracy}
        trainer = trains(classifying(), args=arguments(folder, BATCH), **options)
        trainer.train()
        found.append(history(trainer))
    return found


def kinds_together(folder: Path) -> list[list[float]]:
    launched()
    planned = {"input_ids": WORDS[:BATCH]}
    found = []
    for trains, sample in ((Trainer, planned | {"labels": WORDS[:BATCH, 0] % 3}), (WeighsClassesTogether, planned)):
        parallel = autopar.parallelize(classifying(), sample, device="h100", inputs="sharded", **PLANS["fsdp"])
        options = {"train_dataset": KINDS, "eval_dataset": KINDS, "compute_metrics": accuracy}
        trainer = trains(parallel, classifying(), args=arguments(folder, BATCH // parallel.data_world), **options)
        trainer.train()
        found.append(history(trainer))
    return found


def test_labels_reach_a_plan_under_their_other_name_and_a_loss_outside_of_it_whole(pool: WorkerPool, tmp_path: Path) -> None:
    """Before, a column `label` was removed, and so was what a `compute_loss` takes beside the plan."""
    (expected,) = pool.run(f"{__name__}:kinds_alone", tmp_path / "alone", ranks=1)
    for found in pool.run(f"{__name__}:kinds_together", tmp_path / "parts", ranks=2):
        for one, other in zip(found, expected, strict=True):  # type: ignore[call-overload]
            assert one == pytest.approx(other, rel=2e-4)


class BatchAccuracy:
    """The share of labels that are right, batch by batch, as `batch_eval_metrics` asks for it."""

    def __init__(self) -> None:
        self.right: list[float] = []

    def __call__(self, found: transformers.EvalPrediction, compute_result: bool = False) -> dict[str, float]:
        self.right.append(float((found.predictions.argmax(-1) == found.label_ids).float().mean()))
        return {"right": sum(self.right) / len(self.right), "batches": len(self.right)} if compute_result else {}


def test_metrics_of_batches_are_those_of_the_librarys_trainer(tmp_path: Path) -> None:
    source, args = model(False), arguments(tmp_path, 8, batch_eval_metrics=True)
    parallel = autopar.parallelize(source, SAMPLE, (1,), device="h100")
    found = [
        trainer.evaluate()
        for trainer in (
            transformers.Trainer(source, args=args, eval_dataset=DATA, compute_metrics=BatchAccuracy()),
            Trainer(parallel, source, args=args, eval_dataset=DATA, compute_metrics=BatchAccuracy()),
        )
    ]
    assert found[0]["eval_batches"] > 1
    for name in ("eval_right", "eval_batches", "eval_loss"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-5)


def shared_inputs(folder: Path) -> None:
    launched()
    source = model(False)
    parallel = autopar.parallelize(source, SAMPLE, device="h100", inputs="sharded", **PLANS["fsdp"])
    with pytest.raises(InputError, match=r"each rank has its own share of the inputs"):
        Trainer(parallel, source, args=arguments(folder, BATCH // 2, include_for_metrics=["inputs"]), eval_dataset=DATA)


def test_metrics_of_inputs_are_refused_where_ranks_have_their_own(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(f"{__name__}:shared_inputs", tmp_path, ranks=2)


def test_evaluation_in_another_dtype_is_refused_before_training(tmp_path: Path) -> None:
    """Before, `trainer.evaluate()` was refused, behind training: the library casts the module then."""
    source, args = model(False), arguments(tmp_path, 8, bf16_full_eval=True)
    for precision in (None, "bf16-mixed"):
        parallel = autopar.parallelize(source, SAMPLE, (1,), device="h100", precision=precision)
        with pytest.raises(InputError, match=r'bf16_full_eval=True casts the module to torch.bfloat16.*\n.*"bf16-mixed"'):
            Trainer(parallel, source, args=args, train_dataset=DATA, eval_dataset=DATA)
    parallel = autopar.parallelize(source, SAMPLE, (1,), device="h100", precision="bf16")
    trainer = Trainer(parallel, source, args=args, train_dataset=DATA, eval_dataset=DATA)
    assert trainer.evaluate()["eval_loss"] > 0


def _of_other(kind: type[torch.optim.Optimizer], *sizes: int) -> dict[str, object]:
    """The state of an optimizer of groups of so many vectors, after a step."""
    groups = [{"params": [nn.Parameter(torch.ones(3)) for _ in range(size)]} for size in sizes]
    optimizer = kind(groups, lr=0.1)
    for parameter in (one for group in groups for one in group["params"]):
        parameter.grad = torch.ones(3)
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hostile", "optimizer.pt cannot be read"),
        ("groups", "the optimizer's state has groups of 1, 2 parameters"),
        ("shapes", "exp_avg of model.embed_tokens.weight in the optimizer's state has another shape"),
        ("kind", "is step, sum, that of another optimizer"),
        ("gone", "optimizer.pt cannot be read"),
    ],
)
def test_an_optimizer_of_the_library_that_is_not_read_is_said(tmp_path: Path, name: str, said: str) -> None:
    """And nothing in its file is run; the schedule goes on."""
    source, mark, file = model(False), tmp_path / "ran", tmp_path / "optimizer.pt"
    parallel = autopar.parallelize(source, SAMPLE, (1,), device="h100")
    trainer = Trainer(parallel, source, args=arguments(tmp_path, 8), train_dataset=DATA, eval_dataset=DATA)
    trainer.create_optimizer_and_scheduler(STEPS)
    sizes = [len(group["params"]) for group in trainer.optimizer.param_groups]
    if name == "hostile":
        torch.save(Hostile(mark), file)
        mark.unlink(missing_ok=True)
    elif name == "kind":
        own = torch.optim.Adagrad([dict(group) for group in trainer.optimizer.param_groups])
        torch.save(own.state_dict(), file)
    elif name != "gone":
        torch.save(_of_other(torch.optim.AdamW, *(sizes if name == "shapes" else (1, 2))), file)
    torch.save({**trainer.lr_scheduler.state_dict(), "last_epoch": 3}, tmp_path / "scheduler.pt")
    with pytest.warns(UserWarning, match=f"the optimizer begins anew, as its state was not read: .*{said}"):
        trainer._load_optimizer_and_scheduler(str(tmp_path))
    assert not mark.exists()
    assert not trainer.optimizer.state
    assert trainer.lr_scheduler.last_epoch == 3


def test_another_batch_than_the_planned_one_is_refused(tmp_path: Path) -> None:
    source = model(False)
    parallel = autopar.parallelize(source, SAMPLE, (1,))
    with pytest.raises(InputError, match="per_device_train_batch_size=4 is not the planned batch of 8, in 1 share"):
        Trainer(parallel, source, args=arguments(tmp_path, 4), train_dataset=DATA, eval_dataset=DATA)
    args = arguments(tmp_path, 8)
    args.per_device_eval_batch_size, args.eval_strategy = 16, "no"  # of which a training alone knows nothing
    trainer = Trainer(parallel, source, args=args, train_dataset=DATA)
    with pytest.raises(InputError, match="per_device_eval_batch_size=16 is not the planned batch of 8, in 1 share"):
        trainer.evaluate(DATA)
    trainer = Trainer(parallel, source, args=args, train_dataset=DATA)
    args.per_device_eval_batch_size = 8
    with pytest.raises(InputError, match="the data set has 12 samples, which is not a multiple of the planned batch of 8"):
        trainer.evaluate(DATA[:12])
    for evaluated in (DATA[:12], {"first": DATA, "second": DATA[:12]}):  # before training, where it would be evaluated
        with pytest.raises(InputError, match="the data set has 12 samples, which is not a multiple of the planned batch of 8"):
            Trainer(parallel, source, args=arguments(tmp_path, 8), train_dataset=DATA, eval_dataset=evaluated)


LATE = """
from dataclasses import dataclass
import torch
from transformers.utils import ModelOutput

@dataclass
class Late(ModelOutput):
    loss: torch.Tensor | None = None
"""


class ImportsLate(nn.Module):
    def forward(self, x: torch.Tensor) -> object:
        from late_output import Late

        return Late(loss=x.square().mean())


def test_an_output_class_that_is_first_imported_in_forward_is_registered_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "late_output.py").write_text(LATE)
    monkeypatch.syspath_prepend(tmp_path)
    x = torch.randn(8, 4)
    parallel = autopar.parallelize(ImportsLate(), (x,), (1,))
    assert torch.equal(parallel(x).loss, ImportsLate()(x).loss)
