"""Trust in the maps of one photo: literal recomputation, controls as the floor and the ceiling, and bad input."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import Block
from torch import nn
from typer.testing import CliRunner

import vitreous
from small_models import PATCHES, golden_model, random_images, small_vit
from vitreous._utils.defaults import CANDIDATES
from vitreous.cli import app
from vitreous.errors import InputError, MethodError
from vitreous.explanation.trust import (
    KEPT,
    RANDOM_ORDERS,
    REMOVED,
    MapTrust,
    Share,
    Trust,
    against_chance,
    agreement_of,
    sentence,
    verdict_of,
)
from vitreous.tape.runner import ModelRunner


@pytest.fixture(scope="module")
def explained():
    model, images = golden_model()
    methods = ["oracle:steps=16", "gae", "random"]
    return model, images, vitreous.explain(model, images, methods)


class TestMeasurement:
    def test_the_gap_is_that_of_the_highest_and_the_lowest_patches(self, explained):
        model, images, explanation = explained
        for index, found in enumerate(vitreous.trust(model, images, explanation, shift=False)):
            runner = ModelRunner(model, images[[index]])
            for method, measured in found.maps.items():
                order = explanation.scores[method][index].argsort(descending=True, stable=True)
                means = []
                for kept in ((order[:2], order[:4]), (order[-2:], order[-4:])):  # 10 and 25% of 16 patches
                    logits = [runner.logits_of_kept(images[[index]], each[None]) for each in kept]
                    means.append(float(torch.cat(logits).softmax(dim=1)[:, found.target].mean()))
                # Float64: another order of tokens in a sum.
                assert measured.gap == pytest.approx(means[0] - means[1], abs=1e-9)

    def test_what_keeps_and_what_destroys_the_prediction(self, explained):
        model, images, explanation = explained
        (found, *_) = vitreous.trust(model, images, explanation, shift=False)
        runner = ModelRunner(model, images[:1])
        order = explanation.scores[found.method][0].argsort(descending=True, stable=True)

        def holds(kept):
            return int(runner.logits_of_kept(images[:1], kept[None]).argmax()) == found.target

        counts = {share: max(1, round(PATCHES * share / 100)) for share in KEPT}
        kept = [share for share in KEPT if holds(order[: counts[share]])]
        expected = next((share for share in KEPT if {each for each in KEPT if each >= share} <= set(kept)), None)
        assert (found.maps[found.method].keeps or Share(None, 0)).percent == expected

    def test_the_smallest_share_whose_removal_changes_the_prediction(self, explained):
        model, images, explanation = explained
        for index, found in enumerate(vitreous.trust(model, images, explanation, shift=False)):
            runner, image = ModelRunner(model, images[[index]]), images[[index]]
            order = explanation.scores[found.method][index].argsort(descending=True, stable=True)
            counts = {share: min(15, max(1, round(PATCHES * (100 - share) / 100))) for share in REMOVED}
            kept = {share: order[PATCHES - counts[share] :] for share in REMOVED}
            lost = [s for s in REMOVED if int(runner.logits_of_kept(image, kept[s][None]).argmax()) != found.target]
            # 25% is run only where 50% changes the prediction, and 10% only where 25% does.
            expected = [s for s in lost if s >= 50 or all(larger in lost for larger in (25, 50) if larger > s)]
            assert (found.maps[found.method].destroys or Share(None, 0)).percent == min(expected, default=None)

    def test_the_oracle_beats_random_orders_and_a_turned_one_none(self, explained):
        model, images, explanation = explained
        turned = replace(
            explanation,
            scores={"oracle:steps=16": -explanation.scores["oracle:steps=16"]},
            signed={"oracle:steps=16": False},
        )
        for good, bad in zip(
            vitreous.trust(model, images, explanation, shift=False),
            vitreous.trust(model, images, turned, shift=False),
            strict=True,
        ):
            best, worst = good.maps["oracle:steps=16"], bad.maps["oracle:steps=16"]
            assert best.gap == pytest.approx(-worst.gap, abs=1e-9)
            assert best.beats > worst.beats
            assert bad.verdict == "poor"
            assert worst.bound == 1.0

    def test_it_is_the_same_for_one_image_and_for_several(self, explained):
        model, images, explanation = explained
        together = vitreous.trust(model, images, explanation)
        (alone,) = vitreous.trust(model, images[[1]], explanation.select(1))
        assert alone.maps["gae"].gap == pytest.approx(together[1].maps["gae"].gap, abs=1e-9)
        assert alone.verdict == together[1].verdict
        assert alone.maps[alone.method].stability == pytest.approx(together[1].maps[alone.method].stability, abs=1e-9)

    def test_it_costs_what_its_docstring_says(self, explained):
        model, images, explanation = explained
        only = replace(explanation, scores={"gae": explanation.scores["gae"]}, signed={"gae": False})
        (one, *_) = vitreous.trust(model, images, only, shift=False)
        (three, *_) = vitreous.trust(model, images, explanation, shift=False)
        assert three.evaluations - one.evaluations == 2 * 4
        assert one.evaluations <= 30

    def test_the_account_is_the_logit_with_and_without_patches(self, explained):
        model, images, explanation = explained
        (found, *_) = vitreous.trust(model, images, explanation, shift=False)
        nothing = torch.empty(1, 0, dtype=torch.int64)
        left = ModelRunner(model, images[:1]).logits_of_kept(images[:1], nothing)[0, found.target]
        assert found.account.without_patches == pytest.approx(float(left), abs=1e-9)
        assert found.account.output == pytest.approx(found.account.patches + found.account.without_patches)

    def test_an_explanation_measures_itself_with_the_model_given_again(self, explained):
        model, images, explanation = explained
        one, other = (
            explanation.trust(model, images, shift=False),
            vitreous.trust(model, images, explanation, shift=False),
        )
        assert [each.sentence for each in one] == [each.sentence for each in other]

    def test_maps_of_pixels_are_averaged_over_patches(self):
        model, images = golden_model()
        explanation = vitreous.explain(model, images[:1], ["rise:budget=20,resolution=pixel"])
        (found,) = vitreous.trust(model, images[:1], explanation)
        assert np.isfinite(found.maps["rise:budget=20,resolution=pixel"].gap)

    def test_several_classes_are_measured_one_by_one(self):
        model, images = golden_model()
        explanation = vitreous.explain(model, images[:1], ["gae"], topk=2)
        first, second = (vitreous.trust(model, images[:1], explanation, target_index=k)[0] for k in (0, 1))
        assert (first.target, second.target) == tuple(explanation.target[0].tolist())
        assert any("not the explained class" in note or "no class is likely" in note for note in second.notes)


class TestConclusions:
    def test_chance_is_compared_in_pairs_and_bounded_by_its_variance(self):
        chance = np.array([0.1, 0.2, 0.3])
        found = against_chance(0.15, chance)
        assert (found.beats, found.orders) == (5, 6)  # differences 0.1, 0.2, 0.1 and their opposites
        assert found.bound == pytest.approx(0.02 / (0.02 + 0.15**2))
        assert against_chance(-0.1, chance).bound == 1.0
        assert against_chance(0.0, np.zeros(3)).bound == 1.0
        assert len(range(RANDOM_ORDERS)) == 8

    @pytest.mark.parametrize(
        ("gap", "bound", "doubtful", "verdict"),
        [
            *((0.6, 0.01, False, "good"), (0.6, 0.01, True, "fair"), (0.1, 0.01, False, "fair")),
            *((0.1, 0.3, False, "poor"), (0.6, 0.6, False, "poor"), (-0.2, 1.0, False, "poor")),
        ],
    )
    def test_verdicts(self, gap, bound, doubtful, verdict):
        assert verdict_of(MapTrust(gap, 0, 56, bound), 0.9, doubtful=doubtful) == verdict

    def test_maps_agree_where_all_rank_high_and_disagree_where_ranks_differ(self):
        base = np.zeros((6, 6))
        base[:2, :2] = 5 + np.arange(4).reshape(2, 2)
        one, other = base.copy(), base.copy()
        one[4:, 4:] = 3 + np.arange(4).reshape(2, 2) / 9
        other[4:, 4:] = -3
        agreement, agree_on, disagree_on = agreement_of({"a": one.ravel(), "b": other.ravel()}, (6, 6))
        assert (agree_on, disagree_on) == ("upper left", "lower right")
        assert -1 <= agreement < 1
        assert agreement_of({"a": one.ravel()}, (6, 6)) == (None, None, None)

    def test_the_sentence_says_it_all(self):
        keeps, destroys = Share(10, 0.7), Share(25, 0.1)
        map_ = MapTrust(0.6, 56, 56, 0.02, keeps, destroys, 0.9)
        found = Trust(
            *("good", "", "gae", "gae", 3, "Bengal", 0.9, 3, {"gae": map_}, None, 0.5, "top", "lower left"),
            *("dropped", 27),
        )
        assert sentence(found) == (
            "Trust: good. 10% of the patches keep 'Bengal' at 70.0%; without the highest 25% it is lost; the map beats "
            "56 of 56 random orders; methods agree on the top part and differ most on the lower left part "
            "(rank correlation 0.50)."
        )


class Neighbours(Block):
    """A block that mixes neighbours by a convolution, so that no patch can be dropped."""

    def __init__(self, dim, *args, **options):
        super().__init__(dim, *args, **options)
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, tokens, **options):
        tokens = super().forward(tokens, **options)
        mixed = self.conv(tokens[:, 1:].mT.unflatten(-1, (4, 4))).flatten(2)
        return torch.cat((tokens[:, :1], tokens[:, 1:] + mixed.mT), dim=1)


class Deaf(nn.Module):
    """A ViT whose answer does not depend on the image."""

    def __init__(self):
        super().__init__()
        self.vit = small_vit()
        self.register_buffer("bias", torch.tensor([4.0, 0, 0, 0, 0], dtype=torch.float64))

    def forward(self, images):
        return 1e-6 * self.vit(images) + self.bias


class TestBadInput:
    def test_a_map_with_nan_is_a_statement_and_no_number(self, explained):
        model, images, explanation = explained
        scores = {"gae": torch.full_like(explanation.scores["gae"], torch.nan)}
        broken = replace(explanation, scores=scores, signed={"gae": False})
        found = vitreous.trust(model, images, broken)
        assert {one.verdict for one in found} == {"not measured"}
        assert found[0].sentence == "Trust: not measured, because the map of gae has values that are not finite."
        assert found[0].maps == {}

    def test_a_model_that_cannot_drop_is_painted_and_that_is_said(self):
        model, images = small_vit(block_fn=Neighbours), random_images(1)
        (found,) = vitreous.trust(model, images, vitreous.explain(model, images, ["gae"]))
        assert found.removal == "painted"
        assert "painted with the mean colour" in found.sentence
        assert found.account is None

    def test_a_prediction_that_no_patch_changes_is_said(self):
        model, images = Deaf(), random_images(1)
        (found,) = vitreous.trust(model, images, vitreous.explain(model, images, ["gae"]))
        assert found.verdict == "poor"
        assert "no removed part of the photo changes the prediction" in found.sentence

    def test_a_constant_map_orders_nothing(self, explained):
        model, images, explanation = explained
        flat = replace(explanation, scores={"gae": torch.ones_like(explanation.scores["gae"])}, signed={"gae": False})
        (found, *_) = vitreous.trust(model, images, flat, shift=False)
        assert any("is the same everywhere" in note for note in found.notes)
        assert found.verdict != "good"

    def test_an_unlikely_class_is_a_note(self):
        model, images = small_vit(), random_images(1)
        model.head.weight.data *= 0.01
        model.head.bias.data *= 0
        (found,) = vitreous.trust(model, images, vitreous.explain(model, images, ["gae"]))
        assert any(note.startswith("no class is likely") for note in found.notes)
        assert found.verdict != "good"

    def test_values_have_no_probability(self):
        model, images = small_vit(), random_images(1)
        explanation = vitreous.explain(model, images, ["gae"], outputs="value")
        (found,) = vitreous.trust(model, images, explanation)
        assert found.verdict == "not measured"
        assert "values (regression)" in found.sentence

    def test_a_target_that_is_no_class_is_said(self):
        model, images = golden_model()
        explanation = vitreous.explain(model, images[:1], ["gae"], target=vitreous.targets.Contrast(3, 1))
        (found,) = vitreous.trust(model, images[:1], explanation)
        assert found.verdict == "not measured"
        assert "is no class that the model could keep or lose" in found.sentence
        assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["probability"] is None

    def test_other_images_are_refused(self, explained):
        model, images, explanation = explained
        with pytest.raises(InputError, match="pass the images that were explained"):
            vitreous.trust(model, images[:1], explanation)


def test_the_command_line_prints_it_and_has_it_in_json(tmp_path):
    photo = tmp_path / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(photo)
    options = ["--model", "timm/test_vit@random", "--image-size", "64", "--method", "gae,rollout"]
    arguments = ["explain", str(photo), *options, "--out", str(tmp_path / "out"), "--trust"]
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "400"})
    assert shown.exit_code == 0, shown.output
    assert "Trust: " in shown.stdout
    page = tmp_path / "page.html"
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json", "--report", str(page)]).stdout)
    (one,) = found["photos"]
    assert one["trust"]["sentence"].startswith("Trust: ")
    assert set(one["trust"]["maps"]) == {"gae", "rollout"}
    assert "Trust: " in page.read_text(encoding="utf-8")
    without = json.loads(CliRunner().invoke(app, [*arguments[:-1], "--json"]).stdout)
    assert "trust" not in without["photos"][0]


class TestFarPhotos:
    def test_a_photo_below_nearly_all_references_is_a_note(self):
        model, images = small_vit(depth=2), random_images(40)
        energies = model(images).logsumexp(dim=1).detach()
        order = energies.argsort()
        reference, lowest, highest = images[order[10:]], images[order[:1]], images[order[-1:]]
        bound = float(np.percentile(energies[order[10:]].numpy(), 10))
        for photo, far in ((lowest, True), (highest, False)):
            explanation = vitreous.explain(model, photo, ["gae"])
            (found,) = vitreous.trust(model, photo, explanation, shift=False, reference=reference)
            # Float64: the same numbers in other batches.
            assert found.energy == pytest.approx(float(model(photo).logsumexp(dim=1)), abs=1e-10)
            assert found.energy_bound == pytest.approx(bound, abs=1e-10)
            assert any("far from what the model knows" in note for note in found.notes) == far
            assert found.verdict != "good" or not far

    def test_without_references_nothing_is_said(self):
        model, images = small_vit(depth=2), random_images(1)
        (found,) = vitreous.trust(model, images, vitreous.explain(model, images, ["gae"]), shift=False)
        assert found.energy_bound is None
        assert "far from" not in found.sentence

    def test_sigmoid_outputs_have_no_energy(self):
        model, images = small_vit(depth=2), random_images(1)
        explanation = vitreous.explain(model, images, ["gae"], outputs="sigmoid")
        (found,) = vitreous.trust(model, images, explanation, shift=False, reference=random_images(12))
        assert found.energy is None

    def test_a_few_references_are_refused(self):
        model, images = small_vit(depth=2), random_images(3)
        with pytest.raises(InputError, match="10 photos at least"):
            vitreous.trust(model, images, vitreous.explain(model, images, ["gae"]), reference=images)


class TestAuto:
    def test_the_map_with_the_largest_gap_is_kept(self):
        model, images = golden_model()
        chosen = vitreous.explain(model, images[:1], "auto")
        every = vitreous.explain(model, images[:1], list(CANDIDATES))
        (measured,) = vitreous.trust(model, images[:1], every, shift=False)
        assert chosen.methods == (measured.best,)
        assert torch.equal(chosen.scores[measured.best], every.scores[measured.best])
        gaps = chosen.provenance["auto"]["gaps"]
        assert gaps == pytest.approx({name: map_.gap for name, map_ in measured.maps.items()}, abs=1e-9)

    def test_a_list_of_it_alone_is_the_same(self):
        model, images = golden_model()
        assert (
            vitreous.explain(model, images[:1], ["auto"]).methods == vitreous.explain(model, images[:1], "auto").methods
        )

    def test_where_no_patch_matters_that_is_a_warning(self):
        with pytest.warns(UserWarning, match="no candidate is better than random orders"):
            vitreous.explain(Deaf(), random_images(1), "auto")

    def test_where_nothing_can_be_measured_the_first_candidate_is_taken(self):
        with pytest.warns(UserWarning, match="could not be measured here"):
            found = vitreous.explain(small_vit(), random_images(1), "auto", outputs="value")
        assert found.methods == CANDIDATES[:1]

    def test_another_output_is_refused(self):
        with pytest.raises(MethodError, match="name the methods"):
            vitreous.explain(small_vit(), random_images(1), "auto", call=lambda model, x: model(x))
