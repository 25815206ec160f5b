"""A draft model from a folder: speculative="draft" (a smaller model), "eagle" (a feature head), "mtp"
(a module of multi-token prediction, sequential), "medusa" (heads).

A feature head (features/speculative/feature_head.py): config.json says architectures ["FeatureHead"], or
["MultiTokenPrediction"] for a module of multi-token prediction (tensors enorm, hnorm, eh_proj, as DeepSeek's); and
layer_of: whose layer it is, "Qwen3ForCausalLM" for example; maybe draft_tokens: of which all drafts are, a list; the
other fields are that architecture's.
Medusa heads (features/speculative/medusa.py): architectures ["MedusaHeads"], the target's hidden_size and vocab_size,
num_heads, and torch_dtype. Tensors: heads.0.weight [hidden_size, hidden_size], heads.0.bias [hidden_size], and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from reference_impl.assembly.config import ConfigError, EngineConfig
from reference_impl.assembly.linear_methods import choose_method
from reference_impl.assembly.model import build_model, load_model
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.speculation import BY_MODEL
from reference_impl.core.linear import Linear
from reference_impl.features.fusion.kernels import choose_kernels
from reference_impl.features.speculative.feature_head import FeatureHead
from reference_impl.features.speculative.medusa import MedusaConfig, MedusaHeads
from reference_impl.interfaces import TensorSpec
from reference_impl.models.config_json import parse_model_config
from reference_impl.models.config_reader import Reader
from reference_impl.models.json_file import read_object, shown
from reference_impl.models.loader import (
    FLOATS,
    Destination,
    destinations,
    fill,
    finish,
    part_tensors,
    store,
    weight_files,
)

if TYPE_CHECKING:
    from reference_impl.assembly.parts import Drafts
    from reference_impl.features.fusion.kernels import Asked

Method = Literal["draft", "eagle", "mtp", "medusa"]
FEATURE_HEAD = "FeatureHead"
MTP = "MultiTokenPrediction"  # with DeepSeek's names of the tensors that are not the layer's
MEDUSA = "MedusaHeads"
METHODS: dict[str, Method] = {FEATURE_HEAD: "eagle", MTP: "mtp", MEDUSA: "medusa"}
NAMES = {FEATURE_HEAD: ("fc", "embed_norm"), MTP: ("eh_proj", "enorm")}
_MOST_BYTES = 1 << 20
_MOST_HEADS = 64


def method_in(folder: Path) -> Method:
    """The method that the folder's config.json names; "draft" also where none can be read: loading it then fails."""
    try:
        names = read_object(folder / "config.json", ConfigError, _MOST_BYTES).get("architectures")
    except (ConfigError, OSError):
        return "draft"
    return METHODS.get(names[0], "draft") if isinstance(names, list) and len(names) == 1 else "draft"


def with_method(config: EngineConfig, folder: Path) -> EngineConfig:
    """The config with the method of the draft model in the folder. ValueError if it asks for another one."""
    method = method_in(folder)
    if config.speculative not in ("off", method):
        raise ValueError(
            f"draft_model is given, {BY_MODEL[method]}, and speculative={config.speculative!r}: expected {method!r}, "
            "or one of the two"
        )
    return replace(config, speculative=method)


def load_feature_head(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_position: int | None = None,
    kernels: Asked = "auto",
) -> FeatureHead:
    """Loads a feature head or a module of multi-token prediction. Arguments: see `load_model`. ConfigError or
    CheckpointError where the folder does not fit."""
    folder, device = Path(folder), torch.device(device)
    path = folder / "config.json"
    raw = read_object(path, ConfigError, _MOST_BYTES)
    if raw.get("architectures") not in ([FEATURE_HEAD], [MTP]) or not isinstance(raw.get("layer_of"), str):
        raise ConfigError(
            f'{path}: expected the config of a feature head, architectures ["{FEATURE_HEAD}"] and layer_of, found '
            f"{shown(raw.get('architectures'))} and {shown(raw.get('layer_of'))}"
        )
    config = parse_model_config(
        raw | {"architectures": [raw["layer_of"]], "tie_word_embeddings": True}, where=str(path)
    )
    if config.num_layers != 1:
        raise ConfigError(f"{path}: num_hidden_layers: expected 1, found {config.num_layers}")
    draft_tokens = _draft_tokens(raw, config.vocab_size, path, device)
    model = build_model(config, dtype, device, max_position, kernels)
    size, new = config.hidden_size, model.dtype
    fc = Linear(model.linears()[0].method, 2 * size, {"fc": size}, False, "fc")
    embed_norm = torch.empty(size, dtype=new, device=device)
    table: dict[str, Destination] = {
        name: found for name, found in destinations(model).items() if name != "model.embed_tokens.weight"
    }
    joining, norming = NAMES[raw["architectures"][0]]
    table[f"{joining}.weight"] = TensorSpec((size, 2 * size), FLOATS), lambda tensor: fc.load("fc", "weight", tensor)
    table[f"{norming}.weight"] = TensorSpec((size,), FLOATS), embed_norm.copy_
    hidden_norm = torch.empty_like(embed_norm) if raw["architectures"] == [MTP] else None
    if hidden_norm is not None:
        table["hnorm.weight"] = TensorSpec((size,), FLOATS), hidden_norm.copy_
    fill(model, table, weight_files(folder))
    finish(model)
    fc.method.finish(fc.params)
    model.embedding = torch.empty(0, dtype=new, device=device)  # the target's is used
    return FeatureHead(model, fc, embed_norm, draft_tokens, hidden_norm)


def _draft_tokens(raw: dict[str, Any], vocab_size: int, where: Path, device: torch.device) -> torch.Tensor | None:
    """The tokens that drafts are chosen from, [any] int64, sorted; None: all tokens. ConfigError for anything but
    different tokens of the vocabulary."""
    given = raw.get("draft_tokens")
    if given is None:
        return None
    right = isinstance(given, list) and given and all(type(token) is int and 0 <= token < vocab_size for token in given)
    if not right or len(set(given)) != len(given):
        raise ConfigError(
            f"{where}: draft_tokens: expected a list of different tokens of the vocabulary of {vocab_size:,}, found "
            f"{shown(given)}"
        )
    return torch.tensor(sorted(given), device=device)


def load_medusa_heads(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_position: int | None = None,
    kernels: Asked = "auto",
) -> MedusaHeads:
    """Loads Medusa heads. Arguments: see `load_model`; max_position is not used. ConfigError or CheckpointError where
    the folder does not fit."""
    folder, device = Path(folder), torch.device(device)
    path = folder / "config.json"
    raw = read_object(path, ConfigError, _MOST_BYTES)
    if raw.get("architectures") != [MEDUSA]:
        raise ConfigError(
            f'{path}: expected the config of Medusa heads, architectures ["{MEDUSA}"], found '
            f"{shown(raw.get('architectures'))}"
        )
    get = Reader(raw, str(path))
    config = MedusaConfig(get.integer("hidden_size"), get.integer("vocab_size"), get.integer("num_heads"))
    if config.num_heads > _MOST_HEADS:
        raise get.error("num_heads", f"at most {_MOST_HEADS}", config.num_heads)
    if dtype is None:
        names = ("float32", "float16", "bfloat16", "float64")
        dtype = getattr(torch, get.choice("torch_dtype", {name: name for name in names}, "float32"))
    method = choose_method("none", dtype, device, choose_kernels(kernels, device, dtype))
    size = config.hidden_size
    heads = Linear(method, size, {str(j): size for j in range(config.num_heads)}, True, "heads")
    table = {
        f"heads.{part}.{name}": (spec, lambda tensor, part=part, name=name: heads.load(part, name, tensor))
        for part in heads.parts
        for name, spec in part_tensors(heads, part).items()
    }
    store(table, weight_files(folder), dtype, f"{config.num_heads} Medusa heads with this config")
    method.finish(heads.params)
    return MedusaHeads(config, heads, dtype, device)


LOADERS: dict[Method, Callable[..., Any]] = {
    "draft": load_model,
    "eagle": load_feature_head,
    "mtp": load_feature_head,
    "medusa": load_medusa_heads,
}


def load_draft(folder: Path, dtype: torch.dtype, device: torch.device, config: EngineConfig) -> Drafts:
    """Loads the draft model in the folder, with the positions and kernels that the config sets for the target."""
    found: Drafts = LOADERS[method_in(folder)](folder, dtype, device, config.max_model_len, config.attention)
    return found


def parts_with_draft(folder: Path, dtype: torch.dtype, device: torch.device, config: EngineConfig) -> Parts:
    """Parts with the draft model in the folder. A worker's process finds this function by name."""
    return Parts(draft_model=load_draft(folder, dtype, device, config))
