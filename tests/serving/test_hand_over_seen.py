"""What a server with roles shows of hand-overs: parts of the TTFT, pools, metrics of each link, one trace of all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from reference_impl import course_model
from reference_impl.features.disaggregation import tally
from reference_impl.serving.app import ServerConfig
from reference_impl.serving.disaggregated import Disaggregated
from reference_impl.serving.first_tokens import PARTS
from reference_impl.serving.peer_metrics import endpoint_in
from reference_impl.serving.peers import load_peer
from reference_impl.serving.server import ModelServer
from reference_impl.serving.together import merged_metrics, of_one_engine
from tests.serving.conftest import Running
from tests.serving.engine_thread import EngineThread

PROMPT = [(7 * i) % 500 + 100 for i in range(16 * 12 + 1)]
PAGES = 12


class Seen:
    """Two answers of two engines: one whose prompt was handed over, one that was too short; and what the server showed
    then. trace: what it wrote at its end."""

    def __init__(self, folder: Path, until: Any):
        self.hosts = [
            EngineThread(load_peer(course_model("draft"), "float64", num_blocks=300, block_size=16)) for _ in range(2)
        ]
        endpoints = [endpoint_in(host.llm.engine) for host in self.hosts]
        assert endpoints[0] is not None
        assert endpoints[1] is not None
        file = folder / "trace.json"
        fleet = Disaggregated(self.hosts, 1, "round_robin")
        running = Running(ModelServer(fleet, ServerConfig("course"), "127.0.0.1", 0, trace=file))
        until(lambda: running.runner.is_ready and endpoints[0]._links, "the engines have met")
        with httpx.Client(base_url=running.url, timeout=600) as client:
            bodies = [{"prompt": prompt, "max_tokens": 4, "temperature": 0} for prompt in (PROMPT, PROMPT[:20])]
            self.names = [client.post("/v1/completions", json=body).json()["id"] for body in bodies]
            until(lambda: endpoints[0].tally.last() and not any(p[2] for p in endpoints[1].receiver.pools().values())
                  and all(p[0] == p[1] for p in endpoints[1].receiver.pools().values()), "all is released")  # fmt: skip
            self.timelines = [client.get(f"/requests/{name}/timeline").json() for name in self.names]
            self.statuses = [client.get("/status.json", params={"engine": n}).json() for n in (0, 1)]
            self.metrics = client.get("/metrics").text
        running.end()
        assert running.server.failure is None
        self.events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
        self.files = [each.name for each in folder.iterdir()]
        self.page_bytes = endpoints[0].format.page_bytes


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, until: Any) -> Seen:
    return Seen(tmp_path_factory.mktemp("seen"), until)


def test_a_timeline_has_both_engines_and_the_parts_of_the_ttft(seen: Seen) -> None:
    handed, short = seen.timelines
    assert [(r["engine"], r["role"], r["output_tokens"]) for r in handed["requests"]] == [
        (0, "prefill", 1), (1, "decode", 4)
    ]  # fmt: skip
    prefill, decode = handed["requests"]
    assert (prefill["prompt_tokens"], decode["cached_tokens"]) == (len(PROMPT), 16 * PAGES)
    parts = handed["ttft_parts"]
    assert tuple(parts) == PARTS
    assert all(seconds >= 0 for seconds in parts.values())
    computed = prefill["ttft"] - prefill["queue"]
    assert parts["prefill"] <= computed + 1e-9
    assert parts["first_token"] > 0
    # What the engines timed themselves is within what the router saw from end to end.
    assert sum(parts.values()) >= decode["ttft"]
    assert [short["ttft_parts"], *((r["engine"], r["role"]) for r in short["requests"])] == [None, (1, "decode")]


def test_the_status_has_roles_pools_and_parts(seen: Seen) -> None:
    for number, status in enumerate(seen.statuses):
        assert [(line["engine"], line["role"]) for line in status["engines"]] == [(0, "prefill"), (1, "decode")]
        assert status["engine"] == number
        assert status["engines"][0]["pools"] == [], "nobody writes to who only sends"
        [pool] = status["engines"][1]["pools"]
        assert (pool["peer"], pool["free"], pool["waiting"]) == (0, pool["slots"], 0)
        assert pool["slots"] == (64 << 20) // seen.page_bytes
        parts = seen.timelines[0]["ttft_parts"]
        shown = status["ttft_parts"]
        assert {name: shown[name]["mean"] for name in PARTS} == pytest.approx(parts)
        assert shown["ttft"]["p99"] == pytest.approx(sum(parts.values()))
    assert of_one_engine({"pid": 1}, 0) == {"pid": 1}, "one engine has no roles"


def test_metrics_of_each_worker_and_link(seen: Seen) -> None:
    found = {
        (sample.name.removeprefix("inferlab:"), *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(seen.metrics)
        for sample in family.samples
    }
    # Labels: direction, engine, outcome, peer, peer_role, state; in this order.
    assert found["transfer_pages_total", "pushed", "0", "1", "decode"] == PAGES
    assert found["transfer_pages_total", "received", "1", "0", "prefill"] == PAGES
    assert found["transfer_bytes_total", "received", "1", "0", "prefill"] == PAGES * seen.page_bytes
    assert found["transfers_total", "pushed", "0", "whole", "1", "decode"] == 1
    assert found["transfers_total", "received", "1", "whole", "0", "prefill"] == 1
    assert found["transfer_pages_damaged_total", "1", "0", "prefill"] == 0
    assert found["transfers_open", "pushed", "0", "1", "decode"] == 0
    assert found["transfers_waiting_for_slots", "1", "0", "prefill"] == 0
    assert found["transfer_slots", "1", "0", "prefill", "used"] == 0
    assert found["transfer_slots", "1", "0", "prefill", "free"] == (64 << 20) // seen.page_bytes
    assert found["time_to_first_token_part_seconds_count", "transfer"] == 1


def test_the_readme_names_the_metrics_and_outcomes_that_there_are(seen: Seen) -> None:
    page = Path(tally.__file__).with_name("README.md").read_text("utf-8")
    named = set(re.findall(r"`inferlab:(transfer\w*|time_to_first_token_part\w*)`", page))
    found = set(re.findall(r"^# TYPE inferlab:(\w+) ", seen.metrics, re.MULTILINE))
    assert named == {name for name in found if name.startswith("transfer") or name.endswith("part_seconds")}
    [row] = [line for line in page.splitlines() if "`inferlab:transfers_total`" in line]
    outcomes = {name for _, name in tally._CLASSES} | {"whole", "other"}
    assert set(re.findall(r"`(\w+)`", row)) - {"direction", "outcome"} == outcomes
    assert all(f"| `{part}` |" in page for part in PARTS)


def test_the_lives_of_a_peer_are_one_and_names_that_nobody_told_are_none() -> None:
    samples = "".join(f'inferlab:x_total{{peer="{name}"}} {value}\n' for name, value in (("a", 1), ("b", 2), ("c", 4)))
    text = "# TYPE inferlab:x_total counter\n" + samples
    merged = merged_metrics({0: text.encode()}, {"a": 1, "b": 1}, ["prefill", "decode"])
    assert [line for line in merged.decode().splitlines() if not line.startswith("#")] == [
        'inferlab:x_total{engine="0",peer="1",peer_role="decode"} 3.0'
    ]


def test_one_trace_has_all_engines_on_one_axis_and_the_transfer_between_them(seen: Seen) -> None:
    assert seen.files == ["trace.json"]
    processes = {e["pid"]: e["args"]["name"] for e in seen.events if e["name"] == "process_name"}
    assert sorted(processes.values()) == sorted(
        f"{engine}{kind}" for engine in ("prefill 0", "decode 1") for kind in ("", ": requests", ": transfers")
    )
    pids = {name: pid for pid, name in processes.items()}
    of = {name: [e for e in seen.events if e["pid"] == pid and e["ph"] == "X"] for name, pid in pids.items()}
    (pushed, writes), (received, arrives) = of["prefill 0: transfers"], of["decode 1: transfers"]
    for outer, inner in ((pushed, writes), (received, arrives)):
        assert inner["args"] == {"pages": PAGES, "bytes": PAGES * seen.page_bytes}
        assert outer["ts"] <= inner["ts"] <= inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.001
    computes = [step for step in of["prefill 0"] if step["name"] == "prefill"]
    decodes = [step for step in of["decode 1"] if step["args"]["rows"] and step["ts"] < received["ts"] + 1e9]
    assert pushed["ts"] <= computes[0]["ts"] + 100, "an offer comes before the prompt is computed"
    assert received["ts"] + received["dur"] <= decodes[0]["ts"] + decodes[0]["dur"], "pages come before they are used"
    begin, end = (next(e for e in seen.events if e["ph"] == ph) for ph in "sf")
    assert (begin["id"], begin["pid"], end["pid"]) == (end["id"], pushed["pid"], received["pid"])
    assert begin["ts"] <= end["ts"]
    assert received["ts"] <= end["ts"] <= received["ts"] + received["dur"]
    assert min(e["ts"] for e in seen.events if e["ph"] != "M") == 0
