"""The radix-tree viewer: what it shows is what the managers hold, and what goes next is what is evicted next."""

import re
from collections.abc import Callable

import pytest

from chapters.widgets.radix_tree import NUMBERS, Snapshot, draw, radix_tree, snapshot
from reference_impl import SamplingParams
from reference_impl.core.block_pool import BlockPool
from reference_impl.core.kv_manager import KVManager
from reference_impl.features.prefix.hash_index import HashIndex
from reference_impl.features.prefix.radix_index import RadixIndex
from reference_impl.interfaces import Request

BLOCK = 2


def managers(num_blocks: int = 12) -> tuple[KVManager, KVManager]:
    return tuple(KVManager(BlockPool(num_blocks), BLOCK, index=make(BLOCK)) for make in (RadixIndex, HashIndex))  # type: ignore[return-value]


def start(manager: KVManager, tokens: list[int], salt: str | None = None) -> Request:
    request = Request("r", tokens, len(tokens), SamplingParams(), seed=0, arrival=0.0, cache_salt=salt)
    assert manager.admit(request, len(tokens), len(tokens))
    request.num_computed_tokens = len(tokens)
    manager.commit(request)
    return request


def two_texts_with_a_fork() -> tuple[tuple[KVManager, KVManager], list[Request]]:
    """1 2 3 4 | 5 6 is done, 1 2 3 4 | 7 8 9 9 is held."""
    both = managers()
    for manager in both:
        manager.free(start(manager, [1, 2, 3, 4, 5, 6]))
    return both, [start(manager, [1, 2, 3, 4, 7, 8, 9, 9]) for manager in both]


def test_a_fork_is_a_parent_with_two_children_and_the_blocks_keep_their_numbers() -> None:
    both, _ = two_texts_with_a_fork()
    seen = snapshot("fork", *both, spell=lambda tokens: "".join(map(str, tokens)))
    assert [(n.text, n.start, n.parent, [b.block for b in n.blocks]) for n in seen.nodes] == [
        ("1234", 0, None, [0, 1]),
        ("56", 2, 0, [2]),
        ("7899", 2, 0, [3, 4]),
    ]
    assert {link.block.block for link in seen.links} == {0, 1, 2, 3, 4}
    assert [link.parent for link in seen.links if link.block.block in (2, 3)] == [seen.links[1].digest] * 2
    assert seen.free == both[0].pool.num_free


def test_holders_are_requests_and_not_the_index() -> None:
    both, _ = two_texts_with_a_fork()
    seen = snapshot("fork", *both)
    assert {b.block: b.holders for n in seen.nodes for b in n.blocks} == {0: 1, 1: 1, 2: 0, 3: 1, 4: 1}
    assert {link.block.block: link.block.holders for link in seen.links} == {0: 1, 1: 1, 2: 0, 3: 1, 4: 1}


@pytest.mark.parametrize("held", [True, False])
def test_the_places_are_the_order_in_which_the_blocks_are_evicted(held: bool) -> None:
    both, requests = two_texts_with_a_fork()
    if not held:
        for manager, request in zip(both, requests, strict=True):
            manager.free(request)
    seen = snapshot("fork", *both)
    assert snapshot("fork", *both) == seen, "looking changes nothing"
    shown: list[dict[int, int | None]] = [
        {b.block: b.place for n in seen.nodes for b in n.blocks},
        {link.block.block: link.block.place for link in seen.links},
    ]
    for manager, places in zip(both, shown, strict=True):
        assert manager.index is not None
        before = len(manager.index)
        order = manager.index.evict(before, lambda block, pool=manager.pool: pool.ref_count(block) == 1)  # type: ignore[misc]
        assert order == sorted((b for b, place in places.items() if place), key=lambda b: places[b] or 0)
        assert len(order) == (1 if held else 5)


def test_the_indexes_list_parents_before_links_and_children_before_nodes_used_as_late() -> None:
    """What the picture is drawn from, also after blocks went and came again."""
    tree, chain = RadixIndex(BLOCK), HashIndex(BLOCK)
    for index in (tree, chain):
        index.insert([1, 2, 3, 4, 5, 6], b"a", [0, 1, 2])
        index.insert([1, 2, 3, 4, 7, 8], b"a", [0, 1, 3])
        index.insert([9, 9], b"b", [4])
        assert index.evict(1, lambda block: True) == [2]
        index.insert([1, 2, 3, 4, 5, 6], b"a", [0, 1, 5])
        index.match([9, 9], b"b")
    links = chain.links()
    assert sorted(link.block for link in links) == [0, 1, 3, 4, 5]
    assert all(link.parent is None or link.parent in links[:i] for i, link in enumerate(links))
    assert [node.blocks for node in tree.nodes()] == [[3], [5], [0, 1], [4]]
    tree.nodes().clear()
    links.clear()
    assert (len(tree.nodes()), len(chain.links())) == (4, 5), "each call gives a list of its own"


def test_prefixes_of_two_owners_are_two_trees() -> None:
    both = managers()
    for manager in both:
        for salt in ("a", "b"):
            manager.free(start(manager, [1, 2, 3, 4], salt))
    seen = snapshot("owners", *both)
    assert [(n.owner, n.parent) for n in seen.nodes] == [(0, None), (1, None)]
    assert [n.last_used for n in seen.nodes] == [2, 1]


def test_managers_over_other_indexes_are_refused() -> None:
    tree, chain = managers()
    with pytest.raises(TypeError, match="set prefix_cache to 'radix' and 'hash'"):
        snapshot("wrong", chain, tree)


def shots() -> list[Snapshot]:
    both = managers(40)
    taken = [snapshot("nothing yet", *both)]
    for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 7, 8, 8], [9, 9] * 8):
        held = [start(manager, tokens) for manager in both]
        taken.append(snapshot("held", *both))
        for manager, request in zip(both, held, strict=True):
            manager.free(request)
        taken.append(snapshot("done", *both))
    return taken


@pytest.mark.parametrize("make", [shots, list], ids=["a run", "nothing"])
@pytest.mark.usefixtures("painted")
def test_every_control_works_at_both_ends(make: Callable[[], list[Snapshot]]) -> None:
    view = radix_tree(make())
    for step in (view.controls["step"].min, view.controls["step"].max):
        for number in NUMBERS:
            view.controls["step"].value, view.controls["number"].value = step, number
            assert re.search(r'<img [^>]*alt="[^"]{20,}"', view.picture.value)
            assert "nan" not in view.shown.alt.lower()


def test_the_picture_in_words_names_what_is_held_and_what_goes_next() -> None:
    taken = shots()
    assert "Nothing can be evicted" in draw(taken, 2).alt
    assert "3 of them held" in draw(taken, 2).alt
    assert "Block 2 would be evicted next" in draw(taken, 3).alt
    assert "has 1 node with 3 blocks" in draw(taken, 2).alt
    assert draw(taken, 99).alt.startswith(f"Step {len(taken)} of {len(taken)}")
