"""Small text classifiers of transformers: BERT (MiniLM), DistilBERT, RoBERTa, ELECTRA, DeBERTa, MPNet, ModernBERT."""

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

import transformers

from few_evaluations import with_few
from small_text_models import COMMON, DEPTH, SIZES, ask, blocks_of, build, logits_of, texts
from vitreous.errors import UnsupportedModelError
from vitreous.methods import list_methods
from vitreous.tape import PIXELS
from whole_maps import all_token_scores, opened

FUSED = ("bert", "roberta", "electra", "distilbert")
POST_NORM = (*FUSED, "deberta", "mpnet")
KINDS = (*POST_NORM, "modernbert")
MEAN_POOLED = "modernbert, mean pooled"  # over the tokens of each text that are no padding
LENGTHS = (9, 5, 9, 7)
TARGET = (0, 1, 2, 1)
NEED_KEYS = ("gradtoken", "grad_eclip")
RELEVANCE = ("transattr", "lrp_rollout", "plrp", "lrp", "abslrp")
OF_PICTURES = (
    "refined",
    "caap",
    "dave",
    "scorecam",
    "vitcx",
    "rise",
    "occlusion",
    "pami",
    "hsic",
    "lime",
    "kernel_shap",
)
OF_NORMS = ("gradcam", "gradcampp", "xgradcam", "xgradcam_abs", "hirescam", "layercam", "gradcam_elementwise")
DROPPING = ("occlusion:by=drop", "rise:by=drop,budget=20", "lime:by=drop,budget=40", "kernel_shap:by=drop,budget=40")
VARIANTS = (
    *("decompx.skipplus", "decompx:bias=token", "decompx:bias=equal", "fullgrad:rule=libra", "ixg:rule=attnlrp"),
    "gae:rule=libra",
    *("gradtoken:propagation=rollout_matrix", "alti:setting=original", "attin_residual:norm=following"),
    *("gradcam:convention=skipplus", "decompx.skipplus.propagate", "integrated_gradients:baseline=pad"),
)


@functools.cache
def model_of(kind: str) -> nn.Module:
    return build("modernbert", classifier_pooling="mean") if kind == MEAN_POOLED else build(kind)


def paths(model: nn.Module) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[block] for block in blocks_of(model)]


def methods_of(kind: str) -> list[str]:
    """All methods and some variants that the family is said to support."""
    names = [info.name for info in list_methods() if info.name not in (*OF_PICTURES, *OF_NORMS)]
    wanted = [*names, *VARIANTS, *DROPPING]
    # Relative positions or rotations, for which relevance has no rule, and scores that are made of more than q and k.
    refused = {
        "deberta": (*NEED_KEYS, *RELEVANCE),
        **dict.fromkeys(("mpnet", "modernbert"), RELEVANCE),
        MEAN_POOLED: (*RELEVANCE, *DROPPING[-1:]),  # of a text without tokens there is no mean
    }
    return [name for name in wanted if not {name, name.split(":")[0]} & set(refused.get(kind, ()))]


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
        # ModernBERT's GeGLU is a product of two streams, which DecompX conserves and the frozen rule counts twice.
        name = "ixg:rule=frozen,layer={}" if kind == "modernbert" else "decompx:layer={}"
        found = ask(model, given, [name.format(layer) for layer in range(DEPTH)], target).scores
        plain = ask(model, given, "ixg", target).scores["ixg"]
        for layer, scores in enumerate(expected):
            torch.testing.assert_close(found[name.format(layer)], scores[:, 1:], **AGREES)
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

    def test_decompx_with_biases_adds_up_to_the_logit(self, kind: str) -> None:
        """All tokens and biases, the pooler's tanh or GELU as a linear share: nothing is left unexplained."""
        model, given, target = model_of(kind), texts((8, 8)), torch.tensor([1, 2])
        # A gate is a product of two paths, each of which the frozen rule counts whole.
        methods = ("decompx:bias=token", "fullgrad:rule=libra") if kind in POST_NORM else ("fullgrad:rule=libra",)
        for layer in range(DEPTH):
            for method in (f"{method},layer={layer}" for method in methods):
                scores, logits = all_token_scores(model, given, method, target)
                torch.testing.assert_close(scores.sum(dim=1), logits, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("method", OF_PICTURES)
    def test_methods_of_pixels_are_refused_with_the_reason(self, kind: str, method: str) -> None:
        with pytest.raises(UnsupportedModelError, match=r"no pixels.*Methods that work on it: .*gae"):
            ask(model_of(kind), texts((6,)), method, 0)


@pytest.mark.parametrize("kind", [*KINDS, MEAN_POOLED])
def test_padding_and_company_change_nothing(kind: str) -> None:
    model, methods = model_of(kind), [with_few(method) for method in methods_of(kind)]
    together = ask(model, texts(LENGTHS, tokens=max(LENGTHS) + 2), methods, TARGET)
    whole = texts(LENGTHS)
    for row in (1, 2):  # the one with the most padding, and one of the longest behind others
        length, target = LENGTHS[row], TARGET[row]
        alone = ask(model, whole.cut(torch.tensor([row]), length), methods, target)
        torch.testing.assert_close(together.logits[row], alone.logits[0], rtol=1e-11, atol=1e-12)
        for method in methods:
            found, expected = together.scores[method][row], alone.scores[method][0]
            assert torch.isfinite(expected).all(), method
            assert not found[length - 1 :].any(), method  # padding has no score
            # Rounding of sums in another order; LRP's quotients by small sums make it a thousand times larger.
            tolerance = 1e-9 * float(expected.abs().max()) + 1e-300
            assert float((found[: length - 1] - expected).abs().max()) <= tolerance, method


@pytest.mark.parametrize("kind", POST_NORM)
def test_activation_maps_behind_the_last_attention_are_refused(kind: str) -> None:
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

    @pytest.mark.parametrize("method", RELEVANCE)
    def test_rules_that_cannot_follow_the_scores_are_refused(self, method: str) -> None:
        with pytest.raises(UnsupportedModelError, match=r"more than softmax\(scale q kᵀ \+ bias\) v"):
            ask(model_of("deberta"), texts((6,)), method, 0)

    def test_a_convolution_between_blocks_belongs_to_the_one_in_front(self) -> None:
        model, given, target = build("deberta", conv_kernel_size=3), texts((8, 8)), torch.tensor([1, 2])
        stack = paths(model)[0].rpartition(".")[0]
        expected = block_inputs_times_gradients(Called(model), f"model.{stack}", given.parts, target)
        found = ask(model, given, [f"ixg:layer={layer}" for layer in range(DEPTH)], target).scores
        for layer, scores in enumerate(expected):
            torch.testing.assert_close(found[f"ixg:layer={layer}"], scores[:, 1:], **AGREES)
        # Its bias and its norm's count with that block.
        for layer in range(DEPTH):
            scores, logits = all_token_scores(model, given, f"fullgrad:rule=libra,layer={layer}", target)
            torch.testing.assert_close(scores.sum(dim=1), logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "method", "reason"),
    [
        ("ConvBert", "tokentm", "no linear map leads"),  # half of what reaches it comes from a convolution
        ("MobileBert", "tokentm", "no linear map leads"),  # its stream is narrower inside, with sums of its own
        ("IBert", "alti", "IntLayerNorm in block 0 is neither"),  # its norms give a scale beside the tokens
    ],
)
def test_parts_that_are_not_what_their_names_say_are_refused(name: str, method: str, reason: str) -> None:
    config = getattr(transformers, f"{name}Config")(**COMMON, **{**SIZES, "num_attention_heads": 4})
    model = getattr(transformers, f"{name}ForSequenceClassification")(config).eval()
    with pytest.raises(UnsupportedModelError, match=reason):
        ask(model, texts((6,)), method, 0)


def test_token_types_and_masks_reach_the_model() -> None:
    model, given = build("bert"), texts((8, 6))
    kinds = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 0, 0]])
    typed = type(given)({**given.parts, "token_type_ids": kinds}, given.lengths, given.content, given.blanks)
    answer = ask(model, typed, "decompx", 0)
    torch.testing.assert_close(answer.logits, logits_of(model, typed), **SAME)
    assert not torch.allclose(answer.logits, logits_of(model, given))
