"""Puts linear layers, sums, scales, pooling, dropout and patch embedding under rules that carry relevance.

Relevance is not a gradient: what is not known here would be passed on wrongly, so every call that touches the stream
is either followed, pure re-indexing, or noted as a gap, and a model with a gap is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from vitreous._utils.torch_state import EXACT
from vitreous.architecture import Architecture
from vitreous.architecture.operations import product_operands, trailing_axes, weight_of_call
from vitreous.architecture.trace import is_factory, tensors_in
from vitreous.tape.recording.interception import Progress, TorchCall, in_graph, result_at, with_result
from vitreous.tape.recording.plan import PIXELS, Needs, Plan
from vitreous.tape.rules import RULES
from vitreous.tape.rules.autograd import ActiveRule, Follow, followed_call, gradient_between, kind_of
from vitreous.tape.rules.gradient_rules import (
    Call,
    DropoutCall,
    EmbeddingCall,
    LengthCall,
    LinearCall,
    PoolCall,
    ScaleCall,
    SumCall,
    WrittenNormCall,
)

# mypy: disable-error-code="no-untyped-call"

# By name, because each exists as a function and as a method; relevance is moved as the values were.
_REINDEXING = {
    *("reshape", "view", "view_as", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "clone", "detach"),
    *("permute", "transpose", "swapaxes", "movedim", "t", "flip", "roll", "expand", "expand_as", "repeat_interleave"),
    *("unbind", "chunk", "split", "tensor_split", "select", "narrow", "index_select", "cat", "concat", "stack"),
    # Zeros at the edges have no relevance; a maximum has that of the number it is.
    *("pad", "max_pool2d", "unfold"),
}
_READING = {
    "__get__",
    "__set__",
    "size",
    "dim",
    "numel",
    "__len__",
    "is_floating_point",
    "is_contiguous",
    "stride",
    "data_ptr",
}
_STATISTICS = {"mean", "var", "var_mean", "std", "std_mean", "norm", "vector_norm", "rsqrt", "sqrt"}
_DIFFERENCES = {"sub", "__sub__", "subtract", "rsub", "__rsub__"}
_PIXELS = "_vitreous_pixels"  # marks tensors whose numbers are those of the picture
NOT_FOLLOWED = "relevance was not followed so far in this run"


class RelevanceHandler:
    """Puts the linear parts of a forward pass under the rules that carry relevance.

    Attributes:
        follows: whether a rule of the plan carries relevance, or treats linear layers; nothing is replaced otherwise.
        gaps: by rule, what it could not follow, and in front of which block that was (``PIXELS`` before the first).
    """

    def __init__(
        self,
        architecture: Architecture,
        plan: Plan,
        progress: Progress,
        active_rule: ActiveRule,
        is_gate: Callable[[Any], bool],
    ) -> None:
        self._axes = architecture.blocks[0].input.axes
        self._progress, self._active_rule, self._is_gate = progress, active_rule, is_gate
        self.rules = {name for name in plan.rules if RULES[name].carries_relevance}
        followed = self.rules | {name for name in plan.rules if RULES[name].treats_linear}
        self.follows = bool(followed)
        self._scaling = {name for name in self.rules if RULES[name].scales_modules}
        self._lowest = _lowest(plan.needs, followed)
        self.gaps: dict[str, list[tuple[int, str]]] = {}
        self._last_sum: SumCall | None = None
        self._norms = {norm.output.step: norm for norm in architecture.written_norms} if self.follows else {}
        self._norm_steps = frozenset(
            step for norm in self._norms.values() for step in range(norm.first, norm.output.step + 1)
        )
        self._norm_inputs: dict[int, Tensor] = {}
        self.steps = frozenset(self._norms) | {norm.input.step for norm in self._norms.values()}
        if not self._axes.batch_first:
            self._gap("its tokens come before the images of a batch", self._scaling)

    def gap_of(self, needs: Needs) -> str | None:
        """Why relevance would be wrong or unknown in this run; ``None`` where it is not, or none is needed."""
        wanted = {name for name in needs.rules if RULES[name].carries_relevance}
        if not wanted <= self.rules or _lowest(needs, wanted) < self._lowest:
            return NOT_FOLLOWED
        lowest = _lowest(needs, wanted)
        gaps = (gap for name in sorted(wanted) for gap in self.gaps.get(name, ()))
        return next((reason for place, reason in gaps if place >= lowest), None)

    def leave_last_block(self) -> None:
        """The sum that leaves the last block goes to the final norm alone."""
        if self._last_sum is not None:
            self._last_sum.forks = False

    def on_norm_output(self, number: int, output: Any) -> Any:
        """Behind the last step of a norm that a module writes out: it passes relevance on unchanged, as norms do."""
        norm = self._norms.get(number)
        source = None if norm is None else self._norm_inputs.get(norm.input.step)
        if norm is None or source is None or not in_graph(source):
            return output
        raw = result_at(output, norm.output.output)
        self._gap("a norm is written out by hand", self._scaling)
        return with_result(output, norm.output.output, self._follow(WrittenNormCall(raw, source), source))

    def after_step(self, number: int, output: Any) -> None:
        """Keep what a norm that is written out will be given."""
        for norm in self._norms.values():
            if norm.input.step == number:
                self._norm_inputs[number] = result_at(output, norm.input.output)

    def on_linear(self, call: TorchCall) -> Any:
        """A linear layer."""
        tokens, weight, bias = _linear_arguments(*call.args, **call.kwargs)
        if not self._watches(tokens):
            return call.proceed()
        if in_graph(weight):
            self._gap("weights of a layer depend on the picture")
        elif not self._progress.reached_blocks and _holds_pixels(tokens):
            return self._follow(
                EmbeddingCall(lambda patches: F.linear(patches, weight, bias), weight, F.linear), tokens
            )
        return self._follow(LinearCall(weight, bias), tokens)

    def on_matrix_product(self, call: TorchCall) -> Any:
        """A product with a constant matrix is a linear layer; one of two streams belongs to the attention."""
        if not any(self._watches(value) for value in call.args):
            return call.proceed()
        left, right = product_operands(call.operation, call.args, call.kwargs) or call.args[:2]
        weight = weight_of_call(call.operation, call.args, call.kwargs, in_graph)
        if weight is not None and self._progress.reached_blocks:
            tokens = left if in_graph(left) else right
            flat = tokens.flatten(-trailing_axes(tokens.shape, weight.shape[1]))
            with torch.no_grad():
                shape = call.function(*call.args, **call.kwargs).shape  # channels may have several axes in an einsum
            return self._follow(LinearCall(weight, None), flat).reshape(shape)
        if not (in_graph(left) and in_graph(right)) or self._progress.layer is None:
            self._gap("it multiplies matrices outside attention and linear layers")
        return call.proceed()

    def on_add(self, call: TorchCall) -> Any:
        """A sum of streams, or of a stream and a constant such as positions."""
        if not any(self._watches(value) for value in call.args):
            return call.proceed()
        if self._is_change_of_pixels(call):
            return self._change_pixels(call)
        if any(self._is_gate(value) or _is_zero(value) for value in call.args):
            return call.proceed()
        whole = self._linear_with_bias(call)
        if whole is not None:
            return whole
        return self._add(*call.args) if self._can_add(call) else call.proceed()

    def _linear_with_bias(self, call: TorchCall) -> Tensor | None:
        """A linear layer as a whole, where a constant for every channel is added to what it gave: x W + b."""
        known = [value for value in call.args if in_graph(value)]
        biases = [value for value in call.args if isinstance(value, Tensor) and not in_graph(value)]
        linear, inputs = followed_call(known[0]) if len(known) == len(biases) == 1 and not call.kwargs else (None, ())
        if not isinstance(linear, LinearCall) or linear.bias is not None or biases[0].numel() != len(linear.weight):
            return None
        followed: Tensor = self._follow(LinearCall(linear.weight, biases[0].flatten()), *inputs)
        return followed.view(known[0].shape)

    def on_add_in_place(self, call: TorchCall) -> Any:
        """A sum that takes the place of its first term, which the way back needs as it was."""
        if not any(self._watches(value) for value in call.args) or self._is_gate(call.args[0]):
            return call.proceed()
        if not self._can_add(call):
            return call.proceed()
        return call.args[0].copy_(self._add(call.args[0].clone(), call.args[1]))

    def on_subtract(self, call: TorchCall) -> Any:
        """A difference: what is taken off is added with another sign."""
        if not any(self._watches(value) for value in call.args):
            return call.proceed()
        if self._is_change_of_pixels(call):
            return self._change_pixels(call)
        if call.name not in _DIFFERENCES or any(map(self._is_gate, call.args)):
            return self.on_unknown(call)
        if not self._can_add(call):
            return call.proceed()
        left, right = reversed(call.args) if call.name in {"rsub", "__rsub__"} else call.args
        return self._add(left, self._scale(torch.mul, right, -1.0) if in_graph(right) else -right)

    def on_negate(self, call: TorchCall) -> Any:
        """Another sign."""
        return self._scale(torch.mul, call.args[0], -1.0) if self._watches(call.args[0]) else call.proceed()

    def on_interpolate(self, call: TorchCall) -> Any:
        """``torch.lerp`` by a constant: a weighed sum."""
        start, end, share = (call.argument(*each) for each in ((0, "input"), (1, "end"), (2, "weight")))
        if in_graph(share) or not (self._watches(start) and self._watches(end)) or call.name == "lerp_":
            return self.on_unknown(call)
        if not self._can_add(TorchCall(torch.add, (start, end))):
            return call.proceed()
        return self._add(self._scale(torch.mul, start, 1 - share), self._scale(torch.mul, end, share))

    def _can_add(self, call: TorchCall) -> bool:
        """Whether a sum or difference can be followed; what stands against it is noted."""
        if call.kwargs or not all(isinstance(value, Tensor) for value in call.args):
            self._gap("it adds a number to its tokens")
        elif self._progress.attention_layer is not None:
            self._gap("it adds to queries, keys or values inside its attention (rotated positions)")
        else:
            return True
        return False

    def _add(self, left: Tensor, right: Tensor) -> Any:
        inside = self._progress.inside_block or not self._progress.reached_blocks
        axis = 0 if self._axes.batch_first or not self._progress.inside_block else 1
        if torch.broadcast_shapes(left.shape, right.shape)[axis] != self._progress.batch:
            self._gap("it adds tensors in which the images of a batch are not known")
        added = SumCall(torch.add, axis, inside, partial(gradient_between, self._active_rule))
        self._last_sum = added if inside else self._last_sum
        return self._follow(added, left, right)

    def _is_change_of_pixels(self, call: TorchCall) -> bool:
        """Whether a constant is added to a picture or multiplied with it: a model may normalise its input itself."""
        known = [value for value in call.args[:2] if in_graph(value)]
        return not self._progress.reached_blocks and len(known) == 1 and _holds_pixels(known[0])

    def _change_pixels(self, call: TorchCall) -> Any:
        """Another unit for pixels, which have the same relevance as before."""
        function, args, kwargs = call.function, call.args, call.kwargs
        place = next(place for place, value in enumerate(args) if in_graph(value))

        def change(pixels: Tensor) -> Tensor:
            changed: Tensor = function(*args[:place], pixels, *args[place + 1 :], **kwargs)
            return changed

        return _still_pixels(args[place], self._follow(LengthCall(change), args[place]))

    def on_multiply(self, call: TorchCall) -> Any:
        """A stream times a constant or a gate; products of two streams inside a block have been handled."""
        if not any(self._watches(value) for value in call.args):
            return call.proceed()
        if self._is_change_of_pixels(call):
            return self._change_pixels(call)
        stream, factor = (
            call.args if in_graph(call.args[0]) and not self._is_gate(call.args[0]) else reversed(call.args)
        )
        if in_graph(stream) and self._is_gate(factor):
            self._gap("an activation is written out by hand", self._scaling)
            return self._follow(ScaleCall(torch.mul), stream, factor)
        return self._scale(torch.mul, stream, factor)

    def on_divide(self, call: TorchCall) -> Any:
        """A stream divided by a constant."""
        if call.name not in {"div", "__truediv__"}:
            return self.on_unknown(call)
        if call.kwargs or not any(self._watches(value) for value in call.args):
            return self.on_unknown(call)
        if self._is_change_of_pixels(call):
            return self._change_pixels(call)
        return self._scale(torch.div, *call.args)

    def on_addmm(self, call: TorchCall) -> Any:
        """A bias plus a product with a constant matrix is a linear layer."""
        bias, tokens, weight = call.args[:3]
        if call.kwargs or in_graph(bias) or in_graph(weight) or not self._watches(tokens):
            return self.on_unknown(call)
        if not self._progress.reached_blocks and _holds_pixels(tokens):
            return self._follow(EmbeddingCall(lambda x: torch.addmm(bias, x, weight), weight.T, F.linear), tokens)
        return self._follow(LinearCall(weight.T, bias), tokens)

    def on_square(self, call: TorchCall) -> Any:
        """Of an activation, an activation."""
        return call.proceed() if kind_of(call.args[0]) == "activation" else self.on_unknown(call)

    def _scale(self, func: Callable[..., Any], stream: Any, factor: Any) -> Any:
        if not in_graph(stream) or in_graph(factor):
            self._gap("it multiplies or divides by something that depends on the tokens")
            return func(stream, factor)
        weight = factor if isinstance(factor, Tensor) else torch.tensor(factor, dtype=torch.float64)
        return self._follow(ScaleCall(func), stream, weight)

    def on_pool(self, call: TorchCall) -> Any:
        """After the blocks, choosing tokens or taking their mean."""
        if not self._progress.after_blocks and call.name == "__getitem__":
            return _still_pixels(call.args[0], call.proceed())
        if not self._progress.after_blocks or not self._watches(call.args[0]):
            return self.on_unknown(call)
        return self._follow(PoolCall(call.of_first()), call.args[0])

    def on_same_values(self, call: TorchCall) -> Any:
        """Dropout, from the first block on; another dtype would round relevance."""
        output = call.proceed()
        counts = call.name == "dropout" and self._progress.reached_blocks and self._scaling
        if not (counts and self._watches(call.args[0])):
            return _still_pixels(call.args[0], output)
        return self._follow(DropoutCall(call.of_first()), call.args[0])

    def on_embedding(self, call: TorchCall) -> Any:
        """The convolution of the picture itself."""
        pixels, weight, bias, options, named = _convolution_arguments(*call.args, **call.kwargs)
        if not self._watches(pixels):
            return call.proceed()
        if self._progress.reached_blocks or not _holds_pixels(pixels):
            self._gap("it has more convolutions than the patch embedding")
        function = call.function  # not the call itself, whose handlers hold the recording

        def convolve(picture: Tensor, kernel: Tensor, shift: Tensor | None = None) -> Tensor:
            result: Tensor = function(picture, kernel, shift, *options, **named)
            return result

        return self._follow(EmbeddingCall(lambda picture: convolve(picture, weight, bias), weight, convolve), pixels)

    def on_row_convolution(self, call: TorchCall) -> Any:
        """``F.conv1d`` with a kernel of one token is a linear layer whose channels lie along the second axis."""
        tokens, _, bias, options, named = _convolution_arguments(*call.args, **call.kwargs)
        linear = weight_of_call("conv1d", call.args, call.kwargs, in_graph)
        moved = any(option not in (1, 0, (1,), (0,)) for option in (*options[:3], *named.values()))
        if linear is None or moved or not self._progress.reached_blocks or not self._watches(tokens):
            return self.on_unknown(call)
        return self._follow(LinearCall(linear, bias), tokens.transpose(1, 2)).transpose(1, 2)

    def on_unknown(self, call: TorchCall) -> Any:
        """Anything else that works on the stream leaves a gap, unless it only moves or reads numbers."""
        name = call.name
        known = name in _REINDEXING or name in _READING or is_factory(call.function)
        if not known and any(self._watches(value) for value in call.operands()):
            known_norms = "; a norm has one as nn.LayerNorm, nn.RMSNorm or F.normalize" if name in _STATISTICS else ""
            self._gap(f"there is no relevance rule for its {name}(){known_norms}")
        output = call.proceed()
        return _still_pixels(call.args[0], output) if name in _REINDEXING and call.args else output

    def on_normalize(self, call: TorchCall) -> Any:
        """Vectors of length 1: as other norms, this passes relevance on unchanged."""
        if not self._watches(call.args[0]):
            return call.proceed()
        self._gap("it gives its vectors length 1 by normalize()", self._scaling)
        return self._follow(LengthCall(call.rest_of_first()), call.args[0])

    def on_unknown_before_blocks(self, call: TorchCall) -> Any:
        """Attention and softmax before the blocks, which have no rule there."""
        return call.proceed() if self._progress.reached_blocks else self.on_unknown(call)

    def on_unknown_outside_blocks(self, call: TorchCall) -> Any:
        """A gate before the blocks or after them, where it does not weigh a stream."""
        return call.proceed() if self._progress.inside_block else self.on_unknown(call)

    def _watches(self, value: Any) -> bool:
        """Whether relevance may come to a tensor; inside a handled function nothing counts."""
        if not (self.follows and in_graph(value) and torch.is_grad_enabled()):
            return False
        if self._progress.step in self._norm_steps:
            return False
        return (self._progress.next_block if self._progress.reached_blocks else PIXELS) >= self._lowest

    def _follow(self, call: Call, *inputs: Tensor) -> Any:
        output: Tensor = Follow.apply(call, self._active_rule, *inputs)
        for dtype in {inputs[0].dtype, output.dtype}.difference(EXACT):
            self._gap(f"it runs in {dtype}, in which relevance is lost to rounding; run it in float32")
        return output

    def _gap(self, reason: str, rules: set[str] | None = None) -> None:
        place = self._progress.next_block if self._progress.reached_blocks else PIXELS
        for name in self.rules if rules is None else rules:
            self.gaps.setdefault(name, []).append((place, reason))


def _is_zero(value: Any) -> bool:
    """Whether a value is the number 0, as with which ``sum([...])`` begins."""
    return isinstance(value, int | float) and value == 0


def _holds_pixels(tensor: Tensor) -> bool:
    """Whether a tensor holds the numbers of the picture, moved at most."""
    return tensor.is_leaf or getattr(tensor, _PIXELS, False)


def _still_pixels(given: Any, output: Any) -> Any:
    """What a call gave that only moves numbers; marked, if they are those of the picture."""
    if isinstance(given, Tensor) and in_graph(given) and _holds_pixels(given):
        for tensor in tensors_in(output):
            setattr(tensor, _PIXELS, True)
    return output


def _lowest(needs: Needs, rules: set[str]) -> float:
    """The first block that passes under some rules have to reach."""
    reached = (part.lowest for backward, part in needs.gradients.items() if backward.rule in rules)
    return min((layer for layer in reached if layer is not None), default=float("inf"))


def _linear_arguments(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The signature of ``F.linear``."""
    return input, weight, bias


def _convolution_arguments(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    *options: Any,
    **named: Any,
) -> tuple[Tensor, Tensor, Tensor | None, tuple[Any, ...], dict[str, Any]]:
    """The signature of ``F.conv2d`` and ``F.conv3d``; stride, padding, dilation and groups as they were given."""
    return input, weight, bias, options, named
