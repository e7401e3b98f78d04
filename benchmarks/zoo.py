"""The models on which holdover's figures are measured: small enough for a CPU, activations outweighing weights.

Each entry makes `(model, args, kwargs, loss)` like the factories the command line takes. They need the extra `zoo`
(transformers, timm, diffusers, monai, x-transformers); weights are random, nothing is downloaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[[Any], torch.Tensor] | None]


def _tokens(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


_TORCHVISION_OPS = (
    "nms", "qnms", "roi_align", "_roi_align_backward", "roi_pool", "_roi_pool_backward", "ps_roi_align",
    "_ps_roi_align_backward", "ps_roi_pool", "_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward",
    "_interpolate_bilinear2d_aa", "_interpolate_bicubic2d_aa",
)  # fmt: skip
_library = torch.library.Library("torchvision", "FRAGMENT")
with contextlib.suppress(RuntimeError):  # then torchvision's compiled ops are there
    # PyPI pairs the CPU build of torch with a torchvision whose compiled ops do not load; the classification models
    # need only that the names exist while it is imported.
    for _name in _TORCHVISION_OPS:
        _library.define(f"{_name}(Tensor input) -> Tensor")


def gpt2() -> Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=2048, n_positions=256, n_embd=256, n_layer=4, n_head=8, use_cache=False,
                        bos_token_id=0, eos_token_id=0)  # fmt: skip
    ids = _tokens(2048, 8, 256)
    return GPT2LMHeadModel(config), (), {"input_ids": ids, "labels": ids}, None


def llama() -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    ids = _tokens(2048, 8, 256)
    return LlamaForCausalLM(config), (), {"input_ids": ids, "labels": ids}, None


def bert() -> Example:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=2048, hidden_size=256, num_hidden_layers=4, num_attention_heads=8, intermediate_size=1024,
        max_position_embeddings=256,
    )  # fmt: skip
    ids = _tokens(2048, 8, 128)
    mask = torch.ones_like(ids)
    mask[:, 100:] = 0
    return BertForMaskedLM(config), (), {"input_ids": ids, "attention_mask": mask, "labels": ids}, None


def vit() -> Example:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192, num_hidden_layers=4, num_attention_heads=6, intermediate_size=768, image_size=128,
        patch_size=8, num_labels=10,
    )  # fmt: skip
    inputs = {"pixel_values": _normal(8, 3, 128, 128), "labels": _tokens(10, 8)}
    return ViTForImageClassification(config), (), inputs, None


def t5() -> Example:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=2048, d_model=256, d_kv=32, d_ff=768, num_layers=3, num_heads=8, decoder_start_token_id=0,
        feed_forward_proj="gated-gelu", use_cache=False,
    )  # fmt: skip
    inputs = {"input_ids": _tokens(2048, 8, 128), "labels": _tokens(2048, 8, 96)}
    return T5ForConditionalGeneration(config), (), inputs, None


def _timm(name: str, batch: int, size: int) -> Example:
    import timm

    targets = _tokens(10, batch)
    model = timm.create_model(name, pretrained=False, num_classes=10)
    return model, (_normal(batch, 3, size, size),), {}, lambda logits: F.cross_entropy(logits, targets)


def resnet18() -> Example:
    return _timm("resnet18", 32, 128)


def resnet50() -> Example:
    return _timm("resnet50", 16, 128)


def convnext() -> Example:
    return _timm("convnext_atto", 8, 128)


def efficientnet() -> Example:
    return _timm("efficientnet_b0", 8, 128)


def unet2d() -> Example:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=32, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64, 128),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"), norm_num_groups=8,
    )  # fmt: skip
    noise = _normal(4, 3, 32, 32)
    return model, (noise, torch.tensor([1, 10, 100, 500])), {}, lambda output: F.mse_loss(output.sample, noise)


def unet3d() -> Example:
    from monai.networks.nets import UNet

    model = UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(16, 32, 64), strides=(2, 2), num_res_units=2)
    target = _tokens(2, 2, 48, 48, 48)
    return model, (_normal(2, 1, 48, 48, 48),), {}, lambda logits: F.cross_entropy(logits, target)


def x_transformer() -> Example:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=256, depth=4, heads=8, rotary_pos_emb=True, ff_glu=True, attn_dropout=0.1, ff_dropout=0.1)
    model = TransformerWrapper(num_tokens=2048, max_seq_len=128, attn_layers=layers)
    ids = _tokens(2048, 8, 128)
    return model, (ids,), {}, lambda logits: F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class LSTMLanguageModel(nn.Module):
    def __init__(self, vocabulary: int = 2048, width: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states, _last = self.lstm(self.embedding(ids))
        return self.head(states)


def lstm() -> Example:
    ids = _tokens(2048, 8, 128)
    return LSTMLanguageModel(), (ids,), {}, lambda logits: F.cross_entropy(logits.flatten(0, 1), ids.flatten())


ZOO: dict[str, Callable[[], Example]] = {
    "gpt2": gpt2,
    "llama-gqa": llama,
    "bert": bert,
    "vit": vit,
    "t5": t5,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "convnext": convnext,
    "efficientnet": efficientnet,
    "unet2d": unet2d,
    "unet3d": unet3d,
    "x-transformer": x_transformer,
    "lstm": lstm,
}
