"""A model's folder quantized into another one, a layer at a time, so that it can be stopped at any moment and go on.

What is done so far stands in OUT.quantizing: a file of weights for each finished layer, and with calibration the rows'
residual stream before the next one. Each file is written beside its place and then renamed, so one that is there is
whole; at the end the folder itself is renamed. A killed run loses the layer it was at, and no more.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from reference_impl.models.quantization.by_layer import Layers, ignored, kept_tensors, schemes_of
from reference_impl.models.quantization.calibration import Rows, Statistics
from reference_impl.models.quantization.forms import Dense, Form, form_for
from reference_impl.models.quantization.hadamard import random_rotation
from reference_impl.models.quantization.one_layer import Result, quantize_layer, round_head
from reference_impl.models.quantization.recipes import Recipe
from reference_impl.models.quantization.rotation import rotated_embedding, rotated_head
from reference_impl.models.quantization.tensors import without_form
from reference_impl.models.quantization.work_folder import (
    LOCK,
    SCAN,
    alone,
    as_json,
    check_places,
    digest,
    flush,
    made_of,
    same,
    save,
    work_of,
    write_json,
)

REPORT, JOB = "quantization_report.json", "job.json"
_COPIED = ("tokenizer*", "*.model", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json",
           "generation_config.json", "chat_template*", "LICENSE*", "NOTICE*")  # fmt: skip
_ROWS = 4096  # of a matrix that is rotated at once


@dataclass
class Job:
    """What to quantize, and how. tokens [rows, length]: for a recipe that is calibrated. form: None: packed, or dense
    where no packed form has the recipe's numbers. progress(done, of): called after each layer, also for those of an
    earlier run. notes: further entries of the report."""

    source: Path
    out: Path
    recipe: Recipe
    tokens: Tensor | None = None
    form: Form | None = None
    progress: Callable[[int, int], object] = lambda done, of: None
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def work(self) -> Path:
        return work_of(self.out)


def quantize_folder(job: Job) -> dict[str, Any]:
    """Writes the folder job.out and returns its report. Raises ValueError where the folder is there and not empty,
    where what is done so far is of another job or another process works at it, and for a recipe that does not fit the
    model."""
    _check(job)
    layers = Layers(job.source)
    run = _Run(job, layers)
    job.work.mkdir(exist_ok=True)
    with alone(job.work):
        _same_job(job, layers, run.form)
        for index in range(layers.config.num_layers):
            if not run.file(index).exists():
                run.quantize(index)
            job.progress(index + 1, layers.config.num_layers)
        report = run.finish()
    (job.work / LOCK).unlink()
    os.rename(job.work, job.out)  # onto nothing, or onto an empty folder
    flush(job.out.parent)
    return report


class _Run:
    def __init__(self, job: Job, layers: Layers):
        self.job, self.layers, self.recipe = job, layers, job.recipe
        self.stored = getattr(torch, layers.config.dtype)
        self.rotation = None
        if job.recipe.rotate:
            self.rotation = random_rotation(layers.config.hidden_size, job.recipe.seed)
        self.others = layers.others()
        self.unties = "lm_head.weight" not in self.others and (self.rotation is not None or bool(job.recipe.lm_head))
        if self.unties:
            self.others.append("lm_head.weight")
        self.rows: Rows | None = None
        self.schemes = schemes_of(layers.config, job.recipe)
        self.form = job.form or form_for(self.schemes)

    def file(self, number: int) -> Path:
        """The file of layer `number`; beyond the layers, of the other tensors, one each."""
        of = self.layers.config.num_layers + len(self.others)
        return self.job.work / f"model-{number + 1:05}-of-{of:05}.safetensors"

    def quantize(self, index: int) -> None:
        if self.recipe.calibrated:  # before the layer is there: the embedding may be the largest tensor
            self.rows = self.rows or self._rows(index)
        layer = self.layers.layer(index)
        result = quantize_layer(layer, self.rows, self.recipe, self.rotation, self.stored)
        if self.rows is not None:
            self.rows.advance(layer)
            save({"x": self.rows.x}, self._stream(index + 1))
        written = {part.name: self.form.tensors(part) for part in result.parts}
        write_json(self._layer_report(result, written), self.job.work / f"report-{index:05}.json")
        tensors = {name: tensor.to(self.stored) for name, tensor in kept_tensors(layer).items()}
        for part, found in written.items():
            tensors |= {f"{part}.{suffix}": tensor.contiguous() for suffix, tensor in found.items()}
        save(tensors, self.file(index))  # from now on the layer counts as done
        self._stream(index).unlink(missing_ok=True)

    def finish(self) -> dict[str, Any]:
        """Writes all that belongs to no layer; then the folder is a model. Returns the report."""
        work, count = self.job.work, self.layers.config.num_layers
        for place, name in enumerate(self.others):
            if not self.file(count + place).exists():
                save(self._others_tensors(name), self.file(count + place))
        self._stream(count).unlink(missing_ok=True)
        where: dict[str, str] = {}
        for number in range(count + len(self.others)):
            with safe_open(self.file(number), framework="pt") as handle:
                where |= dict.fromkeys(handle.keys(), self.file(number).name)
        write_json({"metadata": {}, "weight_map": where}, work / "model.safetensors.index.json")
        write_json(self._config(), work / "config.json")
        for pattern in _COPIED:
            for file in self.job.source.glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, work / file.name)
        report = self._report()
        write_json(report, work / REPORT)
        for file in [work / JOB, *work.glob(SCAN), *work.glob("report-*.json"), *work.glob("*.tmp")]:
            file.unlink()
        return report

    def _rows(self, index: int) -> Rows:
        """The stream before layer `index`, from an earlier run or from the embedding."""
        assert self.job.tokens is not None
        decoder, ids = self.layers.front(self.job.tokens)
        if self.rotation is not None:
            decoder.embedding = rotated_embedding(decoder.embedding, self.rotation).to(self.stored).float()
        rows = Rows.of(decoder, ids)
        if index:
            with safe_open(self._stream(index), framework="pt") as handle:
                rows.x = handle.get_tensor("x")
        return rows

    def _stream(self, index: int) -> Path:
        return self.job.work / f"stream-{index:05}.safetensors"

    def _others_tensors(self, name: str) -> dict[str, Tensor]:
        tensor = self._other(name)
        if name != "lm_head.weight" or "lm_head" not in self.schemes:
            return {name: tensor}
        found = self.form.tensors(round_head(tensor, self.schemes["lm_head"], self._head_gram(), self.recipe))
        return {f"lm_head.{word}": one.contiguous() for word, one in found.items()}

    @torch.inference_mode()
    def _head_gram(self) -> Tensor | None:
        """The Gram matrix of what the last norm makes of the rows, for a recipe that looks at one."""
        if self.recipe.rounding != "gptq" and not self.recipe.clip:
            return None
        assert self.job.tokens is not None
        rows = self.rows or self._rows(self.layers.config.num_layers)
        decoder, _ = self.layers.front(self.job.tokens)
        for name, tensor in decoder.norms().items():
            tensor.copy_(self._other(name).float() + self.layers.config.norm_plus_one)
        seen = Statistics()
        for x in rows.x:
            seen.add(decoder.normalize(x, decoder.norm, self.layers.config.norm_eps))
        return seen.known_gram

    def _other(self, name: str) -> Tensor:
        tied = name == "lm_head.weight" and name not in self.layers.where
        tensor = self.layers.read("model.embed_tokens.weight" if tied else name)
        if self.rotation is None:
            return tensor
        if name == "model.norm.weight":
            return torch.ones_like(tensor)
        norm = self.layers.read("model.norm.weight")
        for rows in tensor.split(_ROWS):
            new = rotated_head(rows, norm, self.rotation) if name == "lm_head.weight" else None
            rows.copy_(rotated_embedding(rows, self.rotation) if new is None else new)
        return tensor

    def _config(self) -> dict[str, Any]:
        raw: dict[str, Any] = json.loads((self.job.source / "config.json").read_text("utf-8"))
        if self.unties or self.rotation is not None:
            raw["tie_word_embeddings"] = False
        return self.form.config(raw, self.schemes, ignored(self.layers.config, "lm_head" not in self.schemes))

    def _layer_report(self, result: Result, written: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
        """A layer's report. bits: of what is written, if that is packed; else of codes and scales, if something packed
        them."""
        bits: dict[str, float] = {part.name: part.bits() for part in result.parts}
        if not isinstance(self.form, Dense):
            bits = {name: 8 * sum(tensor.nbytes for tensor in found.values()) for name, found in written.items()}
        return {
            "bits": bits,
            "weights": {part.name: part.codes.numel() for part in result.parts},
            "weight_errors": result.weight_errors,
            "output_errors": result.output_errors,
            "unseen": result.unseen,
        }

    def _report(self) -> dict[str, Any]:
        layers = [json.loads(file.read_text("utf-8")) for file in sorted(self.job.work.glob("report-*.json"))]
        bits, weights = (sum(sum(layer[what].values()) for layer in layers) for what in ("bits", "weights"))
        size = sum(self.file(n).stat().st_size for n in range(self.layers.config.num_layers + len(self.others)))
        return {
            "form": self.form.name,
            "no_form": without_form(self.schemes.values()),
            "recipe": as_json(asdict(self.recipe)),
            "bits_per_weight": bits / weights,
            "quantized_weights": weights,
            "quantized_bytes": bits / 8,
            "file_bytes": size,
            "file_bytes_before": sum(file.stat().st_size for file in self.layers.files),
            **self._head_report(),
            **self.job.notes,
            "layers": layers,
        }

    def _head_report(self) -> dict[str, Any]:
        """The report of lm_head. bytes: of all its tensors. untied: whether it was the embedding's before, which
        stays."""
        if "lm_head" not in self.schemes:
            return {}
        file = self.file(self.layers.config.num_layers + self.others.index("lm_head.weight"))
        with safe_open(file, framework="pt") as handle:
            size = sum(handle.get_tensor(name).nbytes for name in handle.keys())  # noqa: SIM118 (not a dict)
        return {"lm_head": {"scheme": self.recipe.lm_head, "bytes": size, "untied": self.unties}}


def _check(job: Job) -> None:
    check_places(job.out)
    if job.recipe.calibrated and job.tokens is None:
        raise ValueError("calibration: expected tokens, since this method looks at activations; got none")


def _same_job(job: Job, layers: Layers, form: Form) -> None:
    """Raises ValueError where what is done so far is of another job; writes this job down where nothing is done."""
    now = as_json({
        "recipe": asdict(job.recipe), "form": form.name,
        "calibration": None if job.tokens is None else digest(job.tokens.numpy().tobytes()),
        **made_of(job.source, layers.files),
    })  # fmt: skip
    if not (job.work / JOB).exists():
        write_json(now, job.work / JOB)
        return
    same(now, json.loads((job.work / JOB).read_text("utf-8")), job.work)
