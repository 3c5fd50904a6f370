"""Trust in the maps of one photo: literal recomputation, controls as the floor and the ceiling, and bad input."""

from __future__ import annotations

import copy
import gc
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
    RANDOM_SETS,
    REMOVED,
    MapTrust,
    Parts,
    Share,
    Trust,
    against_chance,
    agreement_of,
    count_of,
    sentence,
    smallest_destroying,
    smallest_keeping,
    verdict_of,
)
from vitreous.tape.runner import ModelRunner

PREPARE = Parts.prepare


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
                ends = torch.stack((order[:3], order[-3:]))  # 20% of 16 patches
                logits = runner.logits_of_kept(images[[index, index]], ends)
                top, bottom = logits.softmax(dim=1)[:, found.target].tolist()
                # Float64: another order of tokens in a sum.
                assert measured.gap == pytest.approx(top - bottom, abs=1e-9)

    def test_the_shares_that_keep_and_destroy_the_prediction_do_so(self, explained):
        model, images, explanation = explained
        for index, found in enumerate(vitreous.trust(model, images, explanation, shift=False)):
            runner, image = ModelRunner(model, images[[index]]), images[[index]]
            order = explanation.scores[found.method][index].argsort(descending=True, stable=True)

            def outputs(part, runner=runner, image=image):
                return runner.logits_of_kept(image, part[None]).softmax(dim=1)[0]

            def keeps(share, order=order, target=found.target, outputs=outputs):
                return int(outputs(order[: count_of(share, PATCHES)]).argmax()) == target

            def destroys(share, order=order, target=found.target, outputs=outputs):
                return int(outputs(order[PATCHES - count_of(100 - share, PATCHES) :]).argmax()) != target

            measured = found.maps[found.method]
            assert (measured.keeps or Share(None, 0)).percent == smallest_keeping(keeps)
            assert (measured.destroys or Share(None, 0)).percent == smallest_destroying(destroys)
            if measured.keeps is not None:
                kept = outputs(order[: count_of(measured.keeps.percent, PATCHES)])
                assert measured.keeps.probability == pytest.approx(float(kept[found.target]), abs=1e-9)

    @pytest.mark.parametrize(
        ("kept", "smallest", "asked"),
        [
            *(((5, 10, 20, 35, 50), 5, (20, 5)), ((10, 20, 50), 10, (20, 5, 10)), ((20,), 20, (20, 5, 10, 20))),
            *(((5, 35), 35, (20, 35)), ((50,), 50, (20, 35, 50)), ((), None, (20, 35, 50))),
        ],
    )
    def test_large_parts_are_run_only_where_small_ones_do_not_keep(self, kept, smallest, asked):
        seen = []
        assert smallest_keeping(lambda share: seen.append(share) or share in kept) == smallest
        assert tuple(seen) == asked
        assert set(seen) <= set(KEPT)

    @pytest.mark.parametrize(
        ("lost", "smallest", "asked"),
        [
            *(((25, 50), 25, (50, 25)), ((50, 95), 50, (50, 25)), ((65, 80, 95), 65, (50, 95, 80, 65))),
            *(((80, 95), 80, (50, 95, 80, 65)), ((95,), 95, (50, 95, 80)), ((65,), None, (50, 95))),
        ],
    )
    def test_below_half_is_run_where_half_destroys_and_above_elsewhere(self, lost, smallest, asked):
        seen = []
        assert smallest_destroying(lambda share: seen.append(share) or share in lost) == smallest
        assert [share for share in seen if share in REMOVED] == list(asked)

    def test_the_oracle_beats_random_orders_and_a_turned_one_none(self, explained):
        model, images, explanation = explained
        # Places instead of scores: of equal scores the first patch comes first, turned or not.
        places = explanation.scores["oracle:steps=16"].argsort(descending=True, stable=True).argsort().double()
        one, turned = (
            replace(explanation, scores={"oracle:steps=16": scores}, signed={"oracle:steps=16": False})
            for scores in (-places, places)
        )
        for good, bad in zip(
            vitreous.trust(model, images, one, shift=False),
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
        first = explanation.methods[0]
        only = replace(explanation, scores={first: explanation.scores[first]}, signed={first: False})
        (one, *_) = vitreous.trust(model, images, only, shift=False)
        (three, *_) = vitreous.trust(model, images, replace(explanation), shift=False)
        assert three.evaluations - one.evaluations == 2 * 2
        assert 10 <= one.evaluations - 1 <= 14  # an explanation that was put together: the whole photo once more
        (known, *_) = explanation.trust(shift=False)
        assert known.evaluations == three.evaluations - 1

    def test_the_account_is_the_logit_with_and_without_patches(self, explained):
        model, images, explanation = explained
        (found, *_) = vitreous.trust(model, images, explanation, shift=False)
        nothing = torch.empty(1, 0, dtype=torch.int64)
        left = ModelRunner(model, images[:1]).logits_of_kept(images[:1], nothing)[0, found.target]
        assert found.account.without_patches == pytest.approx(float(left), abs=1e-9)
        assert found.account.output == pytest.approx(found.account.patches + found.account.without_patches)

    def test_random_sets_are_disjoint(self, explained, monkeypatch):
        model, images, explanation = explained
        seen = []

        def prepare(parts, wanted, others):
            seen.extend(others)
            return PREPARE(parts, wanted, others)

        monkeypatch.setattr(Parts, "prepare", prepare)
        vitreous.trust(model, images[:1], explanation.select(0), shift=False)
        assert [len(one) for one in seen] == [3] * RANDOM_SETS  # 20% of 16 patches
        assert len(set(np.concatenate(seen).tolist())) == 3 * RANDOM_SETS

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
        assert found.bound == pytest.approx(0.02 / (0.02 + 0.15**2))  # (0.01 + 0.04 + 0.01) / 3
        assert against_chance(-0.1, chance).bound == 1.0
        assert against_chance(0.0, np.zeros(3)).bound == 1.0

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
        map_ = MapTrust(0.6, 20, 20, 0.0201, keeps, destroys, 0.9)
        found = Trust(
            *("good", "", "gae", "gae", 3, "Bengal", 0.9, 3, {"gae": map_}, None, 0.5, "top", "lower left"),
            *("dropped", 27),
        )
        assert sentence(found) == (
            "Trust: good. 10% of the patches keep 'Bengal' at 70.0%; without the highest 25% it is lost; the map beats "
            "20 of 20 random orders and at least 97% of all; methods agree on the top part and differ most on the "
            "lower left part (rank correlation 0.50)."
        )


def test_the_sentence_names_a_better_map():
    maps = {"gae": MapTrust(0.1, 15, 20, 0.5), "ixg": MapTrust(0.33, 20, 20, 0.1)}
    found = Trust(*("poor", "", "gae", "ixg", 3, "x", 0.9, 3, maps, None, None, None, None, "dropped", 14))
    assert "random orders and at least 50% of all; that of ixg does better (a gap of 33 to 10 points)." in sentence(
        found
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

    def test_a_further_map_with_nan_is_left_out_and_that_is_said(self, explained):
        model, images, explanation = explained
        scores = {**explanation.scores, "gae": torch.full_like(explanation.scores["gae"], torch.nan)}
        (found, *_) = vitreous.trust(model, images, replace(explanation, scores=scores), shift=False)
        assert set(found.maps) == {"oracle:steps=16", "random"}
        assert "the map of gae has values that are not finite and was left out" in found.sentence

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
        assert found.sentence == (
            "Trust: poor, because no removed part of the photo changes the prediction, so no map of patches can "
            "explain it."
        )
        assert found.maps == {}

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

    def test_images_or_weights_that_were_not_explained_are_refused(self, explained):
        model, images, explanation = explained
        with pytest.raises(InputError, match="is not that of the explanation"):
            vitreous.trust(model, images.flip(0), explanation)
        other = small_vit(seed=5)
        with pytest.raises(InputError, match="is not that of the explanation"):
            vitreous.trust(other, random_images(1), vitreous.explain(small_vit(), random_images(1), ["gae"]))

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
    html = page.read_text(encoding="utf-8")
    assert f"<h3>Trust: {one['trust']['verdict']}</h3>" in html
    for name, measured in one["trust"]["maps"].items():
        row = f"<code>{name}</code></th><td>{100 * measured['gap']:.1f} points</td>"
        assert row in html
    assert f"{one['trust']['maps']['gae']['beats']} of {one['trust']['maps']['gae']['orders']}" in html
    without = json.loads(CliRunner().invoke(app, [*arguments[:-1], "--json"]).stdout)
    assert "trust" not in without["photos"][0]


class TestOrigin:
    """``explanation.trust()`` without arguments."""

    def test_it_is_that_of_the_model_and_images_given_again(self, explained):
        model, images, explanation = explained
        given = vitreous.trust(model, images, explanation, shift=False)
        assert [one.sentence for one in explanation.trust(shift=False)] == [one.sentence for one in given]
        assert [one.sentence for one in explanation.trust(model, images, shift=False)] == [
            one.sentence for one in given
        ]
        assert [one.sentence for one in explanation.select(1).trust(shift=False)] == [given[1].sentence]

    def test_a_report_has_it_on_request(self, explained, tmp_path):
        explanation = explained[2].with_images(explained[1].clamp(0, 1))
        text = explanation.report(tmp_path / "page.html", trust=True).read_text(encoding="utf-8")
        assert text.count("<h3>Trust: ") == len(explanation)
        assert "<h3>Trust: " not in explanation.report(tmp_path / "page.html").read_text(encoding="utf-8")

    def test_it_reuses_the_run_that_made_the_maps(self, explained):
        model, images, explanation = explained
        runs = []
        handle = model.register_forward_hook(lambda module, given, output: runs.append(len(given[0])))
        explanation.select(0).trust(shift=False)
        known = sum(runs)
        runs.clear()
        vitreous.trust(model, images[:1], replace(explanation.select(0)), shift=False)
        handle.remove()
        assert sum(runs) == known + 2  # the layout and the whole photo

    def test_a_loaded_explanation_says_what_to_pass(self, explained, tmp_path):
        explanation = explained[2]
        for other in (vitreous.Explanation.load(explanation.save(tmp_path / "saved")), copy.copy(explanation)):
            with pytest.raises(InputError, match=r"pass them: explanation.trust\(model, images\)"):
                other.trust()
        with pytest.raises(InputError, match="or neither"):
            explanation.trust(explained[0])

    def test_the_callers_model_is_not_kept_alive(self):
        model, images = small_vit(depth=2), random_images(1)
        explanation = vitreous.explain(model, images, ["gae"])
        del model
        gc.collect()
        with pytest.raises(InputError, match="the model is gone"):
            explanation.trust()

    def test_a_model_that_was_trained_since_is_refused(self):
        model, images = small_vit(depth=2), random_images(1)
        explanation = vitreous.explain(model, images, ["gae"])
        with torch.no_grad():
            model.head.weight.mul_(2)
        with pytest.raises(InputError, match="were changed after they were explained"):
            explanation.trust()

    def test_a_model_by_name_or_in_training_mode(self):
        model, images = small_vit(depth=2).train(), random_images(1)
        assert vitreous.explain(model, images, ["gae"]).trust(shift=False)[0].method == "gae"
        assert model.training
        named = vitreous.explain("timm/test_vit@random", Image.new("RGB", (40, 40)), ["gae"])
        assert named.trust(shift=False)[0].method == "gae"


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
