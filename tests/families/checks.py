"""What is checked of every model family: one table of cases per family, one set of checks for all of them."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import hooked
import pytest
import torch
from hooked import Read, Reference, block_inputs_times_gradients, logits_of
from hooked_decomposition import Decomposition
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack

import vitreous
from vitreous.errors import UnsupportedModelError
from vitreous.tape.runner import ModelRunner
from whole_maps import all_token_scores

DEPTH = 3
CLASSES = 5
BATCH = 2
ATTENTION_METHODS = ("raw_attention", "rollout", "gae", "gradtoken", "gradtoken:heads=average")
# Every rule, through the stream and the attention.
RULED_METHODS = (
    *("ixg:rule=libra", "attnlrp", "conservative_lrp", "fullgrad:rule=libra"),
    *("gae:rule=libra", "gae:rule=attnlrp", "gae:rule=conservative", "gae:rule=residual"),
)
DECOMPOSITIONS = ("globenc", "alti", "alti:setting=original")
# Float64 throughout. The same operations in the same order: only rounding of reordered sums may differ.
SAME = {"rtol": 1e-12, "atol": 1e-12}
# The reference sums in another order through three blocks; values are of order 0.01 to 10.
AGREES = {"rtol": 1e-9, "atol": 1e-11}
# Batched kernels sum in another order than those for one image.
BATCHED = {"rtol": 1e-10, "atol": 1e-12}


@dataclass(frozen=True)
class Family:
    """One model to build small, and what must be found in it.

    Attributes:
        name: the test's id.
        build: makes the model; it is then given random weights in float64.
        blocks: path of the stack of blocks.
        image: (height, width) of the pictures, (depth, height, width) of volumes and clips.
        grid: (rows, columns) of patches, (depth, rows, columns) in these.
        prefix: how many tokens come before the patches.
        read: the tokens that the head reads, "patches" for all patches, or how attention pools them.
        batch_first: whether blocks see (batch, tokens, channels).
        tokentm: whether W_O alone leads from the heads to the stream.
        channel_axis: the axis of the input's channels; 2 in clips whose frames come first.
        gated: whether its blocks multiply two streams (SwiGLU), or its feature has unit length: DecompX conserves both,
            the frozen rule does not.
        rounding: the relative precision that the model itself works in where it is less than float64; small scores
            are compared to a hundredth of it.
    """

    name: str
    build: Callable[[], nn.Module]
    blocks: str = "blocks"
    image: tuple[int, ...] = (32, 48)
    grid: tuple[int, ...] = (4, 6)
    prefix: int = 1
    read: Read | str = (0,)
    batch_first: bool = True
    tokentm: bool = True
    gated: bool = False
    rounding: float | None = None
    channel_axis: int = 1

    def __str__(self) -> str:
        return self.name

    @property
    def patches(self) -> int:
        return math.prod(self.grid)

    @property
    def tokens_read(self) -> Read:
        return range(self.prefix, self.prefix + self.patches) if self.read == "patches" else self.read

    @property
    def agrees(self) -> dict[str, float]:
        return AGREES if self.rounding is None else {"rtol": self.rounding, "atol": self.rounding / 100}

    @property
    def methods(self) -> tuple[str, ...]:
        return (*ATTENTION_METHODS, "tokentm") if self.tokentm else ATTENTION_METHODS

    @property
    def frozen_methods(self) -> list[str]:
        """The spellings, layer by layer, of input times gradient under the frozen rule."""
        return layers("ixg:rule=frozen" if self.gated else "decompx")

    def model(self) -> nn.Module:
        """The same one for every test that leaves it as it is: its architecture is found once."""
        return _built(self.build)

    def own_model(self) -> nn.Module:
        """A copy that a test may change."""
        return copy.deepcopy(_built(self.build))

    def images(self, batch: int = BATCH) -> Tensor:
        generator = torch.Generator().manual_seed(7)
        images = torch.randn(batch, 3, *self.image, dtype=torch.float64, generator=generator)
        return images.movedim(1, self.channel_axis).contiguous()

    def target(self) -> Tensor:
        """Not the predicted class of every image, and another one for each."""
        return torch.tensor([1, 3])

    def reference(self, model: nn.Module, *, frozen: bool) -> Reference:
        return Reference(model, self.blocks, frozen=frozen, batch_first=self.batch_first)


@functools.cache
def _built(build: Callable[[], nn.Module]) -> nn.Module:
    return randomised(build())


def randomised(model: nn.Module) -> nn.Module:
    """Weights in float64 that let every path matter: no zero bias, head or table, no LayerScale of 1e-5."""
    model = model.double().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            if any(part in name for part in ("token", "pos", "latent", "query", "probe", "table", "class_embedding")):
                parameter.copy_(0.5 * noise)
            elif parameter.dim() >= 2:
                parameter.copy_(noise / math.sqrt(parameter[0].numel()))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:  # norm weights and LayerScale
                parameter.copy_(0.8 + 0.3 * noise)
    return model


def layers(method: str) -> list[str]:
    separator = "," if ":" in method else ":"
    return [f"{method}{separator}layer={layer}" for layer in range(DEPTH)]


@functools.cache
def _explained(case: Family) -> dict[str, Tensor]:
    """All that is compared with a reference, in one call: one recording has to serve every rule and every method."""
    # W_O alone has to lead from the heads to the stream for ALTI; GlobEnc's map is looked at without it.
    decompositions = DECOMPOSITIONS if case.tokentm else ("globenc",)
    methods = [*case.methods, "tokentm", "ixg", "decompx", "decompx.skipplus", *decompositions]
    methods += [*layers("ixg"), *case.frozen_methods]
    return vitreous.explain(case.model(), case.images(), list(dict.fromkeys(methods)), case.target()).scores


@functools.cache
def _reference(case: Family, *, frozen: bool) -> Reference:
    """For those who leave it as it is."""
    return case.reference(case.model(), frozen=frozen)


@functools.cache
def _hooked_gradients(case: Family) -> list[Tensor]:
    return block_inputs_times_gradients(
        case.model(), case.blocks, case.images(), case.target(), batch_first=case.batch_first
    )


def state_of(model: nn.Module) -> dict[str, object]:
    """Everything about a model that an interception could leave changed, by identity."""
    state: dict[str, object] = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            state[f"{name}.{attribute}"] = id(value)
            if isinstance(value, dict):
                state[f"{name}.{attribute}:items"] = [(key, id(item)) for key, item in value.items()]
        state[f"{name}.training"] = module.training
    for name, parameter in model.named_parameters():
        state[f"{name}:tensor"] = (parameter.requires_grad, parameter._version, parameter.grad)
    return state


def assert_nothing_listens() -> None:
    assert not torch_module._global_forward_hooks
    assert not torch_module._global_forward_pre_hooks
    assert not torch_module._global_backward_hooks
    assert not _get_current_function_mode_stack()


def logits_with_hidden_patches(
    case: Family, model: nn.Module, images: Tensor, kept: Tensor, monkeypatch: pytest.MonkeyPatch
) -> Tensor:
    """The reference for dropped patches: nobody looks at them (score -inf), and the last block's output lacks them."""
    reference = case.reference(model, frozen=False)
    count = case.prefix + case.patches
    tokens = torch.cat((torch.arange(case.prefix).expand(len(kept), -1), kept + case.prefix), dim=1)
    hidden = torch.full((len(kept), 1, 1, count), -math.inf, dtype=torch.float64)
    hidden.scatter_(3, tokens[:, None, None], 0.0)
    whole = hooked.attention_matrix

    def attention_matrix(query: Tensor, key: Tensor, scale: float, bias: Tensor | None) -> Tensor:
        if key.shape[2] == count:
            bias = hidden if bias is None else bias + hidden
        return whole(query, key, scale, bias)

    def without_dropped(_: nn.Module, __: object, output: object) -> object:
        stream = reference.stream(output[0] if isinstance(output, tuple) else output)
        left = reference.stream(torch.stack([row[index] for row, index in zip(stream, tokens, strict=True)]))
        return (left, *output[1:]) if isinstance(output, tuple) else left

    with monkeypatch.context() as patch:
        patch.setattr(hooked, "attention_matrix", attention_matrix)
        reference.blocks[-1].register_forward_hook(without_dropped)
        return logits_of(reference.model(images)).detach()  # under no_grad nn.TransformerEncoder would skip its parts


class FamilyChecks:
    """The checks; a family's test class inherits them and is parametrised with its table of ``case``s."""

    def test_logits_and_layout_are_the_models_own(self, case: Family) -> None:
        model, images = case.model(), case.images()
        with torch.no_grad():
            logits = logits_of(model(images))
        methods = ["rollout", "ixg", "decompx.plus", "gae"]
        explanation = vitreous.explain(model, images, methods)
        torch.testing.assert_close(explanation.logits, logits, **SAME)
        assert explanation.grid == case.grid
        assert explanation.image_size == case.image
        assert torch.equal(explanation.target, logits.argmax(1))
        for method in methods:
            assert explanation.scores[method].shape == (BATCH, case.patches)
            assert not explanation.scores[method].requires_grad

    def test_everything_is_restored_after_an_exception_inside_the_model(self, case: Family) -> None:
        model, images, methods = case.own_model(), case.images(), ["rollout", "decompx", "gradtoken"]
        model.train()
        next(iter(model.children())).eval()  # a mixed state must come back as it was
        first = vitreous.explain(model, images, methods)

        def fail(*_: object) -> None:
            raise RuntimeError("in the middle")

        hook = model.get_submodule(case.blocks)[1].register_forward_hook(fail)
        before = state_of(model)
        with pytest.raises(UnsupportedModelError, match="in the middle"):
            vitreous.explain(model, images, methods)
        assert state_of(model) == before
        assert_nothing_listens()
        hook.remove()
        second = vitreous.explain(model, images, methods)
        for method in methods:
            assert torch.equal(first.scores[method], second.scores[method])
        assert_nothing_listens()

    def test_input_times_gradient_agrees_with_hooks(self, case: Family) -> None:
        expected = _hooked_gradients(case)
        for method, scores in zip(layers("ixg"), expected, strict=True):
            torch.testing.assert_close(_explained(case)[method], scores[:, case.prefix :], **case.agrees)

    def test_decompx_agrees_with_frozen_parts(self, case: Family) -> None:
        model, images, target = case.model(), case.images(), case.target()
        reference = _reference(case, frozen=True)
        torch.testing.assert_close(reference.run(images).logits, logits_of(model(images)), **case.agrees)
        expected = reference.input_times_gradient(images, target)
        for method, scores in zip(case.frozen_methods, expected, strict=True):
            torch.testing.assert_close(_explained(case)[method], scores[:, case.prefix :], **case.agrees)
        # Where the rules agree a test of them proves nothing.
        assert not torch.allclose(expected[0], _hooked_gradients(case)[0], rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize(
        "spelling", ["fullgrad:rule=libra,layer=0", f"fullgrad:rule=libra,layer={DEPTH - 1}", "decompx:bias=token"]
    )
    def test_libra_full_gradient_adds_up_to_the_logit(self, case: Family, spelling: str) -> None:
        """LibraGrad's completeness: inputs and biases times gradient are all of the output, on any model."""
        model, images, target = case.model(), case.images(), case.target()
        scores, logits = all_token_scores(model, images, spelling, target)
        # Rounding of some hundred signed terms; no logit here is smaller than 1e-2 of them.
        torch.testing.assert_close(scores.sum(dim=1), logits, rtol=case.rounding or 1e-9, atol=0)

    def test_rollout_and_gae_agree_with_full_products(self, case: Family) -> None:
        images, target = case.images(), case.target()
        reference, found = _reference(case, frozen=False), _explained(case)
        rollout = reference.rollout(images, case.tokens_read)[:, case.prefix :]
        torch.testing.assert_close(found["rollout"], rollout, **case.agrees)
        gae = reference.gae(images, target, case.tokens_read)[:, case.prefix :]
        torch.testing.assert_close(found["gae"], gae, **case.agrees)

    def test_methods_alone_and_together_give_the_same_telling_maps(self, case: Family) -> None:
        model, images, target = case.model(), case.images(), case.target()
        together = _explained(case)
        for method in case.methods:
            scores = together[method]
            assert torch.isfinite(scores).all(), method
            # ReLU over heads may leave nothing of GradToken's map of an untrained model; its heads=average cannot.
            if method != "gradtoken":
                assert (scores.std(dim=1) > 1e-6 * scores.abs().amax(dim=1)).all(), method
        for method in ("rollout", "gradtoken", "tokentm"):  # they need little, so much is left out for them alone
            alone = vitreous.explain(model, images, method, target).scores[method]
            torch.testing.assert_close(alone, together[method], **case.agrees)

    def test_tokentm_agrees_with_full_products(self, case: Family) -> None:
        scores = _explained(case)["tokentm"]
        if case.tokentm:
            reference = _reference(case, frozen=False)
            expected = reference.token_transformation(case.images(), case.target(), case.tokens_read)
            torch.testing.assert_close(scores, expected[:, case.prefix :], **case.agrees)
        else:  # more than W_O lies between heads and stream: tests/architecture/test_head_paths.py compares such maps
            assert (scores.std(dim=1) > 1e-6 * scores.abs().amax(dim=1)).all()

    def test_decompositions_agree_with_written_out_vectors(self, case: Family) -> None:
        found = _explained(case)
        if case.tokentm:
            reference = Decomposition(_reference(case, frozen=True), case.images())
            for method in DECOMPOSITIONS:
                expected = reference.rollout(method, case.tokens_read)[:, case.prefix :]
                torch.testing.assert_close(found[method], expected, **case.agrees)
                assert (expected.std(dim=1) > 1e-6 * expected.amax(dim=1)).all()
        else:
            scores = found["globenc"]
            assert (scores.std(dim=1) > 1e-6 * scores.abs().amax(dim=1)).all()

    def test_frozen_parameters_and_no_grad_change_nothing(self, case: Family) -> None:
        model, images, methods = case.own_model(), case.images(), ["rollout", "decompx"]
        with torch.no_grad():
            found = vitreous.explain(model.requires_grad_(requires_grad=False), images, methods, case.target())
        for method in methods:
            torch.testing.assert_close(found.scores[method], _explained(case)[method], **SAME)

    def test_a_batch_gives_what_single_images_give(self, case: Family) -> None:
        model, images, target = case.model(), case.images(), case.target()
        methods, together = [*case.methods, "ixg", "decompx"], _explained(case)
        single = vitreous.explain(model, images[-1:], methods, target[-1:])  # the one that is not first in the batch
        for method in methods:
            torch.testing.assert_close(single.scores[method][0], together[method][-1], **BATCHED)

    def test_dropped_patches_leave_what_hidden_ones_leave(self, case: Family, monkeypatch: pytest.MonkeyPatch) -> None:
        model, images = case.model(), case.images()
        runner = ModelRunner(model, images)
        before = state_of(model)
        generator = torch.Generator().manual_seed(5)
        for count in (1, case.patches // 2, case.patches - 1):
            # Another choice for each image, and not in the picture's order.
            kept = torch.stack([torch.randperm(case.patches, generator=generator)[:count] for _ in range(BATCH)])
            expected = logits_with_hidden_patches(case, model, images, kept, monkeypatch)
            found = runner.logits_of_kept(images, kept)
            torch.testing.assert_close(found, expected, **case.agrees)
            assert not torch.allclose(found, runner.logits(images), rtol=1e-3, atol=1e-3)  # they made a difference
        assert not runner._cannot_drop  # really dropped, not hidden at full cost
        # What serves models that cannot be run on fewer tokens gives the same.
        runner._cannot_drop = True
        torch.testing.assert_close(runner.logits_of_kept(images, kept), expected, **case.agrees)
        assert state_of(model) == before
        assert_nothing_listens()

    def test_damped_attention_is_damped_in_every_block(self, case: Family, monkeypatch: pytest.MonkeyPatch) -> None:
        model, images = case.model(), case.images()
        runner = ModelRunner(model, images)
        generator = torch.Generator().manual_seed(6)
        factors = torch.rand(BATCH, case.prefix + case.patches, dtype=torch.float64, generator=generator)

        def attention_matrix(query: Tensor, key: Tensor, scale: float, bias: Tensor | None) -> Tensor:
            scores = torch.einsum("bhic,bhjc->bhij", query, key) * scale
            scores = scores if bias is None else scores + bias
            return (scores * factors[:, None, None, -key.shape[2] :]).softmax(-1)  # a pooling may leave out the prefix

        reference = case.reference(model, frozen=False)
        with monkeypatch.context() as patch:
            patch.setattr(hooked, "attention_matrix", attention_matrix)
            expected = logits_of(reference.model(images)).detach()
        found = runner.logits_of_damped(images, factors)
        torch.testing.assert_close(found, expected, **case.agrees)
        assert not torch.allclose(found, runner.logits(images), rtol=1e-3, atol=1e-3)
        assert_nothing_listens()
