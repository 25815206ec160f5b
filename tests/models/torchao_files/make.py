"""Writes the checkpoints of this folder: see README.md. python make.py FOLDER [NAME ...]"""

import sys
from pathlib import Path

import torch
import torchao.prototype.mx_formats.inference_workflow as mx_formats
import torchao.quantization.quant_api as quant_api
from safetensors.torch import save_file
from torchao.prototype.mx_formats.inference_workflow import (
    MXDynamicActivationMXWeightConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
    NVFP4WeightOnlyConfig,
)
from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8Tensor,
    Float8WeightOnlyConfig,
    FqnToConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
)
from torchao.quantization.granularity import PerAxis, PerGroup, PerRow, PerTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TorchAoConfig

IDS = [3, 17, 5, 29, 11, 2, 8, 23, 14, 1]
FP4 = torch.float4_e2m1fn_x2
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
    "mxfp8": MXDynamicActivationMXWeightConfig(),
    "mxfp4": MXDynamicActivationMXWeightConfig(activation_dtype=FP4, weight_dtype=FP4),
    "nvfp4": NVFP4DynamicActivationNVFP4WeightConfig(),
    "nvfp4_weights": NVFP4WeightOnlyConfig(),
    "embedding": FqnToConfig(
        {
            "_default": IntxWeightOnlyConfig(torch.int4, granularity=PerGroup(16)),
            "model.embed_tokens": IntxWeightOnlyConfig(torch.int8, granularity=PerAxis(0)),
        }
    ),
}
ROUNDED = {  # inputs as torchao rounds them, of products that need a GPU or are in bfloat16
    "fp8_dynamic": lambda x: Float8Tensor.from_hp(x, granularity=PerRow()),
    "mxfp8": lambda x: MXTensor.to_mx(x, torch.float8_e4m3fn, scaling_mode=ScaleCalculationMode.RCEIL),
    "mxfp4": lambda x: MXTensor.to_mx(x, FP4, scaling_mode=ScaleCalculationMode.RCEIL),
    "nvfp4": lambda x: NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max())),
    "nvfp4_weights": None,
}


def emulated(model: torch.nn.Module, name: str) -> LlamaForCausalLM:
    """In float32, with weights and inputs as torchao rounds them."""
    plain = LlamaForCausalLM(model.config).float().eval()
    weights = {
        n: p.dequantize(torch.float32) if hasattr(p, "qdata") else p.float() for n, p in model.named_parameters()
    }
    plain.load_state_dict(weights)

    def rounded(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return ROUNDED[name](inputs[0][0].contiguous()).dequantize()[None]

    for part, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear) and part != "lm_head" and ROUNDED[name] is not None:
            module.register_forward_pre_hook(rounded)
    return plain


def main(out: Path, names: list[str]) -> None:
    quant_api._check_hardware_support = lambda granularity: None  # rounding, unlike the product, needs no GPU
    mx_formats.is_sm_at_least_100 = lambda: True
    for name, config in CONFIGS.items():
        if names and name not in names:
            continue
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=1, max_position_embeddings=64, **sizes))
        for parameter in model.parameters():
            parameter.data.mul_(5 if parameter.ndim == 2 else 1)  # so that attention and MLP show in the logits
        source, folder = out / "source", out / name
        model.save_pretrained(source)
        dtype = torch.bfloat16 if name in ROUNDED else torch.float32
        tables = {"include_input_output_embeddings": True, "untie_embedding_weights": True}
        how = TorchAoConfig(config, **(tables if name == "embedding" else {}))
        model = AutoModelForCausalLM.from_pretrained(source, quantization_config=how, dtype=dtype)
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink()
        with torch.no_grad():
            computed = emulated(model, name) if name in ROUNDED else model
            save_file({"logits": computed(torch.tensor([IDS])).logits[0]}, folder / "logits.safetensors")
        for file in source.iterdir():
            file.unlink()
        source.rmdir()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
