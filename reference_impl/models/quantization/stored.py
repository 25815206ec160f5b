"""Linear layers whose weights come quantized from the checkpoint: kept as they lie there, decoded for each product.

Beyond that a step needs memory for one decoded part of one layer, in float32 and in the dtype of the model. It is right
on any device, and slower than a layer in 16 bits: these products have no kernel of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_impl.interfaces import TensorSpec
from reference_impl.models.quantization.layouts import FLOATS, Layout
from reference_impl.models.quantization.numbers import E8M0_BIAS, FORMATS, to_codes, to_values
from reference_impl.models.quantization.scheme import EXPONENT, Activations

_INPUT_SCALES = (
    "input_scale", "activation_scale", "input_global_scale", "_weight_act_quant_scale", "_weight_act_per_tensor_scale",
)  # fmt: skip


class Stored:
    """A LinearMethod that `NamesTensorsOfParts`, of one layer. Each part (q_proj, ...) has a layout of its own, and its
    tensors are kept apart, by the part's first output, as "{start}.{name}".

    layouts: {name of a part in the checkpoint: its layout}, in the order of their rows.
    """

    def __init__(self, layouts: Mapping[str, Layout], dtype: torch.dtype, device: torch.device):
        self.layouts, self.dtype, self.device = dict(layouts), dtype, device
        self._rows: dict[str, int] = {}
        self.in_features = 0  # until `tensors_of` has been told

    def __repr__(self) -> str:
        return f"Stored({self.named_layouts()}; multiplied as {self.dtype} after decoding)"

    def named_layouts(self) -> str:
        """The names of the layouts as a text, each once."""
        return ", ".join(map(str, dict.fromkeys(self.layouts.values())))

    def tensors_of(self, part: str, in_features: int, out_features: int, bias: bool) -> Mapping[str, TensorSpec]:
        try:
            found = self.layouts[part].specs(in_features, out_features)
        except ValueError as wrong:
            raise ValueError(f"{part}, {out_features} x {in_features}: {wrong}") from None
        self._rows[part], self.in_features = out_features, in_features
        return found | ({"bias": TensorSpec((out_features,), FLOATS)} if bias else {})

    def create(self, in_features: int, out_features: int, bias: bool) -> dict[str, Tensor]:
        return {"bias": torch.empty(out_features, dtype=self.dtype, device=self.device)} if bias else {}

    def load(self, params: dict[str, Tensor], name: str, tensor: Tensor, start: int) -> None:
        if name == "bias":
            params["bias"][start : start + len(tensor)].copy_(tensor)
            return
        self.layout_at(start).check(name, tensor)
        self._check_shape(name, tensor, start)
        params[f"{start}.{name}"] = tensor.to(self.device)

    def _check_shape(self, name: str, tensor: Tensor, start: int) -> None:
        """Raises ValueError for a wrong shape of a packed matrix; compressed-tensors repeats the shape in a tensor."""
        expected = [list(self._rows.values())[self.starts().index(start)], self.in_features]
        if name == "weight_shape" and tensor.tolist() != expected:
            raise ValueError(f"expected {expected}, the matrix's [outputs, inputs], found {tensor.tolist()}")

    def finish(self, params: dict[str, Tensor]) -> None:
        pass

    def starts(self) -> list[int]:
        """The first output of each part."""
        return [0, *itertools.accumulate(self._rows[part] for part in self.layouts)][:-1]

    def layout_at(self, start: int) -> Layout:
        """The layout of the part that begins at output `start`."""
        return dict(zip(self.starts(), self.layouts.values(), strict=True))[start]

    def weight(self, params: dict[str, Tensor], start: int, in_features: int) -> Tensor:
        """The weight of the part that begins at output `start`, float32 [rows, in]."""
        return self.layout_at(start).weight(self.tensors_at(params, start), in_features)

    def tensors_at(self, params: dict[str, Tensor], start: int) -> dict[str, Tensor]:
        """{last word of its name in the checkpoint: tensor}, for the part that begins at output `start`."""
        prefix = f"{start}."
        return {name.removeprefix(prefix): t for name, t in params.items() if name.startswith(prefix)}

    def input_scale(self, params: dict[str, Tensor], start: int) -> Tensor | None:
        """What the checkpoint has to round the input of the part that begins at output `start`; None: nothing."""
        names = (f"{start}.{word}" for word in _INPUT_SCALES)
        return next((params[name] for name in names if name in params), None)

    def apply(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        pieces = []
        for start, layout in zip(self.starts(), self.layouts.values(), strict=True):
            rounded = x
            if layout.activations is not None:
                rounded = round_activations(x, layout.activations, self.input_scale(params, start))
            pieces.append(F.linear(rounded, self.weight(params, start, x.shape[1]).to(x.dtype)))
        y = torch.cat(pieces, 1)
        return y.add_(params["bias"]) if "bias" in params else y


def round_activations(x: Tensor, activations: Activations, scale: Tensor | None = None) -> Tensor:
    """x [rows, in] as its codes stand for it, in its own dtype: products of 4-bit formats are emulated in it. scale: of
    a static scheme, float []; of NVFP4 its input_global_scale."""
    wide = x.float()
    if activations.per == "group":
        assert activations.group_size is not None
        missing = -x.shape[1] % activations.group_size
        wide = F.pad(wide, (0, missing)).unflatten(1, (-1, activations.group_size))
    if not activations.symmetric:
        return _round_asymmetric(wide, activations).to(x.dtype)
    steps = _steps(wide, activations, scale)
    values = to_values(to_codes(wide / steps, activations.numbers), activations.numbers) * steps
    return values.reshape(len(x), -1)[:, : x.shape[1]].to(x.dtype)


def _round_asymmetric(wide: Tensor, activations: Activations) -> Tensor:
    """x in int8 from the least to the largest number of a token or of all, 0 among them, as in torchao 0.18."""
    numbers = FORMATS[activations.numbers]
    assert numbers.least is not None
    assert numbers.most is not None
    low, high = wide.amin(-1, keepdim=True).clamp(max=0), wide.amax(-1, keepdim=True).clamp(min=0)
    if activations.per == "tensor":
        low, high = low.amin(), high.amax()
    steps = ((high - low) / (numbers.most - numbers.least)).clamp(min=torch.finfo(torch.float32).eps)
    zeros = (numbers.least - (low / steps).round()).clamp(numbers.least, numbers.most)
    codes = ((wide * (1 / steps)).round() + zeros).clamp(numbers.least, numbers.most)
    return (codes - zeros) * steps


def _steps(wide: Tensor, activations: Activations, scale: Tensor | None) -> Tensor:
    """What codes are multiplied with, as in compressed-tensors 0.20; where the rule says so, as in torchao 0.18."""
    if activations.rule == "torchao":
        return _steps_of_torchao(wide, activations, scale)
    if not activations.dynamic:
        assert scale is not None
        return scale.float()
    reach = FORMATS[activations.numbers].reach
    largest = wide.abs().amax() if activations.per == "tensor" else wide.abs().amax(-1, keepdim=True)
    if activations.scales == "e8m0":
        mantissas, exponents = torch.frexp(largest)  # from 7/8 on of a power of two, that power: so 6 is not exceeded
        exponents = exponents - 1 + (mantissas >= 0.875).int() - EXPONENT[activations.numbers]
        exponents = torch.where(largest > 0, exponents, torch.full_like(exponents, -E8M0_BIAS))
        return torch.ldexp(torch.ones_like(largest), exponents.clamp(-E8M0_BIAS, E8M0_BIAS))
    if activations.scales == "e4m3":
        assert scale is not None
        found = (scale.float() * (largest / reach)).clamp(max=448.0).to(torch.float8_e4m3fn).float()
        return torch.where(found == 0, 0.125, found) / scale.float()  # of a 0 nothing but 0 is left
    return (largest / reach).clamp(min=torch.finfo(torch.float32).tiny)


def _steps_of_torchao(wide: Tensor, activations: Activations, scale: Tensor | None) -> Tensor:
    """What codes are multiplied with: for MX the least power of two with which no number is too large (RCEIL); for
    NVFP4 an e4m3 from 2^-6 on, times one number for all: the checkpoint's, or what makes the largest 448."""
    reach = FORMATS[activations.numbers].reach
    largest = wide.abs().amax(-1, keepdim=True)
    if activations.scales == "e8m0":
        exponents = torch.ceil(torch.log2(largest / reach)).clamp(-E8M0_BIAS, E8M0_BIAS)
        return torch.ldexp(torch.ones_like(largest), exponents.int())
    whole = largest.amax().clamp(min=torch.finfo(torch.float32).tiny) / (448.0 * reach) if scale is None else scale
    return (largest / reach / whole).clamp(2.0**-6, 448.0).to(torch.float8_e4m3fn).float() * whole
