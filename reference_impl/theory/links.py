"""Links between devices, hosts and nodes: bytes per second in one direction, and what each connects.

Vendors print the sum of both directions for NVLink, NVLink-C2C and Infinity Fabric. A transfer goes one way, so this
table holds half of that (erratum E00.8). A path is as fast as its slowest part: host memory behind PCIe is PCIe
(erratum E14.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from reference_impl.theory.units import Number


@dataclass(frozen=True)
class Link:
    """A link. per_direction: byte/s one way, as specified. scope: chip | node | cluster, the widest thing it spans."""

    name: str
    per_direction: float
    scope: str
    since: str  # year in which it shipped
    source: str

    @property
    def both_directions(self) -> float:
        """The total that vendors print, in byte/s."""
        return 2 * self.per_direction


LINKS: Mapping[str, Link] = MappingProxyType(
    {
        link.name: link
        for link in (
            Link("NVLink 3", 300e9, "node", "2020", "NVIDIA A100 data sheet: 600 GB/s, 12 links of 50 GB/s both ways"),
            Link("NVLink 4", 450e9, "node", "2022", "NVIDIA H100 data sheet: 900 GB/s, 18 links of 50 GB/s both ways"),
            Link("NVLink 5", 900e9, "node", "2024", "NVIDIA Blackwell: 1.8 TB/s, 18 links of 100 GB/s both ways"),
            Link("Infinity Fabric (MI300X)", 448e9, "node", "2023", "AMD MI300X data sheet: 7 links of 64 GB/s one way,"
                 " one to each peer: to a single peer 64 GB/s"),
            Link("NVLink-C2C", 450e9, "chip", "2023", "NVIDIA GH200 data sheet: 900 GB/s both ways, CPU to GPU"),
            Link("PCIe 3 x16", 15.75e9, "node", "2010", "PCI-SIG: 8 GT/s, 16 lanes, 128b/130b"),
            Link("PCIe 4 x16", 31.5e9, "node", "2017", "PCI-SIG: 16 GT/s, 16 lanes, 128b/130b; copies see 25-28"),
            Link("PCIe 5 x16", 63.0e9, "node", "2019", "PCI-SIG: 32 GT/s, 16 lanes, 128b/130b; copies see 50-60"),
            Link("InfiniBand NDR 400G", 50e9, "cluster", "2022", "400 Gbit/s per port and direction; one NIC"),
            Link("Ethernet 100G", 12.5e9, "cluster", "2010", "100 Gbit/s per port and direction"),
            Link("NVMe SSD, PCIe 4 x4", 7.0e9, "node", "2020", "sequential reads of fast drives; the lanes give 7.9"),
        )
    }
)  # fmt: skip


def link(name: str) -> Link:
    """The row called `name`; the error lists the names that exist."""
    if name not in LINKS:
        raise KeyError(f"unknown link {name!r}; expected one of {sorted(LINKS)}, or build a Link of your own")
    return LINKS[name]


def transfer_seconds(num_bytes: Number, bandwidth: Number, latency: Number = 0.0) -> Number:
    """Time of one message: latency + bytes / bandwidth (the alpha-beta model). bandwidth: byte/s in one direction."""
    return latency + num_bytes / bandwidth


def break_even_bandwidth(num_bytes: Number, recompute_seconds: Number) -> Number:
    """Bandwidth in byte/s above which fetching `num_bytes` is faster than computing them again."""
    return num_bytes / recompute_seconds
