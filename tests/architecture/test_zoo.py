"""Every model of the zoo is built, runs, and is the same every time."""

from __future__ import annotations

import warnings

import pytest
import torch

from zoo import CLASSES, ENTRIES, Entry

# They need more than pictures: texts, or patches that were cut out before.
NOT_CALLED_WITH_PICTURES = ("transformers/CLIP, both towers", "transformers/Siglip2")
OPTIONAL = ("vit_pytorch", "x_transformers", "monai", "kornia", "self_attention_cv")
# Features, not classes; vit-pytorch's class has a norm where others have a linear head.
OTHER_OUTPUTS = (
    *("vit_pytorch/simple_vit_with_qk_norm.SimpleViT", "clip/image tower", "transformers/DINOv3ViT"),
    "transformers/CLIPVisionModelWithProjection",
)


def test_names_are_unique():
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES) > 180


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry.name not in NOT_CALLED_WITH_PICTURES], ids=str)
def test_it_runs(entry: Entry):
    if entry.package in OPTIONAL:
        pytest.importorskip(entry.package, reason=f"{entry.package} is not installed")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        found = entry.build()(entry.images())
    found = getattr(found, "logits", found)
    found = found[0] if isinstance(found, tuple) else found
    if entry.kind != "other" and entry.name not in OTHER_OUTPUTS:
        assert found.shape == (2, CLASSES)
        assert found.dtype == entry.dtype
        assert found.isfinite().all()
        assert not torch.allclose(found[0], found[1], rtol=1e-6)  # the pictures are looked at
