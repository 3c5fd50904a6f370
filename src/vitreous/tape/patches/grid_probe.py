"""Finds the patch grid by changing parts of a picture: its edges, its inside, and the stream before every block.

The pixels that a token is made of do not show in the shapes of tensors: 33 tokens of a picture of 32 x 64 pixels may be
patches of 8 x 8, of 4 x 16 or of 16 x 4 pixels. But the first row of pixels is in the first row of patches alone, and
the first column in the first column. A convolution shows how many rows and columns of patches it makes, but not where
they stand among the tokens, nor which part of the picture it read. The patches inside are checked by the receptive
fields of some of them, in the same run, and by the order in which blocks leave them.

A volume or a clip has a third axis, (depth, rows, columns), which is probed as the others are. Whether its channels
stand before it or behind it, (channels, depth, ..) or (frames, channels, ..), shows in how many tokens change with one
slice: with a channel all of them, with a frame those made of it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vitreous._utils.torch_state import at_least_float32
from vitreous.architecture import Architecture
from vitreous.errors import InputError, UnsupportedModelError
from vitreous.inputs.model_io import Inputs
from vitreous.inputs.patch_geometry import PatchGeometry, Size
from vitreous.tape.patches.receptive_fields import (
    PROBES,
    PROBES_BEHIND,
    check_block_order,
    check_changed_patches,
    first_block_input,
    noise_picture,
    receptive_fields,
    with_changed_patches,
)


@dataclass(frozen=True)
class Embedding:
    """A call that may have made the patches.

    Attributes:
        given: height and width of what it was given.
        grid: rows and columns of what it made.
        patch: height and width of the squares that it cut its input into, side by side; ``None`` where it did not.
    """

    given: Size
    grid: Size
    patch: Size | None

    @classmethod
    def without_patch(cls, output: Tensor, given: Tensor) -> Embedding:
        """A pooling, or a convolution of overlapping or padded squares."""
        return cls(tuple(given.shape[-2:]), tuple(output.shape[-2:]), None)

    @property
    def makes_patches(self) -> bool:
        """Whether it makes the picture coarser; one that does not only filters it."""
        return self.grid != self.given

    @property
    def patches(self) -> int:
        """How many patches it would have made."""
        return math.prod(self.grid)

    def enlarges(self, picture: Size) -> bool:
        """Whether what it was given is higher or wider than the picture."""
        return any(mine > theirs for mine, theirs in zip(self.given, picture, strict=True))

    def widest_edge(self, picture: Size) -> Size:
        """How many rows and columns at an edge of the picture change the outermost patches for certain.

        As many as a patch has. But a model that hands squares of fewer pixels than the picture has to this call may
        have scaled or cut it: scaling leaves out no more than one pixel of the outcome, and as much again for what
        does not divide it, where cutting leaves out a border.
        """
        patch = tuple(math.ceil(length / count) for length, count in zip(picture, self.grid, strict=True))
        if self.patch is None:
            return patch
        scaled = tuple(
            2 * math.ceil(length / mine) if mine < length else side
            for length, mine, side in zip(picture, self.given, patch, strict=True)
        )
        return tuple(map(min, patch, scaled))

    def check_border(self, name: str, picture: Size) -> None:
        """Refuse a picture whose far edges are in no patch, or so much padded that its grid does not tell the patches.

        Raises:
            InputError: the patches do not cover the picture, or most of the last ones is padding.
        """
        if self.patch is None or any(mine < theirs for mine, theirs in zip(self.given, picture, strict=True)):
            return
        covered = tuple(count * side for count, side in zip(self.grid, self.patch, strict=True))
        expected = tuple(math.ceil(length / count) for length, count in zip(picture, self.grid, strict=True))
        if self.given != picture and expected != self.patch and _less_than_a_patch(self.given, picture, self.patch):
            raise InputError(
                f"{name} pads {pixels_of(picture)} to {by(self.given)}, so that the last patches are mostly padding "
                "and no map fits them; crop or resize them first"
            )
        if self.given == picture and covered != picture:
            raise InputError(
                f"{name} sees only {by(covered)} of the {by(picture)} pixels of these images, in whole patches of "
                f"{by(self.patch)}, so that no map fits them; crop or resize them first"
            )


def embedding_of(  # the signature of conv2d and conv3d
    output: Tensor,
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Embedding:
    """The convolution as what may have made the patches."""
    del bias, groups
    kernel = tuple(weight.shape[2:])
    axes = len(kernel)
    unpadded = padding == "valid" or (not isinstance(padding, str) and not any(_each(padding, axes)))
    side_by_side = kernel == _each(stride, axes) and unpadded and set(_each(dilation, axes)) == {1}
    given, made = (tuple(each.shape[-axes:]) for each in (input, output))
    return Embedding(given, made, kernel if side_by_side else None)


def by(size: Size) -> str:
    """Lengths in words: 2 x 14 x 14."""
    return " x ".join(map(str, size))


def pixels_of(size: Size) -> str:
    """Inputs of a size, in words."""
    return f"images of {by(size)} pixels" if len(size) == 2 else f"volumes of {by(size)} voxels"


def _less_than_a_patch(given: Size, picture: Size, patch: Size) -> bool:
    """Whether a picture was padded, not enlarged."""
    return all(mine - theirs < side for mine, theirs, side in zip(given, picture, patch, strict=True))


def _each(value: Any, axes: int) -> tuple[int, ...]:
    """An argument of a convolution for each of its axes: one number stands for all."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * axes if len(numbers) == 1 else numbers


# Not 0, which callers use for noise of their own: a multiple of the input is the same to a norm over each patch.
_SEED = 2026
_NOISE = 10.0  # so large that the change of an edge is seen in half precision, too
_ROUNDING = 1e-3  # of what all pixels change of a token: one of its edges changes far more of it, rounding less
_SOME_TOKENS = 8  # so many are looked for in other places
_COLOURS = (1, 3)  # channels that most pictures have


class Placement(NamedTuple):
    """Where the patches of a model are.

    Attributes:
        grid: rows and columns of patches.
        geometry: where they are centred; ``None`` for equal cells.
        channel_axis: the axis of the input's channels.
    """

    grid: Size
    geometry: PatchGeometry | None
    channel_axis: int


# What is known of a model's patches: once for a model and a size of pictures, not with every picture.
_KNOWN: WeakKeyDictionary[nn.Module, dict[Hashable, Placement]] = WeakKeyDictionary()
_KNOWN_AXES: WeakKeyDictionary[nn.Module, dict[Hashable, int]] = WeakKeyDictionary()


@dataclass(frozen=True)
class _Probed:
    """What became of the probes before the first block.

    Attributes:
        edges: a picture as it is, another, and it with other edges, (picture, token, channel).
        noise: a fixed picture, several times, (picture, token, channel), with a graph from ``pictures``.
        pictures: these, (picture, channel, height, width).
    """

    edges: Tensor
    noise: Tensor
    pictures: Tensor


@dataclass(frozen=True)
class PatchGridProbe:
    """Runs a model up to its first block on a picture with changed edges."""

    architecture: Architecture
    model: nn.Module
    inputs: Inputs

    def grid(self, tokens: int) -> Placement:
        """Rows and columns of patches that no convolution made, and where they are centred.

        Costs the embedding of 14 pictures and a run of two, once for a model and a size of pictures.

        Raises:
            InputError: the far edges of the picture are in no patch.
            UnsupportedModelError: patches in rows, after all other tokens, would change in another way.
        """
        return self._known(None, tokens)

    def check(self, made: Embedding, tokens: int) -> Placement:
        """Where the patches of a convolution are centred; refuse them if they are not the last ``tokens``, in rows.

        Costs the embedding of 14 pictures and a run of two, once for a model and a size of pictures. Patches may
        overlap or see all of the picture, so that more than one row of them may change with an edge; but that one has
        to.

        Raises:
            InputError: an edge of the picture is in no patch, or an edge of the grid shows nothing of the picture.
            UnsupportedModelError: other tokens change than the patches at that edge, or those inside of the grid.
        """
        return self._known(made, tokens)

    def size(self, embeddings: Sequence[Embedding] = ()) -> Size:
        """Height and width of the picture; of a volume its depth before them, wherever its channels stand."""
        assert isinstance(self.inputs, Tensor)
        axis = self.channel_axis(embeddings)
        return tuple(self.inputs.shape[1:axis]) + tuple(self.inputs.shape[axis + 1 :])

    def channel_axis(self, embeddings: Sequence[Embedding] = ()) -> int:
        """The axis of the channels: 1, or 2 in a clip (batch, frames, channels, height, width).

        Costs the embedding of three clips, once for a model and a size of clips. Where one slice changes as many tokens
        along both axes, the convolution that read the clip decides, and then the number of channels that most clips
        have.
        """
        assert isinstance(self.inputs, Tensor)
        if self.inputs.dim() == 4:
            return 1
        known = _KNOWN_AXES.setdefault(self.model, {})
        shape = (self.inputs.shape[1:], self.inputs.dtype, str(self.inputs.device), self.architecture.operations)
        if shape not in known:
            known[shape] = self._find_channel_axis(embeddings)
        return known[shape]

    def _find_channel_axis(self, embeddings: Sequence[Embedding]) -> int:
        assert isinstance(self.inputs, Tensor)
        clips = self.inputs[:1].detach().repeat(3, 1, 1, 1, 1)
        noise = torch.randn(clips.shape[1:], generator=torch.Generator().manual_seed(_SEED)).to(clips) * _NOISE
        clips[1, 0] += noise[0]
        clips[2, :, 0] += noise[:, 0]
        streams = [first_block_input(self.architecture, self.model, clip[None]) for clip in clips]
        if all(stream is not None for stream in streams):
            first, *others = (at_least_float32(stream[0]) for stream in streams if stream is not None)
            change = torch.stack([(other - first).abs().amax(dim=-1) for other in others])
            changed = (change > _ROUNDING * change.amax(dim=1, keepdim=True)).sum(dim=1)
            if changed[0] != changed[1]:
                return 2 if changed[0] < changed[1] else 1
        _, second, third, *plane = self.inputs.shape
        given = {embedding.given for embedding in embeddings}
        if second != third and ((second, *plane) in given) != ((third, *plane) in given):
            return 2 if (second, *plane) in given else 1
        return 2 if third in _COLOURS and second not in _COLOURS else 1

    def _known(self, made: Embedding | None, tokens: int) -> Placement:
        assert isinstance(self.inputs, Tensor)
        known = _KNOWN.setdefault(self.model, {})
        shape = (self.inputs.shape[1:], self.inputs.dtype, str(self.inputs.device))
        question = (*shape, made, tokens, self.architecture.stage, self.architecture.operations)
        if question not in known:
            probed = self._probe((1,) * len(self._size) if made is None else made.widest_edge(self._size), tokens)
            if made is None:
                grid = self._grid(probed)
            else:
                grid = made.grid
                if probed is not None:
                    self._compare(probed.edges, made, tokens)
            known[question] = Placement(grid, self._geometry(probed, grid, tokens), self.channel_axis())
            check_block_order(self.architecture, self.model, self.inputs, math.prod(grid))
        return known[question]

    def _geometry(self, probed: _Probed | None, grid: Size, tokens: int) -> PatchGeometry | None:
        if probed is None:
            return None
        mixed = self._behind_blocks or self.architecture.stage > 0
        axis = self.channel_axis()
        fields = receptive_fields(probed.noise, probed.pictures, grid, tokens - math.prod(grid), axis)
        if fields is None:
            pictures = with_changed_patches(probed.pictures[0].detach(), grid, len(probed.pictures), axis)
            streams = first_block_input(self.architecture, self.model, pictures)
            if streams is not None and streams.shape[:2] == (len(pictures), tokens):
                check_changed_patches(self.architecture.name, at_least_float32(streams), grid, mixed=mixed)
            return None
        geometry = fields.geometry()
        fields.check(self.architecture.name, geometry, mixed=mixed)
        if geometry is not None and not geometry.shows_all(grid):
            raise InputError(
                f"some of the {by(grid)} patches of {self.architecture.name} lie outside of {pixels_of(self._size)}, "
                "so that no map fits them; crop or resize them first"
            )
        return geometry

    def _grid(self, probed: _Probed | None) -> Size:
        name = self.architecture.name
        if probed is None:
            raise _not_shown(name, self.inputs)
        streams = probed.edges
        self._check_order(streams)
        whole, *edges = _changed(streams)
        first, last = edges[::2], edges[1::2]  # of each axis
        if bool(whole.any()) and not all(bool(edge.any()) for edge in last):
            raise self._in_no_patch("the last rows or columns")
        patches = whole & ~torch.stack(edges).all(dim=0)  # some models have a token that depends on all pixels
        count = int(patches.sum())
        at_edge = [int((patches & edge).sum()) for edge in first]
        if count == 0 or 0 in at_edge:
            raise _not_shown(name, self.inputs)
        grid = tuple(count // each for each in at_edge)
        prefix = len(patches) - count
        if math.prod(grid) != count or not torch.equal(
            patches, torch.arange(len(patches)).to(patches.device) >= prefix
        ):
            raise _not_shown(name, self.inputs)
        for axis, cells in enumerate(grid):
            number = torch.arange(cells, device=patches.device)
            line = number.view([cells if other == axis else 1 for other in range(len(grid))]).expand(grid).flatten()
            for edge, place in ((first[axis], 0), (last[axis], cells - 1)):
                if not torch.equal(edge[prefix:], line == place):
                    raise _not_shown(name, self.inputs)
        return grid

    def _compare(self, streams: Tensor, made: Embedding, tokens: int) -> None:
        self._check_order(streams)
        changed = _changed(streams)
        if not bool(changed[0].any()):
            return
        if not bool(changed.any(dim=1).all()):
            raise self._in_no_patch("rows or columns at an edge")
        whole, *edges = changed[:, -made.patches :].reshape(-1, *made.grid)
        every = (slice(None),) * len(made.grid)
        ends = [(axis, end) for axis in range(len(made.grid)) for end in (slice(1), slice(-1, None))]
        places = [(*every[:axis], end, *every[axis + 1 :]) for axis, end in ends]
        # Patches that something else was put in the place of show nothing of a picture, wherever they are.
        expected = [whole[place] for place in places]
        if made.enlarges(self._size) and not all(bool(shown.any()) for shown in expected):
            raise InputError(
                f"{self.architecture.name} enlarges {pixels_of(self._size)} to {by(made.given)}, and an edge of its "
                f"{by(made.grid)} patches shows nothing of them, so that no map fits them; crop or resize them first"
            )
        in_place = (
            bool(shown.any()) and not bool((shown & ~edge[place]).any())
            for edge, place, shown in zip(edges, places, expected, strict=True)
        )
        if _stand_further_ahead(changed[0], made.patches) or not all(in_place):
            raise UnsupportedModelError(
                f"a convolution of {self.architecture.name} makes {by(made.grid)} patches, but the last "
                f"{made.patches} of {tokens} tokens do not change with the edges of a picture as these would, row by "
                "row: other tokens stand behind them, they stand column by column, or they are resized before the "
                "first block, so no map can be laid out"
            )
        prefix = changed[:, : tokens - made.patches]
        if bool((prefix[0] & ~prefix[1:].all(dim=0)).any()):
            raise UnsupportedModelError(
                f"a convolution of {self.architecture.name} makes {by(made.grid)} patches, and some of the tokens "
                "that stand before them show a part of the picture, too (coarser patches, perhaps), so that no one map "
                "has all of them"
            )

    @property
    def _size(self) -> Size:
        return self.size()

    @property
    def _behind_blocks(self) -> bool:
        """Whether more of the model runs before the stage that is read than after, so that probes are expensive."""
        return 2 * self.architecture.blocks[0].input.step >= len(self.architecture.operations)

    def _probe(self, width: Size, tokens: int) -> _Probed | None:
        """Run the probes, all of them at once if the model takes so many pictures, or else two or one at a time.

        Args:
            width: how many rows and columns of an edge are changed.
            tokens: how many tokens there are.

        Returns:
            ``None`` where there is no stream to compare.
        """
        assert isinstance(self.inputs, Tensor)
        count = PROBES_BEHIND if self._behind_blocks else PROBES
        edges = _with_other_edges(self.inputs[:1].detach(), width, self.channel_axis())
        noise = noise_picture(self.inputs.shape[1:]).to(self.inputs)
        noise = noise.repeat(count, *[1] * noise.dim()).requires_grad_()
        for at_once in (len(edges) + count, 2, 1):
            streams = None
            with suppress(Exception):  # a model may take one picture at a time only
                streams = self._streams(edges, noise, at_once)
            if streams is not None and streams.shape[:2] == (len(edges) + count, tokens):
                seen = at_least_float32(streams[: len(edges)].detach())
                return _Probed(seen, streams[len(edges) :], noise) if bool(seen.isfinite().all()) else None
        return None

    def _streams(self, edges: Tensor, noise: Tensor, at_once: int) -> Tensor | None:
        streams = []
        with torch.enable_grad():
            for part in torch.split(torch.cat((edges, noise)), at_once):
                stream = first_block_input(self.architecture, self.model, part.clone(), graph=True)
                if stream is None:
                    return None
                streams.append(stream)
            return torch.cat(streams)

    def _check_order(self, streams: Tensor) -> None:
        """Refuse tokens that were found in other places when the picture was given a second time with another edge.

        In every place something has changed then, at every edge, so that any grid would do.
        """
        first, rounding = streams[0], _ROUNDING * (streams[1] - streams[0]).abs().amax()
        some = torch.arange(0, len(first), max(1, len(first) // _SOME_TOKENS), device=first.device)
        for edge in streams[2:]:
            distance = (edge[some, None] - first).abs().amax(dim=-1)
            moved = distance.gather(1, some[:, None])[:, 0] > rounding
            if bool((moved & (distance.amin(dim=1) < rounding / 100)).any()):
                raise UnsupportedModelError(
                    f"{self.architecture.name} lays out the patches of a picture in another order each time (masked "
                    "autoencoders shuffle them, also where they mask none), so no map can be laid out; keep them in "
                    "their order"
                )

    def _in_no_patch(self, what: str) -> InputError:
        return InputError(
            f"{what} of {pixels_of(self._size)} are in no patch of {self.architecture.name}, so that no map fits them; "
            "crop or resize them first"
        )


def _changed(streams: Tensor) -> Tensor:
    """Which tokens change with all pixels and with those at each edge, (change, token)."""
    change = (streams[1:] - streams[:1]).abs().amax(dim=-1)
    return change > torch.maximum(_ROUNDING * change.amax(dim=0), _ROUNDING**2 * change.amax())


def _stand_further_ahead(shown: Tensor, patches: int) -> bool:
    """Whether so many tokens in a row show something of a picture, and those after them nothing."""
    end = int(torch.where(shown)[0].max()) + 1
    return patches <= end < len(shown) and bool(shown[end - patches : end].all())


def _with_other_edges(image: Tensor, width: Size, channel_axis: int) -> Tensor:
    """A picture as it is, all of it changed, and so many of its first and last rows and columns (slices, frames)."""
    noise = torch.randn(image.shape[1:], generator=torch.Generator().manual_seed(_SEED)).to(image) * _NOISE
    axes = [axis for axis in range(noise.dim()) if axis != channel_axis - 1]
    images = image.repeat(2 + 2 * len(axes), *[1] * noise.dim())
    images[1] += noise
    ends = ((axis, end) for axis, size in zip(axes, width, strict=True) for end in (slice(size), slice(-size, None)))
    for number, (axis, end) in enumerate(ends, start=2):
        place = (*[slice(None)] * axis, end)
        images[number][place] += noise[place]
    return images


def _not_shown(name: str, inputs: Inputs) -> UnsupportedModelError:
    if isinstance(inputs, Tensor) and inputs.dim() == 5:
        return UnsupportedModelError(
            f"no convolution of {name} makes patches of a whole volume or clip, and which tokens change with the "
            "first and last slices, rows and columns does not show a grid of depth, rows and columns behind all other "
            "tokens, so no map can be laid out; models that attend across frames and within frames in turn "
            "(TimeSformer) order their tokens otherwise"
        )
    return UnsupportedModelError(
        f"{name} makes its patches without a convolution, and which of its tokens change with the edges of a picture "
        "does not show rows of patches behind all other tokens, so no map can be laid out; embed patches by a "
        "convolution whose kernel and stride are their size (tokens that are sampled or merged on the way have no grid)"
    )
