"""Quantization methods by their names: what is done to a layer's matrices before they are rounded, how they are
rounded, and to which scheme."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from reference_impl.models.quantization.scheme import Activations, Scheme

GROUPS = (128, 64, 32)  # inputs that share a scale, where the scheme does not say how many
INT8_TOKENS = Activations("int8")
NVFP4_INPUTS = Activations("e2m1", "group", group_size=16, scales="e4m3")
MXFP4_INPUTS = Activations("e2m1", "group", group_size=32, scales="e8m0")

SCHEMES: dict[str, Scheme] = {
    "int4": Scheme("int4", "group", 128),
    "int4-zeros": Scheme("int4", "group", 128, symmetric=False),
    "int3": Scheme("int3", "group", 128),
    "int3-zeros": Scheme("int3", "group", 128, symmetric=False),
    "int2": Scheme("int2", "group", 128),
    "int2-zeros": Scheme("int2", "group", 128, symmetric=False),
    "int8": Scheme("int8", "channel"),
    "w8a8": Scheme("int8", "channel", activations=INT8_TOKENS),
    "w4a8": Scheme("int4", "group", 128, activations=INT8_TOKENS),
    "fp8": Scheme("e4m3", "channel", activations=Activations("e4m3")),
    "fp8-weights": Scheme("e4m3", "channel"),
    "fp8-tensor": Scheme("e4m3", "tensor", activations=Activations("e4m3", "tensor", dynamic=True)),
    "fp8-static": Scheme("e4m3", "tensor", activations=Activations("e4m3", "tensor", dynamic=False)),
    "fp8-block": Scheme("e4m3", "block", activations=Activations("e4m3", "group", group_size=128)),
    "nvfp4": Scheme("e2m1", "group", 16, scales="e4m3"),
    "nvfp4-w4a4": Scheme("e2m1", "group", 16, scales="e4m3", activations=NVFP4_INPUTS),
    "mxfp4": Scheme("e2m1", "group", 32, scales="e8m0"),
    "mxfp4-w4a4": Scheme("e2m1", "group", 32, scales="e8m0", activations=MXFP4_INPUTS),
    "mxfp8": Scheme("e4m3", "group", 32, scales="e8m0"),
    "nf4": Scheme("nf4", "group", 64),
    "ternary": Scheme("ternary", "channel"),
}
_FREE = (
    "int2",
    "int2-zeros",
    "int3",
    "int3-zeros",
    "int4",
    "int4-zeros",
    "w4a8",
)  # whose group size follows the matrix


@dataclass(frozen=True)
class Recipe:
    """A method. scheme: the name of one, or names by linear layer, "mixed" precision. rounding: see `gptq.py`; rtn is
    rounding to nearest. scaling: of inputs, folded before (`awq.py`, `smoothquant.py`). rotate: the residual stream
    first (`rotation.py`), with the signs that `seed` gives. group_size: None: the largest of GROUPS that divides the
    inputs. lm_head: its scheme, rounded and clipped as the layers are (scaling is not applied to it); None: it stays as
    it is. A tied one then no longer is.
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
    lm_head: str | None = None

    @property
    def calibrated(self) -> bool:
        return self.rounding == "gptq" or self.scaling != "none" or self.clip or self.scales_inputs

    @property
    def scales_inputs(self) -> bool:
        """Whether a checkpoint has scales for inputs, which come from calibration."""
        known = (SCHEMES[name] for name in {self.scheme, *self.by_layer.values()} if name in SCHEMES)
        return any(scheme.activations is not None and scheme.activations.in_checkpoint for scheme in known)

    def head_scheme(self, in_features: int) -> Scheme | None:
        """lm_head's scheme. Raises ValueError, see `scheme_of`, also for inputs whose scale comes from calibration."""
        if self.lm_head is None:
            return None
        scheme = replace(self, scheme=self.lm_head, by_layer={}).scheme_of("lm_head", in_features)
        if scheme.activations is not None and scheme.activations.in_checkpoint:
            raise ValueError(
                f"lm_head: expected a scheme whose inputs need no scale from calibration, got {self.lm_head}: choose "
                "int8, fp8 or another"
            )
        return scheme

    def scheme_of(self, name: str, in_features: int) -> Scheme:
        """The scheme of the linear layer `name`. Raises ValueError where its inputs are no whole groups."""
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
    "gptq-int3": Recipe("int3-zeros", rounding="gptq"),
    "gptq-int2": Recipe("int2-zeros", rounding="gptq"),
    "rotate": Recipe(rotate=True),
    "rotate-gptq": Recipe(rounding="gptq", rotate=True),
    **{name: Recipe(name) for name in SCHEMES if name not in ("int4",)},
}
"""rtn, gptq, awq and the rotations round to int4 unless another scheme is named; smoothquant to w8a8. A scheme's own
name rounds to nearest."""
