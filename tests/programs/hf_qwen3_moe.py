"""A tiny mixture of Qwen 3 of transformers."""

import sys
from pathlib import Path

from transformers import Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).parent))
from hf_mixtral import SIZES, mixture

program = mixture(
    Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=16, norm_topk_prob=True)
)
