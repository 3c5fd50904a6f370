"""Fixtures that several test files share."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def shared() -> Path:
    """The development data beside the repository; the test is skipped where it is absent."""
    folder = Path(__file__).parents[2] / "shared"
    if not (folder / "data").is_dir():
        pytest.skip(f"the development data is not at {folder}")
    return folder


@pytest.fixture
def photo() -> Image.Image:
    """A photo-like image, 301 x 211 pixels: smooth colours with some noise, neither square nor even."""
    rows, columns = np.mgrid[0:211, 0:301]
    noise = np.random.default_rng(0).integers(0, 40, (211, 301))
    channels = [rows + noise, columns * 0.7 + noise, (rows + columns) * 0.4 + noise]
    return Image.fromarray(np.stack(channels, axis=-1).clip(0, 255).astype(np.uint8))
