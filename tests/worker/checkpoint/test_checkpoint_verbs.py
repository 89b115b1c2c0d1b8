"""Export, import, list and remove: what goes out comes in again, and what does not fit is named."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from support.places import PROGRAMS
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
)

from elastic import api
from elastic.api import checkpoint_actions
from elastic.api.running.program_file import job_given
from elastic.cli.command_line import main
from elastic.errors import SpecError, StateLost
from elastic.ledger.run_folder import RunFolder
from elastic.observe import find_runs
from elastic.program import Program, load_program
from elastic.reshard.rank_boxes import owned_boxes, state_specs
from elastic.storage import Storage, open_storage
from elastic.types import Box, Layout, ModelProfile
from elastic.worker.checkpoint import checkpoint_index, checkpoint_verbs, checkpoint_writer
from elastic.worker.checkpoint.checkpoint_verbs import ImportRequest, import_state, listed, remove
from elastic.worker.checkpoint.finished_model import load_model
from elastic.worker.program.model_profile import fresh_buffers, trace

TINY = PROGRAMS / "tiny.py"
TIED = TINY.with_name("tiny_tied.py")


@pytest.fixture
def program() -> Program:
    return load_program(str(TINY))


def wanted(program: Program, **more: Any) -> ImportRequest:
    profile = trace(program)
    return ImportRequest(profile, 3, buffers=lambda: fresh_buffers(program, 3, profile), **more)


def trained(program: Program) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = program.model()
    optimizer = program.optimizer(list(model.named_parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def whole(checkpoint: Any, fqn: str) -> torch.Tensor:
    shape, dtype = checkpoint.tensors[fqn]
    return checkpoint.read(Box(fqn, (0,) * len(shape), shape, dtype))  # type: ignore[no-any-return]


def run_of(path: Path) -> Storage:
    return open_storage(path / "run")


def save(run: Storage, profile: ModelProfile, step: int, layout: Layout) -> str:
    """A copy of a made-up state."""
    for rank in range(layout.world_size):
        items = [
            (b, torch.full(b.sizes, step, dtype=getattr(torch, b.dtype)))
            for b in owned_boxes(profile, layout, (), rank)
        ]
        checkpoint_writer.write_shard(run, step, 1, rank=rank, items=items)
    meta = {"layout": {"dp_shard": layout.dp_shard}, "saved_at_s": 5.0}
    return checkpoint_writer.commit(run, step, 1, world_size=layout.world_size, epoch=1, meta=meta)


# -------------------------------------------------------------------------------------- safetensors


@pytest.mark.parametrize("file_bytes", [10**9, 3000])
def test_weights_go_out_and_come_in_again(
    program: Program, tmp_path: Path, file_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_verbs, "PART_BYTES", 1000)
    model, _ = trained(program)
    save_file(weights_of(model), tmp_path / "in.safetensors")
    done = import_state(
        str(tmp_path / "in.safetensors"), run_of(tmp_path), wanted(program, at_step=4)
    )
    assert (done["step"], done["moments"], done["weights"]) == (4, 0, len(weights_of(model)))
    assert checkpoint_index.verify(done["uri"]) == []
    out = checkpoint_verbs.export(
        run_of(tmp_path), None, open_storage(tmp_path / "out"), file_bytes=file_bytes
    )
    found: dict[str, torch.Tensor] = {}
    for name in out["files"]:
        if name.endswith(".safetensors"):
            found |= load_file(tmp_path / "out" / name)
    for name, tensor in weights_of(model).items():
        assert torch.equal(found[name], tensor)
    if file_bytes < 10**6:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert len(out["files"]) > 2 and set(index["weight_map"]) == set(found)
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
        again = import_state(
            str(tmp_path / "out"), open_storage(tmp_path / "second"), wanted(program)
        )
        assert again["weights"] == done["weights"]
    loaded = load_model(program, done["uri"])
    assert all(
        torch.equal(tensor, loaded.get_parameter(name))
        for name, tensor in weights_of(model).items()
    )


def test_weights_of_a_scripts_run_in_bfloat16(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no job folder: its journal has the names of its parameters, its folder what stands
    beside them."""
    save_file(weights_of(trained(program)[0]), tmp_path / "in.safetensors")
    import_state(str(tmp_path / "in.safetensors"), run_of(tmp_path), wanted(program))
    specs = trace(program).specs
    kept, left = specs[0], [replace(spec, buffer=True) for spec in specs[1:]]
    monkeypatch.setattr(checkpoint_actions, "_specs_of", lambda run: (kept, *left))
    monkeypatch.setattr(RunFolder, "files", lambda self: {"config.json": b"{}"})
    checkpoint_actions.export(run_of(tmp_path), None, str(tmp_path / "out"), weights="bfloat16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name for name in found if found[name].dtype == torch.bfloat16} == {kept.fqn}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"dtype": "bfloat16"}
    with pytest.raises(SpecError, match="--weights int8 needs --job JOB"):
        checkpoint_actions.export(run_of(tmp_path), None, str(tmp_path / "b"), weights="int8")


def test_an_imported_state_is_whole(program: Program, tmp_path: Path) -> None:
    model, _ = trained(program)
    save_file(
        {f"module.{k}": v.to(torch.bfloat16) for k, v in weights_of(model).items()},
        tmp_path / "in.safetensors",
    )
    done = import_state(
        str(tmp_path / "in.safetensors"), run_of(tmp_path), wanted(program, at_step=7)
    )
    assert (
        len(done["converted"]) == len(weights_of(model))
        and "bfloat16 -> float32" in done["converted"][0]
    )
    checkpoint = checkpoint_index.open_checkpoint(done["uri"])
    checkpoint.check(state_specs(trace(program)))
    assert whole(checkpoint, "elastic.rng").tolist() == [3, 7]
    name = next(iter(weights_of(model)))
    assert not whole(checkpoint, f"optim.exp_avg.{name}").any()
    assert torch.equal(
        whole(checkpoint, f"model.{name}"), weights_of(model)[name].to(torch.bfloat16).float()
    )


def test_tied_weights_are_exported_under_every_name_and_found_again(tmp_path: Path) -> None:
    program = load_program(str(TIED))
    model = program.model()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    # both names
    save_file({k: v.clone() for k, v in model.state_dict().items()}, tmp_path / "in.safetensors")
    import_state(str(tmp_path / "in.safetensors"), run_of(tmp_path), wanted(program))
    checkpoint_verbs.export_for(
        run_of(tmp_path), 0, open_storage(tmp_path / "out"), program=program
    )
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == set(model.state_dict()) > set(weights_of(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(found)  # strict: no name is missing
    checkpoint_verbs.export(run_of(tmp_path), 0, open_storage(tmp_path / "once"))
    once = load_file(tmp_path / "once" / "model.safetensors")
    assert set(once) == set(weights_of(model)), "nobody knows what is tied"
    import_state(str(tmp_path / "out"), open_storage(tmp_path / "second"), wanted(program))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda w: w.pop("head.weight"),
            r"it has no tensor head\.weight \(and 0 more of \d+ are missing\)",
        ),
        (
            lambda w: w.update({"head.weight": torch.zeros(2, 2)}),
            r"head\.weight is \[2, 2\], the program's model\.head",
        ),
        (
            lambda w: w.update({"more.weight": torch.zeros(2)}),
            r"no tensor for more\.weight .* --ignore-extra leaves them out",
        ),
        (
            lambda w: w.update({"head.weight": torch.zeros(2, dtype=torch.complex64)}),
            r"head\.weight is of dtype C64",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(
    program: Program, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], says: str
) -> None:
    weights = weights_of(trained(program)[0])
    assert "head.weight" in weights
    change(weights)
    save_file(weights, tmp_path / "in.safetensors")
    with pytest.raises(SpecError, match=says):
        import_state(str(tmp_path / "in.safetensors"), run_of(tmp_path), wanted(program))
    assert checkpoint_index.find(run_of(tmp_path)) == []


def header(text: bytes, n: int | None = None) -> bytes:
    return (len(text) if n is None else n).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"abc",
        header(b"{}", 1 << 60),
        header(b"not json"),
        header(b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'),  # no data
        header(b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,8]}}') + bytes(8),
        header(b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}') + bytes(16),
        header(b'{"w":{"dtype":"F32","shape":[9223372036854775807,9],"data_offsets":[0,8]}}')
        + bytes(8),
        header(b'{"w":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}') + bytes(8),
    ],
)
def test_a_malicious_header_is_refused_by_name(
    program: Program, tmp_path: Path, data: bytes
) -> None:
    (tmp_path / "bad.safetensors").write_bytes(data)
    with pytest.raises(SpecError, match=r"bad\.safetensors: no safetensors file that can be read"):
        import_state(str(tmp_path / "bad.safetensors"), run_of(tmp_path), wanted(program))


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (b"{", "not readable"),
        (
            b'{"weight_map": {"w": "../x.safetensors"}}',
            "it names the file '../x.safetensors': refused",
        ),
        (b'{"weight_map": {"w": "gone.safetensors"}}', r"gone\.safetensors: missing"),
        (b'{"weight_map": 3}', "not readable"),
        (b"[" * 100_000, r"model\.safetensors\.index\.json: not readable \(RecursionError"),
        (b'{"weight_map": {"w": "' + b"x/" * 100_000 + b'"}}', "^.{10,500}: refused$"),
        (b'{"weight_map": {"w": "' + b"x" * 300 + b'"}}', "^.{10,500}: refused$"),
    ],
)
def test_a_bad_index_is_refused_by_name(
    program: Program, tmp_path: Path, index: bytes, says: str
) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(SpecError, match=says):
        import_state(str(tmp_path), run_of(tmp_path), wanted(program))


def test_what_is_no_regular_file_is_not_waited_for(program: Program, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    for source in (tmp_path, tmp_path / "x.safetensors"):
        with pytest.raises(
            SpecError, match=r"x\.safetensors: (no regular file|neither a \.safetensors file nor)"
        ):
            import_state(str(source), run_of(tmp_path), wanted(program))


# ---------------------------------------------------------------------------------------- plain DCP


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_moments_of_a_plain_dcp_checkpoint_come_along(program: Program, tmp_path: Path) -> None:
    model, optimizer = trained(program)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save(
        {"app": {"model": weights, "optim": moments}, "epoch": 2},
        checkpoint_id=tmp_path / "plain",
        no_dist=True,
    )
    with pytest.raises(SpecError, match="plain: the program has no tensor for app"):
        extra = {"model": weights, "ema": {k: v.clone() for k, v in weights.items()}}
        dcp.save({"app": extra}, checkpoint_id=tmp_path / "with-ema" / "plain", no_dist=True)
        import_state(
            str(tmp_path / "with-ema" / "plain"), open_storage(tmp_path / "other"), wanted(program)
        )
    done = import_state(str(tmp_path / "plain"), run_of(tmp_path), wanted(program, at_step=1))
    assert done["moments"] == 3 * done["weights"]
    checkpoint = checkpoint_index.open_checkpoint(done["uri"])
    for name, entries in moments["state"].items():
        for entry, tensor in entries.items():
            assert torch.equal(whole(checkpoint, f"optim.{entry}.{name}"), tensor), (name, entry)
        assert torch.equal(whole(checkpoint, f"model.{name}"), weights[name])


def test_what_is_nothing_is_said(program: Program, tmp_path: Path) -> None:
    for source, says in (
        (tmp_path / "nowhere", "no such file"),
        (tmp_path, r"neither a \.safetensors file nor a folder"),
    ):
        with pytest.raises(SpecError, match=says):
            import_state(str(source), run_of(tmp_path), wanted(program))
    save(run_of(tmp_path), trace(program), 10, Layout())
    with pytest.raises(SpecError, match="has checkpoints already"):
        import_state(str(tmp_path), run_of(tmp_path), wanted(program))


# ----------------------------------------------------------------------- what a Ray Train job saves


def plain_save(folder: Path, state: dict[str, Any]) -> str:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return str(folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("shape", ["optimizer", "app", "ddp", "compiled", "flat"])
def test_what_a_ray_train_job_saves_is_found_under_its_names(
    shape: str, program: Program, tmp_path: Path
) -> None:
    model, optimizer = trained(program)
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {
        "model": weights,
        "optimizer": moments,
        "step": torch.tensor(1),
        "epoch": 0,
    }
    if shape == "app":
        state = {"app": {"model": weights, "optim": moments}}
    elif shape in ("ddp", "compiled"):
        first = "module." if shape == "ddp" else "_orig_mod."
        state["model"] = {first + name: value for name, value in weights.items()}
        state["optimizer"] = {
            "state": {first + name: value for name, value in moments["state"].items()}
        }
    elif shape == "flat":
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=options)
    done = import_state(
        plain_save(tmp_path / "plain", state), run_of(tmp_path), wanted(program, at_step=None)
    )
    assert done["step"] == 1  # as the optimizer counts
    assert done["moments"] == 3 * done["weights"]
    checkpoint = checkpoint_index.open_checkpoint(done["uri"])
    for name, entries in moments["state"].items():
        assert torch.equal(whole(checkpoint, f"model.{name}"), weights[name])
        assert all(
            torch.equal(whole(checkpoint, f"optim.{entry}.{name}"), tensor)
            for entry, tensor in entries.items()
        )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_state_by_position_is_refused_and_weights_alone_begin_at_0(
    program: Program, tmp_path: Path
) -> None:
    model, optimizer = trained(program)
    source = plain_save(
        tmp_path / "plain", {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    )
    with pytest.raises(
        SpecError, match=r"optimizer\.state\.0\.\w+ names its parameter by a number"
    ):
        import_state(source, run_of(tmp_path), wanted(program, at_step=None))
    done = import_state(source, run_of(tmp_path), wanted(program, at_step=None, ignore_extra=True))
    assert (done["step"], done["moments"]) == (0, 0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_past_the_end_of_the_job_is_refused(program: Program, tmp_path: Path) -> None:
    weights, moments = get_state_dict(*trained(program))
    source = plain_save(tmp_path / "plain", {"model": weights, "optim": moments})
    with pytest.raises(SpecError, match="it has done 1 step, the job ends at step 1"):
        import_state(source, run_of(tmp_path), wanted(program, at_step=None, steps=1))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_our_own_copy_has_the_names_of_torch_and_is_imported_too(
    program: Program, tmp_path: Path
) -> None:
    weights, moments = get_state_dict(*trained(program))
    source = plain_save(tmp_path / "plain", {"model": weights, "optim": moments})
    ours = import_state(source, run_of(tmp_path), wanted(program, at_step=None))["uri"]
    model = program.model()
    optimizer = program.optimizer(list(model.named_parameters()))
    found_weights, found_moments = get_state_dict(model, optimizer)
    state = {"model": found_weights, "optim": found_moments}
    dcp.load(
        state, checkpoint_id=ours, planner=DefaultLoadPlanner(allow_partial_load=True), no_dist=True
    )
    for name, entries in moments["state"].items():
        assert torch.equal(state["model"][name], weights[name])
        assert all(
            torch.equal(state["optim"]["state"][name][entry], tensor)
            for entry, tensor in entries.items()
        )
    again = import_state(ours, run_of(tmp_path / "again"), wanted(program, at_step=None))
    assert (again["step"], again["moments"], again["ignored"]) == (1, 3 * again["weights"], [])
    named = import_state(f"file://{ours}", run_of(tmp_path / "uri"), wanted(program, at_step=None))
    assert named | {"uri": ""} == again | {"uri": ""}
    shard = Path(ours) / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(StateLost, match=r"__0_0\.distcp"):  # its digests are looked at
        import_state(f"file://{ours}", run_of(tmp_path / "no"), wanted(program, at_step=None))


# ---------------------------------------------------------------------------------------- ls and rm


def test_listed(program: Program, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    save(run, trace(program), 10, Layout(dp_shard=2))
    checkpoint_writer.write_shard(
        run, 20, 2, rank=0, items=[(Box("w", (0,), (2,), "float32"), torch.zeros(2))]
    )
    new, old = listed(run)
    assert (new.step, new.generation, new.committed, new.layout) == (
        20,
        2,
        False,
        "",
    ) and new.n_bytes > 0
    assert (old.step, old.committed, old.layout, old.world_size, old.saved_at_s) == (
        10,
        True,
        "dp_shard=2",
        2,
        5.0,
    )


def test_a_copy_that_is_removed_while_it_is_listed_is_left_out(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path)
    save(run, trace(program), 10, Layout())
    checkpoint_writer.write_shard(
        run, 5, 1, rank=0, items=[(Box("w", (0,), (2,), "float32"), torch.zeros(2))]
    )
    real = type(run).list

    def then_gone(self: Storage, prefix: str = "") -> list[str]:
        found = real(self, prefix)  # type: ignore[arg-type]
        self.delete_folder("checkpoints/step-00000005.g0001")
        return found

    monkeypatch.setattr(type(run), "list", then_gone)
    assert [item.step for item in listed(run)] == [10]


def test_the_only_good_copy_is_not_removed(program: Program, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    uris = [save(run, trace(program), step, Layout()) for step in (10, 20)]
    with pytest.raises(SpecError, match="no checkpoint of step 15; steps there: 20, 10"):
        remove(run, 15)
    (Path(uris[1]) / "manifests.json").unlink()  # the newest is damaged
    with pytest.raises(
        SpecError, match="step 10 is the only good checkpoint of this run; --force removes it"
    ):
        remove(run, 10)
    assert remove(run, 20) == [uris[1]]
    with pytest.raises(SpecError, match="only good"):
        remove(run, 10)
    assert remove(run, 10, force=True) == [uris[0]]
    assert run.list("checkpoints/step-") == []
    checkpoint_writer.write_shard(
        run, 30, 1, rank=0, items=[(Box("w", (0,), (2,), "float32"), torch.zeros(2))]
    )
    assert len(remove(run, 30)) == 1  # what was never committed may always go


# --------------------------------------------------------------------------------- the command line


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def test_verbs(program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def elastic(*words: object) -> Done:
        code = main(["checkpoint", *map(str, words)])
        told = capsys.readouterr()
        return Done(code, told.out, told.err)

    job = tmp_path / "job"
    job.mkdir()
    (job / "job.yaml").write_text("steps: 20\nglobal_batch: 4\nprogram: " + str(TINY) + "\n")
    save_file(weights_of(trained(program)[0]), tmp_path / "in.safetensors")
    at = ("--storage", tmp_path / "runs")
    into = ("--into", "mine", "--job", job, "--at-step", 5, "--json")
    done = elastic("import", tmp_path / "in.safetensors", *into, *at)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 5
    rows = json.loads(elastic("ls", "mine", "--json", *at).stdout)["checkpoints"]
    assert [(row["step"], row["committed"], row["layout"]) for row in rows] == [
        (5, True, "dp_shard=1")
    ]
    assert "COMMITTED" in elastic("ls", "mine", *at).stdout
    assert elastic("verify", "mine", *at).stdout == "step 5: every byte is as it was written\n"
    done = elastic("export", "mine", "--to", tmp_path / "out", *at)
    assert done.returncode == 0 and "model.safetensors" in done.stdout
    for words, says in (
        (("export", "mine", "--to", tmp_path / "out", *at), "model.safetensors is there already"),
        (
            ("export", "mine", "--step", 9, "--to", tmp_path / "x", *at),
            "no committed checkpoint of step 9; steps there: 5",
        ),
        (("rm", "mine", "--step", 5, *at), "the only good checkpoint"),
        (
            ("import", tmp_path / "gone", "--into", "new", "--job", job, *at),
            "no such file or folder",
        ),
        (
            ("import", tmp_path / "gone", "--into", "new", "--job", job, "--at-step", 20, *at),
            "the job ends at step 20",
        ),
        (("ls", "nobody", *at), "no run 'nobody'"),
    ):
        done = elastic(*words)
        assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1, (
            done.stderr
        )
    assert elastic("rm", "mine", "--step", 5, "--force", *at).returncode == 0


@pytest.mark.parametrize("given", [(), ("--storage", "my runs")], ids=["default", "given"])
def test_what_was_imported_is_continued_as_the_import_says(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], given: tuple[str, ...],
) -> None:  # fmt: skip
    found: list[str] = []

    def run(job: str, *, options: api.Options) -> None:
        spec = job_given(job, None, options)
        found.append(f"{find_runs.storage_uri(spec.storage)}/{options.run_name}")
        raise SpecError("it is not trained here")

    monkeypatch.setattr(api, "run", run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ELASTIC_STORAGE", raising=False)
    Path("job.yaml").write_text(f"steps: 20\nglobal_batch: 4\nprogram: {TINY}\n")
    save_file(weights_of(trained(program)[0]), "in.safetensors")
    words = ["in.safetensors", "--into", "mine", "--job", ".", *given]
    assert main(["checkpoint", "import", *words]) == 0
    out = capsys.readouterr().out
    command = shlex.split(out.partition("continue with it: ")[2])
    assert command[0] == "elastic" and main(command[1:]) == 2
    assert out.startswith(f"{found[0]}/checkpoints/step-")
