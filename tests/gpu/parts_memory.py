"""Memory on both sides of one GPU: pinned buffers, copies to the host, what a killed process
leaves, digests, sums, packs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

from one_shot_rows import FORK, Tell, guarded, paths

from elastic.certify.gpu.one_gpu import boxed, copied
from elastic.certify.gpu.solo import device_of, rss_mib

GB = 10**9
SEGMENTS = "expandable_segments:True"
PINNED = {  # the allocator's settings that are compared; `ours` is elastic's own
    "none": SEGMENTS,
    "ours": "",
    "register": f"{SEGMENTS},pinned_use_cuda_host_register:True,pinned_num_register_threads:8",
}
FREE_MOST_S = 60.0


def timed(work: Callable[[], Any], device: Any, n: int = 3) -> float:
    """Seconds, the median of a few, after one that does not count."""
    import torch

    took = []
    for _ in range(n + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return median(took[1:])


# ------------------------------------------------------------------------------------ pinned memory


def pin(sizes: list[int], cpu: bool) -> dict[str, dict[str, float]]:
    """For each size: seconds to take such a buffer, what the host's free memory lost by it, and
    still lacks without it."""
    import gc

    from elastic.worker.process.free_memory import free_host_bytes
    from elastic.worker.state.host_copy import HostMemory

    if not cpu:
        import torch

        torch.cuda.init()
        torch.empty(1, device="cuda")
    found = {}
    for n_bytes in sizes:
        before, before_rss = free_host_bytes(), rss_mib()
        memory = HostMemory(pinned=not cpu)
        began = time.perf_counter()
        memory.reserve([n_bytes])
        took_s = time.perf_counter() - began
        held, rss = before - free_host_bytes(), rss_mib() - before_rss
        memory.trim()
        del memory
        gc.collect()
        kept = before - free_host_bytes()
        found[f"{n_bytes / GB:.3g}gb"] = {
            "gb_per_s": n_bytes / GB / took_s, "held_share": held / n_bytes,
            "kept_share": kept / n_bytes, "rss_share": rss * 2**20 / n_bytes,
        }  # fmt: skip
    return found


def _pinned(tell: Tell, cpu: bool, seconds: float) -> None:
    from elastic.worker.process.allocator import cuda_environment

    sizes = [1 << 20] if cpu else [13 * GB, 17 * GB]
    for name, setting in PINNED.items():
        if cpu:
            found = pin(sizes, cpu)
        else:
            own = {"PYTORCH_ALLOC_CONF": setting} if setting else cuda_environment()
            environment = {**os.environ, **own, "PYTHONPATH": paths()}
            code = f"import json, parts_memory; print(json.dumps(parts_memory.pin({sizes}, False)))"
            done = subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, text=True,
                timeout=seconds
            )  # fmt: skip
            if done.returncode:  # a key that this torch does not know
                tell(f"pin.{name}.refused", done.stderr.strip().splitlines()[-1])
                continue
            found = json.loads(done.stdout.splitlines()[-1])
        for size, values in found.items():
            for key, value in values.items():
                tell(f"pin.{name}.{size}.{key}", value)


# ------------------------------------------------------------------------------------------- copies


def _copies(tell: Tell, cpu: bool) -> None:
    """HostCopies of a shard, twice: with a buffer that has to be made, and with one that is there;
    a pageable copy; the way of a move by host memory."""

    from elastic.types import Layout
    from elastic.worker.process.side_stream import SideStream
    from elastic.worker.session import takeover
    from elastic.worker.state.host_copy import HostMemory
    from elastic.worker.state.train_state import Held

    device = device_of(cpu)
    tensors = boxed(1 << 20 if cpu else 14 * GB, 4 if cpu else 200, device)
    n_bytes = sum(box.n_bytes for box, _ in tensors.values())
    memory = HostMemory(pinned=not cpu)
    for name, value in copied(tensors, memory, device).items():
        if name != "gb":
            tell(f"copy.{name}", value)
    held = Held(1, 0, 1, "live", Layout(), (1,), tensors)
    before = _allocated(cpu)
    place = SimpleNamespace(host_memory=memory, side=SideStream(device), device=device)
    began = time.perf_counter()
    held = takeover._to_host(held, place)
    tell("to_host.gb_per_s", n_bytes / GB / (time.perf_counter() - began))
    if not cpu:
        tell("to_host.freed_share", (before - _allocated(cpu)) / n_bytes)


def _allocated(cpu: bool) -> int:
    import torch

    return 0 if cpu else torch.cuda.memory_allocated()


# --------------------------------------------------------------------------------- a killed process


def _holds(pipe: Any, n_bytes: int) -> None:
    import torch

    held = torch.zeros(n_bytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    pipe.send(held.numel())
    pipe.recv()


def _killed(tell: Tell) -> None:
    """Before this process uses CUDA: it forks."""
    import torch

    mine, theirs = FORK.Pipe()
    process = FORK.Process(target=_holds, args=(theirs, 60 * GB), daemon=True)
    process.start()
    assert mine.poll(40.0), "nobody has taken 60 GB"
    mine.recv()
    from elastic.worker.process.free_memory import free_gpu_bytes

    device = torch.device("cuda", 0)
    before = free_gpu_bytes(device)
    began = time.perf_counter()
    process.kill()
    while free_gpu_bytes(device) < before + 59 * GB and time.perf_counter() - began < FREE_MOST_S:
        time.sleep(0.02)  # sleeps: between looks at memory that comes back, with a bound
    tell("killed.free_again_s", time.perf_counter() - began)


def memory(tell: Tell, cpu: bool, seconds: float) -> None:
    if cpu:
        tell.skip("killed.free_again_s", "there is no GPU")
    else:
        guarded(tell, partial(_killed, tell))
    guarded(tell, partial(_copies, tell, cpu), partial(_pinned, tell, cpu, seconds))


# ------------------------------------------------------------------------------ digest, sums, packs


def digest(tell: Tell, cpu: bool, seconds: float) -> None:
    from elastic.worker.state import content_digest

    device = device_of(cpu)
    tensors = boxed(1 << 20 if cpu else 4 * GB, 2 if cpu else 40, device)
    n_bytes = sum(box.n_bytes for box, _ in tensors.values())
    shapes = {fqn: box.sizes for fqn, (box, _) in tensors.items()}
    own, found = content_digest.DEVICE_BLOCK, set()
    for power in (17, 24, 26):
        content_digest.DEVICE_BLOCK = 1 << power
        found.add(content_digest.digest(tensors, shapes, list(tensors)))
        took_s = timed(lambda: content_digest.digest(tensors, shapes, list(tensors)), device, 2)
        tell(f"block_2_{power}_s_per_gb", took_s / (n_bytes / GB))
    content_digest.DEVICE_BLOCK = own
    one = list(tensors)[:1]
    on_cpu = {fqn: (tensors[fqn][0], tensors[fqn][1].cpu()) for fqn in one}
    equal = content_digest.digest(on_cpu, shapes, one) == content_digest.digest(
        tensors, shapes, one
    )
    tell("equal", equal and len(found) == 1)
    again = partial(content_digest.digest, tensors, shapes, list(tensors))
    guarded(
        tell,
        partial(_beside_matmuls, tell, cpu, again),
        partial(_sums, tell, cpu),
        partial(_packs, tell, cpu),
    )


def _beside_matmuls(tell: Tell, cpu: bool, work: Callable[[], Any]) -> None:
    """How much slower are products on the main stream while a thread takes digests on a side
    stream?"""
    import threading

    import torch

    from elastic.worker.process.side_stream import SideStream, boundary

    device, n = device_of(cpu), 64 if cpu else 8192
    left = torch.randn(n, n, device=device, dtype=torch.float32 if cpu else torch.bfloat16)

    def products() -> None:
        for _ in range(20):
            left @ left
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    alone_s = timed(products, device)
    over = threading.Event()
    side, at = SideStream(device), boundary(device)

    def digests() -> None:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), side.behind(at):
            while not over.is_set():
                work()

    thread = threading.Thread(target=digests, daemon=True)
    thread.start()
    took = []
    for _ in range(4):
        began = time.perf_counter()
        products()
        took.append(time.perf_counter() - began)
    over.set()
    thread.join()
    tell("matmul_slower", median(took) / alone_s)


def _sums(tell: Tell, cpu: bool) -> None:
    import torch

    from elastic.worker.state.state_transfer import sum_into

    device = device_of(cpu)
    for name, n_bytes in (("256k", 1 << 18), ("2m", 1 << 21), ("64m", 1 << 26)):
        data = torch.ones(n_bytes, dtype=torch.uint8, device=device)
        total, times = torch.zeros((), dtype=torch.int64, device=device), 1 if cpu else 50

        def sums(data: Any = data, total: Any = total, times: int = times) -> None:
            for _ in range(times):
                sum_into(total, data)

        tell(f"sum64.{name}_gb_per_s", times * n_bytes / GB / timed(sums, device))


def _packs(tell: Tell, cpu: bool) -> None:
    """2,000 pieces of 16 KiB, as a move packs what is small."""
    import torch

    from elastic.reshard.chunks import padded
    from elastic.types import Transfer
    from elastic.worker.state.state_transfer import pack

    device, n = device_of(cpu), 20 if cpu else 2000
    held = {f"piece{i}": torch.randn(4096, device=device) for i in range(n)}
    message = [Transfer(fqn, (0,), (4096,), "float32", 0, 1) for fqn in held]
    buffer = torch.empty(
        sum(padded(piece.n_bytes) for piece in message), dtype=torch.uint8, device=device
    )
    for name, together in (("together", True), ("one_by_one", False)):
        took_s = timed(
            lambda: pack(message, lambda piece: held[piece.fqn], buffer, together=together),  # noqa: B023
            device,
        )
        tell(f"pack.{name}_ms", 1e3 * took_s)
