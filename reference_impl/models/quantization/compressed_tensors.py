"""config.json's quantization_config as compressed-tensors writes it: read into the layout of each matrix, and made."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from reference_impl.models.config_reader import ConfigError
from reference_impl.models.quantization.config_fields import Fields
from reference_impl.models.quantization.layouts import LayoutOf, OfAnyGroups, OfScheme
from reference_impl.models.quantization.numbers import FORMATS
from reference_impl.models.quantization.scheme import BLOCK, Activations, Scheme
from reference_impl.models.quantization.tensors import in_words

_NUMBERS = {**{("int", bits): f"int{bits}" for bits in range(2, 9)}, ("float", 8): "e4m3", ("float", 4): "e2m1"}
_WHOLE = tuple(_NUMBERS["int", bits] for bits in range(2, 9))
_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision",
)  # fmt: skip


def _error(where: str, field: str, expected: str, found: object) -> ConfigError:
    return Fields({}, where).error(field, expected, found)


def compressed_layouts(raw: dict[str, Any], where: str) -> LayoutOf:
    """The layouts of a model's linear layers. Raises ConfigError for what is not read, by name."""
    groups, ignore, form = raw.get("config_groups"), raw.get("ignore") or [], raw.get("format")
    if not isinstance(groups, dict | None):
        raise _error(where, "config_groups", "an object {name: group}", groups)
    groups = {name: group for name, group in (groups or {}).items() if not _is_of_attention(group)}
    if form not in _FORMATS and (groups or form not in (None, "dense")):
        raise _error(where, "format", f"one of {', '.join(_FORMATS)}; or dense, where no group has weights", form)
    _check_names(ignore, where, "ignore")
    found: dict[str, OfScheme | OfAnyGroups] = {}  # of a target in two groups the later one counts
    for name, group in groups.items():
        field = f"config_groups.{name}"
        if not isinstance(group, dict):
            raise _error(where, field, "an object", group)
        _check_names(group.get("targets"), where, f"{field}.targets")
        if group.get("output_activations") is not None:
            raise _error(where, f"{field}.output_activations", "none", group["output_activations"])
        found |= dict.fromkeys(group["targets"], _layout(group, form, where, field))

    def layout_of(layer: str) -> OfScheme | OfAnyGroups | None:
        if any(_matches(layer, target) for target in ignore):
            return None
        # A name goes before a regular expression, both in the order of their letters, and a class comes last.
        named = [target for target in found if _matches(layer, target)]
        return found[min(named, key=lambda one: (one == "Linear", "re:" in one, one))] if named else None

    return layout_of


def _is_of_attention(group: object) -> bool:
    """Whether a group names the attention alone, without its linear layers: it rounds queries, keys and values, and
    says nothing about weights."""
    targets = group.get("targets") if isinstance(group, dict) and group.get("weights") is None else None
    if not isinstance(targets, list) or not targets:
        return False
    return all(isinstance(name, str) and re.search(r"(Attention|self_attn)\$?$", name) for name in targets)


def _check_names(names: object, where: str, field: str) -> None:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _error(where, field, "a list of names, classes, or re: and a regular expression", names)
    for name in names:
        try:
            re.compile(name.removeprefix("re:"))
        except (re.error, OverflowError, RecursionError) as wrong:
            if name.startswith("re:"):
                raise _error(where, field, f"a regular expression behind re: ({wrong})", name) from None


def _matches(layer: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), layer) is not None
    return target in (layer, "Linear")


def _layout(group: dict[str, Any], form: str, where: str, field: str) -> OfScheme | OfAnyGroups:
    """The layout of a group of layers. form: of the whole config, where the group has none of its own."""
    own = group.get("format") or form
    if own not in _FORMATS:
        raise _error(where, f"{field}.format", f"one of {', '.join(_FORMATS)}", own)
    scheme = _scheme(group, where, field)
    layout = OfScheme(scheme, packed=None if own == "mixed-precision" else own == "pack-quantized")
    if group["weights"].get("actorder") not in ("group", "dynamic"):
        return layout
    if scheme.per != "group" or scheme.numbers not in _WHOLE:
        expected = "'weight' or none, or integers in groups"
        raise _error(where, f"{field}.weights.actorder", expected, group["weights"]["actorder"])
    return OfAnyGroups(layout)


def _scheme(group: dict[str, Any], where: str, field: str) -> Scheme:
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise _error(where, f"{field}.weights", "an object", weights)
    kind = _kind(weights, where, f"{field}.weights")
    strategy, size = _strategy(weights), weights.get("group_size")
    per: Any = {"tensor_group": "group"}.get(strategy, strategy) if isinstance(strategy, str) else None
    if per not in ("tensor", "channel", "group", "block"):
        raise _error(where, f"{field}.weights.strategy", "tensor, channel, group, tensor_group or block", strategy)
    block = (
        _block(weights.get("block_structure"), where, f"{field}.weights.block_structure") if per == "block" else None
    )
    if per == "group" and (type(size) is not int or size < 1):
        raise _error(where, f"{field}.weights.group_size", "a number of inputs", size)
    micro = kind == "e2m1" or (kind == "e4m3" and per == "group" and weights.get("scale_dtype") == "torch.uint8")
    scales: Any = "float" if not micro else "e8m0" if size == 32 else "e4m3"
    try:
        return Scheme(
            kind, per, size if per == "group" else None, weights.get("symmetric", True) is not False, scales,
            _activations(group.get("input_activations"), where, f"{field}.input_activations"),
            block=block or (BLOCK, BLOCK),
        )  # fmt: skip
    except ConfigError:
        raise
    except ValueError as wrong:
        raise ConfigError(f"{where}: quantization_config.{field}: {wrong}") from None


def _strategy(args: Mapping[str, Any]) -> Any:
    """What shares a scale. Where the strategy is left out, group_size says it."""
    strategy, size = args.get("strategy"), args.get("group_size")
    if strategy is not None:
        return strategy
    return "tensor" if size is None else "channel" if size == -1 else "group"


def _kind(args: Mapping[str, Any], where: str, field: str) -> Any:
    key = args.get("type", "int"), args.get("num_bits", 8)
    if not isinstance(key[0], str) or type(key[1]) is not int or key not in _NUMBERS:
        raise _error(where, field, "type and num_bits: int of 2 to 8, float of 4 or 8", f"{key[0]!r}, {key[1]!r}")
    return _NUMBERS[key]


def _activations(args: object, where: str, field: str) -> Activations | None:
    if args is None:
        return None
    if not isinstance(args, dict):
        raise _error(where, field, "an object", args)
    kind, dynamic, size = _kind(args, where, field), args.get("dynamic", False), args.get("group_size")
    per: Any = _strategy(args)
    form = (kind, per, size, dynamic) if args.get("symmetric", True) is True else None
    if form == ("e2m1", "tensor_group", 16, "local"):
        return Activations("e2m1", "group", True, 16, scales="e4m3")
    if form in (("e2m1", "group", 32, True), ("e4m3", "group", 32, True)) and args.get("scale_dtype") == "torch.uint8":
        return Activations(kind, "group", True, 32, scales="e8m0")
    if kind not in ("int8", "e4m3") or form is None:
        expected = "symmetric ones of 8 bits, as NVFP4 or MX have them, or none (weights only)"
        raise _error(where, field, expected, args)
    size = size if per == "group" else None
    known = per in ("token", "tensor") or (per == "group" and type(size) is int and size > 0)
    if not isinstance(dynamic, bool) or not known or (per != "tensor" and not dynamic):
        raise _error(where, field, "dynamic of a token, group or tensor, or static of a tensor", args)
    return Activations(kind, per, dynamic, size)


def _block(found: object, where: str, field: str) -> tuple[int, int]:
    """The sizes of a block, from [outputs, inputs] or "128x128"."""
    if isinstance(found, str) and re.fullmatch(r"\d{1,6}x\d{1,6}", found):
        found = [int(size) for size in found.split("x")]
    if not isinstance(found, list) or len(found) != 2 or not all(type(size) is int and size > 0 for size in found):
        raise _error(where, field, "[outputs, inputs] of a block", found)
    return found[0], found[1]


def config_of(scheme: Scheme, ignore: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
    """The quantization_config for a model whose linear layers have this scheme, but those ignored (names, or re: and a
    regular expression)."""
    numbers = FORMATS[scheme.numbers]
    per = "tensor_group" if scheme.scales == "e4m3" else scheme.per
    kind = "int" if numbers.least is not None else "float"
    weights = {"num_bits": numbers.bits, "type": kind, "symmetric": scheme.symmetric, "strategy": per, "dynamic": False}
    weights |= {"group_size": scheme.group_size} if scheme.group_size else {}
    weights |= {"block_structure": list(scheme.block)} if scheme.per == "block" else {}
    weights |= _scale_dtype(scheme.scales)
    inputs = None
    if (given := scheme.activations) is not None:
        bits = FORMATS[given.numbers].bits
        inputs = {"num_bits": bits, "type": "int" if given.numbers == "int8" else "float", "symmetric": given.symmetric}
        inputs |= {"strategy": given.per, "dynamic": given.dynamic}
        inputs |= {"strategy": "tensor_group", "dynamic": "local"} if given.scales == "e4m3" else {}
        inputs |= {"group_size": given.group_size} if given.group_size else {}
        inputs |= _scale_dtype(given.scales)
    form = "pack-quantized" if in_words(scheme) else "int-quantized" if kind == "int" else "float-quantized"
    if scheme.scales != "float":
        form = {"e4m3": "nvfp4-pack-quantized", "e8m0": f"mxfp{numbers.bits}-"}[scheme.scales]
        form += {"mxfp4-": "pack-quantized", "mxfp8-": "quantized"}.get(form, "")
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": form}}, "ignore": list(ignore), "kv_cache_scheme": None,
    }  # fmt: skip


def _scale_dtype(scales: str) -> dict[str, str]:
    return {"e4m3": {"scale_dtype": "torch.float8_e4m3fn"}, "e8m0": {"scale_dtype": "torch.uint8"}}.get(scales, {})


def config_of_layers(schemes: Mapping[str, Scheme], ignore: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
    """`config_of` for {a matrix's name: its scheme}: the commonest scheme is every linear layer's, others are by name.
    Raises ValueError where there are none."""
    counts = Counter(schemes.values()).most_common()
    if not counts:
        raise ValueError("quantization_config: expected a matrix or more, got none")
    found = config_of(counts[0][0], ignore)
    groups = found["config_groups"]
    for place, (scheme, _) in enumerate(counts[1:], 1):
        group = config_of(scheme)["config_groups"]["group_0"]
        groups[f"group_{place}"] = group | {"targets": [name for name, other in schemes.items() if other == scheme]}
    if len({group["format"] for group in groups.values()}) > 1:
        found["format"] = "mixed-precision"
    return found
