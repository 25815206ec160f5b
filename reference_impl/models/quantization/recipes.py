"""Quantization methods by their names: what is done to a layer's matrices before they are rounded, how they are
rounded, and to which scheme."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from reference_impl.models.quantization.scheme import Activations, Scheme

GROUPS = (128, 64, 32)  # inputs that share a scale, where the scheme does not say how many
INT8_TOKENS = Activations("int8")

SCHEMES: dict[str, Scheme] = {
    "int4": Scheme("int4", "group", 128),
    "int4-zeros": Scheme("int4", "group", 128, symmetric=False),
    "int8": Scheme("int8", "channel"),
    "w8a8": Scheme("int8", "channel", activations=INT8_TOKENS),
    "w4a8": Scheme("int4", "group", 128, activations=INT8_TOKENS),
    "fp8": Scheme("e4m3", "channel", activations=Activations("e4m3")),
    "fp8-weights": Scheme("e4m3", "channel"),
    "fp8-tensor": Scheme("e4m3", "tensor", activations=Activations("e4m3", "tensor", dynamic=True)),
    "fp8-block": Scheme("e4m3", "block", activations=Activations("e4m3", "group", group_size=128)),
    "nvfp4": Scheme("e2m1", "group", 16, scales="e4m3"),
    "mxfp4": Scheme("e2m1", "group", 32, scales="e8m0"),
    "mxfp8": Scheme("e4m3", "group", 32, scales="e8m0"),
    "nf4": Scheme("nf4", "group", 64),
    "ternary": Scheme("ternary", "channel"),
}
_FREE = ("int4", "int4-zeros", "w4a8")  # whose group size follows the matrix


@dataclass(frozen=True)
class Recipe:
    """scheme: the name of one, or names by linear layer, "mixed" precision. rounding: see `gptq.py`; rtn is rounding to
    nearest. scaling: of inputs, folded before (`awq.py`, `smoothquant.py`). rotate: the residual stream first
    (`rotation.py`), with the signs that `seed` gives. group_size: None: the largest of GROUPS that divides the inputs.
    """

    scheme: str = "int4"
    rounding: Literal["rtn", "gptq"] = "rtn"
    scaling: Literal["none", "awq", "smoothquant"] = "none"
    rotate: bool = False
    group_size: int | None = None
    damping: float = 0.01
    act_order: bool = True
    alpha: float = 0.5
    clip: bool = False
    seed: int = 0
    by_layer: Mapping[str, str] = field(default_factory=dict)

    @property
    def calibrated(self) -> bool:
        return self.rounding == "gptq" or self.scaling != "none" or self.clip

    def scheme_of(self, name: str, in_features: int) -> Scheme:
        """Of the linear layer `name`. ValueError where its inputs are no whole groups."""
        known = self.by_layer.get(name, self.scheme)
        if known not in SCHEMES:
            raise ValueError(f"scheme: expected one of {', '.join(SCHEMES)}, got {known!r}")
        scheme = SCHEMES[known]
        if scheme.per != "group":
            return scheme
        sizes = (self.group_size,) if self.group_size else GROUPS if known in _FREE else (scheme.group_size or 1,)
        for size in sizes:
            if in_features % size == 0:
                return replace(scheme, group_size=size)
        raise ValueError(
            f"{name}: expected a number of inputs that is a multiple of {' or '.join(map(str, sizes))}, the size of a "
            f"group, got {in_features}: choose a group size that divides it, or a scheme per channel (int8, fp8)"
        )


METHODS: dict[str, Recipe] = {
    "rtn": Recipe(),
    "gptq": Recipe(rounding="gptq"),
    "awq": Recipe(scaling="awq", clip=True),  # the authors' two steps: scales, then how much of a group to cut
    "smoothquant": Recipe("w8a8", scaling="smoothquant"),
    "rotate": Recipe(rotate=True),
    "rotate-gptq": Recipe(rounding="gptq", rotate=True),
    **{name: Recipe(name) for name in SCHEMES if name not in ("int4",)},
}
"""rtn, gptq, awq and the rotations round to int4 unless another scheme is named; smoothquant to w8a8."""
