"""Devices as their data sheets describe them: dense peaks per precision, bandwidth, capacity, with SKU and date.

Peaks are dense. Vendors print the doubled figure for 2:4 sparsity first; no LLM in this course uses it.
Capacities are the decimal figures of the data sheet. A driver reports a little more or less, in MiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from reference_impl.theory.units import GB, BytesPerSecond, FlopPerByte, FlopPerSecond, ridge_point


@dataclass(frozen=True)
class Device:
    """One SKU. `dense_flops[precision]` in FLOP/s, `bandwidth` in byte/s, `capacity` in bytes."""

    name: str
    sku: str
    announced: str  # year-month in which this SKU was announced
    dense_flops: Mapping[str, float]
    bandwidth: float
    capacity: float
    link_per_direction: float  # byte/s to peers in one direction; half of the total that vendors print; 0 = PCIe only
    source: str
    notes: str = field(default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense_flops", MappingProxyType(dict(self.dense_flops)))
        for name in ("bandwidth", "capacity"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{self.name}: expected {name} > 0, got {getattr(self, name)!r}")

    def peak(self, precision: str = "bf16") -> float:
        """Dense peak in FLOP/s; names the precisions the device has when it lacks the one asked for."""
        if precision not in self.dense_flops:
            raise KeyError(
                f"{self.sku} has no peak for {precision!r}; expected one of {sorted(self.dense_flops)}. "
                "An emulated format runs at the speed of the format it is converted to."
            )
        return self.dense_flops[precision]

    def ridge(self, precision: str = "bf16") -> float:
        """FLOP per byte at which this device turns from bandwidth-bound to compute-bound."""
        point: FlopPerByte = ridge_point(FlopPerSecond(self.peak(precision)), BytesPerSecond(self.bandwidth))
        return float(point.value)


def _tera(**values: float) -> dict[str, float]:
    return {name: value * 1e12 for name, value in values.items()}


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            Device(
                "T4", "NVIDIA T4 16GB PCIe", "2018-09", _tera(fp16=65, int8=130, fp32=8.1),
                320e9, 16 * GB, 0.0, "NVIDIA T4 product brief (320 GB/s; the one-page data sheet rounds to 300)",
                "No bf16 and no fp8 tensor cores; the free GPU of hosted notebooks.",
            ),
            Device(
                "A100-80GB", "NVIDIA A100 80GB SXM", "2020-11",
                _tera(bf16=312, fp16=312, tf32=156, int8=624, fp32=19.5),
                2039e9, 80 * GB, 300e9, "NVIDIA A100 data sheet",
            ),
            Device(
                "H100", "NVIDIA H100 80GB SXM5", "2022-03",
                _tera(bf16=989.4, fp16=989.4, tf32=494.7, fp8=1978.9, int8=1978.9, fp32=66.9),
                3350e9, 80 * GB, 450e9, "NVIDIA H100 architecture white paper and data sheet",
                "The driver reports 81,559 MiB. The PCIe and NVL cards have other clocks and bandwidths.",
            ),
            Device(
                "RTX4090", "NVIDIA GeForce RTX 4090", "2022-09",
                _tera(bf16=165.2, fp16=165.2, fp8=330.3, int8=660.6, fp32=82.6),
                1008e9, 24 * GB, 0.0, "NVIDIA Ada GPU architecture white paper",
                "Tensor peaks with fp32 accumulation; fp16 accumulation doubles fp16 and fp8.",
            ),
            Device(
                "L4", "NVIDIA L4 24GB PCIe", "2023-03",
                _tera(bf16=121, fp16=121, tf32=60, fp8=242.5, int8=242.5, fp32=30.3),
                300e9, 24 * GB, 0.0, "NVIDIA L4 data sheet (prints 242 and 485 with sparsity)",
            ),
            Device(
                "H200", "NVIDIA H200 141GB SXM", "2023-11",
                _tera(bf16=989.4, fp16=989.4, tf32=494.7, fp8=1978.9, int8=1978.9, fp32=66.9),
                4800e9, 141 * GB, 450e9, "NVIDIA H200 data sheet",
                "The compute of an H100 with more and faster memory.",
            ),
            Device(
                "MI300X", "AMD Instinct MI300X 192GB OAM", "2023-12",
                _tera(bf16=1307.4, fp16=1307.4, tf32=653.7, fp8=2614.9, int8=2614.9, fp32=163.4),
                5300e9, 192 * GB, 448e9, "AMD Instinct MI300X data sheet",
                "FP8 is the FNUZ encoding. The link is the sum of seven Infinity Fabric links of 64 GB/s each way.",
            ),
            Device(
                "B200", "NVIDIA B200 180GB (HGX/DGX)", "2024-03",
                _tera(bf16=2250, fp16=2250, tf32=1125, fp8=4500, int8=4500, fp4=9000, fp32=75),
                8000e9, 180 * GB, 900e9, "NVIDIA DGX B200 and HGX data sheets, divided by eight GPUs",
                "192 GB of HBM3e on the package, 180 GB per GPU usable in HGX and DGX systems; other SKUs run faster.",
            ),
        )
    }
)  # fmt: skip


def device(name: str) -> Device:
    """The row called `name`; the error lists the names that exist."""
    if name not in DEVICES:
        raise KeyError(f"unknown device {name!r}; expected one of {sorted(DEVICES)}, or build a Device of your own")
    return DEVICES[name]
