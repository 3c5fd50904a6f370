"""Maps of two scales: the formula from public base maps, averages from runs by hand, refusals and degenerate maps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from timm.models.vision_transformer import Attention
from torch import Tensor, nn

import vitreous
from small_models import PATCHES, golden_model, random_images, small_vit
from vitreous.api.explain import with_runner_up
from vitreous.errors import MethodError, UnsupportedModelError
from vitreous.explanation.explanation import Explanation
from vitreous.methods.gradient import FullGradient
from vitreous.methods.readout import View
from vitreous.methods.spelling import cost_of
from vitreous.methods.twoscale import standardised
from vitreous.tape import GradientNeeds, Needs, Pass
from vitreous.tape.runner import ModelRunner
from vitreous.targets import Probability

GOLDEN = Path(__file__).parents[1] / "golden" / "twoscale.npz"
# Float64: sums of some hundred terms in another order.
SAME = {"rtol": 1e-9, "atol": 1e-9}
TARGET = torch.tensor([1, 3])
FULL, UPPER = "fullgrad_plus:rule=libra", "fullgrad_plus.skipplus.propagate:rule=libra"


def z(map_: Tensor) -> Tensor:
    """One map, written without the code under test."""
    return (map_ - map_.mean()) / map_.std(unbiased=False)


def tokens_halfway(model: nn.Module, images: Tensor) -> Tensor:
    """What enters the middle block, seen by a hook, without the class token."""
    seen: list[Tensor] = []
    block = model.blocks[len(model.blocks) // 2]
    handle = block.register_forward_pre_hook(lambda _module, given: seen.append(given[0].detach()))
    with torch.no_grad():
        model(images)
    handle.remove()
    return seen[0][:, model.num_prefix_tokens :]


def regions_by_hand(model: nn.Module, images: Tensor, spread: Tensor) -> list[Tensor]:
    """S Ā F' of every picture."""
    found = []
    for tokens, scores in zip(tokens_halfway(model, images), spread, strict=True):
        centred = tokens - tokens.mean(0)
        cosines = torch.stack(
            [nn.functional.cosine_similarity(centred[i : i + 1], centred, dim=-1) for i in range(len(centred))]
        )
        weights = (cosines / 0.2).exp()
        found.append((weights / weights.sum(1, keepdim=True)) @ scores)
    return found


def lost_without(model: nn.Module, image: Tensor, target: int, left: Sequence[int] = range(PATCHES)) -> Tensor:
    """H of one image: dp/dO of every block times what O is without a key, found by a softmax without it.

    Patches that are not left are dropped in front of the first block.
    """
    seen: list[Tensor] = []
    projected: list[Tensor] = []
    rows = [0, *(1 + patch for patch in left)]
    handles = [model.blocks[0].register_forward_pre_hook(lambda _module, given: (given[0][:, rows], *given[1:]))]
    for block in model.blocks:
        handles.append(block.attn.qkv.register_forward_hook(lambda _module, _given, output: projected.append(output)))
        handles.append(block.attn.proj.register_forward_pre_hook(lambda _module, given: seen.append(given[0])))
    probability = model(image).softmax(-1)[0, target]
    for handle in handles:
        handle.remove()
    slopes = torch.autograd.grad(probability, seen)
    lost = torch.zeros(len(rows), dtype=image.dtype)
    for qkv, output, slope, block in zip(projected, seen, slopes, model.blocks, strict=True):
        heads = block.attn.num_heads
        query, key, value = qkv[0].detach().reshape(len(rows), 3, heads, -1).permute(1, 2, 0, 3)
        scores = query @ key.mT * block.attn.scale
        for hidden in range(len(rows)):
            left = scores.clone()
            left[:, :, hidden] = -torch.inf
            without = (left.softmax(-1) @ value).transpose(0, 1).flatten(1)
            moved = (slope[0] * (output[0] - without)).sum(-1).detach()
            lost[hidden] += moved.sum() - moved[hidden]
    return lost[1:]


def c(map_: Tensor) -> Tensor:
    """Standardised, cut off and standardised again."""
    return z(z(map_).clamp(-2, 3))


def expected_parts(model: nn.Module, images: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The fine part and the regions of every picture."""
    base = vitreous.explain(model, images, [FULL, UPPER], TARGET).scores
    chances = [Probability(int(number)) for number in TARGET]
    odds = vitreous.explain(model, images, FULL, chances).scores[FULL]
    hidden = [lost_without(model, image[None], int(number)) for image, number in zip(images, TARGET, strict=True)]
    fine = [c(f) + c(o) / 2 + c(h) for f, o, h in zip(base[FULL], odds, hidden, strict=True)]
    alike = regions_by_hand(model, images, base[UPPER])
    return fine, [z(z(spread) + z(region)) for spread, region in zip(base[UPPER], alike, strict=True)]


@pytest.mark.parametrize("region", [0, 1, 2.5])
def test_it_is_the_sum_of_the_standardised_base_maps(region):
    model, images = small_vit(), random_images()
    found = vitreous.explain(model, images, f"twoscale:region={region}", TARGET).scores[f"twoscale:region={region}"]
    for map_, fine, regions in zip(found, *expected_parts(model, images), strict=True):
        torch.testing.assert_close(map_, z(fine + region * regions), **SAME)


def test_zero_is_the_mean_patch():
    scores = vitreous.explain(small_vit(), random_images(), "twoscale").scores["twoscale"]
    torch.testing.assert_close(scores.mean(1), torch.zeros(2, dtype=scores.dtype), **SAME)
    torch.testing.assert_close(scores.std(1, unbiased=False), torch.ones(2, dtype=scores.dtype), **SAME)


def averaged_by_hand(model: nn.Module, image: Tensor, target: int, parts: int, *, best_first: bool) -> Tensor:
    """The mean of the standardised fine scale over runs, by dropping rows of the first block's input, one image."""
    left = list(range(PATCHES))
    seen: dict[int, list[float]] = {patch: [] for patch in left}
    for part in range(parts):
        scores = fine_of_rest(model, image, left, target)
        for patch, score in zip(left, z(scores).tolist(), strict=True):
            seen[patch].append(score)
        ranked = [left[place] for place in scores.argsort(descending=best_first).tolist()]
        left = sorted(ranked[(part + 1) * PATCHES // parts - part * PATCHES // parts :])
    return torch.tensor([sum(scores) / len(scores) for scores in seen.values()], dtype=image.dtype)


def fine_of_rest(model: nn.Module, image: Tensor, left: list[int], target: int) -> Tensor:
    """c(F) + c(O) / 2 + c(H) of a run without patches; that tapes of such runs are right is tested with the tape."""
    depth, passes = len(model.blocks), [Pass("libra", "logit"), Pass("libra", "probability")]
    slopes = GradientNeeds(tokens=frozenset(range(depth)), biases=frozenset(range(depth + 1)))
    needs = Needs(tokens=frozenset(range(depth)), gradients=dict.fromkeys(passes, slopes))
    runner = ModelRunner(model, image)
    read = []
    with runner.record_kept(image, torch.tensor([left]), needs) as tape:
        classes = torch.tensor([target])
        view = View(tape, {each: tape.backward(each, classes, slopes) for each in passes}, classes, runner)
        for each in passes:
            readout = FullGradient().under("libra")
            readout.backward = each
            read.append(readout.read_sum(view, range(depth))[0, 1:])
    return c(read[0]) + c(read[1]) / 2 + c(lost_without(model, image, target, left))


@pytest.mark.parametrize("budget", [2, 5])
def test_the_fine_scale_is_averaged_over_runs_without_the_patches_that_have_gone(budget):
    model, images = small_vit(), random_images()
    spelling = f"refined:budget={budget},region=1"
    found = vitreous.explain(model, images, spelling, TARGET).scores[spelling]
    _, regions = expected_parts(model, images)
    for number, map_ in enumerate(found):
        series = [
            averaged_by_hand(model, images[number : number + 1], int(TARGET[number]), budget, best_first=best_first)
            for best_first in (True, False)
        ]
        torch.testing.assert_close(map_, z(2 * z(series[0] + series[1]) + regions[number]), **SAME)


def test_costs_are_those_of_its_parts():
    assert cost_of("twoscale").label == "several backward"
    assert cost_of("twoscale").one_run
    assert cost_of("refined").label == "many runs"


def test_a_map_of_one_value_is_zero_and_not_noise():
    for value in (0.0, 0.1, 1e30):
        assert not standardised(torch.full((1, 50), value)).any()
        assert not standardised(torch.full((1, 50), value).mul(1 / 3).mul(3)).any()


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("twoscale:region=-1", "region must be"),
        ("twoscale:region=inf", "region"),
        ("refined:budget=1", "budget must be at least 2"),
        ("twoscale.skipplus", "it has no layers"),
        ("refined.propagate", "it has no layers|it propagates already"),
    ],
)
def test_options_that_make_no_sense_are_refused(spelling, message):
    model, images = golden_model()
    with pytest.raises(MethodError, match=message):
        vitreous.explain(model, images, spelling)


@pytest.mark.parametrize("spelling", ["twoscale", "refined", "refined:budget=4,region=0.5"])
def test_golden_numbers(spelling):
    """Numbers of the golden model in float64, so that no change of the formula goes unnoticed."""
    model, images = golden_model()
    with np.load(GOLDEN) as stored:
        found = vitreous.explain(model, images, spelling, topk=2).scores[spelling]
        np.testing.assert_allclose(found, stored[spelling], rtol=0, atol=1e-9)  # scores of order 1


def test_a_model_that_can_only_hide_patches_is_refused_by_name():
    class Distances(Attention):
        def forward(self, tokens: Tensor, **_: object) -> Tensor:
            batch, count, width = tokens.shape
            query, key, value = self.qkv(tokens).reshape(batch, count, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
            places = torch.arange(count).to(tokens)
            bias = -0.2 * (places[:, None] - places).abs()
            output = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
            return self.proj(output.transpose(1, 2).reshape(batch, count, width))

    model, images = small_vit(attn_layer=Distances), random_images()
    assert vitreous.explain(model, images, "twoscale").scores["twoscale"].isfinite().all()
    with pytest.raises(UnsupportedModelError, match="hidden from attention but not dropped"):
        vitreous.explain(model, images, "refined")


class TestRunnerUp:
    """What ``explain`` shows where no methods are named."""

    NAMES = ("decompx.skipplus", "tokentm", "gae", "fullgrad_plus:rule=libra")

    def test_it_is_the_one_whose_ranks_agree_least(self):
        model, images = small_vit(), random_images()
        chosen = vitreous.explain(model, images)
        every = vitreous.explain(model, images, ["twoscale", *self.NAMES]).scores
        agreement = {
            name: np.mean([spearmanr(one, other)[0] for one, other in zip(every["twoscale"], every[name], strict=True)])
            for name in self.NAMES
        }
        least = min(agreement, key=agreement.__getitem__)
        assert chosen.methods == ("twoscale", least)
        assert chosen.provenance["methods"] == list(chosen.methods)
        assert chosen.provenance["runner_up"]["method"] == least
        told = chosen.provenance["runner_up"]["agreement"]
        assert told == {name: pytest.approx(value, abs=1e-4) for name, value in agreement.items()}  # four digits
        for name in chosen.methods:
            torch.testing.assert_close(chosen.scores[name], every[name], **SAME)

    @staticmethod
    def explanation(**maps: list[float]) -> Explanation:
        scores = {name.replace("_", "."): torch.tensor([values]) for name, values in maps.items()}
        return Explanation(
            scores=scores,
            grid=(1, 4),
            target=torch.tensor([0]),
            logits=torch.zeros(1, 2),
            image_size=(8, 8),
            signed=dict.fromkeys(scores, False),
        )

    def test_equal_ones_go_by_their_place_and_maps_that_are_not_finite_come_last(self):
        up, down, broken = [1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0], [1.0, float("nan"), 3.0, 4.0]
        found = with_runner_up(self.explanation(twoscale=up, decompx_skipplus=broken, tokentm=down, gae=down))
        assert found.methods == ("twoscale", "tokentm")
        assert found.provenance["runner_up"]["agreement"] == {"decompx.skipplus": None, "tokentm": -1, "gae": -1}
        found = with_runner_up(self.explanation(twoscale=up, tokentm=up, gradtoken=down))
        assert found.methods == ("twoscale", "tokentm")  # gradtoken is no runner-up

    def test_what_a_model_does_not_allow_is_replaced(self):
        up, down = [1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]
        assert with_runner_up(self.explanation(gradtoken=up)).methods == ("gradtoken",)
        assert with_runner_up(self.explanation(tokentm=up, gradtoken=down)).methods == ("tokentm", "gradtoken")
