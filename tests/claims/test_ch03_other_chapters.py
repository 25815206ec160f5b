"""Claims of earlier chapters that waited for loads on a simulated GPU (bench/simulation.py)."""

from __future__ import annotations

import numpy as np

from reference_impl.assembly.config import EngineConfig
from reference_impl.bench.simulation import Arrival, poisson, simulate
from reference_impl.observe.metrics import percentile
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model

H100 = Deployment(model("llama-3-8b"), device("H100"), mfu=0.5, mbu=0.8)
FP8 = Deployment(model("llama-3-8b"), device("H100"), mfu=0.5, mbu=0.8, weight_bits=8, precision="fp8")


def test_e01_11_over_a_load_the_budget_trades_ttft_for_tpot_and_fewer_bits_improve_both() -> None:
    """Claim: TTFT and tokens per second are independent, and in tension. A budget moves both, and so does the step."""
    load = poisson(8, 20, 0, (400, 8000), (0.9, 0.1), 150)

    def corner(where: Deployment, budget: int) -> tuple[float, float]:
        w = simulate(where, load, EngineConfig(max_num_seqs=256, max_num_batched_tokens=budget)).workload()
        return percentile(w.ttft, 95), percentile(w.tpot, 99)

    small, large = corner(H100, 192), corner(H100, 512)
    assert small[0] > large[0]
    assert small[1] < large[1]
    fewer_bits = corner(FP8, 192)
    assert fewer_bits[0] < small[0]
    assert fewer_bits[1] < small[1]


def test_e01_15_a_batch_job_needs_several_gpus_for_a_first_token_target_and_one_for_its_deadline() -> None:
    """Claim: batch processing wants a TTFT below 2 s. 240 documents of 1,500 tokens, 150 out, all at once."""
    config = EngineConfig(max_num_seqs=256, max_num_batched_tokens=8192)

    def job(gpus: int) -> tuple[float, float]:
        w = simulate(H100, [Arrival(0.0, 1500, 150) for _ in range(240 // gpus)], config).workload()
        return max(w.ttft), w.duration

    seen = {gpus: job(gpus) for gpus in (1, 2, 4, 6, 8)}
    assert seen[1][1] < 60, "one GPU meets a deadline of a minute"
    enough = min(gpus for gpus, (ttft, _) in seen.items() if ttft <= 2)
    assert enough >= 4, "the target on the first token takes several"
    seconds = {gpus: gpus * duration for gpus, (_, duration) in seen.items()}
    assert seconds[1] < seconds[enough], "and more seconds of GPU altogether"


def test_e02_09_a_hundred_users_who_grow_past_the_plan_preempt_one_another() -> None:
    """Claim: weights and 100 x 4,096 tokens of cache fit four GPUs, so the load can be served. It fits at the edge.

    Qwen2.5-72B on four H100 at 0.9 of the memory: 100 users within 4,096 tokens stay; 100 who reach 6,144 do not fit.
    """
    four = Deployment(model("qwen2.5-72b"), device("H100"), num_devices=4, mfu=0.5, mbu=0.8)
    assert four.cache_tokens() < 100 * 6144
    preempted = []
    for output in (256, 2304):
        load = [Arrival(0.0, 3840, output) for _ in range(100)]
        config = EngineConfig(block_size=64, max_num_seqs=128, max_num_batched_tokens=8192)
        trace = simulate(four, load, config)
        preempted.append(sum(len(s.preempted) for s in trace.steps()))
        assert np.mean([m.num_output_tokens for m in trace.workload().requests]) == output
    assert preempted[0] == 0 < preempted[1]
