"""Numbers that the authors' own programs produced on one small trained ViT, and ours beside them.

The programs and this one round differently and some add small constants to denominators (DecompX and the third-party
TokenTM: about 1e-10), so 1e-8 absolute on values of order 0.1 to 10 is agreement in every digit that means something.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer

import vitreous

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 1e-8
DEPTH = 4
PATCHES = slice(1, 17)


def golden(name: str):
    return np.load(GOLDEN / f"{name}.npz")


@cache
def model_images_targets():
    stored = golden("model")
    model = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=DEPTH, num_heads=3, num_classes=10)
    weights = {key.removeprefix("sd/"): torch.tensor(stored[key]) for key in stored.files if key.startswith("sd/")}
    model.double().load_state_dict(weights)
    targets = torch.stack([torch.tensor(stored["pred"]), torch.tensor(stored["cls2"])], dim=1)
    return model, torch.tensor(stored["images"]), targets


@cache
def ours(spelling: str) -> np.ndarray:
    """Scores as the goldens store them: (class, image, patch)."""
    model, images, targets = model_images_targets()
    return vitreous.explain(model, images, spelling, targets).scores[spelling].transpose(0, 1).numpy()


def family(key: str) -> np.ndarray:
    stored = golden("gradfamily_vit_skipplus_authors")
    return np.stack([stored[f"pred|{key}"], stored[f"cls2|{key}"]])


def assert_agrees(spelling: str, expected: np.ndarray) -> None:
    np.testing.assert_allclose(ours(spelling), np.broadcast_to(expected, (2, 3, 16)), rtol=0, atol=TOLERANCE)
