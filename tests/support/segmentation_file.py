"""A small file in the layout of ImageNet-Segmentation."""

import numpy as np
import pytest

HEIGHT, WIDTH = 5, 8


def write_segmentation(file, *, ids=("n02119789_7", "n00000001_9"), nested=True, dtype=np.uint8):
    """Write what Matlab 7.3 writes: axes in reverse, cells as references, the mask's cell inside of a cell."""
    h5py = pytest.importorskip("h5py")
    image = np.zeros((HEIGHT, WIDTH, 3), dtype=np.uint8)
    image[0, :, 0], image[:, 0, 1], image[4, 7, 2] = 10, 20, 30
    mask = np.zeros((HEIGHT, WIDTH), dtype=dtype)
    mask[0, :], mask[1:3, 0] = 1, 1
    if np.dtype(dtype).kind in "if":
        mask[4, :] = -1
    with h5py.File(file, "w") as content:
        columns = {"img": [], "gt": [], "id": []}
        for number, identifier in enumerate(ids):
            columns["img"].append(content.create_dataset(f"#refs#/i{number}", data=image.transpose(2, 1, 0)).ref)
            reference = content.create_dataset(f"#refs#/m{number}", data=mask.T).ref
            if nested:
                cell = content.create_dataset(f"#refs#/c{number}", (1, 1), dtype=h5py.ref_dtype)
                cell[0, 0] = reference
                reference = cell.ref
            columns["gt"].append(reference)
            characters = np.array([[ord(letter)] for letter in identifier], dtype=np.uint16)
            columns["id"].append(content.create_dataset(f"#refs#/n{number}", data=characters).ref)
        for name, references in columns.items():
            column = content.create_dataset(f"value/{name}", (len(ids), 1), dtype=h5py.ref_dtype)
            for number, reference in enumerate(references):
                column[number, 0] = reference
    return image, mask
