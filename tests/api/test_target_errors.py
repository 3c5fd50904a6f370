"""Nonsense given as a target: one plain sentence that says what to do, on the command line without a traceback."""

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import vitreous
from small_dual_encoders import prompt_tokenizer, transformers_model
from small_models import random_images, small_vit
from vitreous.cli import app
from vitreous.errors import VitreousError
from vitreous.targets import Box, Contrast, Logit, Output, Pixels, Prompt, Query, Similarity, Token

MODEL, IMAGES = small_vit(depth=2), random_images(2)
ONES = torch.ones(5, dtype=torch.float64)


@pytest.fixture(scope="module")
def clip():
    return transformers_model("clip"), prompt_tokenizer()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Contrast(1, 1), "needs two classes, not 1 twice"),
        (lambda: Contrast(1, 2, float("nan")), "weight of a contrast must be a finite number"),
        (lambda: Contrast(1.5, 2), "must be a whole number or a name, not 1.5"),
        (lambda: Contrast(1, 99), "class 99 is not between 0 and 4"),
        (lambda: "cat vs dog", "'cat' is not a class number"),
        (lambda: "1 vs ", "a contrast is two classes"),
        (lambda: "1 vs 2 vs 3", "a contrast is two classes"),
        (lambda: "next vs 1", "a contrast is two classes"),
        (lambda: "", "is not a class number"),
        (lambda: {"a": 1}, "or targets of vitreous.targets, not {'a': 1}"),
        (lambda: 10**30, "or targets of vitreous.targets, not 1000"),
        (lambda: len, r"vitreous.targets.Output\(function\)"),
        (list, "the list of targets is empty"),
        (lambda: [[], []], "the list of targets is empty"),
        (lambda: [[Contrast(1, 2)], [1, 2]], "every image has equally many targets, not 1 and 2"),
        (lambda: [Contrast()] * 3, "there are targets for 3 images, and 2 images"),
        (lambda: Prompt("a cat"), "has no text tower"),
        (lambda: Prompt("  "), "the prompt is empty"),
        (lambda: Prompt(3), "a prompt is a text, not 3"),
        (lambda: Prompt("a cat", scale=float("inf")), "the scale of a prompt must be a finite number, not inf"),
        (lambda: Prompt("a cat", embedding="abc"), r"must be a floating tensor \(width,\), not 'abc'"),
        (lambda: Prompt("a cat", embedding=torch.zeros(10)), "must be finite and not 0 in all channels"),
        (lambda: Similarity(torch.ones(7)), "the reference has 7 channels, and the embedding of this model 5"),
        (lambda: Similarity(0 * ONES), "the reference is 0 in all channels"),
        (lambda: Similarity(ONES.long()), "in floating point, not torch.int64"),
        (lambda: Similarity(ONES * float("nan")), "holds NaN or infinite numbers"),
        (lambda: Pixels(torch.ones(32, 32), 1), r"needs a dense output of shape \(batch, classes, height, width\)"),
        (lambda: Pixels(torch.zeros(32, 32), 1), "it selects no pixel"),
        (lambda: Pixels("mask", 1), r"a mask is a tensor or array \(height, width\)"),
        (lambda: Query(0, 1), r"needs an output of shape \(batch, queries, classes\)"),
        (lambda: Box(5, 5, 1, 1), "left < right and top < bottom"),
        (lambda: Token(0), r"needs an output of shape \(batch, tokens, channels\)"),
        (lambda: Output(3), "takes a function of the model's output, not 3"),
        (lambda: Output(lambda output: output, "all"), r"a tensor of shape \(2,\), not \(2, 5\)"),
        (lambda: Output(lambda output: output["x"], "part"), "the target part fails on the model's output"),
        (lambda: Output(lambda output: torch.ones(len(output)), "one"), "does not depend on the model's output"),
        (lambda: Output(lambda output: output[:, 0] * float("nan"), "nan"), "the target nan is NaN for some images"),
        (lambda: Logit(10**30), "is not between 0 and 4"),
    ],
)
def test_one_sentence(make, message):
    with pytest.raises(VitreousError, match=message) as refused:
        vitreous.explain(MODEL, IMAGES, "ixg", target=make())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            Prompt("a cat", embedding=torch.ones(3)),
            "the given embedding has 3 channels, and those of this model have 10",
        ),
        ([[Prompt("a cat"), Contrast()]] * 2, "needs class scores"),
    ],
)
def test_one_sentence_of_a_dual_encoder(clip, target, message):
    with pytest.raises(VitreousError, match=message):
        vitreous.explain(clip, IMAGES, "ixg", target=target)


def test_class_names_that_are_one_text(clip):
    with pytest.raises(VitreousError, match=r"class names are a list of texts, not one text: \['cat'\]"):
        vitreous.zero_shot(clip, "cat")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", "1 vs "), "a contrast is two classes"),
        (("--target", "cat vs dog"), "'cat' is not a class number"),
        (("--target", "9999"), "is not between 0 and 999"),
        (("--target", "1", "--topk", "2"), "cannot be combined with --topk"),
        (("--target", "1", "--prompt", "a cat"), "cannot be combined with --target"),
        (("--prompt", " "), "the prompt is empty"),
        (("--prompt", "a cat"), "has no text tower"),
        (("--similar-to", "missing.png"), "there is no such file"),
        (("--mask", "missing.png"), "missing.png"),
        (("--mask", "photo.png"), "needs a dense output"),
        (("--mask", "photo.png", "--target", "1 vs 2"), "no contrasts"),
        (("--output", "nowhere"), "nowhere"),
    ],
)
def test_the_command_line_has_no_traceback(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "photo.png")
    model = ("--model", "timm/test_vit@random", "--image-size", "32", "--method", "ixg")
    result = CliRunner().invoke(app, ["explain", "photo.png", *model, *arguments, "--out", "out"])
    assert result.exit_code != 0
    # Boxes of usage errors break lines.
    assert message in " ".join(result.output.replace("│", " ").split()), result.output
    assert "Traceback" not in result.output
