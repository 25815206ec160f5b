"""Errata of speculative decoding (E08.x), and numbers of the register that chapter 08 uses."""

from typing import Any

import numpy as np
import pytest

from reference_impl import LLM, SamplingParams, course_model
from reference_impl.features.speculative.ngram import NgramProposer
from reference_impl.interfaces import Request
from reference_impl.observe.trace import DraftUse
from reference_impl.theory import kv_cache, latency, speculative
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.links import transfer_seconds
from reference_impl.theory.model_shapes import model
from reference_impl.theory.roofline import place

H100, L8 = device("H100"), model("llama-3-8b")


def step(batch: int, tokens_each: int, context: int, mfu: float) -> float:
    """Weights read or matrices computed, whichever is longer, and then the caches read: attention is not overlapped.

    The input embedding is a look-up: no products, and next to nothing read.
    """
    used = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336) + 128256 * 4096  # of Llama 3 8B: 7.50e9 of 8.03e9
    matrices = latency.step_bound(2 * used * batch * tokens_each, 2 * used, H100, mfu=mfu)
    return float(matrices + transfer_seconds(kv_cache.cache_bytes(L8, context, batch), H100.bandwidth))


def test_e08_08_verifying_drafts_in_a_large_batch_costs_a_longer_step_unless_the_context_is_long() -> None:
    """Claim: a fast draft helps at large batches too; or, elsewhere, only at batch 1.

    It depends on what binds. 8B, batch 256, three drafts, 70 % of the peak: the step grows 2.6 times at 500 tokens of
    context, 1.81 times at 1500, and 1.4 times at 4000 (more than one H100 holds), where reading caches takes most of
    it. At batch 1 it does not grow.
    """
    assert 256 * 1504 < Deployment(L8, H100).cache_tokens() < 256 * 4004
    assert step(256, 4, 500, 0.7) / step(256, 1, 500, 0.7) == pytest.approx(2.6, abs=0.05)
    assert step(256, 4, 1500, 0.7) / step(256, 1, 1500, 0.7) == pytest.approx(1.81, abs=0.005)
    assert step(256, 4, 4000, 0.7) / step(256, 1, 4000, 0.7) == pytest.approx(1.4, abs=0.05)
    assert step(1, 4, 500, 0.7) == step(1, 1, 500, 0.7)
    # If reading caches overlapped perfectly with the products, the long context would hide all of the drafts.
    overlapped = [place(L8, H100, 256, context, new).seconds for context in (500, 4000) for new in (1, 4)]
    assert overlapped[1] / overlapped[0] > 1.5
    assert overlapped[3] / overlapped[2] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_e08_10_a_dense_model_verifies_for_the_price_of_one_token_only_below_the_ridge(batch: int) -> None:
    """Claim: verifying K tokens costs about one decode step. For a dense model whose B (K + 1) tokens stay below 295.

    A mixture of experts reads more experts for more tokens (chapter 11).
    """
    one, six = (place(L8, H100, batch, 1000, new) for new in (1, 6))
    assert six.seconds / one.seconds == pytest.approx(1, abs=0.01)
    many = [place(L8, H100, 256, 100, new) for new in (1, 6)]
    assert many[1].compute_bound
    assert many[1].seconds / many[0].seconds > 3


# ---------------------------------------------------------------- rules of acceptance, enumerated

P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.6, 0.1, 0.3])


def match_and_resample(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Keep the guess if a sample from p equals it, else draw once more from p."""
    return p * q + (1 - p @ q) * p


def accept_and_resample(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Keep with min(1, p / q), else draw from p."""
    return np.minimum(p, q) + (1 - np.minimum(p, q).sum()) * p


def match_and_take(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Keep the guess if a sample from p equals it, else give that very sample."""
    joint = np.outer(q, p)  # of guess x and sample y, y comes out in every case
    found: np.ndarray = joint.sum(axis=0)
    return found


def accept_and_residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.minimum(p, q) + (1 - speculative.acceptance(p, q)) * speculative.residual(p, q)
    return found


def test_e08_01_only_the_residual_keeps_the_distribution_and_most_of_the_guesses() -> None:
    """Claim: accept if the target's sample matches, else resample from the target. That output is biased."""
    assert speculative.acceptance(P, Q) == pytest.approx(0.80)
    assert speculative.match_acceptance(P, Q) == pytest.approx(0.39)
    assert match_and_resample(P, Q) == pytest.approx([0.605, 0.213, 0.182])
    assert accept_and_resample(P, Q) == pytest.approx([0.6, 0.16, 0.24])
    assert abs(match_and_resample(P, Q) - P).sum() / 2 == pytest.approx(0.105)
    assert abs(accept_and_resample(P, Q) - P).sum() / 2 == pytest.approx(0.14)
    assert match_and_take(P, Q) == pytest.approx(P)
    assert accept_and_residual(P, Q) == pytest.approx(P)


def test_e08_02_the_residual_is_divided_by_the_rejection_probability_of_its_own_position() -> None:
    """Claim: it is divided by one minus a sum of acceptances. The divisor is sum max(p - q, 0) = 1 - sum min(p, q)."""
    rng = np.random.default_rng(0)
    for p, q in rng.dirichlet(np.ones(5), (200, 2)):
        assert np.maximum(p - q, 0).sum() == pytest.approx(1 - np.minimum(p, q).sum())
        assert accept_and_residual(p, q) == pytest.approx(p)
    # Two positions with acceptance 0.8 each: a running sum would divide by a negative number.
    assert 1 - 2 * speculative.acceptance(P, Q) < 0


def test_e08_03_a_round_gives_one_to_k_plus_one_tokens() -> None:
    """Claim: K accepted drafts give K tokens, and a rejection needs a step of its own."""
    rng = np.random.default_rng(1)
    for a, expected in ((0.7, 2.94), (0.8, 3.69), (0.9, 4.69)):
        assert speculative.expected_tokens(a, 5) == pytest.approx(expected, abs=0.005)
        tokens = 1 + np.cumprod(rng.random((200_000, 5)) < a, axis=1).sum(axis=1)
        assert set(tokens) == {1, 2, 3, 4, 5, 6}
        assert tokens.mean() == pytest.approx(expected, abs=0.02)


def test_e08_04_each_guess_is_judged_behind_the_kept_text_so_an_error_lives_for_k_tokens() -> None:
    """Claim: over long outputs the draft drifts. The draft is asked behind what was kept, at every round.

    Target and draft are Markov chains: the share that is kept is that of the states, at the start as at the end.
    """
    rng = np.random.default_rng(2)
    target, draft = rng.dirichlet(np.ones(4), 4), rng.dirichlet(np.ones(4), 4)
    state, kept = np.zeros(20_000, int), []
    for _ in range(60):
        q, p = draft[state], target[state]
        guess = (q.cumsum(1) < rng.random((len(state), 1))).sum(1)
        at = np.arange(len(state))
        right = rng.random(len(state)) * q[at, guess] < p[at, guess]
        rest = np.maximum(p - q, 0) + 1e-12
        other = ((rest / rest.sum(1, keepdims=True)).cumsum(1) < rng.random((len(state), 1))).sum(1)
        state = np.where(right, guess, np.minimum(other, 3))
        kept.append(right.mean())
    assert np.mean(kept[5:15]) == pytest.approx(np.mean(kept[-10:]), abs=0.01)


def test_e08_05_lookahead_fills_its_pool_by_jacobi_iterations_and_prompt_lookup_copies() -> None:
    """Claim: lookahead predicts n-grams heuristically. Prompt lookup copies what stands in the text and is silent
    where nothing repeats; Jacobi iterations find what the model would write, though it stands nowhere."""
    request = Request("r", [1, 2, 3], 3, SamplingParams(max_tokens=8), seed=0, arrival=0.0)
    assert tuple(NgramProposer(longest=2, shortest=1).propose(request, 3)) == ()

    def following(token: int) -> int:  # the model, greedy: no text of three tokens holds what it goes on with
        return 3 * token + 1

    window, rounds = [0, 0, 0, 0], 0
    while window != (found := [following(token) for token in [3, *window[:-1]]]):
        window, rounds = found, rounds + 1
    assert window == [10, 31, 94, 283]
    assert rounds <= 4  # the first is right after one iteration, the nth after n at the latest


def test_e08_06_typical_acceptance_does_not_keep_the_distribution() -> None:
    """Claim: Medusa, EAGLE and lookahead keep it. The rule of acceptance decides, and Medusa's default is another one:
    a guess is kept if p(x) > min(epsilon, delta exp(-H(p))), epsilon = 0.09 and delta = 0.3 in its code."""
    limit = min(0.09, 0.3 * np.exp(float((P * np.log(P)).sum())))
    output = np.where(limit < P, Q, 0)
    output = output + (1 - output.sum()) * P
    assert limit == 0.09  # all three tokens are above it, so the draft's distribution comes out
    assert abs(output - P).sum() / 2 == pytest.approx(0.2)
    assert accept_and_residual(P, Q) == pytest.approx(P)


def test_e08_07_parallel_heads_guess_pairs_that_sequential_modules_do_not() -> None:
    """Claim: heads for several tokens predict them directly, not autoregressively. Both kinds exist, and they differ:
    independent heads give the product of two marginals, a chain of modules the joint distribution."""
    first = np.array([0.5, 0.5])
    second = np.array([[1.0, 0.0], [0.0, 1.0]])  # "New York" or "Los Angeles", nothing between
    joint = first[:, None] * second
    parallel = np.outer(first, first @ second)
    assert np.minimum(joint, parallel).sum() == pytest.approx(0.5)
    assert joint == pytest.approx(first[:, None] * second)


def test_e08_08_the_speed_up_over_batch_and_context_falls_below_one_where_compute_binds() -> None:
    where = Deployment(L8, H100, mfu=0.7, mbu=0.8)

    def gain(batch: int, context: int) -> float:
        tokens = speculative.expected_tokens(0.8, 3)
        return float(speculative.speed_up(tokens, 3, 0.05, speculative.verify_cost(where, batch, context, 3)))

    assert gain(1, 500) > 2.5
    assert gain(512, 100) < 1
    assert gain(256, 4000) > gain(256, 500)
    gains = [gain(batch, 500) for batch in (1, 32, 128, 256, 512)]
    assert gains == sorted(gains, reverse=True)


def test_e08_09_acceptance_rate_length_and_acceptance_by_position_are_three_numbers() -> None:
    """Claim: EAGLE-3's acceptance is 70-90 %. Quoted lengths are 2.8 at K = 7 and 2.4 at K = 3: 26 % and 47 % of the
    guesses, of which the later are kept more rarely."""
    for length, k, share in ((2.8, 7, 0.26), (2.4, 3, 0.47)):
        assert (length - 1) / k == pytest.approx(share, abs=0.005)
    use = DraftUse(num_drafts=10, num_draft_tokens=30, accepted_per_position=(8, 4, 2))
    assert 1 + use.num_accepted_tokens / use.num_drafts == pytest.approx(2.4)
    assert use.acceptance == pytest.approx(14 / 30)
    assert use.accepted_per_position[0] / use.num_drafts == pytest.approx(0.8)
    # With one and the same chance at every position, the share that is kept depends on K.
    assert speculative.kept_share(0.8, 1) == pytest.approx(0.8)
    assert speculative.kept_share(0.8, 7) < 0.5


def test_e08_10_a_mixture_reads_more_experts_for_more_tokens_worst_in_small_batches() -> None:
    """DeepSeek-V3: 58 layers of 256 experts of 3 x 7168 x 2048, 8 for a token; 37e9 parameters for one token."""
    expert = 58 * 3 * 7168 * 2048
    shared = 37e9 - 8 * expert
    assert speculative.experts_touched(256, 8, 6) == pytest.approx(44, abs=0.5)
    for batch, expected in ((1, 3.51), (2, 3.94), (4, 3.86), (8, 3.23), (64, 1.15), (256, 1.00)):
        six, one = (speculative.mixture_read(shared, expert, 256, 8, batch * n) for n in (6, 1))
        assert six / one == pytest.approx(expected, abs=0.01)


def test_e08_11_a_draft_model_guesses_one_token_after_another_and_the_target_runs_once() -> None:
    """Claim: the tokens are drafted in parallel. Three guesses are three passes of the draft, and one of the target."""
    llm = LLM(course_model("target"), draft_model=course_model("draft"), num_drafts=3, adaptive_drafts="off",
              kv_cache_bytes=2**20, max_model_len=256)  # fmt: skip
    worker: Any = llm.engine.executor
    passes: list[str] = []
    for name, runs in (("target", worker.model), ("draft", worker.draft.model)):
        forward = runs.hidden_states

        def counted(*arguments: Any, name: str = name, forward: Any = forward) -> Any:
            passes.append(name)
            return forward(*arguments)

        runs.hidden_states = counted
    engine = llm.engine
    engine.add(llm.encode("def add(a, b):\n"), SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))
    engine.step()
    passes.clear()
    engine.step()
    assert passes == ["draft", "draft", "draft", "target"]


def test_n32_speed_up_with_the_cost_of_drafting() -> None:
    for a, k, c, expected in ((0.8, 4, 0.05, 2.80), (0.8, 4, 0.2, 1.87), (0.4, 4, 0.2, 0.92)):
        found = speculative.speed_up(speculative.expected_tokens(a, k), k, c)
        assert found == pytest.approx(expected, abs=0.005)
