"""Controls and ceilings: closed forms, what they depend on, and what a greedy search finds."""

from __future__ import annotations

import pytest
import torch
from timm.models.vision_transformer import Block
from torch import nn

import vitreous
from small_models import PATCHES, golden_model, random_images, small_vit
from small_reviews import text_model
from vitreous.errors import MethodError, UnsupportedModelError
from vitreous.methods import list_controls, list_methods, method_info
from vitreous.methods.spelling import cost_of
from vitreous.tape.runner import ModelRunner

CONTROLS = ("random", "centre", "edges")


def maps_of(images, *methods, model=None, **options):
    return vitreous.explain(model or small_vit(), images, list(methods), **options).scores


class TestTheList:
    def test_they_are_listed_apart_and_are_no_methods(self):
        assert [info.name for info in list_controls()] == [*CONTROLS, "oracle", "mda", "lima"]
        assert not {info.name for info in list_methods()} & {info.name for info in list_controls()}

    def test_controls_take_no_run_of_their_own_and_the_oracle_many(self):
        assert all(cost_of(name).one_run and not cost_of(name).passes for name in CONTROLS)
        assert cost_of("oracle").label == "many runs"

    def test_they_know_what_they_are(self):
        assert method_info("random").is_control
        assert method_info("oracle").is_control
        assert not method_info("gae").is_control


class TestRandom:
    def test_the_map_depends_on_the_image_alone(self):
        images = random_images(3)
        together = maps_of(images, "random")["random"]
        alone = maps_of(images[1:2], "random", model=small_vit(seed=5))["random"]
        assert torch.equal(together[1], alone[0])
        assert not torch.equal(together[0], together[1])

    def test_another_seed_is_another_map_and_a_class_is_not(self):
        images = random_images(1)
        found = maps_of(images, "random", "random:seed=1", target=[[0, 3]])
        assert torch.equal(found["random"][0, 0], found["random"][0, 1])
        assert not torch.equal(found["random"], found["random:seed=1"])

    def test_a_pixel_more_is_another_map(self):
        images = random_images(1)
        changed = images.clone()
        changed[0, 0, 0, 0] += 1
        assert not torch.equal(maps_of(images, "random")["random"], maps_of(changed, "random")["random"])

    def test_texts_have_an_order_whatever_padding_they_get(self):
        model = text_model()
        alone = vitreous.explain_text(model, "a good film", "random")
        together = vitreous.explain_text(model, ["a good film", "a film that is not very good"], "random")
        one, other = alone.scores["random"][0], together.scores["random"][0]
        assert torch.equal(one, other[: len(one)])


class TestCentre:
    def test_it_is_the_gaussian(self):
        found = maps_of(random_images(2), "centre:spread=0.5")["centre:spread=0.5"]
        places = (torch.arange(4, dtype=torch.float64) + 0.5) / 4 - 0.5
        line = torch.exp(-(places**2) / (2 * 0.5**2))
        assert torch.allclose(found, (line[:, None] * line).flatten().expand(2, -1), rtol=1e-12, atol=0)

    def test_a_spread_of_nothing_is_refused(self):
        with pytest.raises(MethodError, match="spread must be above 0"):
            maps_of(random_images(1), "centre:spread=0")


class TestEdges:
    def test_a_step_is_found_where_it_is(self):
        images = torch.zeros(1, 3, 32, 32, dtype=torch.float64)
        images[..., 12:] = 1.0  # inside of the second column of patches
        found = maps_of(images, "edges")["edges"].view(4, 4)
        # The Sobel gradient of a unit step is 1/2 in the two columns beside it, of the eight that a patch has.
        expected = torch.tensor([0.0, 2 * 0.5 / 8, 0.0, 0.0], dtype=torch.float64).expand(4, -1)
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)

    def test_a_plain_image_has_none(self):
        assert not maps_of(torch.ones(1, 3, 32, 32, dtype=torch.float64), "edges")["edges"].any()


class TestOracle:
    @staticmethod
    def best_first_drop(model, images, target):
        """The patch whose loss lowers the class most, by trying all."""
        runner = ModelRunner(model, images)
        kept = torch.stack([torch.tensor([p for p in range(PATCHES) if p != gone]) for gone in range(PATCHES)])
        logits = runner.logits_of_kept(images.expand(PATCHES, -1, -1, -1), kept)
        return int(logits.log_softmax(dim=1)[:, target].argmin())

    def test_the_first_patch_is_that_of_a_search_over_all(self):
        model, images = golden_model()
        images = images[:1]
        order = "oracle:steps=16,order=deletion"
        found = maps_of(images, order, model=model, target=3)[order][0]
        assert int(found.argmax()) == self.best_first_drop(model, images, 3)
        assert sorted(found.tolist()) == pytest.approx(torch.linspace(0, 1, PATCHES).tolist())

    def test_it_is_a_ceiling_of_what_it_searches(self):
        """No control and no method of these has a lower mean probability while its highest patches are dropped."""
        model, images = golden_model()
        methods = ["oracle:steps=16,order=deletion", "random", "centre", "edges", "gae", "ixg.plus"]
        explanation = vitreous.explain(model, images, methods)
        runner = ModelRunner(model, images)
        means = {}
        for method, scores in explanation.scores.items():
            order = scores.argsort(dim=1, descending=True, stable=True)
            along = [runner.logits_of_kept(images, order[:, gone:]) for gone in range(1, PATCHES)]
            likely = torch.stack(along).softmax(dim=-1)
            chosen = likely.gather(2, explanation.target[None, :, None].expand(len(along), -1, 1))
            means[method] = float(chosen.mean())
        assert min(means, key=means.get) == methods[0]

    def test_insertion_keeps_what_matters_to_the_last(self):
        model, images = golden_model()
        orders = [f"oracle:steps=16,order={order}" for order in ("deletion", "insertion")]
        found = maps_of(images, *orders, "oracle:steps=16", model=model)
        both = sum(found[order] ** 3 for order in orders) / 2
        assert torch.allclose(found["oracle:steps=16"], both, rtol=1e-12, atol=0)

    def test_it_searches_for_every_class(self):
        images = random_images(1)
        found = maps_of(images, "oracle:steps=4", target=[[0, 3]])["oracle:steps=4"]
        assert not torch.equal(found[0, 0], found[0, 1])

    @pytest.mark.parametrize(("steps", "evaluations"), [(1, 16), (4, 16 + 12 + 8 + 4), (16, sum(range(2, 17)))])
    def test_a_search_costs_what_its_option_says(self, monkeypatch, steps, evaluations):
        counted = []
        original = ModelRunner.logits_of_kept
        monkeypatch.setattr(
            ModelRunner,
            "logits_of_kept",
            lambda self, images, kept: (counted.append(len(kept)), original(self, images, kept))[1],
        )
        spelling = f"oracle:steps={steps},order=deletion"
        maps_of(random_images(1), spelling)
        assert sum(counted) == evaluations

    def test_a_model_that_cannot_drop_is_refused(self):
        with pytest.raises(UnsupportedModelError, match="by=paint"):
            maps_of(random_images(1), "oracle", model=small_vit(block_fn=Neighbours))


class Neighbours(Block):
    """A block that mixes neighbours by a convolution, so that no patch can be dropped."""

    def __init__(self, dim, *args, **options):
        super().__init__(dim, *args, **options)
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, tokens, **options):
        tokens = super().forward(tokens, **options)
        mixed = self.conv(tokens[:, 1:].mT.unflatten(-1, (4, 4))).flatten(2)
        return torch.cat((tokens[:, :1], tokens[:, 1:] + mixed.mT), dim=1)
