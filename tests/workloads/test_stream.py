"""What the streams of the six workloads keep: order, sharing, sessions, seeds, and how little memory they take."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tracemalloc
from collections import Counter, defaultdict, deque
from itertools import islice, pairwise, takewhile
from pathlib import Path

import numpy as np
import pytest
import yaml

from reference_impl.simulation.workloads import (
    PAGE_TOKENS,
    Bursty,
    ClosedLoop,
    Poisson,
    WorkloadRequest,
    names,
    read_workload,
    stream,
    tokens_of,
    traces_folder,
    workload,
)
from reference_impl.simulation.workloads.sessions import Sessions
from reference_impl.simulation.workloads.table import measure

ROOT = Path(__file__).resolve().parents[2]
SESSIONS = [name for name in names() if name != "batch"]


def digest(requests: list[WorkloadRequest]) -> str:
    return hashlib.sha256(repr(requests).encode()).hexdigest()[:16]


# The streams of seed 7: on another machine, under another NumPy, and after a change of the code they must be these.
DIGESTS = {
    "agents": "1b4df88fc23b9b12",
    "batch": "b5954478b69ab1cf",
    "chat": "3143809c0a457101",
    "code_completion": "d241a3d77379d5e4",
    "rag": "7cebac3ff03f3d5a",
    "vision_language": "5759d6c545d427bc",
}


@pytest.mark.parametrize("name", names())
def test_the_stream_of_a_seed_is_fixed(name: str) -> None:
    arrivals = "closed_loop" if name == "vision_language" else None
    assert digest(list(workload(name, seed=7, num_requests=500, arrivals=arrivals))) == DIGESTS[name]


def test_the_stream_does_not_depend_on_the_process() -> None:
    code = (
        "from reference_impl.simulation.workloads import workload\nimport hashlib\n"
        "print(hashlib.sha256(repr(list(workload('rag', seed=7, num_requests=500))).encode()).hexdigest()[:16])"
    )
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        run = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, timeout=600)
        assert run.stdout.strip() == DIGESTS["rag"], run.stderr


@pytest.mark.parametrize("name", names())
def test_fewer_requests_are_the_beginning_of_more(name: str) -> None:
    assert list(workload(name, num_requests=40)) == list(islice(workload(name), 40))
    assert list(workload(name, num_requests=0)) == []


@pytest.mark.parametrize("arrivals", ["poisson", "bursty", "diurnal"])
def test_open_arrivals_come_in_order_and_at_the_rate(arrivals: str) -> None:
    requests = list(workload("chat", rate=50.0, num_requests=8000, arrivals=arrivals))
    times = [r.arrival for r in requests]
    assert times == sorted(times)
    assert times[0] >= 0.0
    # A gamma process of cv 2 has the widest spread: 2 / sqrt(8000) = 2.2 %.
    assert len(times) / times[-1] == pytest.approx(50.0, rel=0.1)
    assert all(r.after is None and r.think == 0.0 for r in requests)


def test_the_arrivals_of_all_requests_have_the_law_that_was_asked_for() -> None:
    """Sessions must not bend it: that a turn follows another is decided by who sends, not when."""
    for process, cv in ((Poisson(rate=5.0), 1.0), (Bursty(rate=5.0, cv=3.0), 3.0)):
        gaps = np.diff([r.arrival for r in workload("agents", arrivals=process, num_requests=4000)])
        assert gaps.mean() == pytest.approx(0.2, rel=5 * cv / 4000**0.5)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.15)


@pytest.mark.parametrize("name", names())
def test_each_request_is_whole(name: str) -> None:
    spec = read_workload(traces_folder() / f"{name}.yaml")
    seen = set()
    for r in workload(name, num_requests=2000):
        assert 1 <= r.num_prompt_tokens <= spec.max_prompt_tokens.tokens
        assert r.num_output_tokens >= 1
        assert len(r.pages) == r.num_prompt_tokens // PAGE_TOKENS
        assert len(set(r.pages)) == len(r.pages)
        assert all(type(page) is int and 0 <= page < 2**64 for page in r.pages)
        assert bool(r.session) == (name != "batch")
        assert r.id.startswith(f"{r.session or name}")
        assert (r.images > 0) <= (name == "vision_language")
        seen.add(r.id)
    assert len(seen) == 2000


@pytest.mark.parametrize("name", [n for n in SESSIONS if n != "rag"])
def test_a_turn_begins_with_all_of_the_turn_before(name: str) -> None:
    last: dict[str, WorkloadRequest] = {}
    later = 0
    for r in workload(name, num_requests=3000):
        if r.session in last:
            before = last[r.session]
            assert r.pages[: len(before.pages)] == before.pages
            assert r.num_prompt_tokens > before.num_prompt_tokens
            assert (r.tenant, r.images) == (before.tenant, before.images)
            assert int(r.id.rsplit(".", 1)[1]) == int(before.id.rsplit(".", 1)[1]) + 1
            assert r.arrival > before.arrival
            later += 1
        last[r.session] = r
    assert later > 200


def test_answers_are_part_of_the_next_prompt() -> None:
    """chat keeps every output: the next prompt is longer by at least the output and a token."""
    last: dict[str, WorkloadRequest] = {}
    for r in workload("chat", num_requests=3000):
        if r.session in last:
            before = last[r.session]
            assert r.num_prompt_tokens >= before.num_prompt_tokens + before.num_output_tokens + 1
        last[r.session] = r


def test_requests_of_a_tenant_share_its_system_prompt_and_nothing_else() -> None:
    """Shared pages of two sessions: exactly the full pages of the system prompt, and none across tenants."""
    by_tenant: dict[str, list[WorkloadRequest]] = defaultdict(list)
    sessions: set[str] = set()
    for r in workload("agents", num_requests=3000):
        if r.session not in sessions:
            sessions.add(r.session)
            by_tenant[r.tenant].append(r)
    popular = [group for group in by_tenant.values() if len(group) > 5]
    assert len(popular) > 5
    firsts = set()
    for group in popular:
        shared = {_common(a, b) for a, b in pairwise(group)}
        assert len(shared) == 1
        assert min(shared) > 5
        firsts.add(group[0].pages[0])
    assert len(firsts) == len(popular)
    assert len(by_tenant) <= 30


def test_tenants_are_popular_by_rank() -> None:
    counts = Counter(r.tenant for r in workload("batch", num_requests=5000))
    expected = np.arange(1, 6) ** -0.5
    found = np.array([counts[f"batch-{t}"] for t in range(5)])
    assert found / 5000 == pytest.approx(expected / expected.sum(), abs=0.035)


def test_retrieved_documents_are_shared_only_behind_equal_ones() -> None:
    """rag draws anew at every turn: some pages beyond the system prompt are found again, most are not."""
    requests = list(workload("rag", num_requests=4000))
    system = {_shared([r for r in requests if r.tenant == t]) for t in {r.tenant for r in requests}}
    assert all(15 <= pages <= 31 for pages in system)  # 1,000 to 2,000 tokens
    seen: set[int] = set()
    beyond = []
    for r in requests:
        beyond.append(sum(page in seen for page in r.pages))
        seen.update(r.pages)
    beyond_system = [b for b in beyond if b > max(system) + 1]
    assert 0.02 < len(beyond_system) / len(requests) < 0.5


def test_the_shared_part_of_two_prompts_is_shared_as_tokens() -> None:
    a, b = next(_pairs("chat"))
    pages = _common(a, b)
    one, two = tokens_of(a, 4096), tokens_of(b, 4096)
    assert pages > 0
    assert one[: pages * PAGE_TOKENS] == two[: pages * PAGE_TOKENS]
    assert one[: (pages + 1) * PAGE_TOKENS] != two[: (pages + 1) * PAGE_TOKENS]


def test_seeds_are_other_users_of_the_same_service() -> None:
    one, two = list(workload("chat", seed=1, num_requests=2000)), list(workload("chat", seed=2, num_requests=2000))
    assert not {r.id for r in one} & {r.id for r in two}
    assert [r.arrival for r in one] != [r.arrival for r in two]
    # Tenants whose system prompt fills a page, as the first seed shows it: two sessions begin alike.
    begins: dict[tuple[str, int], set[str]] = defaultdict(set)
    for r in one:
        if r.pages:
            begins[r.tenant, r.pages[0]].add(r.session)
    first = {tenant: page for (tenant, page), sessions in begins.items() if len(sessions) > 1}
    assert len(first) > 10
    both = [r for r in two if r.tenant in first and r.pages]
    assert len(both) > 300
    assert all(r.pages[0] == first[r.tenant] for r in both)
    # 70 pages are more than any system prompt: there the users' own texts begin.
    assert not {p for r in one for p in r.pages[70:]} & {p for r in two for p in r.pages[70:]}


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_is_the_same_under_other_arrivals(name: str) -> None:
    def content(**arguments: object) -> dict[str, tuple[object, ...]]:
        stream = workload(name, num_requests=1500, **arguments)  # type: ignore[arg-type]
        return {r.id: (r.num_prompt_tokens, r.num_output_tokens, r.pages, r.tenant, r.images) for r in stream}

    one = content(
        arrivals=Poisson(rate=0.02)
    )  # slow: few sessions are under way, so all streams begin with the same ones
    for other in (content(arrivals=Bursty(rate=0.05, cv=4.0)), content(arrivals=ClosedLoop(num_users=25))):
        both = one.keys() & other.keys()
        assert len(both) > 50
        assert all(one[id] == other[id] for id in both)


def test_the_first_requests_are_like_the_later_ones() -> None:
    """The stream starts in the middle of the service's life: no run-up of first turns."""
    first = measure(r for seed in range(20) for r in workload("chat", seed=seed, num_requests=200))
    late = measure(islice(workload("chat"), 4000, 9000))
    # Standard errors: 2 % of the mean prompt each.
    assert first.later_turns == pytest.approx(late.later_turns, abs=0.04)
    assert first.later_turns == pytest.approx(1 - 1 / 3.5, abs=0.04)
    assert first.prompt[0] == pytest.approx(late.prompt[0], rel=0.1)


def test_pauses_are_at_least_the_ones_that_were_drawn() -> None:
    ready = {}
    gaps = []
    for r in workload("chat", rate=40.0, num_requests=12_000):
        if r.session in ready:
            gaps.append(r.arrival - ready[r.session])
        ready[r.session] = r.arrival + 0.025 * r.num_output_tokens
    assert min(gaps) > 0
    # Drawn: lognormal, median 100 s; of the last 300 s only the short ones are seen, so compare below 60 s.
    assert np.mean(np.array(gaps) < 10) < 0.05
    assert len(gaps) > 1200


def test_closed_loop_users_wait_for_themselves() -> None:
    requests = list(workload("chat", num_requests=600, arrivals=ClosedLoop(num_users=12)))
    users = [requests[user::12] for user in range(12)]  # one of each, then the next
    for own in users:
        assert own[0].after is None
        assert own[0].think == 0.0
        assert [r.after for r in own[1:]] == [r.id for r in own[:-1]]
        assert all(r.arrival == 0.0 for r in own)
        changes = [(a, b) for a, b in pairwise(own) if a.session != b.session]
        assert all(b.id.endswith(".1") for _, b in changes)
        assert len({r.session for r in own}) == len(changes) + 1
    thinks = np.array([r.think for own in users for r in own[1:]])
    assert np.median(thinks) == pytest.approx(100, rel=0.2)


def test_closed_loop_pauses_can_be_given() -> None:
    thinks = np.array(
        [r.think for r in islice(workload("chat", arrivals=ClosedLoop(num_users=10, think=2.0)), 10, 4010)]
    )
    assert thinks.mean() == pytest.approx(2.0, abs=5 * 2.0 / 4000**0.5)
    assert thinks.std() == pytest.approx(2.0, rel=0.15)
    assert all(r.think == 0.0 for r in workload("chat", arrivals=ClosedLoop(num_users=10, think=0.0), num_requests=100))


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """A workload with everything in it (documents, images, sessions) and short prompts: pages are not the question."""
    raw = yaml.safe_load((traces_folder() / "rag.yaml").read_text(encoding="utf-8"))
    raw["documents"] |= {"num": 50, "count": {"distribution": "constant", "value": 1, "because": "test"}}
    for lengths in (raw["tenants"]["system_prompt"], raw["documents"]["tokens"], raw["message"], raw["output"]):
        lengths |= {"median": 5, "max": 20}
    raw["images"] = {"count": raw["documents"]["count"], "tokens": raw["message"], "because": "test"}
    raw["arrivals"] = {"process": "poisson", "rate": 4.0, "because": "test"}
    path = tmp_path / "short.yaml"
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    return path


@pytest.mark.parametrize("closed", [False, True])
def test_more_requests_take_no_more_memory(short: Path, closed: bool) -> None:
    stream = workload(short, arrivals=ClosedLoop(num_users=100) if closed else None)
    tracemalloc.start()
    try:
        deque(islice(stream, 4000), maxlen=0)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        deque(islice(stream, 8000), maxlen=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # An integer kept per request would be 280 kB; the sessions under way vary by some 100 kB.
    assert peak - before < 200_000


def test_tens_of_thousands_of_requests_leave_nothing_behind(short: Path) -> None:
    """Live blocks of Python's allocator instead of tracemalloc, which makes each request several times slower."""
    stream = workload(short)
    deque(islice(stream, 10_000), maxlen=0)
    before = sys.getallocatedblocks()
    deque(islice(stream, 60_000), maxlen=0)
    assert sys.getallocatedblocks() - before < 10_000


def _common(a: WorkloadRequest, b: WorkloadRequest) -> int:
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(a.pages, b.pages, strict=False)))


def _shared(requests: list[WorkloadRequest]) -> int:
    """Pages with which all of them begin."""
    return min(_common(requests[0], other) for other in requests)


def _pairs(name: str) -> object:
    """Requests of different sessions that share pages, and differ within both."""
    requests = list(workload(name, num_requests=500))
    for a in requests:
        for b in requests:
            if a.session != b.session and 0 < _common(a, b) < min(len(a.pages), len(b.pages)):
                yield a, b


@pytest.mark.parametrize("name", ["chat", "agents", "rag", "code_completion"])
def test_a_fast_stream_starts_without_the_turns_before_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 1,000 requests/s some 100,000 sessions are under way; none of them is drawn before it sends."""
    drawn: list[int] = []
    draw = Sessions.draw
    monkeypatch.setattr(Sessions, "draw", lambda self, *turns: (drawn.append(1), draw(self, *turns))[1])
    requests = workload(name, rate=1000.0)
    next(requests)
    assert len(drawn) <= 2
    deque(islice(requests, 99), maxlen=0)
    assert len(drawn) <= 110


@pytest.mark.parametrize("name", ["chat", "code_completion", "rag"])
def test_sessions_found_under_way_are_those_that_would_have_come_to_be(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both starts, as long as both can be had: the same prompts, the same mixture of turns, and the same much later."""

    def seen(most_turns: int) -> tuple[np.ndarray, np.ndarray]:
        monkeypatch.setattr(stream, "MOST_TURNS", most_turns)
        requests = list(workload(name, rate=60.0, num_requests=9000))
        turns = [int(r.id.rsplit(".", 1)[1]) for r in requests]
        own = [r.num_prompt_tokens for r in requests]
        return np.array(turns).reshape(3, -1), np.array(own).reshape(3, -1)

    (turns, prompts), (played_turns, played_prompts) = seen(0), seen(10**9)
    assert not np.array_equal(prompts, played_prompts)
    for part in range(3):
        assert turns[part].mean() == pytest.approx(played_turns.mean(), rel=0.1)
        assert (turns[part] == 1).mean() == pytest.approx((played_turns == 1).mean(), rel=0.15)
    # First messages of code have a heavy tail: the mean of its 1,100 sessions has a standard error of 5 %.
    assert prompts.mean() == pytest.approx(played_prompts.mean(), rel=0.1)


def test_a_fast_stream_has_each_request_once_and_its_sessions_in_order() -> None:
    last: dict[str, int] = {}
    for r in workload("agents", rate=500.0, num_requests=4000):
        number = int(r.id.rsplit(".", 1)[1])
        assert last.get(r.session, number - 1) == number - 1
        last[r.session] = number
    assert len(last) > 1000
