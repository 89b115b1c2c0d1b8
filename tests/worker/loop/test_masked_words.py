"""A Trainer whose collator masks words at random, through changes of the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.worker.chain import job_of, pass_through
from support.worker.worker_pool import Pool

from elastic.types import Layout

transformers = pytest.importorskip(
    "transformers", reason="the models are of transformers (it is in the extra 'test')"
)
STEPS = 9
SCRIPT = """
import tokenizers, torch, transformers, elastic

words = {f"w{i}": i for i in range(29)} | {"[PAD]": 29, "[MASK]": 30, "[UNK]": 31}
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]")),
    mask_token="[MASK]", pad_token="[PAD]", unk_token="[UNK]",
)
ids = torch.randint(29, (40, 9), generator=torch.Generator().manual_seed(1))
model = transformers.BertForMaskedLM(transformers.BertConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    attn_implementation="eager",
))  # with dropout, too
trainer = transformers.Trainer(
    model=model,
    args=transformers.TrainingArguments(
        output_dir="OUT", max_steps=STEPS, per_device_train_batch_size=12, learning_rate=1e-2,
        disable_tqdm=True, use_cpu=True,
    ),
    train_dataset=[{"input_ids": row} for row in ids],
    data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3),
)
elastic.prepare_trainer(trainer, global_batch=12).train()
"""


@pytest.mark.e2e
def test_words_are_masked_alike_in_every_layout(pool: Pool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("STEPS", str(STEPS)).replace("OUT", str(tmp_path / "out")))

    def losses(name: str, *layouts: Layout) -> list[float]:
        job: dict[str, Any] = job_of("tiny.py", STEPS) | {"script": str(script), "args": []}
        done = pass_through(pool, job, tmp_path / name, list(layouts), every=3, n_blocks=2)
        return [event.train_loss for event in done]

    alone = losses("alone", Layout())
    assert losses("resized", Layout(dp_replicate=2), Layout(dp_shard=3)) == pytest.approx(
        alone, rel=1e-4
    )
    assert len({round(loss, 4) for loss in alone}) == STEPS
