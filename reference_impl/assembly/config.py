"""The engine's options, and where the course models are. For a model's own, see core/model_config.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from reference_impl.core.model_config import ModelConfig, RopeConfig
from reference_impl.features.kv_formats.formats import kv_format
from reference_impl.models.config_reader import ConfigError

__all__ = [
    "ConfigError",
    "EngineConfig",
    "ModelConfig",
    "RopeConfig",
    "course_model",
]


@dataclass(frozen=True)
class EngineConfig:
    """The engine's options: how much it may use, and how it divides its work.

    block_size: tokens in a KV block. num_blocks: None takes what kv_cache_bytes pays for; only one of the two can be
    given. kv_cache_bytes: None is 256 MiB, but on a GPU what the largest step leaves of memory_percent of its memory
    (see features/sizing/profile.py), and no more than max_num_seqs sequences of max_model_len need. vLLM's
    gpu_memory_utilization is a hundredth of memory_percent, but here what other processes hold on the GPU counts, too:
    of two engines with half of it each, the second has to say 100. On a CPU, whose memory is shared, neither has an
    effect.
    max_num_batched_tokens: the budget of new tokens in one step (long prompts are cut into chunks).
    prefix_cache: "hash" (chain of block hashes), "radix" (tree of tokens), "off", or "auto": hash, except for models
    with sliding windows, which cannot share prefixes. Parts.prefix_index takes the place of any of them, also of "off".
    admission: "fill" or "worst_case"; preemption: "recompute" or "swap" (see Scheduler). swap_bytes: host memory for
    requests that are swapped out.
    seed: if given, requests without a seed of their own get one that follows from it and from how many came before;
    None: a new one each time. Their texts are then the same in each run only if steps and drafts are, too.
    speculative: who drafts a request's next tokens: "ngram" (what followed its last tokens before), "suffix"
    (the same by the longest match), "draft" (a smaller model, LLM(draft_model=...) or Parts.draft_model), "eagle" (a
    feature head for this model, given likewise), "mtp" (its module of multi-token prediction), "medusa" (Medusa heads
    for it, likewise), "early-exit" (the model's first layers, as many as exit_layer says; 0: half), "lookahead" (the
    model itself, by Jacobi iteration; lookahead: columns of its window, length of its n-grams, candidates; (): 3, 3 and
    3), "off", or a proposer in Parts. Drafts change no text that is greedy or has a seed of its own, and of others no
    distribution. num_drafts: the most drafts of a decoding request that are verified in a step; 0 with a method's name:
    4. adaptive_drafts: no more of them than pay, by how often they are kept and what steps take, and no draft model
    where it does not pay; "auto": where `speculative` names a method.
    sampling_noise: the random numbers that tokens are drawn with. "one-number": one for each position, which picks a
    token by the cumulative distribution; "gumbel": one for every token, see features/gumbel/sampler.py: more of a draft
    model's tokens are kept for requests with a seed, and a draw takes longer. Seeded texts differ between the two,
    distributions do not.
    acceptance: "typical" (Medusa's) keeps drafts that are plausible, p(x) > min(0.09, 0.3 exp(-entropy of p)). It keeps
    more of them and is lossy: texts of requests with a temperature no longer have the model's distribution, and seeded
    ones are others. Greedy texts stay the same.
    draft_tree: with "eagle", drafts in a tree instead of a chain: how many each node of a level has behind it,
    such as (4, 2, 2), or paths, see features/speculative/tree.py; or "dynamic" (EAGLE-2): grown in each step where the
    head is sure, num_drafts of them (0: 12), also with width and levels, "dynamic,4,4". Several candidates for a
    position are kept more often, and cost a token each in the step.
    attention: whose kernels compute it: "triton" (ours), "torch", or "auto": Triton on a GPU that it supports. Or
    "compiled", for one stream on a CPU: torch's, and in steps of one token all between two attentions is compiled while
    the model is loaded (half a minute the first time, with a C++ compiler; features/compiled). Several rows take longer
    than with "torch".
    kv_dtype: the format of keys and values in the cache: "auto" (the model's own), "fp8" (e4m3, and a scale for each
    head of a token), "fp8_e5m2", "int8" (the same with other codes), "int4" (two in a byte; a scale and the lowest
    number for each head of a token); see features/kv_formats/formats.py.
    overlap: plan step N + 1 while step N runs; "auto": on a GPU, and with an executor that runs stages.
    graphs: steps in which all rows decode, with drafts or without, are replayed as CUDA graphs; "auto": on a GPU, with
    our kernels. The model's pass is captured, and the choice of tokens if nothing but tokens is needed (no
    log-probabilities, penalties, biases, grammar, rejection); its hidden states are handed out to heads. A draft
    model's passes of one token per row are captured, with their logits: all but the first of a draft model, all of a
    feature head and of early exit. A draft model's first pass, a head's over the step's tokens and its first draft
    token, Medusa heads, and what draws and verifies drafts are launched one by one. In steps with draft trees the
    model's pass is captured, and the head's over inner nodes, up to 512 tokens each, but not the choice of tokens.
    Batch-invariant steps have no graphs.
    batch_invariant: logits have the same bits whatever else is in the batch, since each token goes through the model by
    itself (features/invariant). Otherwise rounding depends on the batch, and can change a token at the boundary of a
    draw; with weights in 8 or 4 bits more often, since a CPU has another product for 8 rows or more.
    step_seconds: for a worker in a process of its own: a step that is not answered after so many seconds is an error,
    and the worker is ended. Of several ranks, how long none of them may come to a collective, but at most 30.
    tensor_parallel_size: how many ranks divide the model, each with a part of every layer (features/parallel).
    pipeline_parallel_size: how many stages divide the model, each with some of the layers. With both options each
    stage has tensor_parallel_size ranks.
    enable_expert_parallel: of a mixture of experts each rank has some experts, whole, and not columns of each; for
    tensor_parallel_size above 1.
    """

    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    memory_percent: float = 90
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    prefix_cache: Literal["auto", "hash", "radix", "off"] = "auto"
    admission: Literal["fill", "worst_case"] = "fill"
    preemption: Literal["recompute", "swap"] = "recompute"
    swap_bytes: int = 64 * 1024**2
    speculative: Literal["off", "ngram", "suffix", "draft", "eagle", "mtp", "medusa", "early-exit", "lookahead"] = "off"
    exit_layer: int = 0
    lookahead: Sequence[int] = ()
    num_drafts: int = 0
    draft_tree: Sequence[int] | Sequence[Sequence[int]] | str = ()
    acceptance: Literal["exact", "typical"] = "exact"
    sampling_noise: Literal["one-number", "gumbel"] = "one-number"
    adaptive_drafts: Literal["auto", "on", "off"] = "auto"
    seed: int | None = None
    attention: Literal["auto", "triton", "torch", "compiled"] = "auto"
    kv_dtype: str = "auto"
    overlap: Literal["auto", "on", "off"] = "auto"
    graphs: Literal["auto", "on", "off"] = "auto"
    step_seconds: int = 300
    batch_invariant: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False

    @property
    def is_divided(self) -> bool:
        """Whether the model is divided among ranks."""
        return self.tensor_parallel_size > 1 or self.pipeline_parallel_size > 1

    def __post_init__(self) -> None:
        optional = ("num_blocks", "kv_cache_bytes", "max_model_len", "seed")
        may_be_0 = ("num_drafts", "exit_layer", "seed")
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if choices := get_args(kind) if get_origin(kind) is Literal else ():
                if value not in choices:
                    raise ValueError(f"EngineConfig.{name}: expected one of {', '.join(choices)}, got {value!r}")
            elif name in ("draft_tree", "lookahead"):
                if value != ():
                    _check_shape(name, value)
            elif kind is bool:
                if not isinstance(value, bool):
                    raise ValueError(f"EngineConfig.{name}: expected True or False, got {value!r}")
            elif kind is str:
                if not isinstance(value, str):
                    raise ValueError(f"EngineConfig.{name}: expected a name, got {value!r}")
                kv_format(value)  # raises ValueError for a name that is not in the table of formats
            elif value is None and name in optional:
                continue
            elif kind is float:
                if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 100:
                    raise ValueError(f"EngineConfig.{name}: expected a number from 1 to 100, got {value!r}")
            elif isinstance(value, bool) or not isinstance(value, int) or value < (name not in may_be_0):
                kind = "an integer of at least 0" if name in may_be_0 else "a positive integer"
                raise ValueError(f"EngineConfig.{name}: expected {kind}, got {value!r}")
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError("EngineConfig.enable_expert_parallel: expected tensor_parallel_size above 1, got 1")
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise ValueError(
                f"EngineConfig: expected num_blocks or kv_cache_bytes, got both ({self.num_blocks} and "
                f"{self.kv_cache_bytes}): leave one out"
            )


def _check_shape(name: str, value: Any) -> None:
    """Raises ValueError for a draft_tree or a lookahead that is no valid shape."""
    from reference_impl.features.speculative.growth import Growth
    from reference_impl.features.speculative.lookahead import Shape
    from reference_impl.features.speculative.tree import Tree

    if name == "lookahead":
        Shape.of(value)
    elif isinstance(value, str):
        Growth.of(value)
    else:
        Tree.of(value)


COURSE_MODELS = ("target", "draft", "eagle", "mtp", "medusa")


def course_model(name: str = "target") -> Path:
    """The folder of a course model, in the checkout or installed with the package: "target", "draft", or the target's
    "eagle" (a feature head), "mtp" (a module of multi-token prediction) or "medusa" (heads). FileNotFoundError if it is
    in neither."""
    package = Path(__file__).resolve().parents[1]
    places = (
        package.parent / "datasets" / "course_model" / name,
        package.parent / "inferlab_data" / "course_model" / name,
    )
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise FileNotFoundError(f"course model {name!r} not found; looked in {' and '.join(map(str, places))}")
