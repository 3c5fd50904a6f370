"""Whatever nn.Module is given: no error but those that users can understand, and an end."""

import warnings
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


def ask(model, images):
    """Explain and inspect; the errors that are foreseen pass."""
    for method in METHODS:
        try:
            found = vitreous.explain(model, images, method)
            assert found.scores[method].shape == (len(images), found.grid[0] * found.grid[1])
        except VitreousError:
            continue
    try:
        inspection = vitreous.inspect(model, images, [*METHODS, "rise:budget=4", "occlusion", "atman"])
        assert str(inspection)
        assert inspection.as_dict()
    except VitreousError:
        pass


@settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(specifications())
def test_random_modules_raise_no_foreign_error(specification):
    images = torch.randn(2, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(1))
    start = monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ask(build_model(specification).eval(), images)
    # Thirteen methods take well under two seconds on such a model; a busy machine is allowed much more.
    assert monotonic() - start < 60
