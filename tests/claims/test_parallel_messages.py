"""What chapter 12b says of messages: numbers of its text, and E12.12's compressed all-reduce."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from reference_impl.features.parallel import all_reduce as ways
from reference_impl.features.parallel.threads import ThreadGroup
from reference_impl.theory.collectives import all_reduce_message
from reference_impl.theory.hardware import device
from reference_impl.theory.links import Link, link, topology
from reference_impl.theory.schedules import closed, stepped
from reference_impl.theory.units import KiB, MiB


def test_a_vector_of_16_kib_takes_36_ns_of_bytes_and_a_ring_of_8_has_14_messages() -> None:
    assert 16 * KiB / 450e9 * 1e9 == pytest.approx(36, abs=0.5)
    assert all_reduce_message(1, 8192) == 16 * KiB
    assert stepped("ring", 16 * KiB, 8, topology("DGX H100")).steps == 14


def sent(way: ways.AllReduce, length: int, size: int) -> int:
    """Bytes that the first of `size` ranks sends for a vector of so many float32."""
    group = ThreadGroup(size)
    ranks = [group.rank(rank) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda rank: way(rank, torch.ones(length)), ranks))
    return ranks[0].num_bytes


def test_four_bits_pay_for_large_messages_on_slow_links_and_not_for_a_token() -> None:
    """Claim: INT4 all-reduces are 3.18 times as fast. With a scale for each 32 numbers they have 3.2 times fewer bytes
    than 16 bits. Eight ranks, three passes over the vector in device memory for the codes (assumed): 64 MiB over PCIe 5
    gain 2.9 times, over NVLink 1.8; a token's 16 KiB gain 1 and 6 %."""
    plain, codes = sent(ways.two_shot, 32768, 8), sent(ways.quantized(4), 32768, 8)
    fewer = plain / 2 / codes  # of 16 bits: half of float32
    assert fewer == pytest.approx(3.2)

    def gain(size: int, where: Link) -> float:
        assert where.alpha is not None
        moved, coding = 2 * 7 / 8 * size, 3 * size / device("H100").bandwidth
        exact = 2 * where.alpha + moved / where.per_direction
        return exact / (2 * where.alpha + moved / fewer / where.per_direction + coding)

    nvlink, pcie = link("NVLink 4"), link("PCIe 5 x16")
    assert [gain(64 * MiB, where) for where in (nvlink, pcie)] == pytest.approx([1.82, 2.89], abs=0.01)
    assert [gain(16 * KiB, where) for where in (nvlink, pcie)] == pytest.approx([1.01, 1.06], abs=0.01)


def test_a_ring_of_a_hundred_thousand_ranks_takes_most_of_a_second() -> None:
    """200,000 messages in a row, of 4 µs between nodes; a tree has 34."""
    where = topology("DGX H100")
    assert closed("ring", 64 * MiB, 100_000, where).seconds == pytest.approx(0.80, abs=0.01)
    assert closed("tree", 64 * MiB, 100_000, where).steps == 34
