"""ViT of transformers for classes of images."""

import torch
import torch.nn.functional as F
from transformers import ViTConfig, ViTForImageClassification

import elastic

CONFIG = ViTConfig(
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=48,
    image_size=8,
    patch_size=4,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    num_labels=7,
)


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        image = torch.sin(torch.arange(3 * 8 * 8) * (1 + index % 7) / 9.0).view(3, 8, 8)
        return {"input": image, "target": torch.tensor(index % 7)}


def loss(output, batch):
    return F.cross_entropy(output.logits, batch["target"], reduction="sum")


program = elastic.Program(
    model=lambda: ViTForImageClassification(CONFIG),
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    dataset=Images,
    loss=loss,
    blocks="vit.layers.*",
)

EXPECT = {
    "dp": "equal",
    "tp": "no plan",
    "cp": "refused: elastic.attention",
    "pp": "refused: embeddings|vit|forward",
}
