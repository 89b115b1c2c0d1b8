"""What a machine's GPUs need to train well: a driver that knows the CUDA of torch, full clocks and
power, and settings of NCCL and EFA that do not slow the network down."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from elastic import catalog
from elastic.observe.diagnosis.doctor_check import DoctorCheck, HostView, ProgramHangs

# CUDA's major version -> the oldest driver branch that runs it (CUDA Compatibility, NVIDIA)
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
HOT_C = 85
CAPPED = 0.9  # of the board's own power limit, or of its highest clock
AWS_VENDOR = "0x1d0f"
EFA_PLUGINS = ("/opt/amazon/ofi-nccl/lib", "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
    "/opt/amazon/ofi-nccl/lib64", "/opt/aws-ofi-nccl/lib", "/usr/local/lib")  # fmt: skip
WITH_CUDA = "pip install torch --index-url https://download.pytorch.org/whl/cu128"
# variable -> values that slow a run down, what they do; "" = whatever it says
SLOWING: Mapping[str, tuple[tuple[str, ...], str]] = {
    "NCCL_P2P_DISABLE": (("1",), "GPUs of one machine talk through host memory"),
    "NCCL_SHM_DISABLE": (("1",), "GPUs of one machine talk through the network"),
    "NCCL_IB_DISABLE": (("1",), "InfiniBand and RoCE are not used"),
    "NCCL_NET_GDR_LEVEL": (("LOC", "0"), "GPUs send through host memory"),
    "NCCL_DEBUG": (("INFO", "TRACE"), "each collective is logged"),
    "CUDA_LAUNCH_BLOCKING": (("1",), "each kernel is waited for"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "each collective is checked on all ranks first"),
    "TORCH_NCCL_BLOCKING_WAIT": (("1",), "the host waits for each collective"),
    "FI_EFA_ENABLE_SHM_TRANSFER": (("0",), "processes of one machine talk through EFA"),
}
COLUMNS = (
    "index", "name", "driver_version", "memory.total", "temperature.gpu", "power.limit",
    "power.default_limit", "clocks.applications.graphics", "clocks.max.graphics",
    "pcie.link.width.current", "pcie.link.width.max", "ecc.errors.uncorrected.volatile.total",
    "persistence_mode",
)  # fmt: skip
Gpu = Mapping[str, str]


def gpu_checks(machine: HostView) -> list[DoctorCheck]:
    """Of a machine without GPUs one line, and the settings that would count elsewhere."""
    try:
        gpus = list(_gpus(machine))
    except ProgramHangs:
        hint = "the driver hangs; restart the machine"
        return [DoctorCheck("gpus", "nvidia-smi does not answer", "bad", hint)]
    settings = [*_settings(machine), *_interfaces(machine)]
    if not gpus:
        why = "none; a worker is one process on the CPU"
        if (machine.root / "dev/nvidia0").exists():
            hint = "is the driver loaded, and is nvidia-smi of the same version? (dmesg)"
            return [DoctorCheck("gpus", "there, but nvidia-smi fails", "bad", hint), *settings]
        return [DoctorCheck("gpus", why), *settings]
    listed = "; ".join(f"{gpu['name']}, {gpu['memory.total']}" for gpu in gpus)
    return [
        _seen(machine, listed), _driver(machine, gpus[0]["driver_version"]), *_nccl(machine),
        *_clocks(gpus), *settings, *_efa(machine),
    ]  # fmt: skip


def _gpus(machine: HostView) -> Iterator[Gpu]:
    """What nvidia-smi tells of each; of an old one that does not know a column, the first four."""
    for columns in (COLUMNS, COLUMNS[:4]):
        words = ("nvidia-smi", f"--query-gpu={','.join(columns)}", "--format=csv,noheader,nounits")
        said = machine.ask(words)
        if said is None:
            continue
        for line in said.strip().splitlines():
            cells = [cell.strip() for cell in line.split(",")]
            if len(cells) == len(columns):
                yield dict(zip(columns, cells, strict=True))
        return


def _number(gpu: Gpu, column: str) -> float | None:
    """None: the GPU does not tell (`[N/A]`)."""
    found = re.match(r"-?\d+(\.\d+)?", gpu.get(column, ""))
    return float(found[0]) if found else None


def _seen(machine: HostView, listed: str) -> DoctorCheck:
    hidden = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        found = f"{listed}; CUDA_VISIBLE_DEVICES='{hidden}' hides them all"
        return DoctorCheck("gpus", found, "look", "unset CUDA_VISIBLE_DEVICES")
    return DoctorCheck("gpus", listed)


# ------------------------------------------------------------------------------------- versions


def cuda_of_torch(machine: HostView) -> str:
    """`12.8`; `cpu` = built without; '' = not known."""
    local = machine.version("torch").partition("+")[2]
    if local == "cpu":
        return "cpu"
    if found := re.fullmatch(r"cu(\d+)(\d)", local):
        return f"{found[1]}.{found[2]}"
    for package in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"):
        if version := machine.version(package):
            return ".".join(version.split(".")[:2])
    return ""


def _driver(machine: HostView, driver: str) -> DoctorCheck:
    cuda, name = cuda_of_torch(machine), "driver and CUDA"
    if cuda == "cpu":
        found = f"driver {driver}; torch {machine.version('torch')} is built for CPUs"
        return DoctorCheck(name, found, "bad", f"the GPUs are not used: {WITH_CUDA}")
    found = f"driver {driver}, torch {machine.version('torch')} with CUDA {cuda or 'unknown'}"
    major, branch = cuda.partition(".")[0], driver.partition(".")[0]
    least = LEAST_DRIVER.get(int(major), 0) if major.isdigit() else 0
    if branch.isdigit() and int(branch) < least:
        hint = f"CUDA {major} needs driver {least} or newer: update it, or install an older torch"
        return DoctorCheck(name, found, "bad", hint)
    return DoctorCheck(name, found)


def _nccl(machine: HostView) -> Iterator[DoctorCheck]:
    """The NCCL that torch brings, and another one that the linker would find first."""
    packages = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
    version = next((found for one in packages if (found := machine.version(one))), "")
    preloaded = [
        one for one in machine.environment.get("LD_PRELOAD", "").split(":") if "libnccl.so" in one
    ]
    other = preloaded or [str(path) for path in machine.libraries("libnccl.so*", ())]
    if other:
        found = f"torch brings {version or 'its own'}, but {other[0]} is loaded in its place"
        hint = "take it out of LD_LIBRARY_PATH and LD_PRELOAD, unless it is meant"
        yield DoctorCheck("NCCL", found, "look", hint)
    elif version:
        yield DoctorCheck("NCCL", f"{version}, which torch brings")


# --------------------------------------------------------------------------------------- clocks


def _clocks(gpus: Sequence[Gpu]) -> Iterator[DoctorCheck]:
    found = [(gpu, *one) for gpu in gpus for one in _slowed(gpu)]
    for gpu, what, hint in found:
        yield DoctorCheck(f"gpu {gpu['index']}", what, "look", hint)
    if not found:
        yield DoctorCheck("gpu clocks", "full clocks, power and links; no memory errors")


def _slowed(gpu: Gpu) -> Iterator[tuple[str, str]]:
    """What makes it slower than its kind, and what to do."""
    celsius = _number(gpu, "temperature.gpu")
    if celsius is not None and celsius >= HOT_C:
        yield f"{celsius:.0f} °C: it lowers its clocks", "look at the machine's cooling"
    limit, usual = _number(gpu, "power.limit"), _number(gpu, "power.default_limit")
    if limit is not None and usual and limit < CAPPED * usual:
        yield (
            f"its power is capped at {limit:.0f} of {usual:.0f} W",
            f"sudo nvidia-smi -i {gpu['index']} -pl {usual:.0f}",
        )
    clock, most = _number(gpu, "clocks.applications.graphics"), _number(gpu, "clocks.max.graphics")
    if clock and most and clock < CAPPED * most:
        yield (
            f"its clock is set to {clock:.0f} of {most:.0f} MHz",
            f"sudo nvidia-smi -i {gpu['index']} -rac, and -rgc",
        )
    width, widest = (_number(gpu, "pcie.link.width.current"), _number(gpu, "pcie.link.width.max"))
    if width and widest and width < widest:
        yield (
            f"its PCIe link has {width:.0f} of {widest:.0f} lanes",
            "copies to and from it are slower: reseat it, or take another machine",
        )
    errors = _number(gpu, "ecc.errors.uncorrected.volatile.total")
    if errors:
        yield f"{errors:.0f} uncorrected memory errors", "take another machine; nvidia-smi -r"
    if gpu.get("persistence_mode") == "Disabled":
        yield "persistence mode is off: each start waits for the driver", "sudo nvidia-smi -pm 1"


# -------------------------------------------------------------------------------------- network


def _settings(machine: HostView) -> Iterator[DoctorCheck]:
    """Variables that are good for finding a fault and slow otherwise."""
    for name, (values, what) in SLOWING.items():
        value = machine.environment.get(name, "")
        if value.upper() in values:
            yield DoctorCheck("settings", f"{name}={value}: {what}", "look", f"unset {name}")


def _interfaces(machine: HostView) -> Iterator[DoctorCheck]:
    """NCCL and gloo wait for ever for an interface that is not there."""
    folder = machine.root / "sys/class/net"
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = machine.environment.get(name, "")
        if not value or value.startswith("^") or not there:
            continue
        exact = value.startswith("=")
        wanted = value.lstrip("=").split(",")
        if not any(one == had if exact else had.startswith(one) for one in wanted for had in there):
            found = f"{name}={value}, but the interfaces are {', '.join(there)}"
            yield DoctorCheck("settings", found, "bad", f"unset {name}, or name one that is there")


def _efa(machine: HostView) -> Iterator[DoctorCheck]:
    """AWS's network adapter: it needs a plugin of NCCL, and memory that may be locked."""
    devices = [
        path.parent.parent.name
        for path in (machine.root / "sys/class/infiniband").glob("*/device/vendor")
        if path.read_text().strip() == AWS_VENDOR
    ]
    product = machine.text("sys/devices/virtual/dmi/id/product_name")
    kind = catalog.instance_type(product) if product else None
    if not devices:
        if kind is not None and kind.efa:
            hint = "launch it with EFA interfaces and install aws-efa-installer (docs/clusters.md)"
            found = f"none, though {product} has {kind.efa_interfaces}: the network runs over TCP"
            yield DoctorCheck("EFA", found, "look", hint)
        return
    plugin = machine.libraries("libnccl-net*.so*", EFA_PLUGINS)
    provider = machine.environment.get("FI_PROVIDER", "")
    if not plugin:
        hint = "install aws-ofi-nccl, and put its lib folder into LD_LIBRARY_PATH"
        found = f"{len(devices)} interfaces, but NCCL has no plugin for them and takes TCP"
        yield DoctorCheck("EFA", found, "look", hint)
    elif provider not in ("", "efa"):
        found = f"{len(devices)} interfaces, but FI_PROVIDER={provider}"
        yield DoctorCheck("EFA", found, "look", "unset FI_PROVIDER, or FI_PROVIDER=efa")
    else:
        yield DoctorCheck("EFA", f"{len(devices)} interfaces, plugin {plugin[0]}")
