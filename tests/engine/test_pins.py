"""A pinned prefix stays in the cache, whatever else is served; hits, savings and evictions are in the trace."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.core.ranking import FirstCome
from reference_impl.features.beams.search import beam_search
from reference_impl.interfaces import Request, SamplingParams

ONE = SamplingParams(max_tokens=1, temperature=0)
SYSTEM = random.Random(2).choices(range(61), k=20)


def serve(engine: Engine, prompt: list[int], **options: str) -> int:
    """Returns how many tokens were cached."""
    request = engine.add(prompt, ONE, **options)  # type: ignore[arg-type]
    while engine.has_work():
        engine.step()
    return request.num_cached_tokens


@pytest.fixture(params=["hash", "radix"])
def engine(request: pytest.FixtureRequest, random_model: Callable) -> Engine:
    return Engine(random_model("float32"), EngineConfig(block_size=4, num_blocks=16, prefix_cache=request.param))


def flood(engine: Engine) -> None:
    for i in range(8):
        serve(engine, random.Random(100 + i).choices(range(61), k=23))


def test_what_is_pinned_is_found_after_a_flood_and_what_is_not_is_gone(engine: Engine) -> None:
    serve(engine, [*SYSTEM, 1])
    pin = engine.pin(SYSTEM)
    assert pin.num_tokens == 20
    flood(engine)
    assert engine.trace.prefix_cache().evicted_blocks > 0
    assert serve(engine, [*SYSTEM, 2, 2]) == 20
    engine.unpin(pin)
    assert engine.kv.num_available == 16
    flood(engine)
    assert serve(engine, [*SYSTEM, 3, 3]) == 0


def test_a_pin_belongs_to_a_salt_and_can_be_taken_off_once(engine: Engine) -> None:
    serve(engine, [*SYSTEM, 1], cache_salt="a")
    assert engine.pin(SYSTEM).num_tokens == 0
    pin = engine.pin(SYSTEM, cache_salt="a")
    assert pin.num_tokens == 20
    engine.unpin(pin)
    with pytest.raises(ValueError, match="taken off already"):
        engine.unpin(pin)


def test_pins_leave_room_for_every_request_or_are_refused(engine: Engine) -> None:
    serve(engine, [*SYSTEM, 1])
    long = engine.add([5] * 60, ONE)
    with pytest.raises(ValueError, match=r"pinned, 5 blocks would leave room for 45 tokens; a request needs 61"):
        engine.pin(SYSTEM)
    engine.abort(long.id)
    pin = engine.pin(SYSTEM)
    with pytest.raises(ValueError, match="the prompt has 60 tokens; at most 44 and one token of output fit"):
        engine.add([5] * 60, ONE)
    engine.unpin(pin)
    assert serve(engine, [5] * 60) == 0


def test_the_trace_counts_hits_of_first_admissions(engine: Engine) -> None:
    for own in (1, 2, 3):
        serve(engine, [*SYSTEM, own, own])
    use = engine.trace.prefix_cache()
    assert (use.prompt_tokens, use.cached_tokens, use.evicted_blocks) == (66, 40, 0)
    assert use.hit_rate == 40 / 66


def test_beams_that_do_not_fit_beside_what_is_pinned_are_refused_with_the_numbers(engine: Engine) -> None:
    assert beam_search(engine, [5, 6, 7], width=2, max_tokens=20)
    serve(engine, [*SYSTEM, 1])
    assert engine.pin(SYSTEM).num_tokens == 20
    with pytest.raises(ValueError, match="may need 12 KV blocks; there are 11"):
        beam_search(engine, [5, 6, 7], width=2, max_tokens=20)


def test_a_request_that_the_scheduler_refuses_leaves_nothing_behind(random_model: Callable) -> None:
    class Nonsense(FirstCome):
        def rank(self, request: Request) -> float:
            return math.nan if request.tokens[0] == 9 else 0.0

    engine = Engine(random_model("float32"), EngineConfig(num_blocks=16), Parts(policy=Nonsense()))
    with pytest.raises(ValueError, match="a rank that can be ordered"):
        engine.add([9, 9], SamplingParams(max_tokens=1, n=3))
    assert not engine.requests
    assert not engine.has_work()
    assert serve(engine, [1, 2]) == 0
