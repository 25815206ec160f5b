"""What is done to a model's matrices, layer by layer, and what the tables say of it."""

from __future__ import annotations

import pytest
import torch

from reference_impl.assembly.config import course_model
from reference_impl.assembly.model import load_model
from reference_impl.bench import compression
from reference_impl.bench.compression import CHANGES, PLAIN, bits_per_weight, change, markdown
from reference_impl.models.compression.low_rank import rank_for
from reference_impl.models.quantization.folding import matrix

TOKENS = torch.arange(48).view(2, 24) * 37 % 4000 + 5


@pytest.mark.parametrize("name", CHANGES)
def test_every_matrix_becomes_what_its_name_says(name: str) -> None:
    model, plain = (load_model(course_model("draft"), torch.float32, linear_method=PLAIN) for _ in range(2))
    change(model, TOKENS, CHANGES[name][0])
    for linear, before in zip(model.linears(), plain.linears(), strict=True):
        weight, was = matrix(linear), matrix(before)
        if "rank" in name:
            rank = rank_for(*was.shape, 0.5)
            values = torch.linalg.svdvals(weight.double())
            assert float(values[rank]) < 1e-5 * float(values[0])
            assert float(values[rank - 1]) > 1e-3 * float(values[0])
            continue
        kept = weight != 0
        assert torch.equal(weight[kept], was[kept])
        groups = kept.unflatten(1, (-1, 4)).sum(-1) if "2:4" in name else kept.sum(1)
        assert int(groups.max()) == (2 if "2:4" in name else was.shape[1] // 2)


def test_what_is_stored() -> None:
    """[4, 8]: half of 32 values of 16 bits, and a bit a weight; factors: rank 1 of 12 numbers."""
    assert bits_per_weight([(4, 8)], "bitmap") == bits_per_weight([(4, 8)], "2:4") == 9
    assert bits_per_weight([(4, 8)], "factors") == 16 * 12 / 32


def test_products_are_compared_with_the_dense_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "REPEATS", 1)
    record = {"products": [compression.products(8, rows, 1) for rows in (1, 3)]}
    said = markdown(record)
    assert "| 50% zeros, CSR | " in said
    assert said.count("\n| 9") == 4
    with pytest.raises(SystemExit, match="2"):
        compression.main(["--fast"])
