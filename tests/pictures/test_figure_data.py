"""The numbers behind figures: against closed forms, against maps written out, and against what explain() gives."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from literal.forward import run
from literal.tokentm import transformed_tokens
from small_models import PATCHES, largest_difference, random_images, small_vit
from vitreous.api.explain import explain
from vitreous.errors import InputError, MethodError
from vitreous.pictures.curves import area, perturbation_curves
from vitreous.pictures.strips import (
    depth_spellings,
    depth_strip,
    heads_strip,
    start_layer_spellings,
    start_layer_strip,
    token_transformation,
    with_options,
)

# Models and maps are float64: only the order of sums differs.
EXACT = 1e-10
DEPTH = 4


@pytest.fixture(scope="module")
def model():
    return small_vit(depth=DEPTH)


@pytest.fixture(scope="module")
def image():
    return random_images(1)


class TestDepth:
    def test_ends_with_the_method_itself(self, model, image):
        for method in ("tokentm", "gradtoken", "rollout"):
            strip = depth_strip(model, image, method, 2)
            assert largest_difference(strip.maps[-1], explain(model, image, method, 2).scores_of(method)) < EXACT
            assert largest_difference(strip.maps[0], strip.maps[-1]) > 0.01

    def test_counts_blocks(self, model, image):
        strip = depth_strip(model, image, "tokentm")
        assert strip.captions == ("1 block", "2 blocks", "3 blocks", "4 blocks")
        assert strip.maps.shape == (DEPTH, PATCHES)
        assert len(depth_strip(model, image, "gradtoken").captions) == DEPTH

    def test_of_gradtoken_starts_without_propagation(self, model, image):
        plain = explain(model, image, "gradtoken:propagation=none").scores["gradtoken:propagation=none"][0]
        assert largest_difference(depth_strip(model, image, "gradtoken").maps[0], plain) < EXACT

    def test_keeps_other_options_and_respects_a_start(self):
        assert depth_spellings("tokentm.rollout:start=2,necc=rescaled", 4) == {
            1: "tokentm.rollout:start=2,necc=rescaled,depth=1",
            2: "tokentm.rollout:start=2,necc=rescaled,depth=2",
        }

    @pytest.mark.parametrize("method", ["decompx.skipplus", "gradcam", "gradtoken:propagation=none"])
    def test_is_refused_where_there_is_none(self, method):
        with pytest.raises(MethodError):
            depth_spellings(method, 12)


class TestStartLayers:
    def test_neighbours_differ_by_one_layer(self, model, image):
        """PLUS is a sum over layers, so the maps of two neighbouring starts differ by the lower start's layer."""
        strip = start_layer_strip(model, image, "ixg.skipplus", 1)
        for start in range(DEPTH - 1):
            layer = f"ixg:layer={start}"
            alone = explain(model, image, layer, 1).scores_of(layer)
            assert largest_difference(strip.maps[start] - strip.maps[start + 1], alone) < EXACT

    def test_skipplus_is_marked_where_it_is(self, model, image):
        strip = start_layer_strip(model, image, "decompx", 1)
        marked = [number for number, caption in enumerate(strip.captions) if "SkipPLUS" in caption]
        assert marked == [math.ceil(DEPTH / 2)]
        skipplus = explain(model, image, "decompx.skipplus", 1).scores_of("decompx.skipplus")
        assert largest_difference(strip.maps[marked[0]], skipplus) < EXACT

    def test_a_rollout_stays_one(self):
        assert start_layer_spellings("tokentm:depth=2", 3) == {n: f"tokentm:start={n}" for n in range(3)}

    def test_propagation_stays_and_options_of_other_aggregations_go(self):
        assert start_layer_spellings("ixg.skipplus.propagate:half=floor", 2) == {
            0: "ixg.plus.propagate:start=0",
            1: "ixg.plus.propagate:start=1",
        }

    def test_is_refused_without_layers(self):
        with pytest.raises(MethodError, match="no layers"):
            start_layer_spellings("rise", 12)


class TestHeads:
    @pytest.mark.parametrize("options", ["", "propagation=none", "propagation=rollout_elementwise", "depth=1"])
    def test_integrate_to_the_method(self, model, image, options):
        """GradToken's eq. 18: the mean over heads, of the positive parts or as they are."""
        positive = f"gradtoken{':' if options else ''}{options}"
        plain = f"gradtoken:{options}{',' if options else ''}heads=average"
        expected = explain(model, image, [positive, plain], 3)
        maps = heads_strip(model, image, positive, 3).maps
        assert maps.shape == (3, PATCHES)
        assert bool((maps < 0).any())
        assert largest_difference(maps.clamp(min=0).mean(0), expected.scores_of(positive)) < EXACT
        assert largest_difference(maps.mean(0), expected.scores_of(plain)) < EXACT

    def test_are_shown_on_one_scale(self, model, image):
        strip = heads_strip(model, image)
        assert strip.span == (float(strip.maps.min()), float(strip.maps.max()))

    @pytest.mark.parametrize("method", ["tokentm", "gradtoken.plus"])
    def test_are_refused_where_there_are_none(self, model, image, method):
        with pytest.raises(MethodError):
            heads_strip(model, image, method)


class TestTransformation:
    @pytest.mark.parametrize("block", [0, 2, -1])
    def test_is_what_the_paper_writes(self, model, image, block):
        """Equations 10 and 12 with the transformed tokens written out."""
        seen = token_transformation(model, image, block)
        block %= DEPTH
        record = run(model, image[0])
        tokens = record.tokens[block]
        attention = torch.stack([matrix[0] for matrix in record.attention[block]])
        length, direction = [], []
        for transformed in transformed_tokens(model, record, block):
            length.append(transformed.norm(dim=1) / tokens.norm(dim=1))
            cosine = torch.nn.functional.cosine_similarity(tokens, transformed, dim=1)
            direction.append(torch.softmax(cosine, dim=0) * len(cosine))
        length, direction = torch.stack(length), torch.stack(direction)
        assert seen.block == block
        for found, expected in (
            (seen.attention, attention),
            (seen.length, length),
            (seen.direction, direction),
            (seen.combined, attention * length * direction),
        ):
            assert largest_difference(found, expected.mean(0)[1:]) < EXACT

    def test_a_block_that_is_not_there_is_refused(self, model, image):
        with pytest.raises(MethodError, match="block 4 does not exist"):
            token_transformation(model, image, DEPTH)


def logits_with_patches(model, image, kept):
    """The model written out, on some of its patches."""
    stream = model._pos_embed(model.patch_embed(image))
    stream = stream[:, [0, *(number + 1 for number in sorted(kept))]]
    return model.forward_head(model.norm(model.blocks(stream)))


class TestCurves:
    def test_by_patches_are_the_model_on_those_patches(self, model, image):
        explanation = explain(model, image, ["tokentm", "ixg"], 2)
        curves = perturbation_curves(model, image, explanation, steps=5)
        for one in curves:
            order = explanation.scores_of(one.method).argsort(descending=True).tolist()
            for step in range(6):
                count = PATCHES * step // 5
                for kept, found in ((order[count:], one.deletion), (order[:count], one.insertion)):
                    with torch.no_grad():
                        expected = logits_with_patches(model, image, kept).softmax(-1)[0, 2]
                    assert abs(float(expected) - found[step]) < EXACT

    def test_parts_are_those_that_are_really_gone_and_each_is_asked_for_once(self, model, image):
        explanation = explain(model, image, "ixg", 2)
        (one,) = perturbation_curves(model, image, explanation, steps=5)
        np.testing.assert_array_equal(one.fractions, [PATCHES * step // 5 / PATCHES for step in range(6)])
        (fine,) = perturbation_curves(model, image, explanation, steps=100_000)
        np.testing.assert_array_equal(fine.fractions, np.arange(PATCHES + 1) / PATCHES)
        assert fine.deletion.shape == fine.insertion.shape == (PATCHES + 1,)

    def test_by_pixels_are_the_model_on_painted_pictures(self, model, image):
        explanation = explain(model, image, "ixg", 1)
        (one,) = perturbation_curves(model, image, explanation, by="pixels", steps=4)
        order = explanation.heatmap("ixg")[0].flatten().argsort(descending=True, stable=True)
        for step in range(5):
            painted = image.clone().flatten(2)
            painted[..., order[: 1024 * step // 4]] = 0
            with torch.no_grad():
                expected = model(painted.view_as(image)).softmax(-1)[0, 1]
            assert abs(float(expected) - one.deletion[step]) < EXACT

    def test_start_and_end_where_they_must(self, model, image):
        explanation = explain(model, image, ["tokentm", "rollout"], topk=2)
        for target in range(2):
            whole = float(explanation.probabilities[0, explanation.class_index(0, target)])
            for by in ("patches", "pixels"):
                for one in perturbation_curves(model, image, explanation, target_index=target, by=by, steps=2):
                    assert abs(one.deletion[0] - whole) < EXACT
                    assert abs(one.insertion[-1] - whole) < EXACT
                    assert abs(one.deletion[-1] - one.insertion[0]) < EXACT

    def test_a_map_of_pixels_counts_by_the_mean_of_each_patch(self, model, image):
        pixel = "rise:resolution=pixel,budget=64"
        explanation = explain(model, image, [pixel], 0)
        (one,) = perturbation_curves(model, image, explanation, steps=4)
        pooled = explanation.scores_of(pixel).view(4, 8, 4, 8).mean(dim=(1, 3)).flatten()
        order = pooled.argsort(descending=True).tolist()
        with torch.no_grad():
            expected = logits_with_patches(model, image, order[:8]).softmax(-1)[0, 0]
        assert abs(float(expected) - one.insertion[2]) < EXACT

    def test_a_map_of_pixels_counts_by_patches_of_the_model_where_they_stand_over_the_edge(self):
        """Patches of 8 pixels, of which the last ones have 6: not 16 equal and overlapping parts of 30 pixels."""
        model, image = small_vit(dynamic_img_size=True, dynamic_img_pad=True), random_images(1)[..., :30, :30]
        generator = torch.Generator().manual_seed(0)
        pixels = torch.rand(1, 30 * 30, dtype=torch.float64, generator=generator)
        explanation = replace(explain(model, image, "ixg", 0), scores={"ixg": pixels})
        (one,) = perturbation_curves(model, image, explanation, steps=16)
        means = [patch.mean() for row in pixels.view(30, 30).split(8) for patch in row.split(8, dim=1)]
        order = torch.stack(means).argsort(descending=True).tolist()
        for count in range(17):
            with torch.no_grad():
                expected = logits_with_patches(model, image, order[:count]).softmax(-1)[0, 0]
            assert abs(float(expected) - one.insertion[count]) < EXACT

    def test_a_model_that_reads_patches_only_has_no_value_without_any(self, image):
        pooled = small_vit(global_pool="avg", class_token=False)
        explanation = explain(pooled, image, "ixg")
        (one,) = perturbation_curves(pooled, image, explanation, steps=4)
        assert math.isnan(one.deletion[-1])
        assert math.isnan(one.insertion[0])
        assert np.isfinite(one.deletion[:-1]).all()
        assert 0 < one.deletion_area < 1

    def test_a_map_without_an_order_has_none(self, model, image):
        whole = explain(model, image, ["tokentm", "ixg"], 2)
        scores = {**whole.scores, "ixg": torch.full_like(whole.scores["ixg"], math.nan)}
        broken = replace(whole, scores=scores)
        first, second = perturbation_curves(model, image, broken, steps=2)
        expected = perturbation_curves(model, image, whole, steps=2)[0]
        assert np.abs(first.deletion - expected.deletion).max() < EXACT
        assert np.isnan([second.deletion, second.insertion]).all()

    def test_do_not_change_the_model(self, model, image):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        perturbation_curves(model, image, explain(model, image, "ixg"))
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert not model.training

    def test_areas(self):
        fractions = np.linspace(0, 1, 11)
        assert area(fractions, np.full(11, 0.3)) == pytest.approx(0.3)
        assert area(fractions, 1 - fractions) == pytest.approx(0.5)
        # The trapezoid rule of x² with 10 steps is 1/3 + 1/600.
        assert area(fractions, fractions**2) == pytest.approx(1 / 3 + 1 / 600)
        values = np.where(fractions == 0, np.nan, 0.4)
        assert area(fractions, values) == pytest.approx(0.4)
        assert math.isnan(area(fractions, np.full(11, np.nan)))

    @pytest.mark.parametrize("options", [{"by": "tokens"}, {"steps": 0}])
    def test_nonsense_is_refused(self, model, image, options):
        with pytest.raises(InputError):
            perturbation_curves(model, image, explain(model, image, "ixg"), **options)

    def test_are_of_one_photo(self, model):
        images = random_images(2)
        with pytest.raises(InputError, match="one photo at a time"):
            perturbation_curves(model, images, explain(model, images, "ixg"))


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("tokentm", "tokentm:depth=3"),
        ("tokentm:depth=1", "tokentm:depth=3"),
        (" a.b : x=1 , start = 2", "a.b:x=1,depth=3"),
    ],
)
def test_options_are_set_and_left_out(spelling, expected):
    assert with_options(spelling, drop=("start",), depth=3) == expected
