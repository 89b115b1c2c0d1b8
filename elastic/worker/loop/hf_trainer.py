"""`elastic.prepare_trainer`: a script with the `Trainer` of transformers, changed live.

```python
trainer = elastic.prepare_trainer(Trainer(model=model, args=args, train_dataset=rows))
trainer.train()
```
The Trainer's arguments become keys of the job, its optimizer and schedule stay its own, and its
loop is `elastic.loop`. What of it has no meaning here is refused by name.
"""

from __future__ import annotations

import inspect
import math
import os
import platform
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch

from elastic.errors import ProgramError, SpecError
from elastic.models.huggingface import files_of
from elastic.worker.loop.loop import Run, loop
from elastic.worker.program.calls import cut_rows
from elastic.worker.program.loop_program import map_style

Batch = Mapping[str, torch.Tensor]
HERE = "elastic.prepare_trainer"
IGNORED = -100
OWN_LOOP = "write the loop (docs/loop.md)"

# of TrainingArguments: what becomes keys of the job, or is read here
TAKEN = {
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs",
    "max_steps", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps",
    "optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
    "max_grad_norm", "bf16", "activation_checkpointing", "gradient_checkpointing",
    "torch_compile", "eval_strategy", "eval_steps", "save_strategy", "save_steps",
    "save_total_limit", "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
    "report_to", "seed", "data_seed", "dataloader_num_workers", "remove_unused_columns",
    "use_cache", "output_dir", "per_device_eval_batch_size",
}  # fmt: skip
# what is said and shown, and how processes of its own would be run: the run does it its way
NO_MATTER = {
    "average_tokens_across_devices", "prediction_loss_only",
    "do_train", "do_eval", "do_predict", "logging_strategy", "logging_steps",
    "logging_first_step", "log_on_each_node", "logging_nan_inf_filter",
    "log_level", "log_level_replica", "disable_tqdm", "run_name", "project",
    "skip_memory_metrics", "dataloader_pin_memory", "dataloader_persistent_workers",
    "dataloader_prefetch_factor", "dataloader_in_order", "dataloader_drop_last",
    "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers",
    "ddp_static_graph", "ddp_backend", "ddp_timeout", "local_rank", "save_only_model",
    "save_on_each_node", "ignore_data_skip", "use_cpu", "gradient_checkpointing_kwargs",
    "activation_checkpointing_kwargs", "eval_accumulation_steps", "torch_empty_cache_steps",
    "hub_model_id", "hub_private_repo", "hub_token", "hub_revision",  # of trainer.push_to_hub()
    "tf32",  # a setting of each worker's torch, which it makes itself
}  # fmt: skip
LAYOUT = "the layout is elastic's, layout='dp_shard=4' fixes one; leave it out"
WHY = {
    "deepspeed": LAYOUT,
    "fsdp": LAYOUT,
    "fsdp_config": LAYOUT,
    "parallelism_config": LAYOUT,
    "accelerator_config": LAYOUT,
    "fp16": "give bf16=True, or elastic.prepare_trainer(trainer, precision='float16')",
    "push_to_hub": "call trainer.push_to_hub() behind train(); leave it out",
    "resume_from_checkpoint": "the same --run-name resumes, from its own checkpoints; leave it out",
    "train_sampling_strategy": "the order is elastic's, each sample of an epoch once; leave it out",
    "auto_find_batch_size": "a layout that has no room is left by itself; leave it out",
}
NOT_DONE = f"elastic does not do it; leave it out, or {OWN_LOOP}"
# of the Trainer's own arguments
OF_A_TRAINER = {
    "compute_metrics": "the loss of eval_dataset is reported; leave it out, with "
    f"preprocess_logits_for_metrics, or {OWN_LOOP}, with evaluate=",
    "preprocess_logits_for_metrics": "there is no compute_metrics; leave it out",
    "compute_loss_func": f"the model's own loss is taken; for another {OWN_LOOP}",
}
OF_THE_BEST = (
    "note: load_best_model_at_end: the Trainer's model is that of the last step; the best is kept "
    "too: metrics.csv has each validation_loss, `elastic checkpoint ls {run}` marks the best, "
    "`elastic checkpoint export {run} --step best --to FOLDER` writes it"
)
SHOWING = ("DefaultFlowCallback", "PrinterCallback", "ProgressCallback", "NotebookProgressCallback")
OVERRIDABLE = ("create_optimizer", "get_decay_parameter_names", "get_optimizer_cls_and_kwargs")
NO_TRIALS = "start a run for each trial"
BY_ONE_RANK = ("log_metrics", "save_metrics", "save_state", "create_model_card")


def prepare_trainer(trainer: Any, **job: Any) -> Any:
    """A `transformers.Trainer` whose train() enters `elastic.loop`; the script is started by
    `elastic run --script`.

    trainer: a Trainer of plain TrainingArguments; docs/huggingface.md says what becomes of each.
    job:     other keywords of elastic.loop, keys of job.yaml among them. global_batch: samples per
             step, whatever the number of workers; default: what the arguments say of one device.

    Raises SpecError, from train(), that names an argument which has no meaning here.
    """
    return PreparedTrainer(trainer, job)


class PreparedTrainer:
    """Stands where a Trainer stood; what is not here is the Trainer's own."""

    def __init__(self, trainer: Any, job: Mapping[str, Any]) -> None:
        from transformers import Trainer

        if not isinstance(trainer, Trainer):
            raise SpecError(
                f"{HERE}: it is a {type(trainer).__name__}; give a transformers.Trainer"
            )
        for name in ("model", "optimizer"):
            if name in job:
                raise SpecError(f"{HERE}({name}=...): it is the Trainer's; give it to the Trainer")
        self.trainer: Any = trainer
        self.job = dict(job)
        self._run: Run | None = None

    def train(self, resume_from_checkpoint: Any = None, **others: Any) -> Any:
        """Trains to the end of the job; a TrainOutput, whose training_loss is the last step's. The
        Trainer's model then has the trained weights, on every rank."""
        from transformers.trainer_utils import TrainOutput

        check(self.trainer)
        for name, value in {"resume_from_checkpoint": resume_from_checkpoint, **others}.items():
            if value and not (name == "resume_from_checkpoint" and value is True):
                raise SpecError(f"{HERE}: train({name}=...): {WHY.get(name, NOT_DONE)}")
        given = self._given()
        losses = Losses(self.trainer, given)
        optimizer, scheduler = self.trainer.create_optimizer(), self.trainer.lr_scheduler
        extra = {} if scheduler is None else {"scheduler": scheduler}
        most = -(-given["global_batch"] // self.trainer.args.per_device_train_batch_size)
        self.trainer.model.train()  # as a Trainer does at each step: from_pretrained leaves it off
        own = {
            "files": files_of(self.trainer.model, self.trainer.processing_class),
            **self._validation(losses, given["global_batch"]),
        }
        extra |= given.pop("extra_state", {})
        given.pop("count", None)
        entered = loop(
            model=self.trainer.model,
            optimizer=optimizer,
            count=losses.count,
            extra_state=extra,
            **own | given,
        )
        rates = LearningRates(self.trainer, optimizer)
        self._run = run = entered._entered(inspect.currentframe())
        for batch in run:
            for part, weight in parts_of(batch, -(-most // run.n_shares)):
                run.backward(losses(run.model, part) * weight)
            if scheduler is None:
                rates.set(run.step_index, run.steps)
            if run.step() and scheduler is not None:
                scheduler.step()
        run.model.gather_into(self.trainer.model)
        if self.trainer.args.load_best_model_at_end and not run.rank:
            print(OF_THE_BEST.format(run=shlex.quote(run.name)), flush=True)
        metrics = {} if run.train_loss is None else {"train_loss": run.train_loss}
        return TrainOutput(run.steps, metrics.get("train_loss", math.nan), metrics)

    def _given(self) -> dict[str, Any]:
        """What the arguments say of the loop, under what the script says itself."""
        rows = Collated(
            map_style(self.trainer.train_dataset, "Trainer(train_dataset=...)"), self.trainer
        )
        args = self.trainer.args
        one = args.per_device_train_batch_size * args.gradient_accumulation_steps
        if "global_batch" not in self.job:
            print(
                f"note: global_batch is {one} = per_device_train_batch_size x "
                f"gradient_accumulation_steps, of one device: {HERE}(trainer, global_batch=N) says "
                "another",
                flush=True,
            )
        given = {"dataset": rows, "global_batch": one, **self.job}
        said = {key: given[key] for key in ("steps", "epochs") if isinstance(given.get(key), int)}
        return {**job_keys(args, given["global_batch"], len(rows), said=said), **given}

    def _validation(self, losses: Losses, global_batch: int) -> dict[str, Any]:
        rows = self.trainer.eval_dataset
        if rows is None or "validation" in self.job:
            return {}
        if isinstance(rows, Mapping):
            raise SpecError(
                f"{HERE}: Trainer(eval_dataset=...) is a dict of datasets; give one of them"
            )
        rows = Collated(map_style(rows, "Trainer(eval_dataset=...)"), self.trainer)
        samples = {} if "eval_samples" in self.job else {"eval_samples": len(rows)}
        most = -(-global_batch // self.trainer.args.per_device_eval_batch_size)

        def evaluate(model: Any, batch: Batch) -> Any:
            # where this is tried, before the first batch, nobody knows of how many shares
            n = -(-most // vars(self._run).get("n_shares", most))
            return sum(losses(model, part) * weight for part, weight in parts_of(batch, n))

        return {"validation": rows, "evaluate": evaluate, **samples}

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Of eval_dataset the loss after the last step, with which every run ends by itself; of
        another dataset what the Trainer finds."""
        run = self._trained("evaluate")
        if eval_dataset is not None and eval_dataset is not self.trainer.eval_dataset:
            found: dict[str, float] = self.trainer.evaluate(
                eval_dataset, ignore_keys, metric_key_prefix
            )
            return found
        loss = run.validated.get("validation_loss")
        if loss is not None:
            return {f"{metric_key_prefix}_loss": loss}
        if not run.rank:
            said = "trainer.evaluate() gives no numbers: no eval_dataset was validated"
            print(f"note: {said}", flush=True)
        return {}

    def predict(self, *given: Any, **named: Any) -> Any:
        """The Trainer's own, by each rank of all samples."""
        self._trained("predict")
        return self.trainer.predict(*given, **named)

    def save_model(self, output_dir: str | None = None, *given: Any, **named: Any) -> None:
        """The Trainer's own, by rank 0: the folder is on its machine."""
        if self._trained("save_model").rank:
            return
        self.trainer.save_model(output_dir, *given, **named)
        folder = os.path.abspath(output_dir or self.trainer.args.output_dir)
        print(f"note: the trained model is in {folder} on {platform.node()}", flush=True)

    def push_to_hub(self, *given: Any, **named: Any) -> Any:
        """The Trainer's own, by rank 0. Raises ProgramError where the hub does not take it."""
        run = self._trained("push_to_hub")
        if run.rank:
            return None
        try:
            return self.trainer.push_to_hub(*given, **named)
        except Exception as error:
            raise ProgramError(
                f"trainer.push_to_hub(): {type(error).__name__}: {error}; the model is in the run: "
                f"`elastic checkpoint export {shlex.quote(run.name)} --to FOLDER` and `hf upload "
                "REPO FOLDER` send it"
            ) from error

    def _trained(self, name: str) -> Run:
        if self._run is None:
            validates = "the run validates at eval_steps and after the last step; "
            raise SpecError(
                f"{HERE}: trainer.{name}() before train(): "
                f"{validates if name == 'evaluate' else ''}put it behind train(), or leave it out"
            )
        return self._run

    def __getattr__(self, name: str) -> Any:
        if name == "hyperparameter_search":
            raise ProgramError(f"{HERE}: trainer.{name}: {NO_TRIALS}")
        if name in BY_ONE_RANK and (self._run is None or self._run.rank):
            return lambda *args, **given: None
        return getattr(self.trainer, name)


# ------------------------------------------------------------------------------------ its arguments


def check(trainer: Any) -> None:
    """Raises SpecError for what of the Trainer is not taken."""
    from transformers import Trainer

    for kind in type(trainer).__mro__:
        for name in () if kind.__module__.startswith("transformers.") else vars(kind):
            if hasattr(Trainer, name) and name not in OVERRIDABLE and not name.startswith("__"):
                raise SpecError(
                    f"{HERE}: {kind.__name__}.{name} is not called: the loop is elastic's; "
                    f"{OWN_LOOP}"
                )
    for name, why in OF_A_TRAINER.items():
        if getattr(trainer, name, None) is not None:
            raise SpecError(f"{HERE}: Trainer({name}=...): {why}")
    for callback in trainer.callback_handler.callbacks:
        kind = type(callback)
        if kind.__name__ not in SHOWING and not kind.__module__.startswith(
            "transformers.integrations."
        ):
            raise SpecError(
                f"{HERE}: the callback {kind.__name__} is not called; leave it out, or {OWN_LOOP}, "
                "whose lines say what happens in a step"
            )
    collator = trainer.data_collator
    if getattr(collator, "mlm", False) and getattr(collator, "seed", None) is not None:
        raise SpecError(
            f"{HERE}: {type(collator).__name__}(seed={collator.seed}) draws from a generator of "
            "its own, which continues from sample to sample in each process; leave seed out: what "
            "it masks then follows from TrainingArguments(seed=...), the step and the sample"
        )
    check_arguments(trainer.args)


def check_arguments(args: Any) -> None:
    """Every field of TrainingArguments that is not taken must have its default. Raises
    SpecError."""
    default = untouched(args)
    for field in fields(args):
        name, value = field.name, getattr(args, field.name)
        if name in TAKEN or name in NO_MATTER or value == getattr(default, name):
            continue
        text = repr(value) if len(repr(value)) <= 60 else "..."
        raise SpecError(f"{HERE}: TrainingArguments({name}={text}): {WHY.get(name, NOT_DONE)}")
    best = args.metric_for_best_model
    if best not in (None, "loss", "eval_loss") or args.greater_is_better:
        raise SpecError(
            f"{HERE}: TrainingArguments(metric_for_best_model={best!r}): the best is that of least "
            "validation loss; give 'eval_loss'"
        )
    if args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
        raise SpecError(
            f"{HERE}: TrainingArguments(lr_scheduler_type='{args.lr_scheduler_type}'): the rate "
            f"must follow from the step; choose another, or {OWN_LOOP}"
        )


def untouched(args: Any) -> Any:
    """Arguments of that kind as they are by default. They look for no device of their own: that
    would make accelerate forget what the Trainer's was found by."""
    kind = type("Untouched", (type(args),), {"_setup_devices": args.device})
    return kind(output_dir=args.output_dir)


def job_keys(
    args: Any, global_batch: int, n_samples: int, *, said: Mapping[str, Any]
) -> dict[str, Any]:
    """TrainingArguments as keys of a job. What they say of nothing is left out. `said`: the steps
    or epochs that count in place of theirs."""
    epoch = -(-n_samples // global_batch)
    n_epochs = said.get("epochs", args.num_train_epochs)
    most = said.get("steps", 0 if "epochs" in said else args.max_steps)
    steps = most if most > 0 else math.ceil(n_epochs * n_samples / global_batch)
    whole = most <= 0 and float(n_epochs).is_integer()

    def every(strategy: Any, n: float | None) -> int | None:
        """Steps between two; None = never, as where it is said of nothing."""
        if strategy == "epoch":
            return epoch
        if strategy == "no" or not n:
            return None
        return math.ceil(n * steps) if n < 1 else int(n)

    saves, default = args.save_strategy, untouched(args)
    as_it_is = (saves, args.save_steps) == (default.save_strategy, default.save_steps)
    best = args.load_best_model_at_end or saves == "best"
    # the best is one of those that are stored behind a validation
    evaluates = every(args.eval_strategy, args.eval_steps)
    saved = evaluates if saves == "best" else every(saves, args.save_steps)
    trackers = [name for name in args.report_to if name not in ("none", "tensorboard")]
    recomputes = args.gradient_checkpointing or getattr(args, "activation_checkpointing", None)
    found = {
        **({} if said else {"epochs": int(n_epochs)} if whole else {"steps": steps}),
        "seed": args.seed if args.data_seed is None else args.data_seed,
        "clip_grad_norm": args.max_grad_norm or None,
        "precision": "bfloat16" if args.bf16 else None,
        "activation_checkpointing": "full" if recomputes else None,
        "compile": args.torch_compile or None,
        "eval_every": evaluates,
        "checkpoint_every": None if as_it_is and not best else saved or 0,
        "keep_last": args.save_total_limit,
        "keep_best": 1 if best else None,
        "trackers": trackers or None,
        "data": {"loader_workers": n} if (n := args.dataloader_num_workers) else None,
    }
    return {key: value for key, value in found.items() if value is not None}


# ------------------------------------------------------------------------------------ in the loop


@dataclass(frozen=True)
class Collated:
    """A dataset whose samples the Trainer's collator has made, each by itself. Raises SpecError
    where it makes other than a row of each tensor."""

    dataset: Any
    trainer: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        made = self._collate([self.dataset[index]]).items()
        return {key: one_row(key, x) for key, x in made if not isinstance(x, bool | None)}

    def flags(self) -> dict[str, bool]:
        """What it makes beside them, the same for every sample: return_loss=True."""
        made = self._collate([self.dataset[0]]) if len(self) else {}
        return {key: x for key, x in made.items() if isinstance(x, bool)}

    @cached_property  # it reads the signature of the model
    def _collate(self) -> Callable[[list[Any]], Mapping[str, Any]]:
        trainer = self.trainer
        made: Callable[[list[Any]], Mapping[str, Any]]
        made = trainer._get_collator_with_removed_columns(trainer.data_collator)
        return made


def one_row(key: str, value: Any) -> torch.Tensor:
    """Of what the collator makes of one sample."""
    if isinstance(value, torch.Tensor) and value.ndim and len(value) == 1:
        row: torch.Tensor = value[0]
        return row
    what = f"'{key}' as a {type(value).__name__}"
    if isinstance(value, torch.Tensor):
        what = f"{len(value)} rows of '{key}'" if value.ndim else f"'{key}' as one number"
    raise SpecError(
        f"{HERE}: of one sample the collator gives {what}; ranks share the rows of tensors: give "
        f"one row of each key, or {OWN_LOOP}"
    )


class Losses:
    """The model's own loss, summed over a batch: the mean that it gives times what it is of.
    `given`: keywords of the loop, of which `count` says the latter. That of a CTC model with
    ctc_loss_reduction="sum" is summed over the step, as the Trainer's is."""

    def __init__(self, trainer: Any, given: Mapping[str, Any] | None = None) -> None:
        from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

        model, config = trainer.model, trainer.model.config
        decoder = not getattr(config, "is_encoder_decoder", False)
        named = str(getattr(model, "loss_type", "")) in LOSS_MAPPING  # by the name of its class
        function = getattr(model, "loss_function", None)
        asks = asks_for_loss(model)
        self._shifted = function is ForCausalLMLoss and decoder and (named or any(asks))
        self._sums = self._shifted and trainer.model_accepts_loss_kwargs
        self._sums &= named or asks[0]  # else it may keep to itself what it is called with
        self._sums &= not getattr(config, "output_router_logits", False)  # added to as a mean
        given = given or {}
        rows, self._said = given.get("dataset"), given.get("count")
        self._flags = rows.flags() if isinstance(rows, Collated) else {}
        self._of_speech = is_a(model, "ForCTC")
        self._times = 0  # the sum that it gives already; 0 = it gives a mean
        if self._of_speech and config.ctc_loss_reduction == "sum":
            self._times = 1 if self._said is not None else given.get("global_batch", 1)
        of_pixels = is_a(model, "ForSemanticSegmentation")
        self._all = of_pixels and config.num_labels == 1  # its mean has zeros for what is ignored
        self._ignored = ignored_pixels(config) if of_pixels else IGNORED

    def __call__(self, model: Any, batch: Batch) -> torch.Tensor:
        if self._sums:  # also right where no label of the batch counts
            return self._loss(model, batch, num_items_in_batch=1)
        if self._times:
            return self._loss(model, batch) * self._times
        mean, count = self._loss(model, batch), self.count(batch)
        if isinstance(count, int):
            return mean * count
        # of no label (no word of the batch is masked) the mean is none
        return torch.where(count > 0, mean * count, torch.zeros_like(mean))

    def _loss(self, model: Any, batch: Batch, **more: int) -> torch.Tensor:
        output = model(**batch, **self._flags, **more)
        if not isinstance(output, Mapping) or "loss" not in output:
            has = ", ".join(output) if isinstance(output, Mapping) else type(output).__name__
            raise ProgramError(
                f"{HERE}: the model gives no loss ({has}) of what the collator makes of a sample "
                f"({', '.join(batch)}): give it the labels that the model takes, or {OWN_LOOP}"
            )
        loss: torch.Tensor = output["loss"]
        return loss

    def count(self, batch: Batch) -> torch.Tensor | int:
        """Labels that the loss is of; of samples that have none, or are speech, the samples."""
        if self._said is not None:
            said: torch.Tensor | int = self._said(batch)
            return said
        if "labels" not in batch or self._of_speech:
            return len(next(iter(batch.values())))
        labels = batch["labels"][..., 1:] if self._shifted else batch["labels"]
        return labels.numel() if self._all else (labels != self._ignored).sum()


def is_a(model: Any, task: str) -> bool:
    """Is it one of transformers for that task, or made of one?"""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return any(
        task in kind.__name__ and kind.__module__.startswith("transformers.")
        for kind in type(model).__mro__
    )


def ignored_pixels(config: Any) -> int:
    """The label of those that the loss of a segmentation leaves out."""
    own: int = getattr(config, "loss_ignore_index", IGNORED)  # of UperNet
    return getattr(config, "semantic_loss_ignore_index", own)


def asks_for_loss(model: Any) -> list[bool]:
    """Do the forward of a model of transformers, and those of its bases that it calls, compute the
    loss by `loss_function`?"""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = []
    for kind in type(model).__mro__:
        if "forward" in vars(kind):
            code = getattr(inspect.unwrap(vars(kind)["forward"]), "__code__", None)
            names = code.co_names if code is not None else ()
            found.append("loss_function" in names)
            if "super" not in names:
                break
    return found


class LearningRates:
    """The schedule that the arguments name, as a function of the step: nothing of it is state."""

    def __init__(self, trainer: Any, optimizer: Any) -> None:
        self._args, self._groups = trainer.args, optimizer.param_groups
        self._first = [group["lr"] for group in optimizer.param_groups]
        self._lr = optimizer.defaults["lr"]
        self._factor: Callable[[int], float] | None = None

    def set(self, step_index: int, steps: int) -> None:
        if self._factor is None:
            self._factor = self._factors(steps)
        for group, first in zip(self._groups, self._first, strict=True):
            group["lr"] = first * self._factor(step_index)

    def _factors(self, steps: int) -> Callable[[int], float]:
        from transformers import get_scheduler

        args = self._args
        alike = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=self._lr)
        made = get_scheduler(
            args.lr_scheduler_type,
            optimizer=alike,
            num_warmup_steps=args.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
        factor: Callable[[int], float] = made.lr_lambdas[0]
        return factor


def parts_of(batch: Batch, n: int) -> Iterator[tuple[Batch, float]]:
    """The batch in `n` parts, with what their loss counts: every rank has as many, and where there
    are not so many rows, one that is there counts nothing."""
    n_rows = len(next(iter(batch.values())))
    for rows in cut_rows(n_rows, n):
        start = rows.start if len(rows) else 0
        part = {key: value[start : start + max(1, len(rows))] for key, value in batch.items()}
        yield part, float(len(rows) > 0)
