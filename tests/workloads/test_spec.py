"""A workload file is read whole or refused with file, line and field."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from reference_impl.simulation.workloads import WorkloadError, names, read_workload, traces_folder, workload

CHAT = (traces_folder() / "chat.yaml").read_text(encoding="utf-8")


def read(tmp_path: Path, text: str) -> str:
    """The error that this file gives, without the folder."""
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(WorkloadError) as error:
        workload(path)  # refused at the call, not at the first request
    return str(error.value).replace(f"{tmp_path}/", "")


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


def test_there_are_six_and_each_reads() -> None:
    assert names() == ["agents", "batch", "chat", "code_completion", "rag", "vision_language"]
    for name in names():
        assert read_workload(traces_folder() / f"{name}.yaml").name == name


def test_each_distribution_and_choice_says_where_it_comes_from() -> None:
    def check(place: str, value: object) -> int:
        if not isinstance(value, dict):
            return 0
        has = bool(value.get("source") or value.get("because"))
        assert has or place.count(".") == 0, place
        return has + sum(check(f"{place}.{name}", inner) for name, inner in value.items())

    for name in names():
        raw = yaml.safe_load((traces_folder() / f"{name}.yaml").read_text(encoding="utf-8"))
        assert check(name, raw) >= 7


@pytest.mark.parametrize(
    ("old", "new", "place", "said"),
    [
        ("  sigma: 0.86\n", "  sgima: 0.86\n", "output.sgima", "no such field"),
        ("  sigma: 0.86\n", "", "output.sigma", "missing"),
        ("  sigma: 0.86\n", "  sigma: wide\n", "output.sigma", "valid number, got 'wide'"),
        ("  sigma: 0.86\n", "  sigma: -1\n", "output.sigma", "greater than or equal to 0, got -1"),
        ("  sigma: 0.86\n", "  sigma: .nan\n", "output.sigma", "finite number"),
        ("  median: 151\n", "  median: '151'\n", "output.median", "valid number, got '151'"),
        ("  mean: 3.5\n", "  mean: 0.5\n", "turns.mean", "greater than or equal to 1, got 0.5"),
        ("  max: 1000\n", "  min: 2000\n  max: 1000\n", "output", "min <= max, got 2000 > 1000"),
        ("  num: 100\n", "  num: 0\n", "tenants.num", "greater than or equal to 1, got 0"),
        ("    median: 260\n", "    median: 0\n", "tenants.system_prompt.median", "greater than 0, got 0"),
        ("  distribution: geometric\n", "  distribution: weibull\n", "turns", "Input tag 'weibull' found"),
        ("  process: poisson\n", "  process: gamma\n", "arrivals", "Input tag 'gamma' found"),
        ("  rate: 4.0\n", "  rate: 4.0\n  cv: 2.0\n", "arrivals.cv", "no such field"),
        ("  because: the whole answer goes into the next prompt\n", "", "keep_output", "expected a source, or because"),
        ("name: chat\n", "name: Chat!\n", "name", "should match pattern"),
        ("name: chat\n", "name: chat\ncolour: blue\n", "colour", "no such field"),
    ],
)
def test_a_wrong_field_is_named_with_its_place(tmp_path: Path, old: str, new: str, place: str, said: str) -> None:
    assert CHAT.count(old) == 1
    text = CHAT.replace(old, new)
    error = next(line for line in read(tmp_path, text).splitlines() if f": {place}: " in line)
    assert said in error
    key, line = place.split(".")[-1], int(error.split(":")[1])
    if f"{key}:" in new:
        assert text.splitlines()[line - 1].strip().startswith(f"{key}:")


def test_all_errors_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    error = read(tmp_path, CHAT.replace("rate: 4.0", "rate: 0").replace("mean: 3.5", "mean: many"))
    assert "turns.mean" in error
    assert "arrivals.rate" in error


def test_a_field_given_twice_is_refused(tmp_path: Path) -> None:
    text = CHAT.replace("  rate: 4.0\n", "  rate: 4.0\n  rate: 5.0\n")
    assert read(tmp_path, text) == f"mine.yaml:{line_of(text, '  rate: 5.0')}: rate: given twice"


def test_what_is_no_yaml_is_refused_with_the_line(tmp_path: Path) -> None:
    assert read(tmp_path, "name: chat\nturns: [1, 2\n").startswith("mine.yaml:3: no YAML")
    assert "expected fields and values" in read(tmp_path, "")
    assert "expected fields and values" in read(tmp_path, "- 1\n")
    with pytest.raises(WorkloadError, match="cannot be read"):
        workload(tmp_path / "missing.yaml")


def test_several_turns_need_pauses(tmp_path: Path) -> None:
    text = (traces_folder() / "batch.yaml").read_text(encoding="utf-8")
    two = text.replace("distribution: constant\n  value: 1", "distribution: constant\n  value: 2")
    assert two != text
    assert "keep_output: needed where sessions have several turns" in read(tmp_path, two)


def test_arrivals_say_why_too(tmp_path: Path) -> None:
    head, _, rest = CHAT.rpartition("  source: >-")
    assert "arrivals: expected a source, or because" in read(tmp_path, head)
    assert rest


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name_or_path": "poetry"}, "unknown workload 'poetry': expected agents, batch, chat"),
        ({"name_or_path": "chat", "seed": -1}, "seed: expected an integer from 0 on"),
        ({"name_or_path": "chat", "num_requests": -1}, "num_requests: expected 0 or more"),
        ({"name_or_path": "chat", "rate": 0.0}, "greater than 0"),
        ({"name_or_path": "batch", "rate": 1.0}, "a closed loop has no rate"),
        ({"name_or_path": "trace.jsonl", "rate": 1.0}, "a recorded trace has its own arrivals"),
    ],
)
def test_wrong_arguments_are_refused_at_the_call(arguments: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        workload(**arguments)
