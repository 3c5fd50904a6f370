"""Unusual models are explained rightly, or refused in one sentence that says why; never a silently wrong map."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from checks import AGREES, CLASSES, assert_nothing_listens, randomised
from hooked import block_inputs_times_gradients
from torch import Tensor, nn

import vitreous
from few_evaluations import with_few
from small_data import loaded
from vitreous.errors import InputError, UnsupportedModelError, VitreousError
from vitreous.evaluation.runner.prepare_run import choose_methods
from vitreous.methods import list_methods
from vitreous.methods.spelling import parse
from whole_maps import all_token_scores

timm = pytest.importorskip("timm", reason="timm is not installed")

from timm.models.mlp_mixer import MlpMixer  # noqa: E402
from timm.models.vision_transformer import Attention, ParallelThingsBlock  # noqa: E402

METHODS = [info.name for info in list_methods()]
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 4, "num_heads": 4, "num_classes": CLASSES}


def vit(**options: object) -> nn.Module:
    return timm.create_model("vit_base_patch16_224", **{**VIT, **options})


class BetweenChannels(Attention):
    """Cross-covariance attention: the matrix is between channels, not tokens."""

    def forward(self, tokens: Tensor, **_: object) -> Tensor:
        query, key, value = self.qkv(tokens).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 4, 1)
        weights = (query @ key.mT * self.scale).softmax(-1)
        return self.proj((weights @ value).permute(0, 3, 1, 2).flatten(2))


class Unattended(nn.Module):
    """A tower whose blocks' output is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.vit, self.head = vit(), nn.Linear(3, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        self.vit(images)
        return self.head(images.mean(dim=(2, 3)))


class ClassTokenLast(nn.Module):
    """Nothing says where a class token stands but the token that the head reads."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = vit(class_token=False, global_pool="avg")
        self.cls_token = nn.Parameter(torch.zeros(1, 1, VIT["embed_dim"]))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.vit.patch_embed(images) + self.vit.pos_embed
        tokens = torch.cat((patches, self.cls_token.expand(len(patches), -1, -1)), dim=1)
        return self.vit.head(self.vit.blocks(tokens)[:, -1])


class Flipped(nn.Module):
    """Test-time augmentation in one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = vit()

    def forward(self, images: Tensor) -> Tensor:
        first, second = self.vit(torch.cat((images, images.flip(-1)))).chunk(2)
        return (first + second) / 2


class Joined(nn.Module):
    """All pictures of a batch in one row of tokens, as Pixtral has them."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = vit(class_token=False, global_pool="avg")

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.vit._pos_embed(self.vit.patch_embed(images))
        joined = self.vit.blocks(tokens.flatten(0, 1)[None])
        return self.vit.forward_head(self.vit.norm(joined).view_as(tokens))


@pytest.mark.parametrize(("build", "runs"), [(Flipped, "4 x 17 x 48"), (Joined, "1 x 32 x 48")])
@pytest.mark.parametrize("method", ["gae", "rollout", "ixg", "occlusion"])
def test_another_batch_inside_is_not_said_to_be_windows(build, runs: str, method: str) -> None:
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with pytest.raises(UnsupportedModelError, match=f"of shape {runs} .*joined, repeated or split") as refusal:
        vitreous.explain(randomised(build()), images, method)
    assert "no method" not in str(refusal.value)
    assert "windowed" not in str(refusal.value)


def test_pictures_that_would_be_joined_are_explained_one_at_a_time() -> None:
    """As the refusal advises; afterwards two at once are refused as before."""
    model, methods = randomised(Joined()), ["gae", "rollout", "ixg", "decompx", "tokentm"]
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    found, expected = (vitreous.explain(each, images[:1], methods, 1) for each in (model, model.vit))
    assert found.grid == (4, 4)
    for method in methods:
        torch.testing.assert_close(found.scores[method], expected.scores[method], **AGREES)
    with pytest.raises(UnsupportedModelError, match="one image at a time"):
        vitreous.explain(model, images, "gae")


CONVNEXT = {"depths": (1, 1, 4, 1), "dims": (8, 8, 16, 16), "num_classes": CLASSES}


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        pytest.param(Unattended, "does not depend on that block|has no gradient", id="unattended"),
    ],
)
def test_no_method_serves_models_whose_head_reads_no_known_token(build, reason: str) -> None:
    model = randomised(build())
    for method in METHODS:
        with pytest.raises(UnsupportedModelError, match=reason):
            vitreous.explain(model, torch.randn(1, 3, 32, 32, dtype=torch.float64), method)
        assert_nothing_listens()


# What reads A, with some gradient, rule or value or none.
NEEDS_A = ("raw_attention", "rollout", "gae", "gradtoken", "tokentm", "globenc", "legrad", "atman", "tam")


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        pytest.param(
            lambda: timm.create_model("resnet26", num_classes=CLASSES, layers=(1, 1, 4, 1), channels=(8, 8, 8, 8)),
            "its blocks do not attend",
            id="resnet",
        ),
        pytest.param(lambda: timm.create_model("convnext_atto", **CONVNEXT), "its blocks do not attend", id="convnext"),
        pytest.param(lambda: vit(attn_layer=BetweenChannels), "block 0 is between channels", id="between_channels"),
    ],
)
def test_methods_that_read_attention_need_one_between_all_patches(build, reason: str) -> None:
    model, images = randomised(build()), torch.randn(1, 3, 32, 32, dtype=torch.float64)
    for method in NEEDS_A:
        with pytest.raises(UnsupportedModelError, match=reason) as refusal:
            vitreous.explain(model, images, method)
        assert_nothing_listens()
        assert {"ixg", "gradient", "cat", "gradcam", "occlusion"} <= set(served(str(refusal.value)))
        assert not set(NEEDS_A) & set(served(str(refusal.value)))


@pytest.mark.parametrize("block", [{"block_fn": ParallelThingsBlock}, {"attn_layer": BetweenChannels}])
def test_their_streams_are_explained(block: dict[str, object]) -> None:
    model = randomised(vit(**block))
    images, target = torch.randn(2, 3, 32, 32, dtype=torch.float64), torch.tensor([0, 4])
    methods = [f"ixg:layer={layer}" for layer in range(4)]
    found = vitreous.explain(model, images, methods, target).scores
    for method, scores in zip(methods, block_inputs_times_gradients(model, "blocks", images, target), strict=True):
        torch.testing.assert_close(found[method], scores[:, 1:], **AGREES)
    for layer in range(4):
        if "block_fn" in block:
            whole, logits = all_token_scores(model, images, f"fullgrad:rule=libra,layer={layer}", target)
            torch.testing.assert_close(whole.sum(dim=1), logits, **AGREES)


@cache
def unpooled() -> nn.Module:
    return vit(global_pool="")


@pytest.mark.parametrize("method", METHODS)
def test_unpooled_output_is_refused(method: str) -> None:
    with pytest.raises(InputError, match=r"class scores of shape \(batch, classes\), but returned \(1, 17, 5\)"):
        vitreous.explain(unpooled(), torch.randn(1, 3, 32, 32), method)
    assert_nothing_listens()


def reads_attention(method: str) -> bool:
    return parse(method).needs(4).uses_attention


def notes_biases(method: str) -> bool:
    return bool(parse(method).needs(4).biases)


def served(message: str) -> list[str]:
    """The methods that a refusal names."""
    return message.partition("Methods that work on it: ")[2].split(", ")


# Methods that only ask the model again.
ASKING = ("occlusion", "pami", "rise", "hsic", "lime", "kernel_shap", "vitcx")


def mixer() -> nn.Module:
    return MlpMixer(img_size=32, patch_size=8, embed_dim=48, num_blocks=4, num_classes=CLASSES)


@cache
def one_mixer() -> nn.Module:
    """The same one for every method: its architecture is looked for once."""
    return mixer()


def test_relevance_that_was_not_followed_is_not_denied() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        vitreous.explain(mixer(), torch.randn(1, 3, 32, 32, dtype=torch.float64), "gae")
    untried = str(caught.value).split("Methods that were not tried: ")[1].split(". ")[0].split(", ")
    assert "lrp" in untried
    assert "transattr" not in untried  # it reads attention, of which there is none


@pytest.mark.parametrize("method", METHODS)
def test_a_mixer_has_no_attention_and_is_told_what_does_work(method: str) -> None:
    images = torch.randn(1, 3, 32, 32)
    if method == "tis":  # it drops tokens, which takes attention, unless it is told to paint
        with pytest.raises(UnsupportedModelError, match=r"by=paint"):
            vitreous.explain(one_mixer(), images, with_few(method))
        method = "tis:by=paint"
    if not reads_attention(method):
        assert vitreous.explain(one_mixer(), images, with_few(method)).scores[with_few(method)].isfinite().all()
        return
    with pytest.raises(UnsupportedModelError, match="its blocks do not attend") as refusal:
        vitreous.explain(one_mixer(), images, method)
    assert {"gradient", "ixg", "cat", "decompx", "gradcam", "attnlrp"} <= set(served(str(refusal.value)))
    assert not {"rollout", "gae", "tokentm"} & set(served(str(refusal.value)))


def test_of_the_usual_methods_those_that_a_model_allows_are_used() -> None:
    images = torch.randn(1, 3, 32, 32)
    refused = "".join(f"{name} is left out: its blocks do not attend; " for name in ("twoscale", "tokentm", "gae"))
    with pytest.warns(UserWarning, match=refused) as told:
        explanation = vitreous.explain(mixer(), images)
    assert explanation.methods == ("decompx.skipplus", "fullgrad_plus:rule=libra")
    assert [warning.filename for warning in told] == [__file__]


def test_of_a_group_of_methods_all_refusals_are_told_in_few_runs() -> None:
    model = loaded(mixer())
    runs, notices = [], []
    model.model.register_forward_hook(lambda *_: runs.append(1))
    chosen = choose_methods(["white-box"], model, list, notices.append)
    assert {"ixg", "attnlrp"} <= set(chosen)
    assert "gae is left out: its blocks do not attend" in notices
    assert not [notice for notice in notices if "Methods that" in notice]
    assert len(notices) > 5
    assert len(runs) <= 5  # to see the architecture and where patches stay; all of them, then those that are left


@pytest.mark.parametrize("method", ASKING)
def test_a_mixer_can_be_asked_again(method: str) -> None:
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    scores = vitreous.explain(randomised(mixer()), images, method).scores[method]
    assert (scores.std(dim=1) > 0).all()


def test_a_mixer_is_explained_by_its_stream() -> None:
    model = randomised(mixer())
    images, target = torch.randn(2, 3, 32, 32, dtype=torch.float64), torch.tensor([0, 4])
    explanation = vitreous.explain(model, images, ["ixg", "cat"], target)
    expected = block_inputs_times_gradients(model, "blocks", images, target)
    assert explanation.grid == (4, 4)
    # Float64, the same operations through autograd.
    torch.testing.assert_close(explanation.scores["ixg"], expected[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(explanation.scores["cat"], sum(expected), rtol=1e-10, atol=1e-12)


def test_every_refusal_is_an_error_of_this_package() -> None:
    assert issubclass(UnsupportedModelError, VitreousError)
    assert issubclass(InputError, VitreousError)


class Pruned(nn.Module):
    """Leaves out the last patches in front of one of its blocks."""

    def __init__(self, before: int) -> None:
        super().__init__()
        self.vit, self.before = vit(), before

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.vit._pos_embed(self.vit.patch_embed(images))
        for layer, block in enumerate(self.vit.blocks):
            tokens = block(tokens[:, :11] if layer == self.before else tokens)
        return self.vit.forward_head(self.vit.norm(tokens[:, :11]))


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (0, r"makes 4 x 4 patches of a picture, but its blocks have 11 tokens"),
        (2, r"makes 4 x 4 patches of a picture, but its blocks have 11 tokens"),
    ],
)
def test_tokens_that_are_dropped_on_the_way_have_no_place_in_a_map(before: int, reason: str) -> None:
    model = randomised(Pruned(before))
    for method in METHODS:
        with pytest.raises(UnsupportedModelError, match=reason):
            vitreous.explain(model, torch.randn(1, 3, 32, 32, dtype=torch.float64), method)
        assert_nothing_listens()


class LooksTwice(nn.Module):
    """A second convolution over the picture, which makes no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.vit, self.glance = vit(), nn.Conv2d(3, VIT["embed_dim"], 16, 16)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.vit._pos_embed(self.vit.patch_embed(images))
        seen = self.glance(images).mean(dim=(2, 3))
        return self.vit.forward_head(self.vit.norm(self.vit.blocks(tokens)) + seen[:, None])


class PooledStem(nn.Module):
    """A stem that filters the picture, convolves it with a stride and pools what it found to the grid of patches."""

    def __init__(self, pooling: nn.Module) -> None:
        super().__init__()
        self.filter, self.conv = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, VIT["embed_dim"], 3, stride=4, padding=1)
        self.pooling = pooling

    def forward(self, images: Tensor) -> Tensor:
        return self.pooling(self.conv(self.filter(images))).flatten(2).mT


@pytest.mark.parametrize("pooling", [nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d((4, 4))])
def test_the_grid_is_the_one_that_the_tokens_come_from(pooling: nn.Module) -> None:
    images, target = torch.randn(2, 3, 32, 32, dtype=torch.float64), torch.tensor([0, 4])
    stem = vit()
    stem.patch_embed = PooledStem(pooling)
    for model in (LooksTwice(), stem):
        explanation = vitreous.explain(randomised(model), images, ["ixg", "gae", "attnlrp"], target)
        assert explanation.grid == (4, 4)
        expected = block_inputs_times_gradients(model, "vit.blocks" if model is not stem else "blocks", images, target)
        # Float64, the same operations through autograd.
        torch.testing.assert_close(explanation.scores["ixg"], expected[0][:, 1:], rtol=1e-10, atol=1e-12)


def test_pictures_whose_border_is_in_no_patch_are_refused() -> None:
    """Painted patches and enlarged maps would lie over other pixels than the model's patches do."""

    class AnySize(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vit, self.embed = vit(class_token=False, global_pool="avg"), nn.Conv2d(3, VIT["embed_dim"], 14, 14)

        def forward(self, images: Tensor) -> Tensor:
            tokens = self.vit.blocks(self.embed(images).flatten(2).mT)
            return self.vit.forward_head(self.vit.norm(tokens))

    model = randomised(AnySize())
    for method in METHODS:
        with pytest.raises(InputError, match=r"AnySize sees only 42 x 56 of the 52 x 56 pixels .* patches of 14 x 14"):
            vitreous.explain(model, torch.randn(1, 3, 52, 56, dtype=torch.float64), method)
    assert vitreous.explain(model, torch.randn(1, 3, 42, 56, dtype=torch.float64), "occlusion").grid == (3, 4)
