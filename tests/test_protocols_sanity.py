"""The sanity protocol: maps that cannot depend on randomised parts do not change, and the model never does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from small_data import finite, loaded, samples
from small_models import random_images, small_vit
from test_protocols_perturbation import batch_of
from vitreous.benchmark.measuring import columns_of, measure
from vitreous.benchmark.tasks.batch import Case
from vitreous.benchmark.tasks.randomising import STAGES, randomised_models
from vitreous.benchmark.tasks.sanity import Concentration, Faithfulness, Randomisation, Sensitivity
from vitreous.protocols import find_protocol
from vitreous.protocols.protocol import Protocol


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

    def test_random_weights_are_the_same_every_time_and_other_with_another_seed(self):
        first, again = (measure(loaded(), samples(2), only(Randomisation()), ["gae"]) for _ in range(2))
        assert first == again
        assert first != measure(loaded(), samples(2), only(Randomisation(seed=1)), ["gae"])


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
                maps[number, patch] = batch.logits[number, target] - batch.subject.logits(erased[None])[0, target]
        maps = maps.view(2, 4, 4)
        return batch_of(model, images, {"true": maps, "opposite": -maps, "empty": 0 * maps})

    def test_single_patches_correlate_perfectly(self):
        batch = self.batch()
        task = Faithfulness(percent=1, subsets=20)  # sets of one patch
        rows = dict(zip(batch.maps, task.measure(batch, list(batch.maps)), strict=True))
        for number in range(2):
            found = [rows[Case(number, name)]["faithfulness_correlation"] for name in ("true", "opposite", "empty")]
            assert found == pytest.approx([1.0, -1.0, 0.0], abs=1e-9)

    def test_the_model_is_asked_once_for_all_methods(self):
        batch = self.batch()
        before = batch.subject.evaluations
        Faithfulness(subsets=20).measure(batch, list(batch.maps))
        assert batch.subject.evaluations - before == 2 * 20 + (0 if batch.subject._layout else 1)


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
