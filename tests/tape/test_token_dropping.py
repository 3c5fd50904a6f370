"""Dropped patches are really gone: golden logits, the block stack run by hand, cost, and nothing left behind."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from timm.models.beit import Beit
from timm.models.mlp_mixer import MlpMixer
from timm.models.vision_transformer import Attention
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack

from small_models import CLASSES, PATCHES, SIZE, golden_model, random_images, randomise, small_vit
from vitreous.architecture.evaluation_copy import evaluation_copy
from vitreous.errors import UnsupportedModelError
from vitreous.tape import GradientNeeds, Needs, Pass
from vitreous.tape.runner import ModelRunner

GOLDEN = Path(__file__).parents[1] / "golden" / "skipplus_true_token_masking.npz"
# Float64 and the same operations; sums over another number of tokens are cut into other pieces.
SAME = {"rtol": 1e-12, "atol": 1e-12}


def subject_of(model: nn.Module, images: Tensor) -> ModelRunner:
    network = evaluation_copy(model)
    return ModelRunner(network, images)


def some_patches(count: int, images: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(PATCHES, generator=generator)[:count] for _ in range(images)])


def by_hand(model: nn.Module, images: Tensor, kept: Tensor) -> Tensor:
    """timm's parts one after the other, with the rows of the class token and the kept patches taken by hand."""
    with torch.no_grad():
        tokens = model.norm_pre(model.pos_drop(model._pos_embed(model.patch_embed(images))))
        rows = [row[[0, *(1 + index for index in patches.tolist())]] for row, patches in zip(tokens, kept, strict=True)]
        return model.forward_head(model.norm(model.blocks(torch.stack(rows))))


class TestGolden:
    """The SkipPLUS authors' program: `topratio` keeps the k most relevant patches, `nratio` drops them."""

    @pytest.mark.parametrize("percent", range(10, 100, 10))
    def test_logits_at_every_ratio(self, percent):
        stored = np.load(GOLDEN)
        model, _ = golden_model()
        images = torch.tensor(stored["images"])
        runner = subject_of(model, images)
        ranked = torch.tensor(stored["scores"])[:, 1:].argsort(dim=1, descending=True)
        count = percent * 16 // 100
        for kept, name in ((ranked[:, :count], "topratio"), (ranked[:, count:], "nratio")):
            found = runner.logits_of_kept(images, kept)
            # Logits of order 1 in float64.
            np.testing.assert_allclose(found, stored[f"{name}_{percent}_logits"], rtol=0, atol=1e-9)
            assert (stored[f"{name}_{percent}_ntok"] == kept.shape[1] + 1).all()

    def test_logits_of_whole_pictures(self):
        stored = np.load(GOLDEN)
        images = torch.tensor(stored["images"])
        found = subject_of(golden_model()[0], images).logits(images)
        np.testing.assert_allclose(found, stored["logits"], rtol=0, atol=1e-9)


@pytest.mark.parametrize("count", [0, 1, 7, 15])
def test_the_blocks_see_the_kept_tokens_only(count):
    model, images = small_vit(), random_images()
    kept = some_patches(count)
    runner = subject_of(model, images)
    runner.logits_of_kept(images, some_patches(3))  # the first runs find the layout and whether patches can be dropped
    lengths = []
    hooks = [block.register_forward_hook(lambda _, given, __: lengths.append(given[0].shape)) for block in model.blocks]
    found = runner.logits_of_kept(images, kept)
    for hook in hooks:
        hook.remove()
    assert lengths == [(2, 1 + count, 24)] * len(model.blocks)
    torch.testing.assert_close(found, by_hand(model, images, kept.sort(dim=1).values), **SAME)


def test_which_patches_are_kept_is_a_set():
    model, images = small_vit(), random_images()
    runner = subject_of(model, images)
    kept = some_patches(9)
    assert torch.equal(runner.logits_of_kept(images, kept), runner.logits_of_kept(images, kept.flip(1)))
    everything = some_patches(PATCHES)
    assert torch.equal(runner.logits_of_kept(images, everything), runner.logits(images))


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (torch.tensor([[0, 16], [0, 1]]), "from 0 to 15"),
        (torch.tensor([[-1], [3]]), "from 0 to 15"),
        (torch.tensor([[4, 4], [0, 1]]), "at most once"),
        (torch.tensor([[4, 5]]), r"shape \(2, k\)"),
        (torch.ones(2, 16, dtype=torch.bool), "int64"),
    ],
)
def test_patches_that_do_not_exist_are_refused(kept, reason):
    images = random_images()
    with pytest.raises(ValueError, match=reason):
        subject_of(small_vit(), images).logits_of_kept(images, kept)


def test_nothing_is_left_of_an_average_without_patches():
    images = random_images()
    averaged = subject_of(small_vit(global_pool="avg"), images)
    with pytest.raises(UnsupportedModelError, match="nothing is left to read"):
        averaged.logits_of_kept(images, some_patches(0))
    assert torch.isfinite(averaged.logits_of_kept(images, some_patches(1))).all()


class CountsTokens(Attention):
    """Reshapes to the number of tokens that it was built for, so it cannot run on fewer."""

    def forward(self, tokens: Tensor, **_: object) -> Tensor:
        return super().forward(tokens.reshape(len(tokens), 1 + PATCHES, -1))


def test_a_model_that_counts_its_tokens_gets_the_same_by_hiding_them():
    images, kept = random_images(), some_patches(6)
    plain, counting = small_vit(), small_vit(attn_layer=CountsTokens)
    counting.load_state_dict(plain.state_dict())
    runner = subject_of(counting, images)
    expected = subject_of(plain, images).logits_of_kept(images, kept)
    for _ in range(2):  # the second time it is known
        torch.testing.assert_close(runner.logits_of_kept(images, kept), expected, **SAME)
    assert runner._cannot_drop
    assert runner.evaluations == 4


def test_a_mixer_cannot_do_without_a_patch():
    model = MlpMixer(img_size=32, patch_size=8, embed_dim=24, num_blocks=4, num_classes=CLASSES).double()
    images = random_images()
    with pytest.raises(UnsupportedModelError, match=r"no attention was seen in block 0.*by=paint"):
        subject_of(model, images).logits_of_kept(images, some_patches(6))
    assert_nothing_listens()


def assert_nothing_listens() -> None:
    assert not torch_module._global_forward_hooks
    assert not torch_module._global_forward_pre_hooks
    assert not _get_current_function_mode_stack()


def test_bare_evaluations_are_the_models_own_in_evaluation_mode_and_without_hooks():
    model, images = small_vit(drop_rate=0.5, attn_drop_rate=0.5), random_images()
    expected = model(images).detach()
    model.train()
    listening = []
    model.blocks[0].register_forward_hook(lambda *_: listening.append(len(_get_current_function_mode_stack())))
    runner = subject_of(model, images)
    found = runner.logits(images)
    assert torch.equal(found, expected)
    assert not found.requires_grad
    assert listening == [0]
    assert all(module.training for module in model.modules())
    assert runner.evaluations == 2


def test_many_images_are_asked_in_batches_and_counted():
    model = small_vit(depth=1)
    images = random_images(5)
    runner = subject_of(model, images)
    sizes = []
    model.blocks[0].register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    many = images.repeat(runner.batch // 4, 1, 1, 1)
    found = runner.logits(many)
    assert sizes == [runner.batch, len(many) - runner.batch]
    # Other batch sizes sum in another order.
    torch.testing.assert_close(found[-5:], runner.logits(images), rtol=1e-10, atol=1e-12)
    assert runner.evaluations == len(many) + 5


def test_a_callers_autocast_holds_when_the_model_is_asked_again():
    model, images = small_vit(dtype=torch.float32), random_images(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        runner = subject_of(model, images)
        expected = model(images)
    assert expected.dtype == torch.bfloat16
    assert torch.equal(runner.logits(images), expected)


@pytest.mark.parametrize("question", ["logits_of_kept", "logits_of_damped"])
def test_everything_is_restored_after_an_exception_inside_the_model(question):
    model, images = small_vit().train(), random_images()
    runner = subject_of(model, images)
    given = some_patches(5) if question == "logits_of_kept" else torch.rand(2, 1 + PATCHES, dtype=torch.float64)
    first = getattr(runner, question)(images, given)

    def fail(*_: object) -> None:
        raise LookupError("in the middle")

    hook = model.blocks[2].register_forward_hook(fail)
    with pytest.raises(UnsupportedModelError, match="in the middle"):
        getattr(runner, question)(images, given)
    assert_nothing_listens()
    assert all(module.training for module in model.modules())
    hook.remove()
    assert torch.equal(getattr(runner, question)(images, given), first)


def test_threads_that_drop_other_patches_of_the_same_model_do_not_see_each_other():
    model, images = small_vit(), random_images()
    alone = copy.deepcopy(model)
    choices = [some_patches(count, seed=count) for count in (0, 3, 8, 12)]
    expected = [subject_of(alone, images).logits_of_kept(images, kept) for kept in choices]
    found: list[list[Tensor]] = [[] for _ in choices]
    start = threading.Barrier(len(choices))

    def ask(number: int) -> None:
        runner = subject_of(model, images)
        start.wait()
        for _ in range(10):
            found[number].append(runner.logits_of_kept(images, choices[number]))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(choices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for answers, right in zip(found, expected, strict=True):
        assert len(answers) == 10
        assert all(torch.equal(answer, right) for answer in answers)
    assert_nothing_listens()


class TestRecordedRuns:
    """A run without some patches that is recorded, for gradients of what is left."""

    NEEDS = GradientNeeds(tokens=frozenset({0}), attention=frozenset({0, 3}))
    PLAIN = Pass("plain", "logit")

    @pytest.mark.parametrize("options", [{}, {"global_pool": "avg", "class_token": False}])
    @pytest.mark.parametrize("count", [1, 7, 15])
    def test_logits_and_gradients_are_those_of_the_blocks_run_by_hand(self, count, options):
        model, images = small_vit(**options), random_images()
        kept = some_patches(count)
        target = torch.tensor([0, 2])
        prefix = model.num_prefix_tokens
        whole = model.norm_pre(model.pos_drop(model._pos_embed(model.patch_embed(images)))).detach()
        rows = [[*range(prefix), *(prefix + index for index in sorted(patches.tolist()))] for patches in kept]
        tokens = torch.stack([row[index] for row, index in zip(whole, rows, strict=True)]).requires_grad_()
        logits = model.forward_head(model.norm(model.blocks(tokens)))
        (expected,) = torch.autograd.grad(logits[range(2), target].sum(), tokens)
        needs = Needs(tokens=frozenset({0}), attention=frozenset({0}), gradients={self.PLAIN: self.NEEDS})
        with subject_of(model, images).record_kept(images, kept, needs) as tape:
            found = tape.backward(self.PLAIN, target, self.NEEDS)
            assert (tape.layout.prefix, tape.layout.patches) == (prefix, count)
            assert tape.attention(0).rows(slice(None)).shape == (2, 3, prefix + count, prefix + count)
            torch.testing.assert_close(tape.logits, logits.detach(), **SAME)
            torch.testing.assert_close(tape.tokens(0), tokens.detach(), **SAME)
            torch.testing.assert_close(found.tokens[0], expected, **SAME)

    def test_tables_of_positions_are_cut(self):
        settings = {"img_size": SIZE, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
        model, images, kept = Beit(**settings, use_rel_pos_bias=True), random_images(), some_patches(5)
        runner = subject_of(randomise(model).double().eval(), images)
        with runner.record_kept(images, kept, Needs()) as tape:
            torch.testing.assert_close(tape.logits, runner.logits_of_kept(images, kept), **SAME)

    def test_a_model_whose_blocks_count_their_tokens_is_refused(self):
        class Distances(Attention):
            def forward(self, tokens: Tensor, **_: object) -> Tensor:
                batch, count, width = tokens.shape
                query, key, value = self.qkv(tokens).reshape(batch, count, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
                places = torch.arange(count).to(tokens)
                bias = -0.2 * (places[:, None] - places).abs()
                output = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
                return self.proj(output.transpose(1, 2).reshape(batch, count, width))

        images = random_images()
        runner = subject_of(small_vit(attn_layer=Distances), images)
        with pytest.raises(UnsupportedModelError, match="hidden from attention but not dropped"):
            runner.record_kept(images, some_patches(3), Needs())
