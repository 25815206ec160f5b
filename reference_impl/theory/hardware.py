"""Devices as their data sheets describe them, with SKU and date: peaks, memory, link, and the sizes on the chip.

Peaks are dense. Vendors print the doubled figure for 2:4 sparsity first; it is apart, in `sparse_flops`, because no
LLM in this course uses it. Capacities are the decimal figures of the data sheet; drivers report MiB.
On-chip bandwidths are products of documented widths and the clock, so they are limits, not measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from reference_impl.theory.links import LINKS
from reference_impl.theory.units import GB, BytesPerSecond, FlopPerByte, FlopPerSecond, KiB, MiB, ridge_point


@dataclass(frozen=True)
class Chip:
    """What is on the die. SM: streaming multiprocessor; a compute unit (CU) on AMD.

    clock: Hz, the one behind the tensor peaks; Hopper and Blackwell reach their fp32 peak at 1.98 GHz.
    l2_bytes: shared by all SMs.
    """

    num_sms: int
    clock: float
    lanes_per_sm: int  # fp32 operations issued per clock and SM
    register_bytes_per_sm: int
    shared_bytes_per_sm: int  # the most a kernel can use; carved out of the L1 cache on NVIDIA
    l2_bytes: float
    l2_bandwidth: tuple[float, float] | None = None  # byte/s, range of published measurements
    shared_bytes_per_clock: int = 128  # of one SM: 32 banks of 4 bytes; Turing moves half of that

    @property
    def register_bytes(self) -> int:
        return self.num_sms * self.register_bytes_per_sm

    @property
    def shared_bytes(self) -> int:
        return self.num_sms * self.shared_bytes_per_sm

    @property
    def register_bandwidth(self) -> float:
        """byte/s if every lane reads the three fp32 operands of a multiply-add each clock: SMs * lanes * 12 * clock."""
        return self.num_sms * self.lanes_per_sm * 12 * self.clock

    @property
    def shared_bandwidth(self) -> float:
        """byte/s of shared memory, all SMs together: SMs * bytes per clock * clock."""
        return self.num_sms * self.shared_bytes_per_clock * self.clock


@dataclass(frozen=True)
class Device:
    """One SKU. Peaks by precision in FLOP/s (integers: operations/s), `bandwidth` in byte/s, `capacity` in bytes.

    link: name in `theory.links` of the link between devices of a node; host_link: of that between device and host.
    """

    name: str
    sku: str
    announced: str  # year-month in which this SKU was announced
    dense_flops: Mapping[str, float]
    bandwidth: float
    capacity: float
    chip: Chip
    link: str | None  # None: peers are reached over the host link
    host_link: str
    source: str
    sparse_flops: Mapping[str, float] = field(default_factory=dict)  # 2:4 structured sparsity, as data sheets print it
    notes: str = ""
    host_memory: tuple[float, float] | None = None  # bytes and byte/s, where it belongs to the part and is fixed

    def __post_init__(self) -> None:
        for name in ("dense_flops", "sparse_flops"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        for name in ("bandwidth", "capacity"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{self.name}: expected {name} > 0, got {getattr(self, name)!r}")
        for link in (self.link, self.host_link):
            if link is not None and link not in LINKS:
                raise ValueError(f"{self.name}: expected a link of {sorted(LINKS)}, got {link!r}")

    @property
    def link_per_direction(self) -> float:
        """byte/s to peers of the node in one direction, half of the total that vendors print."""
        return LINKS[self.link or self.host_link].per_direction

    def peak(self, precision: str = "bf16", sparse: bool = False) -> float:
        """Peak in FLOP/s, dense by default. The KeyError for a precision that the device lacks names those it has."""
        peaks = self.sparse_flops if sparse else self.dense_flops
        if precision not in peaks:
            raise KeyError(
                f"{self.sku} has no {'sparse ' if sparse else ''}peak for {precision!r}; expected one of "
                f"{sorted(peaks)}. An emulated format runs at the speed of the format it is converted to."
            )
        return peaks[precision]

    def ridge(self, precision: str = "bf16", sparse: bool = False) -> float:
        """FLOP per byte at which this device turns from bandwidth-bound to compute-bound."""
        point: FlopPerByte = ridge_point(FlopPerSecond(self.peak(precision, sparse)), BytesPerSecond(self.bandwidth))
        return float(point.value)


@dataclass(frozen=True)
class Level:
    """One level of memory as a GPU kernel sees it. capacity in bytes and bandwidth in byte/s; a range where they vary.

    bandwidth is that of the path: host memory is as fast as the link in front of it.
    """

    name: str
    capacity: tuple[float, float]
    bandwidth: tuple[float, float]
    note: str


def hierarchy(device: Device) -> tuple[Level, ...]:
    """The device's memories from registers to the SSD, each with its size and bandwidth (errata E00.5, E00.6,
    E14.3)."""
    chip, link, drive = device.chip, LINKS[device.host_link], LINKS["NVMe SSD, PCIe 4 x4"]
    # A path is as fast as its slowest part: Grace's LPDDR5X is slower than the link in front of it.
    size, rate = device.host_memory or (None, link.per_direction)
    host = Level(
        "host memory",
        (64 * GB, 2048 * GB) if size is None else (size, size),
        (min(rate, link.per_direction),) * 2,
        f"seen through {link.name}",
    )

    def same(value: float) -> tuple[float, float]:
        return (value, value)

    levels = [
        Level("registers", same(chip.register_bytes), same(chip.register_bandwidth), "three operands a clock and lane"),
        Level(
            "shared memory",
            same(chip.shared_bytes),
            same(chip.shared_bandwidth),
            f"{chip.shared_bytes_per_clock} bytes a clock and SM",
        ),
    ]
    if chip.l2_bandwidth is not None:
        levels.append(Level("L2", same(chip.l2_bytes), chip.l2_bandwidth, "measurements differ"))
    return (
        *levels,
        Level("device memory", same(device.capacity), same(device.bandwidth), "data sheet"),
        host,
        Level("NVMe SSD", (1000 * GB, 30000 * GB), same(drive.per_direction), "one drive, sequential reads"),
    )


def _tera(**values: float) -> dict[str, float]:
    return {name: value * 1e12 for name, value in values.items()}


def _twice(*names: str, **dense: float) -> dict[str, float]:
    """Peaks with 2:4 sparsity: it doubles those of the tensor-core formats and no others."""
    return {name: 2e12 * dense[name] for name in names}


_HOPPER = {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp8": 1978.9, "int8": 1978.9, "fp32": 66.9}
_HOPPER_CHIP = Chip(132, 1.83e9, 128, 256 * KiB, 228 * KiB, 50 * MiB, (5e12, 12e12))
_A100 = {"bf16": 312, "fp16": 312, "tf32": 156, "int8": 624, "fp32": 19.5}
_ADA_4090 = {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp8": 330.3, "int8": 660.6, "fp32": 82.6}
_L4 = {"bf16": 121, "fp16": 121, "tf32": 60, "fp8": 242.5, "int8": 242.5, "fp32": 30.3}
_MI300X = {"bf16": 1307.4, "fp16": 1307.4, "tf32": 653.7, "fp8": 2614.9, "int8": 2614.9, "fp32": 163.4}
_B200 = {"bf16": 2250, "fp16": 2250, "tf32": 1125, "fp8": 4500, "int8": 4500, "fp4": 9000, "fp32": 75}
_TENSOR = ("bf16", "fp16", "tf32", "int8")

DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            Device(
                "T4", "NVIDIA T4 16GB PCIe", "2018-09", _tera(fp16=65, int8=130, fp32=8.1), 320e9, 16 * GB,
                Chip(40, 1.59e9, 64, 256 * KiB, 64 * KiB, 4 * MiB, shared_bytes_per_clock=64), None, "PCIe 3 x16",
                "NVIDIA T4 product brief (320 GB/s; the one-page data sheet rounds to 300)",
                notes="No bf16 and no fp8 tensor cores; the free GPU of hosted notebooks.",
            ),
            Device(
                "A100-80GB", "NVIDIA A100 80GB SXM", "2020-11", _tera(**_A100), 2039e9, 80 * GB,
                Chip(108, 1.41e9, 64, 256 * KiB, 164 * KiB, 40 * MiB), "NVLink 3", "PCIe 4 x16",
                "NVIDIA A100 data sheet and architecture white paper", _twice(*_TENSOR, **_A100),
            ),
            Device(
                "H100", "NVIDIA H100 80GB SXM5", "2022-03", _tera(**_HOPPER), 3350e9, 80 * GB,
                _HOPPER_CHIP, "NVLink 4", "PCIe 5 x16",
                "NVIDIA H100 architecture white paper and data sheet", _twice(*_TENSOR, "fp8", **_HOPPER),
                "The driver reports 81,559 MiB. The PCIe and NVL cards have other clocks and bandwidths. "
                "1.83 GHz is the clock behind the tensor peaks; the fp32 peak belongs to 1.98 GHz.",
            ),
            Device(
                "RTX4090", "NVIDIA GeForce RTX 4090", "2022-09", _tera(**_ADA_4090), 1008e9, 24 * GB,
                Chip(128, 2.52e9, 128, 256 * KiB, 100 * KiB, 72 * MiB), None, "PCIe 4 x16",
                "NVIDIA Ada GPU architecture white paper", _twice(*_TENSOR, "fp8", **_ADA_4090),
                "Tensor peaks with fp32 accumulation; fp16 accumulation doubles fp16 and fp8.",
            ),
            Device(
                "L4", "NVIDIA L4 24GB PCIe", "2023-03", _tera(**_L4), 300e9, 24 * GB,
                Chip(58, 2.04e9, 128, 256 * KiB, 100 * KiB, 48 * MiB), None, "PCIe 4 x16",
                "NVIDIA L4 data sheet (prints 242 and 485 with sparsity)", _twice(*_TENSOR, "fp8", **_L4),
            ),
            Device(
                "GH200", "NVIDIA GH200 96GB HBM3 with 480 GB LPDDR5X", "2023-05", _tera(**_HOPPER), 4000e9, 96 * GB,
                _HOPPER_CHIP, "NVLink 4", "NVLink-C2C",
                "NVIDIA GH200 data sheet; LPDDR5X: Grace benchmarking guide", _twice(*_TENSOR, "fp8", **_HOPPER),
                "The C2C link gives 450 GB/s each way, the LPDDR5X of the 480 GB version about 360 GB/s.",
                (480 * GB, 360e9),
            ),
            Device(
                "H200", "NVIDIA H200 141GB SXM", "2023-11", _tera(**_HOPPER), 4800e9, 141 * GB,
                _HOPPER_CHIP, "NVLink 4", "PCIe 5 x16",
                "NVIDIA H200 data sheet", _twice(*_TENSOR, "fp8", **_HOPPER),
                "The compute of an H100 with more and faster memory.",
            ),
            Device(
                "MI300X", "AMD Instinct MI300X 192GB OAM", "2023-12", _tera(**_MI300X), 5300e9, 192 * GB,
                Chip(304, 2.1e9, 128, 512 * KiB, 64 * KiB, 32 * MiB), "Infinity Fabric (MI300X)", "PCIe 5 x16",
                "AMD Instinct MI300X data sheet and CDNA 3 white paper", _twice(*_TENSOR, "fp8", **_MI300X),
                "FP8 is the FNUZ encoding. L2 is 4 MiB in each of 8 dies; behind it are 256 MB of Infinity Cache.",
            ),
            Device(
                "B200", "NVIDIA B200 180GB (HGX/DGX)", "2024-03", _tera(**_B200), 8000e9, 180 * GB,
                Chip(148, 1.86e9, 128, 256 * KiB, 228 * KiB, 126 * MiB), "NVLink 5", "PCIe 5 x16",
                "NVIDIA DGX B200 and HGX data sheets, divided by eight GPUs; sizes on the chip as drivers report them",
                _twice(*_TENSOR, "fp8", "fp4", **_B200),
                "192 GB of HBM3e on the package, 180 GB per GPU usable in HGX and DGX systems; other SKUs run faster. "
                "The DGX data sheet says 8 TB/s (64 for eight), a later one of HGX 7.7. "
                "The clock is the one at which the tensor cores reach the data sheet's peak.",
            ),
        )
    }
)  # fmt: skip


def device(name: str) -> Device:
    """The row called `name`; the error lists the names that exist."""
    if name not in DEVICES:
        raise KeyError(f"unknown device {name!r}; expected one of {sorted(DEVICES)}, or build a Device of your own")
    return DEVICES[name]
