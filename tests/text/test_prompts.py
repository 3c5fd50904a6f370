"""Words of prompts: maps are the gradients of the model's own score, and patches times words add up to them."""

import pytest
import torch
from torch.nn import functional

import vitreous
from small_dual_encoders import FAMILIES, IMAGE, embeddings, input_times_gradient, own_tokens, text_blocks
from vitreous.errors import InputError, MethodError
from vitreous.models.dual_encoder import find_dual_encoder
from vitreous.text.prompts import explain_words, match_words

EXACT = 1e-12  # float64: both sides do the same sums in another order
PROMPT = "a photo of tabby cats"
METHODS = ["gae", "rollout", "tokentm", "gradtoken", "decompx.skipplus", "legrad", "alti", "attcat", "raw_attention"]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    model, tokenizer = FAMILIES[request.param]()
    return request.param, model, tokenizer


@pytest.fixture
def pixels():
    return torch.randn(2, 3, IMAGE, IMAGE, dtype=torch.float64)


def test_word_maps_are_the_gradients_of_the_score(case, pixels):
    family, model, tokenizer = case
    tokens = own_tokens(family, tokenizer, PROMPT)

    def score():
        image, text = embeddings(model, pixels[:1], tokens)
        return model.logit_scale.exp() * functional.cosine_similarity(image, text)

    expected = input_times_gradient(model, text_blocks(model)[0], score)[0]
    explanation = explain_words((model, tokenizer), PROMPT, pixels[:1], "ixg:layer=0")
    (found,) = explanation.scores["ixg:layer=0"]
    first = 0 if family == "siglip" else 1
    assert (found - expected[first : first + len(found)]).abs().max() < EXACT
    assert [word.text for word in explanation.words[0]] == PROMPT.split()
    bias = 0 if family != "siglip" else float(model.logit_bias)
    assert abs(float(explanation.logits[0, 0]) - float(score().detach()) - bias) < EXACT


def test_methods_of_texts_explain_prompts(case, pixels):
    _, model, tokenizer = case
    explanation = explain_words((model, tokenizer), [PROMPT, "the dog"], pixels[:1], METHODS)
    for method in METHODS:
        for maps, pieces in zip(explanation.scores[method], explanation.pieces, strict=True):
            assert maps.shape == (len(pieces),)
            assert torch.isfinite(maps).all()
            # GradToken keeps what is positive, which of a few pieces may be none.
            assert bool(maps.any()) or method == "gradtoken", method


def test_a_prompt_is_explained_the_same_beside_others(case, pixels):
    _, model, tokenizer = case
    together = explain_words((model, tokenizer), [PROMPT, "the dog"], pixels, ["gae", "decompx"])
    for number, prompt in enumerate((PROMPT, "the dog")):
        for place in range(2):
            alone = explain_words((model, tokenizer), prompt, pixels[place : place + 1], ["gae", "decompx"])
            for method in ("gae", "decompx"):
                assert (together.scores[method][number][place] - alone.scores[method][0]).abs().max() < EXACT


@pytest.mark.parametrize("method", ["decompx", "ixg.plus", "attcat"])
def test_patches_times_words_add_up_to_the_map_of_the_prompt(case, pixels, method):
    _, model, tokenizer = case
    found = match_words((model, tokenizer), pixels[:1], PROMPT, method)
    network = find_dual_encoder((model, tokenizer)).classifier([PROMPT])
    explanation = vitreous.explain(network, pixels[:1], method, target=0, outputs="value")
    assert (found.patches - explanation.scores[method][0]).abs().max() < EXACT
    assert abs(found.score - float(explanation.logits[0, 0])) < EXACT
    assert found.scores.shape == (16, 5)
    assert found.word(3).shape == (4, 4)


def test_patches_times_words_are_the_bilinear_form_of_both_embeddings(pixels):
    """On a tower whose shares are known: contributions to every coordinate by one plain backward pass each."""
    model, tokenizer = FAMILIES["clip"]()
    tokens = own_tokens("clip", tokenizer, PROMPT)
    width = model.config.projection_dim

    def shares(side):
        blocks = model.vision_model.encoder.layers if side == 0 else text_blocks(model)
        return torch.stack([
            input_times_gradient(
                model, blocks[0],
                lambda k=k: functional.normalize(embeddings(model, pixels[:1], tokens)[side], dim=-1)[:, k],
            )[0]
            for k in range(width)
        ])  # fmt: skip

    patches, pieces = shares(0)[:, 1:], shares(1)[:, 1:-1]
    expected = model.logit_scale.exp() * patches.T @ pieces
    words = torch.cat([expected[:, :4], expected[:, 4:].sum(dim=1, keepdim=True)], dim=1)  # "cats" has two pieces
    found = match_words((model, tokenizer), pixels[:1], PROMPT, "ixg:layer=0")
    assert (found.scores - words).abs().max() < EXACT


def test_methods_that_are_not_linear_are_refused(pixels):
    with pytest.raises(
        MethodError, match="gae is not linear in what it explains, so that no relevance of a patch with"
    ):
        match_words(FAMILIES["clip"](), pixels[:1], PROMPT, "gae")


def test_one_image_is_needed(pixels):
    with pytest.raises(InputError, match="match_words takes one image, not 2"):
        match_words(FAMILIES["clip"](), pixels, PROMPT)
