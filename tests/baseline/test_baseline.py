"""What was served stays served, with the same numbers: all methods on small models of each family, from a kept file.

``scripts/write_baseline.py`` wrote the file. What was refused may be served by now; nothing may go the other way round.
"""

from __future__ import annotations

import baseline_models
import baseline_numbers
import numpy as np
import pytest

import vitreous

# Float64; sums in another order through three blocks differ by 1e-13 of the largest score, a wrong term by far more.
RELATIVE = 1e-9
# Maps that are zero, up to rounding of scores of order 1.
ABSOLUTE = 1e-13
# Before, patches were taken for equal cells of the picture, where the receptive fields of these are shifted.
SHIFTED = ("torchvision/convolution_stem",)


@pytest.mark.parametrize("name", baseline_numbers.kept_names())
def test_numbers_are_those_from_before(name, monkeypatch):
    if name in SHIFTED:
        monkeypatch.setattr("vitreous.tape.patches.receptive_fields.ReceptiveFields.geometry", lambda _: None)
    numbers = baseline_numbers.load([name])[name]
    # Those that were refused are not asked for: they could be served by now, and to ask again without them takes long.
    kept = {method: expected for method, expected in numbers.items() if not isinstance(expected, str)}
    found = baseline_numbers.numbers_of(name, list(kept))
    tolerance = baseline_models.ROUNDED.get(name, RELATIVE)
    wrong = {}
    for method, expected in kept.items():
        if isinstance(found[method], str):
            wrong[method] = found[method]
            continue
        assert found[method].shape == expected.shape, method
        largest = np.abs(expected).max()
        difference = np.abs(found[method] - expected).max()
        if not difference <= tolerance * largest + ABSOLUTE:
            wrong[method] = f"differs by {difference:.2e}, the largest number is {largest:.2e}"
    assert not wrong


def test_every_model_of_the_list_is_kept():
    assert set(baseline_numbers.kept_names()) == {*baseline_models.IMAGE_MODELS, *baseline_models.TEXT_MODELS}


def test_the_numbers_are_of_use():
    """Nearly everything is served, finite, and not zero."""
    numbers = [
        value for kept in baseline_numbers.load(baseline_numbers.kept_names()).values() for value in kept.values()
    ]
    maps = [value for value in numbers if not isinstance(value, str)]
    assert all(np.isfinite(values).all() for values in maps)
    assert len(maps) > 0.8 * len(numbers)
    assert sum(np.abs(values).max() > 1e-6 for values in maps) > 0.97 * len(maps)


def test_weights_depend_on_names_alone():
    """The numbers are of one set of weights, whatever the library's initialisation does."""
    model = baseline_models.fill(baseline_models.IMAGE_MODELS["timm/vit"]())
    again = baseline_models.fill(baseline_models.IMAGE_MODELS["timm/vit"]())
    pictures = baseline_models.images(baseline_models.IMAGE)
    first, second = (vitreous.explain(each, pictures, "ixg", 1) for each in (model, again))
    assert np.array_equal(first.scores["ixg"], second.scores["ixg"])
