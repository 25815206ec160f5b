"""What the busiest rank of each stage has of a model: parameters, and values that it caches per token.

As the engine divides a model (`features/parallel/shares.py`): whole KV heads with their query heads, a KV head on
several ranks where there are more ranks than KV heads; columns of MLPs in units of up to 128; the vocabulary by token;
norms and routers on every rank; whole layers to stages; of a mixture columns of every expert, or some experts whole.
Where things do not divide evenly the first rank has one unit more, and a step takes as long as that one.
"""

from __future__ import annotations

from dataclasses import dataclass

from reference_impl.theory.mixtures import Mixture
from reference_impl.theory.model_shapes import ModelShape

_REPLICATED = 1e-3  # what is not a matrix is at most so much of a model: norms, biases, routers


@dataclass(frozen=True)
class RankPart:
    """One rank's parameters. matrices: of attention and MLPs, shared experts among them; experts: routed ones;
    vectors: norms, biases, routers, never quantized; head: the output projection, which a tied embedding is, too.
    kv_values: cached per token; query_share: of the query heads."""

    layers: int
    matrices: float
    experts: float
    vectors: float
    embedding: int
    head: int
    tied: bool
    kv_values: float
    query_share: float

    def weights(self, bits: float, embedding_bits: float | None = None) -> float:
        """Bytes in memory. embedding_bits: of embedding and head, default as the others."""
        tables = self.embedding + (0 if self.tied and self.embedding else self.head)
        return (self.matrices + self.experts) * bits / 8 + 2 * self.vectors + tables * (embedding_bits or bits) / 8

    def read(self, bits: float, embedding_bits: float | None, hit_share: float) -> float:
        """Bytes of weights that a pass reads: all but the embedding, and of the experts a share."""
        matrices = self.matrices + hit_share * self.experts
        return matrices * bits / 8 + 2 * self.vectors + self.head * (embedding_bits or bits) / 8


def heads_of_first(shape: ModelShape, tp: int) -> tuple[int, int]:
    """Query heads and KV heads of the first of tp ranks, which has most. ValueError, with the nearest numbers that
    work, where the heads cannot be divided."""
    group, kv = shape.num_heads // shape.num_kv_heads, shape.num_kv_heads
    if tp <= kv:
        share = -(-kv // tp)
        return share * group, share
    copies = tp // kv
    if tp % kv or copies > group:
        below = max(n for n in range(1, tp) if n <= kv or (n % kv == 0 and n // kv <= group))
        above = next((n for n in range(tp + 1, shape.num_heads + 1) if n % kv == 0), None)
        nearest = f"{below}" if above is None else f"{below} or {above}"
        raise ValueError(
            f"tp={tp}: {shape.num_heads} query heads and {kv} KV heads cannot be divided among {tp} ranks; nearest "
            f"that works: {nearest}"
        )
    return -(-group // copies), 1


def columns_of_first(whole: int, tp: int) -> int:
    """Columns of an MLP that the first of tp ranks has, in units of 128, 64, 32 or 16 where there are enough."""
    unit = next((unit for unit in (128, 64, 32, 16) if whole % unit == 0 and whole // unit >= tp), 1)
    if whole < tp:
        raise ValueError(f"tp={tp}: an MLP has {whole} columns; nearest that works: {whole}")
    return unit * -(-(whole // unit) // tp)


def layers_of_stages(layers: int, layer: float, head: float, pp: int) -> tuple[int, ...]:
    """How many layers each of pp stages has, so that the dearest costs least, as in `shares.stages_of`. layer, head:
    bytes of one layer and of the head, which counts half. ValueError for more stages than layers."""
    if not 1 <= pp <= layers:
        raise ValueError(f"pp={pp}: the model has {layers} layers; nearest that works: {layers}")

    def dearest(n: int, stages: int) -> float:
        if stages == 1:
            return n * layer + head / 2
        return min(max(-(-(n - k) // (stages - 1)) * layer, k * layer + head / 2) for k in range(1, n - stages + 2))

    counts, left = [], layers
    for stages in range(pp, 1, -1):
        least = dearest(left, stages)
        own = next(n for n in range(1, left) if max(n * layer, dearest(left - n, stages - 1)) <= least)
        counts.append(own)
        left -= own
    return (*counts, left)


def rank_parts(shape: ModelShape, mixture: Mixture | None, tp: int, pp: int, ep: int = 1) -> tuple[RankPart, ...]:
    """The busiest rank of each stage. ep: ranks among which experts are divided whole; 1: by columns, among tp.

    Latent attention and hybrids: what is no expert and no embedding is taken to divide evenly; the latent is cached on
    every rank. ValueError where heads, columns, layers or experts cannot be divided so.
    """
    d, vocabulary = shape.hidden_size, -(-shape.vocab_size // tp) * shape.hidden_size
    queries, keys = heads_of_first(shape, tp)
    each = 0 if mixture is None else mixture.layers * mixture.num_experts * mixture.expert_params(d)
    others = shape.num_params - each - shape.embedding_params
    attention = 0 if shape.kv_lora_rank or shape.attention_layers is not None else _attention(shape, *_heads(shape))
    mlp = (3 if shape.gated_mlp else 2) * d * shape.intermediate_size if mixture is None else 0
    known = shape.layers * (attention + mlp)
    own: float
    if attention and 0 <= others - known <= _REPLICATED * shape.num_params:
        vectors = others - known
        columns = columns_of_first(shape.intermediate_size, tp) if mlp else 0
        own = shape.layers * (_attention(shape, queries, keys) + mlp // shape.intermediate_size * columns)
    else:
        vectors, own = 0, others / tp
    experts = 0.0
    if mixture is not None and ep > 1:
        if ep > mixture.num_experts:
            many = mixture.num_experts
            raise ValueError(f"ep={ep}: the model has {many} experts for as many ranks; nearest that works: {many}")
        experts = mixture.layers * -(-mixture.num_experts // ep) * mixture.expert_params(d)
    elif mixture is not None:
        mine = mixture.expert_params(d, columns_of_first(mixture.expert_size, tp))
        experts = mixture.layers * mixture.num_experts * mine
    values = shape.kv_lora_rank + (shape.rope_dim or 0) if shape.kv_lora_rank else 0
    values = (values or keys * (shape.head_dim + shape.value_dim)) * shape.kv_layers
    last = d if vectors else 0  # the last norm is in every stage
    table = shape.vocab_size * d
    per_layer = (shape.num_params - shape.embedding_params) / shape.layers
    parts = []
    stages = layers_of_stages(shape.layers, per_layer, table, pp)
    for stage, count in enumerate(stages):
        share, is_last = count / shape.layers, stage == pp - 1
        has_table = stage == 0 or (is_last and shape.tied_embeddings)
        parts.append(
            RankPart(
                count, share * own, share * experts, last + share * (vectors - last), vocabulary if has_table else 0,
                vocabulary if is_last else 0, shape.tied_embeddings, share * values, queries / shape.num_heads,
            )
        )  # fmt: skip
    return tuple(parts)


def _heads(shape: ModelShape) -> tuple[int, int]:
    return shape.num_heads, shape.num_kv_heads


def _attention(shape: ModelShape, queries: int, keys: int) -> int:
    """Parameters of q, k, v and o with so many heads, one layer."""
    return shape.hidden_size * (queries + keys) * (shape.head_dim + shape.value_dim)
