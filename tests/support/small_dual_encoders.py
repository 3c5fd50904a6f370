"""Small dual encoders of every family with random weights in float64, and tokenizers for them without download."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn

from small_text_models import randomised as with_random_weights

PAD, UNKNOWN, START, END = 0, 1, 58, 59
VOCABULARY = 60
CONTEXT = 12
WORDS = ("a", "photo", "of", "cat", "dog", "##s", "the", "red", "car", "tabby", "un", "##real", ".", ",")
IMAGE = 32
WIDTH = 10  # of the embeddings
VISION = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": IMAGE,
    "patch_size": 8,
}  # fmt: skip
TEXT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "pad_token_id": PAD, "bos_token_id": START,
    "eos_token_id": END,
}  # fmt: skip
# AltCLIP's text tower is RoBERTa, whose positions begin behind that of padding.
_FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "clip": ("CLIP", {}, {"projection_dim": WIDTH}),
    "siglip": ("Siglip", {"projection_size": 24}, {}),
    "altclip": ("AltCLIP", {"project_dim": WIDTH, "max_position_embeddings": CONTEXT + 1}, {"projection_dim": WIDTH}),
    "chinese_clip": ("ChineseCLIP", {}, {"projection_dim": WIDTH}),
    "metaclip_2": ("MetaClip2", {}, {"projection_dim": WIDTH}),
}


def randomised(model: nn.Module) -> nn.Module:
    """The same for models with a logit scale, and a bias where there is one."""
    model = with_random_weights(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("logit_"):
                parameter.fill_(1.3 if name.endswith("scale") else -0.7)
    return model


def transformers_model(family: str) -> nn.Module:
    """A model of transformers from its configuration alone."""
    name, text, options = _FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(text_config={**TEXT, **text}, vision_config=VISION, **options)
    return randomised(getattr(transformers, f"{name}Model")(config))


def prompt_tokenizer(family: str = "clip") -> transformers.PreTrainedTokenizerFast:
    """Word pieces of a few words, with a start and an end token; SigLIP has the end token alone."""
    names = ["[PAD]", "[UNK]", *WORDS, *(f"[unused{number}]" for number in range(VOCABULARY))][: VOCABULARY - 2]
    vocabulary = {name: number for number, name in enumerate([*names, "[START]", "[END]"])}
    inner = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    start = "" if family == "siglip" else "[START] "
    inner.post_processor = processors.TemplateProcessing(
        single=f"{start}$A [END]", special_tokens=[("[START]", START), ("[END]", END)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[START]", "eos_token": "[END]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=CONTEXT, **special)


def tokenize(texts: Sequence[str], context_length: int = CONTEXT) -> Tensor:
    """A tokenizer as a function, as OpenAI's clip has it: numbers of letters' sums, two pieces for long words."""
    rows = torch.zeros(len(texts), context_length, dtype=torch.int64)
    for row, text in zip(rows, texts, strict=True):
        pieces = [
            piece for word in text.lower().split() for piece in ([word[:4], word[4:]] if len(word) > 4 else [word])
        ]
        numbers = [START, *(2 + sum(map(ord, piece)) % 50 for piece in pieces), END]
        if len(numbers) > context_length:
            raise RuntimeError(f"Input {text} is too long for context length {context_length}")
        row[: len(numbers)] = torch.tensor(numbers)
    return rows


def open_clip_model(**options: Any) -> nn.Module:
    """open_clip's own class, with both towers."""
    import open_clip

    vision = {"image_size": IMAGE, "patch_size": 8, "width": 24, "layers": 3, "head_width": 8, "mlp_ratio": 2.0}
    text = {"context_length": CONTEXT, "vocab_size": VOCABULARY, "width": 16, "heads": 2, "layers": 2}
    return randomised(open_clip.model.CLIP(embed_dim=WIDTH, vision_cfg=vision, text_cfg=text, **options))


class LikeOpenAI(nn.Module):
    """The layout of OpenAI's package: a visual part, a causal text transformer, and two methods that encode."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.visual, self.transformer = inner.visual, inner.transformer
        self.token_embedding, self.positional_embedding = inner.token_embedding, inner.positional_embedding
        self.ln_final, self.text_projection, self.logit_scale = inner.ln_final, inner.text_projection, inner.logit_scale
        self.register_buffer("attn_mask", inner.attn_mask, persistent=False)

    def encode_image(self, image: Tensor) -> Tensor:
        return self.visual(image)

    def encode_text(self, text: Tensor) -> Tensor:
        x = self.token_embedding(text) + self.positional_embedding
        x = self.ln_final(self.transformer(x, attn_mask=self.attn_mask.to(x.dtype)))
        return x[torch.arange(len(x)), text.argmax(dim=-1)] @ self.text_projection

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        image, text = (
            each / each.norm(dim=1, keepdim=True) for each in (self.encode_image(image), self.encode_text(text))
        )
        return self.logit_scale.exp() * image @ text.t()


def save_clip(place: Path) -> str:
    """Keep a small CLIP with its tokenizer and image processor in a folder; what it is called."""
    transformers_model("clip").float().save_pretrained(place)
    prompt_tokenizer().save_pretrained(place)
    size = {"height": IMAGE, "width": IMAGE}
    transformers.CLIPImageProcessor(size={"shortest_edge": IMAGE}, crop_size=size).save_pretrained(place)
    return f"hf/{place}"


FAMILIES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    **{family: (lambda family=family: (transformers_model(family), prompt_tokenizer(family))) for family in _FAMILIES},
    "open_clip": lambda: (open_clip_model(), tokenize),
    "openai": lambda: (LikeOpenAI(open_clip_model()), tokenize),
}


def image_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of the image tower, where every family keeps them."""
    return (
        list(model.vision_model.encoder.layers)
        if hasattr(model, "vision_model")
        else list(model.visual.transformer.resblocks)
    )


def text_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of the text tower."""
    if not hasattr(model, "text_model"):
        return list(model.transformer.resblocks)
    inner = next(part for part in model.text_model.modules() if hasattr(part, "layers") or hasattr(part, "layer"))
    return list(inner.layers if hasattr(inner, "layers") else inner.layer)


def embeddings(model: nn.Module, pixels: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What both towers say, by the model's own methods."""
    if hasattr(model, "get_image_features"):
        mask = {} if type(model).__name__.startswith("Siglip") else {"attention_mask": (tokens != PAD).long()}
        found = model.get_image_features(pixel_values=pixels), model.get_text_features(input_ids=tokens, **mask)
        return found[0].pooler_output, found[1].pooler_output
    return model.encode_image(pixels), model.encode_text(tokens)


def input_times_gradient(model: nn.Module, block: nn.Module, score: Callable[[], Tensor]) -> Tensor:
    """Σ_channels x * dy/dx at a block's input by plain autograd, (batch, tokens); the score sums over the batch."""
    kept: list[Tensor] = []

    def keep(_module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        stream = given[0] if given else named["hidden_states"]
        kept.append(stream.detach().requires_grad_())
        return ((kept[0], *given[1:]), named) if given else (given, {**named, "hidden_states": kept[0]})

    handle = block.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        value = score().sum()
    finally:
        handle.remove()
    (gradient,) = torch.autograd.grad(value, kept[0])
    return (kept[0] * gradient).sum(dim=-1).detach()


def own_tokens(family: str, tokenizer: Any, text: str) -> Any:
    """What a user of the family would give its text tower."""
    if family in {"open_clip", "openai"}:
        return tokenizer([text])
    padding = {"padding": "max_length", "max_length": CONTEXT} if family == "siglip" else {}
    return tokenizer([text], return_tensors="pt", **padding)["input_ids"]
