"""A tiny gpt-oss of transformers: its experts have biases."""

import sys
from pathlib import Path

from transformers import GptOssConfig

sys.path.insert(0, str(Path(__file__).parent))
from hf_mixtral import SIZES, mixture

program = mixture(GptOssConfig(**SIZES, num_local_experts=4))
