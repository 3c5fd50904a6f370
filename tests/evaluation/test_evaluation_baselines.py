"""What benchmarks divide by: both sides of a ratio ask the model about equally many pictures."""

from pathlib import Path

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from vitreous.speed.timing import one_thread

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import perturbation_curves
    import rows

    return perturbation_curves, rows


@pytest.fixture
def model() -> VisionTransformer:
    """As many patches as the models that are measured have, and next to nothing else."""
    return VisionTransformer(img_size=224, patch_size=16, embed_dim=12, depth=1, num_heads=3, num_classes=5).eval()


def pictures_of(model, job) -> int:
    """How many pictures go through the model's block."""
    seen = []
    with model.blocks[0].register_forward_pre_hook(lambda _, given: seen.append(len(given[0]))), one_thread():
        job()
    return sum(seen)


@pytest.mark.parametrize(("part", "given", "pictures"), [("against_forwards", (2,), 36), ("dropped_tokens", (), 160)])
def test_a_curve_and_its_baseline_ask_about_equally_many_pictures(scripts, model, monkeypatch, part, given, pictures):
    """The whole photos of a deletion curve, its 0%, are among what is timed."""
    curves, _ = scripts
    monkeypatch.setattr(curves.timm, "create_model", lambda _name: model)
    asked = []

    def count(job, baseline, _repeats):
        job()  # as what is timed begins: the first one asks the model whether its patches can be dropped
        asked.extend([pictures_of(model, job), pictures_of(model, baseline)])
        return 1.0

    monkeypatch.setattr(curves, "ratio_in_turn", count)
    (row,) = getattr(curves, part)("any", *given, 1)
    assert asked == [pictures, pictures]
    assert row["against"] == f"{pictures} bare forward passes"


@pytest.mark.parametrize(("at_once", "count"), [(4, 4), (4, 10), (4, 3), (1, 5)])
def test_the_bare_model_is_run_on_as_many_pictures_as_it_is_told(scripts, model, at_once, count):
    _, rows = scripts
    given = torch.randn(at_once, 3, 224, 224)
    assert pictures_of(model, lambda: rows.bare(model, given, count)) == count
