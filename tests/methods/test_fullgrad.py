"""FullGrad and DecompX with biases: the authors' numbers, and where biases go.

Sums over tokens include the prefix tokens, so they are taken of whole maps, not of the public ones.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from timm.models.metaformer import SquaredReLU
from torch import nn

import vitreous
from golden_numbers import DEPTH, PATCHES, TOLERANCE, assert_agrees, family, golden, model_images_targets
from small_models import golden_model, largest_difference, random_images, randomise, small_vit
from vitreous.speed.timing import one_thread
from whole_maps import all_token_scores, opened

# Float64: the sum of some hundred signed terms of 1e-16 each, up to a thousand times as large as the logit.
COMPLETE = 1e-9


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


# Goldens --------------------------------------------------------------------------------------------------------------


def whole(spelling: str) -> tuple[np.ndarray, np.ndarray]:
    """Whole maps and logits of the golden model, as the goldens store them: (class, image, token)."""
    model, images, targets = model_images_targets()
    found = [all_token_scores(model, images, spelling, target) for target in targets.unbind(dim=1)]
    return tuple(torch.stack(part).numpy() for part in zip(*found, strict=True))


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layer", range(DEPTH))
def test_fullgrad_from_every_layer_and_how_much_it_misses(layer):
    scores, logits = whole(f"fullgrad:layer={layer}")
    assert_same(scores, family(f"blocks__{layer}__FGrad_s:sum"))
    assert_same(scores.sum(axis=-1) - logits, family(f"blocks__{layer}__FGrad_completeness_error"))
    assert_agrees(f"fullgrad:layer={layer}", family(f"blocks__{layer}__FGrad_s:sum")[..., PATCHES])


@pytest.mark.parametrize(
    ("spelling", "key"),
    [
        ("fullgrad_plus", "CAT_s:sum_sum_FGrad_s:sum"),
        ("fullgrad.plus", "CAT_s:sum_sum_FGrad_s:sum"),
        ("fullgrad.skipplus", "CAT_s:sum_sum_f2_FGrad_s:sum"),
        ("fullgrad_plus.skipplus", "CAT_s:sum_sum_f2_FGrad_s:sum"),
        ("fullgrad.plus:start=2", "CAT_s:sum_sum_f2_FGrad_s:sum"),
    ],
)
def test_every_bias_counts_once(spelling, key):
    assert_same(whole(spelling)[0], family(key))
    assert_agrees(spelling, family(key)[..., PATCHES])


def test_biases_alone_from_the_first_block_and_behind_the_last():
    everything = whole("fullgrad")[0] - whole("ixg")[0]
    assert_same(everything, family("FGrad_s:sum_start"))
    model, images, targets = model_images_targets()
    for number, target in enumerate(targets.unbind(dim=1)):
        with opened(model, images, "fullgrad", target) as (recipe, view):
            behind = view.biases(recipe.readout.backward, DEPTH).numpy()
        assert_same(behind, family("FGrad_s:sum_end")[number])


@pytest.mark.parametrize("layer", range(DEPTH))
def test_decompx_with_biases_sums_to_the_logit_and_its_bias_token_is_theirs(layer):
    with_bias, logits = whole(f"decompx:bias=token,layer={layer}")
    without = whole(f"decompx:layer={layer}")[0]
    stored, (_, _, targets) = golden("decompx_vit_skipplus_authors")[f"decompx_vector_f{layer}"], model_images_targets()
    bias_token = np.stack([[stored[image, 17, targets[image, k]] for image in range(3)] for k in range(2)])
    assert_same((with_bias - without).sum(axis=-1), bias_token)
    np.testing.assert_allclose(with_bias.sum(axis=-1), logits, rtol=COMPLETE)


# The other entries of that golden file that no other test reads.


@pytest.mark.parametrize("layer", range(DEPTH))
@pytest.mark.parametrize(
    ("method", "key"),
    [("ixg:channels=l2", "CAT_s:L2_layers"), ("gradient:channels=sum", "PatchGrad_s:sum_layers")],
)
def test_channels_as_a_length_or_a_sum(method, key, layer):
    assert_agrees(f"{method},layer={layer}", family(key)[:, layer, :, PATCHES])


def test_every_row_of_attcam_of_the_skipplus_authors():
    model, images, targets = model_images_targets()
    for number, target in enumerate(targets.unbind(dim=1)):
        for layer in range(DEPTH):
            with opened(model, images, f"attcam:convention=skipplus,layer={layer}", target) as (recipe, view):
                matrix = recipe.readout.reader(view, layer)(slice(None)).numpy()
            assert_same(matrix, family("AttnWHeadGrad_layers")[number, layer])


# Where biases go ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["fullgrad", "fullgrad:rule=libra", "fullgrad_plus", "decompx:bias=token"])
def test_without_biases_fullgrad_is_input_times_gradient(spelling):
    """ReLU, which has no residue, and no bias anywhere."""
    model = small_vit(act_layer=nn.ReLU)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") and not name.startswith("patch_embed"):
                parameter.zero_()
    other = {"fullgrad": "ixg", "fullgrad:rule=libra": "ixg:rule=libra", "fullgrad_plus": "cat"}.get(
        spelling, "decompx"
    )
    one, two = (all_token_scores(model, random_images(), each, 1)[0] for each in (spelling, other))
    assert largest_difference(one, two) < 1e-12


@pytest.mark.parametrize("pooled", [False, True])
def test_the_heads_bias_goes_to_the_tokens_it_reads(pooled):
    model = small_vit(global_pool="avg" if pooled else "token")
    before, _ = all_token_scores(model, random_images(), "fullgrad", 1)
    with torch.no_grad():
        model.head.bias[1] += 16
    after, _ = all_token_scores(model, random_images(), "fullgrad", 1)
    expected = torch.zeros(17, dtype=torch.float64)
    expected[slice(1, 17) if pooled else slice(0, 1)] = 1.0 if pooled else 16.0
    torch.testing.assert_close(after - before, expected.expand(2, -1))


def test_as_many_images_as_tokens_are_not_mixed_up():
    """Tokens first and batch first look alike then."""
    layer = nn.TransformerEncoderLayer(24, 3, 48, activation="gelu", norm_first=True)

    class TokensFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Conv2d(3, 24, 8, 8)
            self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(24), enable_nested_tensor=False)
            self.head = nn.Linear(24, 5)

        def forward(self, images):
            tokens = self.embed(images).flatten(2).permute(2, 0, 1)
            return self.head(self.encoder(tokens).transpose(0, 1).mean(dim=1))

    model = randomise(TokensFirst()).double().eval()
    images = random_images(16)
    together, _ = all_token_scores(model, images, "fullgrad:rule=libra", 1)
    alone, _ = all_token_scores(model, images[:3], "fullgrad:rule=libra", 1)
    assert largest_difference(together[:3], alone) < 1e-12


@pytest.mark.parametrize("squared", [False, True])
def test_many_methods_share_the_noted_biases(squared):
    model, images = golden_model()
    if squared:
        for block in model.blocks:
            block.mlp.act = SquaredReLU()
    spellings = ["fullgrad", "fullgrad:layer=2", "fullgrad_plus:rule=libra", "fullgrad.skipplus", "ixg", "gae"]
    together = vitreous.explain(model, images, spellings).scores
    for spelling in spellings:
        alone = vitreous.explain(model, images, spelling).scores[spelling]
        assert largest_difference(together[spelling], alone) < 1e-12
