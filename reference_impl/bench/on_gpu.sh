#!/usr/bin/env bash
# One command for a machine with one GPU and nothing installed: kernels are compiled on all cores, then come the tests
# that need it, then the bench. Ten minutes.
#   bash reference_impl/bench/on_gpu.sh [options of `bench gpu`]
# OUT: where results, tables and logs go; PYTHON: which interpreter; LIMIT: seconds for everything; WARM: for compiling
# ahead, 0: compile nothing; TESTS: for the tests.
# INFERLAB_COMMIT: what the results are stamped with where the sources came without git.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-reference_impl/bench/results}
mkdir -p "$OUT"
OUT=$(realpath "$OUT")
PYTHON=${PYTHON:-python3}
LIMIT=${LIMIT:-570} WARM=${WARM:-60} TESTS=${TESTS:-120}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
SECONDS=0

# The processes that it starts are ended with it.
if ((WARM > 0)); then
    timeout --kill-after=5 $((WARM + 45)) "$PYTHON" -m reference_impl.bench gpu --warm "$WARM" --seconds 0 --no-save 2>&1 |
        tee "$OUT/warm.log" # no time is left for a case
fi

mapfile -t FILES < <(grep -rlE 'mark\.gpu' tests --include='test_*.py' | sort)
timeout --signal=INT --kill-after=10 "$TESTS" \
    "$PYTHON" -m pytest -q -p no:cacheprovider -m gpu "${FILES[@]}" 2>&1 | tee "$OUT/tests.log"
tests=$?

# What is left, less what the table, the last case and the copying take.
"$PYTHON" -m reference_impl.bench gpu --seconds $((LIMIT - SECONDS - 30)) --warm 0 --out "$OUT/gpu.json" "$@" 2>&1 |
    tee "$OUT/gpu.log"
bench=$?
echo "tests $tests, bench $bench, after $SECONDS s; in $OUT: gpu.json, gpu.md, gpu.log, tests.log"
exit $((tests != 0 || bench != 0))
