"""The norms of the blocks of one stage: where they stand, and what they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from vitreous.architecture.description import Norm, NormPlace, Point
from vitreous.architecture.operations import NORM, is_linear, moves_numbers, scales, value_of, walk_back
from vitreous.architecture.stream import ResidualWrite, Stage, branch_start
from vitreous.architecture.trace import ModuleCall, Step, Trace, Value


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
        ends = trace.maker(walk_back(trace, attending.branch, moves_numbers, scales))
        if ends is not None and ends.operation in NORM and _is_identity(self.first(start, attending)):
            return "branch"
        return "pre"

    def _normalised_between(self, before: Value, after: Value) -> bool:
        """Whether nothing but a norm lies between two values of the stream."""
        steps = [step for step in self._trace.between(before, after) if step.number > before.step]
        return self._looks_like_norm(steps)

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
            if given[0].shape == results[0].shape and steps and self._looks_like_norm(steps):
                # A module may multiply with its weights by itself, behind a norm without any.
                made, behind = walk_back(trace, results[0], moves_numbers), call.last
                inside = [norm for norm in found if norm[2] is not None and call.first <= norm[2] < behind]
                for norm in inside:
                    if walk_back(trace, norm[1], moves_numbers) is not made:
                        found.remove(norm)
                found.append((given[0], results[0], None, call.module))
        return sorted(found, key=lambda norm: norm[1].index)

    def _looks_like_norm(self, steps: list[Step]) -> bool:
        """Whether steps work on a token's channels alone and divide by their length."""
        names = {step.operation for step in steps}
        lengths = {"rsqrt", "sqrt", "std", "norm", "vector_norm", "normalize", "pow", "var", "std_mean", "var_mean"}
        return bool(names & {*NORM, *lengths}) and not any(is_linear(step, self._depends(step)) for step in steps)

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
                if is_linear(step, self._depends(step)) or step.operation == "scaled_dot_product_attention"
            ),
            None,
        )
        for source, made, step, module in self._norms_of(start):
            pooled = linear is None and attending.branch.comes_from(made)  # a branch that only pools
            if pooled or (linear is not None and any(trace.values[i].comes_from(made) for i in linear.operands)):
                return Norm(self._point(source), self._point(made), step, module)
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

    def _depends(self, step: Step) -> Callable[[Any], bool]:
        tensors = {id(self._trace.values[index].tensor) for index in step.operands}
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
