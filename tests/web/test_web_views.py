"""What the page's scripts are given, and the questions that they ask."""

import base64
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import vitreous
from vitreous.errors import InputError
from vitreous.methods import list_methods
from vitreous.targets import Contrast, Prompt
from vitreous.web.image_service import ImageService
from vitreous.web.jobs import Job
from vitreous.web.models import ModelCache
from vitreous.web.requests import ExplainRequest
from vitreous.web.results import PromptTarget, SimilarTarget, read_target, readable_examples
from vitreous.web.views import (
    RECOMMENDED,
    _encoded,
    method_catalogue,
    page_config,
    target_json,
    trust_of,
    view_of,
    warning_of,
)

TINY = "timm/test_vit@random"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def service():
    service = ImageService(ModelCache(TINY))
    yield service
    service.close()


@pytest.fixture
def visit(service, tmp_path, photo):
    photo.save(tmp_path / "leaf.png")
    return service.read(tmp_path / "leaf.png", "leaf.png", TINY)


def scores_in(map_):
    values = np.frombuffer(base64.b64decode(map_["data"]), {"f4": "<f4", "u2": "<u2"}[map_["type"]])
    if map_["type"] == "f4":
        return values
    return map_["low"] + values.astype(float) / 65535 * (map_["high"] - map_["low"])


def test_a_contrast_is_that_of_the_library(service, visit, photo):
    request = ExplainRequest(("ixg", "gae"), (7, Contrast(7, 3)))
    results = service.explain(visit, request, Job())
    expected = vitreous.explain(service.models.get(TINY), photo, ["ixg", "gae"], [[7, Contrast(7, 3)]])
    view = view_of(results, visit, request, reads_text=False)
    for place, row in enumerate(view["maps"]):
        for map_, method in zip(row, request.methods, strict=True):
            assert np.array_equal(scores_in(map_), expected.scores_of(method, 0, place).float().numpy())
    assert view["questions"][1]["title"] == "Why class 7 rather than class 3?"
    assert view["questions"][1]["key"] == {"kind": "contrast", "a": 7, "b": 3}
    stored = results.explanation(("ixg",), (7, Contrast(7, 3)))
    assert stored.label(0, 1) == expected.label(0, 1)
    # float32: the value is the difference of two stored logits
    torch.testing.assert_close(stored.target_values.float(), expected.target_values.float(), rtol=1e-5, atol=1e-6)


def test_a_second_photo_is_compared_by_the_embedding(service, visit, tmp_path, photo):
    photo.rotate(90).save(tmp_path / "other.png")
    other = SimilarTarget(service.read(tmp_path / "other.png", "other.png", TINY).upload)
    same = SimilarTarget(visit.upload)
    request = ExplainRequest(("gae", "ixg"), (other, same))
    results = service.explain(visit, request, Job())
    assert results.objects[same][1] == pytest.approx(1, abs=1e-5)  # the cosine of a photo with itself, in float32
    assert results.objects[other][1] < 0.999
    view = view_of(results, visit, request, reads_text=False)
    assert [one["title"] for one in view["questions"]] == ["Why similar to other.png?", "Why similar to leaf.png?"]
    assert view["questions"][0]["thumb"].startswith("data:image/jpeg")
    assert all("data" in map_ for row in view["maps"] for map_ in row)


def test_a_prompt_needs_a_model_that_reads_texts_and_leaves_classes_alone(service, visit):
    request = ExplainRequest(("gae",), (7, PromptTarget("a cat")))
    results = service.explain(visit, request, Job())
    classes, prompts = view_of(results, visit, request, reads_text=False)["maps"]
    assert "data" in classes[0]
    assert "reads no text" in prompts[0]["failed"]
    with pytest.raises(InputError, match="measured for a class"):
        service.measure_trust(visit, ExplainRequest(("gae",), (Contrast(7, 3),)), Job())


def test_trust_is_that_of_the_library_and_kept(service, visit, photo):
    request = ExplainRequest(("gae", "ixg"), (7,))
    found = service.measure_trust(visit, request, Job())
    model = service.models.get(TINY)
    (expected,) = vitreous.trust(model, photo, vitreous.explain(model, photo, ["gae", "ixg"], 7))
    assert found.sentence == expected.sentence
    assert service.cached_trust(visit, request) is found
    runs = service.images_run
    assert service.measure_trust(visit, request, Job()) is found
    assert service.images_run == runs
    card = trust_of(found)
    assert found.sentence == f"Trust: {card['verdict']}. {card['sentence']}"
    assert {name: value for name, value, _ in card["figures"]}["Random orders beaten"].endswith(" of 20")


def test_the_most_probable_classes_are_explained_where_none_is_chosen(service, visit):
    results = service.explain(visit, ExplainRequest(("gae",), likely=2), Job())
    top = [one.class_index for one in results.sample.top(2)]
    assert list(ExplainRequest(("gae",), likely=2).targets_for(results)) == top
    assert all(("gae", one) in results.scores for one in top)
    assert "No class fits" in warning_of(results)  # random weights: a thousandth each


def test_maps_of_pixels_are_sent_in_16_bits():
    scores = torch.linspace(-2, 3, 5000)
    kind, data = _encoded(scores, -2.0, 3.0)
    found = scores_in({"type": kind, "data": data, "low": -2.0, "high": 3.0})
    assert kind == "u2"
    assert np.abs(found - scores.numpy()).max() <= 5 / 65535  # half a step, and float32


@pytest.mark.parametrize("target", [3, Contrast(3, 1), PromptTarget("a cat")])
def test_targets_are_read_as_they_are_spelled(target):
    assert read_target(json.loads(json.dumps(target_json(target)))) == target


@pytest.mark.parametrize(
    "value",
    [None, True, "3", {}, {"kind": "similar"}, {"kind": "prompt", "text": " "}, {"kind": "prompt", "text": "x" * 301}],
)
def test_other_targets_are_refused(value):
    with pytest.raises(InputError):
        read_target(value)


def test_the_picker_offers_every_method_once_with_paper_and_cost():
    catalogue = method_catalogue()
    spellings = [one["spelling"] for one in catalogue["methods"]]
    assert len(spellings) == len(set(spellings))
    assert {info.name for info in list_methods()} <= set(spellings)
    assert "decompx.skipplus.propagate" in spellings
    for one in catalogue["methods"]:
        assert one["author"]
        assert one["year"] > 2000
        assert one["cost"]
        assert one["link"].startswith("https://")
    for preset in catalogue["presets"]:
        ExplainRequest(tuple(preset["methods"]))  # within the limits of the page
    assert set(spellings[: len(RECOMMENDED)]) == set(RECOMMENDED)
    assert [one["family"] for one in catalogue["methods"][:3]] == ["recommended"] * 3


def test_examples_are_readable_credited_and_small():
    examples = readable_examples(())
    assert 6 <= len(examples) <= 8
    for one in examples:
        assert any(licence in one.credit for licence in ("CC0", "CC BY 2.0", "public domain"))
        assert one.path.stat().st_size < 100_000
    assert len(json.dumps(page_config(examples))) < 300_000


def test_a_model_of_images_and_texts_answers_prompts(tmp_path, photo):
    """It is a classifier of common names, and prompts go to its text tower."""
    pytest.importorskip("transformers")
    from small_dual_encoders import save_clip

    name = save_clip(tmp_path / "clip")
    photo.save(tmp_path / "leaf.png")
    service = ImageService(ModelCache(name))
    visit, prompts = service.read(tmp_path / "leaf.png", "leaf.png", name), ["a red cat", "a dog"]
    request = ExplainRequest(("gae", "ixg"), (0, *map(PromptTarget, prompts)))
    results = service.explain(visit, request, Job())
    expected = vitreous.explain(vitreous.load_dual_encoder(name), photo, ["gae", "ixg"], [[*map(Prompt, prompts)]])
    for place, prompt in enumerate(prompts):
        # float32 in both
        found = results.scores["ixg", PromptTarget(prompt)]
        torch.testing.assert_close(found, expected.scores_of("ixg", 0, place), rtol=1e-4, atol=1e-6)
        assert results.objects[PromptTarget(prompt)][1] == pytest.approx(float(expected.target_values[0, place]), 1e-4)
    assert service.models.reads_prompts(name)
    view = view_of(results, visit, request, reads_text=True)
    assert [one["title"] for one in view["questions"]] == ["Why cat?", "Where is “a red cat”?", "Where is “a dog”?"]
    assert "any text" in view["model"]["knows"]
    service.close()


def test_the_dockerfile_runs_a_command_that_exists_on_files_that_exist():
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    steps = [line.split(None, 1) for line in lines if line and not line.startswith("#")]
    assert steps[0] == ["FROM", "python:3.11-slim"]
    for name, rest in steps:
        if name == "COPY":
            assert all((ROOT / source).exists() for source in rest.split()[:-1])
    entry = next(json.loads(rest) for name, rest in steps if name == "ENTRYPOINT")
    command = next(json.loads(rest) for name, rest in steps if name == "CMD")
    assert entry[:2] == ["vitreous", "serve"]
    from typer.testing import CliRunner

    from vitreous.cli.app import app

    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    for option in [*entry, *command]:
        if option.startswith("--"):
            assert option in shown
    assert "--open" in shown


def test_the_dockerfile_installs_what_it_says(tmp_path):
    """Of the files that are copied, and no others, a wheel with all parts of the page is built; its extras exist."""
    pytest.importorskip("setuptools", minversion="77", reason="the build backend")
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    for line in lines:
        if line.startswith("COPY "):
            *sources, _ = line.split()[1:]
            for source in sources:
                if (ROOT / source).is_dir():
                    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
                    shutil.copytree(ROOT / source, tmp_path / source, ignore=ignored)
                else:
                    shutil.copy(ROOT / source, tmp_path)
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        inside = set(wheel.namelist())
        metadata = next(wheel.read(name).decode() for name in inside if name.endswith("/METADATA"))
        commands = next(wheel.read(name).decode() for name in inside if name.endswith("/entry_points.txt"))
    wanted = {
        file.relative_to(ROOT / "src").as_posix()
        for folder in ("web/static", "web/examples", "html/templates", "models/demo")
        for file in (ROOT / "src/vitreous" / folder).rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }
    assert wanted <= inside
    assert "vitreous = " in commands
    installs = " ".join(line for line in lines if line.startswith("RUN pip"))
    extras = re.search(r'"\.\[([a-z,-]+)\]"', installs)[1].split(",")
    assert {"web", "demo", "hf"} == set(extras)
    assert all(f"Provides-Extra: {extra}" in metadata for extra in extras)
    # What is installed by name has one version, and is what the extra of demo-clip asks for.
    (alone,) = re.findall(r"--no-deps ([a-z0-9-]+)", installs)
    assert re.search(rf"^{alone}==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"Requires-Dist: {alone}==" in metadata
