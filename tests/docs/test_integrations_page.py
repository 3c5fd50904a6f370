"""The page on other tools and the examples in docstrings of the adapters run, on small models."""

import doctest
import importlib
import inspect
import warnings

import matplotlib as mpl
import nibabel
import numpy as np
import pytest
import torch
from PIL import Image
from test_docs import BLOCK, ROOT

import vitreous
from small_models import random_images, small_vit
from small_scans import scan
from vitreous.models import Preprocessing

mpl.use("Agg")
PAGE = ROOT / "docs" / "integrations.md"
BLOCKS = [code for language, code in BLOCK.findall(PAGE.read_text(encoding="utf-8")) if language == "python"]
MODULES = ("captum", "formats", "grad_cam", "maps", "medical", "quantus", "training")
EXAMPLES = [
    (module, name)
    for module in MODULES
    for name, found in inspect.getmembers(importlib.import_module(f"vitreous.integrations.{module}"))
    if getattr(found, "__module__", "") == f"vitreous.integrations.{module}" and ">>>" in (inspect.getdoc(found) or "")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("page")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    for name in ("photo.jpg", "demo.jpg"):
        Image.fromarray(pixels).save(place / name)
    scan(np.arange(1600).reshape(40, 40), place / "scan.dcm")
    volume = np.random.default_rng(0).random((8, 9, 50)) * 100
    nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), place / "brain.nii.gz")
    return place


def test_all_blocks_run_in_order(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    torch.manual_seed(0)
    names = {"model": small_vit(depth=2, dtype=torch.float32), "images": random_images(2, dtype=torch.float32)}
    assert len(BLOCKS) > 8
    with warnings.catch_warnings(action="ignore"):
        for number, code in enumerate(BLOCKS):
            exec(compile(code, f"integrations.md block {number}", "exec"), names)
    assert "saliency: AOPC" in capsys.readouterr().out
    assert names["attributions"].shape == (2, 3, 32, 32)
    assert {"maps.json", "maps.h5", "overlay.dcm", "runs", "saved"} <= {file.name for file in folder.iterdir()}
    assert "attnlrp" in names["left_out"]


@pytest.mark.parametrize(("module", "name"), EXAMPLES)
def test_examples_in_docstrings_run(module, name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    network = small_vit(depth=2, dtype=torch.float32)
    seen = Preprocessing(image_size=(32, 32), mean=(0.5,) * 3, std=(0.5,) * 3)
    images = random_images(1, dtype=torch.float32)
    known = {"vitreous": vitreous, "images": images, "model": (network, seen) if module == "maps" else network}
    known["explanation"] = vitreous.explain((network, seen), "demo.jpg", ["gae", "rollout"])
    found = getattr(importlib.import_module(f"vitreous.integrations.{module}"), name)
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(found), known, name, None, None)
    said: list[str] = []
    doctest.DocTestRunner().run(example, out=said.append)
    assert not said, "".join(said)
