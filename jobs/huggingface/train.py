"""Fine-tunes a causal language model on the bytes of a text file."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup

import elastic
from elastic.models.huggingface import count, loss_sum

MODEL, TEXT = sys.argv[1:]
SEQ, BATCH, STEPS, LEARNING_RATE, WARM_UP = 32, 12, 200, 1e-3, 10


class Rows(torch.utils.data.Dataset):
    """{"input_ids": int64 [SEQ], "labels": the same}."""

    def __init__(self, path):
        data = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8).long()
        self.rows = data.unfold(0, SEQ, SEQ)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


model = AutoModelForCausalLM.from_pretrained(MODEL)
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
scheduler = get_linear_schedule_with_warmup(optimizer, WARM_UP, STEPS)
own = {"count": count, "extra_state": {"scheduler": scheduler}}
job = {"steps": STEPS, "global_batch": BATCH}
with elastic.loop(model=model, optimizer=optimizer, dataset=Rows(TEXT), **own, **job) as run:
    for batch in run:
        run.backward(loss_sum(run.model(batch["input_ids"]), batch))
        run.step(clip_grad_norm=1.0)
        scheduler.step()
