"""The bench of ranks: on a small model here; the whole of it in `make test-all`."""

from __future__ import annotations

from pathlib import Path

import pytest

from reference_impl.assembly.engine import Engine
from reference_impl.assembly.model import load_model
from reference_impl.bench import parallel

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 600}  # fmt: skip


def test_its_model_is_written_and_timed(tmp_path: Path) -> None:
    parallel.make_model(tmp_path, **SMALL)
    engine = Engine(load_model(tmp_path), parallel.CONFIG)
    assert sorted(parallel.timed(engine)) == ["decode", "prefill"]
    prefill, *decode = engine.trace.steps()
    assert [row.length for row in prefill.rows] == [parallel.PROMPT]
    assert len(decode) == parallel.TOKENS - 1


@pytest.mark.slow
def test_the_whole_bench() -> None:
    result = parallel.run(2, **SMALL)
    # An all-reduce for the embedding and two for each layer; the rank's half of the logits of each sampled token.
    tokens, sampled = parallel.PROMPT + parallel.TOKENS - 1, parallel.TOKENS
    assert result["bytes_per_token"] == 4 * (tokens * 5 * 64 + sampled * 300) / tokens
    assert all(row["runs"] == 2 for phase in result["phases"].values() for row in phase.values())
    assert set(result["all_reduce"]) == set(parallel.SIZES)
    assert "two ranks" in parallel.lines(result)[1]
