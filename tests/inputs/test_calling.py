"""How a model is called with images: by position, by the one name it knows them by, or not at all."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn

import vitreous
from small_models import CLASSES, largest_difference, random_images, randomise, small_vit
from vitreous.errors import InputError, UnsupportedModelError

METHODS = ["gae", "ixg", "vit_recipro_cam"]
TARGET = torch.tensor([1, 3])


class Holding(nn.Module):
    """Something around a ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = small_vit(depth=2)


class ByName(Holding):
    def forward(self, *, pixel_values: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is None
        return self.vit(pixel_values)


class Optional(Holding):
    def forward(self, pixel_values: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        assert labels is None
        return self.vit(pixel_values)


class Anything(Holding):
    def forward(self, *given: Tensor, **_options: object) -> Tensor:
        return self.vit(*given)


class TwoByName(Holding):
    def forward(self, *, pixel_values: Tensor, mask: Tensor) -> Tensor:
        return self.vit(pixel_values * mask)


class Two(Holding):
    def forward(self, images: Tensor, mask: Tensor) -> Tensor:
        return self.vit(images * mask)


class Switched(Holding):
    def forward(self, images: Tensor | None = None, *, switch: bool) -> Tensor:
        return self.vit(images if switch else -images)


class AllOptional(Holding):
    def forward(self, *, pixel_values: Tensor | None = None, pixels: Tensor | None = None) -> Tensor:
        return self.vit(pixels if pixel_values is None else pixel_values)


@pytest.mark.parametrize("kind", [ByName, Optional, Anything])
def test_the_maps_are_those_of_the_model_inside(kind: type[Holding]) -> None:
    model, images = kind().eval(), random_images()
    found = vitreous.explain(model, images, METHODS, TARGET).scores
    expected = vitreous.explain(model.vit, images, METHODS, TARGET).scores
    for method in METHODS:
        assert largest_difference(found[method], expected[method]) == 0  # the very same calls


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (TwoByName, "needs pixel_values, mask"),
        (Two, "needs images, mask"),
        (Switched, "needs switch"),
        (AllOptional, "everything by name"),
    ],
)
def test_what_cannot_be_called_with_images_alone_says_so(kind: type[Holding], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{kind.__name__} cannot be called with images alone: .*{reason}"):
        vitreous.explain(kind().eval(), random_images(), "gae", TARGET)


def siglip2() -> nn.Module:
    """SigLIP 2 with patches of any number."""
    tower = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3}
    vision = transformers.Siglip2VisionConfig(**tower, patch_size=8, num_patches=16)
    config = transformers.Siglip2Config(vision_config=vision.to_dict(), num_labels=CLASSES)
    return randomise(transformers.Siglip2ForImageClassification(config)).double().eval()


class Cutting(nn.Module):
    """What the refusal of ``siglip2`` asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.model = siglip2()

    def forward(self, images: Tensor) -> Tensor:
        rows, columns = images.shape[2] // 8, images.shape[3] // 8
        patches = images.unflatten(3, (columns, 8)).unflatten(2, (rows, 8)).permute(0, 2, 4, 3, 5, 1).flatten(3)
        patches = patches.flatten(1, 2)
        shapes = torch.tensor([[rows, columns]]).expand(len(images), -1)
        mask = torch.ones(patches.shape[:2], dtype=torch.int64)
        return self.model(patches, pixel_attention_mask=mask, spatial_shapes=shapes).logits


def test_a_model_of_patches_that_were_cut_before_is_refused_in_words() -> None:
    with pytest.raises(InputError, match="Siglip2ForImageClassification takes patches that were cut out of a picture"):
        vitreous.explain(siglip2(), random_images(), "gae", TARGET)


def test_with_a_module_around_it_that_cuts_them_it_is_explained() -> None:
    model, images = Cutting(), random_images()
    (layer,) = (layer for name, layer in model.named_modules() if name.endswith("encoder.layers.0"))
    streams: list[Tensor] = []
    hook = layer.register_forward_pre_hook(
        lambda _module, given, named: streams.append(given[0] if given else named["hidden_states"]), with_kwargs=True
    )
    score = model(images.clone().requires_grad_()).gather(1, TARGET[:, None]).sum()
    (gradient,) = torch.autograd.grad(score, streams)
    hook.remove()
    found = vitreous.explain(model, images, "ixg", TARGET)
    assert found.grid == (4, 4)
    assert largest_difference(found.scores["ixg"], (streams[0] * gradient).sum(dim=-1).detach()) < 1e-10
