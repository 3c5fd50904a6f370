"""CIFAR, Pets and VOC hold what torchvision's readers find in the same files."""

from __future__ import annotations

import hashlib
import pickle

import numpy as np
import pytest
from PIL import Image

from vitreous.datasets import open_dataset

torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
from torchvision import datasets  # noqa: E402

RANDOM = np.random.default_rng(0)


def photo(file, size=(9, 7)):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(RANDOM.integers(0, 256, (*size, 3), dtype=np.uint8)).save(file)


def indices(file, values):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values.astype(np.uint8)).save(file)


def same_pixels(one, other):
    return np.array_equal(np.asarray(one.convert("RGB")), np.asarray(other.convert("RGB")))


def test_cifar(tmp_path):
    pixels = RANDOM.integers(0, 256, (6, 3072), dtype=np.uint8)
    labels = RANDOM.integers(0, 10, 6).tolist()
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "test_batch").write_bytes(pickle.dumps({"data": pixels, "labels": labels}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(number) for number in range(10)]}))

    def checksum(name):
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    class TestPart(datasets.CIFAR10):  # the checksums of the published files, and without the training batches
        train_list = ()
        test_list = (("test_batch", checksum("test_batch")),)
        meta = {"filename": "batches.meta", "key": "label_names", "md5": checksum("batches.meta")}  # noqa: RUF012

    theirs, ours = TestPart(str(tmp_path), train=False), open_dataset(f"cifar10:{tmp_path}")
    assert len(theirs) == len(ours) == 6
    for index, (image, label) in enumerate(theirs):
        sample = ours.load(index)
        assert sample.label == label
        assert same_pixels(sample.image, image)


def test_pets(tmp_path):
    root = tmp_path / "oxford-iiit-pet"
    breeds = ("Abyssinian", "american_bulldog", "Persian")
    lines = []
    for number, breed in enumerate(breeds, start=1):
        for place in (1, 2):
            name = f"{breed}_{place}"
            photo(root / "images" / f"{name}.jpg")
            indices(root / "annotations" / "trimaps" / f"{name}.png", RANDOM.integers(1, 4, (9, 7)))
            lines.append(f"{name} {number} 1 1\n")
    (root / "annotations" / "test.txt").write_text("".join(lines))
    theirs = datasets.OxfordIIITPet(str(tmp_path), split="test", target_types=("category", "segmentation"))
    ours = open_dataset(f"pets:{tmp_path}")
    assert len(theirs) == len(ours) == 6
    for index, (image, (label, trimap)) in enumerate(theirs):
        sample = ours.load(index)
        assert sample.label == label
        assert same_pixels(sample.image, image)
        assert np.array_equal(sample.mask == 1, np.asarray(trimap) == 1)
        assert np.array_equal(sample.mask == 0, np.asarray(trimap) == 2)


def test_voc(tmp_path):
    root = tmp_path / "VOCdevkit" / "VOC2012"
    names = ("2007_000033", "2007_000042")
    for name in names:
        photo(root / "JPEGImages" / f"{name}.jpg")
        classes = np.zeros((9, 7), dtype=np.uint8)
        classes[:5, :4], classes[6:, :3], classes[0] = 12, 20, 255
        indices(root / "SegmentationClass" / f"{name}.png", classes)
    (root / "ImageSets" / "Segmentation").mkdir(parents=True)
    (root / "ImageSets" / "Segmentation" / "val.txt").write_text("\n".join(names))
    theirs, ours = datasets.VOCSegmentation(str(tmp_path), image_set="val"), open_dataset(f"voc:{tmp_path}")
    assert len(theirs) == len(ours) == 2
    for index, (image, classes) in enumerate(theirs):
        sample, stored = ours.load(index), np.asarray(classes)
        assert same_pixels(sample.image, image)
        numbers = np.array([0, *(known + 1 for known in sample.objects), 255])  # 255 is -1, the last one
        assert np.array_equal(numbers[sample.mask], stored)
