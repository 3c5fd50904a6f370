"""The sanity protocol: maps that cannot depend on randomised parts do not change, and the model never does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import vitreous
from small_data import batch_of, finite, loaded, samples
from small_models import random_images, small_vit
from vitreous.evaluation.protocol import Protocol
from vitreous.evaluation.protocols import find_protocol
from vitreous.evaluation.runner.measure import columns_of, measure
from vitreous.evaluation.tasks.sanity import (
    STAGES,
    Concentration,
    Faithfulness,
    Randomisation,
    Sensitivity,
    randomise,
    randomised_models,
)
from vitreous.evaluation.tasks.task import Case, generator_of, seed_of
from vitreous.metrics.sanity import random_subsets
from vitreous.models import loaded as fingerprint


def only(task) -> Protocol:
    return replace(find_protocol("sanity"), tasks=(task,))


class TestRandomisation:
    def test_attention_does_not_know_the_head_but_the_blocks(self):
        rows = measure(loaded(), samples(3), only(Randomisation()), ["raw_attention", "gae"])
        for row in rows:
            if row["method"] == "raw_attention":  # of the last block, whatever the head
                assert row["head_spearman"] == 1.0
            assert row["top_quarter_spearman"] < 0.999
            assert row["everything_spearman"] < 0.999

    def test_the_lowest_attention_changes_last(self):
        rows = measure(loaded(small_vit(depth=4)), samples(3), only(Randomisation()), ["raw_attention:layer=0"])
        for row in rows:
            for stage in ("head", "top_quarter", "top_half", "top_three_quarters"):
                assert row[f"{stage}_spearman"] == pytest.approx(1.0, abs=1e-12)
            assert row["all_blocks_spearman"] < 0.999

    def test_the_model_itself_stays_as_it_was(self):
        model = loaded()
        before = {name: value.clone() for name, value in model.model.state_dict().items()}
        measure(model, samples(2), only(Randomisation()), ["gae"])
        after = model.model.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.model.modules())

    def test_stages_go_from_the_top_down_and_stay(self):
        network = small_vit(depth=4)
        batch = replace(batch_of(network, random_images(1), {"x": torch.rand(1, 4, 4)}), model=loaded(network))
        original = dict(network.named_parameters())
        changed = {}
        for stage, other in randomised_models(batch, STAGES, seed=0):
            changed[stage] = {
                name for name, value in other.named_parameters() if not torch.equal(value, original[name])
            }
        assert changed["head"] == {"norm.weight", "norm.bias", "head.weight", "head.bias"}
        for number, stage in enumerate(STAGES[1:5], start=1):
            blocks = {name.split(".")[1] for name in changed[stage] if name.startswith("blocks.")}
            assert blocks == {str(block) for block in range(4 - number, 4)}
            assert changed["head"] <= changed[stage]
        assert changed["everything"] == set(original)

    def test_no_hook_is_put_on_the_model(self, monkeypatch):
        network = small_vit(depth=1)
        batch = replace(batch_of(network, random_images(1), {}), model=loaded(network))
        for kind in ("register_forward_pre_hook", "register_forward_hook"):
            monkeypatch.setattr(nn.Module, kind, lambda *_: pytest.fail("the model was edited"))
        assert [stage for stage, _ in randomised_models(batch, STAGES, seed=0)] == list(STAGES)

    def test_no_model_is_hashed_for_its_maps(self, monkeypatch):
        monkeypatch.setattr(fingerprint, "fingerprint_of", lambda _: pytest.fail("all weights were read"))
        measure(loaded(), samples(2), only(Randomisation()), ["gae"])

    def test_random_weights_are_the_same_every_time_and_other_with_another_seed(self):
        first, again = (measure(loaded(), samples(2), only(Randomisation()), ["gae"]) for _ in range(2))
        assert first == again
        assert first != measure(loaded(), samples(2), only(Randomisation(seed=1)), ["gae"])


@pytest.mark.parametrize(("mean", "spread"), [(0.0, 0.02), (3.0, 2.0), (-1.0, 0.5)])
def test_random_weights_keep_the_mean_and_the_spread_of_each_parameter(mean, spread):
    before = mean + spread * torch.randn(100, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    after = before.clone()
    randomise(after, generator_of("weight", "seed"))
    error = spread / 100  # of the mean of 10,000 numbers; that of their spread is smaller
    assert float(after.mean()) == pytest.approx(float(before.mean()), abs=4 * error)
    assert float(after.std()) == pytest.approx(float(before.std()), abs=4 * error)
    correlation = torch.corrcoef(torch.stack([before.flatten(), after.flatten()]))[0, 1]
    assert abs(float(correlation)) < 4 / 100  # nothing of the old numbers is left


class TestSensitivity:
    """What the network is shown, and the largest change that comes of it."""

    RADIUS, DRAWS = 0.3, 3

    @pytest.fixture
    def found(self):
        network, images, shown = small_vit(depth=1), random_images(1), []
        # What the hook calls belongs to the run, so it is there when the architecture is found.
        hook = network.register_forward_pre_hook(lambda _, given: shown.append(given[0].detach().clone()))
        whole = vitreous.explain(network, images, "gae")
        batch = batch_of(network, images, {"gae": whole.scores["gae"].view(1, 4, 4)})
        shown.clear()
        task = Sensitivity(radius=self.RADIUS, draws=self.DRAWS)
        (row,) = task.measure(replace(batch, model=loaded(network)), list(batch.maps))
        hook.remove()
        assert len(shown) == self.DRAWS
        return network, batch, shown, row["max_sensitivity"]

    def test_noise_is_uniform_to_both_sides_and_new_in_every_draw(self, found):
        _, batch, shown, _ = found
        noise = torch.stack(shown) - batch.images
        assert len(noise.flatten().unique()) == noise.numel()
        for draw in noise:
            assert float(draw.abs().max()) <= self.RADIUS
            # Of 3072 numbers the outermost hundredth is all but never empty, and the mean has this standard error.
            assert float(draw.min()) < -0.99 * self.RADIUS
            assert float(draw.max()) > 0.99 * self.RADIUS
            error = self.RADIUS / 3**0.5 / draw.numel() ** 0.5
            assert abs(float(draw.mean())) < 4 * error
            assert float(draw.std()) == pytest.approx(self.RADIUS / 3**0.5, abs=4 * error)

    def test_the_largest_change_of_all_draws_is_what_counts(self, found):
        network, batch, shown, largest = found
        target = batch.pictures[0].predicted
        map_ = batch.map_of(Case(0, "gae"), target).flatten()
        changes = []
        for images in shown:
            other = vitreous.explain(network, images, "gae", target=target).scores["gae"][0]
            changes.append(float((other - map_).norm() / map_.norm()))
        assert largest == pytest.approx(max(changes), rel=1e-9)  # float64
        assert max(changes) > 1.1 * changes[0]  # only so does it show that later draws count


def test_max_sensitivity_grows_with_the_noise_and_is_nothing_without():
    found = [
        measure(loaded(), samples(1), only(Sensitivity(radius=radius, draws=3)), ["gae"])[0]["max_sensitivity"]
        for radius in (0.0, 0.01, 0.3)
    ]
    # Without noise the same pictures run in other batches.
    assert found[0] == pytest.approx(0, abs=1e-9)
    assert 1e-6 < found[1] < found[2]


def test_concentration_of_known_maps():
    one = torch.zeros(1, 4, 4, dtype=torch.float64)
    one[0, 1, 2] = -3.0
    batch = batch_of(small_vit(), random_images(1), {"one": one, "even": torch.ones(1, 4, 4, dtype=torch.float64)})
    single, even = Concentration().measure(batch, list(batch.maps))
    assert single == pytest.approx({"sparseness": 15 / 16, "complexity": 0.0})
    assert even == pytest.approx({"sparseness": 0.0, "complexity": np.log(16)})


class TestFaithfulness:
    def batch(self):
        """A map that says what the model does without each patch alone, and its opposite."""
        model, images = small_vit(depth=1), random_images(2)
        batch = batch_of(model, images, {"x": torch.zeros(2, 4, 4, dtype=torch.float64)})
        maps = torch.zeros(2, 16, dtype=torch.float64)
        for number in range(2):
            target = batch.pictures[number].predicted
            for patch in range(16):
                erased = images[number].clone()
                row, column = divmod(patch, 4)
                erased[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = -1.0
                maps[number, patch] = batch.logits[number, target] - batch.runner.logits(erased[None])[0, target]
        maps = maps.view(2, 4, 4)
        return batch_of(model, images, {"true": maps, "opposite": -maps, "empty": 0 * maps})

    def test_single_patches_correlate_perfectly(self):
        batch = self.batch()
        task = Faithfulness(percent=1, subsets=20)  # sets of one patch
        rows = dict(zip(batch.maps, task.measure(batch, list(batch.maps)), strict=True))
        for number in range(2):
            found = [rows[Case(number, name)]["faithfulness_correlation"] for name in ("true", "opposite", "empty")]
            assert found == pytest.approx([1.0, -1.0, 0.0], abs=1e-9)

    def test_sets_of_patches_have_the_sum_of_their_scores(self):
        """Against a plain loop, with a map that knows nothing of the model: 30% of 16 patches are sets of four."""
        images = random_images(1)
        scores = torch.rand(1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        batch = batch_of(small_vit(depth=1), images, {"x": scores})
        ((case, _),) = batch.maps.items()
        (row,) = Faithfulness(percent=30, subsets=20).measure(batch, [case])
        target, sums, falls = batch.pictures[0].predicted, [], []
        for drawn in random_subsets(16, 4, 20, seed_of("0", "subsets")):
            erased = images.clone()
            for patch in drawn:
                y, x = (8 * place for place in divmod(int(patch), 4))
                erased[..., y : y + 8, x : x + 8] = -1.0
            sums.append(sum(float(scores[0].flatten()[patch]) for patch in drawn))
            falls.append(float(batch.logits[0, target] - batch.runner.logits(erased)[0, target]))
        expected = np.corrcoef(sums, falls)[0, 1]
        assert row["faithfulness_correlation"] == pytest.approx(expected, abs=1e-9)  # float64, other batches

    def test_the_model_is_asked_once_for_all_methods(self):
        batch = self.batch()
        before = batch.runner.evaluations
        Faithfulness(subsets=20).measure(batch, list(batch.maps))
        assert batch.runner.evaluations - before == 2 * 20


def test_a_run_from_photos_to_rows():
    protocol = find_protocol("sanity")
    rows = measure(loaded(), samples(2), protocol, ["gae", "ixg"])
    assert all(finite(row, columns_of(protocol)) for row in rows)


def test_what_is_drawn_for_a_photo_does_not_depend_on_the_others():
    protocol = find_protocol("sanity")
    photos = samples(3)
    together = {row["image"]: row for row in measure(loaded(), photos, protocol, ["gae"])}
    alone = measure(loaded(), photos[2:], protocol, ["gae"])[0]
    for column in columns_of(protocol):
        assert alone[column] == pytest.approx(together["photo-2"][column], abs=1e-9)  # float64, other batches
