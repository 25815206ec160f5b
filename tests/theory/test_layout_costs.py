"""One layout at a time: where its ranks stand, what they read, keep and send, by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from reference_impl.theory.layout_costs import Layout, Setting
from reference_impl.theory.links import LINKS, Topology
from reference_impl.theory.mixtures import MIXTURES, Mixture, read_config
from reference_impl.theory.model_shapes import MODELS, model
from reference_impl.theory.plan import plan


def setting(gpus: int, per_node: int = 8, name: str = "llama-3-70b", bits: int = 16) -> Setting:
    return replace(
        plan(name, "h200", 8, weight_bits=bits).setting,
        num_devices=gpus,
        where=Topology("here", per_node, LINKS["NVLink 4"], LINKS["InfiniBand NDR 400G"]),
    )


def test_stages_that_share_a_node_hand_over_inside_it() -> None:
    for per_node, across in ((16, False), (8, True), (4, True)):
        [sent] = [m for m in Layout(setting(16, per_node), 8, 2, 1).messages(3, 1) if m.what == "next stage"]
        assert (sent.inside, sent.between) == ((0, 3 * 16384) if across else (3 * 16384, 0))


def test_one_replica_that_crosses_a_node_makes_the_slow_link_count() -> None:
    """Nodes of eight, replicas of 2 x 3 ranks: the second has ranks 6 to 11, and its stages begin at 6, 8 and 10."""
    alone = Layout(setting(6), 2, 3, 1)
    both = Layout(setting(12), 2, 3, 2)
    assert {m.between for m in alone.messages(1, 1) if m.what == "next stage"} == {0}
    assert [m.between for m in both.messages(1, 1) if m.what == "next stage"] == [16384, 0]


def test_ranks_that_do_not_fill_nodes_send_over_the_slow_link() -> None:
    """Groups of six in nodes of eight stand in two nodes; they are costed as nodes of two, the common divisor."""
    inside = next(iter(Layout(setting(6), 6, 1, 1).messages(1, 1)))
    across = next(iter(Layout(setting(12), 6, 1, 2).messages(1, 1)))
    assert (inside.between, across.between > 0) == (0, True)
    assert across.seconds > inside.seconds


def test_eight_kv_heads_on_sixteen_ranks_are_kept_twice() -> None:
    """So 16 ranks keep as many tokens as 8 with the same memory beside their weights: one head a rank in both."""
    eight, sixteen = (Layout(setting(n), n, 1, 1) for n in (8, 16))
    assert eight.parts[0].kv_values == sixteen.parts[0].kv_values == 80 * 2 * 128
    left = [0.9 * 141e9 - layout.weights[0] for layout in (eight, sixteen)]
    assert [layout.kv_tokens() for layout in (eight, sixteen)] == [int(each / (80 * 2 * 128 * 2)) for each in left]


def test_the_latent_of_latent_attention_is_on_every_rank() -> None:
    """DeepSeek-V3: 512 + 64 values a layer, however many ranks there are."""
    for tp in (1, 8):
        assert Layout(setting(8, name="deepseek-v3", bits=8), tp, 1, 8 // tp).parts[0].kv_values == 61 * 576


def test_the_fixed_state_of_a_hybrid_takes_room_for_each_request() -> None:
    layout = Layout(setting(4, name="qwen3-next-80b-a3b"), 4, 1, 1)
    state = model("qwen3-next-80b-a3b").fixed_state_bytes / 4
    taken = layout.kv_tokens() - layout.kv_tokens(100)
    # Two KV heads on four ranks: one a rank, 12 layers, keys and values of 256 values in 16 bits.
    assert taken == pytest.approx(100 * state / (12 * 2 * 256 * 2), abs=1)


def test_experts_that_are_hit_are_those_of_random_draws() -> None:
    draw, mixture = random.Random(0), Mixture(64, 6, 1408, 26, "")
    assert mixture.hit(0) == 0
    assert mixture.hit(1) == pytest.approx(6)
    assert mixture.hit(1e6) == pytest.approx(64)
    for tokens in (3, 16, 50):
        found = [len({e for _ in range(tokens) for e in draw.sample(range(64), 6)}) for _ in range(400)]
        assert mixture.hit(tokens) == pytest.approx(sum(found) / 400, rel=0.02)


@pytest.mark.parametrize("name", MIXTURES)
def test_the_experts_of_the_table_are_most_of_their_models(name: str) -> None:
    """Active parameters, as published, are the others and k of E experts. Published counts are rounded, to the billion
    or so: a share of all parameters."""
    shape, mixture = MODELS[name], MIXTURES[name]
    experts = mixture.layers * mixture.expert_params(shape.hidden_size)
    others = shape.num_params - mixture.num_experts * experts
    assert 0 < others < 0.1 * shape.num_params
    assert shape.active_params is not None
    assert others + mixture.experts_per_token * experts == pytest.approx(
        shape.active_params, abs=0.02 * shape.num_params
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "expected numbers of experts and their size, got 8, 9 and 14336"),
        ({"num_local_experts": "8"}, "expected numbers of experts and their size, got 8"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1]}, "expected experts in every layer"),
        ({"model_type": "deepseek_v3"}, "config"),
        ({"sliding_window": 4096}, "config field 'sliding_window': expected null"),
    ],
)
def test_configs_that_cannot_be_counted_are_refused(changes: dict[str, object], message: str) -> None:
    mixtral = {
        "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8,
        "num_experts_per_tok": 2, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "kv_lora_rank": 512, "moe_intermediate_size": 768,
    }  # fmt: skip
    with pytest.raises(ValueError, match="config") as caught:
        read_config(mixtral | changes, "changed")
    assert message in str(caught.value)
