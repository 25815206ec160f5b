"""Draft trees: their shape, the path that is kept, and the verification of several candidates for one token.

The distribution of the token behind one node is computed exactly, from the rule itself: where it changes its mind is
found by bisection over each of its random numbers. Texts of three tokens are counted, as in `test_rejection.py`. Each
rule that is nearly right fails by both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference_impl.core.sampler import draw
from reference_impl.features.speculative.candidates import (
    NONE,
    Paths,
    drawn_without_replacement,
    first_of_equal,
    path_arrays,
    typical,
    verified_children,
)
from reference_impl.features.speculative.tree import Tree
from tests.engine.conftest import some
from tests.examples import examples
from tests.features.speculative.test_rejection import ALPHA, FILTERS, Tables, exact, p_value, tables

Rule = Callable[[Tensor, Tensor | None, Tensor, Tensor], Tensor]

# --- the shape -------------------------------------------------------------------------------------------------------


def test_a_tree_by_the_number_of_children_on_each_level() -> None:
    tree = Tree.of((3, 2))
    assert tree.parents == (-1, -1, -1, 0, 0, 1, 1, 2, 2)
    assert tree.depths.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert (tree.num_levels, tree.width, tree.up_to(1), tree.up_to(2)) == (2, 3, 3, 9)
    assert tree.children == {-1: [0, 1, 2], 0: [3, 4], 1: [5, 6], 2: [7, 8]}
    assert tree.lineage.tolist()[6:] == [[1, 6], [2, 7], [2, 8]]
    assert tree.first(4) == Tree((-1, -1, -1, 0))
    assert Tree.of((1, 1, 1)) == Tree((-1, 0, 1))


def test_a_tree_by_its_paths_in_any_order() -> None:
    tree = Tree.of([(0, 0, 1), (1,), (0,), (0, 0), (1, 0), (0, 0, 0)])
    assert tree.parents == (-1, -1, 0, 1, 2, 2)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ((), "expected how many children"),
        ((2, 0), "expected how many children"),
        ((True, 2), "expected how many children"),
        ((2, (0,)), "expected how many children"),
        ((8, 8), "at most 63 nodes, .* has more"),
        ([(0,), (0, 1)], r"expected path \(0, 0\) with \(0, 1\)"),
        ([(0,), (1, 0)], r"expected path \(1,\) with \(1, 0\)"),
    ],
)
def test_what_is_no_tree_is_refused(spec: Sequence, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Tree.of(spec)


@pytest.mark.parametrize(
    ("parents", "expected"),
    [((), "1 to 63"), ((-1,) * 64, "1 to 63"), ((-1, 1), "node 1 has parent 1"), ((-2,), "node 0 has parent -2"),
     ((-1, 0, -1), "level by level")],
)  # fmt: skip
def test_parents_that_make_no_tree_are_refused(parents: tuple[int, ...], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Tree(parents)


@st.composite
def trees(draw_: st.DrawFn, most: int = 20) -> Tree:
    parents = [-1]
    for node in range(1, draw_(st.integers(1, most))):
        parents.append(draw_(st.integers(parents[-1], node - 1)))  # parents that never go back: level by level
    return Tree(tuple(parents))


def paths_of(trees: Sequence[Tree]) -> Paths:
    return Paths(**{name: torch.from_numpy(array) for name, array in path_arrays(trees).items()})


def same_for_all(tree: Tree, num_rows: int) -> Paths:
    one = paths_of([tree])
    return Paths(*(array.expand(num_rows, *array.shape[1:]) for array in (one.above, one.depths, one.lineage)))


def path_to(tree: Tree, node: int) -> list[int]:
    return [*path_to(tree, tree.parents[node]), node] if node != -1 else []


@settings(max_examples=examples(60), deadline=None, derandomize=True, database=None)
@given(tree=trees(), known=st.integers(1, 5))
def test_a_node_sees_the_known_tokens_its_ancestors_and_itself(tree: Tree, known: int) -> None:
    bits = [int(b) % 2**64 for b in tree.sees(known)]
    for token in range(known):
        assert bits[token] == 2 ** (token + 1) - 1
    for node in range(len(tree.parents)):
        seen = {known + each for each in path_to(tree, node)} | set(range(known))
        assert {b for b in range(64) if bits[known + node] >> b & 1} == seen
        assert tree.depths[node] == len(path_to(tree, node)) - 1
        assert [each for each in tree.lineage[node] if each >= 0] == path_to(tree, node)
        before = [each for each in range(node) if tree.parents[each] == tree.parents[node]]
        assert [each for each in tree.earlier[node] if each >= 0] == before
    assert tree.inner == [node for node in range(len(tree.parents)) if node in tree.parents]


def test_the_last_of_63_nodes_is_the_sign_bit_and_one_more_is_refused() -> None:
    assert Tree((-1,) * 63).sees()[-1] == -(2**63) + 1
    with pytest.raises(ValueError, match="2 known tokens and 63 drafts in a tree: expected at most 64"):
        Tree((-1,) * 63).sees(2)


@settings(max_examples=examples(100), deadline=None, derandomize=True, database=None)
@given(tree=trees(), data=st.data())
def test_the_path_that_is_kept_is_the_longest_of_right_nodes(tree: Tree, data: st.DataObject) -> None:
    n = len(tree.parents)
    right = np.array(data.draw(st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1, max_size=4)))
    num, nodes = same_for_all(tree, len(right)).deepest(torch.from_numpy(right))
    for row, (length, found) in enumerate(zip(num.tolist(), nodes.tolist(), strict=True)):
        paths = [path_to(tree, node) for node in range(n) if right[row, path_to(tree, node)].all()]
        best = max(paths, key=len, default=[])  # the first of equally long ones
        assert found == best + [-1] * (tree.num_levels - len(best))
        assert length == len(best)


@settings(max_examples=examples(50), deadline=None, derandomize=True, database=None)
@given(some=st.lists(trees(), min_size=2, max_size=4), seed=st.integers(0, 99))
def test_rows_may_have_trees_of_their_own(some: list[Tree], seed: int) -> None:
    right = np.random.default_rng(seed).random((len(some), max(len(tree.parents) for tree in some))) < 0.7
    for row, tree in enumerate(some):
        right[row, len(tree.parents) :] = False
    num, nodes = paths_of(some).deepest(torch.from_numpy(right))
    for row, tree in enumerate(some):
        mine, its = paths_of([tree]).deepest(torch.from_numpy(right[row : row + 1, : len(tree.parents)]))
        assert num[row] == mine[0]
        assert nodes[row].tolist() == its[0].tolist() + [-1] * (nodes.shape[1] - its.shape[1])


# --- one node, exactly -----------------------------------------------------------------------------------------------


def bisected(is_low: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """[count]: up to which u in (0, 1) is_low(u [count]) holds."""
    low, high = torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
    for _ in range(45):
        middle = (low + high) / 2
        below = is_low(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low


def distribution_of(rule: Rule, p: Tensor, q: Tensor | None, children: Tensor) -> Tensor:
    """[rows, vocab_size]: what comes out for these children, over all random numbers. For rules that try one child
    after another, keep each below some number, and draw from what is left by inverse transform."""
    rows, vocab = p.shape
    m, never = children.shape[1], 1 - 2.0**-53

    def out(**numbers: Tensor) -> Tensor:
        u = torch.full((m + 1, rows), never, dtype=torch.float64)
        for name, value in numbers.items():
            u[int(name[1:])] = value
        return rule(p, q, children, u)

    found, left = torch.zeros_like(p), torch.ones(rows, dtype=torch.float64)
    for j in range(m):
        surely = out(**{f"u{j}": torch.full((rows,), 1e-300, dtype=torch.float64)})
        kept = bisected(lambda u, j=j, surely=surely: out(**{f"u{j}": u}) == surely, rows)
        # Where nothing depends on this number the child is kept always, and nothing on the last one, or never.
        lowest = out(**{f"u{m}": torch.full((rows,), 1e-300, dtype=torch.float64)})
        always = (out() == children[:, j]) & (lowest == children[:, j])
        kept = torch.where(surely == out(), always.double(), kept)
        found.scatter_add_(1, surely[:, None], (left * kept)[:, None])
        left = left * (1 - kept)
    below = torch.zeros(rows, dtype=torch.float64)
    for token in range(vocab):
        share = bisected(lambda u, token=token: out(**{f"u{m}": u}) <= token, rows)
        found[:, token] += left * (share - below)
        below = share
    return found


def mixed(rule: Rule, p: Tensor, q: Tensor, m: int, *, drawn: bool = True) -> Tensor:
    """[vocab_size]: over all ways to draw m candidates from q [vocab_size]; or of the m likeliest, as one way."""
    vocab = len(p)
    if drawn:
        ways, chances = [], []
        for way in itertools.permutations(range(vocab), m):
            chance, rest = 1.0, 1.0
            for token in way:
                chance *= float(q[token]) / rest if rest > 1e-12 else 0.0
                rest -= float(q[token])
            if chance > 0:
                ways.append(way)
                chances.append(chance)
    else:
        ways, chances = [tuple(q.topk(m).indices.tolist())], [1.0]
    rows = len(ways)
    told = q.expand(rows, -1) if drawn else None
    each = distribution_of(rule, p.expand(rows, -1), told, torch.tensor(ways))
    return (torch.tensor(chances, dtype=torch.float64)[:, None] * each).sum(0)


@st.composite
def simplex(draw_: st.DrawFn, vocab: int, fewest: int) -> Tensor:
    """Weights in eighths, of which at least `fewest` are above 0."""
    weights = draw_(st.lists(st.integers(0, 8), min_size=vocab, max_size=vocab))
    weights = [w or int(i < fewest) for i, w in enumerate(weights)]
    found = torch.tensor(weights, dtype=torch.float64)
    return found / found.sum()


@settings(max_examples=examples(40), deadline=None, derandomize=True, database=None)
@given(data=st.data(), m=st.integers(1, 3), drawn=st.booleans())
def test_the_token_behind_a_node_is_distributed_as_the_targets(data: st.DataObject, m: int, drawn: bool) -> None:
    p, q = data.draw(simplex(4, 1)), data.draw(simplex(4, m))
    found = mixed(verified_children, p, q, m, drawn=drawn)
    assert float((found - p).abs().max()) < 1e-9


def with_replacement(p: Tensor, q: Tensor | None, children: Tensor, u: Tensor) -> Tensor:
    """As if each candidate were drawn from all of q."""
    return by_steps(p, q, children, u, next_q=lambda q, x: q)


def not_divided(p: Tensor, q: Tensor | None, children: Tensor, u: Tensor) -> Tensor:
    """q without what was tried, not divided by its sum."""
    return by_steps(p, q, children, u, next_q=lambda q, x: q.scatter(1, x, 0))


def sorted_by_q(p: Tensor, q: Tensor | None, children: Tensor, u: Tensor) -> Tensor:
    """Likelier candidates are tried first, in whatever order they were drawn."""
    assert q is not None
    order = q.gather(1, children).argsort(dim=1, descending=True, stable=True)
    return verified_children(p, q, children.gather(1, order), u)


def match_or_resample(p: Tensor, q: Tensor | None, children: Tensor, u: Tensor) -> Tensor:
    """What is not kept is drawn from p, not from what is left of it."""
    return by_steps(p, q, children, u, last=lambda before, rest: before)


def rest_of_p_is_not_divided(p: Tensor, q: Tensor | None, children: Tensor, u: Tensor) -> Tensor:
    return by_steps(p, q, children, u, divide=lambda rest: rest)


def each_against_p(p: Tensor, q: Tensor | None, children: Tensor, u: Tensor) -> Tensor:
    """p does not change between candidates."""
    return by_steps(p, q, children, u, keep_p=True)


def by_steps(
    p: Tensor, q: Tensor | None, children: Tensor, u: Tensor, *,
    next_q: Callable[[Tensor, Tensor], Tensor] | None = None, last: Callable[[Tensor, Tensor], Tensor] | None = None,
    divide: Callable[[Tensor], Tensor] | None = None, keep_p: bool = False,
) -> Tensor:  # fmt: skip
    """The rule once more, with one of its parts replaced."""
    before, found = p, torch.full_like(children[:, 0], NONE)
    for j, token in enumerate(children.unbind(1)):
        x = token[:, None]
        drawn = torch.zeros_like(p).scatter(1, x, 1) if q is None else q
        kept = u[j] * drawn.gather(1, x)[:, 0] < p.gather(1, x)[:, 0]
        found = torch.where((found == NONE) & kept, token, found)
        rest = (p - drawn).clamp(min=0)
        if not keep_p or j == children.shape[1] - 1:
            p = (divide or (lambda r: r / r.sum(-1, keepdim=True).clamp(min=1e-300)))(rest)
        if q is not None:
            q = q.scatter(1, x, 0) / (1 - q.gather(1, x)) if next_q is None else next_q(q, x)
    p = p if last is None else last(before, p)
    return torch.where(found == NONE, draw(p, u[-1]), found)


MUTANTS = (with_replacement, not_divided, sorted_by_q, match_or_resample, rest_of_p_is_not_divided, each_against_p)
P = torch.tensor([0.1, 0.15, 0.3, 0.45], dtype=torch.float64)
Q = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)


@pytest.mark.parametrize("m", [2, 3])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_rule_that_is_nearly_right_is_seen(mutant: Rule, m: int) -> None:
    assert float((mixed(by_steps, P, Q, m) - P).abs().max()) < 1e-9, "with no part replaced it is right"
    assert float((mixed(verified_children, P, Q, m) - P).abs().max()) < 1e-9
    assert float((mixed(mutant, P, Q, m) - P).abs().max()) > 1e-3


def test_the_likeliest_candidates_taken_as_drawn_are_seen() -> None:
    told_q = mixed(lambda p, q, children, u: verified_children(p, Q.expand(len(p), -1), children, u), P, Q, 2,
                   drawn=False)  # fmt: skip
    assert float((told_q - P).abs().max()) > 1e-3


def test_more_candidates_are_kept_more_often_and_fewer_without_replacement_would_be() -> None:
    """The chance that one of m is kept."""

    def kept(m: int) -> float:
        found = 0.0
        for way in itertools.permutations(range(4), m):
            chance = float(np.prod([Q[t] / (1 - sum(Q[s] for s in way[:i])) for i, t in enumerate(way)]))
            p, q, left = P.clone(), Q.clone(), 1.0
            for token in way:
                left *= 1 - min(1.0, float(p[token] / q[token]))
                p, q = (p - q).clamp(min=0), q.clone()
                p, q[token] = p / p.sum().clamp(min=1e-300), 0
                q /= q.sum().clamp(min=1e-300)
            found += chance * (1 - left)
        return found

    by_number = [kept(m) for m in (1, 2, 3)]
    assert by_number[0] == pytest.approx(float(torch.minimum(P, Q).sum()))
    assert by_number[0] < by_number[1] < by_number[2]


# --- drafts that lie -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["no numbers", "some are no numbers", "too few", "equal", "none"])
def test_drafts_that_lie_leave_the_distribution_right(kind: str) -> None:
    q, children = Q.clone(), torch.tensor([[2, 0, 3]])
    if kind == "no numbers":
        q[:] = torch.nan
    elif kind == "some are no numbers":
        q[1] = torch.nan
    elif kind == "too few":  # and the last two are any
        q = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    elif kind == "equal":
        children = torch.tensor([[2, 2, 2]])
    else:
        children = torch.full((1, 3), NONE)
    told = None if kind in ("equal", "none") else q[None]
    if kind == "too few":
        assert int(drawn_without_replacement(q[None], torch.full((3, 1), 0.5))[0, 0]) == 2
    found = distribution_of(verified_children, P[None], told, children)[0]
    assert float((found - P).abs().max()) < 1e-9


def test_where_there_are_fewer_children_those_are_tried() -> None:
    children = torch.tensor([[1, NONE, NONE], [0, 2, NONE], [3, 1, 0]])
    found = distribution_of(verified_children, P.expand(3, -1), None, children)
    assert float((found - P).abs().max()) < 1e-9
    u = torch.tensor([[0.1499], [0.99], [0.99], [0.5]], dtype=torch.float64)
    assert int(verified_children(P[None], None, children[:1], u)) == 1


def test_they_are_drawn_one_after_another_each_without_those_before() -> None:
    count, random = 60_000, torch.Generator().manual_seed(1)
    u = torch.rand(2, count, generator=random, dtype=torch.float64)
    drawn = drawn_without_replacement(Q.expand(count, -1), u)
    expected = np.array([[Q[a] * Q[b] / (1 - Q[a]) if a != b else 0 for b in range(4)] for a in range(4)]).reshape(-1)
    assert p_value((4 * drawn[:, 0] + drawn[:, 1]).numpy(), expected) > ALPHA


def test_of_equal_siblings_the_first_may_be_on_a_path() -> None:
    siblings = torch.tensor([[NONE, NONE], [0, NONE], [0, 1], [NONE, NONE], [3, NONE]])
    assert first_of_equal(torch.tensor([5, 5, 5, 5, 6]), siblings).tolist() == [True, False, False, True, True]


# --- texts of three tokens -------------------------------------------------------------------------------------------

TEXTS = 60_000
SHAPES: dict[str, Tree] = {
    "two by two": Tree.of((2, 2)),
    "wide": Tree.of((3,)),
    "uneven": Tree.of([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)]),
    "chain": Tree.of((1, 1, 1)),
}


def texts_of(rule: Rule, p: Tables, q: Tables, tree: Tree, *, drawn: bool = True) -> np.ndarray:
    """[TEXTS] numbers that the texts spell: a tree is verified in one step, a token behind its path comes with it; what
    is missing is drawn plainly, as next steps without drafts draw it."""
    vocab, length, random = p[0].shape[1], len(p), np.random.default_rng(5)

    def numbers(*shape: int) -> Tensor:
        return torch.from_numpy(random.random((*shape, TEXTS), dtype=np.float32).clip(2**-24, 1 - 2**-24))

    n = len(tree.parents)
    spelled = torch.zeros(TEXTS, n + 1, dtype=torch.int64)  # up to each node; of the root nothing, in the last column
    right, behind = torch.zeros(TEXTS, n, dtype=torch.bool), torch.zeros(TEXTS, n + 1, dtype=torch.int64)
    for node in range(-1, n):
        depth = 0 if node == -1 else int(tree.depths[node]) + 1
        if depth >= length:
            continue
        of_p, of_q = p[depth][spelled[:, node]], q[depth][spelled[:, node]]
        nodes = tree.children.get(node, [])
        if not nodes:
            behind[:, node] = draw(of_p, numbers(1)[0])
            continue
        m = len(nodes)
        tokens = drawn_without_replacement(of_q, numbers(m)) if drawn else of_q.topk(m).indices
        behind[:, node] = rule(of_p, of_q if drawn else None, tokens, numbers(m + 1))
        spelled[:, nodes] = spelled[:, [node]] * vocab + tokens
        same = torch.stack([(tokens[:, :j] == tokens[:, j : j + 1]).any(1) for j in range(m)], 1)
        right[:, nodes] = (behind[:, [node]] == tokens) & ~same
    num, path = same_for_all(tree, len(right)).deepest(right)
    last = torch.where(num > 0, path.gather(1, (num - 1).clamp(min=0)[:, None])[:, 0], n)
    text = spelled.gather(1, last[:, None])[:, 0]
    for position in range(length):
        of_text = p[position][text.clamp(max=len(p[position]) - 1)]  # of those that have more it is not used
        plain = draw(of_text, numbers(1)[0])
        token = torch.where(num == position, behind.gather(1, last[:, None])[:, 0], plain)
        text = torch.where(num <= position, text * vocab + token, text)
    return text.numpy()


@pytest.mark.parametrize(
    ("name", "shape", "drawn"),
    some(
        [("temperature", "two by two", True), ("top_k", "two by two", False), ("top_k", "wide", True),
         ("top_p", "wide", False), ("top_p", "uneven", True), ("temperature", "uneven", False),
         ("temperature", "chain", True)],
        list(itertools.product(("temperature", "top_k", "top_p"), SHAPES, (True, False))),
    ),
)  # fmt: skip
def test_the_joint_distribution_of_three_tokens_is_the_targets(name: str, shape: str, drawn: bool) -> None:
    p, q = tables(FILTERS[name], 1), tables(FILTERS[name], 2)
    assert p_value(texts_of(verified_children, p, q, SHAPES[shape], drawn=drawn), exact(p)) > ALPHA


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("name", ["top_p"])
def test_rules_that_are_nearly_right_are_seen_in_texts(mutant: Rule, name: str) -> None:
    p, q = tables(FILTERS[name], 1), tables(FILTERS[name], 3)
    assert p_value(texts_of(mutant, p, q, SHAPES["uneven"]), exact(p)) < ALPHA


# --- the lossy one ---------------------------------------------------------------------------------------------------


def test_typical_acceptance_keeps_what_is_not_far_below_what_the_entropy_says_and_is_lossy() -> None:
    p = torch.tensor([[0.97, 0.01, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25], [0.9, 0.1, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    tokens = torch.arange(4).expand(4, 4)
    kept = torch.stack([typical(p, tokens[:, t]) for t in range(4)], 1)
    # thresholds: min(0.09, 0.3 exp(-entropy)) = 0.09, 0.075, 0.09, 0.09
    assert kept.tolist() == [
        [True, False, False, False], [True, True, True, True], [True, True, False, False], [False, True, False, False]
    ]  # fmt: skip

    def rule(p: Tensor, q: Tensor | None, children: Tensor, u: Tensor) -> Tensor:
        kept = torch.stack([typical(p, child) for child in children.unbind(1)], 1)
        first = children.gather(1, kept.long().argmax(1, keepdim=True))[:, 0]
        return torch.where(kept.any(1), first, draw(p, u[-1]))

    p, q = tables(FILTERS["temperature"], 1), tables(FILTERS["temperature"], 2)
    assert p_value(texts_of(rule, p, q, SHAPES["two by two"]), exact(p)) < ALPHA
