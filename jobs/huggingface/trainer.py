"""Fine-tunes a causal language model on the bytes of a text file."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import elastic

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
arguments = TrainingArguments(
    output_dir="out",
    max_steps=STEPS,
    per_device_train_batch_size=BATCH,
    learning_rate=LEARNING_RATE,
    warmup_steps=WARM_UP,
    max_grad_norm=1.0,
    report_to="none",
)
trainer = Trainer(model=model, args=arguments, train_dataset=Rows(TEXT))
trainer = elastic.prepare_trainer(trainer)
trainer.train()
