"""Heads that read the tokens of several blocks, as linear classifiers on frozen models do (DINOv2's reads four)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import vitreous
from small_models import CLASSES, largest_difference, random_images, small_vit
from vitreous.architecture import find_architecture
from vitreous.errors import UnsupportedModelError
from vitreous.tape import GradientNeeds, Needs, Pass, Plan, record
from whole_maps import all_token_scores

EXACT = 1e-12  # float64: the same sums in another order
TARGET = torch.tensor([1, 3])
READ = {
    "patches": lambda tokens: tokens[:, 1:].mean(dim=1),
    "class tokens": lambda tokens: tokens[:, 0],
}


class SeveralBlocks(nn.Module):
    """A classifier on the tokens of all blocks; ``how`` it comes by them differs from one program to the other."""

    def __init__(self, how: str, read: str) -> None:
        super().__init__()
        self.vit, self.how, self.read = small_vit(num_classes=0), how, READ[read]
        generator = torch.Generator().manual_seed(5)
        count = len(self.vit.blocks) + (how == "embedding too")
        self.head = nn.Linear(24 * count, CLASSES, bias=False).double()
        self.head.weight.data = torch.randn(CLASSES, 24 * count, generator=generator, dtype=torch.float64) / 5

    def forward(self, pixels: Tensor) -> Tensor:
        tokens = self.vit._pos_embed(self.vit.patch_embed(pixels))
        found = [tokens] if self.how == "embedding too" else []
        for block in self.vit.blocks:
            tokens = block(tokens)
            if self.how == "tuples":
                (tokens,) = tokens
            # Read before the next block has run: its input must have a gradient by then.
            found.append(self.read(self.vit.norm(tokens)) if self.how == "at once" else tokens)
        if self.how == "at once":
            return self.head(torch.cat(found, dim=-1))
        if self.how == "seen inside":
            found = [block.seen for block in self.vit.blocks]
        return self.head(torch.cat([self.read(self.vit.norm(tokens)) for tokens in found], dim=-1))


class InTuple(nn.Module):
    """A block that returns a tuple."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.attn, self.norm1, self.norm2, self.inner = block.attn, block.norm1, block.norm2, block

    def forward(self, tokens: Tensor) -> tuple[Tensor]:
        return (self.inner(tokens),)


def several_blocks(how: str, read: str = "patches") -> SeveralBlocks:
    """The model, in evaluation mode."""
    model = SeveralBlocks(how, read).eval()
    if how == "tuples":
        model.vit.blocks = nn.ModuleList(InTuple(block) for block in model.vit.blocks)
    if how == "seen inside":
        for block in model.vit.blocks:
            block.forward = _noting(block, block.forward)
    return model


def _noting(block: nn.Module, forward):
    """As transformers collects hidden states: inside the call, where no hook has returned something else yet."""

    def noted(tokens: Tensor) -> Tensor:
        block.seen = forward(tokens)
        return block.seen

    return noted


def gradient_lengths(model: nn.Module, images: Tensor) -> list[Tensor]:
    """||dy/dx_l|| of every block's input, by autograd through the whole model and nothing else."""
    streams: list[Tensor] = []
    hooks = [
        block.register_forward_pre_hook(lambda _module, given: streams.append(given[0])) for block in model.vit.blocks
    ]
    with torch.enable_grad():
        logits = model(images.clone().requires_grad_())
        gradients = torch.autograd.grad(logits.gather(1, TARGET[:, None]).sum(), streams)
    for hook in hooks:
        hook.remove()
    return [gradient.norm(dim=-1) for gradient in gradients]


HOW = ["kept", "at once", "tuples", "seen inside", "embedding too"]


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("how", HOW)
def test_all_ways_from_a_block_to_the_head_count(how: str, read: str) -> None:
    model, images = several_blocks(how, read), random_images()
    for layer, expected in enumerate(gradient_lengths(model, images)):
        spelling = f"gradient:layer={layer}"
        found = vitreous.explain(model, images, spelling, TARGET).scores[spelling]
        assert largest_difference(found, expected[:, 1:]) < EXACT


@pytest.mark.parametrize("how", HOW)
def test_without_biases_the_decomposition_of_the_first_block_that_the_head_reads_is_the_whole_logit(how: str) -> None:
    model, images = several_blocks(how), random_images()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    for layer in (0,) if how == "embedding too" else (0, 1):
        scores, logits = all_token_scores(model, images, f"decompx:layer={layer}", TARGET)
        assert largest_difference(scores.sum(dim=1), logits) < EXACT


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("how", ["kept", "at once", "tuples"])
@pytest.mark.parametrize("method", ["decompx:bias=token", "fullgrad:rule=libra"])
def test_biases_count_wherever_the_head_reads(method: str, how: str, read: str) -> None:
    """A norm that the head runs between two blocks has the same bias as one behind the last."""
    model, images = several_blocks(how, read), random_images()
    for layer in (0, 1):
        spelling = f"{method},layer={layer}"
        scores, logits = all_token_scores(model, images, spelling, TARGET)
        assert largest_difference(scores.sum(dim=1), logits) < EXACT


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("how", ["at once", "kept", "seen inside"])
@pytest.mark.parametrize("method", ["decompx:bias=token", "fullgrad:rule=libra"])
def test_what_the_head_reads_of_earlier_blocks_is_no_bias_of_later_ones(method: str, how: str, read: str) -> None:
    """A recording for later blocks alone holds it without a gradient, but it depends on the picture."""
    model, images, later = several_blocks(how, read), random_images(), f"{method},layer=2"
    alone, logits = all_token_scores(model, images, later, TARGET)
    together = vitreous.explain(model, images, [later, method], TARGET).scores[later]
    assert largest_difference(alone[:, 1:], together) < EXACT
    # What the scores leave out of the logit is what the head makes of the first block's output.
    with torch.no_grad():
        first = model.vit.blocks[0](model.vit._pos_embed(model.vit.patch_embed(images)))
        left_out = model.read(model.vit.norm(first)) @ model.head.weight[TARGET, :24].T
    assert largest_difference(alone.sum(dim=1), logits - left_out.diagonal()) < EXACT


class NormBetween(nn.Module):
    """A norm that every token goes through between two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = small_vit()

    def forward(self, pixels: Tensor) -> Tensor:
        tokens = self.vit._pos_embed(self.vit.patch_embed(pixels))
        for block in self.vit.blocks:
            tokens = self.vit.norm(block(tokens))
        return self.vit.head(tokens[:, 0])


@pytest.mark.parametrize("method", ["decompx:bias=token", "fullgrad:rule=libra"])
def test_a_bias_on_the_way_from_block_to_block_belongs_to_the_block_in_front(method: str) -> None:
    model, images = NormBetween().eval(), random_images()
    for layer in range(4):
        scores, logits = all_token_scores(model, images, f"{method},layer={layer}", TARGET)
        assert largest_difference(scores.sum(dim=1), logits) < EXACT
    for layer in (0, 2):
        spelling = f"gradient:layer={layer}"
        found = vitreous.explain(model, images, spelling, TARGET).scores[spelling]
        assert largest_difference(found, gradient_lengths(model, images)[layer][:, 1:]) < EXACT


@pytest.mark.parametrize("method", ["decompx.skipplus", "attnlrp:layer=2", "decompx:layer=3", "gae:layer=2"])
def test_a_map_is_the_same_whatever_else_is_asked(method: str) -> None:
    model, images = several_blocks("kept"), random_images()
    alone = vitreous.explain(model, images, method, TARGET).scores[method]
    together = vitreous.explain(model, images, [method, "ixg", "decompx"], TARGET).scores[method]
    assert largest_difference(alone, together) < EXACT


def test_nothing_below_the_first_block_that_is_read_is_kept() -> None:
    model = several_blocks("kept")
    architecture, below = find_architecture(model, random_images()), []
    for block in list(model.vit.blocks)[:2]:
        block.mlp.fc2.register_forward_hook(lambda _module, _given, output: below.append(output))
    needs = Needs(gradients={Pass("plain", "logit"): GradientNeeds(tokens=frozenset({2}))})
    with record(model, architecture, random_images(), Plan(architecture.depth, needs)) as tape:
        assert tape.reads_several_blocks
        assert len(below) in {2, 4}  # twice more where the places of patches are looked for
        assert not any(output.requires_grad for output in below)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("method", ["legrad", "legrad:layer=3", "vit_recipro_cam"])
def test_methods_that_put_other_tokens_in_the_place_of_one_blocks_refuse(how: str, read: str, method: str) -> None:
    model = several_blocks(how, read)
    with pytest.raises(UnsupportedModelError, match="several blocks at once"):
        vitreous.explain(model, random_images(), method, TARGET)


class WeightedSum(SeveralBlocks):
    """A head on a weighted sum of all blocks' tokens: one image's broadcast against many others."""

    def forward(self, pixels: Tensor) -> Tensor:
        tokens, total = self.vit._pos_embed(self.vit.patch_embed(pixels)), 0
        for weight, block in enumerate(self.vit.blocks, start=1):
            tokens = block(tokens)
            total = total + weight * tokens
        return self.vit.norm(total)[:, 0] @ self.head.weight[:, :24].T


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("method", ["legrad", "legrad:layer=3", "vit_recipro_cam"])
def test_they_refuse_a_sum_of_blocks_too(method: str, images: int) -> None:
    model = WeightedSum("kept", "class tokens").eval()
    with pytest.raises(UnsupportedModelError, match="several blocks at once"):
        vitreous.explain(model, random_images(images), method, TARGET[:images])


def test_a_refused_method_is_not_among_those_that_work() -> None:
    model = several_blocks("kept")
    with pytest.raises(UnsupportedModelError) as refusal:
        vitreous.explain(model, random_images(), "legrad", TARGET)
    assert "legrad" not in str(refusal.value).split("Methods that work on it: ")[1].split(", ")
    assert "decompx" in str(refusal.value).split("Methods that work on it: ")[1].split(", ")


def test_an_ordinary_head_reads_the_last_block_alone() -> None:
    model = small_vit()
    architecture = find_architecture(model, random_images())
    needs = Needs(gradients={Pass("plain", "logit"): GradientNeeds(tokens=frozenset({0}))})
    with record(model, architecture, random_images(), Plan(architecture.depth, needs)) as tape:
        assert not tape.reads_several_blocks
