"""Hardware profiles from the catalog: peaks and links of a GPU kind in its usual node, before
anything is measured."""

from __future__ import annotations

from dataclasses import replace

from elastic import catalog
from elastic.planner.cost.default_hardware import NOMINAL, among
from elastic.types import HardwareProfile

__all__ = ["NOMINAL", "among", "profile", "together"]

# Between nodes, one GPU, one direction, where nothing else is said: the reference designs of each
# architecture.
NETWORK_GBPS = {
    "Volta": 12.5,  # p3dn.24xlarge: 100 Gbit/s for 8 GPUs
    "Turing": 12.5,  # g4dn.12xlarge: 50 Gbit/s for 4 GPUs
    "Ampere": 200.0,  # DGX A100: 8 x 200 Gbit/s for 8 GPUs
    "Ada": 50.0,  # g6e.48xlarge: 400 Gbit/s for 8 GPUs
    "Hopper": 400.0,  # DGX H100
    "Blackwell": 400.0,  # DGX B200
    "CDNA3": 400.0,
}
REACHED = {
    "Volta": 0.8,
    "Turing": 0.4,
    "Ampere": 0.87,
    "Ada": 0.8,
    "Hopper": 0.8,
    "Blackwell": 0.78,
    "CDNA3": 0.51,
}
DOMAIN = {"GB200": 72, "GB300": 72}  # GPUs that NVLink joins beyond one node
PCIE_SHARE = 0.5  # of a GPU's PCIe link, for what goes to another GPU through the host


def profile(chip: catalog.Chip, network_gbps: float = 0.0) -> HardwareProfile:
    """`network_gbps`: of one GPU; 0 = that of the architecture's reference design."""
    chip = _with_peaks(chip)
    peaks = {dtype: peak for dtype in catalog.DTYPES if (peak := chip.peak_flop_per_s(dtype))}
    best = peaks.get("bfloat16") or peaks.get("float16") or 0.0
    measured = chip.measured_bf16_flop_per_s / chip.bf16_flop_per_s if chip.bf16_flop_per_s else 0.0
    pcie = chip.pcie_bytes_per_s or 12e9
    return HardwareProfile(
        accelerator_type=chip.name,
        arch=chip.arch,
        peak_flop_per_s=best,
        memory_bytes=chip.memory_bytes,
        flop_per_s=tuple(peaks.items()),
        reached=measured or REACHED.get(chip.arch, 0.75),
        units=chip.sm,
        memory_bytes_per_s=chip.memory_bytes_per_s,
        node_bytes_per_s=chip.nvlink_bytes_per_s or pcie * PCIE_SHARE,
        host_bytes_per_s=pcie,
        link_bytes_per_s=(network_gbps or NETWORK_GBPS.get(chip.arch, 100.0)) / 8 * 1e9,
    )


def _with_peaks(chip: catalog.Chip) -> catalog.Chip:
    """A part whose peaks nobody prints has those of its family's largest, in proportion to the
    power that it may draw."""
    family = [
        other
        for other in catalog.chips().values()
        if other.name.split("-")[0] == chip.name.split("-")[0]
    ]
    like = max(family, key=lambda other: other.bf16_flop_per_s)
    if chip.bf16_flop_per_s or chip.fp16_flop_per_s or chip.fp32_flop_per_s or not like.watts:
        return chip
    share = (chip.watts or like.watts) / like.watts
    return replace(
        chip, sm=chip.sm or like.sm, bf16_flop_per_s=like.bf16_flop_per_s * share,
        fp16_flop_per_s=like.fp16_flop_per_s * share, fp8_flop_per_s=like.fp8_flop_per_s * share,
        measured_bf16_flop_per_s=like.measured_bf16_flop_per_s * share,
    )  # fmt: skip


def together(chip: catalog.Chip, per_node: int) -> int:
    """GPUs that the fast links join, where a node has `per_node`."""
    return max(per_node, DOMAIN.get(chip.name.split("-")[0], 0))
