"""``vitreous explain --prompt``: prompts instead of classes, for models of images and texts."""

import json

import pytest
from typer.testing import CliRunner

import vitreous
from small_dual_encoders import save_clip
from vitreous.cli.app import app
from vitreous.models.demo import PHOTO

PROMPTS = ("a photo of a cat", "the dog")


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return save_clip(tmp_path_factory.mktemp("clip") / "model")


def run(*arguments):
    return CliRunner().invoke(app, ["explain", *map(str, arguments)])


def test_every_prompt_has_a_map_and_its_score(clip, tmp_path):
    options = [option for prompt in PROMPTS for option in ("--prompt", prompt)]
    result = run(PHOTO, "--model", clip, *options, "--method", "gae", "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    (photo,) = json.loads(result.stdout)["photos"]
    saved = vitreous.Explanation.load(tmp_path / "chelsea")
    assert [target["name"] for target in photo["targets"]] == list(PROMPTS)
    dual = vitreous.load_dual_encoder(clip)
    expected = vitreous.explain(
        dual, str(PHOTO), "gae", target=[[vitreous.targets.Prompt(prompt) for prompt in PROMPTS]]
    )
    # Float32, written and read as such.
    assert [target["value"] for target in photo["targets"]] == pytest.approx(
        expected.target_values[0].tolist(), rel=1e-5
    )
    assert (saved.scores["gae"] - expected.scores["gae"]).abs().max() <= 1e-6 * expected.scores["gae"].abs().max()


def test_prompts_and_classes_do_not_go_together(clip):
    result = run(PHOTO, "--model", clip, "--prompt", "a cat", "--target", "3")
    assert result.exit_code == 2
    assert "cannot be combined" in result.output


def test_an_empty_prompt_is_refused(clip):
    result = run(PHOTO, "--model", clip, "--prompt", " ")
    assert result.exit_code == 2
    assert "the prompt is empty" in result.output
