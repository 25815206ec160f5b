"""A feature head (features/speculative/feature_head.py) from a folder: config.json says architectures ["FeatureHead"],
or ["MultiTokenPrediction"] for a module of multi-token prediction (tensors enorm, hnorm, eh_proj, as DeepSeek's);
and layer_of: whose layer it is, "Qwen3ForCausalLM" for example; maybe draft_tokens: of which all drafts are, a list;
the other fields are that architecture's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from reference_impl.assembly.model import build_model
from reference_impl.core.linear import Linear
from reference_impl.features.speculative.feature_head import FeatureHead
from reference_impl.interfaces import TensorSpec
from reference_impl.models.config_json import parse_model_config
from reference_impl.models.config_reader import ConfigError
from reference_impl.models.json_file import read_object, shown
from reference_impl.models.loader import FLOATS, Destination, destinations, fill, finish, weight_files

if TYPE_CHECKING:
    from reference_impl.features.fusion.kernels import Asked

ARCHITECTURE = "FeatureHead"
MTP = "MultiTokenPrediction"  # with DeepSeek's names of the tensors that are not the layer's
NAMES = {ARCHITECTURE: ("fc", "embed_norm"), MTP: ("eh_proj", "enorm")}
_MOST_BYTES = 1 << 20


def load_feature_head(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_position: int | None = None,
    kernels: Asked = "auto",
) -> FeatureHead:
    """Arguments as of `load_model`. ConfigError, CheckpointError where the folder does not fit."""
    folder, device = Path(folder), torch.device(device)
    path = folder / "config.json"
    raw = read_object(path, ConfigError, _MOST_BYTES)
    if raw.get("architectures") not in ([ARCHITECTURE], [MTP]) or not isinstance(raw.get("layer_of"), str):
        raise ConfigError(
            f'{path}: expected the config of a feature head, architectures ["{ARCHITECTURE}"] and layer_of, found '
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
    """[any] int64, sorted; None: all tokens. ConfigError for anything but different tokens of the vocabulary."""
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
