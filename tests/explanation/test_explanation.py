"""Explanations built by hand: validation, display maps, and folders that are complete or absent."""

import json
import stat
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from PIL import Image

from vitreous._utils.storage import StorageError
from vitreous.errors import InputError, MethodError, VitreousError
from vitreous.explanation import folder as explanation_folder
from vitreous.explanation.explanation import Explanation, ExplanationError
from vitreous.explanation.folder import collect_provenance, read_preprocessing
from vitreous.models.preprocessing import Preprocessing

LONG = "gradtoken:propagation=rollout_elementwise,heads=average"


def make(batch=2, classes_per_image=None, *, grid=(3, 5), dtype=torch.float32, images=True, **changes):
    """An explanation of random numbers on a grid that is not square."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch,) if classes_per_image is None else (batch, classes_per_image)
    size = (grid[0] * 4, grid[1] * 4)

    def noise(*shape):
        return torch.randn(*shape, generator=generator)

    fields = {
        "scores": {
            "tokentm": noise(*shape, grid[0] * grid[1]).abs().to(dtype),
            LONG: noise(*shape, grid[0] * grid[1]).to(dtype),
        },
        "grid": grid,
        "target": torch.randint(0, 7, shape, generator=generator),
        "logits": noise(batch, 7).to(dtype),
        "image_size": size,
        "signed": {"tokentm": False, LONG: True},
        "class_names": tuple(f"class_{number}" for number in range(7)),
        "images": tuple(photo(size, seed) for seed in range(batch)) if images else None,
        "provenance": collect_provenance(methods=["tokentm", LONG], model="demo"),
    }
    return Explanation(**(fields | changes))


def prepared(**changes):
    """An explanation that knows how its photos were prepared."""
    half = (0.5, 0.5, 0.5)
    return make(1, preprocessing=replace(Preprocessing((12, 20), half, half, crop_rounding="down"), **changes))


def photo(size, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def names_in(folder):
    return {entry.name for entry in folder.iterdir()}


def one_map(values, *, signed, grid=None, image_size=(8, 8), dtype=torch.float32):
    values = torch.tensor(values, dtype=dtype)
    return Explanation(
        scores={"m": values.reshape(1, -1)},
        grid=grid or tuple(values.shape),
        target=torch.tensor([0]),
        logits=torch.zeros(1, 2),
        image_size=image_size,
        signed={"m": signed},
    )


def assert_same(first, second):
    assert first.methods == second.methods
    for method in first.methods:
        assert first.scores[method].dtype == second.scores[method].dtype
        assert torch.equal(first.scores[method], second.scores[method])
    for name in ("target", "logits"):
        assert getattr(first, name).dtype == getattr(second, name).dtype
        assert torch.equal(getattr(first, name), getattr(second, name))
    for name in ("grid", "image_size", "signed", "class_names", "provenance"):
        assert getattr(first, name) == getattr(second, name)
    assert (first.images is None) == (second.images is None)
    for one, other in zip(first.images or (), second.images or (), strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))


class TestFields:
    @pytest.mark.parametrize(
        "changes",
        [
            {"scores": {}},
            {"scores": {"tokentm": torch.zeros(2, 14), LONG: torch.zeros(2, 15)}},
            {"scores": {"tokentm": torch.zeros(2, 15, dtype=torch.int64), LONG: torch.zeros(2, 15)}},
            {"scores": {"tokentm": np.zeros((2, 15)), LONG: torch.zeros(2, 15)}},
            {"scores": None},
            {"signed": {"tokentm": False}},
            {"grid": (3, 4)},
            {"grid": (3, 5, 1)},
            {"grid": (3.0, 5.0)},
            {"image_size": (0, 20)},
            {"target": torch.tensor([0, 7])},
            {"target": torch.tensor([-1, 0])},
            {"target": torch.tensor([0, 1], dtype=torch.int32)},
            {"target": torch.tensor([0])},
            {"target": [0, 1]},
            {"logits": torch.zeros(7)},
            {"logits": torch.zeros(2, 7, dtype=torch.int64)},
            {"logits": torch.zeros(0, 7)},
            {"class_names": ("cat",)},
            {"class_names": tuple(range(7))},
            {"images": (photo((12, 20)),)},
            {"images": ("photo.png", "other.png")},
            {"provenance": {"model": object()}},
            {"provenance": {"loss": float("nan")}},
        ],
    )
    def test_parts_that_do_not_fit_are_refused_in_one_line(self, changes):
        whole = make()
        with pytest.raises(ExplanationError) as caught:
            replace(whole, **changes)
        assert "\n" not in str(caught.value)

    def test_a_result_keeps_no_graph_alive(self):
        scores = (torch.ones(2, 15, requires_grad=True) * 2, torch.ones(2, 15))
        explanation = make(scores=dict(zip(("tokentm", LONG), scores, strict=True)))
        assert not explanation.scores["tokentm"].requires_grad

    def test_is_frozen_and_compares_by_identity(self):
        explanation = make()
        with pytest.raises(AttributeError):
            explanation.grid = (1, 1)
        assert explanation != make()
        assert len({explanation, explanation}) == 1

    def test_repr_is_one_short_line(self):
        assert repr(make(batch=1)).startswith("Explanation(1 image, methods=['tokentm'")
        text = repr(make(classes_per_image=3))
        assert text.startswith("Explanation(2 images x 3 classes")
        assert "model='demo'" in text
        assert "\n" not in text

    def test_what_does_not_exist_is_an_error_of_one_sentence(self):
        explanation = make()
        for class_index in (-1, 7):
            with pytest.raises(ExplanationError, match="does not exist: the model has 7"):
                explanation.probability(class_index)
        with pytest.raises(MethodError, match="nope"):
            explanation.grid_of("nope")

    def test_probabilities_are_at_least_float32_and_sum_to_one(self):
        for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
            probabilities = make(dtype=dtype).probabilities
            assert probabilities.dtype == expected
            assert torch.allclose(probabilities.sum(-1), torch.ones(2, dtype=expected))

    def test_a_single_output_is_a_yes_or_no_model_or_a_value(self, tmp_path):
        logits = torch.tensor([[1.5]])
        fields = {"batch": 1, "logits": logits, "target": torch.tensor([0]), "class_names": ("dog",)}
        yes = make(**fields)
        assert yes.top(1) == ((0, "dog", pytest.approx(float(logits.sigmoid()))),)
        assert yes.format_output(0) == "81.8%"
        value = Explanation.load(make(**fields, scale="value").save(tmp_path / "value"))
        assert value.scale == "value"
        assert value.top(1) == ((0, "dog", None),)
        assert value.format_output(0) == "1.5"
        with pytest.warns(DeprecationWarning, match="format_output"):
            assert value.saying(0) == "1.5"
        with pytest.raises(ExplanationError, match="have no probability"):
            _ = value.probabilities
        with pytest.raises(ExplanationError, match=r"scale must be one of logits, .*, value, not 'percent'"):
            make(**fields, scale="percent")

    def test_labels_and_top_use_names_where_known(self):
        logits = torch.tensor([[0.0, 2.0, 1.0, -1.0, -1.0, -1.0, -1.0]])
        named = make(batch=1, logits=logits, target=torch.tensor([2]))
        assert named.label() == "class_2"
        assert [prediction.label for prediction in named.top(2)] == ["class_1", "class_2"]
        assert named.top(1)[0].probability == pytest.approx(float(logits.softmax(-1)[0, 1]))
        assert len(named.top(100)) == 7
        nameless = make(batch=1, logits=logits, target=torch.tensor([2]), class_names=None)
        assert nameless.label() == "2"

    @pytest.mark.parametrize(
        "ask",
        [
            lambda e: e.label(2),
            lambda e: e.label(-1),
            lambda e: e.label(0, 1),
            lambda e: e.top(0),
            lambda e: e.top(1, index=5),
            lambda e: e.overlay("tokentm", 9),
            lambda e: e.select(2),
            lambda e: e.heatmap("tokentm", size=(0, 3)),
        ],
    )
    def test_asking_for_what_is_not_there_is_a_clear_error(self, ask):
        with pytest.raises(ExplanationError):
            ask(make())

    def test_an_unknown_method_is_answered_with_the_closest_one(self):
        with pytest.raises(MethodError, match="did you mean tokentm"):
            make().heatmap("tokntm")

    def test_select_gives_one_image_alone(self):
        explanation = make(batch=3, classes_per_image=2)
        one = explanation.select(2)
        assert len(one) == 1
        assert torch.equal(one.scores[LONG][0], explanation.scores[LONG][2])
        assert torch.equal(one.target[0], explanation.target[2])
        assert one.images == (explanation.images[2],)
        assert explanation.without_images().images is None


class TestHeatmap:
    def test_shapes_follow_the_scores(self):
        assert make().heatmap("tokentm").shape == (2, 12, 20)
        assert make(classes_per_image=3).heatmap(LONG).shape == (2, 3, 12, 20)
        assert make().heatmap("tokentm", size=(7, 9)).shape == (2, 7, 9)

    @pytest.mark.parametrize("smooth", [True, False])
    def test_the_highest_score_of_every_positive_map_is_one(self, smooth):
        maps = make(classes_per_image=3).heatmap("tokentm", smooth=smooth)
        assert (maps >= 0).all()
        assert torch.equal(maps.amax((-2, -1)), torch.ones(2, 3))

    def test_signed_maps_keep_zero_and_the_ratio_of_their_values(self):
        heatmap = one_map([[-1.0, 0.0], [2.0, 4.0]], signed=True).heatmap("m", smooth=False)[0]
        assert heatmap[::4, ::4].tolist() == [[-0.25, 0.0], [0.5, 1.0]]

    @pytest.mark.parametrize("smooth", [True, False])
    def test_unsigned_maps_start_at_zero_and_show_nothing_below_it(self, smooth):
        heatmap = one_map([[1.0, 2.0], [3.0, 4.0]], signed=False).heatmap("m", smooth=smooth)[0]
        assert (heatmap.min(), heatmap.max()) == pytest.approx((0.25, 1.0))
        heatmap = one_map([[-9.0, 0.0], [2.0, 4.0]], signed=False).heatmap("m", smooth=smooth)[0]
        assert [heatmap[0, 0], heatmap[0, -1], heatmap[-1, 0], heatmap[-1, -1]] == pytest.approx([0, 0, 0.5, 1])

    @pytest.mark.parametrize("smooth", [True, False])
    def test_unsigned_maps_without_a_score_above_zero_start_at_the_lowest(self, smooth):
        heatmap = one_map([[-4.0, -3.0], [-2.0, 0.0]], signed=False).heatmap("m", smooth=smooth)[0]
        assert (heatmap.min(), heatmap.max()) == pytest.approx((0.0, 1.0))

    def test_patches_are_exact_rectangles_on_a_grid_that_is_not_square(self):
        explanation = one_map([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], signed=False, image_size=(4, 12))
        heatmap = explanation.heatmap("m", smooth=False)[0] * 5
        expected = torch.arange(6.0).reshape(2, 3).repeat_interleave(2, 0).repeat_interleave(4, 1)
        assert torch.allclose(heatmap, expected)

    def test_smooth_maps_rise_between_patch_centres(self):
        row = one_map([[0.0, 1.0]], signed=False, image_size=(4, 8)).heatmap("m")[0, 0]
        assert (row.diff() >= 0).all()
        assert len(row.unique()) > 2

    @pytest.mark.parametrize("smooth", [True, False])
    @pytest.mark.parametrize("signed", [True, False])
    @pytest.mark.parametrize("value", [0.0, 0.1, -3.7, 1e-40])
    def test_a_constant_map_gives_zeros(self, value, signed, smooth):
        explanation = one_map([[value] * 3] * 3, signed=signed, image_size=(31, 17))
        assert not explanation.heatmap("m", smooth=smooth).any()

    def test_rounding_noise_is_not_stretched_into_a_pattern(self):
        nearly = [[0.1, 0.1 + 1e-8], [0.1, 0.1]]
        assert not one_map(nearly, signed=False).heatmap("m").any()

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
    def test_every_floating_type_and_extreme_values_give_finite_maps(self, dtype):
        largest = torch.finfo(dtype).max
        explanation = one_map([[-largest, 0.0], [1.0, largest]], signed=False, dtype=dtype)
        heatmap = explanation.heatmap("m", smooth=False)
        assert heatmap.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert heatmap[0, ::4, ::4].flatten().tolist() == pytest.approx([0.0, 0.0, 0.0, 1.0], abs=1e-4)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_a_map_that_is_not_finite_is_refused(self, bad):
        with pytest.raises(ExplanationError, match="NaN or infinity"):
            one_map([[0.0, bad]], signed=False).heatmap("m")


class TestOverlay:
    def test_has_the_size_of_the_picture(self):
        explanation = make(classes_per_image=2)
        assert explanation.overlay("tokentm", 1, 1).size == (20, 12)
        assert explanation.overlay(LONG, image=photo((30, 50))).size == (50, 30)

    def test_without_a_picture_says_what_to_do(self):
        explanation = make(images=False)
        with pytest.raises(ExplanationError, match="image="):
            explanation.overlay("tokentm")
        assert explanation.overlay("tokentm", image=photo((12, 20))).mode == "RGB"

    def test_shows_the_map_that_was_asked_for(self):
        scores = torch.zeros(1, 2, 15)
        scores[0, 0, 0] = scores[0, 1, 14] = 1
        explanation = make(batch=1, classes_per_image=2, scores={"tokentm": scores, LONG: scores})
        grey = Image.new("RGB", (20, 12), "#808080")
        for target_index, brightest in ((0, (0, 0)), (1, (19, 11))):
            picture = explanation.overlay("tokentm", 0, target_index, image=grey, smooth=False)
            luminance = np.asarray(picture.convert("L"))
            assert luminance[brightest[1], brightest[0]] == luminance.max()
            assert (luminance == luminance.max()).sum() == 16

    @pytest.mark.parametrize("opacity", [-0.1, 1.1, float("nan")])
    def test_opacity_is_checked(self, opacity):
        with pytest.raises(InputError, match="opacity"):
            make().overlay("tokentm", opacity=opacity)


class TestRoundTrip:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("classes_per_image", [None, 1, 3])
    def test_is_exact(self, tmp_path, dtype, classes_per_image):
        saved = make(dtype=dtype, classes_per_image=classes_per_image)
        folder = saved.save(tmp_path / "deep" / "down")
        assert_same(saved, Explanation.load(folder))

    def test_without_names_and_pictures(self, tmp_path):
        saved = make(images=False, class_names=None, provenance={})
        saved.save(tmp_path / "x")
        assert_same(saved, Explanation.load(str(tmp_path / "x")))
        assert not list((tmp_path / "x").glob("*.png"))

    def test_scores_that_are_not_finite_are_kept_but_not_painted(self, tmp_path):
        scores = torch.rand(2, 15)
        scores[1, 3] = float("nan")
        make(scores={"tokentm": scores, LONG: torch.rand(2, 15)}).save(tmp_path / "x")
        assert Explanation.load(tmp_path / "x").scores["tokentm"][1].isnan().sum() == 1
        assert len(list((tmp_path / "x").glob("overlay-*.png"))) == 3

    def test_an_overlay_for_each_image_class_and_method(self, tmp_path):
        make(classes_per_image=3).save(tmp_path / "x")
        overlays = json.loads((tmp_path / "x" / "manifest.json").read_text())["overlays"]
        assert len({overlay["file"] for overlay in overlays}) == 2 * 3 * 2
        for overlay in overlays:
            assert Image.open(tmp_path / "x" / overlay["file"]).size == (20, 12)

    def test_file_names_are_safe_and_distinct(self):
        spellings = (LONG, "a:b=c", "a:b,c", "A.b=c", "x" * 300, "x" * 301, "::", "../../etc", "ärger")
        names = explanation_folder.file_names(spellings)
        assert len({name.lower() for name in names.values()}) == len(spellings)
        for name in names.values():
            assert name.isascii()
            assert len(name) < 120
            assert not set(name) & set('/\\:*?"<>|= ,')
            assert not name.startswith((".", "-"))

    def test_the_manifest_tells_versions_methods_and_checksums(self, tmp_path):
        make().save(tmp_path / "x")
        manifest = json.loads((tmp_path / "x" / "manifest.json").read_text())
        assert manifest["provenance"]["versions"]["torch"] == torch.__version__
        assert [method["spelling"] for method in manifest["methods"]] == ["tokentm", LONG]
        assert set(manifest["files"]) | {"manifest.json"} == names_in(tmp_path / "x")

    def test_further_pictures_are_kept_and_their_names_checked(self, tmp_path):
        make().save(tmp_path / "x", pictures={"comparison.png": photo((4, 4))})
        assert (tmp_path / "x" / "comparison.png").is_file()
        for name in ("../evil.png", "image-0.png", "manifest.json", ".png"):
            with pytest.raises(StorageError):
                make().save(tmp_path / "y", pictures={name: photo((4, 4))})
        assert not (tmp_path / "y").exists()

    def test_the_folder_has_ordinary_permissions(self, tmp_path):
        (tmp_path / "ordinary").mkdir()
        make().save(tmp_path / "x")
        modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("x", "ordinary")}
        assert len(modes) == 1


class TestNothingHalfWritten:
    @pytest.mark.parametrize(
        "failure", [OSError(28, "No space left on device"), RuntimeError("x"), KeyboardInterrupt()]
    )
    @pytest.mark.parametrize("earlier", [True, False])
    def test_a_failure_leaves_what_was_there_before(self, tmp_path, monkeypatch, failure, earlier):
        place = tmp_path / "new" / "deep" / "x"
        if earlier:
            kept = make(batch=1)
            kept.save(place)
        original, calls = explanation_folder._write_picture, []

        def fail_at_the_third(picture, folder, name):
            calls.append(name)
            if len(calls) == 3:
                raise failure
            return original(picture, folder, name)

        monkeypatch.setattr(explanation_folder, "_write_picture", fail_at_the_third)
        with pytest.raises(StorageError if isinstance(failure, OSError) else type(failure)):
            make().save(place, overwrite=True)
        if earlier:
            assert names_in(place.parent) == {"x"}
            assert_same(kept, Explanation.load(place))
        else:
            assert not names_in(tmp_path)

    def test_a_failed_swap_puts_the_earlier_explanation_back(self, tmp_path, monkeypatch):
        place = tmp_path / "x"
        kept = make(batch=1)
        kept.save(place)
        rename = type(place).rename

        def refuse_the_draft(self, target):
            if self.name.endswith(".partial") and target == place and (self / "image-1.png").exists():
                raise OSError(5, "Input/output error")
            return rename(self, target)

        monkeypatch.setattr(type(place), "rename", refuse_the_draft)
        with pytest.raises(StorageError, match="Input/output error"):
            make().save(place, overwrite=True)
        assert names_in(tmp_path) == {"x"}
        assert_same(kept, Explanation.load(place))

    def test_an_earlier_explanation_is_refused_unless_overwritten(self, tmp_path):
        make().save(tmp_path / "x")
        with pytest.raises(StorageError, match="overwrite=True"):
            make(batch=1).save(tmp_path / "x")
        assert len(Explanation.load(tmp_path / "x")) == 2
        make(batch=1).save(tmp_path / "x", overwrite=True)
        assert len(Explanation.load(tmp_path / "x")) == 1
        assert names_in(tmp_path) == {"x"}

    def test_files_of_somebody_else_are_never_deleted(self, tmp_path):
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "thesis.tex").write_text("precious")
        make().save(tmp_path / "x")
        (tmp_path / "x" / "notes.txt").write_text("precious")
        (tmp_path / "file").write_text("precious")
        for name in ("home", "x", "file"):
            with pytest.raises(StorageError):
                make().save(tmp_path / name, overwrite=True)
        assert (tmp_path / "home" / "thesis.tex").read_text() == "precious"
        assert (tmp_path / "x" / "notes.txt").read_text() == "precious"

    def test_an_empty_folder_is_filled(self, tmp_path):
        make().save(tmp_path)
        assert len(Explanation.load(tmp_path)) == 2

    def test_a_place_that_cannot_be_written_is_one_line(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(StorageError) as caught:
            make().save(tmp_path / "file" / "x")
        assert "\n" not in str(caught.value)


class TestDamage:
    @pytest.fixture
    def saved(self, tmp_path):
        return make().save(tmp_path / "x")

    @pytest.mark.parametrize("name", ["explanation.npz", "image-0.png", "overlay-0-0-tokentm.png", "manifest.json"])
    @pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "empty"])
    def test_a_damaged_file_is_reported_in_one_line(self, saved, name, damage):
        file = saved / name
        content = file.read_bytes()
        if damage == "missing":
            file.unlink()
        else:
            middle = len(content) // 2
            flipped = content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]
            file.write_bytes({"cut": content[:middle], "flipped": flipped, "empty": b""}[damage])
        with pytest.raises(VitreousError) as caught:
            Explanation.load(saved)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("format", "other"),
            ("schema", 99),
            ("files", None),
            ("files", {"../x": {}}),
            ("files", {"explanation.npz": None}),
            ("methods", None),
            ("methods", [{}]),
            ("methods", [{"spelling": "a", "signed": True, "array": "logits", "dtype": "nonsense"}]),
            ("images", ["../../photo.png", "image-0.png"]),
            ("images", ["explanation.npz", "image-0.png"]),
            ("images", 3),
            ("grid", [1]),
            ("grid", None),
            ("logits_dtype", "int64"),
            ("logits_dtype", "nn"),
            ("class_names", ["cat"]),
            ("provenance", 3),
        ],
    )
    def test_a_manifest_that_does_not_fit_is_reported(self, saved, key, value):
        manifest = json.loads((saved / "manifest.json").read_text())
        (saved / "manifest.json").write_text(json.dumps(manifest | {key: value}))
        with pytest.raises(VitreousError) as caught:
            Explanation.load(saved)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("name", [field.name for field in fields(Preprocessing)])
    @pytest.mark.parametrize(
        "value",
        ["a", -1, True, [], {}, [1], [[1]], ["a", "b"], [1, 2.5], [0, 4], [True, 4], [0.5, None, 0.5]],
    )
    def test_a_preprocessing_of_other_values_is_reported(self, tmp_path, name, value):
        folder = prepared().save(tmp_path / "x")
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["preprocessing"][name] = value
        (folder / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(StorageError, match=rf"manifest.json is damaged: its preprocessing cannot have {name} = "):
            Explanation.load(folder)

    @pytest.mark.parametrize(
        ("stored", "reason"),
        [
            (3, "is no table"),
            ([], "is no table"),
            ({}, "lacks image_size"),
            ({"image_size": [4, 4], "mean": [0, 0, 0]}, "lacks std"),
            ({"image_size": [4, 4], "crop": 3}, "unknown field 'crop'"),
            ({"image_size": [4, 4], "mean": [0, 0, float("nan")]}, "cannot have mean"),
            ({"mean": [0, 0, 10**400]}, "cannot have mean"),
            ({"std": [1, 1, 0]}, "cannot have std"),
            ({"std": [1, 1, -1]}, "cannot have std"),
            ({"image_size": [4, 10**400]}, "cannot have image_size"),
        ],
    )
    def test_a_preprocessing_that_does_not_fit_is_reported(self, stored, reason):
        with pytest.raises(StorageError, match=reason):
            read_preprocessing(stored)

    def test_every_preprocessing_comes_back_as_it_was(self, tmp_path):
        for number, changes in enumerate(
            [{}, {"mean": (-0.5, 0, 0.5)}, {"resize_size": (20, 22), "resize": "squash"}, {"interpolation": "LANCZOS"}]
        ):
            saved = prepared(**changes)
            assert Explanation.load(saved.save(tmp_path / str(number))).preprocessing == saved.preprocessing

    @pytest.mark.parametrize("text", ["[]", "3", "null", "{}", "\x00", "{"])
    def test_a_manifest_that_is_something_else_is_reported(self, saved, text):
        (saved / "manifest.json").write_text(text)
        with pytest.raises(StorageError):
            Explanation.load(saved)

    def test_a_pickle_in_the_archive_is_not_opened(self, saved):
        import hashlib

        np.savez(saved / "explanation.npz", logits=np.array([{"a": 1}], dtype=object))
        manifest = json.loads((saved / "manifest.json").read_text())
        digest = hashlib.sha256((saved / "explanation.npz").read_bytes()).hexdigest()
        manifest["files"]["explanation.npz"]["sha256"] = digest
        (saved / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(StorageError, match="pickle"):
            Explanation.load(saved)

    def test_a_folder_that_is_not_there(self, tmp_path):
        with pytest.raises(StorageError, match="is not a folder"):
            Explanation.load(tmp_path / "nowhere")


def test_provenance_names_versions_and_only_what_took_part():
    provenance = collect_provenance(methods=("gae",), model="demo", family="timm", seed=3)
    assert provenance["methods"] == ["gae"]
    assert provenance["seed"] == 3
    assert {"python", "vitreous", "torch"} <= set(provenance["versions"])
    assert provenance["created"].endswith("+00:00")
