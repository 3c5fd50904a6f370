"""Volumes after they were explained: slices, films, figures, folders, heatmaps, curves; and the page on them."""

from __future__ import annotations

import doctest
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitreous
from vitreous.cli.figure_drawing import FigureRequest, run
from vitreous.errors import InputError
from vitreous.explanation.explanation import ExplanationError
from vitreous.inputs.patch_geometry import PatchGeometry
from vitreous.pictures import perturbation_curves, slices_figure
from vitreous.pictures.base_image import BaseImage

PAGE = Path(__file__).parents[2] / "docs" / "volumes.md"
SIZE, GRID = (6, 8, 12), (3, 2, 4)


def explanation(batch: int = 2, **changes) -> vitreous.Explanation:
    """Scores that count from 0, on volumes whose voxels count from 0, too."""
    scores = torch.arange(24.0).expand(batch, -1) + torch.arange(batch)[:, None]
    voxels = np.arange(np.prod(SIZE)).reshape(SIZE) % 251
    film = Image.fromarray(voxels.reshape(-1, SIZE[2]).astype(np.uint8)).convert("RGB")
    fields = {
        "scores": {"gae": scores, "signed": scores - 12},
        "grid": GRID,
        "target": torch.zeros(batch, dtype=torch.int64),
        "logits": torch.tensor([[1.0, 0.0]]).expand(batch, -1),
        "image_size": SIZE,
        "signed": {"gae": False, "signed": True},
        "images": (film,) * batch,
    }
    return vitreous.Explanation(**{**fields, **changes})


def voxel(number: tuple[int, int, int]) -> int:
    return int(np.ravel_multi_index(number, SIZE)) % 251


class TestSlices:
    @pytest.mark.parametrize(("axis", "number", "cell"), [(0, 3, 1), (1, 5, 1), (2, 11, 3), (2, -1, 3), (0, 0, 0)])
    def test_a_slice_has_the_scores_and_voxels_of_its_place(self, axis, number, cell):
        whole = explanation()
        found = whole.slice(number, axis)
        left = [other for other in range(3) if other != axis]
        assert found.grid == tuple(GRID[other] for other in left)
        assert found.image_size == tuple(SIZE[other] for other in left)
        assert torch.equal(found.maps("gae"), whole.maps("gae").select(1 + axis, cell))
        pixels = np.asarray(found.images[1])[..., 0]
        assert pixels.shape == found.image_size
        place = np.insert((1, 2), axis, number % SIZE[axis])
        assert pixels[1, 2] == voxel(tuple(place))
        assert found.provenance["slice"] == number % SIZE[axis]

    def test_scores_between_patches_are_interpolated(self):
        # Patch 1 has slices 2 and 3 and is centred at 3.0; slice 3 is centred at 3.5, a quarter of the way to patch 2.
        found, maps = explanation().slice(3, smooth=True).maps("gae"), explanation().maps("gae")
        torch.testing.assert_close(found, 0.75 * maps[:, 1] + 0.25 * maps[:, 2])

    def test_shifted_patches_are_found_where_they_are(self):
        shifted = explanation(geometry=PatchGeometry((2.0, 2.0, 1.5), (2.0, 4.0, 3.0), SIZE))
        assert torch.equal(shifted.slice(2).maps("gae"), shifted.maps("gae")[:, 0])  # at 2.5, patch 0 ends at 3
        assert shifted.slice(2).geometry == PatchGeometry((2.0, 1.5), (4.0, 3.0), SIZE[1:])

    def test_the_highest_slice_is_in_the_highest_patch(self):
        assert explanation().slice().provenance["slice"] == 5
        scores = torch.zeros(1, 24)
        scores[0, 8 + 3] = 1  # depth 1
        found = explanation(1, scores={"gae": scores}, signed={"gae": False})
        assert found.slice().provenance["slice"] == 3
        assert found.slice().maps("gae").max() == 1

    def test_what_is_no_slice_is_refused(self):
        for number, axis in ((6, 0), (-7, 0), (0, 3)):
            with pytest.raises(InputError):
                explanation().slice(number, axis)
        with pytest.raises(InputError, match="has no slices"):
            explanation().slice(0).slice(0)
        with pytest.raises(ExplanationError, match="does not fit"):
            explanation(image_size=(8, 12))
        odd = explanation(images=(Image.new("RGB", (12, 50)),) * 2)
        with pytest.raises(InputError, match="6 slices one below the other"):
            odd.slice(0)

    def test_maps_of_voxels_have_slices(self):
        scores = torch.rand(1, 6 * 8 * 12)
        found = explanation(1, scores={"ixg": scores}, signed={"ixg": True})
        assert found.grid_of("ixg") == SIZE
        assert torch.equal(found.slice(4).scores["ixg"], scores.view(1, *SIZE)[:, 4].flatten(1))


class TestHeatmaps:
    def test_heatmaps_have_every_voxel(self):
        found = explanation()
        rough = found.heatmap("gae", smooth=False)
        assert rough.shape == (2, *SIZE)
        expected = found.maps("gae").repeat_interleave(2, 1).repeat_interleave(4, 2).repeat_interleave(3, 3)
        torch.testing.assert_close(rough, expected / expected.amax(dim=(1, 2, 3), keepdim=True))
        smooth = torch.nn.functional.interpolate(found.maps("signed")[:, None], SIZE, mode="trilinear")[:, 0]
        peak = smooth.abs().amax(dim=(1, 2, 3), keepdim=True)
        torch.testing.assert_close(found.heatmap("signed"), smooth / peak)
        with pytest.raises(ExplanationError, match="cannot have the size"):
            found.heatmap("gae", size=(8, 12))

    def test_an_overlay_is_a_film(self):
        found = explanation()
        film = found.overlay("gae")
        assert film.size == found.images[0].size == (12, 48)
        assert np.array_equal(np.asarray(film)[:1, :1], np.asarray(found.images[0])[:1, :1])  # 0 is the image itself


class TestFigures:
    @pytest.mark.parametrize("name", ["slices", "frames"])
    def test_slices_stand_side_by_side(self, name):
        found = explanation()
        wide, narrow = found.figure(name), found.figure(name, width="3.25in", columns=3)
        assert wide.image(1).width > wide.image(1).height / 2
        assert narrow.width == pytest.approx(325)  # hundredths of an inch

    def test_another_number_of_slices_and_methods_changes_the_page(self):
        found = explanation()
        all_, three = (found.figure("slices", columns=count) for count in (None, 3))
        assert three.image(1).width < all_.image(1).width
        one = found.figure("slices", methods=["gae"])
        assert one.image(1).height < all_.image(1).height

    def test_the_maps_of_a_row_share_the_scale_of_the_volume(self, monkeypatch):
        spans = []
        lay = BaseImage.lay

        def noted(base, scores, grid, **options):
            spans.append(options["span"])
            return lay(base, scores, grid, **options)

        monkeypatch.setattr(BaseImage, "lay", noted)
        found = explanation(1)
        found.figure("slices", columns=2)
        assert spans == [(0.0, 23.0)] * 2 + [(-12.0, 12.0)] * 2
        spans.clear()
        found.figure("slices", columns=2, methods=["gae"], smooth=False, shared_scale=False)
        assert spans == [(0.0, 7.0), (0.0, 23.0)]  # slices 1 and 4 are of the first and the last patches

    def test_figures_of_images_refuse_volumes_and_name_the_way(self, tmp_path):
        found = explanation()
        for name in ("overlay", "comparison", "classes"):
            with pytest.raises(InputError, match=r"explanation.slice\(number\)"):
                found.figure(name)
        with pytest.raises(InputError, match=r"explanation.slice\(number\)"):
            found.report(tmp_path / "report.html")
        with pytest.raises(InputError, match="has no frames"):
            slices_figure(found.slice(0), word="frame")
        assert found.slice(0).figure("comparison").image(1).width > 0
        assert "image/png" not in found._repr_html_() or found._repr_png_() is not None

    def test_a_saved_volume_is_drawn_by_the_command_line(self, tmp_path):
        folder = explanation().save(tmp_path / "saved")
        loaded = vitreous.Explanation.load(folder)
        assert (loaded.grid, loaded.image_size) == (GRID, SIZE)
        assert torch.equal(loaded.maps("gae"), explanation().maps("gae"))
        assert (folder / "overlay-0-0-gae.png").is_file()
        request = FigureRequest(
            name="slices", model="demo", methods=["signed"], targets=[], topk=None, prompts=[], outputs=None,
            out=tmp_path / "slices.png", look={}, outline=None, data=None, block=0, by="patches", steps=None,
            direction="deletion", mean=None, std=None, image_size=None, device="cpu",
        )  # fmt: skip
        assert run([str(folder)], request) == tmp_path / "slices.png"
        assert Image.open(tmp_path / "slices.png").width > 1000


def small_model(channels: int = 1):
    package = pytest.importorskip("vit_pytorch.vit_3d", reason="vit-pytorch is not installed")
    torch.manual_seed(0)
    return package.ViT(
        image_size=16, image_patch_size=8, frames=4, frame_patch_size=2, num_classes=3, channels=channels,
        dim=16, depth=2, heads=2, mlp_dim=16,
    ).eval()  # fmt: skip


def test_curves_drop_tokens_and_trust_names_thirds():
    model, volumes = small_model(), torch.rand(1, 1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    found = vitreous.explain(model, volumes, ["gae", "ixg"])
    by_patches, by_voxels = (perturbation_curves(model, volumes, found, steps=4, by=by) for by in ("patches", "pixels"))
    whole = found.logits.double().softmax(dim=1)[0, found.target[0]]
    for curve in (*by_patches, *by_voxels):
        np.testing.assert_allclose([curve.deletion[0], curve.insertion[-1]], float(whole), rtol=1e-5)  # float32
    (trust,) = found.trust(model, volumes)
    assert "third's" in trust.sentence
    with pytest.raises(InputError, match="pass the images that were explained"):
        found.trust(model, torch.rand(1, 1, 8, 16, 16))


def test_protocols_refuse_volumes():
    from vitreous.models import LoadedModel, Preprocessing

    loaded = LoadedModel("small", small_model(), Preprocessing((16, 16), (0.5,) * 3, (0.5,) * 3), None)
    with pytest.raises(InputError, match="not of volumes or clips"):
        vitreous.evaluate_maps(loaded, torch.rand(1, 1, 4, 16, 16), np.ones((1, 4, 16, 16)), "tokentm-probability")


def test_voxels_are_drawn_in_their_channels():
    """Frames first or channels first, the same clip is drawn as the same film."""
    clip = torch.rand(1, 3, 4, 16, 16)

    class FramesFirst(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.vit = small_model(3)

        def forward(self, clips):
            return self.vit(clips.transpose(1, 2))

    films = [
        vitreous.explain(model, given, "gae").images[0]
        for model, given in ((small_model(3), clip), (FramesFirst().eval(), clip.transpose(1, 2)))
    ]
    assert films[0].size == (16, 64)
    assert films[0].tobytes() == films[1].tobytes()
    pixel = np.asarray(films[0])[16 * 2 + 5, 7]
    np.testing.assert_array_equal(pixel, (clip[0, :, 2, 5, 7] * 255).round().numpy())


def test_the_page_runs(tmp_path, monkeypatch):
    pytest.importorskip("vit_pytorch.vit_3d", reason="vit-pytorch is not installed")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = [part.split("```")[0] for part in PAGE.read_text(encoding="utf-8").split("```python\n")[1:]]
    assert len(blocks) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, code in enumerate(blocks):
            exec(compile(code, f"volumes.md block {number}", "exec"), names)
    found = names["explanation"]
    assert found.grid == (4, 4, 4)
    assert found.maps("tokentm").shape == (2, 4, 4, 4)
    assert found.heatmap("tokentm").shape == (2, 16, 32, 32)
    assert (names["slice"].grid, names["slice"].image_size) == ((4, 4), (32, 32))
    assert Path("slices.png").is_file()
    assert Path("slice.png").is_file()


def test_the_example_of_slice_runs():
    pytest.importorskip("vit_pytorch.vit_3d", reason="vit-pytorch is not installed")
    for example in doctest.DocTestFinder().find(vitreous.Explanation.slice, "slice", globs={}):
        assert doctest.DocTestRunner().run(example).failed == 0
