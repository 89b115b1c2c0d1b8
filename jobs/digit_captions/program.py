"""A small vision-language model on real pictures: two handwritten digits of scikit-learn side by
side, and a text that says which they are ("a seven left of a two"), letter by letter.

Two towers: patches go through the vision blocks, and each text block attends to all that comes out
of them. `blocks` names both groups; pipeline stages may begin inside of either.
"""

from functools import lru_cache

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import elastic

SIDE, PATCH, HEADS, N_VISION, N_TEXT = 8, 2, 4, 3, 4
SEES, SAYS = 32, 64  # widths of the towers
N_PATCHES = 2 * (SIDE // PATCH) ** 2
N_TRAIN, N_VALIDATION = 1500, 297
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LETTERS = "\n abcdefghijklmnopqrstuvwxyz"  # "\n" begins and ends a text
LONGEST = len("a seven left of a seven")


class Attention(nn.Module):
    """Of `x` to `to`, or to itself; `causal`: to what is before."""

    def __init__(self, width, of, causal):
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(of, width, bias=False)
        self.v, self.out = nn.Linear(of, width), nn.Linear(width, width)
        self.head, self.causal = width // HEADS, causal

    def forward(self, x, to):
        q, k, v = (
            part.unflatten(-1, (-1, self.head)).transpose(1, 2)
            for part in (self.q(x), self.k(to), self.v(to))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class VisionBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(SEES), nn.LayerNorm(SEES)
        self.attention, self.mlp = Attention(SEES, SEES, causal=False), Mlp(SEES)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y)
        return x + self.mlp(self.norm2(x))


class TextBlock(nn.Module):
    """To the letters before, then to the picture."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(SAYS) for _ in range(3))
        self.attention, self.cross = Attention(SAYS, SAYS, True), Attention(SAYS, SEES, False)
        self.mlp = Mlp(SAYS)

    def forward(self, x, seen):
        y = self.norm1(x)
        x = x + self.attention(y, y)
        x = x + self.cross(self.norm2(x), seen)
        return x + self.mlp(self.norm3(x))


class Patches(nn.Module):
    """[batch, 8, 16] -> [batch, 32, width]."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(PATCH * PATCH, SEES)
        self.place = nn.Parameter(torch.zeros(N_PATCHES, SEES))

    def forward(self, x):
        cut = x.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(3).flatten(1, 2)
        return self.project(cut) + self.place


class Letters(nn.Module):
    """[batch, letters] -> [batch, letters, width]."""

    def __init__(self):
        super().__init__()
        self.letter = nn.Embedding(len(LETTERS), SAYS)
        self.place = nn.Parameter(torch.zeros(LONGEST + 1, SAYS))

    def forward(self, ids):
        return self.letter(ids) + self.place


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = Patches()
        self.layers = nn.ModuleList(VisionBlock() for _ in range(N_VISION))
        self.norm = nn.LayerNorm(SEES)

    def forward(self, picture):
        x = self.patches(picture)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters = Letters()
        self.layers = nn.ModuleList(TextBlock() for _ in range(N_TEXT))
        self.norm, self.head = nn.LayerNorm(SAYS), nn.Linear(SAYS, len(LETTERS))

    def forward(self, ids, seen):
        x = self.letters(ids)
        for layer in self.layers:
            x = layer(x, seen)
        return self.head(self.norm(x))


class Captioner(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision, self.text = Vision(), Text()

    def forward(self, picture, ids):
        return self.text(ids, self.vision(picture))


@lru_cache(maxsize=1)
def digits():
    """Pictures [1797, 8, 8] in 0..1 and what they show, in an order of their own (the set is sorted
    by writers)."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    pictures = torch.tensor(data.images, dtype=torch.float32)[order] / 16
    return pictures, data.target[order.numpy()].tolist()


def caption(left, right):
    return f"a {NAMES[left]} left of a {NAMES[right]}"


class Pairs:
    """Each picture of a part, and beside it another one of the same part."""

    def __init__(self, first, n):
        self.first, self.n = first, n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        pictures, shown = digits()
        left, right = (self.first + at % self.n for at in (index, index * 7 + 3))
        text = "\n" + caption(shown[left], shown[right]) + "\n"
        ids = torch.tensor([LETTERS.index(letter) for letter in text])
        said, target = torch.zeros(LONGEST + 1, dtype=torch.long), torch.full((LONGEST + 1,), -100)
        said[: len(ids) - 1], target[: len(ids) - 1] = ids[:-1], ids[1:]
        return {
            "input": torch.cat([pictures[left], pictures[right]], 1), "ids": said, "target": target,
        }  # fmt: skip


def init(model):
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.ndim == 1:
            nn.init.ones_(parameter)
        else:
            small = name.endswith(("place", "letter.weight"))
            nn.init.normal_(parameter, std=0.05 if small else parameter.shape[-1] ** -0.5)


def loss(output, batch):
    target = batch["target"].flatten()
    return F.cross_entropy(output.flatten(0, 1), target, reduction="sum", ignore_index=-100)


def letters_right(output, batch):
    return {"accuracy": (output.argmax(-1) == batch["target"]).sum()}


@torch.no_grad()
def say(model, picture):
    """The text that the model writes of a picture, always the likeliest letter."""
    ids = torch.zeros(1, LONGEST + 1, dtype=torch.long)
    for i in range(LONGEST):
        ids[0, i + 1] = model(picture[None], ids)[0, i].argmax()
        if not ids[0, i + 1]:
            break
    return "".join(LETTERS[i] for i in ids[0, 1 : i + 1])


def sample(model):
    pictures, shown = digits()
    lines = []
    for left in range(N_TRAIN, N_TRAIN + 6, 2):
        said = say(model, torch.cat([pictures[left], pictures[left + 1]], 1))
        lines.append(f"{caption(shown[left], shown[left + 1])} -> {said}")
    return "\n".join(lines)


program = elastic.Program(
    model=Captioner,
    init=init,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=2e-3, weight_decay=0.05),
    dataset=lambda: Pairs(0, N_TRAIN),
    validation=lambda: Pairs(N_TRAIN, N_VALIDATION),
    keywords=lambda batch: {"ids": batch["ids"]},
    loss=loss,
    metrics=letters_right,
    blocks=["vision.layers.*", "text.layers.*"],
    tp={
        "*.layers.*.attention.[qkv]": "colwise", "*.layers.*.attention.out": "rowwise",
        "*.layers.*.cross.[qkv]": "colwise", "*.layers.*.cross.out": "rowwise",
        "*.layers.*.mlp.up": "colwise", "*.layers.*.mlp.down": "rowwise",
    },
    tp_limit=HEADS,
    lr_factor=lambda step: min(1.0, (step + 1) / 20),
    sample=sample,
)  # fmt: skip
