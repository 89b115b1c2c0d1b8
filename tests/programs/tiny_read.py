"""A program that is never trained; files in the folder $ELASTIC_TEST_READ say what becomes of
whoever reads its dataset."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import elastic


class Read:
    """Item i is {"x": i}, with "half" also {"half": i / 2 as bfloat16}; "hang" holds readers up,
    "kill" ends a process once."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Any]:
        folder = Path(os.environ["ELASTIC_TEST_READ"])
        (folder / f"pid-{os.getpid()}").touch()
        if (folder / "kill").exists():
            (folder / "kill").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        while (folder / "hang").exists():
            time.sleep(0.01)
        if index == 77:
            raise OSError("disk on fire")
        return {"x": index, **half(folder, index)}


def half(folder: Path, index: int) -> dict[str, Any]:
    if not (folder / "half").exists():
        return {}
    import torch

    return {"half": torch.tensor(index / 2, dtype=torch.bfloat16)}


def nothing(*arguments: Any, **named: Any) -> None:
    """Is never called."""


program = elastic.Program(model=nothing, optimizer=nothing, dataset=Read, loss=nothing)
