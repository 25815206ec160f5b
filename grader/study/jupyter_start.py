"""Starts JupyterLab like `python -m jupyterlab`, but Ctrl-C while it is being imported ends it quietly.

Once it runs, it asks what Ctrl-C should do.
"""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    try:
        importlib.import_module("jupyterlab.labapp").main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
