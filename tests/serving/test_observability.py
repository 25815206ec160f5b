"""Metrics, status page and timelines agree with what clients got."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import time
import types
from collections import Counter
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from reference_impl.observe.trace import RequestArrived, RequestFinished, StepDone, Trace
from reference_impl.serving import status
from reference_impl.serving.metrics import WatchedTrace

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}


def metrics(url: str) -> dict[str, float]:
    """Every sample of /metrics, by name and labels."""
    text = httpx.get(f"{url}/metrics", timeout=600).text
    return {
        sample.name + "".join(f"/{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_count_what_clients_got(serve: Any, until: Any, process: bool) -> None:
    running = serve(process=process)
    before = metrics(running.url)
    assert before["inferlab:generation_tokens_total"] == 0
    asked = {"prompt": "# a prompt of some length\n" * 8, "ignore_eos": True}
    with httpx.Client(base_url=running.url, timeout=600) as client:
        used = [client.post(COMPLETIONS, json={**asked, "max_tokens": n}).json()["usage"] for n in (7, 12)]
        with client.stream("POST", COMPLETIONS, json={**asked, "max_tokens": 1700, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
        until(running.is_idle, "the last one has gone")
    found = metrics(running.url)
    assert found["inferlab:prompt_tokens_total"] == 3 * used[0]["prompt_tokens"]
    assert found["inferlab:generation_tokens_total"] >= 7 + 12 + 1
    assert found["inferlab:request_success_total/length"] == 2
    assert found["inferlab:request_success_total/abort"] == 1
    assert found["inferlab:prefix_cache_queries_total"] == 3 * used[0]["prompt_tokens"]
    assert found["inferlab:prefix_cache_hits_total"] == 2 * used[1]["prompt_tokens_details"]["cached_tokens"] > 0
    assert found["inferlab:time_to_first_token_seconds_count"] == 3
    tokens = found["inferlab:generation_tokens_total"]
    assert found["inferlab:inter_token_latency_seconds_count"] == tokens - 3
    assert found["inferlab:num_requests_running"] == 0
    assert found["inferlab:kv_cache_usage_perc"] == 0
    rate = found["inferlab:prefix_cache_hits_total"] / found["inferlab:prefix_cache_queries_total"]
    assert httpx.get(f"{running.url}/status.json", timeout=600).json()["hit_rate"] == rate
    if not process:
        assert found["inferlab:engine_steps_total"] == len(running.engine.trace.steps())


def test_preemptions_and_evictions_are_counted(serve: Any, until: Any) -> None:
    running = serve(num_blocks=40, max_num_seqs=8)
    with httpx.Client(base_url=running.url, timeout=600) as client:
        body = {"prompt": [f"# {i}\n" * 30 for i in range(8)], "max_tokens": 60, "ignore_eos": True}
        assert client.post(COMPLETIONS, json=body).status_code == 200
    until(running.is_idle, "it is idle")
    found, steps = metrics(running.url), running.engine.trace.steps()
    assert found["inferlab:num_preemptions_total"] == sum(len(step.preempted) for step in steps) > 0
    assert found["inferlab:prefix_cache_evictions_total"] == sum(len(step.transfers.evicted) for step in steps) > 0


def test_drafts_are_counted_as_vllm_counts_them(serve: Any, until: Any, process: bool) -> None:
    running = serve(process=process, speculative="ngram", num_drafts=3, adaptive_drafts="off")
    body = {"prompt": "x = [1, 2, 3, 4]\n" * 8, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    with httpx.Client(base_url=running.url, timeout=600) as client:
        answers = [client.post(COMPLETIONS, json=body).json()["choices"][0]["text"] for _ in range(2)]
        with client.stream("POST", COMPLETIONS, json=body | {"stream": True}) as stream:
            pieces = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    answers.append("".join(piece["choices"][0]["text"] for piece in pieces))
    until(running.is_idle, "it is idle")
    found = metrics(running.url)
    assert answers == answers[:1] * 3
    drafts, tokens, accepted, *at = (
        found[f"inferlab:spec_decode_num_{name}"]
        for name in ("drafts_total", "draft_tokens_total", "accepted_tokens_total",
                     *(f"accepted_tokens_per_pos_total/{i}" for i in range(3)))
    )  # fmt: skip
    assert 0 < accepted <= tokens <= 3 * drafts
    assert sum(at) == accepted
    assert at == sorted(at, reverse=True)
    # Each step of one request gives a token, and those that were kept.
    assert found["inferlab:generation_tokens_total"] == found["inferlab:engine_steps_total"] + accepted == 180


def test_a_prompt_is_looked_up_once_and_one_that_is_never_let_in_leaves_nothing() -> None:
    trace = WatchedTrace(100)
    for name in ("comes back", "goes"):
        trace.add(RequestArrived(0.0, name, 10))
    for step in (1, 2):  # preempted in between
        trace.add(StepDone(step, step, step + 0.5, (), (), 1, 1, 9, admitted=(("comes back", 4),)))
    for name in ("goes", "comes back"):
        trace.add(RequestFinished(3.0, name, "abort", 0))
    counts = trace.counts
    assert counts.registry.get_sample_value("inferlab:prefix_cache_queries_total") == 10
    assert counts.registry.get_sample_value("inferlab:prefix_cache_hits_total") == 4
    assert [len(counts._prompts), len(counts._waiting)] == [0, 0]


def test_the_status_says_what_runs_and_no_text(serve: Any, until: Any, process: bool) -> None:
    running = serve(process=process, num_blocks=500)
    secret = "the prompt is nobody's business"
    with httpx.Client(base_url=running.url, timeout=600) as client:
        body = {"prompt": secret, "max_tokens": 1900, "ignore_eos": True, "stream": True, "n": 2}
        with client.stream("POST", COMPLETIONS, json=body) as answer:
            lines = answer.iter_lines()
            name = next(lines).split('"id":"')[1].split('"')[0]
            found = client.get("/status.json")
            assert "business" not in found.text
            status = found.json()
            assert status["num_requests"] == 2
            assert [r["id"] for r in status["requests"]] == [name, f"{name}/1"]
            assert status["blocks_available"] < status["blocks"] == 500
            assert all(r["max_tokens"] == 1900 and r["blocks"] > 0 for r in status["requests"])
        until(running.is_idle, "it is idle")
        assert client.get("/status.json").json()["requests"] == []
        assert "status.json" in client.get("/status").text


# --- the timeline of a request ---------------------------------------------------------------------------------------


def timeline(url: str, answer: str) -> list[dict[str, Any]]:
    found = httpx.get(f"{url}/requests/{answer}/timeline", timeout=600)
    assert found.status_code == 200, found.text
    assert found.json()["id"] == answer
    return found.json()["requests"]


def check_timeline(found: dict[str, Any], trace: WatchedTrace) -> None:
    """Agrees with the metrics of the trace, and its parts with one another."""
    m = trace.metrics(found["id"])
    for name in ("queue", "ttft", "tpot", "latency"):
        assert found[name] == getattr(m, name)
    assert found["itl"] == list(m.itl)
    assert len(found["token_times"]) == found["output_tokens"] == m.num_output_tokens
    parts = found["phases"]
    assert (parts[0]["name"], parts[0]["start"], parts[0]["end"]) == ("queued", 0, pytest.approx(m.queue))
    assert all(a["end"] == b["start"] for a, b in pairwise(parts))
    assert found["token_times"][0] == pytest.approx(m.ttft)
    steps = [(step.step_id, row.start, row.num_tokens) for step in trace.steps() for row in step.rows
             if row.request_id == found["id"]]  # fmt: skip
    assert [(step["step"], step["from"], step["tokens"]) for step in found["steps"]] == steps


def test_the_timeline_of_an_answer_says_what_happened_to_each_of_its_requests(serve: Any) -> None:
    running = serve()
    with httpx.Client(base_url=running.url, timeout=600) as client:
        body = {"prompt": ["# one\n" * 20, "# two"], "n": 2, "max_tokens": 9, "ignore_eos": True}
        before = time.time()
        answer = client.post(COMPLETIONS, json=body).json()
        name, after = answer["id"], time.time()
        found = timeline(running.url, name)
        assert [r["id"] for r in found] == [f"{name}-0", f"{name}-0/1", f"{name}-1", f"{name}-1/1"]
        for request in found:
            check_timeline(request, running.engine.trace)
            assert before <= request["arrived_at"] <= after
            assert (request["finish_reason"], request["output_tokens"], request["preemptions"]) == ("length", 9, 0)
            assert request["finished"] >= request["latency"]
        assert sum(found[i]["prompt_tokens"] for i in (0, 2)) == answer["usage"]["prompt_tokens"]
        assert [p["name"] for p in found[0]["phases"]] == ["queued", "prefill", "decode"]
        assert timeline(running.url, f"{name}-1/1")[0]["token_times"] == found[3]["token_times"]
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "ignore_eos": True}
        name = client.post("/v1/chat/completions", json=chat).json()["id"]
        check_timeline(timeline(running.url, name)[0], running.engine.trace)


def test_a_timeline_says_when_its_request_arrived_however_long_it_takes_to_make(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = itertools.count(50.0)  # each look at a clock takes one
    clocks = types.SimpleNamespace(now=lambda: next(seconds), time=lambda: 1e9 + next(seconds))
    trace = Trace([RequestArrived(40.0, "r", 10)])
    engine: Any = types.SimpleNamespace(trace=trace, clock=clocks)
    lives_of = status.lives_of
    monkeypatch.setattr(status, "lives_of", lambda *given: [next(seconds) for _ in range(100)] and lives_of(*given))
    monkeypatch.setattr(status, "time", clocks)
    [request] = status.timeline(engine, "r")["requests"]
    assert request["arrived_at"] == 1e9 + 40


def test_the_timeline_of_a_request_that_runs_and_of_one_that_was_left(serve: Any, until: Any, process: bool) -> None:
    running = serve(process=process)
    with (
        httpx.Client(base_url=running.url, timeout=600) as client,
        client.stream("POST", COMPLETIONS, json=LONG) as answer,
    ):
        lines = answer.iter_lines()  # held: httpx closes the connection with it
        name = next(lines).split('"id":"')[1].split('"')[0]
        [now] = timeline(running.url, name)
        assert (now["finish_reason"], now["finished"]) == (None, None)
        assert 1 <= now["output_tokens"] < LONG["max_tokens"]
    until(running.is_idle, "it has gone")
    [then] = timeline(running.url, name)
    assert then["finish_reason"] == "abort"
    assert then["token_times"][: now["output_tokens"]] == now["token_times"]


def test_a_timeline_shows_who_had_to_give_its_blocks_back(serve: Any) -> None:
    running = serve(num_blocks=40, max_num_seqs=8)
    with httpx.Client(base_url=running.url, timeout=600) as client:
        body = {"prompt": [f"# {i}\n" * 30 for i in range(8)], "max_tokens": 60, "ignore_eos": True}
        found = timeline(running.url, client.post(COMPLETIONS, json=body).json()["id"])
    thrown = Counter(name for step in running.engine.trace.steps() for name in step.preempted)
    assert {r["id"]: r["preemptions"] for r in found if r["preemptions"]} == thrown
    assert all(any(p["name"] == "preempted" for p in r["phases"]) for r in found if r["preemptions"])
    for request in found:
        check_timeline(request, running.engine.trace)


def test_a_request_that_is_not_kept_any_more_is_404(serve: Any) -> None:
    running = serve()
    running.engine.trace.keep = 20
    with httpx.Client(base_url=running.url, timeout=600) as client:
        first = client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2, "ignore_eos": True}).json()["id"]
        assert client.get(f"/requests/{first}/timeline").status_code == 200
        last = client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 100, "ignore_eos": True}).json()["id"]
        for name in (first, "cmpl-nobody", first[:-1], "a/b", ""):
            refused = client.get(f"/requests/{name}/timeline")
            assert refused.status_code == 404
        assert "the last 20 events" in refused.json()["error"]["message"]
        [cut] = client.get(f"/requests/{last}/timeline").json()["requests"]  # its arrival is not kept, its tokens are
    assert cut["prompt_tokens"] is None
    assert len(cut["token_times"]) == 100 > len(cut["steps"]) > 0
    assert cut["ttft"] is not None


# --- finished requests -----------------------------------------------------------------------------------------------


def test_percentiles_and_goodput_are_those_of_the_trace(serve: Any, until: Any) -> None:
    running = serve(max_num_seqs=4)
    url, trace = running.url, running.engine.trace
    empty = httpx.get(f"{url}/status.json", timeout=600).json()
    assert (empty["num_finished"], empty["attainment"], empty["goodput"], empty["finished"]) == (0, None, 0, [])
    assert set(empty["percentiles"].values()) == {None}
    with httpx.Client(base_url=url, timeout=600) as client:
        body = {"prompt": [f"# {i}\n" * 30 for i in range(12)], "ignore_eos": True}
        names = [client.post(COMPLETIONS, json={**body, "max_tokens": n}).json()["id"] for n in (1, 20)]
        with client.stream("POST", COMPLETIONS, json=LONG) as answer:
            next(answer.iter_lines())
        until(running.is_idle, "the last one has gone")
    load = trace.workload()
    ttft, tpot = float(np.median(load.ttft)), float(np.median(load.tpot))
    found = httpx.get(f"{url}/status.json", params={"ttft": ttft, "tpot": tpot}, timeout=600).json()
    assert found["num_finished"] == len(load.requests) == 25
    assert found["objectives"] == {"ttft": ttft, "tpot": tpot}
    assert 0 < found["attainment"] == load.attainment(ttft, tpot) < 1
    assert found["goodput"] == load.goodput(ttft, tpot) > 0
    assert (found["duration"], found["throughput"]) == (load.duration, load.throughput)
    for name in ("ttft", "tpot", "itl", "latency"):
        assert list(found["percentiles"][name].values()) == pytest.approx(
            np.percentile(getattr(load, name), [50, 90, 99])
        )
    assert found["percentiles"]["queue"]["p99"] == pytest.approx(np.percentile([m.queue for m in load.requests], 99))
    newest = found["finished"][0]
    assert (newest["reason"], newest["prompt"]) == ("abort", 1)
    assert newest["ago"] >= 0
    assert {r["id"].rpartition("-")[0] for r in found["finished"][1:]} == set(names)
    for request in found["finished"]:
        m = trace.metrics(request["id"])
        assert [request[name] for name in ("queue", "ttft", "tpot", "latency")] == [m.queue, m.ttft, m.tpot, m.latency]
        assert request["output"] == m.num_output_tokens
        assert request["meets"] == m.meets(ttft, tpot)
    few = httpx.get(f"{url}/status.json", params={"last": 13}, timeout=600).json()
    assert few["num_finished"] == len(few["finished"]) == 13
    last = [r["id"] for r in few["finished"]]
    assert few["throughput"] == trace.workload(last).throughput


@pytest.mark.parametrize("wrong", ["ttft=-1", "ttft=nan", "ttft=inf", "tpot=x", "tpot=", "last=0", "last=501"])
def test_objectives_that_are_none_are_refused_by_name(server: Any, wrong: str) -> None:
    refused = httpx.get(f"{server.url}/status.json?{wrong}", timeout=600)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == wrong.partition("=")[0]


def test_only_the_last_finished_requests_are_kept(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from reference_impl.serving import metrics as counting

    monkeypatch.setattr(counting, "LAST", 3)
    running = serve()
    with httpx.Client(base_url=running.url, timeout=600) as client:
        names = [client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}).json()["id"] for _ in range(5)]
        assert [r["id"] for r in client.get("/status.json").json()["finished"]] == names[:1:-1]
    counts = running.engine.trace.counts
    assert [len(counts._prompts), len(counts._waiting)] == [0, 0]


def test_with_keys_what_names_requests_is_for_those_who_have_one(serve: Any) -> None:
    running = serve({"api_keys": ("sesame",)})
    headers = {"Authorization": "Bearer sesame"}
    with httpx.Client(base_url=running.url, timeout=600) as client:
        body = {"prompt": "nobody's business", "max_tokens": 2}
        name = client.post(COMPLETIONS, json=body, headers=headers).json()["id"]
        for path in ("/status.json", f"/requests/{name}/timeline", "/requests/nobody/timeline"):
            assert client.get(path).status_code == 401
        for path in ("/status.json", f"/requests/{name}/timeline"):
            found = client.get(path, headers=headers)
            assert found.status_code == 200
            assert name in found.text
            assert "business" not in found.text
        for path in ("/status", "/metrics", "/health", "/ready"):
            assert name not in client.get(path).raise_for_status().text


@pytest.mark.browser
def test_the_page_shows_it_in_a_browser(serve: Any) -> None:
    running = serve()
    with httpx.Client(base_url=running.url, timeout=600) as client:
        name = client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 5, "ignore_eos": True}).json()["id"]
    programs = ("chromium", "chromium-browser", "google-chrome")
    words = [next(filter(shutil.which, programs)), "--headless", "--no-sandbox", "--disable-gpu", "--no-proxy-server",
             "--disable-background-networking", "--virtual-time-budget=3000", "--dump-dom"]  # fmt: skip
    done = subprocess.run(
        [*words, f"{running.url}/status?ttft=9&tpot=9&timeline={name}"], capture_output=True, text=True, timeout=600
    )
    page = done.stdout
    assert 'id="lost" role="status"></p>' in page  # no error
    assert "The last 1 finished requests" in page
    assert "100 % meet both" in page
    assert f"timeline of {name}" in page
    assert "<rect" in page
    assert "1 prompt tokens (0 cached), 5 output tokens" in page
