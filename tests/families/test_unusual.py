"""Models that are written in unusual ways: their maps are those of the same function in the usual way, or of hooks."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from checks import AGREES, assert_nothing_listens, randomised
from hooked import Reference, attention_matrix, gathered, split_heads
from torch import Tensor, nn

import vitreous
from few_evaluations import with_few
from vitreous.errors import UnsupportedModelError
from vitreous.methods import list_methods
from whole_maps import all_token_scores

timm = pytest.importorskip("timm", reason="timm is not installed")

from test_unsupported import vit  # noqa: E402
from timm.models.vision_transformer import Attention, Block, ParallelScalingBlock  # noqa: E402

METHODS = [info.name for info in list_methods()]


class ChangesItsInput(Block):
    """Sums that overwrite what stood in front of the block."""

    def forward(self, tokens: Tensor, **_: object) -> Tensor:
        tokens += self.attn(self.norm1(tokens))
        tokens += self.mlp(self.norm2(tokens))
        return tokens


class Assigns(Block):
    """Assigns to some tokens."""

    def forward(self, tokens: Tensor, **options: object) -> Tensor:
        tokens = super().forward(tokens, **options)
        tokens[:, 1:] = 1.1 * tokens[:, 1:]
        return tokens


class Joins(Block):
    def forward(self, tokens: Tensor, **options: object) -> Tensor:
        tokens = super().forward(tokens, **options)
        return torch.cat((tokens[:, :1], 1.1 * tokens[:, 1:]), dim=1)


class Clips(Block):
    """An activation behind the last sum, in place or not."""

    in_place = False

    def forward(self, tokens: Tensor, **options: object) -> Tensor:
        return nn.functional.leaky_relu(super().forward(tokens, **options), 0.3, inplace=self.in_place)


class ClipsInPlace(Clips):
    in_place = True


@cache
def overwriting_and_ordinary(block: type[nn.Module], same: type[nn.Module]) -> tuple[nn.Module, nn.Module, Tensor]:
    """Two models of the same weights and images, the same for every method: their architectures are found once."""
    torch.manual_seed(0)
    model, images = randomised(vit(block_fn=block)), torch.randn(2, 3, 32, 32).double()
    ordinary = vit(block_fn=same).double().eval()
    ordinary.load_state_dict(model.state_dict())
    return model, ordinary, images


@pytest.mark.parametrize(
    "method", ["ixg", "gae", "decompx:layer=2", "attnlrp", "globenc", "cat", "smoothgrad", "atman"]
)
@pytest.mark.parametrize(("block", "same"), [(ChangesItsInput, Block), (Assigns, Joins), (ClipsInPlace, Clips)])
def test_tokens_that_are_overwritten_are_not_taken_for_those_before(block, same, method) -> None:
    model, ordinary, images = overwriting_and_ordinary(block, same)
    found, expected = (vitreous.explain(each, images, method, 1) for each in (model, ordinary))
    torch.testing.assert_close(found.logits, model(images).detach(), **AGREES)
    torch.testing.assert_close(found.scores[method], expected.scores[method], **AGREES)


class SumsThroughAView(Block):
    def forward(self, tokens: Tensor, **_: object) -> Tensor:
        rows = tokens.view(-1, tokens.shape[-1])
        rows += self.attn(self.norm1(tokens)).view_as(rows)
        return tokens + self.mlp(self.norm2(tokens))


class ScalesAView(Block):
    def forward(self, tokens: Tensor, **options: object) -> Tensor:
        tokens = super().forward(tokens, **options)
        tokens[:, 1:] *= 1.1
        return tokens


@pytest.mark.parametrize("block", [SumsThroughAView, ScalesAView])
def test_tokens_that_are_overwritten_through_a_view_are_refused(block) -> None:
    model, images = randomised(vit(block_fn=block)), torch.randn(2, 3, 32, 32).double()
    for method in ("ixg", "gae", "occlusion"):
        with pytest.raises(UnsupportedModelError, match="changes tokens in place through a view"):
            vitreous.explain(model, images, method, 1)
        assert_nothing_listens()


class MixingHeads(Attention):
    """Talking heads: a linear map over heads on either side of the softmax; A is kept as ``Reference`` asks."""

    frozen, kept = False, False

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        self.before, self.after = nn.Linear(self.num_heads, self.num_heads), nn.Linear(self.num_heads, self.num_heads)

    def forward(self, tokens: Tensor, **_: object) -> Tensor:
        query, key, value = self.qkv(tokens).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        scores = self.before((query * self.scale @ key.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        weights = self.after(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if self.kept:
            self.matrix, self.head_values = weights, value
        output = ((weights.detach() if self.frozen else weights) @ value).transpose(1, 2).flatten(2)
        if self.kept:
            self.output = output
        return self.proj(output)


class Einsum(Attention):
    """Ordinary attention, spelled by einsum."""

    def forward(self, tokens: Tensor, **_: object) -> Tensor:
        query, key, value = self.qkv(tokens).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        weights = torch.einsum("bhic,bhjc->bhij", query * self.scale, key).softmax(-1)
        return self.proj(torch.einsum("bhij,bhjc->bihc", weights, value).flatten(2))


class NormsBehind(Block):
    """Post-norm under the names that pre-norm blocks use."""

    def forward(self, tokens: Tensor, **_: object) -> Tensor:
        tokens = self.norm1(tokens + self.attn(tokens))
        return self.norm2(tokens + self.mlp(tokens))


class PartsInLists(nn.Module):
    """The parts of each block in a list or dictionary: nothing is called with a block's tokens."""

    def __init__(self, container: type[nn.Module]) -> None:
        super().__init__()
        self.vit, pairs = vit(), []
        for block in self.vit.blocks:
            parts = {"attn": nn.Sequential(block.norm1, block.attn), "mlp": nn.Sequential(block.norm2, block.mlp)}
            pairs.append(container(parts.values() if container is nn.ModuleList else parts))
        self.vit.blocks = nn.ModuleList(pairs)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.vit._pos_embed(self.vit.patch_embed(images))
        for attention, feed_forward in (pair.children() for pair in self.vit.blocks):
            tokens = attention(tokens) + tokens
            tokens = feed_forward(tokens) + tokens
        return self.vit.forward_head(self.vit.norm(tokens))


class LeavesEarly(nn.Module):
    """Does not run its last block."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = vit()

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.vit.blocks[:3](self.vit._pos_embed(self.vit.patch_embed(images)))
        return self.vit.forward_head(self.vit.norm(tokens))


SAME_AS_VIT = ["rollout", "gae", "gradtoken", "tokentm", "globenc", "alti", "ixg", "decompx", "attnlrp", "lrp"]


@pytest.mark.parametrize(
    "build", [lambda: PartsInLists(nn.ModuleList), lambda: PartsInLists(nn.ModuleDict), LeavesEarly]
)
def test_blocks_are_what_runs(build) -> None:
    """Wherever parts are kept, and of a list only those that are used."""
    model = randomised(build())
    blocks = 3 if isinstance(model, LeavesEarly) else 4
    ordinary = vit(depth=blocks).double().eval()
    names = {"0.0": "norm1", "0.1": "attn", "1.0": "norm2", "1.1": "mlp", "attn.0": "norm1", "attn.1": "attn"}
    names |= {"mlp.0": "norm2", "mlp.1": "mlp"}
    weights = {}
    for name, weight in model.vit.state_dict().items():
        parts = name.split(".")
        inside = names.get(".".join(parts[2:4])) if parts[0] == "blocks" and blocks == 4 else None
        weights[name if inside is None else ".".join([*parts[:2], inside, *parts[4:]])] = weight
    ordinary.load_state_dict(weights, strict=blocks == 4)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    found, expected = (vitreous.explain(each, images, SAME_AS_VIT, 1) for each in (model, ordinary))
    torch.testing.assert_close(found.logits, expected.logits, **AGREES)
    for method in SAME_AS_VIT:
        torch.testing.assert_close(found.scores[method], expected.scores[method], **AGREES)


class WrittenOutParallel(nn.Module):
    """timm's ParallelScalingBlock with the attention matrix left on it, and held constant or not."""

    def __init__(self, block: ParallelScalingBlock, *, frozen: bool) -> None:
        super().__init__()
        self.block, self.frozen = block, frozen

    def forward(self, tokens: Tensor) -> Tensor:
        own = self.block
        hidden, *parts = own.in_proj(own.in_norm(tokens)).split(own.in_split, dim=-1)
        query, key, value = (split_heads(part, own.num_heads) for part in parts)
        self.matrix = matrix = attention_matrix(query, key, own.scale, None)
        attended = gathered(matrix.detach() if self.frozen else matrix, value)
        return tokens + own.attn_out_proj(attended) + own.mlp_out_proj(own.mlp_act(hidden))


@pytest.mark.parametrize("fused", [True, False])
def test_attention_inside_a_block_without_attention_module_is_seen(*, fused: bool) -> None:
    model = randomised(vit(block_fn=ParallelScalingBlock))
    for block in model.blocks:
        block.fused_attn = fused
    images, target = torch.randn(2, 3, 32, 32, dtype=torch.float64), torch.tensor([0, 4])
    methods = [f"decompx:layer={layer}" for layer in range(4)]
    scores = vitreous.explain(model, images, methods, target).scores
    plain, frozen = (Reference(model, "blocks", frozen=held) for held in (False, True))
    for reference, held in ((plain, False), (frozen, True)):
        blocks = (WrittenOutParallel(block, frozen=held) for block in reference.model.blocks)
        reference.model.blocks = nn.Sequential(*blocks)
        reference.blocks = list(reference.model.blocks)
    expected = frozen.input_times_gradient(images, target)
    for method, layer in zip(methods, expected, strict=True):
        torch.testing.assert_close(scores[method], layer[:, 1:], **AGREES)
    scores = vitreous.explain(model, images, ["rollout", "gae"], target).scores
    torch.testing.assert_close(scores["rollout"], plain.rollout(images, [0])[:, 1:], **AGREES)
    torch.testing.assert_close(scores["gae"], plain.gae(images, target, [0])[:, 1:], **AGREES)
    with pytest.raises(UnsupportedModelError, match="block 0 adds attention and feed-forward part at once"):
        vitreous.explain(model, images, "tokentm")
    whole, logits = all_token_scores(model, images, "fullgrad:rule=libra", target)
    torch.testing.assert_close(whole.sum(dim=1), logits, **AGREES)


@cache
def by_einsum_and_ordinary() -> tuple[nn.Module, nn.Module, Tensor]:
    """Two models of the same weights and images, the same for every method: their architectures are found once."""
    torch.manual_seed(0)
    model = randomised(vit(attn_layer=Einsum))
    ordinary = vit().double().eval()
    ordinary.load_state_dict(model.state_dict())
    for block in ordinary.blocks:
        block.attn.fused_attn = False
    return model, ordinary, torch.randn(2, 3, 32, 32, dtype=torch.float64)


@pytest.mark.parametrize("method", METHODS)
def test_attention_by_einsum_gives_the_maps_of_ordinary_attention(method: str) -> None:
    (model, ordinary, images), method = by_einsum_and_ordinary(), with_few(method)
    target = torch.tensor([0, 4])
    found, expected = (vitreous.explain(each, images, method, target).scores[method] for each in (model, ordinary))
    # The same sums in the same order, but for the product with the values; LRP's quotients by small sums enlarge that.
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7 * float(expected.abs().max()))
    assert_nothing_listens()


class TestTalkingHeads:
    """A is what the values are multiplied with, behind the second mixing of heads."""

    def test_the_maps_are_those_of_the_matrix_that_meets_the_values(self) -> None:
        model = randomised(vit(attn_layer=MixingHeads))
        images, target = torch.randn(2, 3, 32, 32, dtype=torch.float64), torch.tensor([0, 4])
        methods = ["rollout", "gae", "tokentm", "ixg", "cat", "decompx", "decompx:layer=2"]
        found = vitreous.explain(model, images, methods, target).scores
        plain, frozen = Reference(model, "blocks"), Reference(model, "blocks", frozen=True)
        for block, held in (*((block, False) for block in plain.blocks), *((block, True) for block in frozen.blocks)):
            block.attn.kept, block.attn.frozen = True, held
        streams, held = plain.input_times_gradient(images, target), frozen.input_times_gradient(images, target)
        # Rows of mixed heads do not sum to 1; rollout is defined as the product of (I + A)/2 (SkipPLUS eq. 2).
        rollout = torch.eye(17, dtype=torch.float64)
        for matrix in plain.run(images).matrices:
            rollout = (torch.eye(17) + matrix.detach().mean(1)) / 2 @ rollout
        expected = {
            "rollout": rollout[:, 0],
            "gae": plain.gae(images, target, [0]),
            "tokentm": plain.token_transformation(images, target, [0]),
            "ixg": streams[0],
            "cat": sum(streams),
            "decompx": held[0],
            "decompx:layer=2": held[2],
        }
        for method in methods:
            torch.testing.assert_close(found[method], expected[method][:, 1:], **AGREES, msg=method)

    @pytest.mark.parametrize("method", ["lrp", "transattr", "plrp", "abslrp"])
    def test_q_and_k_are_not_all_that_makes_its_scores(self, method: str) -> None:
        images = torch.randn(1, 3, 32, 32, dtype=torch.float64)
        with pytest.raises(UnsupportedModelError, match=r"is more than softmax\(scale q kᵀ \+ bias\) v"):
            vitreous.explain(randomised(vit(attn_layer=MixingHeads)), images, method)
        assert_nothing_listens()


def test_a_post_norm_block_in_disguise_is_read_rightly() -> None:
    model = randomised(vit(block_fn=NormsBehind))
    images, target = torch.randn(2, 3, 32, 32, dtype=torch.float64), torch.tensor([0, 4])
    explanation = vitreous.explain(model, images, ["decompx", "rollout", "gae", "tokentm"], target)
    plain, frozen = Reference(model, "blocks"), Reference(model, "blocks", frozen=True)
    expected = {
        "decompx": frozen.input_times_gradient(images, target)[0],
        "rollout": plain.rollout(images, [0]),
        "gae": plain.gae(images, target, [0]),
        "tokentm": plain.token_transformation(images, target, [0]),
    }
    for method, scores in expected.items():
        torch.testing.assert_close(explanation.scores[method], scores[:, 1:], **AGREES)
    with pytest.raises(UnsupportedModelError, match="convention=skipplus"):
        vitreous.explain(model, images, "gradcam")  # behind the last attention only the class token has a gradient
