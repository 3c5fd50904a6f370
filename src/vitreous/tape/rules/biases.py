"""Biases: what they and everything that counts as one contribute to the explained output, token by token.

``BiasRecorder`` registers biases in the forward pass; backward passes that need them add up bias x gradient;
``bias_scores`` gives the sums to tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from vitreous._utils.torch_state import at_least_float32
from vitreous.architecture import Architecture
from vitreous.errors import UnsupportedModelError
from vitreous.tape.patches.layout import Layout
from vitreous.tape.recording.interception import Progress
from vitreous.tape.recording.plan import Plan
from vitreous.tape.rules.autograd import ActiveRule, RemainderHook, origin_of
from vitreous.tape.rules.gradient_rules import ElementwiseCall

# mypy: disable-error-code="no-untyped-call"

Contribution = Callable[[Tensor], Tensor | None]


class BiasRecorder:
    """Registers biases in the layers that a plan names."""

    def __init__(self, plan: Plan, progress: Progress, active_rule: ActiveRule, architecture: Architecture) -> None:
        self._plan, self._progress, self._active_rule = plan, progress, active_rule
        self._tokens_first = not architecture.blocks[0].input.axes.batch_first
        self._placements = architecture.placements
        self._read_layers = architecture.read_layers

    @property
    def active(self) -> bool:
        """Whether the biases of the block that the forward pass is in are wanted."""
        return self._layer in self._plan.biases

    @property
    def _layer(self) -> int | None:
        """The block that biases count for: where a head reads tokens of earlier blocks too, that of these tokens."""
        return self._read_layers.get(self._progress.step, self._progress.layer)

    def record(self, output: Tensor, bias: Tensor | None, *, tokens_first: bool | None = None) -> None:
        """A bias contributes bias x gradient."""
        if bias is not None:
            constant = bias.detach()
            self._add_up(output, lambda gradient: gradient * constant, tokens_first=tokens_first)

    def record_channels(self, output: Tensor, bias: Tensor) -> None:
        """A bias whose channels lie along the second axis, as those of convolution and batch normalisation do."""
        if output.dim() == 2:
            self.record(output, bias)
            return
        constant = bias.detach().view(-1, *[1] * (output.dim() - 2))
        self._add_up(output, lambda gradient: gradient * constant, axis=1, tokens_first=False)

    def remainder_hook(self, tokens: Tensor) -> RemainderHook | None:
        """What an activation calls in a backward pass: the part that its gradient does not explain counts as a bias.

        That is gradient x (f(u) - f'(u) u), and gradient x f'(u) is what goes on to u; of a gate that is held constant
        it is gradient x f(0).
        """
        layer, active_rule = self._layer_of(tokens), self._active_rule
        if layer is None:
            return None
        tokens_first, step = self._tokens_first and self._progress.inside_block, self._progress.step

        def note(call: ElementwiseCall, gradient: Tensor, passed_on: Tensor) -> None:
            left_over = call.value_at_zero or active_rule.rule.activation != "ratio"
            if left_over and active_rule.wants_biases_of(layer):
                left = at_least_float32(gradient) * call.output
                left.addcmul_(at_least_float32(passed_on), at_least_float32(call.input), value=-1)
                self._add(layer, step, left, -1, tokens_first)

        return note

    def record_gated(self, output: Tensor) -> None:
        """A product u g(u): where the gate has a gradient both factors explain it, and one of the two is taken back."""
        active_rule, product = self._active_rule, output.detach()
        self._add_up(output, lambda gradient: None if active_rule.rule.gate == "constant" else -(gradient * product))

    def record_shifted(self, gate: Tensor, constants: Iterable[Tensor | float]) -> None:
        """A constant plus a gate, 1 + tanh(...): not followed any further where the gate has a gradient.

        Unless it was no gate but an activation, which shows later: then the constant is a bias.
        """
        active_rule, origin, shift = self._active_rule, origin_of(gate), sum(constants)

        def contribution(gradient: Tensor) -> Tensor | None:
            if getattr(origin, "kind", None) == "activation":
                return gradient * shift
            if active_rule.rule.gate == "constant":
                return None
            raise UnsupportedModelError(
                "the model writes out its activation function, with a constant added to a gate; what of it counts as a "
                f"bias is not known under rule={active_rule.rule.name}, but it is under rule=libra or rule=frozen"
            )

        self._add_up(gate, contribution)

    def _add_up(
        self, output: Tensor, contribution: Contribution, *, axis: int = -1, tokens_first: bool | None = None
    ) -> None:
        """Have what ``contribution`` makes of the gradient at ``output``, summed over channels, added up."""
        layer, active_rule, step = self._layer_of(output), self._active_rule, self._progress.step
        if layer is None:
            return
        if tokens_first is None:
            tokens_first = self._tokens_first and self._progress.inside_block

        def note(gradient: Tensor | None) -> None:
            # Autograd hands on None for nothing: q and k under a rule that holds A constant.
            if gradient is None or not active_rule.wants_biases_of(layer):
                return
            found = contribution(at_least_float32(gradient))
            if found is not None:
                self._add(layer, step, found, axis, tokens_first)

        output.register_hook(note)

    def _layer_of(self, output: Tensor) -> int | None:
        """The block that the forward pass is in, if its biases are wanted and this has a gradient."""
        return self._layer if self.active and output.requires_grad else None

    def _add(self, layer: int, step: int, found: Tensor, axis: int, tokens_first: bool) -> None:  # noqa: FBT001
        batch, tokens = self._progress.batch, self._progress.tokens
        placement = self._placements.get(step) if layer < self._plan.depth else None
        placed = None if placement is None else placement.by_token(found, batch, tokens)
        if placed is not None:
            self._active_rule.add_bias(layer, placed)
            return
        found = found.sum(dim=axis)
        found = found.flatten(1) if axis == 1 else found
        if layer < self._plan.depth and found.dim() == 1 and len(found) == batch * tokens:  # all tokens in one row
            found = found.view((tokens, batch) if tokens_first else (batch, tokens))
        self._active_rule.add_bias(layer, found.transpose(0, 1) if tokens_first and found.dim() > 1 else found)


def bias_scores(
    contributions: Iterable[Tensor], layout: Layout, batch: int, *, behind: bool, lengths: Tensor | None = None
) -> Tensor:
    """The sum of bias x gradient, already summed over channels, by token: (batch, tokens).

    A bias belongs to the token that it was added to. After the pooling it belongs to the tokens that the head reads,
    in equal parts: to the class token, where there is one. ``lengths`` (batch,) is how many tokens of each text are no
    padding, which the head never reads.
    """
    shares = _shares_of_read(layout, batch, lengths)
    placed = []
    for contribution in contributions:
        by_token = _by_token(contribution, layout, batch)
        if by_token is None and not behind:
            raise UnsupportedModelError(
                f"a bias inside a block, or between two, acts on something of shape {tuple(contribution.shape)}, "
                f"channels left out, where there are {layout.tokens} tokens: it is not known which token it belongs to"
            )
        if by_token is None:
            by_token = contribution.reshape(batch, -1).sum(dim=1, keepdim=True) * shares.to(contribution)
        placed.append(by_token)
    return torch.stack(placed).sum(dim=0)


def _shares_of_read(layout: Layout, batch: int, lengths: Tensor | None) -> Tensor:
    """Equal parts of 1 for the tokens that the head reads of each image or text, (batch, tokens)."""
    read = torch.zeros(batch, layout.tokens, dtype=torch.float64)  # on the processor: Apple's GPUs have no float64
    read[:, layout.read.cpu()] = 1
    if lengths is not None:
        read *= torch.arange(layout.tokens) < lengths.cpu()[:, None]
    return read / read.sum(dim=1, keepdim=True)


def _by_token(contribution: Tensor, layout: Layout, batch: int) -> Tensor | None:
    """A contribution as (batch, tokens), if it has tokens: heads are added up, prefix tokens may have been cut off."""
    if contribution.dim() > 1 and contribution.shape[0] != batch:
        contribution = contribution.transpose(0, 1)
    if contribution.dim() == 3:
        contribution = contribution.sum(dim=1 if contribution.shape[2] == layout.tokens else 2)
    if contribution.dim() != 2 or contribution.shape[1] not in (layout.tokens, layout.patches):
        return None
    return torch.nn.functional.pad(contribution, (layout.tokens - contribution.shape[1], 0))
