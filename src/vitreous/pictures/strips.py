"""Maps of one image that differ in depth, head or start layer, and what a block does to its tokens, as arrays.

``strips_figure`` draws the first. The second is TokenTM's figures 1 and 2: attention, change of length and
direction. ``slices_figure`` draws slices of volumes and frames of clips.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from vitreous._utils.torch_state import preserves_torch_state
from vitreous.api.explain import explain, network_of, stage_of
from vitreous.architecture import find_architecture
from vitreous.errors import InputError, MethodError
from vitreous.explanation.explanation import Explanation
from vitreous.explanation.views import FigureOptions, Look, look_with, register_figure
from vitreous.inputs.targets import AnyTarget
from vitreous.methods.gradtoken import QueryGradientKey
from vitreous.methods.spelling import Plus, Rollout, parse, plus_from_every_layer
from vitreous.methods.tokentm import TokenTransformation
from vitreous.models import LoadedModel
from vitreous.models.pixels import Images, Model, Photo, find_model, find_pixels
from vitreous.pictures.base_image import BaseImage
from vitreous.pictures.canvas import SEPARATOR, Canvas, class_caption
from vitreous.pictures.curves import recorded
from vitreous.pictures.figures import NARROW, NARROW_STRIP_COLUMNS, STRIP_TILE
from vitreous.pictures.style import page_style
from vitreous.pictures.tiles import MapPainter, Row, Tile, prepare, tiled

_SLICES = 8  # of a volume, or frames of a clip, in a figure


@dataclass(frozen=True)
class Strip:
    """Maps of one image in a row.

    Attributes:
        method: The spelling that the maps are variations of.
        explanation: The explanation of the image; it includes the scores of the maps that are spellings.
        captions: One caption per map.
        maps: Raw scores (maps, patches).
        signed: Whether the sign of the scores carries meaning.
        shared: Whether the maps are parts of one sum and so share one scale.

    Examples:
        >>> from vitreous.pictures import depth_strip
        >>> strip = depth_strip(model, "demo.jpg", "rollout")
        >>> strip.maps.shape == (len(strip.captions), strip.explanation.grid[0] * strip.explanation.grid[1])
        True
    """

    method: str
    explanation: Explanation
    captions: tuple[str, ...]
    maps: Tensor
    signed: bool
    shared: bool = False

    @property
    def span(self) -> tuple[float, float] | None:
        """The smallest and the largest finite score when the maps share a scale."""
        drawn = self.maps[self.maps.isfinite().all(dim=1)]
        return (float(drawn.min()), float(drawn.max())) if self.shared and len(drawn) else None


def depth_strip(model: Model, image: Images, method: str, target: AnyTarget = None) -> Strip:
    """Compute the maps of a method for every number of blocks that it can aggregate.

    Figure 5 of [wu2024token][] and figure 11 of [cheng2025gradtoken][].

    Args:
        model: The model, in any form that ``explain`` takes.
        image: The image.
        method: A rollout, or gradtoken with propagation.
        target: The class to explain; the predicted one by default.

    Examples:
        >>> from vitreous.pictures import depth_strip
        >>> depth_strip(model, "demo.jpg", "tokentm").captions[:2]
        ('1 block', '2 blocks')
    """
    loaded = find_model(model, image)
    spellings = depth_spellings(method, depth_of(loaded, image))
    captions = {f"{count} block{'s' if count != 1 else ''}": spelling for count, spelling in spellings.items()}
    return strip_of_spellings(loaded, image, method, captions, target)


def depth_spellings(method: str, depth: int) -> dict[int, str]:
    """Return the spellings of a method by how many blocks they aggregate, in a model of ``depth`` blocks.

    A rollout multiplies its lowest blocks, 1 to all of them; gradtoken propagates its map through the blocks below the
    last one, 0 to all of them.
    """
    recipe = parse(method)
    if isinstance(recipe.aggregation, Rollout):
        most = depth - (recipe.aggregation.start % depth)
        return {count: with_options(method, depth=count) for count in range(1, most + 1)}
    if isinstance(recipe.readout, QueryGradientKey) and recipe.readout.propagation != "none":
        return {count: with_options(method, depth=count) for count in range(depth)}
    if isinstance(recipe.aggregation, Plus):
        raise MethodError(f"{method!r} adds up blocks from a start layer; the layers figure shows that")
    raise MethodError(f"{method!r} aggregates no blocks, so there is no depth to vary; tokentm and gradtoken do")


def start_layer_strip(model: Model, image: Images, method: str, target: AnyTarget = None) -> Strip:
    """Compute the maps of a method summed over the blocks from every start layer; the one of SkipPLUS is marked.

    Figure 2 of [mehri2024skipplus][].

    Args:
        model: The model, in any form that ``explain`` takes.
        image: The image.
        method: A method with layers.
        target: The class to explain; the predicted one by default.

    Examples:
        >>> from vitreous.pictures import start_layer_strip
        >>> strip = start_layer_strip(model, "demo.jpg", "ixg")
        >>> strip.captions[0], len(strip.maps) == len(strip.captions)
        ('from block 0', True)
    """
    loaded = find_model(model, image)
    depth = depth_of(loaded, image)
    skipplus = None if isinstance(parse(method).aggregation, Rollout) else math.ceil(depth / 2)
    captions = {
        f"from block {start}{' (SkipPLUS)' if start == skipplus else ''}": spelling
        for start, spelling in start_layer_spellings(method, depth).items()
    }
    return strip_of_spellings(loaded, image, method, captions, target)


def start_layer_spellings(method: str, depth: int) -> dict[int, str]:
    """Return the spellings of a method by their first block, in a model of ``depth`` blocks.

    A rollout stays one; every other method is summed over blocks (PLUS).
    """
    if isinstance(parse(method).aggregation, Rollout):
        return {start: with_options(method, drop=("depth",), start=start) for start in range(depth)}
    return dict(enumerate(plus_from_every_layer(method, depth)))


@preserves_torch_state
def heads_strip(model: Model, image: Images, method: str = "gradtoken", target: AnyTarget = None) -> Strip:
    """Compute gradtoken's map M_h of every head, propagated as its spelling says, signed and on one scale.

    Figure 10 of [cheng2025gradtoken][].

    Args:
        model: The model, in any form that ``explain`` takes.
        image: The image.
        method: A spelling of gradtoken.
        target: The class to explain; the predicted one by default.

    Examples:
        >>> from vitreous.pictures import heads_strip
        >>> strip = heads_strip(model, "demo.jpg")
        >>> strip.captions[0].startswith("head 0: "), strip.signed, strip.shared
        (True, True, True)
    """
    recipe = parse(method)
    readout = recipe.readout
    if not isinstance(readout, QueryGradientKey):
        raise MethodError(f"{method!r} has no map for each head; gradtoken has")
    loaded = find_model(model, image)
    explanation = explain(loaded, image, method, target)  # refuses, with reasons, what cannot be explained
    with recorded(loaded, image, recipe, target) as view:
        layers = recipe.aggregation.layers(view.depth)
        if len(layers) > 1:
            raise MethodError(f"{method!r} adds up several blocks, and their heads have nothing to do with each other")
        maps = readout.propagate(view, readout.maps(view, layers[0]), layers[0])[0].T.clone()
    # Propagated maps may be nearly flat and far from zero; then the numbers tell more than the colours.
    captions = tuple(f"head {n}: {one.min():.2g} to {one.max():.2g}" for n, one in enumerate(maps))
    return Strip(method, explanation, captions, maps.cpu(), signed=True, shared=True)


def strip_of_spellings(
    model: Model,
    image: Images,
    method: str,
    spellings: Mapping[str, str],
    target: AnyTarget = None,
) -> Strip:
    """Explain one image by several spellings, given by their captions.

    All of them share one forward pass, and one backward pass per rule and objective.
    """
    explanation = explain(model, image, list(spellings.values()), target)
    maps = torch.stack([explanation.scores_of(spelling).cpu() for spelling in explanation.methods])
    signed = next(iter(explanation.signed.values()))
    return Strip(method, explanation, tuple(spellings), maps, signed)


def with_options(spelling: str, *, drop: tuple[str, ...] = (), **options: int) -> str:
    """Set some options of a spelling and drop others."""
    path, _, tail = spelling.strip().partition(":")
    kept = dict(item.split("=", 1) for item in tail.split(",") if item)
    kept = {name.strip(): value.strip() for name, value in kept.items() if name.strip() not in drop}
    kept |= {name: str(value) for name, value in options.items()}
    return path.strip() + (":" + ",".join(f"{name}={value}" for name, value in kept.items()) if kept else "")


def depth_of(model: nn.Module | LoadedModel, images: Images | None = None) -> int:
    """Count the blocks of a model; ``images`` are needed for a plain module, whose input size is not known."""
    network = network_of(model)
    if images is None:
        assert isinstance(model, LoadedModel)
        return find_architecture(network, model.example_input(), stage_of(model)).depth
    return find_architecture(network, find_pixels(model, network, images)[0], stage_of(model)).depth


@dataclass(frozen=True)
class Transformation:
    """What the attention of one block does to the patches, (patches,) each, averaged over heads.

    Attributes:
        explanation: TokenTM's explanation of the image.
        block: Index of the block.
        attention: A, from the class token to each patch; from the pooled tokens in models without a class token.
        length: L (eq. 10), the norm of the transformed patch token relative to that of the patch token.
        direction: NECC (eq. 12) times the number of tokens: above 1 where both point in a similar direction.
        combined: A x L x NECC of every head, then the mean, in the unit of ``attention``.

    Examples:
        >>> from vitreous.pictures import token_transformation
        >>> found = token_transformation(model, "demo.jpg")
        >>> found.block  # the last one
        5
    """

    explanation: Explanation
    block: int
    attention: Tensor
    length: Tensor
    direction: Tensor
    combined: Tensor


@preserves_torch_state
def token_transformation(model: Model, image: Images, block: int = -1, target: AnyTarget = None) -> Transformation:
    """Measure what one block does to its tokens, as TokenTM does ([wu2024token][], eqs. 10 and 12).

    Args:
        model: The model, in any form that ``explain`` takes.
        image: The image.
        block: Index of the block; negative numbers count from the top.
        target: The class to explain; the predicted one by default.

    Examples:
        >>> from vitreous.pictures import token_transformation
        >>> found = token_transformation(model, "demo.jpg", block=0)
        >>> found.block, found.attention.shape == found.combined.shape
        (0, True)
    """
    spelling = "tokentm:necc=rescaled"
    loaded = find_model(model, image)
    explanation = explain(loaded, image, spelling, target)
    recipe = parse(spelling)
    readout = cast("TokenTransformation", recipe.readout)
    ratio_alone = TokenTransformation("probability", "af_l", "paper")
    with recorded(loaded, image, recipe, target) as view:
        if not -view.depth <= block < view.depth:
            raise MethodError(f"block {block} does not exist: the model has {view.depth} blocks, 0 to {view.depth - 1}")
        layer = block % view.depth
        attention = view.attention(layer).rows(view.layout.read).mean(dim=2)[0]  # (head, tokens)
        of_length, of_both = (one.attention_weight(view, layer) for one in (ratio_alone, readout))
        assert of_length is not None
        assert of_both is not None
        length, weight = (one(view.layout.read).mean(dim=2)[0] for one in (of_length, of_both))  # (head, tokens)
        direction = torch.where(length > 0, weight / length, 0)
        parts = (attention, length, direction, attention * weight)
        patches = [part.mean(dim=0)[view.layout.prefix :].clone().cpu() for part in parts]
    return Transformation(explanation, layer, *patches)


def slices_figure(
    explanation: Explanation,
    index: int = 0,
    *,
    methods: Sequence[str] | None = None,
    photo: Photo | None = None,
    look: Look | None = None,
    word: str = "slice",
    **options: Unpack[FigureOptions],
) -> Canvas:
    """Draw slices of a volume or frames of a clip in a row, and below them the maps of every method.

    Eight of them, four in a column of print, evenly spread, or all where there are fewer. The maps of a row share
    one colour scale, so that slices can be compared. ``explanation.figure("slices")`` and
    ``explanation.figure("frames")`` call it.

    Args:
        explanation: The explanation of volumes or clips.
        index: Which of the batch.
        methods: The methods to show, in this order; all by default.
        photo: Not for volumes and clips.
        look: How it is drawn; ``columns`` is how many slices are shown.
        word: What a slice is called: ``slice`` or ``frame``.
        **options: Fields of ``Look`` to change.

    Raises:
        InputError: It is the explanation of images, or holds no images.

    Examples:
        >>> import torch
        >>> import vitreous
        >>> from vit_pytorch.vit_3d import ViT
        >>> from vitreous.pictures import slices_figure
        >>> small = {"dim": 16, "depth": 2, "heads": 2, "mlp_dim": 16, "channels": 1, "num_classes": 3}
        >>> volumes = ViT(image_size=16, image_patch_size=8, frames=4, frame_patch_size=2, **small)
        >>> explanation = vitreous.explain(volumes, torch.rand(1, 1, 4, 16, 16), "gae")
        >>> slices_figure(explanation, width="3.25in").save("slices.pdf").name
        'slices.pdf'
    """
    look = look_with(look, options)
    style = page_style(look)
    if photo is not None:
        raise InputError("photo= is the whole photo of an image: leave it out for a volume or a clip")
    if len(explanation.grid) != 3:
        raise InputError(f"an explanation of images has no {word}s; one of volumes or clips has")
    one, shown = explanation.select(index), tuple(methods or explanation.methods)
    depth = one.image_size[0]
    narrow = style.inner is not None and style.inner < NARROW
    count = min(depth, look.columns or (NARROW_STRIP_COLUMNS if narrow else _SLICES))
    numbers = [(2 * place + 1) * depth // (2 * count) for place in range(count)]
    slices = [one.slice(number, smooth=look.smooth) for number in numbers]
    tile = style.tile(STRIP_TILE, count)
    bases = [prepare(BaseImage.of(each), look, style, tile) for each in slices]
    rows, notes = [Row([Tile(base.outlined(base.photo)) for base in bases], label="input")], []
    for target in range(one.classes_per_image):
        for method, label in zip(shown, look.labelled(shown), strict=True):
            signed = one.signed[method]
            maps = [each.scores_of(method, 0, target) for each in slices]
            # One scale for the whole volume, also where its highest score is in no slice that is drawn.
            painter = MapPainter(
                look, style, tile, [(one.scores_of(method, 0, target), signed)], shared=True, bars=True
            )
            tiles = [
                painter.map_tile(scores, each.grid_of(method), base, signed=signed)
                for scores, each, base in zip(maps, slices, bases, strict=True)
            ]
            if painter.shared:  # one colour bar for the row
                tiles = [tiles[0], *(replace(each, bar=None) for each in tiles[1:])]
            rows.append(Row(tiles, label=SEPARATOR.join(filter(None, (label, class_caption(one, 0, target))))))
            notes.append(painter.note())
    scale = "The maps of a row share one scale." if style.notes and look.shared_scale is not False else ""
    note = " ".join(dict.fromkeys(filter(None, (scale, *notes, bases[0].note))))
    headings = [f"{word} {number}" for number in numbers]
    return tiled(rows, tile=tile, headings=headings, note=note, style=style)


@register_figure(Explanation, "slices")
def _slices(explanation: Explanation, index: int = 0, **options: Any) -> Canvas:
    return slices_figure(explanation, index, **options)


@register_figure(Explanation, "frames")
def _frames(explanation: Explanation, index: int = 0, **options: Any) -> Canvas:
    return slices_figure(explanation, index, word="frame", **options)
