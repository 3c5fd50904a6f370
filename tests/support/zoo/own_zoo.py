"""x-transformers, MONAI, kornia, self-attention-cv, and a two-tower CLIP as its first authors' code is built."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor, nn

from zoo.entry import CLASSES, Entry

_PROMPTS = 4


# x-transformers -------------------------------------------------------------------------------------------------------


def _x_transformers(**options: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        package = import_module("x_transformers")
        wrapped = {key: options[key] for key in ("num_register_tokens", "post_emb_norm") if key in options}
        inner = {key: value for key, value in options.items() if key not in wrapped}
        layers = package.Encoder(dim=24, depth=2, heads=3, attn_dim_head=8, **inner)
        return package.ViTransformerWrapper(
            image_size=32, patch_size=8, num_classes=CLASSES, attn_layers=layers, **wrapped
        )

    return build


_X_SETTINGS: dict[str, dict[str, object]] = {
    "plain": {},
    "flash": {"attn_flash": True},
    "registers": {"num_register_tokens": 3},
    "rmsnorm, swiglu": {"use_rmsnorm": True, "ff_glu": True, "ff_swish": True},
    "rotary": {"rotary_pos_emb": True},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "relative bias": {"rel_pos_bias": True},
    "qk norm": {"attn_qk_norm": True},
    "talking heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "top-k": {"attn_sparse_topk": 4},
    "gated values": {"attn_gate_values": True},
    "post-norm": {"pre_norm": False},
    "sandwich norm": {"sandwich_norm": True},
    "macaron": {"macaron": True},
    "scaled residual": {"scale_residual": True},
    "grouped keys": {"attn_kv_heads": 1},
    "memory keys": {"attn_num_mem_kv": 3},
    "value residual": {"add_value_residual": True, "learned_value_residual_mix": True},
    "hyper-connections": {"num_residual_streams": 2},
}

# MONAI ----------------------------------------------------------------------------------------------------------------


def _monai(name: str = "ViT", channels: int = 3, **options: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        sizes = {"in_channels": channels, "img_size": (32, 32), "patch_size": (8, 8), "spatial_dims": 2}
        inner = {"hidden_size": 24, "mlp_dim": 32, "num_layers": 2, "num_heads": 3}
        return getattr(import_module("monai.networks.nets"), name)(**{**sizes, **inner, **options})

    return build


def _unetr() -> nn.Module:
    sizes = {"in_channels": 1, "out_channels": 2, "img_size": (32, 32), "feature_size": 4, "spatial_dims": 2}
    return import_module("monai.networks.nets").UNETR(**sizes, hidden_size=24, mlp_dim=32, num_heads=3)


def _swin_unetr() -> nn.Module:
    sizes = {"in_channels": 1, "out_channels": 2, "spatial_dims": 2, "feature_size": 12, "window_size": 4}
    return import_module("monai.networks.nets").SwinUNETR(**sizes, depths=(1, 1, 1, 1), num_heads=(1, 2, 3, 4))


_CLASSES = {"classification": True, "num_classes": CLASSES, "post_activation": None}
_MONAI = [
    Entry("monai/ViT, 3 channels", _monai(**_CLASSES)),
    Entry("monai/ViT, 1 channel", _monai(channels=1, **_CLASSES), channels=1),
    Entry("monai/ViT, save_attn", _monai(save_attn=True, **_CLASSES)),
    Entry("monai/ViT, 1 channel, save_attn", _monai(channels=1, save_attn=True, **_CLASSES), channels=1),
    Entry("monai/ViT, perceptron", _monai(proj_type="perceptron", qkv_bias=True, **_CLASSES)),
    Entry("monai/ViT, tanh", _monai(classification=True, num_classes=CLASSES)),
    Entry("monai/ViT, no classification", _monai(), kind="other"),
    Entry("monai/ViTAutoEnc", _monai("ViTAutoEnc", channels=1, patch_size=(4, 4)), channels=1, kind="other"),
    Entry("monai/UNETR", _unetr, channels=1, kind="other"),
    Entry("monai/SwinUNETR", _swin_unetr, (64, 64), channels=1, kind="other"),
]

# kornia and self-attention-cv -----------------------------------------------------------------------------------------


class ClassTokenHead(nn.Module):
    """kornia's ViT gives tokens; a classifier reads the first one."""

    def __init__(self, backbone: nn.Module, width: int) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(width, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(self.backbone(pictures)[:, 0])


def _kornia_vit() -> nn.Module:
    kornia = import_module("kornia.models.vit")
    sizes = {"image_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    return ClassTokenHead(kornia.VisionTransformer(**sizes), 24)


def _kornia_tiny_vit() -> nn.Module:
    kornia = import_module("kornia.models.tiny_vit")
    sizes = {"embed_dims": [8, 12, 16, 20], "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 2]}
    return kornia.TinyViT(img_size=64, num_classes=CLASSES, window_sizes=[4, 4, 4, 2], **sizes)


def _self_attention_cv(name: str = "ViT", **options: object) -> Callable[[], nn.Module]:
    sizes = {"dim": 24, "blocks": 2, "heads": 3, "dim_linear_block": 32, "num_classes": CLASSES}
    return lambda: getattr(import_module("self_attention_cv.vit"), name)(**{**sizes, **options})


# A CLIP with both towers ----------------------------------------------------------------------------------------------


class ResidualAttentionBlock(nn.Module):
    """Pre-norm, ``nn.MultiheadAttention`` on (tokens, batch, channels), QuickGELU."""

    def __init__(self, width: int, heads: int, mask: Tensor | None = None) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(width, heads)
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        mask = None if self.mask is None else self.mask.to(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        hidden = self.c_fc(self.ln_2(x))
        return x + self.c_proj(hidden * torch.sigmoid(1.702 * hidden))


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, mask: Tensor | None = None) -> None:
        super().__init__()
        self.resblocks = nn.Sequential(*(ResidualAttentionBlock(width, heads, mask) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.resblocks(x.permute(1, 0, 2)).permute(1, 0, 2)


class ImageTower(nn.Module):
    def __init__(self, width: int = 24, features: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 8, 8, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(width))
        self.positional_embedding = nn.Parameter(0.1 * torch.randn(17, width))
        self.ln_pre, self.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.transformer = Transformer(width, 2, 3)
        self.proj = nn.Parameter(width**-0.5 * torch.randn(width, features))

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.conv1(pictures).flatten(2).permute(0, 2, 1)
        first = self.class_embedding.expand(len(x), 1, -1)
        x = self.ln_pre(torch.cat([first, x], dim=1) + self.positional_embedding)
        return self.ln_post(self.transformer(x)[:, 0]) @ self.proj


class CLIP(nn.Module):
    """Both towers; called with pictures and texts, it gives the similarities of all pairs."""

    def __init__(self, width: int = 16, length: int = 6, words: int = 20, features: int = 16) -> None:
        super().__init__()
        self.visual = ImageTower(features=features)
        mask = torch.full((length, length), float("-inf")).triu(1)
        self.transformer = Transformer(width, 2, 2, mask)
        self.token_embedding = nn.Embedding(words, width)
        self.positional_embedding = nn.Parameter(0.1 * torch.randn(length, width))
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(width**-0.5 * torch.randn(width, features))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def encode_image(self, pictures: Tensor) -> Tensor:
        return nn.functional.normalize(self.visual(pictures), dim=-1)

    def encode_text(self, texts: Tensor) -> Tensor:
        x = self.transformer(self.token_embedding(texts) + self.positional_embedding)
        x = self.ln_final(x)[torch.arange(len(texts)), texts.argmax(dim=-1)]
        return nn.functional.normalize(x @ self.text_projection, dim=-1)

    def forward(self, pictures: Tensor, texts: Tensor) -> Tensor:
        return self.logit_scale.exp() * self.encode_image(pictures) @ self.encode_text(texts).T


class ZeroShot(nn.Module):
    """A classifier made of a CLIP and one text per class; the text tower runs in every forward pass, or did once."""

    def __init__(self, *, every_time: bool) -> None:
        super().__init__()
        self.clip = CLIP()
        self.register_buffer("texts", torch.arange(_PROMPTS * 6).remainder(19).reshape(_PROMPTS, 6))
        with torch.no_grad():
            self.kept = None if every_time else nn.Parameter(self.clip.encode_text(self.texts))

    def forward(self, pictures: Tensor) -> Tensor:
        texts = self.clip.encode_text(self.texts) if self.kept is None else self.kept
        return self.clip.logit_scale.exp() * self.clip.encode_image(pictures) @ texts.T


OWN = [
    *(Entry(f"x_transformers/ViT, {name}", _x_transformers(**options)) for name, options in _X_SETTINGS.items()),
    *_MONAI,
    Entry("kornia/VisionTransformer", _kornia_vit),
    Entry("kornia/TinyViT", _kornia_tiny_vit, (64, 64), kind="hierarchical"),
    Entry("self_attention_cv/ViT", _self_attention_cv(img_dim=32, patch_dim=8)),
    Entry("self_attention_cv/ViT, no classification", _self_attention_cv(img_dim=32, patch_dim=8, classification=False),
          kind="other"),
    Entry("self_attention_cv/ResNet50ViT", _self_attention_cv("ResNet50ViT", img_dim=64), (64, 64)),
    Entry("clip/image tower", ImageTower),
    Entry("clip/zero-shot, text tower in every pass", lambda: ZeroShot(every_time=True)),
    Entry("clip/zero-shot, text features kept", lambda: ZeroShot(every_time=False)),
]  # fmt: skip
