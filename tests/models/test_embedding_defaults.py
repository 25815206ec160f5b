"""How the files of an embedding checkpoint say that it pools is how `embed` and the server do, or it is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from reference_impl import LLM, course_model
from reference_impl.models.embedding_defaults import EmbeddingDefaults, embedding_defaults
from tests.serving.conftest import serve, until  # noqa: F401

KINDS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
MODULE = "sentence_transformers.models"


def checkpoint(folder: Path, pooling: dict[str, Any] | None, modules: Any = None, place: str = "1_Pooling") -> Path:
    """The course's draft model, with files of an embedding checkpoint beside it."""
    for file in course_model("draft").iterdir():
        os.symlink(file, folder / file.name)
    if modules is not None:
        (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / place).mkdir()
        (folder / place / "config.json").write_text(json.dumps(pooling))
    return folder


def says(*true: str) -> dict[str, Any]:
    """1_Pooling/config.json as sentence-transformers 3 and 4 write it."""
    modes = {f"pooling_mode_{kind}": kind in true for kind in KINDS}
    return {"word_embedding_dimension": 64, **modes, "include_prompt": True}


def listed(*kinds: str) -> list[dict[str, Any]]:
    return [
        {"idx": at, "name": str(at), "path": f"{at}_{kind}" if at else "", "type": f"{MODULE}.{kind}"}
        for at, kind in enumerate(kinds)
    ]


WHOLE = listed("Transformer", "Pooling", "Normalize")


@pytest.mark.parametrize(
    ("pooling", "modules", "expected"),
    [
        (None, None, EmbeddingDefaults("mean", True)),
        (says("lasttoken"), None, EmbeddingDefaults("last", True)),
        (says("lasttoken"), WHOLE, EmbeddingDefaults("last", True)),
        (says("mean_tokens"), WHOLE[:2], EmbeddingDefaults("mean", False)),
        ({"pooling_mode": "lasttoken"}, WHOLE[:2], EmbeddingDefaults("last", False)),
        (None, WHOLE[:1], EmbeddingDefaults("mean", True)),
    ],
    ids=str,
)
def test_what_the_files_say_is_the_default(pooling: Any, modules: Any, expected: Any, tmp_path: Path) -> None:
    assert embedding_defaults(checkpoint(tmp_path, pooling, modules)) == expected


def test_the_folder_of_the_pooling_is_that_of_modules_json(tmp_path: Path) -> None:
    modules = [WHOLE[0], WHOLE[1] | {"path": "pool"}]
    assert embedding_defaults(checkpoint(tmp_path, says("lasttoken"), modules, "pool")).pooling == "last"


@pytest.mark.parametrize(
    ("pooling", "modules", "said"),
    [
        (says("cls_token"), None, "found ['cls_token']"),
        (says("mean_tokens", "max_tokens"), WHOLE, "found ['mean_tokens', 'max_tokens']"),
        (says(), WHOLE, "found []"),
        ({"pooling_mode": "weightedmean"}, WHOLE, "found ['weightedmean']"),
        ({"pooling_mode": 3}, WHOLE, "found 3"),
        ([], WHOLE, "expected a JSON object, found list"),
        (says("mean_tokens"), listed("Transformer", "Pooling", "Dense", "Dense"), "found Dense"),
        (None, WHOLE, "no such file, and"),
        (says("mean_tokens"), {"idx": 0}, "expected a list of modules"),
        (says("mean_tokens"), [WHOLE[1] | {"path": "../elsewhere"}], "expected a list of modules"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_name(pooling: Any, modules: Any, said: str, tmp_path: Path) -> None:
    found = embedding_defaults(checkpoint(tmp_path, pooling, modules))
    assert said in str(found.refusal)
    with pytest.raises(ValueError, match="pooling='mean' or 'last' gives hidden states without it"):
        found.resolve(None, None)
    assert found.resolve("last", None)[0] == "last"


@pytest.mark.parametrize(("kind", "expected"), [(0, "mean"), (1, "mean"), (2, None), (3, "last"), (4, None)])
def test_a_gguf_file_says_it_in_a_field(
    kind: int, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class File:
        def __init__(self, path: Path):
            self.metadata = {"general.architecture": "qwen3", "qwen3.pooling_type": kind}

    monkeypatch.setattr("reference_impl.models.gguf_file.GgufFile", File)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    found = embedding_defaults(file)
    assert (None if found.refusal else found.pooling) == expected


def test_embed_and_the_server_do_as_the_files_say(serve: Any, tmp_path: Path) -> None:  # noqa: F811
    folder = checkpoint(tmp_path, says("lasttoken"), WHOLE[:2])
    running = serve(folder=folder)

    def served(**body: Any) -> list[float]:
        answer = httpx.post(f"{running.url}/v1/embeddings", json={"input": "def f(", **body}, timeout=600)
        return answer.raise_for_status().json()["data"][0]["embedding"]

    last, mean = served(pooling="last", normalize=False), served(pooling="mean", normalize=True)
    assert served() == served(pooling=None, normalize=None) == last
    assert served(pooling="mean", normalize=True) == mean
    llm = LLM(folder, dtype="float32", num_blocks=40)  # its own: the server's is stepped by another thread
    assert llm.embed("def f(")[0].outputs.embedding == pytest.approx(last, rel=1e-3, abs=1e-3)
    described = httpx.get(f"{running.url}/openapi.json", timeout=600).json()["components"]["schemas"]
    fields = described["EmbeddingRequest"]["properties"]
    assert (fields["pooling"]["default"], fields["normalize"]["default"]) == ("last", False)


def test_the_server_refuses_what_is_not_computed_and_computes_what_is_asked_for(serve: Any, tmp_path: Path) -> None:  # noqa: F811
    running = serve(folder=checkpoint(tmp_path, says("cls_token"), WHOLE))
    answer = httpx.post(f"{running.url}/v1/embeddings", json={"input": "x"}, timeout=600)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "pooling"
    assert "cls_token" in answer.json()["error"]["message"]
    asked = httpx.post(f"{running.url}/v1/embeddings", json={"input": "x", "pooling": "last"}, timeout=600)
    assert asked.status_code == 200
