"""Linear layers. A LinearMethod decides how the weight is stored and multiplied, so quantization can replace it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypedDict, Unpack, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_impl.interfaces import LinearMethod, NamesTensors, TensorSpec
from reference_impl.kernels.reference import Activation
from reference_impl.layers import packed_linear
from reference_impl.layers.by_rows import WeightByRows

_FEW_ROWS = 8
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of weights that are not quantized

Methods = Callable[[str], LinearMethod]  # from the name of a linear layer; names: see `Linear`


class Neighbours(TypedDict, total=False):
    """What stands around a product; shapes and dtypes are those of kernels/reference/fused_linear.py."""

    norm: Tensor
    eps: float  # of the norm
    gate: Activation | None
    residual: Tensor


@runtime_checkable
class FusedMethod(LinearMethod, Protocol):
    """A LinearMethod that computes residual + gate(norm(x) W^T + b) in one launch, of up to few_tokens tokens."""

    few_tokens: int

    def fused(self, params: dict[str, Tensor], x: Tensor, **neighbours: Unpack[Neighbours]) -> Tensor: ...


class UnquantizedLinear:
    """y = x W + b with W [in_features, out_features]: the checkpoint's matrix turned over.

    A few rows times W then walk memory in order: for 1 to 4 rows of float32 on one CPU thread, 1.4 to 1.8 times as
    fast as F.linear over the course model's products.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device

    def create(self, in_features: int, out_features: int, bias: bool) -> dict[str, Tensor]:
        params = {"weight": torch.empty(in_features, out_features, dtype=self.dtype, device=self.device)}
        if bias:
            params["bias"] = torch.empty(out_features, dtype=self.dtype, device=self.device)
        return params

    def load(self, params: dict[str, Tensor], name: str, tensor: Tensor, start: int) -> None:
        params[name].t()[start : start + tensor.shape[0]].copy_(tensor)  # .t() of a bias is the bias

    def finish(self, params: dict[str, Tensor]) -> None:
        pass

    def apply(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        if "bias" in params:
            return torch.addmm(params["bias"], x, params["weight"])
        return torch.mm(x, params["weight"])


class SlowHalfLinear(WeightByRows):
    """y = x W^T + b in 16 bits, for a CPU that cannot multiply them; W [out_features, in_features], as it is stored.

    torch then has a loop for such products, which is good for a few rows and W by rows (for W by columns, ten times
    slower and more). Many rows are faster in float32, though the weight is converted for each product: seen with AVX2
    over the course model's products, 0.6 of the time at 16 rows, 0.4 at 32, and 0.2 at 64. Either way sums are made in
    float32, and rounded once.
    """

    def apply(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return slow_half_linear(x, params["weight"], params.get("bias"))


def slow_half_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `SlowHalfLinear` says. x [rows, in_features], weight [out_features, in_features] -> [rows, out_features]."""
    if len(x) <= _FEW_ROWS:
        return F.linear(x, weight, bias)
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def default_method(dtype: torch.dtype, device: torch.device) -> LinearMethod:
    """Packed weights on a CPU where they pay, plain ones elsewhere; the numbers agree to rounding."""
    if device.type == "cpu" and packed_linear.pays(dtype):
        return packed_linear.PackedLinear(dtype)
    if device.type == "cpu" and dtype.itemsize == 2:
        return SlowHalfLinear(dtype)
    return UnquantizedLinear(dtype, device)


class HeadCopy:
    """(x [rows, hidden_size], lm_head [vocab_size, hidden_size]) -> logits, from a copy of lm_head that is made at the
    first call, as the method stores weights. lm_head itself stays: where it is tied, tokens are looked up in it.
    """

    def __init__(self, method: LinearMethod):
        self.method = method
        self.params: dict[str, Tensor] = {}

    def __call__(self, x: Tensor, lm_head: Tensor) -> Tensor:
        if not self.params:
            params = self.method.create(lm_head.shape[1], lm_head.shape[0], False)
            self.method.load(params, "weight", lm_head, 0)
            self.method.finish(params)
            self.params = params
        return self.method.apply(self.params, x)

    def weight_bytes(self) -> int:
        """Of the copy; 0 before the first call."""
        return sum(tensor.nbytes for tensor in self.params.values())


class Linear(nn.Module):
    """A linear layer made of one or more of the checkpoint's, stacked by rows (q, k, v; gate, up).

    One large matrix multiplication instead of three small ones reads x once and launches once.
    parts: {name in the checkpoint: its number of rows}.

    name: where the parts are in the checkpoint, then qkv_proj, o_proj, gate_up_proj or down_proj, in all families:
        model.layers.3.self_attn.qkv_proj            of q_proj, k_proj and v_proj
        model.layers.3.mlp.gate_up_proj              of gate_proj and up_proj
        model.layers.3.mlp.experts.5.down_proj       of expert 5
        model.layers.3.block_sparse_moe.experts.5.gate_up_proj    of Mixtral's w1 and w3; its w2 is down_proj
    """

    def __init__(
        self,
        method: LinearMethod,
        in_features: int,
        parts: dict[str, int],
        bias: bool = False,
        name: str = "",
    ):
        super().__init__()
        self.method, self.parts, self.in_features, self.has_bias, self.name = method, parts, in_features, bias, name
        # The method again, if it has the ability.
        self.fusing = method if isinstance(method, FusedMethod) else None
        self.naming = method if isinstance(method, NamesTensors) else None
        self.out_features = sum(parts.values())
        self.params = method.create(in_features, self.out_features, bias)

    def num_parameters(self) -> int:
        return self.out_features * (self.in_features + self.has_bias)

    def weight_bytes(self) -> int:
        """Memory of the weight as it is stored, with its scales and bias: what a decoding step reads of it."""
        return sum(tensor.nbytes for tensor in self.params.values())

    def row_of(self, part: str) -> int:
        """First row of a part in the stacked matrix."""
        names = list(self.parts)
        return sum(self.parts[name] for name in names[: names.index(part)])

    def tensors(self, part: str) -> Mapping[str, TensorSpec]:
        """What a checkpoint has of a part, by the last word of the tensor's name."""
        rows = self.parts[part]
        if self.naming is not None:
            found = self.naming.tensors(self.in_features, rows, self.has_bias)
            _check_named(found, f"{self.name}, {part}: {type(self.method).__name__}.tensors")
            return found
        weight = {"weight": TensorSpec((rows, self.in_features), FLOATS)}
        return weight | {"bias": TensorSpec((rows,), FLOATS)} if self.has_bias else weight

    def load(self, part: str, name: str, tensor: Tensor) -> None:
        """Takes in one of the `tensors` of a part."""
        self.method.load(self.params, name, tensor, self.row_of(part))

    def forward(self, x: Tensor) -> Tensor:
        return self.method.apply(self.params, x)


def _check_named(found: object, where: str) -> None:
    """TypeError unless a method has named tensors as `NamesTensors` says."""
    if not isinstance(found, Mapping):
        raise TypeError(f"{where}: expected {{name: TensorSpec(shape, dtypes)}}, got {found!r}")
    for name, spec in found.items():
        right = isinstance(spec, tuple) and len(spec) == 2 and all(isinstance(part, tuple) for part in spec)
        shape, dtypes = spec if right else ((), ())
        right = right and all(type(size) is int for size in shape) and all(isinstance(d, torch.dtype) for d in dtypes)
        if not right or not dtypes or not isinstance(name, str) or not name:
            raise TypeError(
                f"{where}: expected {{name: TensorSpec(shape, dtypes)}}, with tuples of numbers and of torch dtypes, "
                f"got {name!r}: {spec!r}"
            )


def methods_of(given: LinearMethod | Methods) -> Methods:
    """One method for all layers, or a function that is asked for each. TypeError for anything else; of what a function
    gives, it names the layer."""
    expected = "expected a LinearMethod (create, load, finish, apply)"
    if isinstance(given, type):
        raise TypeError(f"linear_method: {expected}, got the class {given.__name__}: make one of it")
    if isinstance(given, LinearMethod):
        return lambda name: given
    if not callable(given):
        raise TypeError(f"linear_method: {expected}, or a function from a layer's name to one, got {given!r}")

    def ask(name: str) -> LinearMethod:
        method = given(name)
        if isinstance(method, type):
            raise TypeError(f"linear_method({name!r}): {expected}, got the class {method.__name__}: make one of it")
        if not isinstance(method, LinearMethod):
            raise TypeError(f"linear_method({name!r}): {expected}, got {method!r}")
        return method

    return ask
