"""What training takes on one GPU: first steps, a step beside plain FSDP2, many generations in one
process, compiled blocks."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from pkgutil import walk_packages
from statistics import median
from typing import Any

from one_shot_rows import Tell, guarded, paths

from elastic.certify.gpu.one_gpu import lived, out_of_memory
from elastic.certify.gpu.one_rank_steps import Ours, Plain, Syncs, in_turn
from elastic.certify.gpu.solo import MANY, Solo, device_of, plan_for, sized, slope

MISSING = ("ray", "pydantic", "boto3", "tenacity", "torchao")


# -------------------------------------------------------------------------------------------- facts


def facts(tell: Tell, cpu: bool, seconds: float) -> None:
    import resource

    import torch

    import elastic.worker
    from elastic.worker.process.allocator import knows_pinned_setting

    for name in ("torch", "numpy", "xxhash", *MISSING):
        with suppress(metadata.PackageNotFoundError):
            tell(f"version.{name}", metadata.version(name))
    tell("python", sys.version.split()[0])
    wrong = {}
    for module in walk_packages(elastic.worker.__path__, "elastic.worker."):
        if not module.name.endswith("__"):
            try:
                import_module(module.name)
            except Exception as error:  # noqa: BLE001 - what it raises is the answer
                wrong.setdefault(f"{type(error).__name__}: {error}", []).append(module.name)
    tell("import.elastic.worker", not wrong)
    for why, names in wrong.items():
        tell("imports_that_fail", f"{why}: {', '.join(names)}")
    tell("memlock", resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    tell("proc_driver_nvidia", Path("/proc/driver/nvidia/gpus").is_dir())
    tell("settings.knows_pinned", knows_pinned_setting())
    if cpu:
        tell.skip("settings.expandable_segments", "there is no GPU")
    else:
        guarded(tell, partial(_of_the_gpu, tell, torch))
    guarded(tell, partial(_first_steps, tell, cpu))


def _of_the_gpu(tell: Tell, torch: Any) -> None:
    torch.cuda.init()
    properties = torch.cuda.get_device_properties(0)
    tell("gpu", properties.name)
    tell("gpu_gib", properties.total_memory / 2**30)
    tell("uuid", getattr(properties, "uuid", "none"))
    tell("cuda", torch.version.cuda)
    tell("nccl", ".".join(map(str, torch.cuda.nccl.version())))
    held = torch.empty(1 << 26, device="cuda")
    settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
    tell("settings", settings)
    tell("settings.expandable_segments", bool(settings.get("expandable_segments")))
    del held


def _first_steps(tell: Tell, cpu: bool) -> None:
    """Three steps of certify's small program at dp_shard=1, as in one process on the CPU."""
    from elastic.certify.harness.layouts_tried import GLOBAL_BATCH, N_BLOCKS, job_of
    from elastic.scenarios.limit import Limit
    from elastic.scenarios.one_process import losses, program_file

    job = job_of("first", program_file("small"), MANY)
    alone = losses("small", job, 3, limit=Limit.after(60.0))
    solo = Solo(job)
    solo.enter(plan_for(solo.me, 1, N_BLOCKS, cut=(GLOBAL_BATCH, 1)))
    steps = solo.stepped(1, 3)[:3]
    tell("steps.done", len(steps))
    tell(
        "steps.loss_difference",
        max(abs(e.train_loss - loss) for e, loss in zip(steps, alone, strict=True)),
    )
    solo.leave(1)


# --------------------------------------------------------------------------------------------- step

KINDS = (("one", 1, False), ("copy", 1, True), ("eight", 8, False))  # micro-batches; host copies


def step(tell: Tell, cpu: bool, seconds: float) -> None:
    import torch

    rows, blocks = (8, 2) if cpu else (8, 3)
    program, job = sized("tiny" if cpu else "1b", rows)
    device = device_of(cpu)
    if not cpu:
        torch.cuda.set_device(device)
    began = time.perf_counter()
    ours = Ours(program, job, device, rows=rows)
    tell("fill_s", time.perf_counter() - began)
    ours.cut(1)
    _, (first,) = ours.steps(1)
    if not cpu:
        tell("peak_gb", torch.cuda.max_memory_allocated() / 1e9)
    plain = Plain(program, job, device, rows=rows)
    tell("loss_difference", abs(first - plain.steps(1)[1][0]))
    bare_s = 0.0
    for name, n_microbatches, copy in KINDS:
        mine, beside = in_turn(ours, plain, n_microbatches=n_microbatches, copy=copy, blocks=blocks)
        step_s, plain_s = median(mine), median(beside)
        bare_s = bare_s or plain_s
        tell(f"{name}.bare_s", plain_s)
        tell(f"{name}.step_s", step_s)
        tell(f"{name}.over_bare", step_s / plain_s)
        if cpu:
            tell.skip(f"{name}.syncs", "a CPU is not waited for")
            continue
        with Syncs(cpu) as seen:
            ours.steps(blocks, copy)
        tell(f"{name}.syncs", seen.places.total() / blocks)
        tell(f"{name}.sync_places", dict(seen.places.most_common(8)))
        if name == "one":
            flop = program.model().flop_per_token * rows * 2048
            tell("flop_per_s", flop / step_s)
            tell("tokens_per_s", rows * 2048 / step_s)
    for name, n_microbatches, copy in KINDS if not cpu else ():
        # last: CUPTI stays in the process, and each launch takes longer from then on
        ours.cut(n_microbatches)
        tell(f"{name}.busy", _busy(partial(ours.steps, 3, copy)))
    del plain
    ours.close()
    del ours
    gc.collect()
    _whole_session(tell, cpu, (job, rows), bare_s)


def _busy(work: Callable[[], Any]) -> float:
    """Share of the time in which some kernel runs."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        took_us = 1e6 * (time.perf_counter() - began)
    spans = sorted(
        (e.time_range.start, e.time_range.end)
        for e in seen.events()
        if e.device_type == DeviceType.CUDA
    )
    busy_us, at = 0.0, 0.0
    for start, end in spans:
        busy_us += max(0.0, end - max(start, at))
        at = max(at, end)
    return busy_us / took_us


def _whole_session(tell: Tell, cpu: bool, what: tuple[Any, int], bare_s: float) -> None:
    """The same steps through a session: loader, commits, marks, comparisons."""
    job, rows = what
    n, warm = (2, 1) if cpu else (12, 4)
    if not cpu:
        import torch

        torch.cuda.empty_cache()
    solo = Solo(job)
    assert solo.session.place is not None
    solo.enter(plan_for(solo.me, 1, solo.session.place.profile.n_blocks, cut=(rows, 1)))
    solo.stepped(1, warm)
    with Syncs(cpu) as seen:
        before = len(solo.stepped(1, warm))
        steps = solo.stepped(1, n + warm)
    done = len(steps) - before
    step_s = median(e.step_time_s for e in steps[before:])
    tell("session.step_s", step_s)
    tell("session.over_bare", step_s / bare_s)
    if not cpu:
        # a step may have begun before
        tell("session.syncs", max(0, seen.places.total() - 1) / max(1, done))
        tell("session.sync_places", dict(seen.places.most_common(8)))
    solo.leave(1)


# --------------------------------------------------------------------------------------------- live


def live(tell: Tell, cpu: bool, seconds: float) -> None:
    found = lived(*(("tiny", 4) if cpu else ("300m", 50)), cpu, most_s=0.7 * seconds)
    tell("n", found["n"])
    tell("pause_s", found["pause_s"])
    for key in ("rss_mib", "allocated_mib", "reserved_mib", "used_mib"):
        if key in found["seen"]:
            tell(f"{key}.slope", slope(found["seen"][key]))
        else:
            tell.skip(f"{key}.slope", "there is no GPU")
    if cpu:
        tell.skip("oom.kind", "a CPU's memory is the machine's")
        return
    found = out_of_memory("300m", 256)
    tell("oom.kind", found["kind"])
    tell("oom.smaller_batch_steps", bool(found["smaller_steps"]))
    tell("oom.held_gb", found["held_gb"])


# ------------------------------------------------------------------------------------------ compile


def blocks_once(cpu: bool, compiled: bool) -> tuple[float, Any, int]:
    """Seconds of the first pass there and back through two blocks, what came out, synchronizations
    of another pass there."""
    import torch

    os.environ.setdefault("CERTIFY_SIZE", "tiny" if cpu else "1b")
    from elastic.models.llama import Block
    from elastic.scenarios.programs.sized import CONFIG
    from elastic.worker.parallel.compiled import compile_blocks, settle_compiler

    device = device_of(cpu)
    settle_compiler(device)
    torch.manual_seed(1)
    dtype = torch.float32 if cpu else torch.bfloat16
    blocks = [Block(CONFIG).to(device, dtype) for _ in range(2)]
    given = torch.randn(
        2, CONFIG.max_seq, CONFIG.hidden, device=device, dtype=dtype, requires_grad=True
    )
    if cpu:  # the code path, without a C++ compiler's minute
        torch.compile = partial(torch.compile, backend="eager")  # type: ignore[assignment]
    if compiled:
        compile_blocks(blocks)
    began = time.perf_counter()
    out = blocks[1](blocks[0](given))
    out.float().sum().backward()
    shown = out.detach().float().cpu()
    took_s = time.perf_counter() - began
    with Syncs(cpu) as seen:
        blocks[1](blocks[0](given))
    return took_s, shown, seen.places.total()


def compile(tell: Tell, cpu: bool, seconds: float) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="one-shot-compiled-")
    _, plain, _ = blocks_once(cpu, compiled=False)
    cold_s, out, syncs = blocks_once(cpu, compiled=True)
    tell("cold_s", cold_s)
    tell("syncs", syncs)
    scale = max(1.0, float(plain.abs().max()))
    tell("same", float((out - plain).abs().max()) < 2e-2 * scale)
    reset_s, *_ = blocks_once(cpu, compiled=True)
    tell("reset_s", reset_s)
    if cpu:
        tell.skip("warm_s", "nothing lies in the folder")
        return
    code = "import parts_train; print(parts_train.blocks_once(False, True)[0])"
    environment = {**os.environ, "PYTHONPATH": paths(), "CERTIFY_SIZE": "1b"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr[-500:]
    tell("warm_s", float(done.stdout.split()[-1]))
