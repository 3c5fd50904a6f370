"""Every public name has an example in its docstring, and every example runs: small random models, the demo photo."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import forked
import vitreous
from small_dual_encoders import save_clip
from small_text_models import save_classifier
from vitreous import metrics, pictures, plugin
from vitreous.methods import MethodInfo
from vitreous.models.demo import PHOTO

ROOT = Path(__file__).parents[2]
MODEL = "timm/test_vit@random"
# A type alias has no docstring; a version is a text; of modules, their public members count.
WITHOUT = {"vitreous.__version__", "vitreous.metrics.Direction", "vitreous.errors", "vitreous.speed"}
PUBLIC = {
    **{f"vitreous.{name}": getattr(vitreous, name) for name in vitreous.__all__},
    **{f"vitreous.metrics.{name}": getattr(metrics, name) for name in metrics.__all__},
    **{f"vitreous.pictures.{name}": getattr(pictures, name) for name in pictures.__all__},
    **{f"vitreous.speed.{name}": getattr(vitreous.speed, name) for name in vitreous.speed.__all__},
    **{f"vitreous.targets.{name}": getattr(vitreous.targets, name) for name in vitreous.targets.__all__},
    "vitreous.errors.VitreousError": vitreous.errors.VitreousError,
    "vitreous.methods.MethodInfo": MethodInfo,
    "vitreous.plugin.method": plugin.method,
}
NAMES = sorted(set(PUBLIC) - WITHOUT)
MANY_RUNS = {"vitreous.audit", "vitreous.evaluate", "vitreous.recommend"}  # their examples show no picture's size


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What examples find in the working directory: a photo, a folder of labelled photos, and a text classifier."""
    place = tmp_path_factory.mktemp("examples")
    with Image.open(PHOTO) as photo:
        photo.convert("RGB").save(place / "demo.jpg")
        photo.convert("RGB").rotate(90).save(place / "other.jpg")
    (place / "photos").mkdir()
    random = np.random.default_rng(0)
    for label in (0, 1):
        pixels = random.integers(0, 256, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / "photos" / f"{label}.png")
    (place / "photos" / "labels.csv").write_text("file,class_index\n0.png,0\n1.png,1\n")
    save_classifier(place / "text-model", ["bad", "good", "neither"])
    save_clip(place / "clip-model")
    Image.fromarray(random.integers(0, 256, (60, 60, 3), dtype=np.uint8)).save(place / "other.jpg")
    return place


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return vitreous.load_model(MODEL)


@pytest.fixture(scope="module")
def smaller_model():
    """On 16 patches instead of 100."""
    return vitreous.load_model(MODEL, image_size=64)


@pytest.fixture(scope="module")
def clip(folder):
    return vitreous.load_dual_encoder(f"hf/{folder / 'clip-model'}")


@pytest.fixture(scope="module")
def explanation(folder, model):
    return vitreous.explain(model, folder / "demo.jpg", ["gae", "rollout"])


def test_what_needs_no_example_is_neither_a_function_nor_a_class():
    assert set(PUBLIC) >= WITHOUT
    assert not [name for name in WITHOUT if inspect.isclass(PUBLIC[name]) or inspect.isfunction(PUBLIC[name])]


def test_the_reference_has_every_public_name():
    script = ROOT / "scripts" / "write_api_pages.py"
    result = forked.run([str(script), "--check"])
    assert result.returncode == 0, result.stderr
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("api*.md"))
    modules = {"vitreous.errors", "vitreous.rules", "vitreous.speed", "vitreous.targets", "vitreous.__version__"}
    assert not [name for name in set(PUBLIC) - modules if f"::: {name}\n" not in text]


@pytest.mark.parametrize("name", NAMES)
def test_the_example_runs(name, folder, model, smaller_model, clip, explanation, registry, monkeypatch):
    monkeypatch.chdir(folder)
    found = PUBLIC[name]
    asked = smaller_model if name in MANY_RUNS else model
    known = {"vitreous": vitreous, "model": asked, "clip": clip, "explanation": explanation}
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(found) or "", known, name, None, None)
    assert example.examples, f"{name} has no example in its docstring"
    assert "Examples:" in inspect.getdoc(found)
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL).run(example, out=said.append)
    assert not said, "".join(said)
