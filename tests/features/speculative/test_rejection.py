"""Verification by rejection, on tables of p and q: the joint distribution of three tokens is the target's, exactly.

A table has a distribution for each text so far, so what is wrong behind a wrong token shows, too. Each rule that is
nearly right fails by the same statistic. Seeds are fixed, and the bound is one that chance passes once in 10^9 tests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from reference_impl.assembly.sampler import probabilities, sample
from reference_impl.core.philox import uniform
from reference_impl.core.sampler import TorchSampler, draw
from reference_impl.features.speculative import rejection
from reference_impl.features.speculative.rejection import acceptance, is_exact, verified
from reference_impl.interfaces import SamplingParams
from tests.engine.conftest import some, spread

VOCAB, LENGTH, TEXTS = 6, 3, 200_000
ALPHA = 1e-9

Rule = Callable[[Tensor, Tensor | None, Tensor, Tensor], Tensor]
Tables = list[Tensor]  # of each position, [VOCAB ** position, VOCAB]: by the number that the text before it spells


def tables(sampling: SamplingParams, seed: int, dtype: torch.dtype = torch.float32) -> Tables:
    random = torch.Generator().manual_seed(seed)
    sizes = [VOCAB**position for position in range(LENGTH)]
    logits = [1.3 * torch.randn(size, VOCAB, generator=random, dtype=torch.float64) for size in sizes]
    return [probabilities(found.to(dtype), [sampling] * len(found)) for found in logits]


def exact(p: Tables) -> np.ndarray:
    """[VOCAB ** LENGTH]"""
    joint = np.ones(1)
    for table in p:
        joint = (joint[:, None] * table.double().numpy()).reshape(-1)
    return joint


def texts_of(rule: Rule, p: Tables, q: Tables, k: int, *, drawn: bool = True, bonus_from_q: bool = False) -> np.ndarray:
    """[TEXTS] numbers that the texts spell: k drafts and the bonus behind them are verified in one step; what is
    missing behind a rejection is drawn plainly, as a next step without drafts draws it.

    drawn: the rule is told q. Otherwise drafts are the likeliest token, and the rule is told nothing.
    """
    random = np.random.default_rng(5)

    def numbers() -> Tensor:
        return torch.from_numpy(random.random(TEXTS, dtype=np.float32).clip(2**-24, 1 - 2**-24))

    text, drafted, right = (torch.zeros(TEXTS, dtype=torch.int64) for _ in range(3))
    right += 1
    for position in range(LENGTH):
        of_text, of_drafts = p[position][text], q[position][drafted]
        plain = draw(of_text, numbers())
        if position < k:
            draft = draw(of_drafts, numbers()) if drawn else of_drafts.argmax(dim=-1)
            # As in a step: p behind the drafts, whether they are kept or not.
            found = rule(p[position][drafted], of_drafts if drawn else None, draft, torch.stack([numbers(), numbers()]))
            new = torch.where(right.bool(), found, plain)
            right *= found == draft
            drafted = drafted * VOCAB + draft
        elif position == k and bonus_from_q:
            new = torch.where(right.bool(), draw(of_drafts, numbers()), plain)
        else:
            new = plain
        text = text * VOCAB + new
    return text.numpy()


def p_value(found: np.ndarray, expected: np.ndarray) -> float:
    """Of the chi-squared statistic; texts that are rare go together. 0 where one came that has no probability."""
    counts, means = np.bincount(found, minlength=len(expected)), expected * len(found)
    if counts[expected == 0].any():
        return 0.0
    often = means >= 10
    cells = np.array([*counts[often], counts[~often].sum()]), np.array([*means[often], means[~often].sum()])
    used = cells[1] > 0
    statistic = ((cells[0] - cells[1])[used] ** 2 / cells[1][used]).sum()
    return float(stats.chi2(used.sum() - 1).sf(statistic))


FILTERS = {
    "temperature": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(top_k=3),
    "top_p": SamplingParams(top_p=0.7, temperature=1.2),
    "min_p": SamplingParams(min_p=0.2),
    "all": SamplingParams(temperature=1.5, top_k=5, top_p=0.9, min_p=0.05),
}


WAYS = list(itertools.product(FILTERS, (True, False)))


@pytest.mark.parametrize(
    ("name", "drawn", "k"),
    some(
        [(*way, 1 + number % 3) for number, way in enumerate(WAYS)],
        [(*way, k) for way in WAYS for k in (1, 2, 3)],
    ),
)
def test_the_joint_distribution_of_three_tokens_is_the_targets(name: str, drawn: bool, k: int) -> None:
    p, q = tables(FILTERS[name], 1), tables(FILTERS[name], 2)
    assert p_value(texts_of(verified, p, q, k, drawn=drawn), exact(p)) > ALPHA


def test_in_float64_and_with_a_draft_in_float32() -> None:
    p, q = tables(FILTERS["temperature"], 1, torch.float64), tables(FILTERS["top_k"], 2)
    assert p_value(texts_of(verified, p, q, 2), exact(p)) > ALPHA


@pytest.mark.parametrize("drawn", [True, False])
def test_drafts_that_the_target_never_writes_are_never_kept(drawn: bool) -> None:
    """And tokens that the draft model never draws come as often as they should."""
    p, q = tables(FILTERS["temperature"], 1), tables(FILTERS["temperature"], 2)
    for theirs, ours in zip(p, q, strict=True):
        theirs[:, :3], ours[:, 3:] = 0, 0
        theirs /= theirs.sum(-1, keepdim=True)
        ours /= ours.sum(-1, keepdim=True)
        assert acceptance(theirs[:1], ours[:1]) == 0
    texts = texts_of(verified, p, q, 2, drawn=drawn)
    assert p_value(texts, exact(p)) > ALPHA
    assert (texts % VOCAB >= 3).all()


def test_a_draft_whose_logits_are_no_numbers_still_leaves_the_distribution_right() -> None:
    p = tables(FILTERS["temperature"], 1)
    broken = [torch.full_like(table, torch.nan) for table in p]
    assert p_value(texts_of(verified, p, broken, 2), exact(p)) > ALPHA
    partly = tables(FILTERS["temperature"], 2)
    for table in partly:
        table[::2, 4] = torch.nan
    assert p_value(texts_of(verified, p, partly, 2), exact(p)) > ALPHA


# --- rules that are nearly right -------------------------------------------------------------------------------------


def parts(p: Tensor, q: Tensor | None, drafts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(p at the draft token, q at the draft token, q)"""
    x = drafts[:, None]
    q = torch.zeros_like(p).scatter_(1, x, 1) if q is None else q
    return p.gather(1, x)[:, 0], q.gather(1, x)[:, 0], q


def match_or_resample(p: Tensor, q: Tensor | None, drafts: Tensor, u: Tensor) -> Tensor:
    """Kept with min(1, p / q), else from p, not from what is left of it."""
    at_p, at_q, _ = parts(p, q, drafts)
    return torch.where(u[0] * at_q < at_p, drafts, draw(p, u[1]))


def equal_or_resample(p: Tensor, q: Tensor | None, drafts: Tensor, u: Tensor) -> Tensor:
    """Kept where it is what p draws, else drawn from p once more."""
    return torch.where(draw(p, u[0]) == drafts, drafts, draw(p, u[1]))


def absolute_rest(p: Tensor, q: Tensor | None, drafts: Tensor, u: Tensor) -> Tensor:
    at_p, at_q, q = parts(p, q, drafts)
    return torch.where(u[0] * at_q < at_p, drafts, draw((p - q).abs(), u[1]))


def rest_that_is_not_divided(p: Tensor, q: Tensor | None, drafts: Tensor, u: Tensor) -> Tensor:
    at_p, at_q, q = parts(p, q, drafts)
    cumulative = (p - q).clamp(min=0).double().cumsum(-1)
    rest = torch.searchsorted(cumulative, u[1].double()[:, None], right=True)[:, 0].clamp(max=VOCAB - 1)
    return torch.where(u[0] * at_q < at_p, drafts, rest)


def kept_with_p(p: Tensor, q: Tensor | None, drafts: Tensor, u: Tensor) -> Tensor:
    """Instead of p / q."""
    at_p, _, q = parts(p, q, drafts)
    rest = (p - q).clamp(min=0)
    return torch.where(u[0] < at_p, drafts, draw(rest, u[1]))


def one_number_for_both(p: Tensor, q: Tensor | None, drafts: Tensor, u: Tensor) -> Tensor:
    return verified(p, q, drafts, u[:1].expand(2, -1))


def always_kept(p: Tensor, q: Tensor | None, drafts: Tensor, u: Tensor) -> Tensor:
    return drafts


MUTANTS = (
    match_or_resample, equal_or_resample, absolute_rest, rest_that_is_not_divided, kept_with_p, one_number_for_both,
    always_kept,
)  # fmt: skip


@pytest.mark.parametrize(("mutant", "name"), spread(MUTANTS, [*FILTERS]))
def test_a_rule_that_is_nearly_right_is_seen(mutant: Rule, name: str) -> None:
    p, q = tables(FILTERS[name], 1), tables(FILTERS[name], 3)
    assert p_value(texts_of(mutant, p, q, 2), exact(p)) < ALPHA


# For a draft token that is not drawn q is 1 there, so that p / q is p, and what p exceeds q by is as it should be.
@pytest.mark.parametrize("mutant", [match_or_resample, equal_or_resample, absolute_rest, one_number_for_both])
def test_it_is_seen_with_drafts_that_are_not_drawn(mutant: Rule) -> None:
    p, q = tables(FILTERS["temperature"], 1), tables(FILTERS["temperature"], 2)
    assert p_value(texts_of(mutant, p, q, 2, drawn=False), exact(p)) < ALPHA


def test_a_bonus_from_the_draft_is_seen() -> None:
    p, q = tables(FILTERS["temperature"], 1), tables(FILTERS["temperature"], 2)
    assert p_value(texts_of(verified, p, q, 2, bonus_from_q=True), exact(p)) < ALPHA


# --- how many are kept, and the edges --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILTERS)
def test_as_many_are_kept_as_the_two_distributions_have_in_common(name: str) -> None:
    (p, *_), (q, *_) = tables(FILTERS[name], 1), tables(FILTERS[name], 2)
    random = torch.Generator().manual_seed(3)
    u = torch.rand(3, TEXTS, generator=random).clamp(2**-24, 1 - 2**-24)
    p, q = p.expand(TEXTS, -1), q.expand(TEXTS, -1)
    drafts = draw(q, u[2])
    kept = int((verified(p, q, drafts, u[:2]) == drafts).sum())
    total_variation = 0.5 * float((p[0] - q[0]).abs().sum())
    assert float(acceptance(p[:1], q[:1])) == pytest.approx(1 - total_variation, abs=1e-6)
    assert stats.binomtest(kept, TEXTS, 1 - total_variation).pvalue > ALPHA
    coupled = int((draw(p, u[2]) == drafts).sum())  # with the same number, as for a request with a seed
    assert coupled <= kept + 6 * TEXTS**0.5


def test_equal_distributions_keep_every_draft() -> None:
    (_, _, p), u = tables(FILTERS["temperature"], 1), torch.full((2, 36), 1 - 2**-24)
    for draft in range(VOCAB):
        drafts = torch.full((36,), draft)
        assert (verified(p, p.clone(), drafts, u) == drafts).all()


def test_what_rounding_leaves_nothing_of_is_drawn_from_the_target() -> None:
    """All of p is below q, by the last bit: a draft token that the largest u rejects leaves nothing to draw from."""
    q = torch.tensor([[0.0, 0.25, 0.75, 0.0]])
    p = q * (1 - 2**-23)
    for u in (1e-6, 0.2, 0.9):
        found = verified(p, q, torch.tensor([1]), torch.tensor([[1 - 2**-25], [u]], dtype=torch.float64))
        assert int(found) == (1 if u < 0.25 else 2)


def test_rows_that_are_no_numbers_leave_the_others_as_they_are() -> None:
    p, q = (table[2] for table in (tables(FILTERS["top_k"], 1), tables(FILTERS["top_k"], 2)))
    u, drafts = torch.rand(2, 36, generator=torch.Generator().manual_seed(1)), q.argmax(-1)
    whole = verified(p, q, drafts, u)
    p[5], q[7] = torch.nan, torch.nan
    found = verified(p, q, drafts, u)
    others = [row for row in range(36) if row not in (5, 7)]
    assert (found[others] == whole[others]).all()
    assert ((found >= 0) & (found < VOCAB)).all()


def test_numbers_of_two_purposes_are_never_the_same() -> None:
    purposes = (0, rejection.DRAFT, rejection.VERDICT)
    found = [uniform(7, sample_index + purpose, range(200)) for purpose in purposes for sample_index in range(4)]
    assert len({row.tobytes() for row in found}) == 12
    for one, other in zip(found, found[4:], strict=False):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.3


def test_only_samplers_whose_distribution_is_known_are_verified_by_rejection() -> None:
    class Likeliest(TorchSampler):
        def choose(self, scores: Tensor, t: object) -> Tensor:
            return scores.argmax(-1)

    assert is_exact(TorchSampler())
    assert is_exact(sample)
    assert not is_exact(Likeliest())
    assert not is_exact(partial(sample))
