"""The outlier viewer names the largest activation and the error of INT8 at every setting."""

import re

import numpy as np
import pytest

from chapters.widgets import outliers
from chapters.widgets.outliers import SHARED

X = np.random.default_rng(0).standard_normal((24, 40))
X[5, 17] = 90.0


def test_every_setting_shows_the_error_done_by_hand() -> None:
    view = outliers({"planted": X, "plain": np.abs(X[:4])})
    for axis, shared in zip((None, 1, 0), SHARED, strict=True):
        view.controls["shared"].value = shared
        scale = np.abs(X).max(axis, keepdims=True) / 127
        back = np.round(X / scale) * scale
        error = np.sqrt(np.square(back - X).sum() / np.square(X).sum())
        assert f"error {error:.2%}, {np.mean(back == 0):.1%} become 0" in view.shown.alt
        assert "(token 5, channel 17)" in view.shown.alt
    view.controls["tensor"].value = "plain"
    assert re.search(r'<img [^>]*alt="plain: [^"]{20,}"', view.picture.value)


def test_what_is_no_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"flat: expected \[tokens, channels\]"):
        outliers({"flat": np.ones(5)})
    with pytest.raises(ValueError, match="that are not all 0"):
        outliers({"zeros": np.zeros((2, 2))})
