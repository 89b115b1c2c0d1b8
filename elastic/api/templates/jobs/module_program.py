"""What is trained: a module of your own. Put your model, data and loss in the place of these."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import elastic

VOCABULARY, HIDDEN, LENGTH = 64, 32, 16


class OwnBlock(nn.Module):
    """A block adds to its own input: only so may a pipeline be cut between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + change


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(OwnBlock() for _ in range(4))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, length] -> [batch, length, vocabulary]."""
        x: Tensor = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class OwnRows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """len() and [sample id]; which rank reads which sample, and when, is elastic's affair."""

    def __len__(self) -> int:
        return 960

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (index + 3 * torch.arange(LENGTH + 1)) % VOCABULARY
        return {"input": ids[:-1], "target": ids[1:]}


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The sum, not the mean: elastic divides by what the whole step counts."""
    return F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten(), reduction="sum")


program = elastic.Program(
    model=OwnModel,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    dataset=OwnRows,
    loss=loss,
    blocks="layers.*",
    # how tensor parallelism cuts them; without it tp = 1
    tp={"layers.*.up": "colwise", "layers.*.down": "rowwise"},
)
