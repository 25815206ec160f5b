"""Linear layers whose weights come quantized from the checkpoint: kept as they lie there, decoded for each product.

What a step needs of memory beyond that is one decoded part of one layer, in float32 and in the dtype of the model.
Right on any device, and slower than a layer in 16 bits: these products have no kernel of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_impl.interfaces import TensorSpec
from reference_impl.models.quantization.numbers import FORMATS, to_codes, to_values
from reference_impl.models.quantization.scheme import Activations, Scheme, decode
from reference_impl.models.quantization.tensors import fitted_of, specs_of

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Stored:
    """A LinearMethod that `NamesTensors`. Each part (q_proj, ...) has scales of its own: its tensors are kept apart, by
    the part's first output, as "{start}.{name}".

    inverse: scales are named weight_scale_inv (they are factors all the same), as DeepSeek writes them.
    """

    def __init__(self, scheme: Scheme, dtype: torch.dtype, device: torch.device, inverse: bool = False):
        self.scheme, self.dtype, self.device, self.inverse = scheme, dtype, device, inverse

    def __repr__(self) -> str:
        return f"Stored({self.scheme}, multiplied as {self.dtype} after decoding)"

    def tensors(self, in_features: int, out_features: int, bias: bool) -> Mapping[str, TensorSpec]:
        found = specs_of(self.scheme, in_features, out_features, self.inverse)
        return found | ({"bias": TensorSpec((out_features,), FLOATS)} if bias else {})

    def create(self, in_features: int, out_features: int, bias: bool) -> dict[str, Tensor]:
        specs_of(self.scheme, in_features, out_features, self.inverse)  # or an error, before anything is read
        return {"bias": torch.empty(out_features, dtype=self.dtype, device=self.device)} if bias else {}

    def load(self, params: dict[str, Tensor], name: str, tensor: Tensor, start: int) -> None:
        if name == "bias":
            params["bias"][start : start + len(tensor)].copy_(tensor)
            return
        if "scale" in name:
            check_scales(tensor)
        params[f"{start}.{name}"] = tensor.to(self.device)

    def finish(self, params: dict[str, Tensor]) -> None:
        pass

    def weight(self, params: dict[str, Tensor], start: int, in_features: int) -> Tensor:
        """float32 [rows, in] of the part that begins at output `start`."""
        prefix = f"{start}."
        tensors = {name.removeprefix(prefix): t for name, t in params.items() if name.startswith(prefix)}
        codes, fitted = fitted_of(tensors, self.scheme, in_features)
        return decode(codes, self.scheme, fitted)

    def apply(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        starts = sorted({int(name.partition(".")[0]) for name in params if name != "bias"})
        pieces = []
        for start in starts:
            rounded = x
            if self.scheme.activations is not None:
                rounded = round_activations(x, self.scheme.activations, params.get(f"{start}.input_scale"))
            pieces.append(F.linear(rounded, self.weight(params, start, x.shape[1]).to(x.dtype)))
        y = torch.cat(pieces, 1)
        return y.add_(params["bias"]) if "bias" in params else y


def check_scales(scales: Tensor) -> None:
    """ValueError unless all are positive and finite."""
    numbers = scales.int() != 255 if scales.dtype is torch.uint8 else scales.float().isfinite() & (scales.float() > 0)
    if not bool(numbers.all()):
        raise ValueError(
            f"expected positive, finite scales, found {int((~numbers).sum())} of {scales.numel()} that are zero, "
            "negative, infinite or NaN: the file is damaged, or was written by a tool that failed; quantize it again"
        )


def round_activations(x: Tensor, activations: Activations, scale: Tensor | None = None) -> Tensor:
    """x [rows, in] as its codes stand for it, in its own dtype. scale: of a static one, float []."""
    numbers, wide = FORMATS[activations.numbers], x.float()
    if activations.per == "group":
        assert activations.group_size is not None
        missing = -x.shape[1] % activations.group_size
        wide = F.pad(wide, (0, missing)).unflatten(1, (-1, activations.group_size))
    if activations.dynamic:
        largest = wide.abs().amax() if activations.per == "tensor" else wide.abs().amax(-1, keepdim=True)
        steps = (largest / numbers.reach).clamp(min=torch.finfo(torch.float32).tiny)
    else:
        assert scale is not None
        steps = scale.float()
    values = to_values(to_codes(wide / steps, activations.numbers), activations.numbers) * steps
    return values.reshape(len(x), -1)[:, : x.shape[1]].to(x.dtype)
