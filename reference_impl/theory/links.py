"""Links between devices, hosts and nodes: bytes per second in one direction, seconds per message, and what each
connects.

Vendors print the sum of both directions for NVLink, NVLink-C2C and Infinity Fabric. A transfer goes one way, so this
table holds half of that (erratum E00.8). A path is as fast as its slowest part: host memory behind PCIe is PCIe
(erratum E14.3).

No data sheet states a latency. `alpha` is a time per message between two GPUs as a library of collectives sees it, with
its source beside it; it depends on library, protocol and load by a factor of two or three, so it should be measured on
the machine that matters (chapter 12 fits it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from reference_impl.theory.units import Number


@dataclass(frozen=True)
class Link:
    """A link. per_direction: byte/s one way, as specified. scope: chip | node | cluster, the widest thing it spans.
    alpha: seconds of one message without its bytes; None where it does not connect GPUs. per_peer: byte/s one way to a
    single peer, where there is no switch that gives all of the bandwidth to one."""

    name: str
    per_direction: float
    scope: str
    since: str  # year in which it shipped
    source: str
    alpha: float | None = None
    alpha_source: str = ""  # with its year
    per_peer: float | None = None

    def seconds(self, num_bytes: float, largest: float) -> float:
        """Of a rank's messages of one step: bytes of all of them, and of the largest that goes to one peer."""
        return (self.alpha or 0.0) + max(
            num_bytes / self.per_direction, largest / (self.per_peer or self.per_direction)
        )

    @property
    def both_directions(self) -> float:
        """The total that vendors print, in byte/s."""
        return 2 * self.per_direction


_NCCL = "NCCL (2020), src/graph/tuning.cc: a step of a ring with the LL128 protocol takes"
_INSIGHTS = "Zhao et al. 2025, Insights into DeepSeek-V3: 64 bytes across leaves take"
_NVLINK = f"{_NCCL} 1.9 us over NVLink"
_PCIE = f"{_NCCL} 2.5 us over PCIe"

LINKS: Mapping[str, Link] = MappingProxyType(
    {
        link.name: link
        for link in (
            Link("NVLink 3", 300e9, "node", "2020", "NVIDIA A100 data sheet: 600 GB/s, 12 links of 50 GB/s both ways",
                 2e-6, _NVLINK),
            Link("NVLink 4", 450e9, "node", "2022", "NVIDIA H100 data sheet: 900 GB/s, 18 links of 50 GB/s both ways",
                 2e-6, _NVLINK),
            Link("NVLink 5", 900e9, "node", "2024", "NVIDIA Blackwell: 1.8 TB/s, 18 links of 100 GB/s both ways",
                 2e-6, _NVLINK),
            Link("Infinity Fabric (MI300X)", 448e9, "node", "2023", "AMD MI300X data sheet: 7 links of 64 GB/s one way,"
                 " one to each peer: to a single peer 64 GB/s", 2e-6, "assumed: as NVLink (2026)", per_peer=64e9),
            Link("NVLink-C2C", 450e9, "chip", "2023", "NVIDIA GH200 data sheet: 900 GB/s both ways, CPU to GPU",
                 1e-6, "assumed: loads, no library between (2026)"),
            Link("PCIe 3 x16", 15.75e9, "node", "2010", "PCI-SIG: 8 GT/s, 16 lanes, 128b/130b",
                 2.5e-6, _PCIE),
            Link("PCIe 4 x16", 31.5e9, "node", "2017", "PCI-SIG: 16 GT/s, 16 lanes, 128b/130b; copies see 25-28",
                 2.5e-6, _PCIE),
            Link("PCIe 5 x16", 63.0e9, "node", "2019", "PCI-SIG: 32 GT/s, 16 lanes, 128b/130b; copies see 50-60",
                 2.5e-6, _PCIE),
            Link("InfiniBand HDR 200G", 25e9, "cluster", "2018", "200 Gbit/s per port and direction; one NIC",
                 4e-6, f"assumed: as NDR; {_NCCL} 4.0 us over a network"),
            Link("InfiniBand NDR 400G", 50e9, "cluster", "2022", "400 Gbit/s per port and direction; one NIC",
                 4e-6, f"{_NCCL} 4.0 us over a network; {_INSIGHTS} 3.7"),
            Link("InfiniBand XDR 800G", 100e9, "cluster", "2024", "800 Gbit/s per port and direction; one NIC",
                 4e-6, f"assumed: as NDR; {_NCCL} 4.0 us over a network"),
            Link("RoCE 400G", 50e9, "cluster", "2022", "400 Gbit/s Ethernet per port and direction; one NIC",
                 5.6e-6, f"{_INSIGHTS} 5.6 us"),
            Link("AWS EFA 400G", 50e9, "cluster", "2023", "AWS EC2 P5: 3,200 Gbit/s for 8 GPUs, so 400 each",
                 15e-6, "assumed: some four times InfiniBand (2026)"),
            Link("AWS EFA 50G", 6.25e9, "cluster", "2020", "AWS EC2 P4d: 400 Gbit/s for 8 GPUs, so 50 each",
                 15e-6, "assumed: some four times InfiniBand (2026)"),
            Link("Ethernet 100G", 12.5e9, "cluster", "2010", "100 Gbit/s per port and direction",
                 20e-6, "assumed: TCP through the kernel (2026)"),
            Link("NVMe SSD, PCIe 4 x4", 7.0e9, "node", "2020", "sequential reads of fast drives; the lanes give 7.9"),
        )
    }
)  # fmt: skip


def link(name: str) -> Link:
    """The row called `name`; the error lists the names that exist."""
    if name not in LINKS:
        raise KeyError(f"unknown link {name!r}; expected one of {sorted(LINKS)}, or build a Link of your own")
    return LINKS[name]


@dataclass(frozen=True)
class Topology:
    """Ranks 0, 1, ... placed one after another: each `per_node` of them share `inside`, a rank reaches other nodes over
    `between`. alpha and bandwidth of a link are those of one rank. The KeyError names links that exist."""

    name: str
    per_node: int
    inside: Link
    between: Link

    def __post_init__(self) -> None:
        if self.per_node < 1:
            raise ValueError(f"{self.name}: expected at least 1 rank in a node, got {self.per_node}")
        for row in (self.inside, self.between):
            if row.alpha is None:
                raise ValueError(f"{self.name}: {row.name} connects no GPUs; build a Link with an alpha of your own")

    def link(self, a: int, b: int) -> Link:
        """The link between two ranks."""
        return self.inside if a // self.per_node == b // self.per_node else self.between


TOPOLOGIES: Mapping[str, Topology] = MappingProxyType(
    {
        row.name: row
        for row in (
            Topology("DGX A100", 8, LINKS["NVLink 3"], LINKS["InfiniBand HDR 200G"]),
            Topology("DGX H100", 8, LINKS["NVLink 4"], LINKS["InfiniBand NDR 400G"]),
            Topology("HGX H100, RoCE", 8, LINKS["NVLink 4"], LINKS["RoCE 400G"]),
            Topology("AWS P4d", 8, LINKS["NVLink 3"], LINKS["AWS EFA 50G"]),
            Topology("AWS P5", 8, LINKS["NVLink 4"], LINKS["AWS EFA 400G"]),
            Topology("DGX B200", 8, LINKS["NVLink 5"], LINKS["InfiniBand NDR 400G"]),
            # GB200 NVL72 (NVIDIA 2024): all 72 GPUs of a rack share one NVLink 5 domain of 130 TB/s, both ways.
            Topology("NVL72", 72, LINKS["NVLink 5"], LINKS["InfiniBand NDR 400G"]),
            Topology("PCIe 5 server", 8, LINKS["PCIe 5 x16"], LINKS["RoCE 400G"]),
        )
    }
)


def topology(name: str) -> Topology:
    """The row called `name`; the error lists the names that exist."""
    if name not in TOPOLOGIES:
        raise KeyError(f"unknown topology {name!r}; expected one of {sorted(TOPOLOGIES)}, or build a Topology")
    return TOPOLOGIES[name]


def transfer_seconds(num_bytes: Number, bandwidth: Number, latency: Number = 0.0) -> Number:
    """Time of one message: latency + bytes / bandwidth (the alpha-beta model). bandwidth: byte/s in one direction."""
    return latency + num_bytes / bandwidth


def break_even_bandwidth(num_bytes: Number, recompute_seconds: Number) -> Number:
    """Bandwidth in byte/s above which fetching `num_bytes` is faster than computing them again."""
    return num_bytes / recompute_seconds
