"""Which decoder and which layers a family has, where they are not the plain ones."""

from __future__ import annotations

from reference_impl.core.decoder import Decoder, DecoderLayer
from reference_impl.core.model_config import ModelConfig
from reference_impl.models.gemma import Gemma2Layer, GemmaDecoder, GemmaLayer
from reference_impl.models.moe import ExpertsLayer
from reference_impl.models.olmo2 import Olmo2Layer
from reference_impl.models.phi3 import Phi3Layer
from reference_impl.models.stablelm import StableLmDecoder, StableLmLayer

Kind = tuple[type[Decoder], type[DecoderLayer]]

_KINDS: dict[str, Kind] = {
    "MixtralForCausalLM": (Decoder, ExpertsLayer),
    "Qwen3MoeForCausalLM": (Decoder, ExpertsLayer),
    "GemmaForCausalLM": (GemmaDecoder, GemmaLayer),
    "Gemma2ForCausalLM": (GemmaDecoder, Gemma2Layer),
    "Gemma3ForCausalLM": (GemmaDecoder, Gemma2Layer),
    "Olmo2ForCausalLM": (Decoder, Olmo2Layer),
    "Phi3ForCausalLM": (Decoder, Phi3Layer),
    "StableLmForCausalLM": (StableLmDecoder, StableLmLayer),
}


def kind_of(config: ModelConfig) -> Kind:
    """(the class of the model, the class of its layers)."""
    return _KINDS.get(config.architecture, (Decoder, DecoderLayer))
