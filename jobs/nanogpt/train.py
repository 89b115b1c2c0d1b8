"""A small GPT on the bytes of a few files of Python's standard library."""

import argparse as text
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import elastic

block_size, batch_size, max_steps = 64, 12, 200
n_layer, n_head, n_embd, vocab_size = 3, 4, 64, 256
learning_rate, warmup_steps, grad_clip = 1e-3, 20, 1.0
device = "cuda" if torch.cuda.is_available() else "cpu"

data = torch.frombuffer(bytearray(Path(text.__file__).read_bytes()), dtype=torch.uint8).long()
windows = data.unfold(0, block_size + 1, block_size)  # [sample, block_size + 1]


def get_lr(step):
    if step < warmup_steps:
        return learning_rate * (step + 1) / warmup_steps
    done = (step - warmup_steps) / (max_steps - warmup_steps)
    return learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            part.view(b, t, n_head, c // n_head).transpose(1, 2)
            for part in self.qkv(self.ln_1(x)).split(c, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.proj(y)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight  # tied
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


torch.manual_seed(1337)
model = GPT().to(device)
optimizer = torch.optim.AdamW(
    model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1
)

count = lambda rows: rows[:, 1:].numel()  # noqa: E731 - tokens that the loss is summed over
job = {"steps": max_steps, "global_batch": batch_size, "seed": 1337}
with elastic.loop(model=model, optimizer=optimizer, dataset=windows, count=count, **job) as run:
    for rows in run:
        optimizer.param_groups[0]["lr"] = get_lr(run.step_index)
        x, y = rows[:, :-1], rows[:, 1:]
        run.backward(F.cross_entropy(run.model(x).flatten(0, 1), y.flatten(), reduction="sum"))
        committed = run.step(clip_grad_norm=grad_clip)
        if committed and run.rank == 0 and run.step_index % 10 == 0:
            print(f"step {run.step_index}: loss {run.train_loss:.4f}")
