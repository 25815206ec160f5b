"""The planner against arithmetic by hand, the register of numbers, and what the engine has on each of its ranks."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.model import build_model
from reference_impl.assembly.ranks import ranked_engine
from reference_impl.assembly.worker_half import kv_specs_of
from reference_impl.core.model_config import ModelConfig
from reference_impl.features.parallel import shares
from reference_impl.features.parallel.stages import part_of
from reference_impl.features.parallel.threads import ThreadGroup, ThreadRank
from reference_impl.interfaces import SamplingParams
from reference_impl.models.loader import destinations
from reference_impl.models.shapes import SHAPES, config_of_shape
from reference_impl.theory import rank_parts
from reference_impl.theory.layout_costs import Layout
from reference_impl.theory.mixtures import mixture_of, read_config
from reference_impl.theory.model_shapes import MODELS, model
from reference_impl.theory.names import find_device, find_link, find_model
from reference_impl.theory.plan import Plan, plan

COMMON = {"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "torch_dtype": "bfloat16"}
LLAMA_70B = COMMON | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8,
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
MIXTRAL = COMMON | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip
# Fewer layers and positions: a rank is built for each case.
QWEN3_MOE = SHAPES["qwen3-30b-a3b"] | {"model_type": "qwen3_moe", "num_hidden_layers": 3, "max_position_embeddings": 64}
SMALL = SHAPES["qwen3-0.6b"] | {"model_type": "qwen3", "num_hidden_layers": 5, "max_position_embeddings": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3-70b": LLAMA_70B, "mixtral-8x7b": MIXTRAL, "qwen3-a3b, three layers": QWEN3_MOE, "tied, five layers": SMALL,
}  # fmt: skip


def only(found: Plan) -> Any:
    assert len(found.layouts) == 1
    return found.best


def test_decode_floors_are_those_of_the_register() -> None:
    """140 GB on H100 of 3.35 TB/s, with 160 all-reduces of 10 us: 140/3350 s on one, then a share and 1.6 ms."""
    said = {"weight_bytes": 140e9, "all_reduce_seconds": 10e-6, "pp": 1, "dp": 1}
    by_hand = [140 / 3350 / n * 1e3 + (1.6 if n > 1 else 0) for n in (1, 2, 4, 8)]
    assert by_hand == pytest.approx([41.8, 22.5, 12.0, 6.8], abs=0.05)
    on_one = plan("llama-3-70b", "h100", 8, weight_bytes=140e9, all_reduce_seconds=10e-6)
    floors = {each.name: each.floor for each in (*on_one.layouts, *on_one.rejected)}
    assert floors["dp 8"] * 1e3 == pytest.approx(by_hand[0]), "it does not fit, and has its floor all the same"
    for n, floor in zip((2, 4, 8), by_hand[1:], strict=True):
        assert only(plan("llama-3-70b", "h100", n, **said)).floor * 1e3 == pytest.approx(floor)  # type: ignore[arg-type]


def test_with_its_true_size_less_the_embedding_the_floors_are_a_little_lower() -> None:
    """70,553,706,496 parameters, less 128,256 x 8,192 of the input embedding, in 16 bits."""
    read = 2 * (70_553_706_496 - 128_256 * 8192)
    found = only(plan("llama-3-70b", "h100", 8, tp=8, all_reduce_seconds=10e-6))
    assert found.floor * 1e3 == pytest.approx(read / 8 / 3.35e9 + 1.6, rel=1e-3)
    assert found.floor * 1e3 == pytest.approx(6.8, abs=0.05)


def test_tokens_left_for_the_cache_are_those_of_the_register() -> None:
    """327,680 bytes a token. The register counts 70.55e9 parameters: 8,850 at TP 2. The ranks' 70,553,706,496, with
    norms on each of them, leave 8,819."""
    for n, tokens in ((2, 8850), (4, 448e3), (8, 1.33e6)):
        by_hand = (n * 0.9 * 80e9 - 2 * 70.55e9) / 327_680
        assert by_hand == pytest.approx(tokens, rel=3e-3)
        said = only(plan("llama-3-70b", "h100", n, pp=1, dp=1, weight_bytes=2 * 70.55e9))
        assert said.kv_tokens == int(by_hand)
        assert only(plan("llama-3-70b", "h100", n, pp=1, dp=1)).kv_tokens == pytest.approx(tokens, rel=4e-3)


def test_one_shot_and_ring_meet_at_two_megabytes_on_eight_gpus() -> None:
    """13 x 2 us x 450 GB/s / (7 - 7/4)."""
    assert plan("llama-3-70b", "h100", 8).break_even == pytest.approx(13 * 2e-6 * 450e9 / 5.25)
    assert plan("llama-3-70b", "h100", 8).break_even / 1e6 == pytest.approx(2.2, abs=0.05)


def test_a_decode_step_and_a_prompt_by_hand() -> None:
    """Llama-3-70B on eight H100 at their limits, 32 requests, prompts of 1,000 tokens, outputs of 201.

    A step reads 1/8 of the weights and of the cache of 32 x 1,100 tokens, and sums 161 tensors of 512 KiB in two shots,
    each 2 us and 7/8 of the tensor at 450 GB/s; the logits go round a ring in 7 steps. A prompt is arithmetic: 2 FLOP a
    weight and token, attention, and one row of logits.
    """
    found = only(plan("llama-3-70b", "h100", 8, tp=8, batch=32, prompt_tokens=1000, output_tokens=201, mfu=1, mbu=1))
    params = 70_553_706_496 - 128_256 * 8192
    hidden = 32 * 8192 * 2
    messages = 161 * 2 * (2e-6 + hidden * 7 / 8 / 450e9) + 7 * (2e-6 + 32 * 128_256 * 2 / 8 / 450e9)
    step = (2 * params + 32 * 1100.5 * 327_680) / 8 / 3.35e12 + messages
    assert found.step == pytest.approx(step, rel=1e-3)
    linear = 2 * ((params - 128_256 * 8192) * 1000 + 128_256 * 8192)
    pairs = 4 * 80 * 64 * 128 * (1000 * 1001 / 2)
    prompt_messages = 161 * 2 * (2e-6 + 1000 * 8192 * 2 * 7 / 8 / 450e9) + 7 * (2e-6 + 128_256 * 2 / 8 / 450e9)
    prompt = (linear + pairs) / 8 / 989.4e12 + prompt_messages
    assert found.ttft == pytest.approx(prompt, rel=1e-3)
    assert found.tpot == pytest.approx(step + 31 * prompt / 200, rel=1e-3)
    assert found.tokens_per_second == pytest.approx(32 * 201 / (32 * prompt + 200 * step), rel=1e-3)
    assert found.per_token["NVLink 4"] == pytest.approx(161 * 16384 * 2 * 7 / 8 + 128_256 * 2 * 7 / 8)
    assert found.communication == pytest.approx(messages / step, rel=1e-3)


def test_stages_take_turns_and_hand_over_between_nodes() -> None:
    """Two stages of eight GPUs in two nodes. Alone, a request is in one stage after the other; 32 requests are two
    groups of 16, each in another stage. A hidden state of 16 KiB a token goes over InfiniBand."""
    alone = only(plan("llama-3-70b", "h100", 16, tp=8, pp=2, batch=1))
    of_both = only(plan("llama-3-70b", "h100", 16, tp=8, pp=2, batch=32))
    assert alone.per_token["InfiniBand NDR 400G"] == of_both.per_token["InfiniBand NDR 400G"] == 16384
    layout = Layout(plan("llama-3-70b", "h100", 16).setting, 8, 2, 1)
    first, second = layout.seconds(1, 1, 1024 + 127)
    assert alone.step == pytest.approx(first + second)
    assert of_both.step == pytest.approx(2 * max(layout.seconds(16, 1, 1024 + 127)), rel=1e-2)


def test_experts_by_hand() -> None:
    """Mixtral on four GPUs, one token: two of eight experts of 3 x 4,096 x 14,336 in each of 32 layers. By columns a
    rank reads a quarter of both; with whole experts the busiest reads one."""
    expert = 3 * 4096 * 14336 * 2
    for ep, experts in ((1, 2 / 4), (4, 1)):
        layout = Layout(plan("mixtral-8x7b", "h100", 4).setting, 4, 1, 1, ep)
        [part] = layout.parts
        others = 2 * (part.matrices + part.vectors + part.head)
        assert layout.read(part, 0, 1) == pytest.approx(32 * experts * expert + others)
    calls = {(m.what, m.collective): m.calls for m in layout.messages(8, 1)}
    assert calls["experts", "direct all-to-all"] == 2 * 32
    assert calls["experts", "all-gather"] == calls["attention", "all-reduce, one-shot"] == 32
    assert ("MLP", "all-reduce, one-shot") not in calls


# ---------------------------------------------------------------- as the engine divides a model


def of_rank(config: ModelConfig, tp: int, pp: int, place: int, by_expert: bool) -> Any:
    """A rank's model on the meta device."""
    cut = None if pp == 1 else shares.stages_of(*layer_bytes(config), pp)
    part = part_of(ThreadGroup(tp * pp, width=tp).rank(place), cut, by_expert)
    made = build_model(part.config_of(config), device="meta", kernels="torch")
    part.shrink(made)
    return made


def layer_bytes(config: ModelConfig) -> tuple[list[int], int]:
    whole = build_model(config, device="meta", kernels="torch")
    tables = config.vocab_size * config.hidden_size
    others = whole.num_parameters() - tables * (1 if config.tied_embeddings else 2) - config.hidden_size
    return [2 * others // config.num_layers] * config.num_layers, 2 * tables


CASES = [
    ("llama-3-70b", 1, 1, False), ("llama-3-70b", 8, 1, False), ("llama-3-70b", 16, 1, False),
    ("llama-3-70b", 3, 2, False), ("llama-3-70b", 4, 3, False), ("mixtral-8x7b", 4, 1, False),
    ("mixtral-8x7b", 4, 2, True), ("mixtral-8x7b", 3, 1, True), ("qwen3-a3b, three layers", 8, 1, True),
    ("qwen3-a3b, three layers", 4, 1, False), ("tied, five layers", 2, 1, False), ("tied, five layers", 3, 2, False),
    ("tied, five layers", 1, 4, False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "tp", "pp", "by_expert"), CASES)
def test_bytes_of_weights_and_cache_are_those_of_the_engines_ranks(
    name: str, tp: int, pp: int, by_expert: bool
) -> None:
    config = config_of_shape(CONFIGS[name])
    shape, mixture = read_config(CONFIGS[name], name)
    parts = rank_parts.rank_parts(shape, mixture, tp, pp, tp if by_expert else 1)
    for stage, part in enumerate(parts):
        rank = of_rank(config, tp, pp, stage * tp, by_expert)
        assert part.layers == len(rank.layers)
        assert part.weights(16) == 2 * rank.num_parameters(), "the first rank of a stage has most"
        specs = kv_specs_of(rank.config, torch.bfloat16, EngineConfig(block_size=16), 64)
        assert 16 * 2 * part.kv_values == sum(spec.bytes_per_block for spec in specs)


@pytest.mark.parametrize("name", ["llama-3-70b", "mixtral-8x7b"])
def test_a_config_file_counts_as_the_table(name: str) -> None:
    shape, mixture = read_config(CONFIGS[name], name)
    table = model(name)
    assert (shape.num_params, shape.active_params) == (table.num_params, table.active_params)
    expected = mixture_of(table)
    assert mixture == (None if expected is None else replace(expected, source="config"))


@pytest.mark.parametrize(("layers", "head"), [(80, 1.2), (32, 0.1), (28, 20.0), (7, 3.0), (126, 0.6)])
def test_layers_of_stages_are_the_engines(layers: int, head: float) -> None:
    for pp in range(1, min(layers, 9)):
        stages = shares.stages_of([100] * layers, round(100 * head), pp)
        assert rank_parts.layers_of_stages(layers, 100, round(100 * head), pp) == tuple(map(len, stages))


@pytest.mark.parametrize(("heads", "kv"), [(64, 8), (32, 32), (9, 3), (71, 1), (48, 1), (128, 8)])
def test_heads_go_where_they_go_in_the_engine(heads: int, kv: int) -> None:
    shape = replace(model("llama-3-70b"), num_heads=heads, num_kv_heads=kv)
    for tp in range(1, heads + 3):
        try:
            first = shares.head_shares(heads, kv, tp)[0]
        except ValueError:
            with pytest.raises(ValueError, match=rf"tp={tp}: {heads} query heads and {kv} KV heads.* works: \d+"):
                rank_parts.heads_of_first(shape, tp)
            continue
        assert rank_parts.heads_of_first(shape, tp) == (first[0].length, first[1].length)


@pytest.mark.parametrize("whole", [14336, 28672, 768, 1536, 100, 29568])
def test_columns_go_where_they_go_in_the_engine(whole: int) -> None:
    for tp in (1, 2, 3, 5, 8, 12, 16, 64):
        assert rank_parts.columns_of_first(whole, tp) == shares.columns(whole, tp)[0].length


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small mixture with random weights, saved as a checkpoint."""
    fields = MIXTRAL | {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 96,
    }  # fmt: skip
    path = tmp_path_factory.mktemp("mixture")
    (path / "config.json").write_text(json.dumps(fields), "utf-8")
    named = destinations(build_model(config_of_shape(fields), device="meta", kernels="torch"))
    random = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(spec.shape, generator=random) for name, (spec, _) in named.items()}
    save_file({name: (0.1 * weight).bfloat16() for name, weight in weights.items()}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(("tp", "by_expert"), [(2, False), (4, False), (2, True), (4, True)])
def test_messages_of_a_step_are_those_that_ranks_show_each_other(
    folder: Path, tp: int, by_expert: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight requests decode on ranks that are threads. Counted is what all ranks show in the last step."""
    shown: dict[int, dict[str, list[int]]] = {}
    plain = ThreadRank.meet

    def meet(rank: ThreadRank, call: str, x: torch.Tensor) -> list[torch.Tensor]:
        shown.setdefault(rank.step, {}).setdefault(f"{call} of {rank.place}", []).append(x.nbytes)
        return plain(rank, call, x)

    monkeypatch.setattr(ThreadRank, "meet", meet)
    config = EngineConfig(num_blocks=64, tensor_parallel_size=tp, enable_expert_parallel=by_expert)
    engine = ranked_engine(folder, config, dtype="bfloat16", ranks="threads")
    try:
        for number in range(8):
            engine.add([number, 5, 7], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True), f"r{number}")
        while engine.has_work():
            engine.step()
    finally:
        engine.close()
    shape, mixture = read_config(json.loads((folder / "config.json").read_text("utf-8")), "small")
    setting = replace(plan("llama-3-8b", "h100", tp).setting, shape=shape, mixture=mixture)
    expected = Layout(setting, tp, 1, 1, tp if by_expert else 1).messages(8, 1)
    last = shown[max(shown)]

    def of_all(call: str) -> list[int]:
        return [sum(sizes) for sizes in zip(*(last.get(f"{call} of {i}", []) for i in range(tp)), strict=True)]

    def said(collective: str) -> list[int]:
        return sorted(m.payload for m in expected if collective in m.collective for _ in range(m.calls))

    assert sorted(of_all("all_reduce")) == [tp * size for size in said("all-reduce")], "each shows the whole tensor"
    assert sorted(of_all("all_gather")) == said("all-gather"), "each shows its part"
    # Three for each layer: counts of rows, rows, and what the experts made of them.
    rows = [size for place, size in enumerate(of_all("all_to_all")) if place % 3]
    assert sorted(rows) == [tp * size for size in said("all-to-all")]


# ---------------------------------------------------------------- which is first, and what cannot be


def test_of_layouts_that_keep_the_times_the_one_with_most_tokens_is_first() -> None:
    found = plan("llama-3-70b", "h100", 8, ttft=0.5, tpot=0.05)
    kept = [not each.misses for each in found.layouts]
    assert kept == sorted(kept, reverse=True)
    speeds = [each.tokens_per_second for each in itertools.takewhile(lambda each: not each.misses, found.layouts)]
    assert len(speeds) > 2
    assert speeds == sorted(speeds, reverse=True)
    assert all(each.tpot <= 0.05 and each.ttft <= 0.5 for each in found.layouts if not each.misses)
    assert found.why.startswith(f"{found.best.name}: ")
    assert "and it keeps what is asked" in found.why


def test_for_one_stream_it_is_the_widest() -> None:
    found = plan("llama-3-70b", "h100", 8, batch=1)
    assert found.best.name == "tp 8"
    assert found.best.tokens_per_second == pytest.approx(256 / (found.best.ttft + 255 * found.best.tpot))


def test_times_that_none_keeps_are_said_with_the_nearest() -> None:
    found = plan("llama-3-70b", "h100", 8, tpot=0.001)
    assert found.why.startswith("no layout keeps what is asked; tp 8 comes nearest: TPOT ")
    assert found.best.batch == 1
    assert all(each.misses for each in found.layouts)


def test_a_rate_is_met_with_the_fewest_requests_at_once() -> None:
    found = only(plan("llama-3-70b", "h100", 8, tp=8, rate=3))
    seconds = found.ttft + 255 * found.tpot
    assert found.tokens_per_second == pytest.approx(3 * 256, rel=0.15)
    assert found.batch == pytest.approx(3 * seconds, abs=1.5), "Little's law"


def test_every_model_of_the_table_has_a_plan() -> None:
    for name in (name for name, shape in MODELS.items() if shape.num_params < 1e11):
        assert plan(name, "h200", 8).best.tokens_per_second > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lama-3-70b", "h100", 8), "there is no model 'lama-3-70b'; nearest: llama-3-70b or"),
        (("llama-3-70b", "h1000", 8), "there is no GPU 'h1000'; nearest: H100"),
        (("llama-3-70b", "h100", 0), "num_devices: expected at least 1, got 0"),
        (
            ("llama-3-70b", "h100", 1),
            "nothing fits: one GPU: 141 GB of weights on a GPU with 72.0 GB to use: 69.1 GB missing. Nearest that "
            "works: 2 GPUs, or weights of 8 bits",
        ),
        (("llama-3.1-405b", "h100", 8), "29.5 GB missing. Nearest that works: 12 GPUs, or weights of 8 bits"),
    ],
)
def test_what_cannot_be_is_one_line_with_the_nearest_that_works(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^[^\n]*$") as caught:
        plan(*arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_devices": 12, "tp": 12}, "tp=12: 64 query heads and 8 KV heads cannot be divided among 12 ranks; near"),
        ({"tp": 3}, "tp=3 does not divide 8 GPUs; nearest that works: 2 or 4"),
        ({"tp": 4, "pp": 4}, "tp=4 pp=4: tp x pp x dp has to be 8, the number of GPUs; nearest that works: tp=4 pp=2"),
        (
            {"model": "mixtral-8x7b", "ep": 3},
            "ep=3: tp x pp x dp has to be 8, the number of GPUs, and ep 1, tp, or tp x dp where pp=1; nearest that "
            "works: ep=4",
        ),
        ({"model": "mixtral-8x7b", "num_devices": 16, "tp": 16, "ep": 16}, "has 8 experts for as many ranks; nearest"),
        ({"ep": 4}, "ep=4: llama-3-70b has no experts to divide; leave ep out"),
        ({"batch": 2000}, "short of 2000 requests in a replica. Nearest that works: 16 GPUs, or 1037 requests at once"),
        (
            {"rate": 300.0},
            "no layout gives 300 requests/s: tp 2 x pp 4, the best, gives 19.7. Nearest that works: 128 GPUs",
        ),
        ({"rate": 3.0, "batch": 4}, "rate: expected a rate or a batch, got both, 3 and 4: leave one of them out"),
        ({"rate": float("inf")}, "rate: expected more than 0 requests/s, and a finite number, got inf"),
        ({"between": "NVMe"}, "there is no link 'NVMe'; "),
        ({"mfu": 1.2}, "mfu: expected a share above 0 and at most 1, got 1.2"),
        ({"ttft": 0}, "ttft: expected more than 0 s, and a finite time, got 0"),
    ],
)
def test_what_was_asked_and_cannot_be_is_said_with_its_number(options: Any, message: str) -> None:
    arguments = {"model": "llama-3-70b", "device": "h100", "num_devices": 8} | options
    with pytest.raises(ValueError, match="^[^\n]*$") as caught:
        plan(**arguments)
    assert message in str(caught.value)


def test_names_are_found_in_any_case_and_by_their_beginning() -> None:
    assert find_device("a100").name == "A100-80GB"
    assert find_model("Llama-3-8B").name == "llama-3-8b"
    assert find_link("aws efa 400g").name == "AWS EFA 400G"


def test_later_llamas_have_the_sizes_of_llama_3_and_a_longer_context() -> None:
    for name, same in (("llama-3.1-8b", "llama-3-8b"), ("Llama-3.3-70B", "llama-3-70b")):
        assert replace(find_model(name), name=same, max_context=8192) == model(same)
        assert find_model(name).max_context == 131072
    longer = {"prompt_tokens": 20_000, "output_tokens": 500}
    assert plan("llama-3-70b", "h100", 8, **longer).notes == (
        "llama-3-70b has a context of 8,192 tokens; asked are 20,500",
    )
    assert plan("llama-3.1-70b", "h100", 8, **longer).notes == ()
