"""Every link has one direction, one scope and a source; a message takes latency and bytes over bandwidth."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory import links


@pytest.mark.parametrize("name", links.LINKS)
def test_every_link_names_its_scope_year_and_source(name: str) -> None:
    row = links.link(name)
    assert row.name == name
    assert row.scope in ("chip", "node", "cluster")
    assert re.fullmatch(r"20[12]\d", row.since)
    assert row.source
    assert row.both_directions == 2 * row.per_direction


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("NVLink 3", 12 * 50 / 2),
        ("NVLink 4", 18 * 50 / 2),
        ("NVLink 5", 18 * 100 / 2),
        ("NVLink-C2C", 900 / 2),
        ("Infinity Fabric (MI300X)", 7 * 64),
        ("PCIe 3 x16", 16 * 8 * 128 / 130 / 8),
        ("PCIe 4 x16", 16 * 16 * 128 / 130 / 8),
        ("PCIe 5 x16", 16 * 32 * 128 / 130 / 8),
        ("InfiniBand NDR 400G", 400 / 8),
        ("Ethernet 100G", 100 / 8),
    ],
)
def test_bandwidth_of_one_direction_follows_from_lanes_and_rates(name: str, gigabytes: float) -> None:
    assert links.link(name).per_direction / 1e9 == pytest.approx(gigabytes, rel=1e-3)


def test_a_drive_stays_below_the_lanes_it_sits_on() -> None:
    assert links.link("NVMe SSD, PCIe 4 x4").per_direction < links.link("PCIe 4 x16").per_direction / 4


def test_an_unknown_link_is_answered_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"NVLink 4.*build a Link of your own"):
        links.link("NVLink 9")


@given(st.floats(0, 1e12), st.floats(1e6, 1e12), st.floats(0, 1))
def test_a_message_takes_its_latency_and_its_bytes_over_bandwidth(size: float, rate: float, latency: float) -> None:
    seconds = links.transfer_seconds(size, rate, latency)
    assert seconds == pytest.approx(latency + size / rate)
    assert links.transfer_seconds(0, rate, latency) == latency
    assert links.transfer_seconds(size, rate) == size / rate


@given(st.floats(1, 1e12), st.floats(1e-6, 1e3))
def test_at_the_break_even_bandwidth_fetching_takes_as_long_as_recomputing(size: float, recompute: float) -> None:
    rate = links.break_even_bandwidth(size, recompute)
    assert links.transfer_seconds(size, rate) == pytest.approx(recompute)
    assert links.transfer_seconds(size, 2 * rate) < recompute


def test_arrays_of_mixed_shapes_give_what_scalars_give() -> None:
    size, rate = np.array([[1e3], [1e9]]), np.array([1e9, 50e9, 450e9])
    swept = links.transfer_seconds(size, rate, 1e-6)
    assert swept.shape == (2, 3)
    assert swept[1, 2] == links.transfer_seconds(1e9, 450e9, 1e-6)
    assert links.break_even_bandwidth(size, rate).shape == (2, 3)
