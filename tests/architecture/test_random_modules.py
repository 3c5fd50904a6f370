"""Whatever nn.Module is given: no error but those that users can understand, and an end."""

import warnings
from collections import Counter
from time import monotonic

import torch
from hypothesis import HealthCheck, given, settings

import vitreous
from random_modules import PIXELS, build_model, specifications
from vitreous.errors import VitreousError

METHODS = (
    "tokentm",
    "gradtoken",
    "decompx.skipplus",
    "gae",
    "ixg",
    "gradcam",
    "attnlrp",
    "rollout",
    "alti",
    "fullgrad",
)


def outcome_of(run):
    """Whether something works; an error has to be one that is foreseen."""
    try:
        run()
    except VitreousError as error:
        if "cannot be read from its run" in str(error):  # the last resort of the analysis: a defect of ours
            raise AssertionError(str(error)) from error
        return "refused"
    return "served"


def explain(model, images, method):
    found = vitreous.explain(model, images, method)
    assert found.scores[method].shape == (len(images), found.grid[0] * found.grid[1])


def inspect(model, images):
    inspection = vitreous.inspect(model, images, [*METHODS, "occlusion", "atman"])
    assert str(inspection)
    assert inspection.as_dict()


def test_random_modules_raise_no_foreign_error_and_come_to_an_end():
    outcomes = Counter()

    @settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(specifications())
    def check(specification):
        images = torch.randn(2, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(1))
        model, start = build_model(specification).eval(), monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for method in METHODS:
                outcomes[outcome_of(lambda: explain(model, images, method))] += 1  # noqa: B023
            outcomes[outcome_of(lambda: inspect(model, images))] += 1
        # All of it takes about a second on such a model; a busy machine is allowed much more.
        assert monotonic() - start < 60

    check()
    # Both kinds are among them: a generator that only makes broken models would ask nothing.
    assert min(outcomes["served"], outcomes["refused"]) > 50
