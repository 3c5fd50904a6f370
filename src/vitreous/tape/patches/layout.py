"""How the tokens of one run are laid out: patch grid, prefix tokens, and which tokens the head reads.

Seen in the run itself rather than looked up in attributes, so it holds for any picture size and any model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitreous._utils.torch_state import in_float64
from vitreous.errors import UnsupportedModelError
from vitreous.inputs.model_io import Inputs, Texts, texts_of
from vitreous.inputs.patch_geometry import PatchGeometry

if TYPE_CHECKING:
    from vitreous.tape.patches.grid_probe import Embedding, PatchGridProbe
    from vitreous.tape.recording.recorder import Recorder

_NOTHING = 1e-6  # a token whose head gradient is below this part of the largest is not read


@dataclass(frozen=True)
class Layout:
    """The token layout of one run.

    Attributes:
        grid: (rows, columns) of patches, (depth, rows, columns) in a volume or a clip; the tokens of a text after its
            prefix are one row of them.
        prefix: how many tokens (class, distillation, registers) come before the patches.
        read: the tokens that the head reads, each with equal weight: the class token, or all pooled tokens.
        alike: whether the head reads these tokens of every image, padding of texts aside; a maximum over tokens reads
            others in each.
        pooling_queries: where attention after the last block pools the tokens, those of its queries that the head
            reads; ``None`` elsewhere.
        geometry: where in the picture patches are centred; ``None`` where they are equal cells of it.
        channel_axis: the axis of the input's channels: 1, or 2 in a clip (batch, frames, channels, height, width).
    """

    grid: tuple[int, ...]
    prefix: int
    read: Tensor
    alike: bool = True
    pooling_queries: Tensor | None = None
    geometry: PatchGeometry | None = None
    channel_axis: int = 1

    @property
    def pooled_by_attention(self) -> bool:
        """Whether a learned query attends to the tokens after the last block."""
        return self.pooling_queries is not None

    @property
    def reads_prefix_only(self) -> bool:
        """Whether the head reads no patch, so that after the last attention only prefix tokens have a gradient."""
        return not self.pooled_by_attention and bool((self.read < self.prefix).all())

    @property
    def patches(self) -> int:
        """How many patches the picture has."""
        return math.prod(self.grid)

    @property
    def tokens(self) -> int:
        """How many tokens there are in all."""
        return self.prefix + self.patches

    def size_of(self, images: Tensor) -> tuple[int, ...]:
        """Height and width of images in pixels, behind the depth of volumes or the frames of clips."""
        return tuple(length for axis, length in enumerate(images.shape) if axis not in (0, self.channel_axis))

    def cut(self, tokens: int) -> Layout:
        """The layout of the first ``tokens`` tokens of a text, without the padding after them."""
        return replace(self, grid=(1, tokens - self.prefix), read=self.read[self.read < tokens])


def find_layout(
    recorder: Recorder,
    head_gradient: Tensor,
    pooling_gradient: Tensor | None,
    inputs: Inputs,
    grid_probe: PatchGridProbe,
    *,
    any_token: bool = False,
) -> Layout:
    """Work out the layout from what was recorded; ``grid_probe`` runs the patch embedding again, if it has to.

    Where ``any_token`` may be read by itself (a pixel's, say), none of them has to be a class token.
    """
    tokens = head_gradient.shape[1]
    kept = recorder.plan.intervention.kept
    if kept is not None:  # in no grid any more
        row = (1, kept.shape[1])
        left = _with_readers(recorder, head_gradient, pooling_gradient, inputs, row, any_token=any_token)
        return left if isinstance(inputs, Texts) else replace(left, channel_axis=grid_probe.channel_axis())
    grid_of_stage = recorder.architecture.stages[recorder.architecture.stage].places
    if grid_of_stage is not None and not isinstance(inputs, Texts):
        places = grid_of_stage.grid
        found = _with_readers(recorder, head_gradient, pooling_gradient, inputs, places, any_token=any_token)
        return replace(found, channel_axis=grid_probe.channel_axis(recorder.embeddings))
    if isinstance(inputs, Texts):
        row = (1, tokens - inputs.prefix)
        return _with_readers(recorder, head_gradient, pooling_gradient, inputs, row, any_token=any_token)
    made = _made_patches(recorder, tokens, grid_probe)
    if made is None:
        placement = grid_probe.grid(tokens)
    grid = placement.grid if made is None else made.grid
    layout = _with_readers(recorder, head_gradient, pooling_gradient, inputs, grid, any_token=any_token)
    if made is not None:
        placement = grid_probe.check(made, tokens)
    return replace(layout, geometry=placement.geometry, channel_axis=placement.channel_axis)


def layout_of_target(
    layout: Layout, recorder: Recorder, head_gradient: Tensor, pooling_gradient: Tensor | None, inputs: Inputs
) -> Layout:
    """The same layout with the tokens that the head reads for one target, given where its gradient lands."""
    found = _with_readers(recorder, head_gradient, pooling_gradient, inputs, layout.grid, any_token=True)
    return replace(layout, read=found.read, alike=found.alike, pooling_queries=found.pooling_queries)


def _with_readers(
    recorder: Recorder,
    head_gradient: Tensor,
    pooling_gradient: Tensor | None,
    inputs: Inputs,
    grid: tuple[int, ...],
    *,
    any_token: bool,
) -> Layout:
    """The layout of a known grid: which tokens come before it, and what the head reads."""
    tokens = head_gradient.shape[1]
    prefix = tokens - math.prod(grid)
    real = _real_tokens(inputs, head_gradient)
    depth = recorder.architecture.depth
    stream = recorder.stream_of(depth, recorder.tokens[depth].detach())
    read_of_each = _tokens_read(head_gradient, stream, prefix, real)
    if not bool(read_of_each.any(dim=1).all()):
        raise UnsupportedModelError(
            f"which tokens the head of {recorder.architecture.name} reads does not show: the gradient of its output is "
            "NaN or infinite"
        )
    read, alike = _of_all(read_of_each, real)
    if pooling_gradient is None:
        if not (any_token or (isinstance(inputs, Texts) and inputs.end)):
            _check_order(recorder.architecture.name, read, prefix, tokens)
        return Layout(grid, prefix, read, alike)
    pooled = recorder.attention.records[recorder.architecture.depth].key.shape[2]
    if pooled not in (tokens, tokens - prefix):
        recorder.attention.other.setdefault(
            recorder.architecture.depth,
            f"attention behind its last block pools {pooled} tokens where there are {tokens}, {prefix} of them before "
            "the patches: it is not known which ones they are",
        )
        return Layout(grid, prefix, read, alike)
    queries_of_each = _queries_read(pooling_gradient)
    queries, queries_alike = _of_all(queries_of_each, torch.ones_like(queries_of_each))
    return Layout(grid, prefix, read, alike and queries_alike, queries)


def _made_patches(recorder: Recorder, tokens: int, grid_probe: PatchGridProbe) -> Embedding | None:
    """The patch embedding, if it was a convolution over all axes of the picture.

    A model may look at the picture in other ways besides, so of several convolutions that one counts whose patches are
    all but a few of the tokens.
    """
    size = grid_probe.size(recorder.embeddings)
    whole = [embedding for embedding in recorder.embeddings if len(embedding.grid) == len(size)]
    embeddings = [embedding for embedding in whole if embedding.makes_patches]
    fitting = [embedding for embedding in embeddings if embedding.patches <= tokens]
    if fitting:
        chosen = max(fitting, key=lambda embedding: embedding.patches)
        chosen.check_border(recorder.architecture.name, size)
        return chosen
    if embeddings:
        cells = " x ".join(map(str, embeddings[-1].grid))
        raise UnsupportedModelError(
            f"{recorder.architecture.name} makes {cells} patches of a picture, but its blocks have {tokens} tokens: "
            "patches are dropped or joined in front of them, so no map can be laid out"
        )
    return None


def _real_tokens(inputs: Inputs, head_gradient: Tensor) -> Tensor:
    """Which tokens are no padding, (batch, tokens)."""
    places = torch.arange(head_gradient.shape[1], device=head_gradient.device).expand(head_gradient.shape[:2])
    texts = texts_of(inputs, len(head_gradient))
    if texts is None:
        return torch.ones_like(places, dtype=torch.bool)
    return places < texts.lengths[:, None].to(places.device)


def _of_all(read_of_each: Tensor, real: Tensor) -> tuple[Tensor, bool]:
    """The tokens that are read of any image, and whether each image's are these; both (batch, tokens)."""
    read = read_of_each.any(dim=0)
    (indices,) = torch.where(read)
    return indices, bool(((read_of_each == read) | ~real).all())


def _tokens_read(head_gradient: Tensor, stream: Tensor, prefix: int, real: Tensor) -> Tensor:
    """The tokens of each image in which the head's gradient lands, (batch, tokens).

    A head that reads the class token and, besides, the average of the patches (DINOv2's linear classifier) counts as
    reading the class token: each single patch weighs far less there. An average over all tokens weighs them alike.
    Their gradients are alike then where nothing stands before the average; after a norm they are, times how long
    each token of the ``stream`` is, which the norm divides by. A class token has to weigh more by every measure.
    """
    size = in_float64(head_gradient).norm(dim=-1)
    real = real.to(size.device)
    read: Tensor = size > _NOTHING * size.amax(dim=1, keepdim=True)
    if prefix and bool(read[:, prefix:].any()):  # most heads read the class token and nothing else
        class_token = read[:, :prefix].any(dim=1)
        patches = real[:, prefix:].sum(dim=1).clamp_(min=1)
        wide = in_float64(stream)
        for length in (1, wide.std(dim=-1), wide.norm(dim=-1)):
            weight = size * length
            class_token &= weight[:, :prefix].amax(dim=1) > 2 * weight[:, prefix:].sum(dim=1) / patches
        read[class_token, prefix:] = False
    unknown = ~size.any(dim=1)  # a head of zeros, as torchvision initialises it
    read[unknown] = real[unknown]
    if prefix:
        read[unknown, 1:] = False
    return read.to(head_gradient.device)


def _check_order(name: str, read: Tensor, prefix: int, tokens: int) -> None:
    """Refuse a head that reads one or a few of the later tokens: its class token comes after the patches."""
    if prefix and bool((read >= prefix).all()) and len(read) <= prefix and len(read) < tokens - prefix:
        raise UnsupportedModelError(
            f"the head of {name} reads token {int(read[0])} of {tokens}, counted from 0: a class token that stands "
            "behind the patches, or a decoder that reads the last word, is not supported, so no map can be laid out"
        )


def _queries_read(pooling_gradient: Tensor) -> Tensor:
    """The queries of a pooling attention in which the gradient (batch, head, query, channel) lands, (batch, query)."""
    size = in_float64(pooling_gradient).norm(dim=-1).amax(dim=1)
    most = size.amax(dim=1, keepdim=True)
    read: Tensor = (size > _NOTHING * most) | (most == 0)
    return read.to(pooling_gradient.device)
