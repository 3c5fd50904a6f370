"""Figures as files and as commands: formats, errors, sizes, and nothing global touched."""

import re
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from golden_figures import FIGURES, SIGNED, drawn, explanation, photo, strip
from vitreous._utils.storage import StorageError
from vitreous.cli import app
from vitreous.cli.figure import FIGURE_KINDS
from vitreous.errors import InputError
from vitreous.explanation.explanation import Explanation
from vitreous.pictures.canvas import Canvas
from vitreous.pictures.charts import curves_figure
from vitreous.pictures.figures import (
    Shown,
    classes_figure,
    comparison_figure,
    overlay_figure,
    strips_figure,
)

SMALL = ("--model", "timm/test_vit@random", "--image-size", "64x48")
SCREEN = 72  # pixels per inch: for print there are 17 times as many, which take as many times as long


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


@pytest.fixture
def photos(tmp_path):
    for seed, name in enumerate(("cat.png", "dog.png")):
        pixels = np.random.default_rng(seed).integers(0, 256, (90, 120, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
    return tmp_path


class TestFiles:
    @pytest.mark.parametrize("name", FIGURES)
    def test_svg_is_well_formed_and_holds_the_picture_and_pdf_is_complete_with_truetype_fonts(self, name, tmp_path):
        page = FIGURES[name](lambda maps: maps)
        content = page.save(tmp_path / "figure.pdf").read_bytes()
        assert content.startswith(b"%PDF-1.")
        assert content.rstrip().endswith(b"%%EOF")
        start = int(re.search(rb"startxref\s+(\d+)", content)[1])
        assert content[start : start + 4] == b"xref"
        kinds = set(re.findall(rb"/Type /Font\b[^>]*?/Subtype /(\w+)|/Subtype /(\w+)[^>]*?/Type /Font\b", content))
        kinds = {first or second for first, second in kinds}
        assert kinds <= {b"Type0", b"CIDFontType2", b"TrueType"}
        assert b"Type0" in kinds or b"TrueType" in kinds
        assert b"/FontFile2" in content  # embedded
        assert b"/Type3" not in content
        tree = ET.parse(page.save(tmp_path / "figure.svg")).getroot()
        assert tree.tag.endswith("svg")
        images = [node for node in tree.iter() if node.tag.endswith("}image")]
        assert bool(images) == (name != "curves")
        hrefs = [value for node in tree.iter() for key, value in node.attrib.items() if key.endswith("href")]
        assert all(value.startswith(("data:", "#")) for value in hrefs)
        texts = [node for node in tree.iter() if node.tag.endswith("}text")]
        assert texts  # letters stay letters, and name their font
        assert all("DejaVu Sans" in text.attrib["style"] for text in texts)

    def test_files_are_the_same_every_time(self, tmp_path):
        for kind in ("png", "pdf", "svg"):
            first, second = (
                overlay_figure(explanation(), photo=photo(), dpi=SCREEN).save(tmp_path / f"{n}.{kind}") for n in "ab"
            )
            assert first.read_bytes() == second.read_bytes()

    @pytest.mark.parametrize("name", ["figure.jpg", "figure", ".png"])
    def test_other_formats_are_refused(self, name, tmp_path):
        with pytest.raises(InputError, match=r"\.png, \.svg or \.pdf"):
            Canvas(10, 10).save(tmp_path / name)

    def test_a_place_that_cannot_be_written_is_one_error_and_leaves_nothing(self, tmp_path):
        (tmp_path / "folder.png").mkdir()
        (tmp_path / "file").write_text("in the way")
        for place in (tmp_path / "folder.png", tmp_path / "file" / "figure.png"):
            with pytest.raises(StorageError, match="cannot be written"):
                Canvas(10, 10).save(place)
        assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "folder.png"]

    def test_an_overlay_keeps_all_pixels_of_a_large_photo(self):
        large = photo(1500, 1000)
        sheet = overlay_figure(explanation(), methods=[SIGNED], photo=large, context=True)
        drawn_page = np.asarray(sheet.image())
        seen = np.asarray(explanation().overlay(SIGNED, photo=large))
        assert seen.shape == (1000, 1500, 3)
        assert drawn_page.shape[1] > 1500
        # Somewhere on the page is the overlay itself, pixel by pixel: no resampling between the photo and the file.
        # At its left edge, where the photo is dimmed, nothing depends on how maps are scaled.
        enlarged = Image.fromarray(seen).resize((1680, 1120), Image.Resampling.LANCZOS)
        page = drawn_page[:, 48 : 48 + 1680].astype(int)
        rows = [row for row in range(40, 260) if np.abs(page[row, :200] - np.asarray(enlarged)[0, :200]).mean() < 2]
        assert rows
        part = page[rows[0] : rows[0] + 1100, :250]
        assert min(np.abs(part[n : n + 1000] - np.asarray(enlarged)[:1000, :250]).mean() for n in range(8)) < 2


class TestDrawing:
    def test_everything_is_found_in_one_place(self):
        from vitreous import pictures

        assert all(callable(getattr(pictures, name)) for name in pictures.__all__)
        assert set(pictures.__all__) <= set(dir(pictures))
        assert len([name for name in pictures.__all__ if name.endswith(("_figure", "_strip"))]) == 17
        with pytest.raises(AttributeError, match="nothing"):
            pictures.nothing  # noqa: B018

    def test_a_figure_shows_itself_in_a_notebook(self):
        assert overlay_figure(explanation(), photo=photo(), dpi=SCREEN)._repr_png_().startswith(b"\x89PNG")

    def test_an_explanation_draws_itself(self):
        for name in ("overlay", "comparison", "classes"):
            assert explanation().figure(name, photo=photo(), dpi=SCREEN).width > 200
        with pytest.raises(InputError, match="overlay, comparison, classes, slices or frames"):
            explanation().figure("depth", photo=photo())

    @pytest.mark.parametrize("size", [(1, 3000), (1000, 1), (1, 1)])
    def test_a_strip_of_a_photo_can_be_drawn(self, size):
        for name in ("overlay", "comparison", "classes"):
            drawn = explanation().figure(name, photo=photo(*size), dpi=SCREEN).image()
            assert len(np.unique(np.asarray(drawn))) > 1

    def test_without_photo_or_picture_there_is_an_error(self):
        with pytest.raises(InputError, match="photo="):
            explanation().figure()

    def test_a_photo_without_known_preprocessing_is_refused(self):
        blind = Explanation(
            scores={"m": torch.rand(1, 4)},
            grid=(2, 2),
            target=torch.tensor([0]),
            logits=torch.zeros(1, 2),
            image_size=(8, 8),
            signed={"m": False},
        )
        with pytest.raises(InputError, match="which part of the photo"):
            blind.overlay("m", photo=photo())

    def test_preprocessing_is_saved_and_loaded(self, tmp_path):
        saved = Explanation.load(explanation().save(tmp_path / "saved"))
        assert saved.preprocessing == explanation().preprocessing

    def test_patches_are_rectangles_where_asked(self):
        smooth, exact = (
            np.asarray(explanation().overlay(SIGNED, photo=photo(480, 480), smooth=smooth)) for smooth in (True, False)
        )
        flat = np.asarray(explanation().overlay(SIGNED, photo=Image.new("RGB", (480, 480)), smooth=False))
        assert len(np.unique(flat.reshape(-1, 3), axis=0)) <= 36
        assert not np.array_equal(smooth, exact)

    def test_scores_that_are_not_numbers_are_refused(self):
        with pytest.raises(InputError, match="NaN"):
            explanation(lambda maps: maps * float("nan")).overlay(SIGNED, photo=photo())

    def test_a_map_that_is_no_map_is_left_out_of_a_figure_and_the_others_stay(self):
        whole = explanation()
        scores = {**whole.scores, SIGNED: whole.scores[SIGNED] * float("nan")}
        broken = Explanation(**{**vars(whole), "scores": scores})
        for make in (
            lambda given: comparison_figure([Shown(given, 0, photo())], dpi=SCREEN),
            lambda given: classes_figure(given, photo=photo(), dpi=SCREEN),
            lambda given: overlay_figure(given, photo=photo(), dpi=SCREEN),
        ):
            before, after = (np.asarray(make(given).image(scale=1)) for given in (whole, broken))
            assert before.shape[1] == after.shape[1]  # a row without any map has no colour bars either
            grey = (after == 0xF0).all(axis=-1)  # the place of what is left out
            assert grey.mean() > 0.08
            assert (before == 0xF0).all(axis=-1).mean() < 0.01  # the edges of letters have it as well

    @pytest.mark.parametrize("signed", [True, False])
    def test_a_map_that_is_no_map_is_left_out_of_a_strip_and_the_others_keep_their_colours(self, signed):
        whole = strip(lambda maps: maps, signed=signed)
        maps = whole.maps.clone()
        maps[2, 3] = float("inf")  # of the middle one, which does not hold the largest score alone
        before, after = (
            np.asarray(strips_figure([one], photo=photo(), dpi=SCREEN).image())
            for one in (whole, replace(whole, maps=maps))
        )
        assert before.shape == after.shape
        changed = np.nonzero((before != after).any(axis=(0, 2)))[0]
        assert np.ptp(changed) < 1.1 * before.shape[1] / 6  # the photo and five maps: the columns of one
        assert (after == 0xF0).all(axis=-1).mean() > 0.05
        nothing = replace(whole, maps=torch.full_like(maps, float("nan")))
        widths = {strips_figure([one], photo=photo(), dpi=SCREEN).width for one in (nothing, whole)}
        assert len(widths) == 1

    def test_nothing_to_draw_is_an_error(self):
        for make in (comparison_figure, strips_figure, curves_figure):
            with pytest.raises(InputError):
                make([])

    def test_no_pyplot_and_no_settings(self):
        program = (
            "import sys; sys.path.insert(0, 'tests/support')\n"
            "from matplotlib import rcParams\n"
            "def settings(): return {key: rcParams[key] for key in rcParams if key != 'backend'}\n"
            "before = settings()\n"
            "from golden_figures import FIGURES, drawn\n"
            "for name in ('classes', 'curves'): drawn(name)\n"
            "assert 'matplotlib.pyplot' not in sys.modules\n"
            "assert settings() == before"
        )
        root = __file__.rpartition("/tests/")[0]
        subprocess.run([sys.executable, "-c", program], check=True, cwd=root)

    def test_text_looks_the_same_whatever_the_users_settings(self):
        import matplotlib as mpl

        plain = np.asarray(drawn("depth"))
        with mpl.rc_context(
            {"font.family": "monospace", "font.size": 30, "text.color": "red", "axes.facecolor": "red"}
        ):
            assert np.array_equal(np.asarray(drawn("depth")), plain)


class TestCommand:
    @pytest.mark.parametrize(
        "name", [name for name, kind in FIGURE_KINDS.items() if kind.images != "none" and name != "prompts"]
    )
    def test_every_figure_can_be_drawn(self, photos, name):
        out = photos / f"out.{'png' if name != 'depth' else 'svg'}"
        images = [photos / "cat.png", photos / "dog.png"][: 1 if FIGURE_KINDS[name].images == "one" else 2]
        steps = ("--steps", 2) if "curve" in name else ()
        result = run("figure", name, *images, *SMALL, "--out", out, *steps, "--dpi", SCREEN)
        assert result.exit_code == 0, result.output
        assert result.stdout.strip() == str(out)
        assert out.stat().st_size > 5000

    def test_a_list_of_figures(self):
        result = run("figure", "--list")
        assert result.exit_code == 0
        assert all(name in result.stdout for name in FIGURE_KINDS)

    def test_the_shipped_photo_several_photos_and_classes(self, photos):
        common = ("--method", "rollout,tokentm", "--out", photos / "out.png", "--topk", 2, "--dpi", SCREEN)
        assert (
            run("figure", "comparison", photos / "cat.png", photos / "dog.png", "demo", *SMALL, *common).exit_code == 0
        )
        rows = Image.open(photos / "out.png").height
        assert run("figure", "comparison", photos / "cat.png", *SMALL, *common).exit_code == 0
        assert rows > 2.5 * Image.open(photos / "out.png").height

    def test_targets_reach_the_figure(self, photos):
        files = [photos / f"{target}.png" for target in (3, 4)]
        for file in files:
            arguments = ("--target", file.stem, "--out", file, "--method", "gae", "--patches", "--dpi", SCREEN)
            assert run("figure", "overlay", photos / "cat.png", *SMALL, *arguments).exit_code == 0
        assert files[0].read_bytes() != files[1].read_bytes()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("overlays", "cat.png"), "did you mean overlay"),
            (("overlay", "gone.png"), "there is no such file"),
            (("overlay", "cat.png", "dog.png"), "shows one image, not 2"),
            (("overlay", "cat.png", "--out", "figure.gif"), "'figure.gif' ends in none of them"),
            (("overlay", "cat.png", "--method", "tokenmt"), "did you mean tokentm"),
            (("depth", "cat.png", "--topk", "2"), "shows one class"),
            (("depth", "cat.png", "--method", "gradcam"), "no depth to vary"),
            (("layers", "cat.png", "--method", "rise"), "no layers to start at"),
            (("heads", "cat.png", "--method", "tokentm"), "gradtoken has"),
            (("transformation", "cat.png", "--method", "tokentm"), "omit --method"),
            (("transformation", "cat.png", "--block", "12"), "block 12 does not exist"),
            (("overlay", "cat.png", "--target", "1000"), "not between 0 and 999"),
            (("overlay", "cat.png", "--width", "wide"), "a width is a length such as 3.25in"),
            (("overlay", "cat.png", "--width", "0.1in"), "0.5 to 100 inches wide"),
            (("overlay", "cat.png", "--dpi", "7"), "from 36 to 2400"),
            (("overlay", "cat.png", "--font", "DejaVu Serfi"), "did you mean DejaVu Serif"),
            (("overlay", "cat.png", "--font", "cat.png.ttf"), "cannot be read"),
            (("overlay", "cat.png", "--cmap", "virids"), "did you mean viridis"),
            (("overlay", "cat.png", "--labels", "a,b"), "1 are shown, and 2 labels were given"),
            (("overlay", "cat.png", "--outline", "gone.png"), "there is no such file"),
            (("similar", "cat.png"), "needs two images"),
            (("prompts", "cat.png"), "needs a --prompt"),
            (("contrast", "cat.png", "--target", "1", "--target", "2", "--target", "3"), "shows two classes"),
            (("dots", "."), "holds no results"),
        ],
    )
    def test_errors_are_one_line(self, photos, monkeypatch, arguments, message):
        monkeypatch.chdir(photos)
        result = run("figure", *arguments, *SMALL)
        assert result.exit_code == 2
        assert not result.stdout
        (line,) = result.stderr.splitlines()
        assert line.startswith("error:")
        assert message in line
        assert sorted(file.name for file in photos.iterdir()) == ["cat.png", "dog.png"]

    def test_a_value_has_no_curves(self, photos, value_model):
        result = run("figure", "curves", photos / "cat.png", "--model", value_model, "--out", photos / "out.png")
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        assert "no curves: they follow a probability" in line
        assert not (photos / "out.png").exists()

    @pytest.mark.parametrize("arguments", [(), ("overlay",), ("overlay", "demo", "--target", "1", "--topk", "2")])
    def test_wrong_use_is_exit_code_2(self, arguments):
        assert run("figure", *arguments).exit_code == 2

    def test_help_and_list_import_nothing_heavy(self):
        program = (
            "import sys; from typer.testing import CliRunner; from vitreous.cli import app\n"
            "assert CliRunner().invoke(app, ['figure', '--list']).exit_code == 0\n"
            "assert not {'torch', 'matplotlib', 'timm'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", program], check=True)
