"""Draw the pictures of docs/figures.md and docs/targets.md: one for every kind of figure and of question.

    python scripts/write_figures.py [NAME ...] [--photos FOLDER]

Without names, all of them. ``--photos`` is a folder of pet photos, for the curves over several images; without it that
picture stays as it is. Numbers of evaluations are those of docs/results.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import vitreous
from vitreous.evaluation.report.figures import _panel, sweeps_of
from vitreous.evaluation.statistics import Estimate
from vitreous.methods import is_control
from vitreous.models import LoadedModel, load_model
from vitreous.models.demo import FOLDER, PHOTO
from vitreous.pictures import (
    MetricValues,
    Shown,
    classes_figure,
    comparison_figure,
    curves_figure,
    dataset_curves,
    dataset_curves_figure,
    depth_strip,
    dots_figure,
    filmstrip,
    filmstrip_figure,
    heads_strip,
    overlay_figure,
    perturbation_curves,
    radar_figure,
    similar_figure,
    start_layer_strip,
    strips_figure,
    token_transformation,
    transformation_figure,
)
from vitreous.pictures.canvas import Canvas, class_caption
from vitreous.pictures.charts import panels_figure
from vitreous.targets import Contrast, Pixels, Query

DOCS = Path(__file__).parents[1] / "docs"
TWO = FOLDER / "cat-and-dog.jpg"
METHODS = ["tokentm", "gradtoken", "decompx.skipplus"]
MOST_BYTES = 150_000
WIDTH = 900  # pixels
PRINT = "6.9in"
PHOTOS = 12
CHARTS = ("curves", "dataset-curves", "layer-curve", "dots", "radar")
FEWEST = 400  # images of an evaluation whose numbers are drawn
# Of the protocols in docs/results that measured ViT-Ti/16: metrics that are shown, and how they are called.
MEASURED = {
    "skipplus-faithfulness": {"insertion accuracy": "insertion accuracy (%)", "deletion AOPC": "deletion AOPC"},
    "skipplus-segmentation": {"AP": "AP (%)"},
    "tokentm-probability": {"AOPC": "AOPC"},
}  # fmt: skip
COMPARED = ["decompx.skipplus", "attnlrp", "gae", "tokentm", "gradtoken", "gradcam", "ixg", "rollout", "random"]

Drawing = Callable[[], Canvas]


@cache
def demo() -> LoadedModel:
    """The demo model."""
    return load_model("demo")


@cache
def explained(photo: Path = PHOTO, topk: int = 1) -> vitreous.Explanation:
    """A photo explained by the default methods."""
    return vitreous.explain(demo(), [photo], METHODS, topk=topk)


def prompts() -> Canvas:
    """Prompts by methods."""
    dual = vitreous.load_dual_encoder("demo-clip")
    texts = [vitreous.targets.Prompt("a photo of a cat"), vitreous.targets.Prompt("a photo of a dog")]
    found = vitreous.explain(dual, str(TWO), ["grad_eclip", "decompx.skipplus"], target=[texts])
    return classes_figure(found, photo=TWO, width=PRINT)


def contrast() -> Canvas:
    """The two most likely classes and why the first rather than the second."""
    asked = vitreous.explain(demo(), [TWO], "ixg", Contrast()).targets[0]
    assert isinstance(asked, Contrast)
    pair = [asked.index, asked.other, asked]
    return classes_figure(vitreous.explain(demo(), [TWO], ["decompx.skipplus", "gae"], [pair]), photo=TWO, width=PRINT)


def several() -> Canvas:
    """Curves over several photos."""
    photos: list[Any] = sorted(options.photos.glob("*.*"))[:: max(1, len(list(options.photos.glob("*.*"))) // PHOTOS)]
    return dataset_curves_figure(dataset_curves(demo(), photos[:PHOTOS], METHODS), width=PRINT)


def rows_of(protocol: str) -> list[dict[str, Any]]:
    """The numbers of the larger evaluations by one protocol."""
    files = sorted((DOCS / "results").glob(f"{protocol}-*.json"))
    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]
    return [row for row in rows if row["n"] >= FEWEST]


def measured() -> list[MetricValues]:
    """What was measured of some methods."""
    found = []
    for protocol, names in MEASURED.items():
        for name, shown in names.items():
            factor = 100 if name == "AP" else 1
            values = {
                row["method"]: (factor * row["mean"], factor * row["low"], factor * row["high"])
                for row in rows_of(protocol)
                if row["metric"] == name and row["method"] in COMPARED
            }
            found.append(MetricValues(shown, "higher", values, frozenset(filter(is_control, values))))
    return found


def layer_curve() -> Canvas:
    """Metrics of skipplus-layers over the start layer."""
    estimates = [
        Estimate(row["method"], row["metric"], row["mean"], row["low"], row["high"], row["n"])
        for row in rows_of("skipplus-layers")
        if row["metric"] in {"insertion accuracy", "deletion AOPC"}
    ]
    return panels_figure([_panel(sweep, None) for sweep in sweeps_of(estimates)], width=PRINT)


class Queries(nn.Module):
    """The demo model with its head read at every patch, as a detector has queries: (batch, patches, classes)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """The class scores of every patch."""
        tokens = self.model.forward_features(images)[:, self.model.num_prefix_tokens :]
        scores: Tensor = self.model.head(self.model.fc_norm(tokens))
        return scores


class Dense(Queries):
    """The same as an image: class scores (batch, classes, rows, columns)."""

    def forward(self, images: Tensor) -> Tensor:
        """The class scores of every patch."""
        scores = super().forward(images)
        side = int(scores.shape[1] ** 0.5)
        return scores.transpose(1, 2).unflatten(2, (side, side))


def query() -> Canvas:
    """Why a class in one query: a patch at the dog's head, and one at the cat's eye."""
    model = LoadedModel("demo-queries", Queries(demo().model).eval(), demo().preprocessing, demo().class_names)
    asked = [[Query(4 * 16 + 11, "Shiba Inu"), Query(12 * 16 + 5, "Bengal")]]
    found = vitreous.explain(model, [TWO], ["ixg", "gae"], target=asked)
    return classes_figure(found, photo=TWO, width=PRINT)


def pixels() -> Canvas:
    """Why a class at the pixels of a mask: the head of the dog."""
    dense = LoadedModel("demo-dense", Dense(demo().model).eval(), demo().preprocessing, demo().class_names)
    mask = np.zeros((224, 224), dtype=bool)
    mask[22:118, 118:198] = True
    found = vitreous.explain(dense, [TWO], ["ixg", "gradcam"], target=Pixels(torch.from_numpy(mask)))
    return classes_figure(found, photo=TWO, width=PRINT, mask=mask)


def strips(make: Callable[..., Any], *methods: str, **look: Any) -> Drawing:
    """A figure of strips of the demo photo."""
    return lambda: strips_figure([make(demo(), PHOTO, method) for method in methods], photo=PHOTO, width=PRINT, **look)


def curves() -> Canvas:
    """Deletion and insertion of the demo photo."""
    found = perturbation_curves(demo(), PHOTO, explained())
    return curves_figure(found, caption=class_caption(explained()), width=PRINT)


def similar() -> Canvas:
    """Two photos, both sides mapped."""
    found = vitreous.similar(demo(), PHOTO, [TWO], ["decompx.skipplus"], k=1)
    return similar_figure(found, PHOTO, width=PRINT)


def outline() -> Canvas:
    """A mask on the maps."""
    with Image.open(PHOTO) as photo:
        across, down = np.meshgrid(np.linspace(-1, 1, photo.width), np.linspace(-1, 1, photo.height))
    face = (((across - 0.02) / 0.62) ** 2 + ((down + 0.05) / 0.85) ** 2 < 1).astype(np.uint8)
    return comparison_figure([Shown(explained(), 0, PHOTO, face)], width=PRINT)


FIGURES: dict[str, Drawing] = {
    "overlay": lambda: overlay_figure(explained(), methods=["tokentm", "decompx.skipplus"], photo=PHOTO, width=PRINT),
    "comparison": lambda: comparison_figure([Shown(explained(file), 0, file) for file in (PHOTO, TWO)], width=PRINT),
    "context": lambda: comparison_figure([Shown(explained(), 0, PHOTO)], width=PRINT, context=True),
    "outline": outline,
    "classes": lambda: classes_figure(explained(TWO, 2), photo=TWO, width=PRINT),
    "contrast": contrast,
    "prompts": prompts,
    "similar": similar,
    "depth": strips(depth_strip, "tokentm"),
    "heads": strips(heads_strip, "gradtoken:propagation=none", columns=7),
    "layers": strips(start_layer_strip, "decompx.skipplus"),
    "filmstrip": lambda: filmstrip_figure(
        [filmstrip(demo(), PHOTO, explained(), "tokentm", direction=one) for one in ("deletion", "insertion")],
        photo=PHOTO,
        width=PRINT,
    ),
    "curves": curves,
    "dataset-curves": several,
    "layer-curve": layer_curve,
    "transformation": lambda: transformation_figure(token_transformation(demo(), PHOTO), photo=PHOTO, width=PRINT),
    "dots": lambda: dots_figure(measured(), width=PRINT),
    "radar": lambda: radar_figure(measured(), width="4in"),
    "target-class": lambda: comparison_figure([Shown(explained(TWO), 0, TWO)], width=PRINT),
    "target-pixels": pixels,
    "target-query": query,
}


def write_small(canvas: Canvas, name: str) -> None:
    """Write a picture of at most 150 kB: charts as PNG, maps as JPEG, with fewer pixels where that is not enough."""
    drawn = canvas.image(scale=2)
    for width in (WIDTH, 800, 700, 600):
        size = (min(width, drawn.width), round(drawn.height * min(width, drawn.width) / drawn.width))
        small = drawn.resize(size, Image.Resampling.LANCZOS)
        stream = io.BytesIO()
        if name in CHARTS:
            small.quantize(64).save(stream, format="PNG", optimize=True)
        else:
            small.save(stream, format="JPEG", quality=85, subsampling=0, optimize=True)
        if stream.tell() <= MOST_BYTES:
            (DOCS / "images" / "figures" / f"{name}.{'png' if name in CHARTS else 'jpg'}").write_bytes(
                stream.getvalue()
            )
            return
    raise SystemExit(f"{name} does not get smaller than {stream.tell()} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*FIGURES, []], help="which figures; all by default")
    parser.add_argument("--photos", type=Path, help="a folder of photos for the curves over several images")
    options = parser.parse_args()
    for name in options.names or FIGURES:
        if name == "dataset-curves" and options.photos is None:
            print(f"{name}: left as it is, for no --photos were given")
            continue
        write_small(FIGURES[name](), name)
        print(name)
