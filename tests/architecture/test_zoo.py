"""Every model of the zoo is built and runs, and a change of its picture shows where its map says."""

from __future__ import annotations

import warnings

import pytest
import torch

from vitreous.errors import VitreousError
from vitreous.methods.perturbation import patch_of_pixel
from vitreous.tape.patches.receptive_fields import first_block_input
from vitreous.tape.runner import ModelRunner
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


@pytest.fixture(scope="module", params=ENTRIES, ids=str)
def entry(request) -> Entry:
    """Both tests of an entry come one after the other, so that its model is built once."""
    if request.param.package in OPTIONAL:
        pytest.importorskip(request.param.package, reason=f"{request.param.package} is not installed")
    return request.param


def test_it_runs(entry: Entry):
    if entry.name in NOT_CALLED_WITH_PICTURES:
        return
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        found = entry.model()(entry.images())
    found = getattr(found, "logits", found)
    found = found[0] if isinstance(found, tuple) else found
    if entry.kind != "other" and entry.name not in OTHER_OUTPUTS:
        assert found.shape == (2, CLASSES)
        assert found.dtype == entry.dtype
        assert found.isfinite().all()
        assert not torch.allclose(found[0], found[1], rtol=1e-6)  # the pictures are looked at


def test_a_strong_change_in_one_patch_shows_in_its_cell(entry: Entry):
    """The location test: forward only, independent of the gradients by which places are found. Others are refused."""
    model, images = entry.model(), entry.images(1)
    runner = ModelRunner(model, images)
    try:
        layout = runner.layout
    except VitreousError:
        return  # what is served is listed and compared elsewhere
    architecture, (rows, columns) = runner.architecture, layout.grid
    cells = patch_of_pixel(layout.grid, runner.size, layout.geometry).view(runner.size)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(4)).to(images)
    own, nearest = [], []
    places = list({(0, 0), (rows - 1, columns - 1), (rows // 2, columns // 2), (rows // 2, columns // 3)})
    changed = [torch.where(cells == row * columns + column, images + 5 * noise, images) for row, column in places]
    stream = first_block_input(architecture, model, torch.cat((images, *changed)))[:, -layout.patches :].double()
    for (row, column), after in zip(places, stream[1:], strict=True):
        change = (after - stream[0]).norm(dim=-1).view(rows, columns)
        near = change[max(0, row - 1) : row + 2, max(0, column - 1) : column + 2]
        own.append(bool(change[row, column] >= change.mean()))
        nearest.append(bool(near.max() >= change.max()))
    if architecture.stage == 0 and 2 * architecture.blocks[0].input.step < len(architecture.operations):
        assert all(own)
        assert sum(nearest) >= 3 * len(nearest) / 4  # convolutions of 7 x 7 tokens may stand before the first block
    elif layout.patches > 4:
        # Blocks of earlier stages have mixed the tokens. With random weights, each of four tokens sees all of a picture
        # about as well as any other.
        assert sum(own) >= len(own) / 2
