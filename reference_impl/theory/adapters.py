"""Low-rank adapters (LoRA, Hu et al. 2021): beside W [d_in, d_out] two matrices [d_in, rank] and [rank, d_out]."""

from __future__ import annotations

from collections.abc import Sequence

from reference_impl.theory.model_shapes import ModelShape
from reference_impl.theory.units import Number


def lora_params(shape: ModelShape, rank: Number, targets: Sequence[str] | None = None) -> Number:
    """Parameters of one adapter: layers * sum of rank * (d_in + d_out) over the adapted matrices.

    targets: names in `shape.layer_matrices`; None adapts all of them. Raises ValueError for a name it does not have.
    """
    matrices = shape.layer_matrices
    unknown = sorted(set(targets or ()) - matrices.keys())
    if unknown:
        raise ValueError(f"{shape.name}: expected targets among {list(matrices)}, got {unknown}; correct the names")
    adapted = matrices if targets is None else {name: matrices[name] for name in targets}
    return shape.layers * rank * sum(d_in + d_out for d_in, d_out in adapted.values())
