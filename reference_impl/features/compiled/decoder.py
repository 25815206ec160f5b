"""A model whose steps of one token run in functions compiled by TorchInductor, torch.compile's back end.

One row times a weight is a loop over the weight as it is stored, so it takes as long as reading the weight. From one
attention to the next lie four such products and a dozen small operators; compiled they are one call, the small
operators are done while the row is in the cache, and weights in 8 bits are widened in registers. Attention, which reads
the cache, and steps of several tokens are computed as before, but with weights as checkpoints store them (`Rows`):
several rows take longer with these than with packed ones.

Sums are made in float32 or wider, and what lies between two products is rounded less often than by single operators:
logits are those of the plain model to rounding.

The functions are compiled while the model is loaded, by a C++ compiler, for as many threads as torch has then: they
take half a minute the first time, and a few seconds in later processes, which find them in TorchInductor's folder.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_impl.core.decoder import Decoder, DecoderLayer, GatedMLP
from reference_impl.core.linear import Linear
from reference_impl.core.model_config import ModelConfig
from reference_impl.features.cpu.by_rows import WeightByRows
from reference_impl.features.cpu.half import slow_half_linear
from reference_impl.interfaces import AttentionBackend, Batch, KVCache
from reference_impl.kernels import reference

# (a layer's params, x [1, in_features]) -> [1, out_features]: what one row is multiplied by, in torch's operators.
Product = Callable[[Mapping[str, Tensor], Tensor], Tensor]
# The compiler's options. What is computed once for a row goes to memory, or it would be computed again for each output
# of the product behind it. A norm of a row is done before a second thread has begun. Shapes and strides are part of the
# key by which a function is found; checking them in each call would take a tenth of the time.
OPTIONS = {
    "compile_threads": 1,
    "cpp.min_chunk_size": 4096,
    "realize_reads_threshold": 1,
    "realize_opcount_threshold": 1,
    "size_asserts": False,
}
_ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


class Rows(WeightByRows):
    """y = x W^T + b, W [out_features, in_features] as it is stored: several rows by torch's product, one row by
    `one_row`, which is to be compiled."""

    def apply(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        product = slow_half_linear if self.dtype.itemsize == 2 and not _multiplies(self.dtype) else F.linear
        return product(x, params["weight"], params.get("bias"))

    @staticmethod
    def one_row(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        y = row_times(params["weight"], x)
        return (y + params["bias"] if "bias" in params else y).to(x.dtype)


def row_times(weight: Tensor, x: Tensor) -> Tensor:
    """The product of a weight [out, in] of any dtype and x [1, in]: [1, out], in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (weight.to(wide) * x.to(wide)).sum(-1)[None]


def _multiplies(dtype: torch.dtype) -> bool:
    return dtype is torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass
class Functions:
    """The compiled functions of a model, by what they are made for: what layers that are alike have in common."""

    config: ModelConfig
    products: Mapping[type, Product]  # by the LinearMethod
    _made: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    # By name and linear layers, with their methods and tensors: where these are the same objects, so is the key of
    # `_made`, and to make it takes longer than to call.
    _found: dict[Any, tuple[list[Any], Callable[..., Any]]] = field(default_factory=dict)

    def __call__(self, name: str, linears: Sequence[Linear], *tensors: Tensor) -> Any:
        """Calls the function of that name with these tensors, which are contiguous, and the linear layers' own."""
        of_linears = [tensor for linear in linears for tensor in linear.params.values()]
        parts, arguments = [*(linear.method for linear in linears), *of_linears], [*tensors, *of_linears]
        known, found = self._found.get((name, *linears), (None, None))
        if found is None or known is None or len(known) != len(parts) or not all(map(operator.is_, known, parts)):
            found = self._of_forms(name, linears, arguments)
            self._found[name, *linears] = parts, found
        return found(*arguments)

    def _of_forms(self, name: str, linears: Sequence[Linear], arguments: Sequence[Tensor]) -> Callable[..., Any]:
        forms = tuple((type(linear.method), tuple(linear.params)) for linear in linears)
        key = name, forms, tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in arguments)
        if key not in self._made:
            self._made[key] = self._compile(getattr(self, name), forms, arguments)
        return self._made[key]

    def _compile(self, function: Callable[..., Any], forms: Sequence[Any], arguments: Sequence[Tensor]) -> Any:
        # Here, since to import them takes as long as to import torch.
        from torch._inductor import compile as compile_graph
        from torch._inductor import exc
        from torch.fx.experimental.proxy_tensor import make_fx

        num_others = len(arguments) - sum(len(names) for _, names in forms)

        def flat(*tensors: Tensor) -> Any:
            rest, multiply = iter(tensors[num_others:]), []
            for method, names in forms:
                params = {name: next(rest) for name in names}
                multiply.append(lambda x, method=method, params=params: self.products[method](params, x))
            return function(multiply, *tensors[:num_others])

        with torch.no_grad():
            graph = make_fx(flat)(*arguments)
            try:
                return compile_graph(graph, [*arguments], options=OPTIONS | {"cpp.threads": torch.get_num_threads()})
            except exc.InductorError as failed:
                if not isinstance(failed.inner_exception, exc.InvalidCxxCompiler | exc.CppCompileError):
                    raise
                raise ValueError(
                    "attention='compiled' expects a C++ compiler (g++ or clang++, or what CXX names) and Python's "
                    f"header files, and torch found: {str(failed).strip().splitlines()[0]}. Install them (on Debian "
                    "g++ and python3-dev), or use attention='torch'"
                ) from failed

    def before(self, multiply: Sequence[Any], x: Tensor, cos: Tensor, sin: Tensor, *norms: Tensor) -> Any:
        """The q, k, v for attention, from the residual stream x [1, hidden_size]."""
        c = self.config
        [qkv], (norm, *qk_norm) = multiply, norms
        heads = qkv(reference.rms_norm(x, norm, c.norm_eps)).view(1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        qk, v = heads[:, : -c.num_kv_heads], heads[:, -c.num_kv_heads :]
        if qk_norm:
            qk = (reference.rms_norm(qk, None, c.norm_eps) * qk_norm[0]).to(qk.dtype)
        a, b = qk.chunk(2, -1)  # reference.rotate rolls, which is a copy of its own here
        qk = (qk * cos + torch.cat((b, a), -1) * sin).to(qk.dtype)
        return qk[:, : c.num_heads], qk[:, c.num_heads :], v

    def after(self, multiply: Sequence[Any], attended: Tensor, x: Tensor, norm: Tensor) -> Tensor:
        """The residual stream behind the layer, from attention's output [1, heads x head_dim] and the stream before."""
        o, gate_up, down = multiply
        x = x + o(attended)
        gate, up = gate_up(reference.rms_norm(x, norm, self.config.norm_eps)).chunk(2, -1)
        return x + down(_ACTIVATIONS[self.config.activation](gate) * up)

    def between(
        self, multiply: Sequence[Any], attended: Tensor, x: Tensor, norm: Tensor, cos: Tensor, sin: Tensor,
        *following: Tensor,
    ) -> Any:  # fmt: skip
        """`after` of a layer, then `before` of the next: x, q, k, v."""
        x = self.after(multiply[:3], attended, x, norm)
        return x, *self.before(multiply[3:], x, cos, sin, *following)

    def end(self, multiply: Sequence[Any], attended: Tensor, x: Tensor, norm: Tensor, last: Tensor) -> Tensor:
        """`after` of the last layer, then the model's norm."""
        return reference.rms_norm(self.after(multiply, attended, x, norm), last, self.config.norm_eps)

    def head(self, multiply: Sequence[Any], hidden: Tensor, lm_head: Tensor) -> Tensor:
        return row_times(lm_head, hidden).to(hidden.dtype)


class CompiledDecoder(Decoder):
    """A decoder with compiled steps of one token. functions: its own. compiles_head: whether the logits of one row are
    compiled too; False where `head` has something better."""

    functions: Functions
    compiles_head: bool

    def hidden_states(self, batch: Batch, kv_cache: KVCache, attention: AttentionBackend) -> Tensor:
        if len(batch.input_ids) != 1 or len(batch.logits_indices) != 1:
            return super().hidden_states(batch, kv_cache, attention)
        attention.plan(batch)
        return self._one_row(
            self.embed(batch.input_ids), batch.positions,
            lambda q, k, v, layer: attention.forward(q, k, v, layer, kv_cache, batch),
        )  # fmt: skip

    def _one_row(self, x: Tensor, position: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        run, layers = self.functions, [*self.layers]
        cos, sin = self.rotary.cos_sin.index_select(1, position).unbind()
        q, k, v = run("before", [layers[0].qkv], x, cos, sin, *_norms_of(layers[0]))
        for layer, following in itertools.pairwise(layers):
            attended, rest = attend(q, k, v, layer.index).flatten(1).contiguous(), (cos, sin, *_norms_of(following))
            linears = [*_behind_attention(layer), _module(following, "qkv")]
            x, q, k, v = run("between", linears, attended, x, layer.mlp_norm, *rest)
        attended = attend(q, k, v, layers[-1].index).flatten(1).contiguous()
        found: Tensor = run("end", _behind_attention(layers[-1]), attended, x, layers[-1].mlp_norm, self.norm)
        return found

    @torch.inference_mode()
    def make_functions(self) -> None:
        """Compiles all functions, by a step that attends to nothing."""
        position = torch.zeros(1, dtype=torch.long)
        self.logits(self._one_row(self.embed(position), position, lambda q, k, v, layer: q.contiguous()))

    def logits(self, hidden: Tensor) -> Tensor:
        if len(hidden) != 1 or not self.compiles_head:
            return super().logits(hidden)
        return self.functions("head", [], hidden, self.embedding if self.lm_head is None else self.lm_head)


def _behind_attention(layer: Any) -> list[Linear]:
    mlp = _module(layer, "mlp")
    return [_module(layer, "o"), _module(mlp, "gate_up"), _module(mlp, "down")]


def _module(parent: nn.Module, name: str) -> Any:
    """The submodule of this name. Reading it as an attribute takes ten times as long."""
    return parent._modules[name]


def _norms_of(layer: Any) -> list[Tensor]:
    return [layer.input_norm] if layer.qk_norm is None else [layer.input_norm, layer.qk_norm]


def check_compilable(model: Decoder, products: Mapping[type, Product]) -> None:
    """Raises ValueError, with the reason, for a model that `CompiledDecoder` cannot compute."""
    reasons = []
    if model.device.type != "cpu":
        reasons.append(f"it is on {model.device}: expected a CPU")
    if type(model) is not Decoder or any(type(layer) is not DecoderLayer for layer in model.layers):
        reasons.append(f"its architecture, {model.config.architecture}, has layers of its own")
    elif any(type(layer.mlp) is not GatedMLP for layer in model.layers):
        reasons.append("its layers have something else than a gated MLP")
    for linear in model.linears():
        if type(linear.method) not in products:
            reasons.append(f"how the weights of {linear.name} are stored ({type(linear.method).__name__})")
    if reasons:
        raise ValueError(f"attention='compiled' does not serve this model: {reasons[0]}. Use attention='auto'")


def compiled(model: Decoder, products: Mapping[type, Product], compiles_head: bool) -> Decoder:
    """Turns the model, with its weights loaded, into a `CompiledDecoder` and returns it. products: {LinearMethod: the
    product of one row}. ValueError for a model that cannot be compiled."""
    check_compilable(model, products)
    model.__class__ = CompiledDecoder  # the same object: its weights are loaded, and others may hold it
    assert isinstance(model, CompiledDecoder)
    model.functions, model.compiles_head = Functions(model.config, products), compiles_head
    model.make_functions()
    return model
