"""Norms: where the norms of a stage's blocks stand, and LayerNorm and RMSNorm as linear maps.

As a linear map, a norm acts on a part of a token with the whole token's deviation held fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.architecture.description import Norm, NormPlace, Point, WrittenNorm
from vitreous.architecture.operations import NORM, is_linear, moves_numbers, scales, value_of, walk_back
from vitreous.architecture.stream import ResidualWrite, Stage, branch_start
from vitreous.architecture.trace import ModuleCall, Step, Trace, Value


@dataclass(frozen=True)
class LinearNorm:
    """N(x) = linear(x) / deviation(x) + bias.

    Attributes:
        weight: one factor per channel, or ``None``.
        bias: what is added at the end, or ``None``.
        eps: what is added to the variance.
        centred: whether the mean over channels is taken off (LayerNorm) or not (RMSNorm).
        divides: whether it divides at all; what stands in for a norm may do nothing.
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool
    divides: bool = True

    def linear(self, vectors: Tensor) -> Tensor:
        """The part that is linear in (..., channels)."""
        result = vectors - vectors.mean(dim=-1, keepdim=True) if self.centred else vectors.clone()
        return result if self.weight is None else result.mul_(self.weight.to(vectors.dtype))

    def deviation(self, tokens: Tensor) -> Tensor:
        """What whole tokens (..., channels) are divided by, (...)."""
        if not self.divides:
            return tokens.new_ones(tokens.shape[:-1])
        centred = tokens - tokens.mean(dim=-1, keepdim=True) if self.centred else tokens
        return centred.square().mean(dim=-1).add_(self.eps).sqrt_()


def linear_norm(module: nn.Module | None) -> LinearNorm | None:
    """The norm as a linear map, or ``None`` for a module that is neither LayerNorm nor RMSNorm over channels.

    What is not torch's own LayerNorm is tried on two tokens: every library has an RMSNorm of its own, by many names,
    and some multiply by 1 + weight.
    """
    if isinstance(module, nn.Identity):  # ModernBERT has no norm in its first block: its embeddings have one
        return LinearNorm(weight=None, bias=None, eps=0.0, centred=False, divides=False)
    if module is None:
        return None
    weight, bias = (
        value.detach() if isinstance(value, Tensor) else None
        for value in (getattr(module, name, None) for name in ("weight", "bias"))
    )
    if weight is not None and weight.dim() != 1:
        return None
    if type(module) is nn.LayerNorm:
        return LinearNorm(weight, bias, module.eps, centred=True)
    return _norm_by_answer(module, weight, bias)


def _norm_by_answer(module: nn.Module, weight: Tensor | None, bias: Tensor | None) -> LinearNorm | None:
    """The form of norm that gives what the module gives, if one does."""
    tokens = _probe(module, weight)
    given = _answer(module, tokens)
    if given is None:
        return None
    tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))  # to compare with what half precision rounded
    named = _named_eps(module)
    factors = [weight] if weight is None else [weight, 1 + weight]
    norms = [LinearNorm(factor, bias, 0.0, centred) for centred, factor in product((False, True), factors)]
    # Parameters may have any names: what they are shows in what becomes of a long token and of its negative.
    norms += [_measured_norm(tokens, given.to(tokens.dtype), centred=centred) for centred in (False, True)]
    for norm in norms:
        norm = replace(norm, eps=named or _measured_eps(norm, tokens[0, 1], given[0, 1]))  # noqa: PLW2901
        if _gives(norm, tokens, given):
            return norm
    return None


def _measured_norm(tokens: Tensor, given: Tensor, *, centred: bool) -> LinearNorm:
    """The norm with the weight and bias that a module seems to have: N(x) and N(-x) differ by their linear part."""
    norm = LinearNorm(None, None, 0.0, centred)
    plain = norm.linear(tokens[0, 2]) / norm.deviation(tokens[0, 2])
    weight, bias = (given[0, 2] - given[0, 3]) / 2 / plain, (given[0, 2] + given[0, 3]) / 2
    return LinearNorm(weight, bias if bool(bias.any()) else None, 0.0, centred)


def _probe(module: nn.Module, weight: Tensor | None) -> Tensor:
    """Four tokens, (1, 4, channels): one with a mean, one so short that eps counts, a long one, and its negative."""
    parameters = [*module.parameters()] if weight is None else [weight]
    like = max(parameters, key=Tensor.numel, default=torch.zeros(()))
    channels = math.prod(getattr(module, "normalized_shape", (16,))) if like.dim() == 0 else like.numel()
    wave = torch.linspace(0, 6, channels, dtype=torch.float64).sin()
    # Half precision has no room for the squares of small and large numbers.
    short, long = (1e-3, 1e4) if torch.finfo(like.dtype).bits > 16 else (0.1, 1.0)
    far = long * (1.5 + torch.linspace(0.3, 9, channels, dtype=torch.float64).cos())
    return torch.stack([1 + wave, short * (wave - 0.5), far, -far])[None].to(like.dtype).to(like.device)


def _answer(module: nn.Module, tokens: Tensor) -> Tensor | None:
    """What a module makes of tokens; ``None`` where it does not take them, or gives something else back."""
    try:
        with torch.no_grad(), torch.autocast(tokens.device.type, enabled=False):
            given = module.forward(tokens)  # not the module itself: its owner's hooks are for real pictures
    except Exception:  # noqa: BLE001  what is no norm fails in its own ways
        return None
    return given if isinstance(given, Tensor) and given.shape == tokens.shape else None


def _named_eps(module: nn.Module) -> float | None:
    """Return the epsilon that a norm adds to the variance; torch's RMSNorm may have none."""
    named = (getattr(module, name, None) for name in ("eps", "variance_epsilon", "epsilon"))
    return next((float(eps) for eps in named if isinstance(eps, int | float)), None)


def _measured_eps(norm: LinearNorm, short: Tensor, given: Tensor) -> float:
    """What a norm adds to the variance, from what it divided the short token by."""
    linear = norm.linear(short)
    divided = given if norm.bias is None else given - norm.bias
    deviation = linear.square().sum() / (linear * divided).sum()
    return max(0.0, float(deviation.square() - norm.deviation(short).square()))


def _gives(norm: LinearNorm, tokens: Tensor, given: Tensor) -> bool:
    """Whether it gives what was given, to rounding."""
    expected = norm.linear(tokens) / norm.deviation(tokens)[..., None]
    if norm.bias is not None:
        expected = expected + norm.bias
    # A few roundings of the module's precision, or of float32, in which many norms work; other forms are far off.
    precision = max(torch.finfo(given.dtype).eps, torch.finfo(torch.float32).eps)
    return bool(((given - expected).abs() <= 8 * precision * expected.abs().amax(dim=-1, keepdim=True)).all())


class BlockNorms:
    """Finds the norms of the blocks of one stage.

    Args:
        trace: the run.
        stage: the stage.
        point: gives where a value is made.
    """

    def __init__(self, trace: Trace, stage: Stage, point: Callable[[Value], Point]) -> None:
        self._trace, self._stage, self._point = trace, stage, point

    def _same(self, first: Value, second: Value) -> bool:
        return same_numbers(self._trace, first, second)

    def place(
        self, start: Value, attending: ResidualWrite, writes: list[ResidualWrite], following: Value | None
    ) -> NormPlace:
        trace = self._trace
        behind = [write for write in writes if write.step.number > attending.step.number]
        continued = behind[0].source if behind else following
        moved_on = continued is not None and continued.comes_from(attending.result)
        other = moved_on and continued is not None and not self._same(continued, attending.result)
        if other and continued is not None and self._normalised_between(attending.result, continued):
            return "post"
        made = walk_back(trace, attending.branch, moves_numbers, scales)
        ends = trace.maker(made)
        # Not where tokens lie in one row with images: a linear layer with batch normalisation.
        normed = ends is not None and ends.operation in NORM and made.shape == attending.branch.shape
        if normed and _is_identity(self.first(start, attending)):
            return "branch"
        return "pre"

    def _normalised_between(self, before: Value, after: Value) -> bool:
        """Whether nothing but a norm lies between two values of the stream."""
        steps = [step for step in self._trace.between(before, after) if step.number > before.step]
        return looks_like_norm(self._trace, steps)

    def last_output(self, last: ResidualWrite, place: NormPlace) -> Value:
        """The stream behind the last block, normalised where the blocks do so themselves."""
        if place != "post":
            return last.result
        for norm in self._norms_of(last.result):
            return norm[1]
        return last.result

    def _norms_of(self, value: Value) -> list[tuple[Value, Value, int | None, nn.Module | None]]:
        """The norms that a value is given to: input, output, step and module."""
        trace = self._trace
        found: list[tuple[Value, Value, int | None, nn.Module | None]] = []
        for step in trace.steps[value.step + 1 :]:
            source = value_of(trace, step)
            if step.operation in NORM and source is not None and self._same(source, value):
                around = self._call_around(step)
                output = step.outputs[0] if around is None else around.outputs[0]
                module = None if around is None else around.module
                found.append((source, trace.values[output], step.number, module))
        behind = -1
        for call in trace.calls:
            given = [trace.values[index] for index in call.inputs]
            results = [trace.values[index] for index in call.outputs]
            if call.first < behind or not len(given) == len(results) == 1 or not self._same(given[0], value):
                continue
            steps = trace.steps[call.first : call.last]
            if given[0].shape == results[0].shape and steps and looks_like_norm(trace, steps):
                # A module may multiply with its weights by itself, behind a norm without any.
                made, behind = walk_back(trace, results[0], moves_numbers), call.last
                inside = [norm for norm in found if norm[2] is not None and call.first <= norm[2] < behind]
                for norm in inside:
                    if walk_back(trace, norm[1], moves_numbers) is not made:
                        found.remove(norm)
                found.append((given[0], results[0], None, call.module))
        return sorted(found, key=lambda norm: norm[1].index)

    def _call_around(self, step: Step) -> ModuleCall | None:
        """The call of a module that a step is all there is to, but for another dtype."""
        made = root_of(self._trace, self._trace.values[step.outputs[0]])
        for call in self._trace.calls:
            inside = call.first <= step.number < call.last and len(call.outputs) == 1
            if inside and root_of(self._trace, self._trace.values[call.outputs[0]]) is made:
                return call if not any(True for _ in call.module.children()) else None
        return None

    def _module_of(self, step: Step) -> nn.Module | None:
        """The module that a step is all there is to."""
        call = self._call_around(step)
        return None if call is None else call.module

    def first(self, start: Value, attending: ResidualWrite) -> Norm | None:
        """The norm between the stream and the first linear map of a branch."""
        trace = self._trace
        steps = trace.between(start, attending.branch)
        linear = next(
            (
                step
                for step in steps
                if is_linear(step, _depends(trace, step)) or step.operation == "scaled_dot_product_attention"
            ),
            None,
        )
        norms = self._norms_of(start)
        for source, made, step, module in norms:
            pooled = linear is None and attending.branch.comes_from(made)  # a branch that only pools
            if pooled or (linear is not None and any(trace.values[i].comes_from(made) for i in linear.operands)):
                read = [trace.values[call.output] for call in attending.attention]
                others = [other for _, other, _, _ in norms if other is not made]
                both = (value.comes_from(made) and value.comes_from(other) for value in read for other in others)
                alone = not any(both)  # attention calls side by side may have a norm each
                return Norm(self._point(source), self._point(made), step, module, alone=alone)
        if linear is not None and any(self._same(trace.values[index], start) for index in linear.operands):
            return Norm(self._point(start), self._point(start), identity=True)
        return None

    def of_block(
        self, start: Value, attending: ResidualWrite, writes: list[ResidualWrite], place: NormPlace, output: Value
    ) -> tuple[Norm | None, Norm | None]:
        trace = self._trace
        behind = [write for write in writes if write.step.number > attending.step.number]
        if place == "post":
            middle = behind[0].source if behind else output
            first = self._norm_between(attending.result, middle)
            second = self._norm_between(behind[-1].result, output) if behind else None
            return first, second
        if place == "branch":
            return self._norm_of_branch(attending), self._norm_of_branch(behind[-1]) if behind else None
        first = self.first(start, attending)
        second = self.first(branch_start(self._stage.segments, behind[0]), behind[0]) if behind else None
        del trace
        return first, second

    def _norm_between(self, before: Value, after: Value) -> Norm | None:
        for source, made, step, module in self._norms_of(before):
            if self._same(after, made):
                return Norm(self._point(source), self._point(made), step, module)
        return None

    def _norm_of_branch(self, write: ResidualWrite) -> Norm | None:
        trace = self._trace
        made = walk_back(trace, write.branch, moves_numbers, scales)
        step = trace.maker(made)
        source = None if step is None else value_of(trace, step)
        if step is None or source is None or step.operation not in NORM:
            return None
        return Norm(self._point(source), self._point(made), step.number, self._module_of(step))


def looks_like_norm(trace: Trace, steps: list[Step]) -> bool:
    """Whether steps work on a token's channels alone and divide by their length."""
    names = {step.operation for step in steps}
    lengths = {"rsqrt", "sqrt", "std", "norm", "vector_norm", "normalize", "pow", "var", "std_mean", "var_mean"}
    return bool(names & {*NORM, *lengths}) and not any(is_linear(step, _depends(trace, step)) for step in steps)


def find_written_norms(trace: Trace) -> tuple[WrittenNorm, ...]:
    """The norms over channels that modules write out in several steps."""
    found: list[WrittenNorm] = []
    for call in trace.calls:
        steps = trace.steps[call.first : call.last]
        if len(steps) < 2 or len(call.inputs) != 1 or len(call.outputs) != 1 or not looks_like_norm(trace, steps):
            continue
        given, made = trace.values[call.inputs[0]], trace.values[call.outputs[0]]
        outside = {index for step in steps for index in step.operands} - {
            index for step in steps for index in step.outputs
        }
        names = {step.operation for step in steps}
        divides = names & {"mean", "var", "var_mean", "std", "std_mean", "norm", "vector_norm"} and not names & NORM
        makers = trace.maker(given), trace.maker(made)
        whole = outside == {given.index} and given.shape == made.shape and made.step == steps[-1].number
        if divides and whole and None not in makers and not any(step.in_place for step in steps):
            points = [
                Point(step.number, step.outputs.index(value.index))
                for step, value in zip(makers, (given, made), strict=True)
                if step is not None and value.index in step.outputs
            ]
            if len(points) == 2:
                found.append(WrittenNorm(points[0], points[1], call.first))
    return tuple(found)


def _depends(trace: Trace, step: Step) -> Callable[[Any], bool]:
    tensors = {id(trace.values[index].tensor) for index in step.operands}
    return lambda value: isinstance(value, Tensor) and id(value) in tensors


def root_of(trace: Trace, value: Value) -> Value:
    """What a value was made of by moving and scaling numbers alone."""
    if value.index not in trace.roots:
        trace.roots[value.index] = walk_back(trace, value, moves_numbers, scales)
    return trace.roots[value.index]


def same_numbers(trace: Trace, first: Value, second: Value) -> bool:
    """Whether two values hold the same numbers, perhaps in another shape or scaled."""
    return root_of(trace, first) is root_of(trace, second)


def _is_identity(norm: Norm | None) -> bool:
    return norm is None or norm.identity
