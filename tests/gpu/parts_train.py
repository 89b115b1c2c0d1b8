"""What training takes on one GPU: first steps, a step beside plain FSDP2, many generations in one process, compiled blocks."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from pkgutil import iter_modules
from statistics import median
from typing import Any

from one_shot_rows import Tell, guarded, rss_mib, slope

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "sized_program.py"
MANY = 1_000_000  # steps: until it is told to stop
MISSING = ("ray", "pydantic", "boto3", "tenacity", "torchao")


def sized(size: str, global_batch: int, more: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
    """The program in that size, and a job that trains it in bfloat16."""
    from elastic.certify.planning import job_of
    from elastic.program import load_program

    os.environ["ONE_SHOT_SIZE"] = size
    program = load_program(PROGRAM)
    job = job_of("one-shot", str(PROGRAM), MANY) | {"global_batch": global_batch, "n_samples": 4096}
    return program, job | {"precision": "bfloat16", "reduce_dtype": "float32"} | (more or {})


def device_of(cpu: bool) -> Any:
    import torch

    return torch.device("cpu") if cpu else torch.device("cuda", 0)


class Solo:
    """A session in this process, as its only rank."""

    def __init__(self, job: dict[str, Any]) -> None:
        from elastic.types import NodePrepared, WorkerId
        from elastic.worker.session import Session

        self.me = WorkerId("node0", 0)
        self.session = Session(self.me, job, tempfile.mkdtemp(prefix="one-shot-"))
        self.events: list[tuple[float, Any]] = []
        self._ack, self._stores = 0, []
        self.session.prepare()
        self.until(lambda: self.of(NodePrepared), "prepared")

    def of(self, kind: Any, generation: int | None = None) -> list[Any]:
        found = [event for _, event in self.events if isinstance(event, kind)]
        return [e for e in found if generation in (None, getattr(e, "generation", None))]

    def drain(self, wait_s: float = 0.05) -> None:
        for number, event in self.session.poll(self._ack, wait_s).messages:
            self._ack = number
            self.events.append((time.monotonic(), event))

    def until(self, holds: Callable[[], Any], what: str, most_s: float = 60.0, fails: bool = False) -> None:
        from elastic.types import WorkerFailed

        ends_s = time.monotonic() + most_s
        while not holds():
            self.drain()
            failed = self.of(WorkerFailed)
            if failed and not fails:
                raise RuntimeError(f"while waiting for '{what}': {failed[0].kind}: {failed[0].error}")
            if time.monotonic() > ends_s:
                raise RuntimeError(f"not within {most_s:g} s: {what}")

    def enter(self, plan: Any) -> None:
        from elastic.worker.workplace import host_meeting

        order, store = host_meeting(plan, "127.0.0.1", 60.0, 30.0)
        self._stores = [*self._stores[-1:], store]
        self.session.enter(replace(order, me=0))

    def stepped(self, generation: int, n: int, most_s: float = 60.0) -> list[Any]:
        from elastic.types import StepDone

        self.until(lambda: len(self.of(StepDone, generation)) >= n, f"{n} steps of generation {generation}", most_s)
        return self.of(StepDone, generation)

    def leave(self, generation: int) -> None:
        from elastic.types import Quiesced

        self.session.quiesce(generation, False)
        self.until(lambda: self.of(Quiesced, generation), "out of the generation", fails=True)
        self.session.close(10.0)


def plan_for(me: Any, number: int, n_blocks: int, cut: tuple[int, int], **more: Any) -> Any:
    """One rank. `cut`: samples, micro-batches."""
    from elastic.types import Layout, Plan

    return Plan(number, Layout(), (me,), (cut[0],), (n_blocks,), cut[1], **more)


# ------------------------------------------------------------------------------------------------ facts


def facts(tell: Tell, cpu: bool, seconds: float) -> None:
    import resource

    import torch

    import elastic.worker
    from elastic.worker.allocator import knows_pinned_setting

    for name in ("torch", "numpy", "xxhash", *MISSING):
        with suppress(metadata.PackageNotFoundError):
            tell(f"version.{name}", metadata.version(name))
    tell("python", sys.version.split()[0])
    wrong = {}
    for module in iter_modules(elastic.worker.__path__):
        if not module.name.startswith("__"):
            try:
                import_module(f"elastic.worker.{module.name}")
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
    from elastic.certify.alone import losses, program_file
    from elastic.certify.planning import GLOBAL_BATCH, N_BLOCKS, job_of
    from elastic.certify.tasks import Limit

    job = job_of("first", program_file("small"), MANY)
    alone = losses("small", job, 3, Limit.after(60.0))
    solo = Solo(job)
    solo.enter(plan_for(solo.me, 1, N_BLOCKS, (GLOBAL_BATCH, 1)))
    steps = solo.stepped(1, 3)[:3]
    tell("steps.done", len(steps))
    tell("steps.loss_difference", max(abs(e.train_loss - loss) for e, loss in zip(steps, alone, strict=True)))
    solo.leave(1)


# ------------------------------------------------------------------------------------------------ step


class Syncs:
    """Where the host waits for the device, as torch.cuda.set_sync_debug_mode sees it."""

    def __init__(self, cpu: bool) -> None:
        self.cpu, self.places = cpu, Counter[str]()
        self._catch = warnings.catch_warnings()

    def __enter__(self) -> Syncs:
        self._catch.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._note  # type: ignore[assignment]
        self._mode("warn")
        return self

    def __exit__(self, *exc: object) -> None:
        self._mode("default")
        self._catch.__exit__()

    def _mode(self, mode: str) -> None:
        import torch

        if not self.cpu:
            torch.cuda.set_sync_debug_mode(mode)

    def _note(self, message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        if "called a synchronizing" in str(message):
            self.places[f"{filename.rpartition('/')[2]}:{lineno}"] += 1


class Ours:
    """elastic's state and steps of one rank on one GPU, called one by one."""

    def __init__(self, program: Any, job: dict[str, Any], device: Any, rows: int) -> None:
        from elastic.reshard.shards import RNG
        from elastic.types import Layout, WorkerId
        from elastic.worker.groups import Groups
        from elastic.worker.host_copy import HostCopies, HostMemory
        from elastic.worker.loss_scale import profile_of
        from elastic.worker.options import needs_fsdp
        from elastic.worker.rendezvous import host_store
        from elastic.worker.train_state import TrainState

        self.program, self.job, self.device, self.rows = program, job, device, rows
        profile = profile_of(program, job)
        self.n_blocks, self.me = profile.n_blocks, WorkerId("node0", 0)
        self.store = host_store("127.0.0.1", 30.0)
        self.groups = Groups(1, Layout(), device, needs_fsdp(job, Layout()))
        self.groups.join(("127.0.0.1", self.store.port), 0, 1, 60.0)
        self.state = TrainState(program, profile, self.groups, (Layout(), (self.n_blocks,), 0), job)
        self.state.fill_fresh(int(job["seed"]))
        memory = HostMemory(pinned=device.type == "cuda")
        self.host = HostCopies(memory, self.state.tensors, frozenset({RNG}), 2)
        self.dataset = program.dataset()
        self.stepper: Any = None

    def cut(self, n_microbatches: int) -> None:
        """Steps have so many micro-batches from now on. (One stepper: each has hooks on the blocks.)"""
        from elastic.worker.shares import Shares
        from elastic.worker.step import Stepper

        plan = plan_for(self.me, 1, self.n_blocks, (self.rows, n_microbatches))
        self.stepper = self.stepper or Stepper(self.program, self.job, plan, self.state, self.groups)
        self.stepper.plan, self.stepper.shares = plan, Shares(self.job, plan)

    def steps(self, n: int, copy: bool = False) -> tuple[list[float], list[float]]:
        """Seconds and loss of each; with a host copy of each boundary."""
        from elastic.data.loader import collate
        from elastic.worker.step import Words

        self.state.before_change = self.host.settle if copy else (lambda: None)
        taken, times, losses, stepper = None, [], [], self.stepper
        for _ in range(n):
            batch = collate([self.dataset[i] for i in stepper.shares.ids(self.state.step)])
            began = time.perf_counter()
            commit = stepper.run([batch], Words())
            if copy:
                if taken is not None:
                    taken.wait()
                    taken.release()
                taken = self.host.take(self.state.step)
            times.append(time.perf_counter() - began)
            losses.append(commit.train_loss)
        if taken is not None:
            taken.wait()
            taken.release()
        return times, losses

    def close(self) -> None:
        self.host.close()
        self.groups.close()


def bare(program: Any, job: dict[str, Any], device: Any, rows: int, n: int) -> tuple[list[float], list[float]]:
    """The same model, batches and precision in a loop of plain FSDP2. Seconds and loss of each step."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from elastic.data.loader import collate
    from elastic.data.order import sample_ids

    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    torch.manual_seed(job["seed"])
    model = program.model()
    torch.manual_seed(job["seed"])
    program.init(model)
    model.to(device)
    mesh = init_device_mesh(device.type, (1,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
    optimizer = program.optimizer(list(model.named_parameters()))
    dataset, times, losses = program.dataset(), [], []
    for step in range(n):
        batch = collate([dataset[i] for i in sample_ids(len(dataset), rows, job["seed"], step)])
        began = time.perf_counter()
        there = {key: value.to(device, non_blocking=True) for key, value in batch.items()}
        loss = program.loss(model(there["input"]), there) / batch["target"].numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job["clip_grad_norm"])
        optimizer.step()
        losses.append(float(loss.detach()))
        times.append(time.perf_counter() - began)
    del model, optimizer, loss, there
    dist.destroy_process_group()
    return times, losses


def step(tell: Tell, cpu: bool, seconds: float) -> None:
    import torch

    rows, n, warm = (8, 2, 1) if cpu else (8, 12, 4)
    program, job = sized("tiny" if cpu else "1b", rows)
    device = device_of(cpu)
    if not cpu:
        torch.cuda.set_device(device)
    times, plain = bare(program, job, device, rows, n)
    bare_s = median(times[warm:])
    tell("bare_s", bare_s)
    gc.collect()
    if not cpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    ours = Ours(program, job, device, rows)
    tell("fill_s", time.perf_counter() - began)
    for name, n_microbatches, copy in (("one", 1, False), ("copy", 1, True), ("eight", 8, False)):
        ours.cut(n_microbatches)
        _, losses = ours.steps(warm, copy)
        if name == "one":
            tell("loss_difference", abs(losses[0] - plain[0]))
        with Syncs(cpu) as seen:
            times, _ = ours.steps(n - warm, copy)
        step_s = median(times)
        tell(f"{name}.step_s", step_s)
        tell(f"{name}.over_bare", step_s / bare_s)
        if cpu:
            tell.skip(f"{name}.syncs", "a CPU is not waited for")
            continue
        tell(f"{name}.syncs", seen.places.total() / (n - warm))
        tell(f"{name}.sync_places", dict(seen.places.most_common(8)))
        tell(f"{name}.busy", _busy(partial(ours.steps, 3, copy)))
        if name == "one":
            flop = program.model().flop_per_token * rows * 2048
            tell("flop_per_s", flop / step_s)
            tell("tokens_per_s", rows * 2048 / step_s)
            tell("peak_gb", torch.cuda.max_memory_allocated() / 1e9)
    ours.close()
    del ours
    gc.collect()
    _whole_session(tell, cpu, (job, rows), (n, warm, bare_s))


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
    spans = sorted((e.time_range.start, e.time_range.end) for e in seen.events() if e.device_type == DeviceType.CUDA)
    busy_us, at = 0.0, 0.0
    for start, end in spans:
        busy_us += max(0.0, end - max(start, at))
        at = max(at, end)
    return busy_us / took_us


def _whole_session(tell: Tell, cpu: bool, what: tuple[Any, int], given: tuple[int, int, float]) -> None:
    """The same steps through a session: loader, commits, marks, comparisons."""
    job, rows = what
    n, warm, bare_s = given
    if not cpu:
        import torch

        torch.cuda.empty_cache()
    solo = Solo(job)
    assert solo.session.place is not None
    solo.enter(plan_for(solo.me, 1, solo.session.place.profile.n_blocks, (rows, 1)))
    solo.stepped(1, warm)
    with Syncs(cpu) as seen:
        before = len(solo.stepped(1, warm))
        steps = solo.stepped(1, n + warm)
    done = len(steps) - before
    step_s = median(e.step_time_s for e in steps[before:])
    tell("session.step_s", step_s)
    tell("session.over_bare", step_s / bare_s)
    if not cpu:
        tell("session.syncs", max(0, seen.places.total() - 1) / max(1, done))  # a step may have begun before
        tell("session.sync_places", dict(seen.places.most_common(8)))
    solo.leave(1)


# ------------------------------------------------------------------------------------------------ live


def live(tell: Tell, cpu: bool, seconds: float) -> None:
    from elastic.certify.planning import live as live_from
    from elastic.types import PlanEntered

    ends_s, rows = time.monotonic() + 0.7 * seconds, 8
    _, job = sized("tiny" if cpu else "300m", rows)
    solo = Solo(job)
    assert solo.session.place is not None
    n_blocks = solo.session.place.profile.n_blocks
    seen: dict[str, list[float]] = {"rss_mib": [], "allocated_mib": [], "reserved_mib": [], "used_mib": []}
    plan, pauses = None, []
    for number in range(1, (4 if cpu else 50) + 1):
        more = {"resume": live_from(plan)} if plan is not None else {}
        began = time.monotonic()
        plan = plan_for(solo.me, number, n_blocks, (rows, rows if not cpu else 1), **more)
        solo.enter(plan)
        solo.stepped(number, 1)
        pauses.append(time.monotonic() - began)
        solo.stepped(number, 2)
        for key, value in _memory(cpu).items():
            seen[key].append(value)
        if time.monotonic() > ends_s:
            break
    assert plan is not None and solo.of(PlanEntered)
    tell("n", plan.generation)
    tell("pause_s", median(pauses[1:]))
    for key, values in seen.items():
        if values:
            tell(f"{key}.slope", slope(values[len(values) // 5 :]))
        else:
            tell.skip(f"{key}.slope", "there is no GPU")
    solo.leave(plan.generation)
    del solo
    if cpu:
        tell.skip("oom.kind", "a CPU's memory is the machine's")
        return
    _out_of_memory(tell)


def _memory(cpu: bool) -> dict[str, float]:
    found = {"rss_mib": rss_mib()}
    if not cpu:
        import torch

        free, whole = torch.cuda.mem_get_info()
        found |= {"allocated_mib": torch.cuda.memory_allocated() / 2**20, "used_mib": (whole - free) / 2**20}
        found["reserved_mib"] = torch.cuda.memory_reserved() / 2**20
    return found


def _out_of_memory(tell: Tell) -> None:
    """A batch that no GPU has the memory for; then, live, the same one in small parts."""
    import torch

    from elastic.certify.planning import live as live_from
    from elastic.types import Quiesced, WorkerFailed

    rows = 256
    _, job = sized("300m", rows)
    solo = Solo(job)
    assert solo.session.place is not None
    n_blocks = solo.session.place.profile.n_blocks
    first = plan_for(solo.me, 1, n_blocks, (rows, 1))
    solo.enter(first)
    solo.until(lambda: solo.of(Quiesced, 1), "out of memory", fails=True)
    failed = solo.of(WorkerFailed)
    tell("oom.kind", failed[0].kind if failed else "none")
    solo.events = [(at, e) for at, e in solo.events if not isinstance(e, WorkerFailed)]
    solo.enter(replace(plan_for(solo.me, 2, n_blocks, (rows, rows // 2)), resume=live_from(first)))
    tell("oom.smaller_batch_steps", bool(solo.stepped(2, 1)))
    tell("oom.held_gb", torch.cuda.memory_allocated() / 1e9)
    solo.leave(2)


# ------------------------------------------------------------------------------------------------ compile


def blocks_once(cpu: bool, compiled: bool) -> tuple[float, Any, int]:
    """Seconds of the first pass there and back through two blocks, what came out, synchronizations of another pass there."""
    import torch

    os.environ.setdefault("ONE_SHOT_SIZE", "tiny" if cpu else "1b")
    sys.path.insert(0, str(HERE))
    from sized_program import CONFIG

    from elastic.models.llama import Block
    from elastic.worker.compiled import compile_blocks, settle_compiler

    device = device_of(cpu)
    settle_compiler(device)
    torch.manual_seed(1)
    dtype = torch.float32 if cpu else torch.bfloat16
    blocks = [Block(CONFIG).to(device, dtype) for _ in range(2)]
    given = torch.randn(2, CONFIG.max_seq, CONFIG.hidden, device=device, dtype=dtype, requires_grad=True)
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
    environment = {**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parents[1]}", "ONE_SHOT_SIZE": "1b"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-500:]
    tell("warm_s", float(done.stdout.split()[-1]))
