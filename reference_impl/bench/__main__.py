"""`python -m reference_impl.bench NAME`, from the source tree, with nothing installed."""

import sys

from reference_impl.bench.names import main

if __name__ == "__main__":
    sys.exit(main())
