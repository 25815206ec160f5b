"""`python -m reference_impl.bench kernels | gpu | gates | ...`, from the source tree, with nothing installed."""

from __future__ import annotations

import importlib
import sys

BENCHES = ("kernels", "gpu", "gates", "compression", "kv_formats", "against_llmcompressor", "cpu_llama", "readme")


def main() -> int:
    if sys.argv[1:2] and sys.argv[1] in BENCHES:
        bench = importlib.import_module(f"reference_impl.bench.{sys.argv[1]}")
        return int(bench.main(sys.argv[2:]))
    words = " | ".join(f"python -m reference_impl.bench {name}" for name in BENCHES)
    asked = sys.argv[1:] in (["--help"], ["-h"])
    said = f"{words} [--help]; other benches: inferlab bench"
    print(said if asked else f"expected: {said}", file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
