"""A script with the Trainer of transformers, given to elastic.prepare_trainer: it trains as the
Trainer itself does, and what has no meaning here is refused by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.loop_reference import ScriptAtLoop, train_script_alone
from support.reference import collate

from elastic.data.order import sample_ids
from elastic.errors import ProgramError, SpecError
from elastic.worker.loop import without_gpu
from elastic.worker.loop.hf_trainer import (
    NO_MATTER,
    TAKEN,
    WHY,
    Collated,
    Losses,
    PreparedTrainer,
    check,
    job_keys,
    parts_of,
)
from elastic.worker.loop.script_host import capture

transformers = pytest.importorskip(
    "transformers", reason="the models are of transformers (it is in the extra 'test')"
)
STEPS, BATCH, SEED = 8, 6, 3
OF_A_MODEL = {
    "causal": """
labels = torch.where(ids > 3, ids, -100)
labels[5] = -100  # nothing of it is to be learned
made = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2))
""",
    "classes": """
labels = ids[:, 0] % 3
made = transformers.BertForSequenceClassification(transformers.BertConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
""",
    # the mean over samples of each one's loss by its own labels, or a sum
    "speech": """
key, labels = "input_values", torch.where(torch.arange(9) < ids[:, :1] % 4 + 1, ids % 7 + 1, -100)
ids = torch.randn(40, 320, generator=torch.Generator().manual_seed(2))
made = transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(
    vocab_size=8, pad_token_id=0, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, conv_dim=(8,), conv_kernel=(10,), conv_stride=(10,),
    num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, hidden_dropout=0.0, layerdrop=0.0,
    feat_proj_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, final_dropout=0.0,
    apply_spec_augment=False, ctc_loss_reduction="mean"))
""",
    "pixels": """
key, ids = "pixel_values", torch.randn(
    40, 3, 16, 16, generator=torch.Generator().manual_seed(3))
labels = (ids[:, 0] > 1).long()
labels[torch.arange(40) % 2 == 0, :12] = 255
made = transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig(
    num_labels=3, num_encoder_blocks=1, depths=[1], sr_ratios=[1], hidden_sizes=[8],
    patch_sizes=[3], strides=[4], num_attention_heads=[1], mlp_ratios=[2], decoder_hidden_size=8,
    hidden_dropout_prob=0.0, classifier_dropout_prob=0.0, drop_path_rate=0.0))
made.decode_head.classifier.weight.data.mul_(50)
made.decode_head.batch_norm = torch.nn.Identity()  # is one of parts of a batch
""",
}
OF_A_MODEL["summed speech"] = OF_A_MODEL["speech"].replace('"mean"', '"sum"')
SCRIPT = """
import torch, transformers, elastic
key, ids = "input_ids", torch.randint(32, (40, 9), generator=torch.Generator().manual_seed(1))
{model}
rows = [{{key: row, "labels": label}} for row, label in zip(ids, labels)]
args = transformers.TrainingArguments(**{arguments!r})
trainer = transformers.Trainer(model=made, args=args, train_dataset=rows)
"""
PREPARED = "elastic.prepare_trainer(trainer, global_batch={}).train()\n"


def arguments(folder: Path, **more: Any) -> dict[str, Any]:
    given = {
        "output_dir": str(folder / "out"), "max_steps": STEPS, "per_device_train_batch_size": 2,
        "learning_rate": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps": 2,
        "weight_decay": 0.1, "max_grad_norm": 0.5, "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    return given | more


@pytest.mark.parametrize("model", OF_A_MODEL)
def test_it_trains_as_the_trainer_itself(tmp_path: Path, model: str) -> None:
    """On the same samples: schedule, warm-up, decay, clipping, and labels that do not count. In
    parts, as many as a device may hold at once."""
    given = arguments(tmp_path)
    script = tmp_path / "train.py"
    text = SCRIPT.format(model=OF_A_MODEL[model], arguments=given)
    script.write_text(text + PREPARED.format(BATCH))
    losses = train_script_alone(script, [], SEED, STEPS)

    torch.manual_seed(SEED)
    whole = arguments(
        tmp_path, per_device_train_batch_size=BATCH, logging_steps=1,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    here: dict[str, Any] = {}
    exec(SCRIPT.format(model=OF_A_MODEL[model], arguments=whole), here)
    trainer, rows = here["trainer"], here["rows"]
    trainer.train_dataset = [
        rows[i] for step in range(STEPS) for i in sample_ids(len(rows), BATCH, SEED, step=step)
    ]
    trainer.train()
    alone = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    assert len(alone) == STEPS and alone[-1] != pytest.approx(alone[0], abs=1e-3)
    assert losses == pytest.approx(alone, abs=1e-4)


def test_dropout_is_on_also_of_a_model_from_pretrained(tmp_path: Path) -> None:
    """Which comes in evaluation mode; a Trainer calls model.train() at each step."""
    found = {}
    for name, dropout, mode in (
        ("new", 0.5, "train"),
        ("loaded", 0.5, "eval"),
        ("none", 0.0, "eval"),
    ):
        model = OF_A_MODEL["classes"].replace("dropout_prob=0.0", f"dropout_prob={dropout}")
        text = SCRIPT.format(model=f"{model}made.{mode}()", arguments=arguments(tmp_path))
        (tmp_path / "train.py").write_text(text + PREPARED.format(BATCH))
        found[name] = train_script_alone(tmp_path / "train.py", [], SEED, 2)
    assert found["loaded"] == found["new"] and found["loaded"] != pytest.approx(found["none"])


def test_a_validation_passes_no_more_rows_at_once_than_the_arguments_say(tmp_path: Path) -> None:
    found = {}
    for size, n_shares in ((12, 1), (2, 1), (2, 2)):
        given = arguments(tmp_path, per_device_eval_batch_size=size)
        text = SCRIPT.format(model=OF_A_MODEL["causal"], arguments=given)
        (tmp_path / "train.py").write_text(
            f"{text}trainer.eval_dataset = rows\n{PREPARED.format(12)}"
        )
        assert capture(tmp_path / "train.py", [], SEED).evaluation is not None, "it is tried"
        at_loop = ScriptAtLoop.of(tmp_path / "train.py", [], SEED, STEPS)
        at_loop.begin()
        program, model, run, n_rows = at_loop.program, at_loop.state.model, at_loop.script.run, []
        assert program.validation is not None and program.evaluation is not None
        assert run is not None
        run.n_shares, run.world_size = n_shares, 4 * n_shares  # four ranks have one share, by tp
        model.register_forward_pre_hook(
            lambda _, args, given, seen=n_rows: seen.append(len(given["input_ids"])),
            with_kwargs=True,
        )
        shares = torch.arange(12).chunk(n_shares)
        batches = [collate(program.validation(), share.tolist()) for share in shares]
        with torch.no_grad():
            value = sum(float(program.evaluation(model, batch)) for batch in batches)
        assert set(n_rows) == {size} and len(n_rows) == 12 // size
        found[size, n_shares] = value
        if n_shares == 1:
            n_rows.clear()
            at_loop.script.compute(at_loop.batch(0, SEED), 0, 0)
            assert set(n_rows) == {2}, "per_device_train_batch_size"
    assert found[2, 1] == pytest.approx(found[12, 1]) == found[2, 2]


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Any]:
    def trainer(more: dict[str, Any] | None = None, kind: Any = None, **own: Any) -> Any:
        given = arguments(tmp_path, **(more or {}))
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2,
        )  # fmt: skip
        return (kind or transformers.Trainer)(
            model=transformers.LlamaForCausalLM(config),
            args=transformers.TrainingArguments(**given), train_dataset=[], **own,
        )  # fmt: skip

    return trainer


class Stops(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    pass


class Other(transformers.Trainer):  # type: ignore[misc, name-defined]
    def compute_loss(self, *args: Any, **given: Any) -> Any:
        return None


@pytest.mark.parametrize(
    ("more", "own", "said"),
    [
        ({"label_smoothing_factor": 0.1}, {}, r"TrainingArguments\(label_smoothing_factor=0.1\)"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"},
         {"eval_dataset": [1]}, "the rate must follow from the step"),
        ({"metric_for_best_model": "accuracy"}, {}, "give 'eval_loss'"),
        ({}, {"compute_metrics": print}, r"Trainer\(compute_metrics=...\): the loss of eval_"),
        ({}, {"compute_loss_func": print}, r"Trainer\(compute_loss_func=...\)"),
        ({}, {"callbacks": [Stops()]}, "the callback Stops is not called"),
        ({}, {"callbacks": [transformers.EarlyStoppingCallback()]}, "EarlyStoppingCallback is not"),
        ({}, {"kind": Other}, "Other.compute_loss is not called: the loop is elastic's"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused_by_name(
    made: Callable[..., Any], more: dict[str, Any], own: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError, match=said) as refused:
        check(made(more, **own))
    assert "\n" not in str(refused.value) and str(refused.value).startswith("elastic.prepare_tr")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("fsdp", "full_shard", "the layout is elastic's"),
        ("deepspeed", "zero.json", "the layout is elastic's"),
        ("push_to_hub", True, "call trainer.push_to_hub() behind train()"),
        ("fp16", True, "give bf16=True"),
        ("neftune_noise_alpha", 5.0, "elastic does not do it"),
    ],
)
def test_a_field_that_is_not_taken_is_named_with_what_is_right(
    made: Callable[..., Any], name: str, value: Any, said: str
) -> None:
    """Set afterwards: the arguments themselves refuse some of them on this machine."""
    trainer = made()
    setattr(trainer.args, name, value)
    with pytest.raises(SpecError) as refused:
        check(trainer)
    where = f"elastic.prepare_trainer: TrainingArguments({name}={value!r}): "
    assert str(refused.value).startswith(where + said)


def test_what_shows_or_has_its_default_is_taken(made: Callable[..., Any]) -> None:
    check(made({"logging_steps": 10, "report_to": "none", "seed": 7}))
    mlm = transformers.DataCollatorForLanguageModeling
    collator = mlm.__new__(mlm)
    collator.mlm, collator.seed = True, None
    check(made(data_collator=collator))
    collator.seed = 3
    with pytest.raises(SpecError, match=r"\(seed=3\) draws from a generator of its own"):
        check(made(data_collator=collator))


def test_a_batch_without_a_label_adds_nothing() -> None:
    """As one where no word is masked, which the model gives NaN for."""
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config)
    losses = Losses(SimpleNamespace(model=model, model_accepts_loss_kwargs=False))
    ids = torch.arange(8).view(1, 8)
    for labels, learned in ((torch.full_like(ids, -100), False), (ids, True)):
        model.zero_grad()
        loss = losses(model, {"input_ids": ids, "labels": labels})
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(g.isfinite().all() for g in gradients) and loss.isfinite()
        assert any(g.any() for g in gradients) == learned == bool(loss)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"labels": [{"boxes": torch.zeros(2, 4)}]}, "gives 'labels' as a list;"),  # of DETR
        ({"pixel_values": torch.zeros(256, 4)}, "gives 256 rows of 'pixel_values';"),  # of Qwen-VL
        ({"input_ids": torch.zeros(2, 9)}, "gives 2 rows of 'input_ids';"),
        ({"labels": torch.tensor(3)}, "gives 'labels' as one number;"),
        ({"return_loss": True, "text": None}, ""),  # of CLIP
    ],
)
def test_a_collator_gives_one_row_of_each_key(made: dict[str, Any], said: str) -> None:
    collator = SimpleNamespace(
        data_collator=lambda rows: {"x": torch.stack(rows), **made},
        _get_collator_with_removed_columns=lambda collator: collator,
    )
    rows = Collated([torch.arange(3)], collator)
    with pytest.raises(SpecError, match=said) if said else nullcontext():
        assert set(rows[0]) == {"x"} and rows.flags() == {"return_loss": True}


def test_samples_of_which_the_model_gives_no_loss_are_refused_in_the_driver(tmp_path: Path) -> None:
    text = SCRIPT.format(model=OF_A_MODEL["classes"], arguments=arguments(tmp_path))
    text = text.replace(', "labels": label', "")
    (tmp_path / "train.py").write_text(text + PREPARED.format(BATCH))
    said = r"the model gives no loss \(logits\) of .* a sample \(input_ids\): give it the labels"
    with pytest.raises(SpecError, match=said):
        capture(tmp_path / "train.py", [], SEED)


def test_what_a_collator_says_beside_its_tensors_is_given_to_the_model() -> None:
    class Rows(Collated):
        def flags(self) -> dict[str, bool]:
            return {"return_loss": True}

    def model(x: torch.Tensor, return_loss: bool = False) -> dict[str, torch.Tensor]:
        return {"loss": x.mean()} if return_loss else {}

    trainer = SimpleNamespace(model=small_llama(transformers.LlamaForCausalLM).model)
    losses = Losses(trainer, {"dataset": Rows([], None)})
    assert losses(model, {"x": torch.ones(3)}) == 3.0
    with pytest.raises(ProgramError, match=r"the model gives no loss \(\) of"):
        Losses(trainer)(model, {"x": torch.ones(3)})


def test_other_keywords_of_the_loop_count_before_the_trainers(tmp_path: Path) -> None:
    text = SCRIPT.format(model=OF_A_MODEL["classes"], arguments=arguments(tmp_path))
    more = """
class Seen:
    n = 0
    def state_dict(self):
        return {"n": self.n}
    def load_state_dict(self, state):
        self.n = state["n"]

trainer.eval_dataset = rows
trainer.lr_scheduler = torch.optim.lr_scheduler.StepLR(trainer.create_optimizer(), 2)
elastic.prepare_trainer(
    trainer, global_batch=6, count=lambda batch: 5 * len(batch["labels"]), files=lambda: {"a": b"b"},
    evaluate=lambda model, batch: {"loss": model(**batch)["loss"] * 2, "twos": 2 * len(batch["labels"])},
    extra_state={"seen": Seen()},
).train()
"""
    (tmp_path / "train.py").write_text(text + more)
    program = capture(tmp_path / "train.py", [], SEED)
    assert {"scheduler", "seen"} <= set(program.extra_state) and program.files is not None
    assert program.files() == {"a": b"b"} and program.count is not None
    batch = collate(program.dataset(), [0, 1])
    assert program.count(batch) == 10 and program.evaluation is not None
    assert program.evaluation(program.model(), batch)["twos"] == 4
    own = SimpleNamespace(model=program.model(), model_accepts_loss_kwargs=False)
    mean, said = Losses(own), Losses(own, {"count": program.count})
    ratio = said(own.model, batch).detach() / mean(own.model, batch).detach()
    assert float(ratio) == pytest.approx(5.0)


@pytest.mark.parametrize("name", ["model", "optimizer"])
def test_what_is_the_trainers_is_given_to_the_trainer(made: Callable[..., Any], name: str) -> None:
    with pytest.raises(SpecError, match=rf"\({name}=...\): it is the Trainer's; give it to"):
        PreparedTrainer(made(), {name: None})


def small_llama(kind: Any) -> Any:
    return kind(
        transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2,
        )
    )  # fmt: skip


def test_a_model_whose_name_says_nothing_shifts_its_labels_all_the_same() -> None:
    class Mine(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        pass

    class Logged(Mine):
        def forward(self, input_ids: Any, labels: Any = None, **_: Any) -> Any:
            return super().forward(input_ids, labels=labels)

    ids = torch.arange(16).view(2, 8)
    first = torch.full_like(ids, -100)
    first[:, 0] = 3
    for kind, sums in ((Mine, True), (Logged, False)):
        model = small_llama(kind)
        losses = Losses(SimpleNamespace(model=model, model_accepts_loss_kwargs=True))
        assert losses.count({"input_ids": ids, "labels": ids}) == 14
        mean = float(model(input_ids=ids, labels=ids)["loss"].detach())
        loss = losses(model, {"input_ids": ids, "labels": ids}).detach()
        assert float(loss) == pytest.approx(14 * mean)
        if sums:
            assert not losses(model, {"input_ids": ids, "labels": first}).detach()


def test_a_loss_of_the_models_own_is_taken_as_it_is() -> None:
    class Mine(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        def forward(self, input_ids: Any, labels: Any = None, **_: Any) -> Any:
            logits = self.lm_head(self.model(input_ids)[0])
            return {
                "loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            }

    model, ids = small_llama(Mine), torch.arange(16).view(2, 8)
    losses = Losses(SimpleNamespace(model=model, model_accepts_loss_kwargs=True))
    assert losses.count({"input_ids": ids, "labels": ids}) == 16


def test_a_field_stands_on_one_side_only() -> None:
    known = {field.name for field in fields(transformers.TrainingArguments)}
    assert not TAKEN & NO_MATTER and not (TAKEN | NO_MATTER) & set(WHY)
    assert known >= TAKEN | NO_MATTER | set(WHY)


@pytest.mark.parametrize(
    ("more", "keys"),
    [
        ({"max_steps": -1, "num_train_epochs": 2}, {"epochs": 2}),
        ({"max_steps": -1, "num_train_epochs": 0.5}, {"steps": 9}),
        ({"eval_strategy": "epoch"}, {"eval_every": 17}),
        ({"eval_strategy": "steps", "eval_steps": 0.25}, {"eval_every": 2}),
        ({"save_steps": 40, "save_total_limit": 3}, {"checkpoint_every": 40, "keep_last": 3}),
        ({"save_strategy": "no"}, {"checkpoint_every": 0}),
        ({"save_strategy": "epoch"}, {"checkpoint_every": 17}),
        ({"bf16": True, "activation_checkpointing": True},
         {"precision": "bfloat16", "activation_checkpointing": "full"}),
        ({"max_grad_norm": 0.0, "data_seed": 5, "dataloader_num_workers": 2},
         {"clip_grad_norm": None, "seed": 5, "data": {"loader_workers": 2}}),
        ({"report_to": ["wandb", "tensorboard"]}, {"trackers": ["wandb"]}),
        # the best is one of those that are stored behind a validation
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 50},
         {"eval_every": 50, "checkpoint_every": 500, "keep_best": 1}),
        ({"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 3,
          "metric_for_best_model": "eval_loss"},
         {"eval_every": 3, "checkpoint_every": 3, "keep_best": 1}),
    ],
)  # fmt: skip
def test_arguments_as_keys_of_the_job(
    tmp_path: Path, more: dict[str, Any], keys: dict[str, Any]
) -> None:
    args = transformers.TrainingArguments(**arguments(tmp_path))
    usual = {"steps": STEPS, "seed": 42, "clip_grad_norm": 0.5}
    assert job_keys(args, 6, 100, said={}) == usual
    said = usual | keys
    if "epochs" in keys:
        del said["steps"]
    given = transformers.TrainingArguments(**arguments(tmp_path, **more))
    assert job_keys(given, 6, 100, said={}) == {k: v for k, v in said.items() if v is not None}


@pytest.mark.parametrize("more", [{}, {"max_steps": -1, "num_train_epochs": 3}])
@pytest.mark.parametrize(("said", "every"), [({"steps": 40}, 10), ({"epochs": 2}, 9)])
def test_keywords_count_before_what_the_arguments_say_of_its_length(
    tmp_path: Path, more: dict[str, Any], said: dict[str, int], every: int
) -> None:
    """17 steps are an epoch; and a fraction is one of the length that counts."""
    given = arguments(tmp_path, eval_strategy="steps", eval_steps=0.25, **more)
    args = transformers.TrainingArguments(**given)
    found = job_keys(args, 6, 100, said=said) | said
    assert {key: found[key] for key in ("steps", "epochs") if key in found} == said
    assert found["eval_every"] == every


def test_where_the_hub_has_it_is_said_in_the_arguments(made: Callable[..., Any]) -> None:
    check(made({"hub_model_id": "org/x", "hub_private_repo": True, "hub_token": "t"}))


def test_arguments_for_gpus_on_a_machine_without(tmp_path: Path) -> None:
    """The driver runs the script up to its loop on the head of a cluster."""
    given = arguments(tmp_path, bf16=True, tf32=True, use_cpu=False)
    (tmp_path / "train.py").write_text(
        SCRIPT.format(model=OF_A_MODEL["classes"], arguments=given) + PREPARED.format(BATCH)
    )
    assert capture(tmp_path / "train.py", [], SEED).settings["precision"] == "bfloat16"
    assert torch.backends.fp32_precision != "tf32"
    with pytest.raises(ValueError, match="Your setup doesn't support bf16"):
        transformers.TrainingArguments(**given)


def test_the_module_of_arguments_may_be_loaded_by_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, without_gpu.ARGUMENTS)
    with without_gpu.answered():
        module = importlib.import_module(without_gpu.ARGUMENTS)
        assert module.is_torch_bf16_gpu_available() and module.is_torch_tf32_available()
        assert module.TrainingArguments is not transformers.TrainingArguments
    assert not module.is_torch_bf16_gpu_available()


def test_every_rank_has_as_many_parts() -> None:
    batch = {"x": torch.arange(5)}
    found = [(part["x"].tolist(), weight) for part, weight in parts_of(batch, 3)]
    assert found == [([0, 1], 1.0), ([2, 3], 1.0), ([4], 1.0)]
    few = [(part["x"].tolist(), weight) for part, weight in parts_of({"x": torch.arange(1)}, 2)]
    assert few == [([0], 1.0), ([0], 0.0)]


def test_before_it_is_trained_a_trainer_shows_nothing(made: Callable[..., Any]) -> None:
    trainer = made()
    prepared = PreparedTrainer(trainer, {})
    assert prepared.args is trainer.args and prepared.state is trainer.state
    with pytest.raises(SpecError, match=r"evaluate\(\) before train\(\): the run validates"):
        prepared.evaluate()
    for name in ("predict", "save_model", "push_to_hub"):
        with pytest.raises(SpecError, match=rf"trainer.{name}\(\) before train\(\): put it beh"):
            getattr(prepared, name)()
    with pytest.raises(ProgramError, match="start a run for each trial"):
        prepared.hyperparameter_search()
    with pytest.raises(SpecError, match="it is a int; give a transformers.Trainer"):
        PreparedTrainer(3, {})
    with pytest.raises(
        SpecError, match=r"train\(resume_from_checkpoint=...\): the same --run-name"
    ):
        prepared.train(resume_from_checkpoint="out/checkpoint-3")


def test_what_a_trainer_does_afterwards(
    made: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = made()
    prepared = PreparedTrainer(trainer, {})
    here = {"rank": 1, "validated": {"validation_loss": 0.5}, "name": "first run"}
    prepared._run = run = type("Run", (), here)()
    check(trainer)  # the Trainer can be used all the same
    assert prepared.evaluate() == {"eval_loss": 0.5}
    prepared.save_model()  # by rank 0 alone
    assert prepared.push_to_hub() is None and not (tmp_path / "out" / "config.json").exists()
    ids = torch.arange(9)
    rows = [{"input_ids": ids, "labels": ids}] * 3
    assert set(prepared.evaluate(rows, metric_key_prefix="test")) >= {"test_loss"}
    assert prepared.predict(rows).predictions.shape == (3, 9, 32)

    run.rank = 0
    prepared.save_model()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(loaded.state_dict(), trainer.model.state_dict())
    assert f"note: the trained model is in {tmp_path / 'out'} on " in capsys.readouterr().out
    run.validated = {}
    assert prepared.evaluate() == {}
    assert "trainer.evaluate() gives no numbers: no eval" in capsys.readouterr().out


def test_a_hub_that_does_not_take_the_model_is_one_line(
    made: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = made()
    prepared = PreparedTrainer(trainer, {})
    prepared._run = type("Run", (), {"rank": 0, "name": "first run"})()

    def away(**_: Any) -> None:
        raise ConnectionError("no way to it")

    monkeypatch.setattr(trainer, "push_to_hub", away)
    with pytest.raises(ProgramError) as refused:
        prepared.push_to_hub(blocking=True)
    assert str(refused.value) == (
        "trainer.push_to_hub(): ConnectionError: no way to it; the model is in the run: `elastic "
        "checkpoint export 'first run' --to FOLDER` and `hf upload REPO FOLDER` send it"
    )
