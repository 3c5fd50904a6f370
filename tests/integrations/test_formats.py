"""Maps in the formats of other tools, read back by those tools."""

import io
import json
from contextlib import redirect_stdout

import h5py
import numpy as np
import pytest
import torch
import zarr
from matplotlib.path import Path as Outline
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO

import vitreous
from small_models import random_images, small_vit
from vitreous._utils.storage import StorageError
from vitreous.errors import InputError
from vitreous.integrations.formats import (
    add_fiftyone_heatmaps,
    heatmap_masks,
    outlines,
    read_maps,
    run_lengths,
    to_coco,
    write_maps,
    write_voc_masks,
)
from vitreous.models import Preprocessing

CROPPED = Preprocessing(image_size=(32, 32), mean=(0.5,) * 3, std=(0.5,) * 3)


@pytest.fixture(scope="module")
def explanation():
    return vitreous.explain(small_vit(depth=2), random_images(2), ["gae", "ixg.plus:start=1"], [[0, 1], [2, 3]])


@pytest.fixture(scope="module")
def of_photo():
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 80, 3), dtype=np.uint8))
    return vitreous.explain((small_vit(depth=2, dtype=torch.float32), CROPPED), [photo], "gae")


class TestMasks:
    def test_a_threshold(self, explanation):
        masks = heatmap_masks(explanation, "gae", threshold=0.7)
        shown = explanation.heatmap("gae").numpy()
        assert [len(of_image) for of_image in masks] == [2, 2]
        assert all(np.array_equal(masks[i][k], shown[i, k] >= 0.7) for i in range(2) for k in range(2))

    def test_of_signed_maps_what_speaks_for_the_class(self, explanation):
        (mask, _), _ = heatmap_masks(explanation, "ixg.plus:start=1", threshold=0.01)
        shown = explanation.heatmap("ixg.plus:start=1").numpy()[0, 0]
        assert (shown[mask] > -0.5).all()
        assert not mask[shown == shown.min()].any()

    def test_a_share(self, explanation):
        for share in (0.1, 0.25, 1.0):
            assert heatmap_masks(explanation, "gae", share=share)[0][0].sum() == round(share * 1024)
        for wrong in (2, 0, float("nan"), "half"):
            with pytest.raises(InputError, match="share must be"):
                heatmap_masks(explanation, "gae", share=wrong)
            with pytest.raises(InputError, match="threshold must be"):
                heatmap_masks(explanation, "gae", threshold=wrong)
        with pytest.raises(InputError, match="'rollout' was not explained: the methods are gae, "):
            heatmap_masks(explanation, "rollout")

    def test_in_the_pixels_of_the_photo(self, of_photo):
        ((mask,),) = heatmap_masks(of_photo, "gae", share=1.0, photo_sizes=[(40, 80)])
        assert mask.shape == (40, 80)
        assert mask[:, 20:60].all()  # a centre crop of the shorter edge
        assert not mask[:, :20].any()
        assert not mask[:, 60:].any()

    def test_photo_sizes_need_preprocessing(self, explanation):
        with pytest.raises(InputError, match="explain images"):
            heatmap_masks(explanation, "gae", photo_sizes=[(40, 80)] * 2)


class TestCoco:
    @pytest.mark.parametrize("seed", range(20))
    def test_run_lengths_are_those_of_pycocotools(self, seed):
        generator = np.random.default_rng(seed)
        mask = generator.random(generator.integers(1, 70, 2)) < generator.random()
        if seed == 0:
            mask[:] = True
        if seed == 1:
            mask[:] = False
        assert run_lengths(mask).encode() == coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))["counts"]

    @pytest.mark.parametrize("seed", range(10))
    def test_outlines_enclose_the_mask(self, seed):
        generator = np.random.default_rng(seed)
        mask = np.kron(generator.random((6, 7)) < 0.5, np.ones((3, 2))).astype(bool)
        content = _of_mask(mask)
        polygons = content["segmentation"]
        rows, columns = np.mgrid[: mask.shape[0], : mask.shape[1]]
        centres = np.stack([columns.ravel() + 0.5, rows.ravel() + 0.5], axis=1)
        inside = np.zeros(mask.size, dtype=int)
        for polygon in polygons:
            inside += Outline(np.array(polygon).reshape(-1, 2)).contains_points(centres)
        assert inside.max() == 1  # outlines do not overlap
        assert (inside.reshape(mask.shape) >= mask).all()
        assert inside.sum() == content["area"]

    def test_a_hole_is_filled_and_corners_are_no_bridge(self):
        ring = np.pad(np.zeros((2, 2), dtype=bool), 1, constant_values=True)
        assert _of_mask(ring)["segmentation"] == [[0, 0, 4, 0, 4, 4, 0, 4]]
        assert outlines(np.eye(2, dtype=bool)) == [[0, 0, 1, 0, 1, 1, 0, 1], [1, 1, 2, 1, 2, 2, 1, 2]]

    @pytest.mark.parametrize("form", ["rle", "polygon"])
    def test_pycocotools_reads_the_file(self, explanation, tmp_path, form):
        to_coco(explanation, "gae", tmp_path / "maps.json", form=form, threshold=0.6, file_names=["a.jpg", "b.jpg"])
        with redirect_stdout(io.StringIO()):
            coco = COCO(str(tmp_path / "maps.json"))
        assert [image["file_name"] for image in coco.loadImgs([0, 1])] == ["a.jpg", "b.jpg"]
        assert {category["id"] for category in coco.loadCats(coco.getCatIds())} == {0, 1, 2, 3}
        masks = heatmap_masks(explanation, "gae", threshold=0.6)
        for annotation in coco.loadAnns(coco.getAnnIds()):
            place = explanation.target[annotation["image_id"]].tolist().index(annotation["category_id"])
            found, expected = coco.annToMask(annotation).astype(bool), masks[annotation["image_id"]][place]
            if form == "rle":
                assert np.array_equal(found, expected)
                assert annotation["area"] == expected.sum()
                assert annotation["bbox"] == coco_mask.toBbox(coco.annToRLE(annotation)).tolist()
            else:  # its raster of a polygon is a pixel off at some edges
                assert (found & expected).sum() >= 0.8 * expected.sum()


def _of_mask(mask):
    from vitreous.integrations.formats import _segment

    return _segment(mask, "polygon")


def test_voc(explanation, tmp_path):
    files = write_voc_masks(explanation, "gae", tmp_path / "SegmentationObject", threshold=0.6, names=["a", "b"])
    masks = heatmap_masks(explanation, "gae", threshold=0.6)
    for file, (first, second) in zip(files, masks, strict=True):
        with Image.open(file) as picture:
            assert picture.mode == "P"
            assert picture.getpalette()[:9] == [0, 0, 0, 128, 0, 0, 0, 128, 0]
            values = np.asarray(picture)
        assert np.array_equal(values == 2, second)
        assert np.array_equal(values == 1, first & ~second)
    with pytest.raises(InputError, match="different"):
        write_voc_masks(explanation, "gae", tmp_path, names=["a", "a"])


class TestArrays:
    @pytest.mark.parametrize("name", ["maps.h5", "maps.hdf5", "maps.zarr"])
    def test_round_trip(self, explanation, tmp_path, name):
        found = read_maps(write_maps(explanation, tmp_path / name))
        assert found.methods == explanation.methods
        assert all(torch.equal(found.scores[method], explanation.scores[method]) for method in found.methods)
        assert torch.equal(found.logits, explanation.logits)
        assert torch.equal(found.target, explanation.target)
        assert (found.grid, found.image_size, found.signed) == ((4, 4), (32, 32), explanation.signed)
        assert found.provenance == explanation.provenance

    def test_other_programs_find_maps_in_rows_and_columns(self, explanation, tmp_path):
        expected = explanation.scores["gae"].reshape(2, 2, 4, 4).numpy()
        with h5py.File(write_maps(explanation, tmp_path / "maps.h5")) as stored:
            assert np.array_equal(stored["maps/0"], expected)
            assert stored["maps/0"].attrs["method"] == "gae"
        stored = zarr.open_group(str(write_maps(explanation, tmp_path / "maps.zarr")), mode="r")
        assert np.array_equal(stored["maps/0"][:], expected)
        assert json.loads(stored.attrs["details"])["methods"] == list(explanation.methods)

    def test_what_cannot_be_written_or_read(self, explanation, tmp_path):
        with pytest.raises(InputError, match="zarr"):
            write_maps(explanation, tmp_path / "maps.mat")
        write_maps(explanation, tmp_path / "maps.zarr")
        with pytest.raises(StorageError, match="exists already"):
            write_maps(explanation, tmp_path / "maps.zarr")
        with pytest.raises(StorageError, match="does not exist"):
            read_maps(tmp_path / "none.h5")
        (tmp_path / "other.h5").write_bytes(b"no HDF5")
        with pytest.raises(StorageError, match="cannot be read"):
            read_maps(tmp_path / "other.h5")
        h5py.File(tmp_path / "foreign.h5", "w").close()
        with pytest.raises(StorageError, match="was not written by"):
            read_maps(tmp_path / "foreign.h5")

    def test_an_interrupted_write_leaves_nothing(self, explanation, tmp_path, monkeypatch):
        def interrupted(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr("vitreous.integrations.formats._array", interrupted)
        for name in ("maps.h5", "maps.zarr"):
            with pytest.raises(KeyboardInterrupt):
                write_maps(explanation, tmp_path / name)
        assert not list(tmp_path.iterdir())

    def test_bfloat16_and_not_finite_scores(self, tmp_path):
        found = vitreous.explain(
            small_vit(depth=2, dtype=torch.bfloat16), random_images(1, dtype=torch.bfloat16), "gae"
        )
        found.scores["gae"][0, 3] = torch.nan
        for name in ("maps.h5", "maps.zarr"):
            again = read_maps(write_maps(found, tmp_path / name)).scores["gae"]
            assert torch.equal(again.nan_to_num(), found.scores["gae"].float().nan_to_num())
            assert again[0, 3].isnan()

    def test_saved_folders_are_read_by_numpy(self, explanation, tmp_path):
        with np.load(explanation.save(tmp_path / "saved") / "explanation.npz") as stored:
            assert np.array_equal(stored["scores-gae"], explanation.scores["gae"].numpy())


def test_fiftyone(of_photo, tmp_path):
    fiftyone = pytest.importorskip("fiftyone", reason="FiftyOne is not installed (extra fiftyone)")
    Image.new("RGB", (80, 40)).save(tmp_path / "photo.png")
    sample = fiftyone.Sample(filepath=str(tmp_path / "photo.png"))
    add_fiftyone_heatmaps([sample], of_photo)
    heatmap = sample["vitreous_gae"]
    assert isinstance(heatmap, fiftyone.Heatmap)
    assert heatmap.map.shape == (40, 80)
    assert (heatmap.map.min(), heatmap.map.max(), list(heatmap.range)) == (0, 1, [0, 1])
    assert not heatmap.map[:, :20].any()
