"""Scores of patches as maps of pixels, and protocols on maps made by other libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from vitreous._utils.messages import short_repr, warn_caller
from vitreous._utils.torch_state import preserves_torch_state
from vitreous.architecture.evaluation_copy import evaluation_copy
from vitreous.errors import InputError, ModelError, ProtocolError
from vitreous.evaluation.protocols import Protocol, find_protocol
from vitreous.evaluation.runner.adapters import ImageAdapter, Maps
from vitreous.evaluation.runner.measure import Row, columns_of, measure
from vitreous.evaluation.statistics import Estimate, estimates
from vitreous.evaluation.tasks.faithfulness import EfficientRandomisation, ShiftStability
from vitreous.evaluation.tasks.sanity import Randomisation, Sensitivity
from vitreous.evaluation.tasks.task import Case, ImageBatch, MapTarget, MissingAnnotationError, Picture
from vitreous.explanation.explanation import Explanation
from vitreous.explanation.views import display_maps
from vitreous.inputs.patch_geometry import PatchGeometry, Size, enlarge
from vitreous.methods.perturbation import patch_of_pixel
from vitreous.models import LoadedModel
from vitreous.models.loaded import with_resolved_outputs
from vitreous.models.pixels import Images, Model, find_model, find_pixels

Spread = Literal["share", "value", "smooth"]

# These explain other images or another network, so they need the method and not only its maps.
_EXPLAIN_AGAIN = (Randomisation, Sensitivity, EfficientRandomisation, ShiftStability)


def pixel_maps(explanation: Explanation, method: str, spread: Spread = "share") -> Tensor:
    """Convert raw scores of patches to raw scores of pixels.

    Args:
        explanation: the explanation.
        method: one of its methods.
        spread: ``share``: the score is divided equally among the pixels of the patch, so that the sum over pixels is
            the sum over patches; ``value``: every pixel has the score of its patch; ``smooth``: interpolated between
            patch centres.

    Returns:
        (batch, height, width), or (batch, k, height, width) for k classes; for volumes with the depth before the
        height. Maps of pixels are returned unchanged.
    """
    if spread not in get_args(Spread):
        given = spread if isinstance(spread, str) else short_repr(spread)
        raise InputError(f"spread={given} is not one of {', '.join(get_args(Spread))}")
    grid, size, scores = explanation.grid_of(method), explanation.image_size, explanation.scores[method]
    if grid == size:
        return scores.reshape(*scores.shape[:-1], *size)
    geometry = explanation.geometry
    if spread == "smooth":
        cells = scores.reshape(*scores.shape[:-1], *grid)
        return enlarge(cells, size, geometry or _equal_cells(grid, size), smooth=True)
    if geometry is not None and not geometry.shows_all(grid):
        geometry = None  # a patch without a pixel of its own would be lost
    patch = patch_of_pixel(grid, size, geometry).to(scores.device)
    if spread == "share":
        scores = scores / torch.bincount(patch, minlength=scores.shape[-1]).to(scores)
    return scores[..., patch].reshape(*scores.shape[:-1], *size)


def _equal_cells(grid: Size, size: Size) -> PatchGeometry:
    pitch = tuple(length / cells for length, cells in zip(size, grid, strict=True))
    return PatchGeometry(tuple(each / 2 for each in pitch), pitch, size)


def unit_maps(explanation: Explanation, method: str) -> Tensor:
    """Smooth maps in [0, 1] at the input's size; negative scores are clamped, as CAM libraries do."""
    grid, scores = explanation.grid_of(method), explanation.scores[method]
    shown = scores.clamp(min=0) if explanation.signed[method] else scores
    size, geometry = explanation.image_size, explanation.geometry
    return display_maps(shown, grid, size, signed=False, smooth=True, geometry=geometry, from_zero=False)


@dataclass(frozen=True)
class MapResults:
    """Results of a protocol on given maps.

    Attributes:
        protocol: the protocol, without tasks that need the method.
        rows: one row per image and name: ``image``, ``method``, ``error`` and the protocol's columns.
        estimates: for each name, the estimate of each metric with its interval over the images.
    """

    protocol: Protocol
    rows: tuple[Row, ...]
    estimates: Mapping[str, Mapping[str, Estimate]]

    @property
    def errors(self) -> dict[tuple[str, str], str]:
        """Reasons why maps could not be measured, by image and name."""
        return {(str(row["image"]), str(row["method"])): str(row["error"]) for row in self.rows if row["error"]}

    def __str__(self) -> str:
        metrics = self.protocol.metrics()
        lines = [
            f"{name}: " + ", ".join(f"{metric.label} {metric.format(found[metric.name].mean)}" for metric in metrics)
            for name, found in self.estimates.items()
        ]
        return "\n".join([f"{self.protocol.name} on {len({row['image'] for row in self.rows})} images", *lines])


@preserves_torch_state
def evaluate_maps(
    model: Model,
    images: Images,
    maps: ArrayLike | Tensor | Mapping[str, ArrayLike | Tensor],
    protocol: str | Protocol,
    *,
    targets: ArrayLike | Tensor | None = None,
    labels: ArrayLike | Tensor | None = None,
    masks: ArrayLike | Tensor | None = None,
    objects: Sequence[Sequence[int | None]] | None = None,
    names: Sequence[str] | None = None,
) -> MapResults:
    """Run a protocol on maps made by another library.

    Nothing is stored. Tasks that explain other images or another network (model randomisation, sensitivity, shifts)
    need the method itself and are skipped with a warning.

    Args:
        model: as for ``explain``, with known preprocessing: a name, a timm model, or a pair of a model and its
            ``Preprocessing``.
        images: a preprocessed tensor (batch, 3, height, width), or image files and PIL images, which get the model's
            own preprocessing, not the protocol's resizing.
        maps: numpy arrays or tensors, higher values for more evidence: (batch, rows, columns) on the patch grid or
            (batch, height, width) on the input, or (batch, k, ...) for k classes; several in a mapping by name.
        protocol: a protocol on images, or its name.
        targets: the class that each map explains: one for all, (batch,) or (batch, k); the predicted one by default. If
            the protocol needs maps of other classes, the image counts as failed.
        labels: the true class of each image, if the protocol needs it.
        masks: (batch, height, width) at the model's resolution: 0 background, n the n-th object, -1 ignored.
        objects: for every image the classes of object 1, 2, ...
        names: names of the images, which seed random choices.

    Raises:
        ProtocolError: the protocol cannot be run on given maps.
        InputError: shapes do not match.

    Examples:
        >>> import numpy as np
        >>> import vitreous
        >>> maps = {"centre": np.outer(np.hanning(32), np.hanning(32))[None]}  # anything (batch, height, width)
        >>> results = vitreous.evaluate_maps(model, "demo.jpg", maps, "tokentm-probability")
        >>> list(results.estimates["centre"])
        ['AOPC', 'LOdds']
    """
    chosen = _on_maps(find_protocol(protocol) if isinstance(protocol, str) else protocol)
    loaded = _with_preprocessing(model)
    pixels, _ = find_pixels(loaded, loaded.model, images)
    if pixels.dim() == 5:
        raise InputError(
            "protocols measure maps of images, not of volumes or clips; vitreous.pictures.perturbation_curves drops "
            "tokens of these"
        )
    given = maps if isinstance(maps, Mapping) else {"maps": maps}
    if not given:
        raise InputError("no map was given")
    tensors = {str(name): _numbers(values, f"the maps {name!r}").to(pixels.device) for name, values in given.items()}
    batch = len(pixels)
    classes = None if targets is None else _classes(targets, batch)
    samples = [
        _GivenSample(
            name=names[number] if names is not None else f"image-{number}",
            pixels=pixels[[number]],
            maps={name: _of_image(values, number, batch, name, classes) for name, values in tensors.items()},
            targets=None if classes is None else tuple(classes[number].tolist()),
            label=None if labels is None else int(_vector(labels, batch, "labels")[number]),
            mask=None if masks is None else _mask(masks, pixels, number),
            objects=() if objects is None else tuple(objects[number]),
        )
        for number in range(batch)
    ]
    if len({sample.name for sample in samples}) != batch:
        raise InputError("names must be unique, one per image")
    rows = measure(_GivenMaps(loaded, chosen), samples, chosen, list(tensors))  # type: ignore[arg-type]
    return MapResults(chosen, tuple(rows), _estimates(rows, list(tensors), chosen))


def _on_maps(protocol: Protocol) -> Protocol:
    if protocol.reads != "photos":
        raise ProtocolError(f"{protocol.name} evaluates texts, not images")
    if protocol.mosaic is not None:
        raise ProtocolError(f"{protocol.name} explains mosaics of images, for which no maps were given")
    tasks = tuple(task for task in protocol.tasks if not isinstance(task, _EXPLAIN_AGAIN))
    left_out = [task.kind for task in protocol.tasks if task not in tasks]
    if not tasks:
        raise ProtocolError(
            f"{protocol.name} explains other images or weights, so maps alone are not enough: use vitreous.evaluate "
            "with a method, and vitreous.plugin to register your own"
        )
    if left_out:
        warn_caller(f"skipped, because they need the method and not only its maps: {', '.join(left_out)}")
    return replace(protocol, tasks=tasks)


def _with_preprocessing(model: Model) -> LoadedModel:
    found = find_model(model, None)
    if not isinstance(found, LoadedModel):
        name = type(found).__name__
        if not isinstance(found, nn.Module):
            raise InputError(f"model must be an nn.Module or a name, not {name}")
        raise ModelError(
            f"the preprocessing of {name} is not known, so the value of a black pixel is not known either: pass a pair "
            "(model, vitreous.models.Preprocessing(...))"
        )
    return with_resolved_outputs(replace(found, model=evaluation_copy(found.model)))


def _numbers(values: Any, what: str) -> Tensor:
    try:
        tensor = torch.as_tensor(np.asarray(values) if not isinstance(values, Tensor) else values).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{what} must be numbers, in an array or a tensor") from error
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise InputError(f"{what} must be numbers, not {tensor.dtype}")
    return tensor if tensor.is_floating_point() else tensor.double()


def _vector(values: Any, batch: int, what: str) -> Tensor:
    found = torch.as_tensor(values)
    if found.dim() == 0:
        found = found.expand(batch)
    if found.is_floating_point() or len(found) != batch:
        raise InputError(f"{what} must be whole numbers, one per image ({batch}), not {tuple(found.shape)}")
    return found.to(torch.int64).cpu()


def _classes(targets: Any, batch: int) -> Tensor:
    found = _vector(targets, batch, "targets")
    if found.dim() > 2:
        raise InputError(f"targets must have shape (batch,) or (batch, k), not {tuple(found.shape)}")
    return found if found.dim() == 2 else found[:, None]


def _mask(masks: Any, pixels: Tensor, number: int) -> NDArray[np.int16]:
    found = np.asarray(masks.cpu() if isinstance(masks, Tensor) else masks)
    if found.shape != (len(pixels), *pixels.shape[-2:]) or found.dtype.kind not in "iub":
        raise InputError(
            f"masks must be whole numbers {(len(pixels), *pixels.shape[-2:])}, at the size of the model's input, not "
            f"{found.dtype} {found.shape}"
        )
    mask: NDArray[np.int16] = found[number].astype(np.int16)
    return mask


def _of_image(values: Tensor, number: int, batch: int, name: str, classes: Tensor | None) -> Tensor:
    """The maps of one image, (k, rows, columns)."""
    several = 1 if classes is None else classes.shape[1]
    if values.dim() == 4 and values.shape[1] == 1 and several == 1:  # (batch, 1, height, width), as CNN code has it
        values = values[:, 0]
    if values.dim() == 3 and several == 1:
        values = values[:, None]
    if values.dim() != 4 or values.shape[0] != batch or values.shape[1] != several:
        expected = f"({batch}, rows, columns)" if several == 1 else f"({batch}, {several}, rows, columns)"
        raise InputError(f"the maps {name!r} must have shape {expected}, not {tuple(values.shape)}")
    return values[number]


@dataclass(frozen=True)
class _GivenSample:
    """One image with its maps, (k, rows, columns) by name."""

    name: str
    pixels: Tensor
    maps: Mapping[str, Tensor]
    targets: tuple[int, ...] | None
    label: int | None
    mask: NDArray[np.int16] | None
    objects: tuple[int | None, ...]


class _GivenMaps(ImageAdapter):
    """Preprocessed images and their maps."""

    def __init__(self, model: LoadedModel, protocol: Protocol) -> None:
        super().__init__(model, protocol.resize)
        self._samples: Mapping[str, _GivenSample] = {}

    def spelling(self, method: str) -> str:
        return method  # the caller's name for the maps

    def prepare(self, sample: Any) -> Tensor:
        pixels: Tensor = sample.pixels
        return pixels

    def open(self, samples: Sequence[Any], prepared: Sequence[Tensor]) -> ImageBatch:
        self._samples = {sample.name: sample for sample in samples}
        return super().open(samples, prepared)

    def maps(
        self, batch: ImageBatch, images: Sequence[int], targets: Sequence[Sequence[MapTarget]], methods: Sequence[str]
    ) -> Maps:
        grid, size = batch.runner.layout.grid, batch.runner.size
        batch.runner.geometry = batch.runner.layout.geometry
        found: Maps = {}
        for image, classes in zip(images, targets, strict=True):
            picture = batch.pictures[image]
            sample = self._samples[picture.name]
            explained = sample.targets or (picture.predicted,)
            missing = [str(target) for target in classes if target not in explained]
            if missing:
                raise MissingAnnotationError(
                    f"the protocol needs the map of class {missing[0]}, and the given maps explain "
                    f"{', '.join(map(str, explained))}: give maps (batch, k, ...) and targets (batch, k)"
                )
            for method in methods:
                values = sample.maps[method]
                if tuple(values.shape[-2:]) not in {grid, size}:
                    raise InputError(
                        f"the maps {method!r} have {tuple(values.shape[-2:])} rows and columns: they must be those of "
                        f"the patches, {grid}, or of the input, {size}"
                    )
                by_class: dict[MapTarget, Tensor] = dict(zip(explained, values, strict=True))
                found[Case(image, method)] = {target: by_class[target] for target in classes}
        return found

    def _picture(self, sample: Any, logits: Tensor) -> Picture:
        return Picture(
            name=sample.name,
            predicted=int(logits.argmax()),
            classes=len(logits),
            label=sample.label,
            mask=sample.mask,
            objects=sample.objects,
        )


def _estimates(rows: Sequence[Row], names: Sequence[str], protocol: Protocol) -> dict[str, dict[str, Estimate]]:
    columns = columns_of(protocol)
    tables = {
        name: np.array(
            [
                [np.nan if row[column] is None else row[column] for column in columns]
                for row in rows
                if row["method"] == name
            ],
            dtype=np.float64,
        )
        for name in names
    }
    found: dict[str, dict[str, Estimate]] = {name: {} for name in names}
    for estimate in estimates(tables, columns, protocol.metrics()):
        found[estimate.method][estimate.metric] = estimate
    return found
