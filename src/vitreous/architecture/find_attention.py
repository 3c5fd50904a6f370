"""Finding attention calls in a run, however they are written: fused, or as a product of weights with values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from vitreous.architecture.attention import AttentionCall, ScoreStep, free_axes
from vitreous.architecture.operations import (
    ALIAS,
    FUSED,
    MULTI_HEAD,
    PRODUCT,
    SCALE,
    Axes,
    linear_weight,
    made_of_input,
    moves_numbers,
    product_axes,
    product_operands,
    runs_over_channels,
    scales,
    way_back,
)
from vitreous.architecture.trace import Step, Trace, Value

# What makes weights of scores and leaves them weights: a softmax, masks, dropout, mixing of heads.
_SOFTMAX = frozenset({"softmax", "softmin", "log_softmax"})
# Of two values, or of a part of one, and still scores or weights: masks, sums that they are divided by, parts of heads.
_ON_SCORES = frozenset({"mul", "where", "masked_fill", "getitem", "scatter", "div", "sub", "chunk", "split"})


def find_attention(trace: Trace) -> list[AttentionCall]:
    """All attention calls of a run, in order."""
    found: list[AttentionCall] = []
    scores = _Scores(trace)
    for step in trace.steps:
        if step.operation == FUSED:
            found.append(_fused(trace, step))
        elif step.operation == MULTI_HEAD:
            found.append(_multi_head(step))
        else:
            call = scores.follow(step)
            if call is not None:
                found.append(call)
    return [call for call in found if call.queries and call.keys]  # where a model has dropped all tokens there is none


def _fused(trace: Trace, step: Step) -> AttentionCall:
    query, key = step.argument(0, "query"), step.argument(1, "key")
    rows = query.shape[:-2].numel()
    mixed = step.argument(2, "value")
    value = next((trace.values[index] for index in step.operands if trace.values[index].tensor is mixed), None)
    over_tokens = value is None or not runs_over_channels(trace, value, -2)
    found = AttentionCall(
        "fused", step.number, step.outputs[0], query.shape[-2], key.shape[-2], rows, over_tokens=over_tokens
    )
    return found if value is None else replace(found, key_tokens=_key_tokens(trace, value, -2, found.queries))


def _multi_head(step: Step) -> AttentionCall:
    query, key = step.argument(0, "query"), step.argument(1, "key")
    heads = int(step.argument(4, "num_heads", 1))
    batch = query.shape[1] if query.dim() == 3 else 1
    return AttentionCall("multi_head", step.number, step.outputs[0], query.shape[0], key.shape[0], batch * heads)


@dataclass
class _Origin:
    """Where scores or weights come from.

    Attributes:
        product: the step that gave q kᵀ.
        softmax: the step that made weights of scores, if one did; of one written out, the division.
        entered: the value that it got.
        learned: whether one operand of the product is a constant: a query that is learned, if a softmax follows over
            the other's tokens; else a projection.
    """

    product: int
    softmax: int = -1
    entered: int = -1
    learned: bool = False


class _Scores:
    """Follows products of two values on their way to a product with values."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._origins: dict[int, _Origin] = {}
        self._exponentials: dict[int, int] = {}  # by value: the value that was exponentiated
        self._sums: dict[int, int] = {}  # by value: the value whose exponentials were summed

    def follow(self, step: Step) -> AttentionCall | None:
        """Note what a step does to scores or weights; an attention call, if it multiplies weights with values."""
        trace = self._trace
        known = [index for index in step.operands if index in self._origins]
        if step.operation in PRODUCT and len(set(step.operands)) == 2:
            known = self._without_projections(known)
            call = self._product(step, known)
            if call is not None or not known:
                return call
        elif step.operation in PRODUCT and not known:
            self._product_with_constant(step)
            return None
        if not known or not step.outputs or self._leaves_scores(step, known[0]):
            return None
        self._softmax_by_hand(step)
        origin = self._origins[known[0]]
        others = [index for index in step.operands if index not in self._origins]
        result = trace.values[step.outputs[0]]
        smaller = result.shape.numel() < trace.values[known[0]].shape.numel()
        if (smaller or (others and step.operation != "add")) and step.operation not in _ON_SCORES:
            return None
        if step.operation in _SOFTMAX:
            origin = replace(origin, softmax=step.number, entered=known[0])
        elif step.operation == "div" and step.outputs[0] in self._sums:
            entered = self._before_maximum(self._sums[step.outputs[0]])
            origin = replace(origin, softmax=step.number, entered=entered)
        for index in step.outputs:
            self._origins[index] = origin
        return None

    def _before_maximum(self, entered: int) -> int:
        """The scores from which the largest was taken off before they were exponentiated, if it was."""
        step = self._trace.maker(self._trace.values[entered])
        taken_off = step is not None and step.operation == "sub" and len(step.operands) == 2
        return step.operands[0] if step is not None and taken_off and _takes_off_maximum(self._trace, step) else entered

    def _leaves_scores(self, step: Step, known: int) -> bool:
        """Whether a linear map takes scores or weights for channels; one over heads only mixes these."""
        tensors = {id(self._trace.values[index].tensor) for index in step.operands}
        weight = linear_weight(step, lambda value: id(value) in tensors)
        if weight is None:
            return False
        product = self._trace.steps[self._origins[known].product]
        rows = self._trace.values[product.outputs[0]].shape[:-2].numel()
        return weight.shape[1] != rows // self._trace.batch

    def _softmax_by_hand(self, step: Step) -> None:
        """exp(s) / Σ exp(s)."""
        if step.operation == "exp":
            self._exponentials[step.outputs[0]] = step.operands[0]
        elif step.operation == "sum" and step.operands[0] in self._exponentials:
            self._sums[step.outputs[0]] = self._exponentials[step.operands[0]]
            self._origins.setdefault(step.outputs[0], self._origins[step.operands[0]])
        elif step.operation == "div" and len(step.operands) == 2:
            above, below = step.operands
            if above in self._exponentials and self._sums.get(below) == self._exponentials[above]:
                self._sums[step.outputs[0]] = self._exponentials[above]
        elif step.operation in ALIAS and step.operands and step.operands[0] in self._exponentials:
            self._exponentials[step.outputs[0]] = self._exponentials[step.operands[0]]

    def _without_projections(self, known: list[int]) -> list[int]:
        """Forget products with constants that no softmax over tokens followed."""
        for index in known:
            origin = self._origins[index]
            if origin.learned and not self._asks_by_constant(origin):
                del self._origins[index]
        return [index for index in known if index in self._origins]

    def _product_with_constant(self, step: Step) -> None:
        operands = product_operands(step.operation, step.args, step.kwargs)
        axes = None if operands is None else product_axes(step.operation, step.args, *operands)
        if axes is not None and len(axes.contracted) == 1 and step.outputs:
            self._origins[step.outputs[0]] = _Origin(step.number, learned=True)

    def _asks_by_constant(self, origin: _Origin) -> bool:
        """Whether the softmax runs over what a learned query was multiplied with."""
        score = self._trace.steps[origin.product]
        operands = product_operands(score.operation, score.args, score.kwargs)
        if origin.softmax < 0 or operands is None:
            return False
        axes = product_axes(score.operation, score.args, *operands)
        entered, product = self._trace.values[origin.entered], self._trace.values[score.outputs[0]]
        first_is_constant = self._indices(score, operands)[0] is None
        return (
            axes is not None
            and entered.shape == product.shape
            and self._query_first(score, axes, origin) == first_is_constant
        )

    def _product(self, step: Step, known: list[int]) -> AttentionCall | None:
        operands = product_operands(step.operation, step.args, step.kwargs)
        if operands is None:
            return None
        axes = product_axes(step.operation, step.args, *operands)
        if axes is None or len(axes.contracted) != 1:
            return None
        left, right = self._indices(step, operands)
        if left is None or right is None:
            return None
        if not known:
            self._origins[step.outputs[0]] = _Origin(step.number)
            return None
        if left in self._origins and right in self._origins:
            return None
        weights_first = left in self._origins
        return self._attention(step, axes if weights_first else axes.swapped(), operands, (left, right), weights_first)

    def _indices(self, step: Step, operands: tuple[Tensor, Tensor]) -> tuple[int | None, int | None]:
        """The values of two operands."""
        by_tensor = {id(self._trace.values[index].tensor): index for index in step.operands}
        return by_tensor.get(id(operands[0])), by_tensor.get(id(operands[1]))

    def _attention(
        self,
        step: Step,
        axes: Axes,
        operands: tuple[Tensor, Tensor],
        indices: tuple[int | None, int | None],
        weights_first: bool,  # noqa: FBT001
    ) -> AttentionCall | None:
        trace = self._trace
        weights = operands[0 if weights_first else 1]
        place = indices[0 if weights_first else 1]
        assert place is not None
        origin = self._origins[place]
        if origin.softmax < 0 and (origin.learned or self._is_exponential(place)):
            return None  # divided by the sums behind the values: A itself is nowhere
        contracted = axes.contracted
        if not 1 <= len(free_axes(axes)) <= 2:
            return None
        score = trace.steps[origin.product]
        score_operands = product_operands(score.operation, score.args, score.kwargs)
        assert score_operands is not None
        score_axes = product_axes(score.operation, score.args, *score_operands)
        assert score_axes is not None
        query_first = self._query_first(score, score_axes, origin)
        score_axes = score_axes if query_first else score_axes.swapped()
        query = score_operands[0 if query_first else 1]
        looking, query_axis = self._query_axes(score, score_axes, query, axes, weights)
        queries, keys = weights.shape[axes.left.index(query_axis)], weights.shape[axes.left.index(contracted)]
        steps = self._score_steps(origin)
        value = indices[1 if weights_first else 0]
        assert value is not None
        over_tokens = not runs_over_channels(trace, trace.values[value], axes.right.index(contracted) - len(axes.right))
        rows = weights.numel() // max(queries * keys, 1)
        return AttentionCall(
            "written",
            step.number,
            step.outputs[0],
            queries,
            keys,
            rows,
            axes,
            weights_first,
            origin.product,
            score_axes,
            query_first,
            origin.softmax,
            steps,
            self._plain(origin, place),
            trace.values[origin.entered].step if origin.softmax >= 0 else -1,
            self._own_steps(origin, place),
            query_scales=self._scales(score, query),
            key_scales=self._scales(score, score_operands[1 if query_first else 0]),
            over_tokens=over_tokens,
            scores_alone=self._made_of_scores(origin, place),
            query_axes=(looking, query_axis),
            head_sizes=self._head_sizes(score, score_axes, query, looking),
            key_tokens=_key_tokens(trace, trace.values[value], axes.right.index(contracted), queries),
        )

    def _query_axes(self, score: Step, score_axes: Axes, query: Tensor, axes: Axes, weights: Tensor) -> tuple[str, str]:
        """The axis of the tokens that look, in q kᵀ and in A v; heads that share keys have one there, too."""
        trace, product = self._trace, self._trace.values[score.outputs[0]].shape
        asking, weighing = free_axes(score_axes), free_axes(axes)
        value = next((trace.values[index] for index in score.operands if trace.values[index].tensor is query), None)
        if len(asking) > 1 and value is not None:
            asking = [each for each in asking if not self._is_head(value, score_axes.left, each)] or asking
        if len(weighing) > 1 and product == weights.shape:
            same_place = axes.left[score_axes.output.index(asking[-1])]
            weighing = [same_place] if same_place in weighing else weighing
        return asking[-1], weighing[-1]

    def _head_sizes(self, score: Step, axes: Axes, query: Tensor, looking: str) -> tuple[int, ...]:
        """The sizes of several axes of heads, (batch, group, head of it, ...); nothing for one, or for windows."""
        trace, product = self._trace, self._trace.values[score.outputs[0]].shape
        last = (looking, free_axes(axes.swapped())[-1])
        ahead = [letter for letter in axes.output if letter not in last]
        value = next((trace.values[index] for index in score.operands if trace.values[index].tensor is query), None)
        if len(ahead) < 3 or value is None or product[axes.output.index(ahead[0])] != trace.batch:
            return ()
        heads = all(letter in axes.left and self._is_head(value, axes.left, letter) for letter in ahead[1:])
        return tuple(product[axes.output.index(letter)] for letter in ahead[1:]) if heads else ()

    def _is_head(self, value: Value, axes: str, letter: str) -> bool:
        return runs_over_channels(self._trace, value, axes.index(letter) - len(axes))

    def _made_of_scores(self, origin: _Origin, weights: int) -> bool:
        """Whether nothing else that depends on the input enters between q kᵀ and the weights."""
        product = self._trace.values[self._trace.steps[origin.product].outputs[0]]
        operands = (
            index for number in self._own_steps(origin, weights) for index in self._trace.steps[number].operands
        )
        return all(self._trace.values[index].comes_from(product) for index in operands)

    def _is_exponential(self, place: int) -> bool:
        """Whether weights are exponentials that were not divided by their sum."""
        value = self._trace.values[place]
        while (step := self._trace.maker(value)) is not None and step.operation in ALIAS:
            value = self._trace.values[step.operands[0]]
        return value.index in self._exponentials or (step is not None and step.operation == "exp")

    def _query_first(self, score: Step, axes: Axes, origin: _Origin) -> bool:
        """Whether the query is the first operand of q kᵀ: its axis is not the one that the softmax runs over."""
        free = [letter for letter in axes.output if (letter in axes.left) != (letter in axes.right)]
        if len(free) != 2 or origin.softmax < 0:
            return True
        softmax = self._trace.steps[origin.softmax]
        axis = softmax.argument(1, "dim", -1) if softmax.operation in _SOFTMAX else -1
        entered = self._trace.values[origin.entered]
        product = self._trace.values[score.outputs[0]]
        if not isinstance(axis, int) or entered.shape != product.shape:
            return free[-1] in axes.right
        return axes.output[axis] in axes.right

    def _score_steps(self, origin: _Origin) -> tuple[ScoreStep, ...] | None:
        """What was done to q kᵀ before the softmax."""
        if origin.softmax < 0:
            return None
        trace = self._trace
        start = trace.values[trace.steps[origin.product].outputs[0]]
        end = trace.values[origin.entered]
        if (
            trace.steps[origin.product].operation == "baddbmm"
            and trace.steps[origin.product].kwargs.get("beta", 1) != 0
        ):
            return None
        between = [step for step in trace.between(start, end) if step.number != origin.product]
        beside = self._only_for_maxima(start, between)
        found: list[ScoreStep] = []
        for step in between:
            kind = "same" if step.number in beside else _score_kind(trace, step)
            if kind is None:
                return None
            found.append(ScoreStep(step.number, kind))
        return tuple(found)

    def _only_for_maxima(self, start: Value, steps: list[Step]) -> set[int]:
        """The steps that lead to nothing but the largest scores, which are taken off: (2 s) - max(2 s) doubles once."""
        found: set[int] = set()
        for step in steps:
            if step.operation == "sub" and len(set(step.operands)) == 2 and _takes_off_maximum(self._trace, step):
                kept = {each.number for each in self._trace.between(start, self._trace.values[step.operands[0]])}
                found |= {each.number for each in steps if each.number < step.number} - kept
        return found

    def _scales(self, score: Step, operand: Tensor) -> tuple[int, ...]:
        """The steps by which an operand of q kᵀ was multiplied with constants."""
        trace = self._trace
        value = next((trace.values[index] for index in score.operands if trace.values[index].tensor is operand), None)
        if value is None:
            return ()  # a query that is learned
        way = way_back(trace, value, moves_numbers, scales)
        return tuple(each.step for each in way[:-1] if trace.steps[each.step].operation in SCALE)

    def _own_steps(self, origin: _Origin, weights: int) -> frozenset[int]:
        """The steps between q kᵀ and the product with the values."""
        start = self._trace.values[self._trace.steps[origin.product].outputs[0]]
        between = self._trace.between(start, self._trace.values[weights])
        return frozenset(step.number for step in between) - {origin.product}

    def _plain(self, origin: _Origin, weights: int) -> bool:
        """Whether nothing but aliases stands between softmax and values."""
        if origin.softmax < 0:
            return False
        trace = self._trace
        start, end = trace.values[trace.steps[origin.softmax].outputs[0]], trace.values[weights]
        between = [step for step in trace.between(start, end) if step.number != origin.softmax]
        logarithms = trace.steps[origin.softmax].operation == "log_softmax"
        return all(step.operation in ALIAS or (logarithms and step.operation == "exp") for step in between)


def _key_tokens(trace: Trace, values: Value, axis: int, queries: int) -> tuple[int, ...]:
    """Which of the values along an axis are made of the input, where there are more of them than queries."""
    if values.shape[axis] <= queries:
        return ()
    made = made_of_input(trace, values, nested=False).movedim(axis, 0).flatten(1).any(dim=1)
    return () if bool(made.all()) else tuple(made.nonzero().flatten().tolist())


def _score_kind(trace: Trace, step: Step) -> Literal["scale", "bias", "mask", "same"] | None:
    if len(set(step.operands)) != 1:
        # Subtracting the largest score, as a written-out softmax does, changes no weight.
        return "same" if step.operation == "sub" and _takes_off_maximum(trace, step) else None
    if step.operation in {*ALIAS, "amax", "max"}:
        return "same"
    if len(step.operands) != 1 or (step.operation == "add" and step.kwargs):
        return None
    kinds: dict[str, Literal["scale", "bias", "mask"]] = {"add": "bias", "masked_fill": "mask", "where": "mask"}
    return "scale" if step.operation in SCALE else kinds.get(step.operation)


def _takes_off_maximum(trace: Trace, step: Step) -> bool:
    taken = trace.values[step.operands[1]]
    while (maker := trace.maker(taken)) is not None and maker.operation in {*ALIAS, "getitem"}:
        taken = trace.values[maker.operands[0]]
    return maker is not None and maker.operation in {"amax", "max"}
