"""Models of transformers that go out of a run and come back through from_pretrained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from elastic.program import Program
from elastic.storage import open_storage
from elastic.worker.checkpoint.checkpoint_verbs import ImportRequest, import_state
from elastic.worker.program.model_profile import trace


def transformers_model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, local_files_only=True)


def stored(program: Program, folder: Path) -> torch.nn.Module:
    """A random model, and a committed copy of it in a run."""
    torch.manual_seed(2)
    model = program.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder / "made")
    import_state(
        str(folder / "made"), open_storage(str(folder / "run")), ImportRequest(trace(program), 3)
    )
    return model.eval()
