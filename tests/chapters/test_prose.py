"""What notebooks say: names that exist and stand where the prose puts them, numbers that something proves.

The cells themselves are run in test_notebooks.py, which asks `silent_cells` and `unprinted_numbers` about them.
"""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chapters.prose import (
    ROOT,
    absent_here,
    command_fault,
    exists,
    mark_faults,
    misplaced_names,
    names_in,
    numbers,
    read_notebook,
    silent_cells,
    unknown_names,
    unprinted_numbers,
    unproven_numbers,
    used_names,
)

CHAPTERS = sorted((ROOT / "chapters").glob("[0-9]*/*.ipynb"))
LABS = sorted((ROOT / "labs").glob("[0-9]*/*.ipynb"))
FOREIGN = yaml.safe_load((ROOT / "tests/chapters/foreign_names.yaml").read_text("utf-8"))
UNPROVEN = yaml.safe_load((ROOT / "tests/chapters/unproven_numbers.yaml").read_text("utf-8"))
foreign = frozenset(name for names in FOREIGN.values() for name in names)
read = functools.cache(read_notebook)
every_chapter = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: f"{path.parent.name}-{path.stem}")
every_notebook = pytest.mark.parametrize("path", [*CHAPTERS, *LABS], ids=lambda path: f"{path.parent.name}-{path.stem}")


@every_notebook
def test_names_in_the_prose_exist(path: Path) -> None:
    wrong = unknown_names(read(path), foreign, path.parent)
    assert wrong == [], "in code spans, but neither ours nor in foreign_names.yaml"


@every_notebook
def test_what_the_prose_puts_above_or_below_stands_there(path: Path) -> None:
    assert misplaced_names(read(path)) == []


@every_chapter
def test_marks_lead_to_tests_files_and_cells(path: Path) -> None:
    assert mark_faults(read(path)) == []


@every_chapter
def test_numbers_in_the_prose_are_proven_or_on_the_list(path: Path) -> None:
    listed = UNPROVEN.get(path.relative_to(ROOT).as_posix(), {})
    assert unproven_numbers(read(path)) == listed, (
        "compute it in a cell, or mark its paragraph <!-- tested: -->, <!-- stands: -->, <!-- printed: --> or "
        "<!-- source: -->; what is proven by now leaves unproven_numbers.yaml"
    )


def test_the_list_of_unproven_numbers_names_chapters_that_exist() -> None:
    assert set(UNPROVEN) <= {path.relative_to(ROOT).as_posix() for path in CHAPTERS}


def test_foreign_names_are_in_order_each_with_one_owner() -> None:
    assert list(FOREIGN) == sorted(FOREIGN)
    for names in FOREIGN.values():
        assert names == sorted(names)
    assert len(foreign) == sum(map(len, FOREIGN.values()))


def test_foreign_names_are_used_and_are_not_ours() -> None:
    used = set().union(*(used_names(read(path)) for path in [*CHAPTERS, *LABS]))
    assert foreign - used == set()
    assert {name for name in foreign if exists(name, ())} == set()


# ---------------------------------------------------------------- the lints find what they are for


def code(name: str, source: str, *outputs: str) -> dict[str, Any]:
    said = [{"output_type": "stream", "name": "stdout", "text": text} for text in outputs]
    return {"cell_type": "code", "id": name, "source": source, "outputs": said}


def prose(name: str, source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "id": name, "source": source}


def notebook(*cells: dict[str, Any]) -> dict[str, Any]:
    return {"cells": list(cells)}


RANK = "import inspect\nprint(inspect.getsource(KVManager._match))"
CUT = "whole = inspect.getsource(flash_attention)\npiece = whole[9:]\nprint(piece.strip())"


@pytest.mark.parametrize(
    ("source", "output", "fault"),
    [
        ("print(x)", "\n", "puts out nothing"),
        ("for x in found:\n    print(x)", "", "puts out nothing"),
        ("if has_triton:\n    print(x)", " \n\n", "puts out nothing"),
        ("with quiet():\n    show(figure)", "", "puts out nothing"),
        ("x = 1\nx", "", "puts out nothing"),
        ("widgets.occupancy()", "", "puts out nothing"),
        (RANK, "    return self.index\n", "without def"),
        (CUT, "nothing of it\n", "no line of the source"),
    ],
)
def test_a_silent_cell_is_found(source: str, output: str, fault: str) -> None:
    (found,) = silent_cells(notebook(code("bootstrap", "print(1)"), code("shows", source, output)))
    assert found.startswith("shows: ")
    assert fault in found


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("print(x)", "1\n"),
        ("x = 1", ""),
        ("def f():\n    print(1)", ""),
        ("rows.append(1)", ""),
        ("if has_triton:\n    print(x)", ""),
        ("text = llm.encode(inspect.getsource(Engine))\nprint(len(text))", "812\n"),
        (RANK, "    def _match(self):\n        return 1\n"),
        (CUT, "acc = tl.zeros([BLOCK_M, d_range.shape[0]], tl.float32)\n"),
    ],
)
def test_a_cell_that_shows_what_it_should_is_not_found(source: str, output: str) -> None:
    assert silent_cells(notebook(code("shows", source, *[output] * bool(output))), absent=("has_triton",)) == []


def test_what_is_not_printed_without_triton_is_printed_in_its_else() -> None:
    both = "if has_triton:\n    print(1)\nelse:\n    print(2)"
    assert silent_cells(notebook(code("shows", both)), absent=("has_triton",)) == ["shows: puts out nothing"]


def test_no_cell_shows_something_with_a_gpu_only() -> None:
    only = notebook(code("shows", "if on_gpu:\n    print(1)"))
    assert silent_cells(only, absent_here()) == ["shows: puts out nothing"]


def test_a_figure_is_output_as_well() -> None:
    cell = code("figure", "show(fig, alt)")
    cell["outputs"] = [{"output_type": "display_data", "data": {"text/plain": "a figure"}}]
    assert silent_cells(notebook(cell)) == []


@pytest.mark.parametrize(
    "text",
    [
        "Look at `add_rms_norms`.", "`Engine.stop_all()` ends it.", "`latency.prefill_minutes` says so.",
        "It calls `torch.compiled`.",
        "The `RadixForrest` holds it.", "Set `--attention-backed`.", "See `reference_impl/kv/managers.py`.",
        "Run `inferlab serv target`.", "```\ninferlab serve target --tracee load.json\n```", "`max_sequences=2`",
    ],
)  # fmt: skip
def test_a_name_that_exists_nowhere_is_found(text: str) -> None:
    assert unknown_names(notebook(prose("text", text)), foreign) != []


@pytest.mark.parametrize(
    "text",
    [
        "`add_rms_norm`, `KVManager`, `EngineConfig.max_num_seqs`", "`latency.prefill_seconds` and `torch.compile`",
        "`exp(s_j) / sum_i exp(s_i)` with `d_in`", "`reserved − used`, `return`, `n > 1`, `ceil(L / B)`",
        "`--attention-backend`", "`reference_impl/core/kv_manager.py`", "`inferlab serve target --trace load.json`",
        "`mine` and `my_own.part`", "```\npython -m reference_impl.bench kernels\n```",
    ],
)  # fmt: skip
def test_a_name_that_exists_is_not_found(text: str) -> None:
    own = code("own", "mine = my_own = Thing(part=1)")
    assert unknown_names(notebook(own, prose("text", text)), foreign) == []


def test_a_command_is_read_to_its_options() -> None:
    assert command_fault("inferlab bench serve --rate 1") is None
    assert command_fault("inferlab bench serves") == "no command 'serves'"
    assert command_fault("inferlab bench serve --rates 1") == "no option --rates"


def test_names_in_a_code_span_are_those_that_code_could_have() -> None:
    assert names_in("update(m, total)") == ["update"]
    assert names_in("KV heads · head_dim") == ["head_dim"]
    assert names_in("largest") == ["largest"]
    assert names_in("weights / batch + own part") == []


SHOWN = code("shown", "print(inspect.getsource(DecoderLayer.forward))")
EARLIER = code("earlier", "add_rms_norm = window = 1")


@pytest.mark.parametrize(
    "text",
    [
        "Look at the source above. Nothing stands between `self.o` and `add_rms_norm`.",
        "The loop above has `window`.",
        "Add a line to `TILES` above.",
        "The cell above counts `window`.",
        "Below, `mlp_norm` is counted.",
    ],
)
def test_a_name_that_does_not_stand_above_is_found(text: str) -> None:
    assert misplaced_names(notebook(EARLIER, SHOWN, prose("text", text), code("later", "x = 1"))) != []


@pytest.mark.parametrize(
    "text",
    [
        "Look at the source above. Between `self.o` and `x + ` stands nothing; `mlp_norm` follows.",
        "`window` is set above.",
        "The cell below prints `found`.",
        "Flat below the ridge, `add_rms_norm` above.",
        "`nowhere_else` is in a sentence of its own.",
    ],
)
def test_a_name_that_stands_above_is_not_found(text: str) -> None:
    assert misplaced_names(notebook(EARLIER, SHOWN, prose("text", text), code("later", "found = 1"))) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It takes 30 ms, 4.2 GB and 1,024 tokens, 3x.", ["30 ms", "4.2 GB", "1,024", "3x"]),
        ("In 2022 an H100 read Llama-3-8B with 3 layers (chapter 02, section 14).", []),
        (
            "FlashAttention-2 (2307.08691), `64 * 2`, $2^{10}$, E05.12, PCIe 5, p95, 70B, FP8, lab 05, parts 6 to 11.",
            [],
        ),
        ('**"It takes 30 ms."** (E01.1) No: 4.2 ms.', ["4.2 ms"]),
        ("1. First, 12 requests.\n2. Then 13.", ["12", "13"]),
        ("About 45 minutes. 2 of them.", []),
    ],
)
def test_numbers_of_prose_are_quantities(text: str, found: list[str]) -> None:
    assert [match[0].strip() for match in numbers(text)] == found


CELL = code("count", "tokens = 2 * 512\nshare, word = 0.3, 'of 4,096'", "moved 2,640 values in 4.18 ms\n")
EXISTING = "tests/claims/test_register.py::test_there_are_159_errata_each_once_and_in_order"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It reads 1,024 tokens, 512 at once, 30 % of 4,096.", []),
        ("It reads 1,023 tokens, 31 % of 4,095.", ["1,023", "31 %", "4,095"]),
        ("As of November 2026. Others take 777 tokens.", []),
        ("Others take 777 tokens.\n<!-- source: their paper, 2024 -->", []),
        (f"A list of 159 errors.\n<!-- tested: {EXISTING} -->", []),
        (f"A list of 158 errors.\n<!-- tested: {EXISTING} -->", ["158"]),
        ("Behind one of 30 prompts, 31 in all.\n\n<!-- stands: datasets/traces/agents.yaml -->", ["31"]),
        ("- Those 777.\n  <!-- source: their paper, 2024 -->\n- These 778.", ["778"]),
    ],
)
def test_a_number_that_nothing_proves_is_found(text: str, found: list[str]) -> None:
    assert unproven_numbers(notebook(CELL, prose("text", text))).get("text", []) == found


def test_a_number_marked_as_printed_stands_in_the_output_of_that_cell() -> None:
    def said(text: str) -> list[str]:
        return unprinted_numbers(notebook(CELL, prose("text", f"{text}\n<!-- printed: count -->")))

    assert said("It moves 2,640 values in 4.2 ms.") == []
    assert said("It moves 2,641 values in 4.3 ms.") == ["text: 2,641", "text: 4.3 ms"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The cell printed it: 2,640 values.\n<!-- printed: count -->", []),
        ("The cell printed it: 1,024 values.\n<!-- printed: count -->", ["text: 1,024"]),  # in its code only
        ("The cell prints 512 values. It reads 1,024.\n<!-- printed: count -->", ["text: 512"]),
    ],
)
def test_what_is_said_to_be_printed_stands_in_the_output_and_not_only_in_the_code(text: str, found: list[str]) -> None:
    assert unprinted_numbers(notebook(CELL, prose("text", text))) == found


def test_a_sentence_about_what_was_printed_names_the_cell() -> None:
    said = "The cell printed 2,640 values of 1,024. And 512 numbers printed on paper."
    assert unproven_numbers(notebook(CELL, prose("text", said))) == {"text": ["2,640", "1,024"]}


@pytest.mark.parametrize(
    "mark",
    [
        "tested: tests/claims/test_register.py::test_of_nothing", "tested: tests/claims/test_nothing.py::test_it",
        "stands: datasets/nothing.yaml", "printed: nothing", "source: somebody", "proven: by me",
    ],
)  # fmt: skip
def test_a_mark_that_leads_nowhere_is_found(mark: str) -> None:
    assert len(mark_faults(notebook(CELL, prose("text", f"It takes 31 ms.\n<!-- {mark} -->")))) == 1


def changed(path: str, cell_id: str, old: str, new: str) -> dict[str, Any]:
    """A copy of a chapter with one fault in its prose."""
    faulty = copy.deepcopy(read(ROOT / "chapters" / path))
    (cell,) = (cell for cell in faulty["cells"] if cell["id"] == cell_id)
    assert old in cell["source"]
    cell["source"] = cell["source"].replace(old, new)
    return faulty


def test_faults_that_the_chapters_had_would_be_found_today() -> None:
    kernels = "05_flash_attention/b_kernels.ipynb"
    above = changed(kernels, "errata-order", "`mlp_norm`", "`add_rms_norm`")
    assert misplaced_names(above) == ["errata-order: add_rms_norm"]
    wrong = changed(kernels, "errata-order", "`mlp_norm`", "`norm_and_add`")
    assert unknown_names(wrong, foreign) == ["errata-order: norm_and_add"]
    number = changed("05_flash_attention/a_attention.ipynb", "question", "8,192 tokens", "8,129 tokens")
    assert unproven_numbers(number) == {"question": ["8,129"]}
    kernel = read(ROOT / "chapters/05_flash_attention/a_attention.ipynb")
    (cell,) = (dict(cell) for cell in kernel["cells"] if cell["id"] == "engine-kernel")
    cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "\n"}]
    assert silent_cells(notebook(cell)) == ["engine-kernel: puts out nothing"]
