"""Integrated Gradients and SmoothGrad run the model no more often than captum does; logits wait until they are read."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import vitreous
from small_models import CLASSES, largest_difference, random_images, small_vit
from vitreous.architecture import find_architecture
from vitreous.errors import InputError, TargetError, VitreousError
from vitreous.explanation.explanation import ExplanationError
from vitreous.speed.timing import Passes, counted_passes, one_thread, whole_pass

IMAGES, STEPS, TARGET = 4, 6, 3
# The same arithmetic in float64 in batches of another size: 1e-16 per step, some hundred steps.
EXACT = 1e-12


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture
def model():
    made = small_vit(depth=2, seed=4).requires_grad_(requires_grad=False)
    vitreous.explain(made, random_images(1), "gae")  # the first time, the patch grid is checked on other images
    return made


@pytest.fixture
def images():
    return random_images(IMAGES, seed=4)


def passes_of(model, images, job) -> Passes:
    architecture = find_architecture(model, images)
    whole = whole_pass(architecture, lambda: model(images))
    with counted_passes(architecture, whole) as passes:
        job()
    return passes


def counts(passes: Passes) -> tuple[float, float]:
    return passes.forward_passes, passes.backward_passes


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        (f"integrated_gradients:steps={STEPS}", (STEPS, STEPS)),
        (f"integrated_gradients:steps={STEPS},quadrature=right", (STEPS, STEPS)),
        ("integrated_gradients:steps=1,quadrature=right", (1, 1)),
        (f"smoothgrad:samples={STEPS}", (STEPS, STEPS)),
        # One run of the pictures themselves for their tokens; captum makes another one for the baseline's.
        (f"integrated_gradients:at=tokens,steps={STEPS}", (STEPS + 1, STEPS)),
        # Here the last step is the recorded run.
        (f"integrated_gradients:at=tokens,steps={STEPS},quadrature=right", (STEPS, STEPS)),
    ],
)
def test_passes_with_a_given_class(model, images, spelling, expected):
    passes = passes_of(model, images, lambda: vitreous.explain(model, images, spelling, TARGET))
    assert counts(passes) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        (f"integrated_gradients:steps={STEPS}", (STEPS + 1, STEPS)),
        (f"integrated_gradients:steps={STEPS},quadrature=right", (STEPS, STEPS)),
        ("integrated_gradients:steps=1,quadrature=right", (1, 1)),
        (f"smoothgrad:samples={STEPS}", (STEPS + 1, STEPS)),
    ],
)
def test_passes_with_the_predicted_class(model, images, spelling, expected):
    """Which class that is takes a run; where a step of the path is the picture, it is this one."""
    passes = passes_of(model, images, lambda: vitreous.explain(model, images, spelling))
    assert counts(passes) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["gausslegendre", "riemann_right", "noise", "tokens"])
def test_captum_makes_no_fewer_passes(model, images, kind):
    captum = pytest.importorskip("captum.attr", reason="captum is not installed")
    target = torch.full((IMAGES,), TARGET)
    if kind == "noise":
        spelling, tunnel = f"smoothgrad:samples={STEPS}", captum.NoiseTunnel(captum.Saliency(model))
        options = {"nt_samples": STEPS, "nt_samples_batch_size": 2, "target": target, "abs": False}

        def theirs():
            tunnel.attribute(images, nt_type="smoothgrad", **options)

    elif kind == "tokens":
        spelling = f"integrated_gradients:at=tokens,steps={STEPS}"
        layer = captum.LayerIntegratedGradients(model, model.blocks[0])

        def theirs():
            layer.attribute(images, target=target, n_steps=STEPS, internal_batch_size=8, attribute_to_layer_input=True)

    else:
        quadrature = "gauss" if kind == "gausslegendre" else "right"
        spelling, path = (
            f"integrated_gradients:steps={STEPS},quadrature={quadrature}",
            captum.IntegratedGradients(model),
        )

        def theirs():
            path.attribute(images, target=target, n_steps=STEPS, method=kind, internal_batch_size=8)

    ours = counts(passes_of(model, images, lambda: vitreous.explain(model, images, spelling, target)))
    other = counts(passes_of(model, images, theirs))
    assert ours[0] <= other[0] + 1e-9
    assert ours[1] <= other[1] + 1e-9


@pytest.mark.parametrize(
    "spelling",
    [
        "integrated_gradients:steps=3",
        "integrated_gradients:steps=3,baseline=mean",
        "integrated_gradients:steps=3,quadrature=right",
        "integrated_gradients:steps=3,resolution=pixel",
        "smoothgrad:samples=3",
        "smoothgrad:samples=3,read=input",
    ],
)
@pytest.mark.parametrize("target", [TARGET, [0, 1, 2, 3], [[0, 4], [1, 3], [2, 2], [3, 1]]])
def test_numbers_are_those_beside_a_recorded_run(model, images, spelling, target):
    alone = vitreous.explain(model, images, spelling, target)
    beside = vitreous.explain(model, images, [spelling, "rollout"], target)
    assert alone.grid == beside.grid
    assert torch.equal(alone.target, beside.target)
    assert largest_difference(alone.scores[spelling], beside.scores[spelling]) < EXACT
    assert largest_difference(alone.logits, beside.logits) < EXACT


def test_logits_are_computed_when_they_are_read_and_once(model, images):
    explanation = vitreous.explain(model, images, "smoothgrad:samples=2", TARGET)
    runs = []
    with model.register_forward_hook(lambda *_: runs.append(1)):
        assert len(explanation) == IMAGES
        assert "4 images" in repr(explanation)
        assert not runs
        assert explanation.top(1)[0].class_index == int(model(images)[0].argmax())
        runs.clear()
        assert explanation.logits.shape == (IMAGES, CLASSES)
        assert explanation.select(1).logits.shape == (1, CLASSES)
        assert not runs
    with pytest.raises(AttributeError, match="no attribute 'logit'"):
        explanation.logit  # noqa: B018


@pytest.mark.parametrize("change", ["weights", "dtype", "images"])
def test_logits_of_a_model_that_was_changed_are_refused(model, images, change):
    read, unread = (vitreous.explain(model, images, "smoothgrad:samples=2", TARGET) for _ in range(2))
    before = read.logits
    if change == "weights":
        model.head.bias.add_(1)
    elif change == "dtype":
        model.float()
    else:
        images.mul_(2)
    assert read.logits is before
    with pytest.raises(ExplanationError, match=r"read explanation\.logits before"):
        unread.logits  # noqa: B018


def test_copies_and_files_have_the_logits(model, images, tmp_path):
    expected = vitreous.explain(model, images, ["smoothgrad:samples=2", "gae"], TARGET).logits

    def fresh():
        return vitreous.explain(model, images, "smoothgrad:samples=2", TARGET)

    loaded = vitreous.Explanation.load(fresh().save(tmp_path / "saved"))
    for copied in (copy.copy(fresh()), copy.deepcopy(fresh()), pickle.loads(pickle.dumps(fresh())), loaded):
        assert largest_difference(copied.logits, expected) < EXACT


def test_inference_tensors_have_their_logits_at_once(model, images):
    """They do not tell whether they were changed."""
    with torch.inference_mode():
        explanation = vitreous.explain(model, images.clone(), "smoothgrad:samples=2", TARGET)
    assert "logits" in vars(explanation)


@pytest.mark.parametrize("target", [CLASSES, -1, [1, 2], [[]], "cat"])
def test_wrong_targets_are_refused_as_beside_a_recorded_run(model, images, target):
    with pytest.raises(TargetError) as beside:
        vitreous.explain(model, images, ["smoothgrad:samples=2", "gae"], target)
    with pytest.raises(TargetError) as alone:
        vitreous.explain(model, images, "smoothgrad:samples=2", target)
    assert str(alone.value) == str(beside.value)


def test_images_that_a_model_cannot_take_are_refused(model):
    with pytest.raises(InputError, match="cannot take images of 40 x 40"):
        vitreous.explain(model, torch.zeros(1, 3, 40, 40, dtype=torch.float64), "smoothgrad:samples=2", TARGET)


def test_a_model_without_gradients_is_refused_as_beside_a_recorded_run(images):
    class Cut(torch.nn.Module):
        def forward(self, pixels):
            return pixels.detach() * 1.0

    model = torch.nn.Sequential(Cut(), small_vit(depth=2))
    refusals = []
    for methods in ("smoothgrad:samples=2", ["smoothgrad:samples=2", "rollout"]):
        with pytest.raises(VitreousError) as refused:
            vitreous.explain(model, images, methods, TARGET)
        refusals.append((type(refused.value), str(refused.value)))
    assert refusals[0] == refusals[1]


def test_logits_that_are_read_after_training_began_are_those_of_evaluation(images):
    model = small_vit(depth=2, seed=4, drop_rate=0.5, proj_drop_rate=0.5)
    expected = model(images)
    explanation = vitreous.explain(model, images, f"smoothgrad:samples={STEPS}", TARGET)
    model.train()
    assert largest_difference(explanation.logits, expected.detach()) < EXACT
    assert model.training


def test_probabilities_are_recognised_without_a_recorded_run(model, images):
    ended, spelling = nn.Sequential(model, nn.Softmax(-1)).eval(), f"smoothgrad:samples={STEPS}"
    with pytest.warns(UserWarning, match="taken as probabilities"):
        found = vitreous.explain(ended, images, spelling, TARGET)
    assert found.outputs == "probabilities"
    assert largest_difference(found.logits, model(images).softmax(-1)) < EXACT


def test_outputs_that_were_said_need_no_run_and_are_checked(model, images):
    spelling = f"smoothgrad:samples={STEPS}"
    job = partial(vitreous.explain, model, images, spelling, TARGET, outputs="sigmoid")
    assert counts(passes_of(model, images, job)) == pytest.approx((STEPS, STEPS))
    assert job().outputs == "sigmoid"
    with pytest.raises(InputError, match="outputs=probabilities was given"):
        vitreous.explain(model, images, spelling, TARGET, outputs="probabilities")
