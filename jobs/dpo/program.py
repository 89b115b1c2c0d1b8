"""Direct preference optimization (Rafailov et al. 2023, equation 7) of the quickstart's decoder: a
policy that is trained, beside a frozen reference with the weights that it began with.

A pair is the first lines of a function of Python's standard library, then its true continuation
(chosen) or lines of another file (rejected). $DPO_START: a folder or file of safetensors to begin
from, as `elastic checkpoint export` of a quickstart run gives it; without it random weights, which
show that it runs.
"""

import os
import random
import re
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import elastic
from elastic.data.sources import python_stdlib_folder
from elastic.models.llama import Block, Llama, LlamaConfig, init_weights, tp_plan
from elastic.program import Weights

SEQ, BETA = 128, 0.1
PROMPT_LINES, LEAST = 3, 24  # of a function; bytes of a continuation
CONFIG = LlamaConfig(vocab_size=256, hidden=256, n_layers=2, n_heads=8, n_kv_heads=4, max_seq=SEQ)
TOWERS = ("policy", "reference")


class Pair(nn.Module):
    """The same module twice: `policy` is trained, `reference` stays as it was. What they give
    travels side by side in the last dimension, so that one chain of blocks has both."""

    def __init__(self, policy: nn.Module, reference: nn.Module) -> None:
        super().__init__()
        self.policy, self.reference = policy, reference.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """[pairs, 2, seq (, 2 * width)] -> [pairs, 2, seq, 2 * width]."""
        mine, theirs = (
            x.flatten(0, 1).chunk(2, dim=-1) if x.is_floating_point() else 2 * (x.flatten(0, 1),)
        )
        with torch.no_grad():
            fixed = self.reference(theirs)
        return torch.cat((self.policy(mine), fixed), dim=-1).unflatten(0, x.shape[:2])


class PolicyAndReference(nn.Module):
    """Bytes [pairs, chosen and rejected, seq] -> logits of both towers [pairs, 2, seq, 2 *
    vocab]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()

        def pair(make) -> Pair:
            return Pair(make(), make())

        self.embed = pair(lambda: nn.Embedding(config.vocab_size, config.hidden))
        self.layers = nn.ModuleList(pair(lambda: Block(config)) for _ in range(config.n_layers))
        self.norm = pair(lambda: nn.RMSNorm(config.hidden, eps=config.norm_eps))
        self.head = pair(lambda: nn.Linear(config.hidden, config.vocab_size, bias=False))

    def forward(self, pairs: Tensor) -> Tensor:
        x = self.embed(pairs)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Preferences:
    """`n` pairs out of the standard library: {"input", "target": int64 [2, seq]}; targets are those
    of the continuation, all else is -100."""

    def __init__(self, n: int, first: int = 0) -> None:
        self.n, self.first = n, first
        files = sorted(Path(python_stdlib_folder()).glob("*.py"))
        self.texts = [path.read_text("utf-8", "replace") for path in files]
        found = re.compile(r"^ *def .*(?:\n.*){6}", re.MULTILINE)
        self.functions = [
            (k, match.group())
            for k, text in enumerate(self.texts)
            for match in found.finditer(text)
        ]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        chance = random.Random(self.first + index)
        file, function = chance.choice(self.functions)
        lines = function.split("\n")
        prompt = ("\n".join(lines[:PROMPT_LINES]) + "\n").encode()[: SEQ - LEAST]
        chosen = ("\n".join(lines[PROMPT_LINES:]) + "\n").encode()
        other = chance.choice([k for k in range(len(self.texts)) if k != file])
        text = self.texts[other].encode()
        begin = chance.randrange(max(1, len(text) - len(chosen)))
        rejected = text[begin : begin + len(chosen)]
        rows = [_row(prompt, answer) for answer in (chosen, rejected)]
        return {
            "input": torch.stack([row for row, _ in rows]),
            "target": torch.stack([target for _, target in rows]),
        }


def _row(prompt: bytes, answer: bytes) -> tuple[Tensor, Tensor]:
    """Input and target of one sequence, padded to SEQ."""
    ids = torch.tensor([*prompt, *answer][: SEQ + 1])
    target = F.pad(ids[1:], (0, SEQ + 1 - len(ids)), value=-100)
    target[: len(prompt) - 1] = -100
    return F.pad(ids[:-1], (0, SEQ + 1 - len(ids))), target


def margins(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """[pairs]: by how much more than the reference the policy prefers the chosen continuation."""
    logits, target = output.float(), batch["target"]
    each = [
        -F.cross_entropy(
            tower.flatten(0, 2), target.flatten(), ignore_index=-100, reduction="none"
        ).view(target.shape)
        for tower in logits.chunk(2, dim=-1)
    ]
    policy, reference = (logp.sum(-1) for logp in each)
    return (policy - reference) @ torch.tensor([1.0, -1.0], device=output.device)


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return -F.logsigmoid(BETA * margins(output, batch)).sum()


def accuracy(output: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of the pairs, those in which the policy prefers the chosen continuation more than the
    reference does."""
    return {"accuracy": (margins(output, batch) > 0).sum()}


def start() -> str:
    """Where the first weights are: the same for both towers."""
    if found := os.environ.get("DPO_START"):
        return found
    file = Path(tempfile.gettempdir()) / f"dpo-start-{os.getuid()}-{CONFIG.hidden}.safetensors"
    if not file.is_file():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = Llama(CONFIG)
            init_weights(model)
        own = file.with_suffix(f".{os.getpid()}")
        save_file(model.state_dict(), own)
        own.replace(file)  # several workers may write it at once: the same
    return str(file)


def name_in_file(name: str) -> str:
    """`layers.0.reference.attn.wq.weight` -> `layers.0.attn.wq.weight`."""
    return ".".join(part for part in name.split(".") if part not in TOWERS)


program = elastic.Program(
    model=lambda: PolicyAndReference(CONFIG),
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=2e-4, weight_decay=0.0),
    dataset=lambda: Preferences(4096),
    validation=lambda: Preferences(256, first=1 << 20),
    loss=loss,
    count=lambda batch: len(batch["input"]),
    log=accuracy,
    metrics=accuracy,
    weights=Weights(start(), name_in_file),
    tp={
        pattern.replace("layers.*.", f"layers.*.{tower}."): style
        for pattern, style in tp_plan().items()
        for tower in TOWERS
    },
    tp_limit=CONFIG.n_kv_heads,
    lr_factor=lambda step: min(1.0, (step + 1) / 10),
    no_cp="a sample is two sequences",
)
