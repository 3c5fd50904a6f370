"""What a model's outputs are: said by the caller, or recognised; and what follows for probabilities and maps."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from typer.testing import CliRunner

import vitreous
from evaluations import MODEL, PROTOCOL, only_run, write_photos
from small_data import loaded, samples
from small_models import CLASSES, largest_difference, random_images, small_vit
from small_text_models import build, small_tokenizer
from vitreous.cli import app
from vitreous.errors import InputError, RunError
from vitreous.evaluation.protocols import find_protocol
from vitreous.evaluation.run import ModelChoice, Run
from vitreous.evaluation.runner.measure import measure
from vitreous.explanation.explanation import Explanation
from vitreous.inputs.model_io import likelihood_slope, likelihoods
from vitreous.metrics.perturbation import probabilities
from vitreous.models.loading import TwoSided

# Float64, the same arithmetic but for the order of a softmax's gradient and the head's.
SAME = 1e-12
TAKEN = "taken as probabilities"


@pytest.fixture(scope="module")
def model():
    return small_vit(depth=3, seed=4)


class Headed(nn.Module):
    """A model with an activation of its own at the end, as users write it."""

    def __init__(self, model, function):
        super().__init__()
        self.model, self.function = model, function

    def forward(self, images):
        return self.function(self.model(images))


def with_softmax(model):
    return nn.Sequential(model, nn.Softmax(-1)).eval()


@pytest.mark.parametrize("images", [1, 3])
def test_a_softmax_of_the_models_own_is_recognised_and_not_applied_again(model, images):
    pictures = random_images(images)
    with pytest.warns(UserWarning, match=f"add up to 1, so they are {TAKEN}.*outputs="):
        found = vitreous.explain(with_softmax(model), pictures, ["tokentm"])
    expected = vitreous.explain(model, pictures, ["tokentm"])
    assert found.outputs == "probabilities"
    assert expected.outputs == "logits"
    for index in range(images):
        for one, other in zip(found.top(3, index=index), expected.top(3, index=index), strict=True):
            assert one.class_index == other.class_index
            assert one.probability == pytest.approx(other.probability, abs=SAME)


@pytest.mark.parametrize("function", [torch.sigmoid, lambda logits: functional.softmax(logits, -1)[:, :CLASSES]])
def test_functions_are_recognised_as_modules_are(model, function):
    with pytest.warns(UserWarning, match=TAKEN):
        found = vitreous.explain(Headed(model, function), random_images(1), ["gae"])
    assert largest_difference(found.probabilities, function(model(random_images(1)))) < SAME


def test_a_single_output_behind_a_sigmoid_is_a_probability():
    model = small_vit(depth=2, num_classes=1)
    with pytest.warns(UserWarning, match="are those of a sigmoid"):
        found = vitreous.explain(Headed(model, torch.sigmoid), random_images(1), ["gae"])
    assert largest_difference(found.probabilities, torch.sigmoid(model(random_images(1)))) < SAME


class Shifted(nn.Module):
    """Logits that add up to 1 and lie in [0, 1] for the first picture it sees, and for no other."""

    def __init__(self, model):
        super().__init__()
        self.model, self.first = model, None

    def forward(self, images):
        logits = self.model(images)
        if self.first is None:
            self.first = (logits - logits.softmax(-1))[:1].detach()
        return logits - self.first


@pytest.mark.parametrize(
    "make",
    [
        lambda model: model,
        Shifted,
        lambda model: Headed(model, lambda logits: 0.4 + logits / 100),  # between 0 and 1, but no sigmoid made them
        lambda model: Headed(model, lambda logits: logits.log_softmax(-1)),  # whose softmax are the probabilities
    ],
    ids=["logits", "by chance", "small", "logarithms"],
)
def test_logits_are_not_taken_for_probabilities(model, make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = vitreous.explain(make(model), random_images(1), ["gae"])
    assert found.outputs == "logits"
    assert torch.equal(found.probabilities, found.logits.softmax(-1))


@pytest.mark.parametrize("said", ["probabilities", "logits", "sigmoid", "value"])
def test_what_the_caller_says_counts_and_is_not_warned_about(model, said):
    network = with_softmax(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = vitreous.explain(network, random_images(2), ["tokentm"], outputs=said)
    assert found.outputs == said
    likely = {"probabilities": found.logits, "logits": found.logits.softmax(-1), "sigmoid": found.logits.sigmoid()}
    if said == "value":
        assert found.top(1)[0].probability is None
    else:
        assert torch.equal(found.probabilities, likely[said])


def test_the_caller_overrules_the_configuration():
    model = small_vit(depth=2)
    model.config = SimpleNamespace(problem_type="multi_label_classification")
    assert vitreous.explain(model, random_images(), ["gae"]).outputs == "sigmoid"
    found = vitreous.explain(model, random_images(), ["gae"], outputs="logits")
    assert torch.equal(found.probabilities, found.logits.softmax(-1))


def test_what_is_impossible_is_refused(model):
    with pytest.raises(InputError, match="one of logits, probabilities, sigmoid, value, not 'softmax'"):
        vitreous.explain(model, random_images(), ["gae"], outputs="softmax")
    with pytest.raises(InputError, match=r"go from -\d.*to \d.*give outputs=logits"):
        vitreous.explain(model, random_images(), ["gae"], outputs="probabilities")


@pytest.mark.parametrize("spelling", ["tokentm", "occlusion"])
def test_a_probability_is_explained_as_it_is(model, spelling):
    """dp_c/dx through the model's own softmax, and p_c of masked pictures, are what the logits give these methods."""
    images = random_images(2)
    expected = vitreous.explain(model, images, [spelling], 1).scores[spelling]
    found = vitreous.explain(with_softmax(model), images, [spelling], 1, outputs="probabilities").scores[spelling]
    assert largest_difference(found, expected) < SAME


def test_a_rule_goes_through_the_models_own_softmax_by_its_gradient(model):
    """decompx of p_c is Σ_j dp_c/dy_j decompx of y_j: attention is frozen, the softmax of the classes is not."""
    images, target = random_images(2), torch.tensor([1, 3])
    found = vitreous.explain(with_softmax(model), images, ["decompx"], target, outputs="probabilities")
    each = vitreous.explain(model, images, ["decompx"], [list(range(CLASSES))] * 2)
    slope = likelihood_slope(each.logits, target, "logits")
    expected = torch.einsum("bc,bcp->bp", slope, each.scores["decompx"])
    assert largest_difference(found.scores["decompx"], expected) < SAME


def test_logarithms_of_probabilities_are_finite():
    given = torch.tensor([[0.0, 1.0]])
    assert torch.equal(likelihoods(given, "probabilities"), given)
    assert likelihoods(given, "probabilities", log=True).isfinite().all()
    assert np.isfinite(np.log(probabilities(given.numpy(), outputs="probabilities"))).all()


def test_two_sides_of_a_probability_add_up_to_one():
    model = Headed(small_vit(depth=2, num_classes=1), torch.sigmoid)
    images = random_images(3)
    two = TwoSided(model, probability=True)(images)
    assert torch.equal(two[:, 1:], model(images))
    assert torch.allclose(two.sum(dim=1), torch.ones(3, dtype=torch.float64), atol=SAME)


@pytest.mark.parametrize(
    ("classes", "function"),
    [(CLASSES, lambda logits: logits.softmax(-1)), (CLASSES, torch.sigmoid), (1, torch.sigmoid)],
    ids=["softmax", "multi-label", "single output"],
)
def test_metrics_of_probabilities_are_those_of_the_logits_behind_them(classes, function):
    """AOPC, insertion and deletion of a model with its activation inside, and of the same model without it."""
    network, protocol = small_vit(depth=2, num_classes=classes), find_protocol("skipplus-faithfulness")
    photos = samples(2, classes=max(2, classes))
    logits = replace(loaded(network), outputs="sigmoid" if function is torch.sigmoid else None)
    ended = replace(loaded(Headed(network, function)), outputs="probabilities")
    expected, found = (measure(each, photos, protocol, ["tokentm"]) for each in (logits, ended))
    columns = [name for name in expected[0] if name not in {"image", "method", "error"}]
    for one, other in zip(found, expected, strict=True):
        assert one["error"] is other["error"] is None
        assert any(other[name] not in {0, 1} for name in columns)
        assert [one[name] for name in columns] == pytest.approx([other[name] for name in columns], abs=SAME)


class TestEvaluation:
    @pytest.fixture
    def data(self, tmp_path):
        return write_photos(tmp_path / "photos", 2)

    def evaluate(self, model, data, tmp_path, **options):
        return vitreous.evaluate(model, data, PROTOCOL, ["tokentm"], out=tmp_path / "runs", **options)

    def test_recognised_probabilities_are_part_of_the_run(self, data, tmp_path):
        with pytest.warns(UserWarning, match=TAKEN):
            found = self.evaluate(loaded(with_softmax(small_vit(depth=2))), data, tmp_path)
        manifest = json.loads((found.stores[0].folder / "manifest.json").read_text())
        assert manifest["run"]["model"]["outputs"] == "probabilities"
        assert found.measured_methods == ("tokentm", "random", "centre", "edges")  # controls beside it

    def test_other_outputs_are_another_run(self, data, tmp_path):
        model = loaded(small_vit(depth=2))
        runs = [self.evaluate(model, data, tmp_path, outputs=said).run for said in (None, "logits", "sigmoid")]
        assert runs[0].key == runs[1].key != runs[2].key
        assert runs[0].context == runs[1].context != runs[2].context
        assert [run.model.outputs for run in runs] == [None, None, "sigmoid"]

    def test_a_wrong_word_is_refused(self, data, tmp_path):
        message = "outputs must be logits, probabilities, sigmoid or value, not 'softmax'"
        with pytest.raises(RunError, match=message):
            self.evaluate(loaded(), data, tmp_path, outputs="softmax")

    def test_on_the_command_line(self, data, tmp_path):
        arguments = ["evaluate", "--protocol", PROTOCOL, "--model", MODEL.name, "--image-size", "32", "--data", data]
        arguments += ["--methods", "gae", "--out", str(tmp_path / "runs"), "--outputs", "sigmoid", "--threads", "1"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert only_run(tmp_path / "runs").run.model.outputs == "sigmoid"


def test_explain_on_the_command_line_takes_outputs(tmp_path):
    photo = write_photos(tmp_path / "photos", 1).partition(":")[2]
    arguments = ["explain", f"{photo}/images/0000.png", "--model", MODEL.name, "--image-size", "32", "--json"]
    arguments += ["--method", "gae", "--out", str(tmp_path / "out"), "--outputs", "sigmoid"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert Explanation.load(tmp_path / "out" / "0000").outputs == "sigmoid"


def test_a_manifest_without_outputs_has_the_key_it_was_written_with():
    run = Run("p", {}, ModelChoice("demo"), "w", {}, "masks:x", "f", 3, ("gae",), ("a",))
    stored = run.as_json()
    del stored["model"]["outputs"]
    assert Run.from_json(stored).key == run.key
    assert Run.from_json({**stored, "model": {**stored["model"], "outputs": "sigmoid"}}).key != run.key


class TestTexts:
    TEXTS = ("good film", "the story was not good")

    @pytest.fixture
    def ended(self):
        """A text classifier that ends in its own softmax."""
        model = build("bert", id2label={0: "bad", 1: "neutral", 2: "good"})
        model.classifier = nn.Sequential(model.classifier, nn.Softmax(-1))
        return model, small_tokenizer()

    @pytest.mark.parametrize("count", [1, 2])
    def test_probabilities_are_recognised(self, ended, count):
        with pytest.warns(UserWarning, match=TAKEN):
            found = vitreous.explain_text(ended, self.TEXTS[:count], "gae")
        assert found.outputs == "probabilities"
        assert torch.equal(found.probabilities, found.logits)
        assert largest_difference(found.probabilities.sum(dim=1), torch.ones(count)) < SAME

    def test_outputs_and_names_are_taken(self, ended):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            found = vitreous.explain_text(ended, self.TEXTS, "gae", ["good", "bad"], outputs="sigmoid")
        assert found.outputs == "sigmoid"
        assert torch.equal(found.probabilities, found.logits.sigmoid())
        assert found.target.tolist() == [2, 0]
