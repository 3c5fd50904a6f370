"""In-place operations on the residual stream: which have to run on a copy, so that what stood there is not lost."""

from __future__ import annotations

from collections.abc import Iterable

from vitreous.architecture.description import Block, Point
from vitreous.architecture.operations import moves_numbers, way_back
from vitreous.architecture.trace import Trace, memory_of
from vitreous.errors import UnsupportedModelError


def find_overwriting(trace: Trace, blocks: Iterable[Block], name: str) -> frozenset[int]:
    """The steps that change the stream of some block in place.

    Raises:
        UnsupportedModelError: the stream is changed through a view, or is read through one afterwards, so that a copy
            would not be seen by all who read it.
    """
    kept, writes, embedded = set[int](), set[int](), set[int]()
    for block in blocks:
        points = [block.input, block.residual_mid, block.residual_post, block.output]
        points += [norm.output for norm in (block.first_norm, block.second_norm) if norm is not None]
        kept.update(_value_at(trace, point) for point in points if point.step >= 0)
        writes.update(block.writes)
        start = trace.values[_value_at(trace, block.input)] if block.input.step >= 0 else trace.values[0]
        embedded |= {value.index for value in way_back(trace, start, moves_numbers)}
    memory = {memory_of(trace.values[index].tensor): index for index in sorted(kept, reverse=True)}  # the earliest
    found, makes = set[int](), set[int]()
    for step in trace.steps:
        if not step.in_place:
            continue
        if step.number in writes or step.operands[0] in kept:
            found.add(step.number)
        elif step.outputs[0] in embedded:
            makes.add(step.number)  # positions that are added in place, perhaps
        elif memory.get(memory_of(trace.values[step.operands[0]].tensor), step.outputs[0]) < step.outputs[0]:
            raise changed_through_a_view(name)
    read_elsewhere = (trace.values[parent].step for index in trace.stale for parent in trace.values[index].parents)
    read = set(read_elsewhere)
    if found & read:
        raise changed_through_a_view(name)
    return frozenset(found | (makes - read))


def _value_at(trace: Trace, point: Point) -> int:
    return trace.steps[point.step].outputs[point.output]


def changed_through_a_view(name: str) -> UnsupportedModelError:
    """What is wrong with a stream that another tensor of the same memory changes."""
    return UnsupportedModelError(
        f"{name} changes tokens in place through a view of them, so that those in front of its blocks are lost; make a "
        "new tensor instead (x = x + y, torch.cat)"
    )
