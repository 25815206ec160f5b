"""The sampling kernel chooses its twin's token, always; the twin the sampler's, unless u lies at a token's edge."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from reference_impl.assembly.sampler import probabilities
from reference_impl.core.philox import philox, uniform
from reference_impl.core.sampler import draw
from reference_impl.features.gumbel.sampler import GumbelSampler, exponentials
from reference_impl.interfaces import SamplingParams
from reference_impl.kernels import reference
from reference_impl.kernels.reference import sampling as twin
from reference_impl.kernels.sample_tokens import random_word, sample_tokens, token_mass, token_noise
from tests.kernels.paged import DEVICE

ON_GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU
# Where a boundary of the cumulative distribution, or of top-p, is closer than this, rounding may decide.
CLOSE = 1e-6


def parameters(rows: int, mix: int = 0, **chosen: Any) -> dict[str, Tensor]:
    """Of all sorts, mixed at random; `chosen` ones are the same in every row."""
    random = torch.Generator().manual_seed(mix)

    def one_of(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows,), generator=random)]

    mixed = {
        "temperature": one_of(0.0, 0.6, 1.0, 1.0, 3.0, 1e-30),
        "top_k": one_of(0, 0, 1, 5, 50, 10**6),
        "top_p": one_of(1.0, 1.0, 0.9, 0.99, 0.3, 1e-6),
        "min_p": one_of(0.0, 0.0, 0.02, 1e-4, 1.0),
        "seed": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=random),
        "sample_index": torch.randint(0, 4, (rows,), generator=random),
        "position": torch.arange(rows) + 100,
    }
    for name, value in chosen.items():
        mixed[name] = torch.full((rows,), value, dtype=mixed[name].dtype)
    return {name: value.to(DEVICE) for name, value in mixed.items()}


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    """Some rows of few distinct values, so that scores tie; some with tokens ruled out, NaN and infinity."""
    random = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(rows, vocab_size, generator=random)
    logits[::3] = logits[::3].round()
    logits[1::5, ::2] = -torch.inf
    logits[3::7, vocab_size // 2] = torch.nan
    logits[5::11, vocab_size // 3] = torch.inf
    return logits.to(DEVICE)


def u_of(given: dict[str, Tensor]) -> Tensor:
    seed, sample, position = (given[name].cpu().numpy() for name in ("seed", "sample_index", "position"))
    return torch.from_numpy(uniform(seed.view("uint64"), sample, position))


def spread(rows: int) -> Tensor:
    """Positions whose u, with seed 1 and sample 0, lie one in each `rows`-th of (0, 1), in order."""
    u = uniform(1, 0, range(2000))
    return torch.tensor([next(i for i, x in enumerate(u) if int(x * rows) == part) for part in range(rows)])


def checked(logits: Tensor, given: dict[str, Tensor], noise: bool = False) -> Tensor:
    found = sample_tokens(logits, **given, noise=noise)
    assert found.dtype is torch.int64
    assert torch.equal(found, reference.sample_tokens(logits, **given, noise=noise))
    return found


@triton.jit
def _words(seed, sample, position, out, N: tl.constexpr):
    at = tl.arange(0, N)
    word = random_word(tl.load(seed + at), tl.load(sample + at), tl.load(position + at))
    tl.store(out + at, word.to(tl.int64))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_random_words_are_those_of_philox(dtype) -> None:
    n, random = 4096, torch.Generator().manual_seed(0)
    largest = 2**31 if dtype is torch.int32 else 2**40
    seed = torch.randint(-(2**63), 2**63 - 1, (n,), generator=random)
    sample, position = (torch.randint(0, largest, (n,), generator=random).to(dtype) for _ in range(2))
    seed[:4], sample[:4], position[:4] = torch.tensor([0, -1, 1, 2**32]), torch.tensor([0, 0, 5, 1]), 0
    position[4:8] = largest - 1
    found = torch.empty(n, dtype=torch.int64, device=DEVICE)
    _words[1,](seed.to(DEVICE), sample.to(DEVICE), position.to(DEVICE), found, N=n)
    counter = torch.stack((position.long(), sample.long(), torch.zeros(n).long(), torch.zeros(n).long())) & 0xFFFFFFFF
    key = torch.stack((seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    expected = torch.from_numpy(
        philox(counter.numpy().astype("uint64"), key.numpy().astype("uint64"))[0].astype("int64")
    )
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(twin.random_word(seed, sample, position), expected)


@triton.jit
def _masses(distance, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, token_mass(tl.load(distance + at)))


def test_masses_are_the_twins_bit_by_bit_and_exp_within_float32() -> None:
    n = 16384
    distance = 30 * torch.rand(n, generator=torch.Generator().manual_seed(0))
    distance[:8] = torch.tensor([0.0, 1e-45, 1e-8, 27.7, 27.8, 39.99, 1e30, torch.inf])
    found = torch.empty(n, dtype=torch.int64, device=DEVICE)
    _masses[1,](distance.to(DEVICE), found, N=n, enable_fp_fusion=False)
    assert torch.equal(found.cpu(), twin.token_mass(distance))
    exact = (-distance.double()).exp() * 2.0**40
    assert ((found.cpu() - exact).abs() <= 3e-7 * exact + 1).all()
    assert found[0] == 2**40
    assert found[6] == found[7] == 0


BOTH = pytest.mark.parametrize("noise", [False, True], ids=["one number", "noise"])


VOCABULARIES = [1, 2, 7, 64, 100, 333]
BY_TURNS = [  # each size with one of the two, in the interpreter
    pytest.param(size, noise, marks=[] if ON_GPU or noise == number % 2 else pytest.mark.slow)
    for number, size in enumerate(VOCABULARIES)
    for noise in (False, True)
]


@pytest.mark.parametrize(("vocab_size", "noise"), BY_TURNS)
def test_the_kernel_chooses_what_its_twin_chooses(vocab_size, noise: bool) -> None:
    rows = 2000 if ON_GPU else 12
    checked(random_logits(rows, vocab_size, vocab_size), parameters(rows, vocab_size), noise)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [2048, 4097, 10000])
def test_vocabularies_of_several_tiles(vocab_size, dtype, noise: bool) -> None:
    rows = 500 if ON_GPU else 2
    given = parameters(rows, 1, temperature=1.0)
    checked(random_logits(rows, vocab_size, 2).to(dtype), given, noise)


@pytest.mark.parametrize("noise", [False, pytest.param(True, marks=[] if ON_GPU else pytest.mark.slow)])
def test_the_vocabulary_of_qwen(noise: bool) -> None:
    rows = 64 if ON_GPU else 1
    checked(random_logits(rows, 151936), parameters(rows, temperature=1.0, top_k=0, top_p=0.9, min_p=0.0), noise)


@BOTH
def test_tokens_that_tie_at_the_edge_of_a_tile(noise: bool) -> None:
    """Thousands of equal scores: the ones kept end in the middle of the second tile."""
    rows = 200 if ON_GPU else 1
    logits = torch.zeros(rows, 9000, device=DEVICE)
    logits[:, 5:8000:7] = 1.0
    for chosen in ({"top_k": 6000, "top_p": 1.0}, {"top_k": 0, "top_p": 0.7}, {"top_k": 7000, "top_p": 0.7}):
        checked(logits, parameters(rows, temperature=1.0, min_p=0.0, **chosen), noise)


@triton.jit
def _noises(seed, sample, position, out, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    for start in range(0, N, BLOCK):
        found = token_noise(tl.load(seed + row), tl.load(sample + row), tl.load(position + row), start, BLOCK)
        tl.store(out + row * N + start + tl.arange(0, BLOCK), found)


def test_noise_is_the_twins_bit_by_bit_and_that_of_float64_to_rounding() -> None:
    rows, size = (4000 if ON_GPU else 12), 256
    given = [parameters(rows, 5)[name] for name in ("seed", "sample_index", "position")]
    found = torch.empty(rows, size, device=DEVICE)
    _noises[rows,](*given, found, N=size, BLOCK=64, enable_fp_fusion=False)
    assert torch.equal(found, twin.token_noise(*given, size))
    exact = -exponentials(*(t.cpu() for t in given), size).log()
    torch.testing.assert_close(found.cpu().double(), exact, rtol=3e-7, atol=3e-7)


def test_noise_is_right_to_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """u next to 0 and to 1, and where its logarithm begins to be computed from 1 - u."""
    words = [0, 1, 2**24, 2**31, 3 * 2**30 - 1, 3 * 2**30, 3 * 2**30 + 1, 2**32 - 2, 2**32 - 1]
    monkeypatch.setattr(twin, "token_words", lambda *_: torch.tensor([words]))
    found = twin.token_noise(*[torch.zeros(1).long()] * 3, len(words))[0]
    exact = [-math.log(-math.log1p(-(2**32 - 1 - word + 0.5) / 2**32)) for word in words]
    assert found.tolist() == pytest.approx(exact, rel=3e-7, abs=3e-7)


def test_with_noise_the_twin_chooses_what_the_sampler_in_torch_does_unless_two_are_close() -> None:
    rows, vocab_size = 3000, 200
    logits = 4 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(5))
    given = {name: value.cpu() for name, value in parameters(rows, 3).items()}
    given["top_p"].fill_(1.0)  # at whose edge rounding decides, too
    found = reference.sample_tokens(logits, **given, noise=True)
    columns = {**given, "sample_positions": given["position"]}
    expected = GumbelSampler().choose(logits.double(), columns)
    different = found != expected
    assert different.float().mean() < 0.001
    assert len(expected.unique()) > 150


def test_the_twin_chooses_what_the_sampler_chooses_unless_u_is_at_an_edge() -> None:
    rows, vocab_size = 6000, 200
    logits = 4 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(5))
    logits[::3] = logits[::3].round()
    given = {name: value.cpu() for name, value in parameters(rows, 3).items()}
    found = reference.sample_tokens(logits, **given)
    fields = ("temperature", "top_k", "top_p", "min_p")
    params = [
        SamplingParams(**{name: given[name][row].item() for name in fields})
        for row in range(rows)  # float64 of float32
    ]
    probs, u = probabilities(logits.double(), params), u_of(given)
    expected = draw(probs, u)
    # What decides: u against cumulative mass; top-p against the mass before a token, within top-k; min-p against mass.
    no_top_p = [SamplingParams(temperature=p.temperature, top_k=p.top_k) for p in params]
    ranked = probabilities(logits.double(), no_top_p).sort(1, descending=True)[0]
    gaps = [
        (probs.cumsum(1) - u[:, None]).abs(),
        (ranked.cumsum(1) - given["top_p"][:, None]).abs()[:, :-1],
        (ranked / ranked[:, :1] - given["min_p"][:, None]).abs()[:, 1:],
    ]
    close = torch.cat(gaps, 1).amin(1) < CLOSE
    different = found != expected
    assert not (different & ~close).any()
    assert different.float().mean() < 0.01
    assert len(expected.unique()) > 150


@BOTH
@pytest.mark.parametrize("choose", [reference.sample_tokens] + [sample_tokens] * ON_GPU)  # interpreted: minutes
def test_tokens_come_up_as_often_as_they_should(choose, noise: bool) -> None:
    """Chi-square against the exact distribution in float64; a deviation this large has a probability under 1e-4."""
    count = 40000
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 1.5, 1.0, 0.3, -8.0], device=DEVICE)
    for seed, chosen in enumerate(({"top_k": 0, "top_p": 1.0}, {"top_k": 6, "top_p": 0.9})):
        given = parameters(count, temperature=0.8, min_p=0.01, seed=7 + seed, sample_index=0, **chosen)
        counts = choose(logits.expand(count, 8), **given, noise=noise).bincount(minlength=8).double().cpu()
        params = SamplingParams(temperature=0.8, min_p=0.01, **chosen)
        expected = probabilities(logits.double().cpu()[None], [params])[0] * count
        possible = expected > 0
        assert counts[~possible].sum() == 0
        chi_square = ((counts - expected)[possible].square() / expected[possible]).sum()
        assert chi_square < {7: 29.9, 6: 27.9, 5: 25.8, 4: 23.5, 3: 21.1}[int(possible.sum()) - 1]


def test_equal_tokens_divide_u_evenly() -> None:
    rows, vocab_size = 8, 3000
    given = parameters(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    found = checked(torch.full((rows, vocab_size), -3.0, device=DEVICE), given)
    assert found.tolist() == [int(vocab_size * u) for u in u_of(given).double().tolist()]


@pytest.mark.parametrize(
    ("chosen", "kept"),
    [
        ({"top_k": 3}, [2, 3, 4]),
        ({"top_k": 1}, [2]),
        ({"top_p": 0.5}, [2, 3, 4, 5]),  # eight tokens of an eighth: the fifth has half before it
        ({"top_p": 0.51}, [2, 3, 4, 5, 6]),
        ({"top_p": 1e-9}, [2]),
        ({"top_k": 4, "top_p": 0.5}, [2, 3]),
        ({"min_p": 1.0}, list(range(2, 10))),
    ],
)
def test_of_tokens_that_tie_the_lower_ids_stay(chosen, kept) -> None:
    rows = 8
    logits = torch.full((rows, 12), -50.0, device=DEVICE)
    logits[:, 2:10] = 1.0
    fixed = {"temperature": 0.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, "sample_index": 0, **chosen}
    given = {**parameters(rows, **fixed), "position": spread(rows).to(DEVICE)}
    assert checked(logits, given).unique().tolist() == kept


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.zeros(6, 5000, device=DEVICE)
    logits[0, [4300, 17]] = 2.0
    logits[1] = -torch.inf
    logits[2, 4999] = 1e-30
    logits[3, 70] = torch.nan
    logits[4, 4096] = torch.inf
    logits[5] = torch.nan
    found = checked(logits, parameters(6, temperature=0.0))
    assert found.tolist() == [17, 0, 4999, 0, 4096, 0]


def test_a_tiny_temperature_is_greedy_and_draws_between_ties() -> None:
    rows = 8
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0], device=DEVICE).expand(rows, 4)
    given = parameters(rows, temperature=1e-40, top_k=0, top_p=1.0, min_p=0.0)
    assert checked(logits, given).unique().tolist() == [1, 3]


@pytest.mark.parametrize("top_k", [0, 7])
def test_infinite_logits_share_the_draw_and_without_any_number_all_tokens_do(top_k) -> None:
    fixed = {"temperature": 1.0, "top_k": top_k, "top_p": 1.0, "min_p": 0.0, "seed": 1, "sample_index": 0}
    given = {**parameters(8, **fixed), "position": spread(8).to(DEVICE)}
    logits = torch.zeros(8, 9, device=DEVICE)
    logits[:, [3, 5]] = torch.inf
    assert checked(logits, given).tolist() == [3, 3, 3, 3, 5, 5, 5, 5]
    logits[:] = -torch.inf
    assert checked(logits, given).tolist() == [int(u * (top_k or 9)) for u in u_of(given).tolist()]


def test_what_lies_behind_a_row_is_not_read() -> None:
    """Logits of a vocabulary padded for the matrix product: the rows lie further apart than they are long."""
    wide = torch.full((6, 140), torch.inf, device=DEVICE)
    wide[:, :100] = random_logits(6, 100)
    given = parameters(6)
    assert torch.equal(checked(wide[:, :100], given), sample_tokens(wide[:, :100].contiguous(), **given))


def test_the_middle_of_us_step_decides() -> None:
    """u = (n + 1/2) / 2^23: rows in which n / 2^23 would give the token before."""
    vocab_size, u = 3000, torch.from_numpy(uniform(1, 0, range(100000))).double()
    at = ((vocab_size * u).floor() != (vocab_size * (u - 2.0**-24)).floor()).nonzero()[:4, 0]
    fixed = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, "sample_index": 0}
    given = {**parameters(4, **fixed), "position": at.to(DEVICE)}
    found = checked(torch.zeros(4, vocab_size, device=DEVICE), given)
    assert found.tolist() == (vocab_size * u[at]).long().tolist()


def test_min_p_may_rule_out_the_ties_at_the_edge_of_top_k() -> None:
    fixed = {"temperature": 1.0, "top_k": 4, "top_p": 1.0, "min_p": 0.5, "seed": 1, "sample_index": 0}
    given = {**parameters(8, **fixed), "position": spread(8).to(DEVICE)}
    logits = torch.zeros(8, 30, device=DEVICE)
    logits[:, [2, 9]] = 1.0
    assert checked(logits, given).tolist() == [2, 2, 2, 2, 9, 9, 9, 9]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits, given = random_logits(8, 300), parameters(8)
    together = sample_tokens(logits, **given)
    for row in (0, 3, 7):
        alone = {name: value[row : row + 1] for name, value in given.items()}
        assert sample_tokens(logits[row : row + 1], **alone).item() == together[row]


def test_no_rows_give_no_tokens() -> None:
    assert sample_tokens(torch.zeros(0, 10, device=DEVICE), **parameters(0)).shape == (0,)


def test_what_does_not_fit_is_refused() -> None:
    given = parameters(3)
    with pytest.raises(ValueError, match="each of the 2 rows"):
        sample_tokens(random_logits(2, 10), **given)
    with pytest.raises(ValueError, match="contiguous logits"):
        sample_tokens(random_logits(10, 3).T, **given)
    with pytest.raises(ValueError, match="seeds of int64"):
        sample_tokens(random_logits(3, 10), **{**given, "seed": given["seed"].int()})
