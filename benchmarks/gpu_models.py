"""The models of benchmarks/gpu.py, at sizes of some GiB: factories of (model, args, kwargs, loss), no downloads.

They need the extra `zoo`. Call them under `torch.device("meta")` for a model without memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from zoo import Example


def _ids(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(vocabulary, shape)


def gpt2() -> Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = _ids(50257, 8, 1024)
    return GPT2LMHeadModel(GPT2Config(use_cache=False)), (), {"input_ids": ids, "labels": ids}, None


def llama() -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    ids = _ids(32000, 2, 2048)
    return LlamaForCausalLM(config), (), {"input_ids": ids, "labels": ids}, None


def bert() -> Example:
    from transformers import BertConfig, BertForMaskedLM

    ids = _ids(30522, 16, 512)
    mask = torch.ones_like(ids)
    mask[:, 400:] = 0
    return BertForMaskedLM(BertConfig()), (), {"input_ids": ids, "attention_mask": mask, "labels": ids}, None


def vit() -> Example:
    from transformers import ViTConfig, ViTForImageClassification

    inputs = {"pixel_values": torch.randn(64, 3, 224, 224), "labels": _ids(1000, 64)}
    return ViTForImageClassification(ViTConfig(num_labels=1000)), (), inputs, None


def resnet50() -> Example:
    import timm

    targets = _ids(1000, 64)
    model = timm.create_model("resnet50", pretrained=False)
    return model, (torch.randn(64, 3, 224, 224),), {}, lambda logits: F.cross_entropy(logits, targets)


def unet() -> Example:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=64, in_channels=3, out_channels=3, layers_per_block=2, block_out_channels=(128, 256, 512),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    noise = torch.randn(16, 3, 64, 64)
    return model, (noise, torch.arange(16)), {}, lambda output: F.mse_loss(output.sample, noise)


MODELS: dict[str, Callable[[], Example]] = {
    "gpt2": gpt2, "llama": llama, "bert": bert, "vit": vit, "resnet50": resnet50, "unet": unet,
}  # fmt: skip


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that stand in a row of their kind: what people put activation checkpointing around."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = [c for c in module.children() if next(c.children(), None) is not None]
        kinds = {type(c) for c in children}
        if len(children) > 1 and len(kinds) < len(children):
            found += children
            inside.update(m for c in children for m in c.modules())
    return found
