"""The explanation of a batch of images, as data: pictures, pages and notebooks register how they show it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

from vitreous._utils.defaults import DEFAULT_OPACITY
from vitreous._utils.messages import warn_caller
from vitreous.errors import InputError
from vitreous.explanation import folder as explanation_folder
from vitreous.explanation.prediction import (
    ExplanationError,
    Origin,
    Predicted,
    Prediction,
    check_images,
    check_predictions,
    check_scores,
    plain_fields,
)
from vitreous.explanation.views import (
    FigureOptions,
    Look,
    display_maps,
    find_figure,
    find_view,
    look_with,
    sliced,
)
from vitreous.models.pixels import ADVICE, given_pictures

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from PIL import Image
    from torch import Tensor

    from vitreous.explanation.trust import Trust
    from vitreous.explanation.views import Drawing
    from vitreous.inputs.model_io import OutputActivation
    from vitreous.inputs.patch_geometry import PatchGeometry
    from vitreous.inputs.target import Target
    from vitreous.models.pixels import Channels, Drawable, Photo
    from vitreous.models.preprocessing import Preprocessing

_DEFERRED = "_compute_logits"
_ORIGIN = "_origin"

__all__ = ["Explanation", "ExplanationError", "Origin", "Prediction", "with_deferred_logits", "with_origin"]


@dataclass(frozen=True, eq=False, repr=False)
class Explanation(Predicted):
    """Scores of every patch of a batch of images, by one or more methods, for one or more classes per image.

    Attributes:
        scores: For each method spelling, raw scores (batch, patches), or (batch, k, patches) for k classes.
        grid: Rows and columns of patches; of a volume or clip its depth or frames before them.
        target: The classes explained, int64, (batch,) or (batch, k).
        logits: The model's output (batch, classes). If a target was given and no method needed the logits, the model
            runs when they are first read.
        image_size: Height and width of the model's input, behind the depth of a volume or the frames of a clip.
        signed: For each method spelling, whether the sign of its scores carries meaning.
        class_names: One name per class, if known.
        images: The images that maps are drawn on: photos as the model saw them, or its input tensor. Of a volume all
            slices, of a clip all frames, one below the other.
        preprocessing: How photos became the model's input, if known: which part of a photo was seen.
        provenance: Versions, model and methods, as JSON values; see ``vitreous.explanation.folder``.
        scale: What the outputs are, see ``vitreous.inputs.model_io``; ``None``: logits. ``outputs`` is the same
            by name.
        images_note: A sentence on ``images`` that are not photos, such as a normalised tensor; figures show it.
        left_out: Default methods that the model does not support, and why.
        geometry: Where in the model's input patches are centred; ``None`` for equal cells.
        targets: The targets explained that are not classes, see ``vitreous.targets``; in ``target`` they have the
            numbers from the number of classes on.
        target_values: The number explained of each map, in the shape of ``target``, when targets were objects.

    Examples:
        >>> import vitreous
        >>> explanation = vitreous.explain(model, "demo.jpg", ["gae", "rollout"])
        >>> explanation.methods, len(explanation), explanation.classes_per_image
        (('gae', 'rollout'), 1, 1)
        >>> heatmap = explanation.heatmap("gae")  # (1, height, width) in [0, 1]
        >>> image = explanation.overlay("gae", photo="demo.jpg")
        >>> folder = explanation.save("saved")
        >>> vitreous.Explanation.load(folder).methods
        ('gae', 'rollout')
    """

    noun: ClassVar[str] = "images"

    scores: Mapping[str, Tensor]
    grid: tuple[int, ...]
    target: Tensor
    logits: Tensor
    image_size: tuple[int, ...]
    signed: Mapping[str, bool]
    class_names: tuple[str, ...] | None = None
    images: tuple[Image.Image, ...] | None = None
    preprocessing: Preprocessing | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    scale: OutputActivation | None = None
    images_note: str | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    geometry: PatchGeometry | None = None
    targets: tuple[Target, ...] = ()
    target_values: Tensor | None = None

    def __post_init__(self) -> None:
        for name, value in plain_fields(self).items():
            object.__setattr__(self, name, value)  # the one way to normalise a field of a frozen dataclass
        check_predictions(self)
        check_scores(self)
        check_images(self)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Compute deferred logits; every other attribute is there."""
            compute = self.__dict__.get(_DEFERRED)
            if name != "logits" or compute is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            logits = compute().detach()
            self.__dict__["logits"] = logits
            self.__dict__.pop(_DEFERRED, None)  # it holds the model
            return logits

    def __getstate__(self) -> dict[str, Any]:
        """Copy or pickle the logits, not the model that computes them."""
        self.logits  # noqa: B018 - computes them
        return {name: value for name, value in self.__dict__.items() if name != _ORIGIN}

    def __repr__(self) -> str:
        classes = f" x {self.classes_per_image} classes" if self.target.ndim == 2 else ""
        return (
            f"Explanation({len(self)} image{'s' if len(self) > 1 else ''}{classes}, methods={list(self.methods)}, "
            f"grid={self.grid}, image_size={self.image_size}, model={self.provenance.get('model')!r})"
        )

    def _repr_html_(self) -> str:
        """Show the maps and predictions in a notebook."""
        shown: str = find_view(self, "notebook:html")(self)
        return shown

    def _repr_png_(self) -> bytes | None:
        """Show the maps when a notebook is exported to print."""
        shown: bytes | None = find_view(self, "notebook:png")(self)
        return shown

    def grid_of(self, method: str) -> tuple[int, ...]:
        """Rows and columns of a method's map: patches, or pixels for methods that score pixels."""
        return self.grid_for(self._scores_of(method))

    def grid_for(self, scores: Tensor) -> tuple[int, ...]:
        """Rows and columns of maps of these images (..., patches), or (..., pixels)."""
        pixels = scores.shape[-1] == math.prod(self.image_size)
        return self.image_size if pixels else self.grid

    def maps(self, method: str) -> Tensor:
        """Give the raw scores of a method in their grid.

        Returns:
            (batch, rows, columns), or (batch, depth, rows, columns) of volumes and clips; with k classes per image
            (batch, k, ...).
        """
        scores: Tensor = self._scores_of(method)
        return scores.reshape(*scores.shape[:-1], *self.grid_of(method))

    def heatmap(self, method: str, *, smooth: bool = True, size: tuple[int, ...] | None = None) -> Tensor:
        """Scale the scores of a method for display, each map by itself.

        Zero stays zero: maps of methods without sign are divided by their largest value, into [0, 1], and scores below
        zero become 0 (unless no score is above); signed maps are divided by their largest absolute value, into [-1, 1].
        A constant map gives zeros.

        Args:
            method: One of ``methods``.
            smooth: Interpolate between patch centres; otherwise every patch is a rectangle of one value.
            size: Height and width of the result, behind the depth of a volume; the model's input size by default.

        Returns:
            Maps (batch, height, width), or (batch, k, height, width); of volumes and clips (batch, depth, height,
            width), a value for every voxel.
        """
        return self._display(method, self._scores_of(method), smooth=smooth, size=size or self.image_size)

    def display_map(
        self, method: str, index: int = 0, target_index: int = 0, *, smooth: bool = True, size: tuple[int, ...]
    ) -> Tensor:
        """Scale one map for display, see ``heatmap``: (height, width)."""
        return self._display(method, self.scores_of(method, index, target_index), smooth=smooth, size=size)

    def overlay(
        self,
        method: str,
        index: int = 0,
        target_index: int = 0,
        *,
        opacity: float = DEFAULT_OPACITY,
        smooth: bool = True,
        image: Drawable | None = None,
        mean: Channels | None = None,
        std: Channels | None = None,
        photo: Photo | None = None,
    ) -> Image.Image:
        """Lay a method's heatmap over an image.

        Warns when that is a normalised tensor, whose colours are not a photo's.

        Args:
            method: One of ``methods``.
            index: Which image of the batch.
            target_index: Which of its explained classes.
            opacity: From 0 (the photo alone) to 1.
            smooth: See ``heatmap``.
            image: The image to draw on, cropped as the model saw it; by default the one in ``images``. A PIL image, a
                path, an array (height, width, 3) or a tensor (3, height, width).
            mean: With a tensor as ``image``: what was subtracted to normalise it, a number or one for each channel.
            std: With a tensor as ``image``: what it was divided by.
            photo: Instead, the photo before preprocessing: the result has its resolution and aspect, and no colour
                outside of the model's crop.
        """
        shown, index = self._drawn_on(index, image, mean, std, photo)
        if photo is None and shown.images_note:
            warn_caller(f"{shown.images_note} {ADVICE}")
        draw = find_view(shown, "overlay")
        look = Look(smooth=smooth, opacity=opacity)
        drawn: Image.Image = draw(shown, method, index, target_index, look=look, photo=photo)
        return drawn

    def scores_of(self, method: str, index: int = 0, target_index: int = 0) -> Tensor:
        """Give the raw scores of one map: (patches,), or (pixels,) for methods that score pixels."""
        scores: Tensor = self._scores_of(method)
        index, target_index = self.position(index, target_index)
        return scores[index, target_index] if self.target.ndim == 2 else scores[index]

    def shows(self, method: str, index: int = 0, target_index: int = 0) -> bool:
        """Tell whether a map can be drawn: it has no NaN or infinity."""
        return bool(self.scores_of(method, index, target_index).isfinite().all())

    def figure(
        self,
        name: str = "overlay",
        index: int = 0,
        *,
        methods: Sequence[str] | None = None,
        image: Drawable | None = None,
        mean: Channels | None = None,
        std: Channels | None = None,
        photo: Photo | None = None,
        **options: Unpack[FigureOptions],
    ) -> Drawing:
        """Draw a figure. It shows itself in notebooks and is saved as PNG, SVG or PDF.

        A note at the bottom says if it is drawn on a normalised tensor, whose colours are not those of the image.

        Args:
            name: ``overlay``: large maps with colour bars; ``comparison``: the photo and every method's map;
                ``classes``: a map for each explained class or other target; ``slices`` or ``frames`` of a volume or
                clip; or one registered with
                ``vitreous.pictures.register_figure``.
            index: Which image of the batch.
            methods: Which methods, in this order; all by default.
            image: The image to draw on, see ``overlay``; by default the one in ``images``.
            mean: See ``overlay``.
            std: See ``overlay``.
            photo: The photo before preprocessing, to be drawn in its own resolution and aspect.
            **options: How it is drawn, see ``vitreous.pictures.Look``: ``width="3.25in"``, ``dpi``, ``font``, ``cmap``,
                ``columns``, ``labels``, ``context``, ``shared_scale``, ``smooth``, ``opacity`` and others.
        """
        draw = find_figure(self, name)
        shown, index = self._drawn_on(index, image, mean, std, photo)
        look = look_with(None, options)
        drawn: Drawing = draw(shown, index, methods=methods, photo=photo, look=look)
        return drawn

    @property
    def origin(self) -> Origin | None:
        """What the explanation was made of; ``None`` of one that was loaded, copied or put together."""
        found: Origin | None = self.__dict__.get(_ORIGIN)
        return found

    def trust(self, model: Any = None, images: Any = None, **options: Any) -> tuple[Trust, ...]:
        """Measure what the maps are worth for these predictions: ``vitreous.trust(model, images, explanation)``.

        An explanation that ``vitreous.explain`` has returned knows its model and images, as long as the model exists;
        one that was loaded from a folder or unpickled does not, and both are given again.

        Args:
            model: The model that was explained, as ``vitreous.explain`` takes it.
            images: The images that were explained.
            **options: See ``vitreous.trust``.

        Returns:
            One ``Trust`` for every image; its ``sentence`` is a summary.

        Raises:
            InputError: Model and images are not known any more, or were changed after they were explained.

        Examples:
            >>> import vitreous
            >>> (trust,) = vitreous.explain(model, "demo.jpg", ["gae"]).trust()
            >>> trust.method
            'gae'
        """
        measured: tuple[Trust, ...] = find_view(self, "trust")(self, model, images, **options)
        return measured

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        image: Drawable | Iterable[Drawable] | None = None,
        mean: Channels | None = None,
        std: Channels | None = None,
        trust: bool = False,
    ) -> Path:
        """Write a self-contained HTML report with the predictions and maps of all images.

        Args:
            path: The file to write.
            image: The images to draw on, one per image, see ``with_images``; by default those in ``images``.
            mean: See ``with_images``.
            std: See ``with_images``.
            trust: Also measure what the maps are worth; see ``trust()``.

        Returns:
            The file.
        """
        shown = self._with_normalised(image, mean, std)
        written: Path = find_view(shown, "report")(shown, Path(path), self.trust() if trust else ())
        return written

    def with_images(
        self, images: Drawable | Iterable[Drawable], *, mean: Channels | None = None, std: Channels | None = None
    ) -> Explanation:
        """Give the same explanation with other images to draw on, in notebooks, folders, figures and reports.

        Args:
            images: One for each image, as the model saw it: a tensor (batch, 3, height, width), or a list of PIL
                images, paths, arrays (height, width, 3) and tensors (3, height, width). A tensor in [0, 1]
                is drawn as it is. Of volumes and clips a tensor (batch, channels, depth, height, width).
            mean: What was subtracted to normalise a tensor, one number or one for each channel.
            std: What it was divided by.
        """
        pictures = given_pictures(images, len(self), mean, std)
        return with_origin(replace(self, images=pictures.images, images_note=pictures.note), self.origin)

    def _drawn_on(
        self,
        index: int,
        image: Drawable | None,
        mean: Channels | None,
        std: Channels | None,
        photo: Photo | None,
    ) -> tuple[Explanation, int]:
        """Give an explanation that holds the image to draw on, and the index of that image in it."""
        if image is None or photo is not None:
            if image is not None:
                raise InputError("pass image=, the image as the model saw it, or photo=, the whole image, not both")
            return self._with_normalised(None, mean, std), index
        batch = getattr(image, "ndim", 0) == 2 + len(self.grid) and len(image) == len(self)  # type: ignore[arg-type]
        index, _ = self.position(index)
        chosen = image[index] if batch else image  # type: ignore[index]
        return self.select(index).with_images(chosen, mean=mean, std=std), 0

    def _with_normalised(
        self, images: Drawable | Iterable[Drawable] | None, mean: Channels | None, std: Channels | None
    ) -> Explanation:
        """Give an explanation with the images, if any; mean and std need a tensor to act on."""
        if images is not None:
            return self.with_images(images, mean=mean, std=std)
        if mean is not None or std is not None:
            raise InputError("mean and std undo the normalisation of a tensor: pass that as image=")
        return self

    def select(self, index: int) -> Explanation:
        """Give the explanation of one image alone, as a batch of one."""
        index, _ = self.position(index)
        one = slice(index, index + 1)
        target, targets = self._targets_of(one)
        alone = replace(
            self,
            scores={method: scores[one] for method, scores in self.scores.items()},
            target=target,
            targets=targets,
            target_values=None if self.target_values is None else self.target_values[one],
            logits=self.logits[one],
            images=None if self.images is None else self.images[one],
        )
        origin = self.origin
        return with_origin(alone, origin and replace(origin, pixels=origin.pixels[one]))

    def _targets_of(self, rows: slice) -> tuple[Tensor, tuple[Target, ...]]:
        """Give the target numbers of some images, and only those target objects that they are explained for."""
        target, classes = self.target[rows], self.logits.shape[1] if self.targets else 0
        used = sorted({number for number in target.flatten().tolist() if self._object(number) is not None})
        if len(used) == len(self.targets):
            return target, self.targets
        target = target.clone()
        for place, number in enumerate(used):
            target[self.target[rows] == number] = classes + place
        return target, tuple(self.targets[number - classes] for number in used)

    def slice(self, number: int | None = None, axis: int = 0, *, smooth: bool = False) -> Explanation:
        """Give the explanation of one slice of a volume, or of one frame of a clip, which is that of an image.

        Args:
            number: Which slice in voxels, or which frame, from 0; by default the one that has the highest score of the
                first method in the first image.
            axis: Across which axis slices lie: 0 for the first of ``grid``, depth or time.
            smooth: Interpolate scores between patches across slices; otherwise they are those of the slice's patch.

        Raises:
            InputError: It is no volume or clip, or has no such slice.

        Examples:
            >>> import torch
            >>> import vitreous
            >>> from vit_pytorch.vit_3d import ViT
            >>> small = {"dim": 16, "depth": 2, "heads": 2, "mlp_dim": 16, "channels": 1, "num_classes": 3}
            >>> model = ViT(image_size=16, image_patch_size=8, frames=4, frame_patch_size=2, **small)
            >>> explanation = vitreous.explain(model, torch.rand(1, 1, 4, 16, 16), "gae")
            >>> explanation.grid, explanation.maps("gae").shape
            ((2, 2, 2), torch.Size([1, 2, 2, 2]))
            >>> explanation.slice(3).grid
            (2, 2)
        """
        return sliced(self, number, axis, smooth=smooth)

    def without_images(self) -> Explanation:
        """Give the same explanation without its images, which take most of the memory."""
        return replace(self, images=None, images_note=None)

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        pictures: Mapping[str, Image.Image] | None = None,
    ) -> Path:
        """Write the arrays, the images and a manifest into a new folder.

        The folder appears complete or not at all.

        Args:
            directory: The folder to write.
            overwrite: Replace an explanation that was saved there before.
            pictures: Further images to store, by file name, such as a comparison.

        Returns:
            The folder.
        """
        return explanation_folder.write(self, Path(directory), overwrite=overwrite, pictures=pictures or {})

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Self:
        """Read an explanation that ``save`` wrote; every file is verified and nothing is unpickled."""
        return cls(**explanation_folder.read(Path(directory)))

    def _display(self, method: str, scores: Tensor, *, smooth: bool, size: tuple[int, ...]) -> Tensor:
        if min(size) < 1 or len(size) != len(self.image_size):
            raise ExplanationError(f"a heatmap cannot have the size {size}")
        if not scores.isfinite().all():
            raise ExplanationError(f"the scores of {method!r} contain NaN or infinity and cannot be shown")
        grid, signed = self.grid_of(method), self.signed[method]
        return display_maps(scores, grid, size, signed=signed, smooth=smooth, geometry=self.geometry)


def with_deferred_logits(explanation: Explanation, compute: Callable[[], Tensor]) -> Explanation:
    """Defer the logits of a new explanation: they are computed when they are first read."""
    explanation.__dict__[_DEFERRED] = compute
    del explanation.__dict__["logits"]
    return explanation


def with_origin(explanation: Explanation, origin: Origin | None) -> Explanation:
    """Let a new explanation know what it was made of."""
    if origin is not None:
        explanation.__dict__[_ORIGIN] = origin
    return explanation
