"""`python -m reference_impl.bench kernels`, from the source tree: what a GPU machine can run with nothing installed."""

from __future__ import annotations

import sys


def main() -> int:
    if sys.argv[1:2] == ["kernels"]:
        from reference_impl.bench import kernels

        return kernels.main(sys.argv[2:])
    print("expected: python -m reference_impl.bench kernels [--help]; other benches: inferlab bench", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
