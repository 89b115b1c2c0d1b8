"""Measures what filling one rank's shard from safetensors takes, or an export: `load_peak.py FOLDER
LAYOUT` (or `export`) prints one line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from elastic.models.llama import Llama, LlamaConfig, tp_plan
from elastic.program import Program, Weights
from elastic.storage import open_storage
from elastic.types import Job, ModelProfile
from elastic.types.grid import parse_layout
from elastic.worker.checkpoint.checkpoint_verbs import ImportRequest, export, import_state
from elastic.worker.process_groups.groups import Groups
from elastic.worker.program.model_profile import trace
from elastic.worker.program.weights import cut
from elastic.worker.state.train_state import TrainState

CONFIG = LlamaConfig(
    vocab_size=8192, hidden=1024, n_layers=4, n_heads=8, n_kv_heads=4, ffn_hidden=2048
)


def write(path: Path) -> None:
    torch.manual_seed(0)
    model = Llama(CONFIG)
    save_file(dict(model.named_parameters()), path / "model.safetensors")


def peak_bytes() -> int:
    """Highest resident size since the last reset."""
    text = Path("/proc/self/status").read_text()
    return (
        int(next(line for line in text.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
    )


def begin() -> int:
    # proc(5): the peak begins again at what is resident now
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def export_peak(path: Path, profile: ModelProfile) -> int:
    """Of a committed copy as safetensors."""
    run = open_storage(str(path / "run"))
    import_state(str(path), run, ImportRequest(profile, 3))
    to = open_storage(str(path / "out"))
    before_bytes = begin()
    export(run, None, to)
    return peak_bytes() - before_bytes


def main(folder: str, layout_text: str) -> None:
    path = Path(folder)
    if layout_text == "write":
        write(path)
        return
    subprocess.run([sys.executable, __file__, folder, "write"], check=True)
    model_bytes = (path / "model.safetensors").stat().st_size
    program = Program(
        model=lambda: Llama(CONFIG),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        dataset=None,
        loss=lambda output, batch: output.sum(),
        tp=tp_plan(vocab=True),
        weights=Weights(path),
    )
    profile = trace(program)
    if layout_text == "export":
        print(json.dumps({"model_bytes": model_bytes, "peak_bytes": export_peak(path, profile)}))
        return
    layout = parse_layout(layout_text)
    groups = Groups(0, layout, torch.device("cpu"))
    groups.pretend(1)
    state = TrainState(
        program, profile, groups, layout=layout, layers=(CONFIG.n_layers,), rank=1, job=Job()
    )
    before_bytes = begin()
    state.fill_fresh(7)
    grown_bytes = peak_bytes() - before_bytes
    shard_bytes = sum(tensor.nbytes for _, tensor in state.tensors.values())
    right = check(path, state)
    groups.close()
    print(
        json.dumps(
            {
                "model_bytes": model_bytes,
                "shard_bytes": shard_bytes,
                "peak_bytes": grown_bytes,
                "right": right,
            }
        )
    )


def check(path: Path, state: TrainState) -> bool:
    from safetensors import safe_open

    with safe_open(str(path / "model.safetensors"), framework="pt") as file:
        return all(
            torch.equal(cut(file.get_tensor(fqn.removeprefix("model.")), box), tensor)
            for fqn, (box, tensor) in state.tensors.items()
            if fqn.startswith("model.")
        )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(*sys.argv[1:])
