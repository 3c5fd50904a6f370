"""Text classifiers of the transformers library, small: BERT (and MiniLM), DistilBERT, RoBERTa, ELECTRA, DeBERTa-v2."""

from __future__ import annotations

import functools

import pytest
import torch
from checks import AGREES, SAME, assert_nothing_listens, state_of
from hooked import block_inputs_times_gradients
from hooked_decomposition import Decomposition
from hooked_texts import Called, TextReference
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")

from small_text_models import DEPTH, ask, blocks_of, build, logits_of, texts
from vitreous.errors import UnsupportedModelError
from vitreous.methods import list_methods
from vitreous.tape import PIXELS
from whole_maps import all_token_scores, opened

FUSED = ("bert", "roberta", "electra", "distilbert")
KINDS = (*FUSED, "deberta")
LENGTHS = (9, 5, 9, 7)
TARGET = (0, 1, 2, 1)
NEED_KEYS = ("gradtoken",)
NEED_SCORES = ("agcam", "attnlrp", "transattr", "lrp_rollout", "plrp", "lrp", "abslrp")
OF_PICTURES = ("scorecam", "vitcx", "rise", "occlusion", "pami", "hsic", "lime", "kernel_shap")
OF_NORMS = ("gradcam", "gradcampp", "xgradcam", "xgradcam_abs", "hirescam", "layercam", "gradcam_elementwise")
DROPPING = ("occlusion:by=drop", "rise:by=drop,budget=20", "lime:by=drop,budget=40", "kernel_shap:by=drop,budget=40")
VARIANTS = (
    *("decompx.skipplus", "decompx:bias=token", "fullgrad:rule=libra", "ixg:rule=attnlrp", "gae:rule=libra"),
    *("gradtoken:propagation=rollout_matrix", "alti:setting=original", "attin_residual:norm=following"),
    *("gradcam:convention=skipplus", "decompx.skipplus.propagate", "integrated_gradients:baseline=pad"),
)


@functools.cache
def model_of(kind: str) -> nn.Module:
    return build(kind)


def paths(model: nn.Module) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[block] for block in blocks_of(model)]


def methods_of(kind: str) -> list[str]:
    """All methods and some variants that the family is said to support."""
    names = [info.name for info in list_methods() if info.name not in (*OF_PICTURES, *OF_NORMS)]
    wanted = [*names, *VARIANTS, *DROPPING]
    if kind == "deberta":
        refused = (*NEED_KEYS, *NEED_SCORES, "ixg:rule=attnlrp")
        wanted = [name for name in wanted if name.split(":")[0] not in refused and name not in refused]
    return wanted


@pytest.mark.parametrize("kind", KINDS)
class TestEveryFamily:
    def test_logits_are_the_models_own_and_the_model_is_left_as_it_was(self, kind: str) -> None:
        model, given = model_of(kind), texts(LENGTHS)
        before = state_of(model)
        answer = ask(model, given, ["rollout", "decompx", "gae", "ixg"], None)
        torch.testing.assert_close(answer.logits, logits_of(model, given), **SAME)
        assert (answer.layout.prefix, answer.layout.read.tolist()) == (1, [0])
        assert answer.scores["gae"].shape == (len(LENGTHS), max(LENGTHS) - 1)
        assert state_of(model) == before
        assert_nothing_listens()

    def test_input_times_gradient_agrees_with_hooks(self, kind: str) -> None:
        model, given, target = model_of(kind), texts((8, 8)), torch.tensor([1, 2])
        stack = paths(model)[0].rpartition(".")[0]
        expected = block_inputs_times_gradients(Called(model), f"model.{stack}", given.parts, target)
        found = ask(model, given, [f"ixg:layer={layer}" for layer in range(DEPTH)], target).scores
        for layer, scores in enumerate(expected):
            torch.testing.assert_close(found[f"ixg:layer={layer}"], scores[:, 1:], **AGREES)

    def test_decompx_agrees_with_frozen_parts(self, kind: str) -> None:
        model, given, target = model_of(kind), texts((8, 8)), torch.tensor([1, 2])
        reference = TextReference(model, paths(model), frozen=True)
        torch.testing.assert_close(reference.run(given.parts).logits, logits_of(model, given), **AGREES)
        expected = reference.input_times_gradient(given.parts, target)
        found = ask(model, given, [f"decompx:layer={layer}" for layer in range(DEPTH)], target).scores
        plain = ask(model, given, "ixg", target).scores["ixg"]
        for layer, scores in enumerate(expected):
            torch.testing.assert_close(found[f"decompx:layer={layer}"], scores[:, 1:], **AGREES)
        assert not torch.allclose(plain, expected[0][:, 1:], rtol=1e-3, atol=1e-3)  # the rule makes a difference

    def test_rollout_gae_and_tokentm_agree_with_full_products(self, kind: str) -> None:
        model, given, target = model_of(kind), texts((8, 8)), torch.tensor([1, 2])
        reference = TextReference(model, paths(model), frozen=False)
        found = ask(model, given, ["rollout", "gae", "tokentm"], target).scores
        torch.testing.assert_close(found["rollout"], reference.rollout(given.parts, (0,))[:, 1:], **AGREES)
        torch.testing.assert_close(found["gae"], reference.gae(given.parts, target, (0,))[:, 1:], **AGREES)
        expected = reference.token_transformation(given.parts, target, (0,))[:, 1:]
        torch.testing.assert_close(found["tokentm"], expected, **AGREES)

    @pytest.mark.parametrize("method", ["globenc", "alti:setting=original"])
    def test_decompositions_agree_with_written_out_vectors(self, kind: str, method: str) -> None:
        """GlobEnc and ALTI as published, for post-norm blocks: N_2(N_1(y)), and the tokens behind the first norm."""
        model, given = model_of(kind), texts((8, 8))
        reference = Decomposition(TextReference(model, paths(model), frozen=True), given.parts)
        found = ask(model, given, method, 0).scores[method]
        torch.testing.assert_close(found, reference.rollout(method, (0,))[:, 1:], **AGREES)

    def test_padding_and_company_change_nothing(self, kind: str) -> None:
        model, methods = model_of(kind), methods_of(kind)
        together = ask(model, texts(LENGTHS, tokens=max(LENGTHS) + 2), methods, TARGET)
        whole = texts(LENGTHS)
        for row, (length, target) in enumerate(zip(LENGTHS, TARGET, strict=True)):
            alone = ask(model, whole.cut(torch.tensor([row]), length), methods, target)
            torch.testing.assert_close(together.logits[row], alone.logits[0], rtol=1e-11, atol=1e-12)
            for method in methods:
                found, expected = together.scores[method][row], alone.scores[method][0]
                assert torch.isfinite(expected).all(), method
                assert not found[length - 1 :].any(), method  # padding has no score
                # Rounding of sums in another order; LRP's quotients by small sums make it a thousand times larger.
                tolerance = 1e-9 * float(expected.abs().max()) + 1e-300
                assert float((found[: length - 1] - expected).abs().max()) <= tolerance, method

    def test_decompx_with_biases_adds_up_to_the_logit(self, kind: str) -> None:
        """All tokens and biases, the pooler's tanh or GELU as a linear share: nothing is left unexplained."""
        model, given, target = model_of(kind), texts((8, 8)), torch.tensor([1, 2])
        for layer in range(DEPTH):
            for method in (f"decompx:bias=token,layer={layer}", f"fullgrad:rule=libra,layer={layer}"):
                scores, logits = all_token_scores(model, given, method, target)
                torch.testing.assert_close(scores.sum(dim=1), logits, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("method", OF_PICTURES)
    def test_methods_of_pixels_are_refused_with_the_reason(self, kind: str, method: str) -> None:
        with pytest.raises(UnsupportedModelError, match=r"no pixels.*Methods that work on it: .*gae"):
            ask(model_of(kind), texts((6,)), method, 0)

    def test_activation_maps_behind_the_last_attention_are_refused(self, kind: str) -> None:
        for method in OF_NORMS:
            with pytest.raises(UnsupportedModelError, match="convention=skipplus"):
                ask(model_of(kind), texts((6,)), method, 0)


@pytest.mark.parametrize("kind", FUSED)
def test_relevance_is_conserved_down_to_the_words(kind: str) -> None:
    """Chefer's rules hand on what arrives: 1 at the class, 1 at all tokens; their constants 1e-9 leave 2e-8 at most."""
    given, target = texts((8, 8)), torch.tensor([1, 2])
    with opened(model_of(kind), given, "lrp:rules=ours", target) as (_, view):
        (backward,) = view.gradients
        relevance = view.token_gradient(backward, PIXELS).sum(dim=(1, 2))
    torch.testing.assert_close(relevance, torch.ones(2, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", FUSED)
def test_written_out_attention_gives_what_fused_gives(kind: str) -> None:
    """transformers' eager attention may round A to float32: 6e-8, which grows through three blocks."""
    given = texts(LENGTHS)
    methods = ["rollout", "gae", "decompx", "tokentm", "gradtoken", "attnlrp", "globenc", "transattr"]
    fused = ask(model_of(kind), given, methods, TARGET)
    eager = ask(build(kind, "eager"), given, methods, TARGET)
    for method in methods:
        scale = float(fused.scores[method].abs().max())
        torch.testing.assert_close(eager.scores[method], fused.scores[method], rtol=1e-5, atol=1e-5 * scale)


class TestDisentangledAttention:
    @pytest.mark.parametrize("method", NEED_KEYS)
    def test_keys_that_say_only_a_part_are_refused(self, method: str) -> None:
        with pytest.raises(UnsupportedModelError, match="more than q and k") as caught:
            ask(model_of("deberta"), texts((6,)), method, 0)
        promised = str(caught.value).split("Methods that work on it: ")[1].split(", ")
        assert promised == [name for name in methods_of("deberta") if name in promised]
        assert {"decompx", "gae", "tokentm", "globenc"} <= set(promised)

    @pytest.mark.parametrize("method", NEED_SCORES)
    def test_rules_that_cannot_follow_the_scores_are_refused(self, method: str) -> None:
        with pytest.raises(UnsupportedModelError, match="cannot follow"):
            ask(model_of("deberta"), texts((6,)), method, 0)

    def test_a_convolution_between_blocks_is_refused(self) -> None:
        model = build("deberta", conv_kernel_size=3)
        with pytest.raises(UnsupportedModelError, match="between blocks 0 and 1"):
            ask(model, texts((6,)), "ixg", 0)


def test_token_types_and_masks_reach_the_model() -> None:
    model, given = build("bert"), texts((8, 6))
    kinds = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 0, 0]])
    typed = type(given)({**given.parts, "token_type_ids": kinds}, given.lengths, given.content, given.blanks)
    answer = ask(model, typed, "decompx", 0)
    torch.testing.assert_close(answer.logits, logits_of(model, typed), **SAME)
    assert not torch.allclose(answer.logits, logits_of(model, given))
