"""Writes the checkpoints of this folder: see README.md. python make.py FOLDER"""

import sys
from pathlib import Path

import torch
import torchao.quantization.quant_api as quant_api
from safetensors.torch import save_file
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8Tensor,
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
)
from torchao.quantization.granularity import PerAxis, PerGroup, PerRow, PerTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TorchAoConfig

IDS = [3, 17, 5, 29, 11, 2, 8, 23, 14, 1]
ASYMMETRIC = MappingType.ASYMMETRIC
CONFIGS = {
    "int8": Int8WeightOnlyConfig(),
    "int8_groups": Int8WeightOnlyConfig(granularity=PerGroup(16)),
    "w8a8": Int8DynamicActivationInt8WeightConfig(),
    "w8a8_asymmetric": Int8DynamicActivationInt8WeightConfig(act_mapping_type=ASYMMETRIC),
    "int4": IntxWeightOnlyConfig(torch.int4, granularity=PerGroup(16), mapping_type=ASYMMETRIC),
    "int3": IntxWeightOnlyConfig(torch.int3, granularity=PerAxis(0)),
    "w4a8": Int8DynamicActivationIntxWeightConfig(torch.int4, weight_granularity=PerGroup(32)),
    "fp8": Float8WeightOnlyConfig(),
    "fp8_dynamic": Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
    "fp8_tensor": Float8DynamicActivationFloat8WeightConfig(granularity=PerTensor()),
}


def emulated(model: torch.nn.Module) -> LlamaForCausalLM:
    """In float32, with weights and inputs as torchao rounds them, a scale per row."""
    plain = LlamaForCausalLM(model.config).float().eval()
    weights = {
        n: p.dequantize(torch.float32) if isinstance(p, Float8Tensor) else p for n, p in model.named_parameters()
    }
    plain.load_state_dict(weights)

    def rounded(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return Float8Tensor.from_hp(inputs[0][0], granularity=PerRow()).dequantize()[None]

    for name, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(rounded)
    return plain


def main(out: Path) -> None:
    quant_api._check_hardware_support = lambda granularity: None  # rounding, unlike the product, needs no GPU
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=1, max_position_embeddings=64, **sizes))
        for parameter in model.parameters():
            parameter.data.mul_(5 if parameter.ndim == 2 else 1)  # so that attention and MLP show in the logits
        source, folder = out / "source", out / name
        model.save_pretrained(source)
        dtype = torch.bfloat16 if name == "fp8_dynamic" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(source, quantization_config=TorchAoConfig(config), dtype=dtype)
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink()
        with torch.no_grad():
            computed = emulated(model) if name == "fp8_dynamic" else model
            save_file({"logits": computed(torch.tensor([IDS])).logits[0]}, folder / "logits.safetensors")
        for file in source.iterdir():
            file.unlink()
        source.rmdir()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
