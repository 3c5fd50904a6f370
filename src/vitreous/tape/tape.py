"""The tape: one forward pass, recorded, and backward passes through it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vitreous._utils.messages import error_message
from vitreous._utils.torch_state import HALF
from vitreous.architecture.norms import LinearNorm
from vitreous.errors import UnsupportedModelError
from vitreous.inputs.model_io import (
    Inputs,
    Rows,
    Texts,
    texts_of,
)
from vitreous.tape.attention.record import AttentionRecord, only_hides
from vitreous.tape.output import CLASS_SCORES, OutputReader, output_gradient
from vitreous.tape.patches.grid_probe import PatchGridProbe
from vitreous.tape.patches.layout import Layout, find_layout, layout_of_target
from vitreous.tape.recording.gradient_breaks import depends
from vitreous.tape.recording.linear_maps import HeadProjection
from vitreous.tape.recording.plan import PIXELS, GradientNeeds, Intervention, Needs, Pass
from vitreous.tape.recording.recorder import Recorder
from vitreous.tape.rules import RULES
from vitreous.tape.rules.biases import bias_scores


@dataclass
class Gradients:
    """What one backward pass left, by layer.

    Attributes:
        tokens: dy/dx_l, (batch, tokens, channels); of the picture, (batch, channel, height, width).
        norms: the gradient at the first norm's output, (batch, tokens, channels).
        outputs: dy/dO_l, (batch, head, tokens, channels).
        biases: bias x gradient of everything in a block, (batch, tokens).
    """

    tokens: dict[int, Tensor] = field(default_factory=dict)
    norms: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    biases: dict[int, Tensor] = field(default_factory=dict)

    def cut(self, rows: Rows, count: int) -> Gradients:
        """Those of some texts and of their first ``count`` tokens."""
        return Gradients(
            tokens={layer: gradient[rows, :count] for layer, gradient in self.tokens.items()},
            norms={layer: gradient[rows, :count] for layer, gradient in self.norms.items()},
            outputs={layer: gradient[rows, :, :count] for layer, gradient in self.outputs.items()},
            biases={layer: scores[rows, :count] for layer, scores in self.biases.items()},
        )


class Tape:
    """One recorded forward pass. Made by ``record``; holds the graph until that context ends.

    ``again`` runs the model once more, on some of the images, with an intervention; ``grid_probe`` runs its patch
    embedding alone, to find the patch grid; ``reader`` has read the ``logits`` of the model's output.
    """

    def __init__(
        self,
        recorder: Recorder,
        logits: Tensor,
        inputs: Inputs,
        again: Callable[[Rows, Needs, Intervention], AbstractContextManager[Tape]],
        grid_probe: PatchGridProbe,
        reader: OutputReader = CLASS_SCORES,
    ) -> None:
        self._recorder, self._again, self._reader = recorder, again, reader
        self._logits = logits
        self.architecture = recorder.architecture
        self.logits = logits.detach()
        head_gradient, pooling_gradient = self._head_gradients()
        self.layout: Layout = find_layout(
            recorder, head_gradient, pooling_gradient, inputs, grid_probe, any_token=reader.may_read_any_token
        )
        self._inputs = inputs
        self.reads_text = isinstance(inputs, Texts)
        self._texts = texts_of(inputs, len(logits))
        self._part: tuple[Rows, int] | None = None
        self._attention: dict[int, AttentionRecord] = {}

    def cut(self, rows: Rows, count: int) -> Tape:
        """The same run as if only some texts had been in it, without the padding after their ``count`` tokens.

        Padding is masked, so the numbers are those of a run without it. Backward passes need the whole tape.
        """
        part = copy.copy(self)
        part._part, part._attention = (rows, count), {}  # noqa: SLF001 - of this very class
        part.logits, part.layout = self.logits[rows], self.layout.cut(count)
        return part

    def for_target(self, target: Tensor) -> Tape:
        """The same run as it is read for one target per image, (batch,): a pixel or a query reads tokens of its own.

        What a method shows of one target then does not depend on which others are explained with it. Costs a backward
        pass of the head; classes are read as all of them are.
        """
        if not self._reader.has_own_reading(target):
            return self
        part = copy.copy(self)
        gradients = self._head_gradients(target)
        part.layout = layout_of_target(self.layout, self._recorder, *gradients, self._inputs)
        return part

    @property
    def depth(self) -> int:
        """L, the number of blocks."""
        return self.architecture.depth

    @property
    def needs(self) -> Needs:
        """What the recording was made for."""
        return self._recorder.plan.needs

    @property
    def unseen_attention(self) -> frozenset[int]:
        """The blocks in which no attention call was recognised, neither between tokens nor in another way."""
        attention = self._recorder.attention
        return frozenset(range(self.depth)) - attention.records.keys() - attention.other.keys()

    @property
    def other_attention(self) -> str | None:
        """Why the attention of some block is not one between all tokens of an image; ``None`` where all are."""
        other = self._recorder.attention.other
        return other[min(other)] if other else None

    @property
    def unknown_products(self) -> frozenset[int]:
        """The blocks in which tokens are multiplied with each other, or weighed, in a way that is no attention."""
        return frozenset(self._recorder.attention.unknown)

    @property
    def multiplied_tokens(self) -> frozenset[int]:
        """The blocks in which tokens are multiplied with each other in a way that is no attention, gradient or not."""
        return frozenset(self._recorder.attention.multiplied)

    @property
    def unfollowed_attention(self) -> frozenset[int]:
        """The blocks whose attention is more than softmax(scale q kᵀ + bias) v; L is attention after the last block."""
        return frozenset(self._recorder.attention.unfollowed)

    @property
    def unknown_keys(self) -> frozenset[int]:
        """The blocks in which more than q and k makes the scores, so that k by itself was not recognised."""
        return frozenset(self._recorder.attention.unknown_keys)

    @property
    def reads_several_blocks(self) -> bool:
        """Whether the head reads earlier tokens besides the last block's, as far down as this run has a graph."""
        recorder = self._recorder
        if recorder.leaf is None:
            return False
        return depends(self._logits, recorder.leaf, apart_from=recorder.tokens[self.depth])

    @property
    def unseen_norms(self) -> frozenset[int]:
        """The blocks whose first norm was planned and not recorded."""
        return frozenset(self._recorder.plan.norms) - self._recorder.norms.keys()

    def relevance_gap(self, needs: Needs) -> str | None:
        """Why relevance would be wrong or unknown in this run; ``None`` where it is not, or none is needed."""
        handler = self._recorder.relevance
        biases = self._recorder.attention.biases.values()
        counted = {name for name in handler.rules & needs.rules if RULES[name].scales_modules}
        if counted and not all(only_hides(bias) for added in biases for bias in added):
            names = ", ".join(sorted(counted))
            return f"it adds relative positions or the like to its attention scores, for which {names} has no rule"
        return handler.gap_of(needs)

    def gradient_gap(self, needs: Needs) -> str | None:
        """Why gradients would be wrong in this run; ``None`` where they are not, or none are needed."""
        return self._recorder.gradient_breaks.gap_of(needs)

    def tokens(self, layer: int) -> Tensor:
        """x_l: the stream at the input of a block, (batch, tokens, channels); layer ``PIXELS`` is the picture.

        Of a text ``PIXELS`` is what its tokens are embedded as, which is x_0.
        """
        stream = self._recorder.tokens[layer]
        if layer == PIXELS and not self.reads_text:
            return stream.detach()
        return self._seen(self._recorder.stream_of(max(layer, 0), stream))

    def norm(self, layer: int) -> Tensor:
        """The output of a block's first norm, (batch, tokens, channels)."""
        return self._seen(self._recorder.norm_of(layer, self._recorder.norms[layer]))

    def residual_mid(self, layer: int) -> Tensor:
        """The stream with the attention branch of a block added, before a post-norm block normalises it."""
        return self._seen(self._recorder.residual_mids[layer])

    def after_attention(self, layer: int) -> Tensor:
        """The stream that the feed-forward part of a block reads: ``residual_mid``, normalised in a post-norm block."""
        return self._seen(self._recorder.after_attention[layer])

    def residual_post(self, layer: int) -> Tensor:
        """The stream with the feed-forward branch of a block added, before a post-norm block normalises it."""
        return self._seen(self._recorder.residual_posts[layer])

    def attention(self, layer: int) -> AttentionRecord:
        """The attention call of a block; index L is a pooling attention after the last block."""
        record = self._recorder.attention.records[layer]
        if self._part is None:
            return record
        if layer not in self._attention:
            self._attention[layer] = record.cut(*self._part)
        return self._attention[layer]

    def head_projection(self, layer: int) -> HeadProjection | None:
        """How the heads of a block reach the residual stream; ``None`` where they do so in no linear way."""
        found, order = (
            self._recorder.linear_maps.head_projection(layer),
            self.architecture.blocks[layer].input.axes.order,
        )
        if found is not None and order is not None:
            found = found.in_order(torch.tensor(order))
        return found if found is None or self._part is None else found.cut(*self._part)

    def skip(self, layer: int) -> tuple[Tensor | float, Tensor | float]:
        """What the stream itself is multiplied with when attention and feed-forward part are added; mostly 1."""
        return self._recorder.linear_maps.skip(layer)

    def value_weight(self, layer: int) -> Tensor | None:
        """W_V, (channels of all heads, channels of the first norm); ``None`` where it is not known."""
        return self._recorder.linear_maps.value_weight(layer)

    def linear_norms(self, layer: int) -> tuple[LinearNorm | None, LinearNorm | None]:
        """Both norms of a block as linear maps, ``None`` where one is none."""
        block, maps = self.architecture.blocks[layer], self._recorder.linear_maps
        return maps.norm(block.first_norm), maps.norm(block.second_norm)

    def backward(self, backward: Pass, target: Tensor, needs: GradientNeeds) -> Gradients:
        """Gradients of the pass's objective, one class per image, under its rule.

        Raises:
            UnsupportedModelError: gradients end before they reach what is needed.
            TargetError: what is explained has no gradient.
        """
        self._reader.check_differentiable(target)
        gap = self._recorder.gradient_breaks.behind(needs.lowest)
        if gap is not None:
            raise UnsupportedModelError(f"{self.architecture.name} cannot be explained by gradients: {gap}")
        if backward.reads_blocks_alone:
            return self._intermediate_gradients(backward, target, needs.attention)
        recorder = self._recorder
        outputs = needs.attention | ({self.depth} if needs.attention and self.layout.pooled_by_attention else set())
        wanted = [
            *(("tokens", layer, recorder.tokens[layer]) for layer in needs.tokens),
            *(("norms", layer, recorder.norms[layer]) for layer in needs.norms),
            *(("outputs", layer, output) for layer in outputs for output in recorder.attention.outputs[layer]),
        ]
        sources = [source for _, _, source in wanted]
        recorder.active_rule.rule = RULES[backward.rule]
        targets = self._reader.targets_in(self.logits)
        start = output_gradient(self.logits, target, backward.objective, self.architecture.scale, targets)
        half = any(source.dtype in HALF for source in sources)
        start = self._reader.at_class_scores(self.logits, start) if half else start
        size = start.abs().amax(dim=1) if half else None
        if size is not None:
            # Half precision rounds the small gradient of a probability near 1 to nothing. Images do not mix and every
            # rule is linear in the gradient, so each image's is carried at size 1 and scaled when it has arrived.
            start = start / size.masked_fill(size == 0, 1)[:, None]
        recorder.active_rule.biases = {layer: [] for layer in needs.biases} or None
        arrived = self._gradients(start.to(self._logits.dtype), sources)
        found = Gradients(biases=self._bias_scores(recorder.active_rule.biases or {}, size))
        recorder.active_rule.biases = None
        heads: dict[int, list[Tensor]] = {layer: [] for layer in outputs}
        for (part, layer, _), gradient in zip(wanted, arrived, strict=True):
            if part == "norms":
                gradient = recorder.norm_of(layer, gradient)  # noqa: PLW2901
            elif part == "tokens" and (layer != PIXELS or self.reads_text):
                gradient = recorder.stream_of(max(layer, 0), gradient)  # noqa: PLW2901
            if part == "outputs":
                heads[layer].append(gradient)
            else:
                getattr(found, part)[layer] = _times(gradient, size)
        for layer, gradients in heads.items():
            found.outputs[layer] = _times(recorder.attention.arranged(layer, gradients), size)
        return found

    def _intermediate_gradients(self, backward: Pass, target: Tensor, layers: frozenset[int]) -> Gradients:
        """dy_l/dO_l with y_l the logit that the head gives to block l's output; blocks above have no part in it."""
        gradients = self._head_gradients_of_blocks(backward, target, layers)
        recorder = self._recorder
        recorder.active_rule.rule = RULES[backward.rule]
        found = Gradients()
        for layer, gradient in zip(layers, gradients, strict=True):
            stream, outputs = recorder.tokens[layer + 1], recorder.attention.outputs[layer]
            tokens = recorder.stream_of(layer + 1, stream)
            arrived = self._gradients(gradient.to(stream.dtype), outputs, of=tokens)
            found.outputs[layer] = recorder.attention.arranged(layer, arrived)
        return found

    def _head_gradients_of_blocks(self, backward: Pass, target: Tensor, layers: frozenset[int]) -> Tensor:
        """dy_l/dx_{l+1} with y_l the logit that the head gives to the output of block l, (layer, batch, tokens, ...).

        All outputs are read by the head at once, stacked along the batch, in one further run on a single image. A head
        that pools texts leaves out their padding, so texts of every other length have a run of their own.
        """
        logit, behind = Pass(backward.rule, "logit"), GradientNeeds(tokens=frozenset({self.depth}))
        mean = backward.objective == "intermediate_mean"
        streams = torch.stack([self.tokens(layer + 1) for layer in layers])

        def gradients_of(rows: Rows, real: int | None = None) -> Tensor:
            some = streams[:, rows]
            if mean:  # each token is the mean of all, so that the gradient at the mean is the sum of theirs
                some = some[:, :, :real].mean(dim=2, keepdim=True).expand_as(some)
            one = slice(1) if isinstance(rows, slice) else rows[:1]
            with self._again(
                one, Needs(gradients={logit: behind}), Intervention(self.depth, some.flatten(0, 1))
            ) as head:
                found = head.backward(logit, target[rows].repeat(len(layers)), behind).tokens[self.depth]
            found = found.reshape(some.shape)
            if not mean:
                return found
            shares = torch.zeros_like(found)
            shares[:, :, :real] = found.sum(dim=2, keepdim=True) / found[:, :, :real].shape[2]
            return shares

        groups = [] if self._texts is None else list(self._texts.by_length())
        if len(groups) < 2:
            return gradients_of(slice(None), groups[0][0] if groups else None)
        order = torch.cat([rows for _, rows in groups]).argsort()
        return torch.cat([gradients_of(rows, length) for length, rows in groups], dim=1)[:, order]

    def _bias_scores(self, noted: dict[int, list[Tensor]], size: Tensor | None) -> dict[int, Tensor]:
        """What biases contribute, per token."""
        batch, nothing = len(self.logits), self.logits.new_zeros(len(self.logits), self.layout.tokens)
        lengths = None if self._texts is None else self._texts.lengths
        behind = {self.depth, *self.architecture.read_layers.values()}
        scores = {
            layer: bias_scores(contributions or [nothing], self.layout, batch, behind=layer in behind, lengths=lengths)
            for layer, contributions in noted.items()
        }
        return scores if size is None else {layer: sums * size[:, None] for layer, sums in scores.items()}

    def _head_gradients(self, target: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Where the gradient of the output lands: in which of the last block's tokens, in which pooling queries.

        Of all outputs together, or of one per image where ``target`` (batch,) names it.

        Of the attention calls after the blocks the first that the output depends on is the one that pools them; a
        model may have a pooling head that it does not use for this output.
        """
        calls = self._recorder.attention.after_blocks
        behind = [(place, call[1]) for place, call in enumerate(calls) if call[1].requires_grad]
        stream = self._recorder.tokens[self.depth]
        gap = self._recorder.gradient_breaks.behind(self.depth)
        if gap is not None:
            raise UnsupportedModelError(f"which tokens the head of {self.architecture.name} reads does not show: {gap}")
        columns = self._reader.head_columns(self._logits) if target is None else self._logits.gather(1, target[:, None])
        if not columns.requires_grad:
            raise self._cut_off("the output")
        self._recorder.active_rule.rule = RULES["plain"]
        # Alternating signs, so that outputs which always sum to the same value do not cancel.
        signs = torch.ones_like(columns)
        signs[:, 1::2] = -1
        sources = [stream, *(output for _, output in behind)]
        gradient, *pooling_gradients = self._gradients(signs, sources, of=columns, allow_unused=True)
        if gradient is None:
            raise UnsupportedModelError(
                f"no gradient reaches the last block of {self.architecture.name}: its output does not depend on that "
                "block, or something that has no gradient stands in between"
            )
        gradient = self._recorder.stream_of(self.depth, gradient)
        for (place, _), pooling_gradient in zip(behind, pooling_gradients, strict=True):
            if pooling_gradient is not None:
                attention = self._recorder.attention
                attention.pool_by(place)
                return gradient, attention.arranged(self.depth, [pooling_gradient])
        return gradient, None

    def _cut_off(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{what} of {self.architecture.name} has no gradient: something inside the model cuts it off "
            "(torch.no_grad, detach, or reentrant gradient checkpointing)"
        )

    def _gradients(
        self, start_gradient: Tensor, sources: list[Tensor], *, of: Tensor | None = None, allow_unused: bool = False
    ) -> tuple[Tensor, ...]:
        """The gradients at the sources, given the one at the logits or at another tensor."""
        start = self._logits if of is None else of
        try:
            return torch.autograd.grad(start, sources, start_gradient, retain_graph=True, allow_unused=allow_unused)
        except RuntimeError as error:
            # A tensor without a gradient, or a source that the output was not made from.
            if "does not require grad" in str(error) or "not have been used in the graph" in str(error):
                raise self._cut_off("a block") from None
            if "no autograd formula" in str(error) or "is not implemented" in str(error):
                reason = error_message(error).rstrip(".")
                raise UnsupportedModelError(
                    f"{self.architecture.name} cannot be explained by gradients: it has an operator without one "
                    f"({reason})"
                ) from None
            if "modified by an inplace operation" in str(error):
                raise UnsupportedModelError(
                    f"{self.architecture.name} cannot be explained by gradients: it changes tokens in place that its "
                    "backward pass needs; write x = x + f(x) instead of x += f(x)"
                ) from None
            if "checkpoint" not in str(error).lower():
                raise
            raise UnsupportedModelError(
                f"{self.architecture.name} recomputes its blocks in the backward pass (torch.utils.checkpoint), "
                "where they cannot be recorded; switch gradient checkpointing off"
            ) from None

    def _seen(self, stream: Tensor) -> Tensor:
        """The stream as a reader sees it: batch first, without a graph, and that of the part alone."""
        stream = stream.detach()
        if self._part is None:
            return stream
        rows, count = self._part
        return stream[rows, :count]


def _times(gradient: Tensor, size: Tensor | None) -> Tensor:
    """A gradient of every image times that image's size."""
    return gradient if size is None else gradient.float() * size.view(-1, *[1] * (gradient.dim() - 1))
