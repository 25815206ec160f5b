"""The command where nothing is installed: python -m reference_impl.cli profile"""

import sys

from reference_impl.cli import app
from reference_impl.cli.messages import run

if __name__ == "__main__":
    sys.exit(run(app))
