"""Test-time registers: the changed forward pass written out, the neurons that are found, refusals, ``explain``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import vitreous
from small_models import PATCHES, random_images, small_vit
from vitreous.errors import InputError, UnsupportedModelError
from vitreous.methods.registers import TestTimeRegisters, add_test_time_registers, find_feed_forward

SAME = {"rtol": 1e-11, "atol": 1e-12}  # float64: the same arithmetic


@torch.no_grad()
def by_hand(model: nn.Module, images: Tensor, neurons: list[tuple[int, int]]) -> Tensor:
    """timm's model with a token behind the others, whose place does not matter once positions are added."""
    stream = model.norm_pre(model._pos_embed(model.patch_embed(images)))
    prefix = model.num_prefix_tokens
    stream = torch.cat((stream, torch.zeros_like(stream[:, :1])), dim=1)
    for number, block in enumerate(model.blocks):
        stream = stream + block.ls1(block.attn(block.norm1(stream)))
        hidden = block.mlp.act(block.mlp.fc1(block.norm2(stream)))
        for channel in [channel for layer, channel in neurons if layer == number]:
            hidden[:, -1, channel] = hidden[:, :, channel].amax(dim=1)
            hidden[:, prefix:-1, channel] = 0
        stream = stream + block.ls2(block.mlp.fc2(hidden))
    return model.forward_head(model.norm(stream[:, :-1]))


@pytest.mark.parametrize("options", [{}, {"reg_tokens": 2, "no_embed_class": True}])
def test_the_forward_pass(options):
    model, images = small_vit(**options), random_images()
    neurons = [(0, 3), (0, 11), (2, 5)]
    changed = TestTimeRegisters(model, neurons, prefix=model.num_prefix_tokens)
    torch.testing.assert_close(changed(images).detach(), by_hand(model, images, neurons), **SAME)
    assert not torch.allclose(changed(images), model(images))


def planted() -> tuple[nn.Module, Tensor]:
    """A model in which channel 7 of block 1 writes a large vector into the few patches where it is high."""
    model, images = small_vit(depth=3), random_images(3)
    with torch.no_grad():
        model.blocks[1].mlp.fc2.weight[:, 7] = 40.0
        model.blocks[1].mlp.fc2.weight[::2, 7] = -40.0
        model.blocks[1].mlp.fc1.bias[7] = 0.0
        model.blocks[1].mlp.fc1.weight[7] *= 6
    return model, images


def test_the_planted_neuron_is_found_and_the_long_patches_are_gone():
    model, images = planted()
    changed = add_test_time_registers(model, images, neurons=1, outlier=2.0)
    assert changed.neurons == ((1, 7),)
    lengths: dict[str, Tensor] = {}
    for name, one in (("before", model), ("after", changed)):
        hook = model.blocks[2].register_forward_pre_hook(
            lambda _m, given, name=name: lengths.__setitem__(name, given[0][:, -PATCHES:].norm(dim=-1).detach())
        )
        one(images)
        hook.remove()
    spread = {name: float((each.amax(1) / each.median(1).values).max()) for name, each in lengths.items()}
    assert spread["before"] > 2
    assert spread["after"] < spread["before"] / 1.5


def test_any_method_explains_the_changed_model():
    model, images = planted()
    changed = add_test_time_registers(model, images, neurons=1, outlier=2.0)
    methods = ["gae", "tokentm", "gradtoken", "decompx.skipplus", "rise:budget=8,by=drop", "attnlrp_gamma"]
    found = vitreous.explain(changed, images, methods, 1)
    assert found.grid == (4, 4)
    assert all(bool(map_.isfinite().all()) and map_.shape == (3, PATCHES) for map_ in found.scores.values())
    torch.testing.assert_close(found.logits, changed(images).detach(), **SAME)


def test_the_model_itself_is_as_before():
    model, images = planted()
    before = model(images)
    add_test_time_registers(model, images, outlier=2.0)(images)
    assert torch.equal(model(images), before)


def test_a_model_without_outliers_is_told():
    with pytest.raises(UnsupportedModelError, match="nothing that a test-time register could take over"):
        add_test_time_registers(small_vit(), random_images(), outlier=50)


def test_a_model_without_activation_modules_is_refused():
    with pytest.raises(UnsupportedModelError, match="register neurons cannot be found"):
        find_feed_forward(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))


def test_numbers_that_cannot_be_are_refused():
    with pytest.raises(InputError, match="at least 1"):
        add_test_time_registers(small_vit(), random_images(), neurons=0)
