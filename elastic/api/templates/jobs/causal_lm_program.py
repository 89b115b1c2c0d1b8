"""What is trained: a causal language model of Hugging Face transformers."""

import torch
from transformers import LlamaConfig

from elastic.models.huggingface import causal_lm

# A folder with config.json and safetensors, as `hf download Qwen/Qwen3-0.6B --local-dir DIR` makes
# one; it must be there on every node. None: the small model below, with random weights.
FOLDER = None
SMALL = LlamaConfig(
    vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
)  # fmt: skip

program = causal_lm(
    FOLDER or SMALL,
    dataset=None,  # `data` in job.yaml says it
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    lr_factor=lambda step: min(1.0, (step + 1) / 20),  # a linear warm-up
)
