"""A Llama of the size that CERTIFY_SIZE names, with weights that are made fast and tokens that are
drawn."""

import os

import torch
from torch.overrides import TorchFunctionMode

import elastic
from elastic.models.llama import Llama, LlamaConfig, loss_sum

SIZES = {
    "tiny": LlamaConfig(
        vocab_size=64, hidden=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden=64, max_seq=16
    ),
    "300m": LlamaConfig(
        vocab_size=32000,
        hidden=1024,
        n_layers=18,
        n_heads=16,
        n_kv_heads=8,
        ffn_hidden=2816,
        max_seq=2048,
    ),
    "1b": LlamaConfig(
        vocab_size=32000,
        hidden=2048,
        n_layers=22,
        n_heads=16,
        n_kv_heads=8,
        ffn_hidden=5632,
        max_seq=2048,
    ),
}
CONFIG = SIZES[os.environ.get("CERTIFY_SIZE", "tiny")]
DRAWN = 1 << 20


class _NoInit(TorchFunctionMode):
    """Modules are built without drawing their first values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def build() -> Llama:
    with _NoInit():
        return Llama(CONFIG)


@torch.no_grad()
def init(model: Llama) -> None:
    """The same million normal numbers again and again: drawing a billion takes longer than what is
    measured."""
    drawn = torch.empty(DRAWN).normal_(0.0, 0.02)
    for parameter in model.parameters():
        if parameter.ndim < 2:
            parameter.fill_(1.0)
            continue
        flat = parameter.view(-1)
        for at in range(0, flat.numel(), DRAWN):
            part = flat[at : at + DRAWN]
            part.copy_(drawn[: part.numel()])


class Tokens:
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        ids = torch.randint(
            CONFIG.vocab_size, (CONFIG.max_seq + 1,), generator=torch.Generator().manual_seed(index)
        )
        return {"input": ids[:-1], "target": ids[1:].clone()}


program = elastic.Program(
    model=build,
    init=init,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-4),
    dataset=Tokens,
    loss=loss_sum,
)
