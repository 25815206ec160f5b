"""The occupancy explorer: every line of the compile table has a picture, and says what theory says."""

import re

import pytest

from chapters.widgets import occupancy
from chapters.widgets.occupancy import draw, kernels, table, taken
from reference_impl.theory import occupancy as theory
from reference_impl.theory.occupancy import SMS

FLASH = "flash_attention, head_dim 128: flash_attention"


@pytest.mark.usefixtures("painted")
def test_every_line_of_the_table_can_be_chosen_and_fits_where_it_was_compiled_for() -> None:
    seen = 0
    for kernel in kernels():
        for gpu in SMS:
            takes = taken(kernel, gpu)
            if takes is not None:
                seen += 1
                line = table()[f"{kernel}, {gpu}"]
                assert (takes["registers"], takes["shared_bytes"]) == (line["registers"], line["shared_bytes"])
                assert theory.occupancy(gpu, **takes).blocks >= 1, (kernel, gpu)
    assert seen == len(table())


def test_the_picture_says_what_binds() -> None:
    alt = draw(FLASH, "sm_90", 0, 100).alt
    takes = taken(FLASH, "sm_90")
    assert takes is not None
    it = theory.occupancy("sm_90", **takes)
    assert f"{takes['registers']} registers per thread" in alt
    assert f"{it.warps} of 64 warps ({it.share:.0%}), limited by {' and '.join(it.binding)}." in alt


def test_fewer_registers_and_less_shared_memory_hold_more_until_something_else_binds() -> None:
    takes = taken(FLASH, "sm_90", fewer_registers=160, shared_percent=25)
    before = taken(FLASH, "sm_90")
    assert takes is not None
    assert before is not None
    assert takes["registers"] == before["registers"] - 160
    assert takes["shared_bytes"] == before["shared_bytes"] // 4
    assert theory.occupancy("sm_90", **takes).blocks > theory.occupancy("sm_90", **before).blocks


def test_a_kernel_that_is_too_large_is_said_not_to_start() -> None:
    large = next(n for n in kernels() if (t := taken(n, "sm_90")) and t["shared_bytes"] > 120 * 1024)
    alt = draw(large, "sm_90", 0, 200).alt
    assert "IT CANNOT BE LAUNCHED" in alt
    assert alt.endswith("(shared memory).")


def test_a_line_that_is_not_in_the_table_has_a_sentence_instead() -> None:
    assert draw(FLASH, "sm_75", 0, 100).alt == (
        f"{FLASH} is not compiled for sm_75 (T4): it has no types or no matrix units for it."
    )


@pytest.mark.usefixtures("painted")
def test_every_control_redraws() -> None:
    view = occupancy()
    for name, values in {"gpu": list(SMS), "kernel": kernels()[:3], "fewer_registers": [0, 160]}.items():
        for value in values:
            view.controls[name].value = value
            assert re.search(r'<img [^>]*alt="[^"]{40,}"', view.picture.value), (name, value)
    data = occupancy()._repr_mimebundle_()
    assert "<img " in data["text/html"]
    assert "warps" in data["text/plain"]


def test_a_wrong_name_is_refused() -> None:
    with pytest.raises(KeyError):
        draw(FLASH, "sm_12", 0, 100)
