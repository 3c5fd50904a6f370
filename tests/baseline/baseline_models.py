"""One small model of every family whose numbers are kept, with weights that depend on nothing but parameter names.

Only the libraries' public constructors are used, and nothing of vitreous: the builders outlive any change inside it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import open_clip
import timm
import torch
import transformers
from open_clip.transformer import QuickGELU as OpenClipQuickGELU
from open_clip.transformer import VisionTransformer as OpenClipTower
from timm.layers import RmsNorm, SwiGLUPacked
from timm.models.mlp_mixer import MlpMixer
from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from torchvision.models.vision_transformer import ConvStemConfig
from torchvision.models.vision_transformer import VisionTransformer as TorchvisionViT

Builder = Callable[[], nn.Module]

IMAGE = (24, 32)
PATCH = 8
DEPTH = 3
CLASSES = 4
WIDTH = 24
HEADS = 3
TEXTS = ("the film was not good", "very bad story!")
_EMBEDDINGS = ("token", "pos", "latent", "query", "probe", "table", "class_embedding", "embeddings", "memory")


def fill(model: nn.Module) -> nn.Module:
    """Set every parameter from a generator of its own, seeded by its name; evaluation mode, float64.

    No bias is 0 and no norm's weight is 1, so that every path through the model matters.
    """
    model = model.double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_values(name, tuple(parameter.shape)))
    return model


def _values(name: str, shape: tuple[int, ...]) -> Tensor:
    noise = torch.from_numpy(np.asarray(_generator(name).standard_normal(shape)))
    if len(shape) >= 2 and not any(part in name for part in _EMBEDDINGS):
        return 1.2 * noise / math.sqrt(math.prod(shape[1:]))
    if any(part in name for part in _EMBEDDINGS):
        return 0.5 * noise
    return 0.3 * noise if name.endswith("bias") else 0.8 + 0.3 * noise  # norm weights, LayerScale, temperatures


def _generator(name: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))


def images(size: tuple[int, int], channels: int = 3) -> Tensor:
    """Two pictures of noise."""
    return torch.from_numpy(_generator(f"images {size}").standard_normal((2, channels, *size)))


# timm -----------------------------------------------------------------------------------------------------------------

_TIMM = {"embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS, "patch_size": PATCH, "num_classes": CLASSES}


def _timm(name: str = "vit_base_patch16_224", **options: object) -> Builder:
    return partial(timm.create_model, name, **{**_TIMM, "img_size": IMAGE, **options})


_EVA02 = "eva02_base_patch14_224"
_TIMM_MODELS = {
    "vit": _timm(),
    "average": _timm(global_pool="avg"),
    "average_no_class": _timm(global_pool="avg", class_token=False),
    "attention_pooled": _timm(global_pool="map"),
    "clip_quickgelu": _timm("vit_base_patch32_clip_quickgelu_224"),
    "siglip": _timm("vit_base_patch16_siglip_224"),
    "layer_scale_qk_norm": _timm(init_values=0.1, qk_norm=True),
    "inner_norms": _timm(scale_attn_norm=True, scale_mlp_norm=True),
    "rms_norm": _timm(norm_layer=RmsNorm, qk_norm=True),
    "registers": _timm(reg_tokens=4, no_embed_class=True),
    "dinov2_swiglu": _timm(mlp_layer=SwiGLUPacked, act_layer=nn.SiLU, init_values=1.0, reg_tokens=4),
    "deit_distilled": _timm("deit_tiny_distilled_patch16_224"),
    "deit3": _timm("deit3_small_patch16_224"),
    "res_post": _timm(block_fn=ResPostBlock),
    "parallel": _timm(block_fn=ParallelScalingBlock),
    "eva": _timm("eva_giant_patch14_224"),
    "eva02": _timm(_EVA02, embed_dim=24, num_heads=2),
    "eva02_inner_norms": _timm(_EVA02, embed_dim=24, num_heads=2, scale_mlp=True, scale_attn_inner=True),
    "dinov3": _timm("vit_small_patch16_dinov3", embed_dim=24, num_heads=2),
    "beit": _timm("beit_base_patch16_224"),
    "beit_shared_bias": _timm("beit_base_patch16_224", use_rel_pos_bias=False, use_shared_rel_pos_bias=True),
    "beitv2": _timm("beitv2_base_patch16_224", init_values=0.1),
    "relpos": _timm("vit_relpos_base_patch16_224"),
    "relpos_class_token": _timm("vit_relpos_base_patch16_cls_224"),
    "mixer": lambda: MlpMixer(num_classes=CLASSES, img_size=IMAGE, patch_size=PATCH, embed_dim=WIDTH, num_blocks=DEPTH),
    "swin": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=12, depths=(1, 1), num_heads=(2, 2)
    ),
}

# transformers ---------------------------------------------------------------------------------------------------------

_SIZES = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS, "intermediate_size": 40}
_HF = {**_SIZES, "patch_size": PATCH, "num_labels": CLASSES}


def _hf(config: str, model: str, attention: str = "sdpa", **options: object) -> Builder:
    def build() -> nn.Module:
        settings = getattr(transformers, f"{config}Config")(**{**_HF, "image_size": IMAGE, **options})
        return getattr(transformers, model)._from_config(settings, attn_implementation=attention)

    return build


def _hf_tower(config: str, model: str, **options: object) -> Builder:
    def build() -> nn.Module:
        tower = {**_SIZES, "image_size": 32, "patch_size": PATCH, **options}
        settings = getattr(transformers, f"{config}Config")(vision_config=tower, num_labels=CLASSES)
        return getattr(transformers, model)._from_config(settings, attn_implementation="sdpa")

    return build


_VIT = partial(_hf, "ViT", "ViTForImageClassification")
_DINOV2 = partial(_hf, "Dinov2", "Dinov2ForImageClassification", image_size=32)
_TRANSFORMERS_MODELS = {
    "vit": _VIT(),
    "vit_eager": _VIT("eager"),
    "vit_relu": _VIT(hidden_act="relu"),
    "deit": _hf("DeiT", "DeiTForImageClassification"),
    "deit_with_teacher": _hf("DeiT", "DeiTForImageClassificationWithTeacher"),
    "dinov2": _DINOV2(),
    "dinov2_swiglu": _DINOV2(use_swiglu_ffn=True),
    "dinov2_registers": _hf("Dinov2WithRegisters", "Dinov2WithRegistersForImageClassification", image_size=32),
    "beit": _hf("Beit", "BeitForImageClassification", use_relative_position_bias=True, layer_scale_init_value=0.1),
    "beit_eager": _hf("Beit", "BeitForImageClassification", "eager", use_shared_relative_position_bias=True),
    "clip_projection": _hf("CLIPVision", "CLIPVisionModelWithProjection", image_size=32, projection_dim=CLASSES),
    "clip_classifier": _hf_tower("CLIP", "CLIPForImageClassification"),
    "siglip_classifier": _hf_tower("Siglip", "SiglipForImageClassification"),
    "siglip_vision": _hf("SiglipVision", "SiglipVisionModel", image_size=32),
}
# transformers' eager attention rounds A to float32, 6e-8; another order of sums before that may round it differently.
ROUNDED = {"transformers/vit_eager": 1e-5, "transformers/beit_eager": 1e-5}

# torchvision ----------------------------------------------------------------------------------------------------------

_TORCHVISION = {"num_layers": DEPTH, "num_heads": HEADS, "hidden_dim": WIDTH, "mlp_dim": 40, "num_classes": CLASSES}
_STEM = [ConvStemConfig(out_channels=8, kernel_size=3, stride=4), ConvStemConfig(12, kernel_size=3, stride=2)]


def _torchvision(**options: object) -> Builder:
    return partial(TorchvisionViT, image_size=32, patch_size=PATCH, **_TORCHVISION, **options)


_TORCHVISION_MODELS = {
    "vit": _torchvision(),
    "representation_layer": _torchvision(representation_size=16),
    "convolution_stem": _torchvision(conv_stem_configs=_STEM),
}

# open_clip ------------------------------------------------------------------------------------------------------------


class ZeroShot(nn.Module):
    """Cosine similarity of the image feature with one text feature per class."""

    def __init__(self, visual: nn.Module, width: int) -> None:
        super().__init__()
        self.visual = visual
        self.class_embeddings = nn.Parameter(torch.zeros(CLASSES, width))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, pictures: Tensor) -> Tensor:
        features = nn.functional.normalize(self.visual(pictures), dim=-1)
        classes = nn.functional.normalize(self.class_embeddings, dim=-1)
        return self.logit_scale.exp() * features @ classes.T


def _open_clip(**options: object) -> Builder:
    sizes = {"image_size": IMAGE, "patch_size": PATCH, "width": WIDTH, "layers": DEPTH, "heads": HEADS}
    return partial(OpenClipTower, **{**sizes, "mlp_ratio": 2.0, "output_dim": CLASSES, **options})


def _open_clip_both_towers() -> nn.Module:
    vision = {"image_size": 32, "patch_size": PATCH, "width": WIDTH, "layers": 2, "head_width": 8}
    text = {"context_length": 8, "vocab_size": 20, "width": 16, "heads": 2, "layers": 2}
    return open_clip.CLIP(embed_dim=CLASSES, vision_cfg=vision, text_cfg=text)


_INNER = {"scale_attn_inner": True, "scale_attn": True, "scale_fc": True, "scale_heads": True}
_OPEN_CLIP_MODELS = {
    "class_token": _open_clip(),
    "quickgelu_layer_scale": _open_clip(act_layer=OpenClipQuickGELU, ls_init_value=0.1),
    "average": _open_clip(pool_type="avg", final_ln_after_pool=True),
    "attention_pooled": _open_clip(attentional_pool=True, attn_pooler_queries=3, attn_pooler_heads=2),
    "own_attention": _open_clip(block_type="custom", qk_norm=True),
    "own_attention_inner_norms": _open_clip(block_type="custom", **_INNER),
    "zero_shot": lambda: ZeroShot(_open_clip(output_dim=16)(), 16),
    "both_towers": _open_clip_both_towers,
}

# nn.TransformerEncoder, and a model of one's own ----------------------------------------------------------------------


class EncoderViT(nn.Module):
    """A classifier around nn.TransformerEncoder, as people write it themselves."""

    def __init__(
        self, *, norm_first: bool, activation: object, batch_first: bool = True, pooling: str = "class"
    ) -> None:
        super().__init__()
        self.batch_first, self.pooling = batch_first, pooling
        self.embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        count = IMAGE[0] * IMAGE[1] // PATCH**2
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH)) if pooling == "class" else None
        self.pos_embed = nn.Parameter(torch.zeros(1, count + (pooling == "class"), WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 40, activation=activation, batch_first=batch_first, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))

    def forward(self, pictures: Tensor) -> Tensor:
        tokens = self.embed(pictures).flatten(2).transpose(1, 2)
        if self.class_token is not None:
            tokens = torch.cat((self.class_token.expand(len(tokens), -1, -1), tokens), dim=1)
        tokens = tokens + self.pos_embed
        tokens = self.encoder(tokens) if self.batch_first else self.encoder(tokens.transpose(0, 1)).transpose(0, 1)
        return self.head(tokens[:, 0] if self.pooling == "class" else tokens.mean(dim=1))


class OwnBlock(nn.Module):
    """Attention written out with matmul, behind a norm; names as nanoGPT-like code has them."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = OwnAttention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attn(self.ln_1(tokens))
        return tokens + self.mlp(self.ln_2(tokens))


class OwnAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.qkv(tokens).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        weights = (query @ key.transpose(-2, -1) / math.sqrt(WIDTH / HEADS)).softmax(dim=-1)
        return self.proj((weights @ value).transpose(1, 2).flatten(2))


class OwnViT(nn.Module):
    """A ViT whose patches are cut out with unfold."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3 * PATCH**2, WIDTH)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + IMAGE[0] * IMAGE[1] // PATCH**2, WIDTH))
        self.blocks = nn.ModuleList(OwnBlock() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        patches = self.proj(nn.functional.unfold(pictures, PATCH, stride=PATCH).transpose(1, 2))
        tokens = torch.cat((self.cls_token.expand(len(patches), -1, -1), patches), dim=1) + self.pos_embed
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens[:, 0]))


_OWN_MODELS = {
    "pre_norm": partial(EncoderViT, norm_first=True, activation="gelu"),
    "post_norm": partial(EncoderViT, norm_first=False, activation="relu"),
    "pre_norm_tokens_first": partial(EncoderViT, norm_first=True, activation="relu", batch_first=False),
    "post_norm_mean": partial(EncoderViT, norm_first=False, activation="gelu", pooling="mean"),
    "pre_norm_silu_mean": partial(EncoderViT, norm_first=True, activation=nn.SiLU(), pooling="mean"),
    "written_out": OwnViT,
}

_LIBRARIES = {
    "timm": _TIMM_MODELS,
    "transformers": _TRANSFORMERS_MODELS,
    "torchvision": _TORCHVISION_MODELS,
    "open_clip": _OPEN_CLIP_MODELS,
    "own": _OWN_MODELS,
}
IMAGE_MODELS: dict[str, Builder] = {
    f"{library}/{name}": build for library, group in _LIBRARIES.items() for name, build in group.items()
}
_SQUARE = ("torchvision/", "transformers/clip", "transformers/siglip", "open_clip/both", "timm/swin")


def image_size(name: str) -> tuple[int, int]:
    """What pictures a model takes."""
    return (32, 32) if name.startswith(_SQUARE) else IMAGE


# Texts ----------------------------------------------------------------------------------------------------------------

_WORDS = ("good", "bad", "film", "story", "the", "was", "not", "very", "!")
_TEXT = {"vocab_size": 20, "num_labels": CLASSES, "pad_token_id": 0, "max_position_embeddings": 16}
_RELATIVE = {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": 4,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}
_NO_SPECIAL = {"cls_token_id": None, "sep_token_id": None}


def _text(name: str, **options: object) -> Builder:
    def build() -> nn.Module:
        settings = getattr(transformers, f"{name}Config")(**{**_SIZES, **_TEXT, **options})
        attention = {} if name in {"DebertaV2", "MPNet"} else {"attn_implementation": "sdpa"}
        return getattr(transformers, f"{name}ForSequenceClassification")._from_config(settings, **attention)

    return build


TEXT_MODELS: dict[str, Builder] = {
    "texts/bert": _text("Bert"),
    "texts/roberta": _text("Roberta", max_position_embeddings=17),
    "texts/electra": _text("Electra", embedding_size=16),
    "texts/distilbert": _text("DistilBert", dim=WIDTH, n_layers=DEPTH, n_heads=HEADS, hidden_dim=40),
    "texts/mpnet": _text("MPNet", max_position_embeddings=18),
    "texts/modernbert": _text("ModernBert", **_NO_SPECIAL),
    "texts/deberta": _text("DebertaV2", **_RELATIVE),
}


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Whole words only, with a class token in front and a separator behind."""
    names = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *_WORDS)
    inner = Tokenizer(models.WordPiece({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "mask", "unk")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=16, **special)
