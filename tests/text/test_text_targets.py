"""Texts with targets that are not classes: contrasts, logits, probabilities, tokens, functions; saved, and refused."""

import json

import pytest
import torch
import transformers
from typer.testing import CliRunner

import vitreous
from small_text_models import COMMON, SIZES, blocks_of, build, randomised, save_classifier, small_tokenizer
from vitreous.cli import app
from vitreous.errors import TargetError, UnsupportedModelError
from vitreous.targets import Contrast, Logit, Output, Pixels, Probability, Prompt, Similarity, Token

TEXT, SHORT = "the film was very good !", "not bad"
LONG = " ".join(["good bad film was story"] * 9)  # longer than the model takes
EXACT = 1e-12  # float64: the same sums in another order


@pytest.fixture(scope="module")
def pair():
    return build("bert"), small_tokenizer()


def by_autograd(pair, text, score):
    """Σ_channels x dy/dx at the first block's input of one text, without its special tokens."""
    model, tokenizer = pair
    given, kept = tokenizer([text], return_tensors="pt"), []

    def keep(_module, arguments):
        kept.append(arguments[0].detach().requires_grad_())
        return (kept[0], *arguments[1:])

    handle = blocks_of(model)[0].register_forward_pre_hook(keep)
    value = score(model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits[0])
    handle.remove()
    (slope,) = torch.autograd.grad(value, kept[0])
    return value.item(), (kept[0] * slope).sum(dim=-1)[0, 1:-1].detach()


TARGETS = {
    "contrast": (Contrast(1, 2), lambda logits: logits[1] - logits[2]),
    "weighted contrast": (Contrast(0, 2, 0.5), lambda logits: logits[0] - 0.5 * logits[2]),
    "logit": (Logit(2), lambda logits: logits[2]),
    "probability": (Probability(1), lambda logits: logits.softmax(0)[1]),
    "predicted vs next": (Contrast(), lambda logits: logits.topk(2).values[0] - logits.topk(2).values[1]),
    "function": (Output(lambda output: output.logits.logsumexp(1), "evidence"), lambda logits: logits.logsumexp(0)),
}


@pytest.mark.parametrize("name", TARGETS)
def test_scores_are_those_of_plain_autograd(pair, name):
    target, score = TARGETS[name]
    explanation = vitreous.explain_text(pair, [TEXT, SHORT], "ixg:layer=0", target=target)
    for index, text in enumerate((TEXT, SHORT)):
        value, scores = by_autograd(pair, text, score)
        found = explanation.piece_scores("ixg:layer=0", index)
        assert (found - scores).abs().max() < EXACT * scores.abs().max().clamp(min=1)
        assert explanation.value(explanation.class_index(index), index) == pytest.approx(value, abs=EXACT)


def test_several_targets_of_each_text_and_classes_among_them(pair):
    wanted = [[Contrast(1, 2), 1, Contrast()], [Logit(0), 2, Contrast(1, 2)]]
    explanation = vitreous.explain_text(pair, [TEXT, SHORT], ["ixg", "gae"], target=wanted)
    assert explanation.target.shape == (2, 3)
    assert explanation.label(0, 0) == explanation.label(1, 2) == "class 1 rather than class 2"
    assert explanation.label(1, 0) == "logit of class 0"
    assert explanation.class_index(0, 0) == explanation.class_index(1, 2) >= 3
    assert explanation.class_index(0, 1) == 1
    alone = vitreous.explain_text(pair, SHORT, ["ixg", "gae"], target=Contrast(1, 2))
    for method in ("ixg", "gae"):
        assert (explanation.piece_scores(method, 1, 2) - alone.piece_scores(method)).abs().max() < EXACT
    assert len(explanation.select(1)) == 1
    assert explanation.select(1).value(explanation.class_index(1, 0)) == explanation.value(
        explanation.class_index(1, 0), 1
    )


def test_windows_have_the_target_of_their_text(pair):
    """The predicted class is that of the mean over all windows, and so is the number explained."""
    explanation = vitreous.explain_text(pair, [SHORT, LONG], "ixg", target=Contrast(), windows=True)
    first, second = explanation.logits[1].topk(2).indices.tolist()
    expected = vitreous.explain_text(pair, LONG, "ixg", target=[[first, second]], windows=True)
    difference = expected.piece_scores("ixg", 0, 0) - expected.piece_scores("ixg", 0, 1)
    assert (explanation.piece_scores("ixg", 1) - difference).abs().max() < EXACT * difference.abs().max().clamp(min=1)
    value = explanation.value(explanation.class_index(1), 1)
    assert value == pytest.approx(float(explanation.logits[1, first] - explanation.logits[1, second]), abs=EXACT)


def test_a_token_of_a_model_that_labels_tokens():
    config = transformers.BertConfig(**{**COMMON, **SIZES})
    model, tokenizer = randomised(transformers.BertForTokenClassification(config)), small_tokenizer()
    explanation = vitreous.explain_text((model, tokenizer), TEXT, "ixg:layer=0", target=Token(2, 1))

    def score(logits):
        return logits[2, 1]

    value, scores = by_autograd((model, tokenizer), TEXT, score)
    assert (explanation.piece_scores("ixg:layer=0") - scores).abs().max() < EXACT * scores.abs().max().clamp(min=1)
    assert explanation.value(explanation.class_index()) == pytest.approx(value, abs=EXACT)


def test_targets_are_saved_and_loaded(pair, tmp_path):
    wanted = [[Contrast(1, 2), Similarity(torch.ones(3), "ones"), Output(lambda output: output.logits[:, 0], "own")]]
    explanation = vitreous.explain_text(pair, TEXT, "ixg", target=wanted)
    restored = vitreous.TextExplanation.load(explanation.save(tmp_path / "text.json"))
    assert restored.targets[:2] == explanation.targets[:2]
    assert [restored.label(0, number) for number in range(3)] == [explanation.label(0, number) for number in range(3)]
    assert torch.equal(restored.target_values, explanation.target_values)


def test_contrasts_on_the_command_line(tmp_path):
    name = save_classifier(tmp_path / "model", ["negative", "positive", "neutral"])
    arguments = ["explain-text", TEXT, "--model", name, "--method", "ixg", "--target", "positive vs negative"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    (told,) = json.loads(result.stdout)["texts"]
    assert told["targets"][0]["name"] == "positive rather than negative"
    assert "positive rather than negative" in CliRunner().invoke(app, arguments).stdout
    page = tmp_path / "page.html"
    assert CliRunner().invoke(app, [*arguments, "--html", str(page)]).exit_code == 0
    assert "positive rather than negative" in page.read_text()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Prompt("a cat"), "has no text tower"),
        (Similarity("photo.jpg"), "does not embed pictures"),
        (Pixels(torch.ones(4, 4), 1), "needs an output|dense|shape"),
        (Token(0), "needs an output of shape"),
        (Contrast(1, 7), "class 7 is not between 0 and 2"),
        ([Contrast(1, 2)] * 3, "there are targets for 3 texts, and 1 text"),
        (Output(lambda output: output.logits.argmax(1).double(), "argmax"), "does not depend on the model's output"),
        (Output(lambda output: output.logits, "all"), "must return one number per image"),
    ],
    ids=str,
)
def test_what_has_no_meaning_for_a_text_is_refused_in_a_sentence(pair, target, message):
    with pytest.raises((TargetError, UnsupportedModelError), match=message):
        vitreous.explain_text(pair, TEXT, "ixg", target=target)


def test_a_target_and_topk_are_refused(pair):
    with pytest.raises(TargetError, match="give a target or topk, not both"):
        vitreous.explain_text(pair, TEXT, "ixg", target=Contrast(), topk=2)
