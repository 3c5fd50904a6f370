"""An explanation of a tensor is drawn like one of a photo: on a picture that is passed, or on the tensor itself."""

import io
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import vitreous
from small_models import golden_model
from vitreous.errors import InputError, VitreousError
from vitreous.explanation.explanation import Explanation
from vitreous.models import LoadedModel, Preprocessing
from vitreous.models.pixels import STRETCHED, UNDONE, display_images, given_pictures
from vitreous.pictures import comparison_figure, depth_strip, strips_figure, token_transformation, transformation_figure
from vitreous.pictures.base_image import comparison
from vitreous.pictures.figures import Shown

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
METHODS = ["tokentm", "decompx.skipplus"]
FIGURES = ["overlay", "comparison", "classes"]
SCREEN = 72  # pixels per inch: what is compared does not depend on it, and for print there are 17 times as many


def photos(count, size):
    """Photos of random colours, which no two channels share."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    return [Image.fromarray(one) for one in pixels]


@pytest.fixture(scope="module")
def explained():
    """An explanation of a tensor by a model of which nothing is known, the tensor, and the photos it was made of."""
    model, images = golden_model()
    size = images.shape[-1]
    seen = photos(2, size)
    tensor = Preprocessing((size, size), MEAN, STD)(seen).to(images.dtype)
    return vitreous.explain(model, tensor, METHODS, topk=2), tensor, seen


def array(image):
    return np.asarray(image).astype(int)


class TestWithoutAPicture:
    @pytest.mark.parametrize("name", FIGURES)
    def test_a_figure_is_drawn_on_the_tensor_and_says_so(self, explained, name, tmp_path):
        explanation, *_ = explained
        plain = replace(explanation, images_note=None)
        drawn, bare = (one.figure(name, 1, dpi=SCREEN) for one in (explanation, plain))
        file = drawn.save(tmp_path / "figure.svg")
        assert drawn.height > bare.height  # by the sentence
        written = "".join(text.get_text() + " " for text in drawn.figure.texts)
        assert STRETCHED in " ".join(written.split())
        assert file.stat().st_size > 0

    def test_the_others_say_so_too(self, explained):
        explanation, tensor, _ = explained
        model, _ = golden_model()
        strip = depth_strip(model, tensor[:1], "tokentm")
        sheets = [
            strips_figure([strip]),
            transformation_figure(token_transformation(model, tensor[:1], block=-1)),
            comparison_figure([Shown(explanation, 0), Shown(explanation, 1)]),
        ]
        for sheet in sheets:
            written = " ".join(" ".join(text.get_text() for text in sheet.figure.texts).split())
            assert written.count("normalised input tensor") == 1

    def test_an_overlay_warns_at_the_callers_line(self, explained):
        with pytest.warns(UserWarning, match=r"normalised input tensor.*image=") as told:
            explained[0].overlay("tokentm")
        assert told[0].filename == __file__

    def test_a_notebook_shows_the_maps(self, explained):
        explanation, *_ = explained
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the sentence is in the picture
            html, png = explanation._repr_html_(), explanation._repr_png_()
        assert html.count("<img") == 2
        with Image.open(io.BytesIO(png)) as shown:
            bare = comparison(replace(explanation, images_note=None), 0, tile=150)
            assert shown.height > bare.height

    def test_a_report_shows_them_and_says_so(self, explained, tmp_path):
        explanation, *_ = explained
        page = explanation.report(tmp_path / "page.html").read_text(encoding="utf-8")
        # The input, and a map of each method for each of two classes, of two images; the legend has two more.
        assert page.count("<img") == 2 * (1 + 2 * 2) + 2
        assert page.count("normalised input tensor") == 2
        assert "http" not in page.replace("http-equiv", "")

    def test_a_folder_keeps_the_picture_and_what_it_is(self, explained, tmp_path):
        explanation, *_ = explained
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = Explanation.load(explanation.save(tmp_path / "saved"))
        assert loaded.images_note == STRETCHED
        assert np.array_equal(array(loaded.images[1]), array(explanation.images[1]))
        assert list((tmp_path / "saved").glob("overlay-1-1-*.png"))

    def test_the_tensor_is_stretched_image_by_image(self, explained):
        explanation, tensor, _ = explained
        one = tensor[1].double()
        wanted = (one - one.min()) / (one.max() - one.min()) * 255
        # Rounded to 8 bits from float32: a value half-way between two steps may fall to either.
        assert np.abs(array(explanation.images[1]) - wanted.permute(1, 2, 0).numpy()).max() <= 0.501

    def test_what_a_named_model_says_of_itself_is_undone(self, explained):
        _, tensor, seen = explained
        model, _ = golden_model()
        size = tensor.shape[-1]
        named = LoadedModel("mine", model, Preprocessing((size, size), MEAN, STD), None)
        explanation = vitreous.explain(named, tensor, METHODS)
        assert explanation.images_note == UNDONE
        assert np.array_equal(array(explanation.images[0]), array(seen[0]))
        # Values that this normalisation cannot have made are not called its own.
        assert vitreous.explain(named, 9 * tensor, METHODS).images_note == STRETCHED

    @pytest.mark.parametrize("rescale", [1 / 255, 1.0])
    def test_pixels_may_have_been_rescaled_otherwise(self, rescale):
        preprocessing = Preprocessing((6, 6), MEAN, STD, rescale=rescale)
        seen = photos(1, 6)
        drawn = display_images(preprocessing(seen), preprocessing)
        assert np.array_equal(array(drawn.images[0]), array(seen[0]))

    @pytest.mark.parametrize("channels", [1, 2, 3, 4, 6])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_any_number_of_channels_is_drawn(self, channels, dtype):
        pixels = torch.randn(2, channels, 5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
        drawn = display_images(pixels, Preprocessing((5, 7), MEAN, STD) if channels != 3 else None)
        assert [(image.mode, image.size) for image in drawn.images] == [("RGB", (7, 5))] * 2
        assert ("averaged" in drawn.note) == (channels not in (1, 3))

    def test_a_constant_tensor_is_drawn(self):
        assert array(display_images(torch.full((1, 3, 2, 2), -3.0), None).images[0]).max() == 0

    def test_without_its_pictures_there_is_one_error_that_helps(self, explained):
        bare = explained[0].without_images()
        assert bare.images_note is None
        for draw in (lambda: bare.figure("comparison"), lambda: bare.overlay("tokentm"), lambda: bare.report("x.html")):
            with pytest.raises(VitreousError, match="pass the one to draw on as image="):
                draw()
        assert "<img" not in bare._repr_html_()


class TestWithAPicture:
    @pytest.fixture(params=["picture", "uint8 array", "array", "tensor", "batch", "uint8 tensor", "path"])
    def given(self, request, explained, tmp_path):
        """The second photo in every form, with what else has to be passed."""
        _, tensor, seen = explained
        pixels = np.asarray(seen[1])
        seen[1].save(tmp_path / "photo.png")
        normalised = {"mean": MEAN, "std": STD}
        return {
            "picture": (seen[1], {}),
            "uint8 array": (pixels, {}),
            "array": (pixels / 255, {}),
            "tensor": (tensor[1], normalised),
            "batch": (tensor, normalised),
            "uint8 tensor": (torch.from_numpy(pixels.copy()).permute(2, 0, 1), {}),
            "path": (tmp_path / "photo.png", {}),
        }[request.param]

    @pytest.fixture(scope="class")
    def wanted(self, explained):
        """What is drawn on the photos themselves."""
        explanation, _, seen = explained
        with_photos = replace(explanation, images=tuple(seen), images_note=None)
        figures = [array(with_photos.figure(name, 1, dpi=SCREEN).image(scale=1)) for name in FIGURES]
        return array(with_photos.overlay("tokentm", 1, 1)), figures

    def test_every_form_gives_the_same_pictures(self, explained, wanted, given):
        explanation, *_ = explained
        image, normalised = given
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            laid = explanation.overlay("tokentm", 1, 1, image=image, **normalised)
            sheets = [explanation.figure(name, 1, image=image, dpi=SCREEN, **normalised) for name in FIGURES]
        overlay, figures = wanted
        assert np.array_equal(array(laid), overlay)
        for sheet, figure in zip(sheets, figures, strict=True):
            assert np.array_equal(array(sheet.image(scale=1)), figure)

    def test_all_images_get_theirs_for_notebook_and_report(self, explained, tmp_path):
        explanation, tensor, seen = explained
        for images, normalised in ((tensor, {"mean": MEAN, "std": STD}), (seen, {})):
            shown = explanation.with_images(images, **normalised)
            assert [array(image).tolist() for image in shown.images] == [array(image).tolist() for image in seen]
            assert shown.images_note is None
            assert "normalised" not in shown._repr_html_()
            page = explanation.report(tmp_path / "page.html", image=images, **normalised)
            assert "normalised" not in page.read_text(encoding="utf-8")

    def test_one_mean_and_std_serve_all_channels(self, explained):
        explanation, *_ = explained
        tensor = (torch.from_numpy(array(photos(1, 8)[0]) / 255).permute(2, 0, 1) - 0.5) / 0.5
        drawn = given_pictures(tensor, 1, 0.5, 0.5)
        assert np.array_equal(array(drawn.images[0]), array(photos(1, 8)[0]))
        assert explanation.overlay("tokentm", image=tensor, mean=0.5, std=[0.5]).size == (8, 8)

    def test_a_normalised_tensor_alone_is_stretched_and_says_so(self, explained):
        explanation, tensor, _ = explained
        with pytest.warns(UserWarning, match="normalised input tensor"):
            explanation.overlay("tokentm", image=tensor[0])

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"mean": 0.5, "std": 0.5}, "pass that as image="),
            ({"image": torch.zeros(3, 4, 4), "mean": 0.5}, "mean and std belong together"),
            ({"image": torch.zeros(3, 4, 4), "mean": 0.5, "std": 0}, "std must be positive"),
            ({"image": torch.zeros(3, 4, 4), "mean": (0.5, 0.5), "std": 0.5}, "one for each of the 3 channels"),
            ({"image": torch.zeros(3, 4, 4), "mean": "imagenet", "std": 0.5}, "mean must be one number"),
            ({"image": torch.zeros(4, 4)}, r"\(channels, height, width\), not \(4, 4\)"),
            ({"image": torch.zeros(7, 3, 4, 4)}, "1 image is explained, but 7 were given"),
            ({"image": torch.full((3, 4, 4), float("nan"))}, "finite"),
            ({"image": torch.zeros(3, 4, 4, dtype=torch.int64)}, "uint8 pixels, or floating point"),
            ({"image": np.zeros((4, 4, 3), dtype=np.uint8), "mean": 0.5, "std": 0.5}, "omit them for an image"),
            ({"image": 7}, "an image is a path"),
            ({"image": np.zeros((4, 4, 3), dtype=np.uint8), "photo": "cat.jpg"}, "not both"),
            ({"photo": "cat.jpg"}, "as image="),
        ],
    )
    def test_what_cannot_be_drawn_is_one_sentence(self, explained, arguments, message):
        explanation, *_ = explained
        for draw in (explanation.figure, lambda **given: explanation.overlay("tokentm", **given)):
            with pytest.raises(InputError, match=message):
                draw(**arguments)
