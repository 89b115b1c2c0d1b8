"""A decoder of 8.7 M parameters, 105 MB of training state: what moves and step times are measured
with."""

from dataclasses import replace

from elastic.models.llama import Llama, LlamaConfig
from elastic.scenarios.programs.small import Strides
from elastic.scenarios.programs.small import program as small

SEQ = 16
CONFIG = LlamaConfig(
    vocab_size=512, hidden=256, n_layers=8, n_heads=8, n_kv_heads=8, ffn_hidden=1024, max_seq=SEQ
)

program = replace(
    small, model=lambda: Llama(CONFIG), dataset=lambda: Strides(512, SEQ, CONFIG.vocab_size)
)
