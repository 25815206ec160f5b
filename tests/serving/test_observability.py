"""Metrics, status page and timelines agree with what clients got."""

from __future__ import annotations

from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

COMPLETIONS = "/v1/completions"


def metrics(url: str) -> dict[str, float]:
    """Every sample of /metrics, by name and labels."""
    text = httpx.get(f"{url}/metrics").text
    return {
        sample.name + "".join(f"/{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_count_what_clients_got(serve: Any, until: Any) -> None:
    running = serve()
    before = metrics(running.url)
    assert before["inferlab:generation_tokens_total"] == 0
    asked = {"prompt": "# a prompt of some length\n" * 8, "ignore_eos": True}
    with httpx.Client(base_url=running.url, timeout=60) as client:
        used = [client.post(COMPLETIONS, json={**asked, "max_tokens": n}).json()["usage"] for n in (7, 12)]
        with client.stream("POST", COMPLETIONS, json={**asked, "max_tokens": 900, "stream": True}) as answer:
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
    assert httpx.get(f"{running.url}/status.json").json()["hit_rate"] == rate
    assert found["inferlab:engine_steps_total"] == len(running.engine.trace.steps())


def test_preemptions_and_evictions_are_counted(serve: Any, until: Any) -> None:
    running = serve(num_blocks=40, max_num_seqs=8)
    with httpx.Client(base_url=running.url, timeout=60) as client:
        body = {"prompt": [f"# {i}\n" * 30 for i in range(8)], "max_tokens": 150, "ignore_eos": True}
        assert client.post(COMPLETIONS, json=body).status_code == 200
    until(running.is_idle, "it is idle")
    found, steps = metrics(running.url), running.engine.trace.steps()
    assert found["inferlab:num_preemptions_total"] == sum(len(step.preempted) for step in steps) > 0
    assert found["inferlab:prefix_cache_evictions_total"] == sum(len(step.transfers.evicted) for step in steps) > 0


def test_the_status_says_what_runs_and_no_text(serve: Any, until: Any) -> None:
    running = serve()
    secret = "the prompt is nobody's business"
    with httpx.Client(base_url=running.url, timeout=60) as client:
        body = {"prompt": secret, "max_tokens": 900, "ignore_eos": True, "stream": True, "n": 2}
        with client.stream("POST", COMPLETIONS, json=body) as answer:
            lines = answer.iter_lines()
            name = next(lines).split('"id":"')[1].split('"')[0]
            found = client.get("/status.json")
            assert "business" not in found.text
            status = found.json()
            assert status["num_requests"] == 2
            assert [r["id"] for r in status["requests"]] == [name, f"{name}/1"]
            assert status["blocks_available"] < status["blocks"] == running.engine.num_blocks
            assert all(r["max_tokens"] == 900 and r["blocks"] > 0 for r in status["requests"])
        until(running.is_idle, "it is idle")
        assert client.get("/status.json").json()["requests"] == []
        assert "status.json" in client.get("/status").text
