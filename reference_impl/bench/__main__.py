"""The benches from the source tree, with nothing installed: `python -m reference_impl.bench NAME`."""

import sys

from reference_impl.bench.names import main

if __name__ == "__main__":
    sys.exit(main())
