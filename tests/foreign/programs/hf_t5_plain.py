"""T5 of transformers: the blocks are those of the encoder, the decoder's input is a keyword."""

import torch
import torch.nn.functional as F
from transformers import T5Config, T5ForConditionalGeneration

import elastic

CONFIG = T5Config(
    vocab_size=48,
    d_model=32,
    d_kv=8,
    d_ff=48,
    num_layers=4,
    num_decoder_layers=2,
    num_heads=4,
    dropout_rate=0.0,
    decoder_start_token_id=0,
    pad_token_id=0,
    eos_token_id=1,
    use_cache=False,
)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        ids = (index * 5 + torch.arange(9) * (1 + index % 3)) % 48
        return {"input": ids[:6].flip(0), "so_far": ids[:-1], "target": ids[1:]}


def loss(output, batch):
    return F.cross_entropy(output.logits.flatten(0, 1), batch["target"].flatten(), reduction="sum")


program = elastic.Program(
    model=lambda: T5ForConditionalGeneration(CONFIG),
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    dataset=Rows,
    loss=loss,
    blocks="encoder.block.*",
    keywords=lambda batch: {"decoder_input_ids": batch["so_far"]},
)

EXPECT = {
    "dp": "equal",
    "tp": "no plan",
    "cp": "refused: elastic.attention",
    "pp": "refused: encoder|decoder|shared|forward",
}
