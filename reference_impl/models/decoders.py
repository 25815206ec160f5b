"""Which decoder and which layers a family has, where they are not the plain ones."""

from __future__ import annotations

from reference_impl.core.decoder import Decoder, DecoderLayer
from reference_impl.core.model_config import ModelConfig

Kind = tuple[type[Decoder], type[DecoderLayer]]


def kind_of(config: ModelConfig) -> Kind:
    """(the class of a config's model, the class of its layers)."""
    name = config.architecture
    if name in ("MixtralForCausalLM", "Qwen3MoeForCausalLM"):
        from reference_impl.models.moe import ExpertsLayer

        return Decoder, ExpertsLayer
    if name in ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"):
        from reference_impl.models.gemma import Gemma2Layer, GemmaDecoder, GemmaLayer

        return GemmaDecoder, GemmaLayer if name == "GemmaForCausalLM" else Gemma2Layer
    if name == "Olmo2ForCausalLM":
        from reference_impl.models.olmo2 import Olmo2Layer

        return Decoder, Olmo2Layer
    if name == "Phi3ForCausalLM":
        from reference_impl.models.phi3 import Phi3Layer

        return Decoder, Phi3Layer
    if name == "StableLmForCausalLM":
        from reference_impl.models.stablelm import StableLmDecoder, StableLmLayer

        return StableLmDecoder, StableLmLayer
    return Decoder, DecoderLayer
