"""The clock on the wall; a simulation brings its own."""

from __future__ import annotations

import time


class WallClock:
    """Seconds since an arbitrary moment; never goes back."""

    now = staticmethod(time.perf_counter)
