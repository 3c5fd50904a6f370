"""Small text classifiers of every family with random weights, texts for them, and a tokenizer without download."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn

from vitreous.api.explain import find_recipes
from vitreous.api.run_methods import run_methods
from vitreous.api.runs import RawResult
from vitreous.inputs.model_io import Texts
from vitreous.inputs.targets import find_targets

PAD, CLS, SEP, MASK, UNKNOWN = range(5)
VOCABULARY = 60
LONGEST = 24
CLASSES = 3
DEPTH = 3
SIZES = {"hidden_size": 24, "num_hidden_layers": DEPTH, "num_attention_heads": 3, "intermediate_size": 40}
COMMON = {"vocab_size": VOCABULARY, "num_labels": CLASSES, "pad_token_id": PAD, "max_position_embeddings": LONGEST}
WORDS = ("good", "bad", "film", "story", "the", "was", "not", "un", "##believ", "##ably", "very", ",", ".", "!")


def build(kind: str, attention: str = "sdpa", **options: object) -> nn.Module:
    """A classifier from its configuration alone, in float64 with random weights."""
    name, settings = {
        "bert": ("Bert", SIZES),
        "roberta": ("Roberta", {**SIZES, "max_position_embeddings": LONGEST + 1}),
        "electra": ("Electra", {**SIZES, "embedding_size": 16}),
        "distilbert": ("DistilBert", {"dim": 24, "n_layers": DEPTH, "n_heads": 3, "hidden_dim": 40}),
        "mpnet": ("MPNet", {**SIZES, "max_position_embeddings": LONGEST + 2}),
        "modernbert": ("ModernBert", {**SIZES, **dict.fromkeys(("cls_token_id", "sep_token_id"), None)}),
        "deberta": (
            "DebertaV2",
            {**SIZES, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4}
            | {"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False},
        ),
    }[kind]
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **settings, **options})
    implementation = {} if kind in {"deberta", "mpnet"} else {"attn_implementation": attention}
    model = getattr(transformers, f"{name}ForSequenceClassification")._from_config(config, **implementation)
    return randomised(model)


def randomised(model: nn.Module) -> nn.Module:
    """Weights in float64 that let every path matter: no bias is 0 and no norm's weight is 1."""
    model = model.double().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            if "embedding" in name and parameter.dim() == 2:
                parameter.copy_(noise)
            elif parameter.dim() >= 2:
                parameter.copy_(1.5 * noise / parameter[0].numel() ** 0.5)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(0.8 + 0.3 * noise)
    return model


def texts(lengths: Sequence[int], tokens: int | None = None) -> Texts:
    """Random texts of some lengths, special tokens included; text n is the same whatever stands beside it."""
    width = max(lengths) if tokens is None else tokens
    numbers = torch.full((len(lengths), width), PAD)
    content = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(row)
        numbers[row, 0], numbers[row, length - 1] = CLS, SEP
        numbers[row, 1 : length - 1] = torch.randint(UNKNOWN + 1, VOCABULARY, (length - 2,), generator=generator)
        content[row, 1 : length - 1] = True
    real = torch.arange(width) < torch.tensor(lengths)[:, None]
    parts = {"input_ids": numbers, "attention_mask": real.long()}
    return Texts(parts, torch.tensor(lengths), content, {"pad": PAD, "mask": MASK})


def ask(model: nn.Module, given: Texts, methods: str | Sequence[str], target: object) -> RawResult:
    """What methods say of texts that need no tokenizer."""
    return run_methods(model, given, find_recipes(methods), lambda logits: find_targets(logits, target, None))


def logits_of(model: nn.Module, given: Texts) -> Tensor:
    """What the model itself says."""
    with torch.no_grad():
        return model(**given.parts).logits


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks, where every family keeps them."""
    base = model.base_model
    if hasattr(base, "layers"):
        return list(base.layers)
    return list((base.encoder if hasattr(base, "encoder") else base.transformer).layer)


def small_tokenizer(*, longest: int = LONGEST, **options: object) -> transformers.PreTrainedTokenizerFast:
    """Word pieces of a few words, lower case, with a class token in front and a separator behind."""
    names = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *WORDS, *"abcdefghijklmnopqrstuvwxyz")
    vocabulary = {name: number for number, name in enumerate(names)}
    assert len(vocabulary) <= VOCABULARY
    inner = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "mask", "unk")}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, model_max_length=longest, **{**special, **options}
    )


def save_classifier(place: Path, names: Sequence[str], kind: str = "bert") -> str:
    """Keep a small classifier with its tokenizer in a folder; what it is called."""
    model = build(kind).float()
    model.config.id2label = dict(enumerate(names))
    model.save_pretrained(place)
    small_tokenizer().save_pretrained(place)
    return f"hf/{place}"
