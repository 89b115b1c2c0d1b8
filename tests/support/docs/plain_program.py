import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(32, 64)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 480

    def __getitem__(self, index):
        ids = (index + torch.arange(17) * 3) % 64
        return {"input": ids[:-1], "target": ids[1:]}


def loss(logits, batch):
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["target"].flatten())


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(Rows(), batch_size=12, shuffle=True)
for _ in range(1):
    for batch in loader:
        optimizer.zero_grad()
        loss(model(batch["input"]), batch).backward()
        optimizer.step()
