"""Claims about rooflines and units that the calculators already decide; chapter 00 shows them."""

import pytest

from reference_impl.theory.hardware import device
from reference_impl.theory.units import (
    BytesPerSecond,
    FlopPerByte,
    FlopPerSecond,
    UnitError,
    compute_utilization_ceiling,
)


def test_e00_01_the_ridge_of_an_h100_in_dense_bf16_is_295_flop_per_byte() -> None:
    """Claim: about 500 FLOP per byte. No pair of its data-sheet lines gives that; sparse bf16 or dense fp8 give 591."""
    h100 = device("H100")
    assert h100.ridge("bf16") == pytest.approx(295, abs=0.5)
    assert h100.ridge("fp8") == pytest.approx(591, abs=0.5)
    assert 2 * h100.ridge("bf16") == pytest.approx(h100.ridge("fp8"), rel=1e-3)


def test_e00_07_compute_and_bandwidth_have_no_gap_without_an_intensity() -> None:
    """Claim: memory and compute differ in bandwidth by 10 to 50 times. Bytes and operations per second do not divide.

    With an intensity they do: at 1 FLOP per byte (batch 1, bf16) the tensor cores are at most 0.34 % busy.
    """
    h100 = device("H100")
    compute, bandwidth = FlopPerSecond(h100.peak()), BytesPerSecond(h100.bandwidth)
    with pytest.raises(UnitError, match="arithmetic intensity"):
        compute / bandwidth
    assert compute_utilization_ceiling(FlopPerByte(1.0), compute, bandwidth) == pytest.approx(0.0034, abs=5e-5)
