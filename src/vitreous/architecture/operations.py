"""What the calls of a run do, and walks along them: aliases, scales, norms, linear maps, products of two values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitreous.architecture.trace import Step, Trace, Value, tensors_in

# The same numbers in another shape, order or dtype. Dropout is one in evaluation.
ALIAS = frozenset(
    {
        *("reshape", "view", "view_as", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel"),
        *("permute", "transpose", "movedim", "t", "T", "mT", "contiguous", "clone", "detach", "alias", "positive"),
        *("to", "type", "type_as", "float", "double", "half", "bfloat16", "dropout", "dropout1d", "dropout2d"),
        *("feature_dropout", "alpha_dropout", "requires_grad", "unsafe_chunk", "expand", "expand_as", "cpu", "cuda"),
    }
)
# A part of the numbers.
SLICE = frozenset({"getitem", "chunk", "split", "tensor_split", "unbind", "select", "narrow", "split_with_sizes"})
# The same numbers several times over.
REPEAT = frozenset({"repeat_interleave", "repeat", "tile"})
# Several values side by side.
JOIN = frozenset({"cat", "stack", "hstack", "vstack", "dstack"})
_CASTS = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16"})
NORM = frozenset({"layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "native_layer_norm"})
SCALE = frozenset({"mul", "div"})
SUM = frozenset({"add", "sub", "lerp", "addcmul", "addcdiv"})
CONVOLUTION = frozenset({"conv1d", "conv2d", "conv3d"})
MULTI_HEAD = "multi_head_attention_forward"
FUSED = "scaled_dot_product_attention"
PRODUCT = frozenset({"matmul", "bmm", "baddbmm", "einsum", "mm"})


def value_of(trace: Trace, step: Step) -> Value | None:
    """The single value that a step works on; ``None`` where it works on several different ones."""
    operands = set(step.operands)
    return trace.values[operands.pop()] if len(operands) == 1 else None


def moves_numbers(trace: Trace, step: Step, result: Value) -> Value | None:
    """The value whose numbers a step hands on unchanged, all of them; ``None`` where it does something else."""
    source = value_of(trace, step)
    same_size = source is not None and source.shape.numel() == result.shape.numel()
    if not same_size or step.in_place:
        return None
    if step.operation in ALIAS or step.operation in SLICE:
        return source
    if step.operation in {"cat", "stack"} and len(step.operands) == 1:
        return source
    # x + 0, as sum([...]) begins and switched-off terms are written.
    adds_nothing = step.operation == "add" and any(isinstance(value, int | float) and value == 0 for value in step.args)
    return source if adds_nothing else None


def adds_constant(trace: Trace, step: Step, result: Value) -> bool:
    """Whether a step adds a constant to one value, as biases are added."""
    source = value_of(trace, step)
    return step.operation == "add" and len(step.operands) == 1 and source is not None and source.shape == result.shape


def scales(trace: Trace, step: Step, result: Value) -> Value | None:
    """The value that a step multiplies with or divides by a constant."""
    source = value_of(trace, step)
    if source is None or len(step.operands) != 1 or step.operation not in SCALE:
        return None
    first_divided = step.operation == "mul" or not isinstance(step.args[0], int | float)
    return source if first_divided and source.shape == result.shape else None


Walk = Callable[[Trace, Step, Value], Value | None]


def way_back(trace: Trace, value: Value, *allowed: Walk) -> list[Value]:
    """A value and what it was made of by ``allowed`` steps alone, the latest first."""
    found = [value]
    while (step := trace.maker(value)) is not None:
        source = next((source for walk in allowed if (source := walk(trace, step, value)) is not None), None)
        if source is None or source.index >= value.index:
            break
        value = source
        found.append(value)
    return found


def walk_back(trace: Trace, value: Value, *allowed: Walk) -> Value:
    """Go from a value to what it was made of by ``allowed`` steps alone."""
    return way_back(trace, value, *allowed)[-1]


def linear_weight(step: Step, depends: Callable[[Any], bool]) -> Tensor | None:
    """The constant (out, in) that a step multiplies channels with; ``None`` where it is no such linear map."""
    return weight_of_call(step.operation, step.args, step.kwargs, depends)


def weight_of_call(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], depends: Callable[[Any], bool]
) -> Tensor | None:
    """The same of any call by the name of its operation."""

    def argument(position: int, keyword: str) -> Any:
        return args[position] if len(args) > position else kwargs.get(keyword)

    weight: Any = None
    if name == "linear":
        weight = argument(1, "weight")
    elif name in {"matmul", "mm"} and len(args) == 2 and isinstance(args[1], Tensor) and args[1].dim() == 2:
        weight = args[1].T
    elif name == "addmm" and len(args) == 3 and isinstance(args[2], Tensor):
        weight = args[2].T
    elif name in CONVOLUTION:
        weight = argument(1, "weight")
        pointwise = isinstance(weight, Tensor) and all(size == 1 for size in weight.shape[2:])
        weight = weight.flatten(1) if pointwise and kwargs.get("groups", args[6] if len(args) > 6 else 1) == 1 else None
    elif name == "einsum":
        weight = _einsum_weight(args, depends)
    usable = isinstance(weight, Tensor) and not depends(weight) and weight.dim() == 2
    return weight if usable else None


def _einsum_weight(args: tuple[Any, ...], depends: Callable[[Any], bool]) -> Tensor | None:
    """The constant of an einsum as (out, in); channels may have several axes, which are the last ones."""
    operands = list(tensors_in(args[1:]))
    if not isinstance(args[0], str) or len(operands) != 2 or depends(operands[0]) == depends(operands[1]):
        return None
    inputs, _, output = args[0].replace(" ", "").partition("->")
    names = inputs.split(",")
    at = 1 if depends(operands[0]) else 0
    constant, other = names[at], names[1 - at]
    contracted = "".join(letter for letter in other if letter in constant and letter not in output)
    made = "".join(letter for letter in output if letter in constant)
    known = set(constant) == set(contracted + made) and contracted and made and not set(made) & set(other)
    if not known or not other.endswith(contracted) or not output.endswith(made):
        return None
    order = [constant.index(letter) for letter in made + contracted]
    return operands[at].permute(order).flatten(0, len(made) - 1).flatten(1)


def trailing_axes(shape: Sequence[int], numbers: int) -> int:
    """How many of the last axes have so many numbers together."""
    count = 1
    while math.prod(shape[-count:]) < numbers and count < len(shape):
        count += 1
    return count


def is_linear(step: Step, depends: Callable[[Any], bool]) -> bool:
    """Whether a step multiplies one value with constants: a linear layer or a convolution."""
    if step.operation in CONVOLUTION or step.operation == "linear":
        return True
    if step.operation == MULTI_HEAD:
        return True
    if step.operation in {*PRODUCT, "addmm"}:
        return len({*step.operands}) == 1 and sum(map(depends, tensors_in(step.args))) == 1
    return False


@dataclass(frozen=True)
class Axes:
    """The axes of a product of two tensors, by letters: the same letter is the same axis.

    Attributes:
        left: of the first operand.
        right: of the second operand.
        output: of the result.
    """

    left: str
    right: str
    output: str

    @property
    def contracted(self) -> str:
        """The axes that are summed over."""
        return "".join(letter for letter in self.left if letter in self.right and letter not in self.output)

    @property
    def batch(self) -> str:
        """The axes along which there are separate products, in the order of the result."""
        return "".join(letter for letter in self.output if letter in self.left and letter in self.right)

    def swapped(self) -> Axes:
        """The same product with its operands exchanged."""
        return Axes(self.right, self.left, self.output)


def product_operands(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The two tensors that a product multiplies."""
    if name == "einsum":
        operands = list(tensors_in(args[1:]))
    elif name == "baddbmm":
        operands = list(tensors_in((args[1:], kwargs.get("batch1"), kwargs.get("batch2"))))
    else:
        operands = list(tensors_in((args, {key: kwargs[key] for key in ("other", "mat2") if key in kwargs})))
    return (operands[0], operands[1]) if len(operands) == 2 else None


def product_axes(name: str, args: tuple[Any, ...], left: Tensor, right: Tensor) -> Axes | None:
    """The axes of a product; ``None`` where it is none of two matrices."""
    if name == "einsum":
        return _einsum_axes(args[0], left, right) if isinstance(args[0], str) else None
    if min(left.dim(), right.dim()) < 2:
        return None
    letters = "".join(chr(ord("A") + place) for place in range(max(left.dim(), right.dim()) - 2))
    return Axes(
        letters[len(letters) + 2 - left.dim() :] + "ik",
        letters[len(letters) + 2 - right.dim() :] + "kj",
        letters + "ij",
    )


def _einsum_axes(equation: str, left: Tensor, right: Tensor) -> Axes | None:
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if len(names) != 2 or not arrow:
        return None
    dots = ""  # the axes that an ellipsis stands for, aligned at its end
    for place, operand in enumerate((left, right)):
        count = operand.dim() - len(names[place].replace("...", ""))
        own = "0123456789"[10 - count :] if count else ""
        names[place], dots = names[place].replace("...", own), max(dots, own, key=len)
    return Axes(names[0], names[1], output.replace("...", dots))


def to_letters(tensor: Tensor, axes: str, wanted: str) -> Tensor:
    """A tensor with its axes in another order; those that it does not have get size 1."""
    tensor = tensor.permute([axes.index(letter) for letter in wanted if letter in axes])
    for place, letter in enumerate(wanted):
        if letter not in axes:
            tensor = tensor.unsqueeze(place)
    return tensor


def replay(trace: Trace, start: Value, end: Value) -> Tensor | None:
    """Where the numbers of ``end`` stood in ``start``, as flat indices; ``None`` where they were not only moved."""
    return replay_from(trace, [start], end)


def replay_from(trace: Trace, starts: Sequence[Value], end: Value, *, loosely: bool = False) -> Tensor | None:
    """The same of several values, as indices into all of them, flat and one behind the other.

    ``loosely`` also where constants were added to the numbers or put beside them (-1), or they were repeated.
    """
    found: dict[int, Tensor] = {}
    first = 0
    for start in starts:
        found[start.index] = torch.arange(first, first + start.shape.numel()).reshape(start.shape)
        first += start.shape.numel()
    known = {step.number: step for start in starts for step in trace.between(start, end)}
    for _, step in sorted(known.items()):
        if step.in_place or not found.keys() >= set(step.operands):
            continue
        if loosely and step.outputs and adds_constant(trace, step, trace.values[step.outputs[0]]):
            found[step.outputs[0]] = found[step.operands[0]]
        elif step.operation in ALIAS | SLICE | JOIN or (loosely and step.operation in REPEAT):
            results = _moved(trace, step, found, loosely=loosely)
            if len(results) == len(step.outputs):
                found.update(zip(step.outputs, results, strict=True))
    return found.get(end.index)


def _moved(trace: Trace, step: Step, found: dict[int, Tensor], *, loosely: bool = False) -> list[Tensor]:
    """What a step that only moves numbers makes of indices; nothing, if it mixes them with other numbers."""
    if step.operation in _CASTS or "dropout" in step.operation:
        return [found[step.operands[0]]]
    new = {id(trace.values[index].tensor): found[index] for index in step.operands}
    if loosely and step.operation in JOIN:
        beside = [part for part in tensors_in(step.args) if id(part) not in new]
        new |= {id(part): torch.full(part.shape, -1) for part in beside}
    args, kwargs = _replaced(step.args, new), _replaced(step.kwargs, new)
    if step.operation in JOIN and any(part.is_floating_point() for part in tensors_in((args, kwargs))):
        return []
    return list(tensors_in(step.func(*args, **kwargs)))


def made_of_input(trace: Trace, value: Value, *, nested: bool = True) -> Tensor:
    """Which numbers of a value were made from the model's input, and not put beside it: tokens of the model's own.

    Without ``nested`` only the last join counts: what it joins to constants is taken as made from the input.
    """
    step = trace.maker(value)
    sources = [] if step is None else [trace.values[index] for index in dict.fromkeys(step.operands)]
    everything = torch.ones(value.shape, dtype=torch.bool)
    if step is None or step.in_place or value.index not in step.outputs or max(s.index for s in sources) >= value.index:
        return everything
    by_token = len(sources) == 1 and _gives_channels_last(trace, step)
    in_place = len(sources) == 1 and step.operation in {*NORM, "add", "mul", "div", "sub"}
    if not by_token and not in_place and step.operation not in ALIAS | SLICE | JOIN:
        return everything
    if nested or step.operation not in JOIN:
        below = [made_of_input(trace, source, nested=nested) for source in sources]
    else:
        below = [torch.ones(source.shape, dtype=torch.bool) for source in sources]
    if by_token:
        return below[0].any(dim=-1, keepdim=True).expand(value.shape)
    if in_place or step.operation in _CASTS or "dropout" in step.operation:
        return below[0] if sources[0].shape == value.shape else everything
    new = {id(source.tensor): made for source, made in zip(sources, below, strict=True)}
    if step.operation in JOIN:
        beside = [part for part in tensors_in(step.args) if id(part) not in new]
        new |= {id(part): torch.zeros(part.shape, dtype=torch.bool) for part in beside}
    results = list(tensors_in(step.func(*_replaced(step.args, new), **step.kwargs)))
    return results[step.outputs.index(value.index)] if len(results) == len(step.outputs) else everything


def runs_over_channels(trace: Trace, value: Value, axis: int) -> bool:
    """Whether an axis of a value is one of the channels that the last linear layer in front of it gave.

    Only where that is certain: activations and norms on the way keep the axes, anything else leaves it open.
    """
    way: list[tuple[Step, Value, Value]] = []
    while (step := trace.maker(value)) is not None and not _gives_channels_last(trace, step):
        operands = [trace.values[index] for index in step.operands]
        if step.operation in ALIAS | SLICE:
            source = operands[0] if len(operands) == 1 else None
        else:
            source = next((operand for operand in operands if operand.shape == value.shape), None)
        if source is None or source.index >= value.index or step.in_place:
            return False
        way.append((step, source, value))
        value = source
    if step is None:
        return False
    channels = value.shape[-1]
    places = torch.arange(value.shape.numel()).reshape(value.shape)
    for each, source, result in reversed(way):
        if each.operation in ALIAS | SLICE:
            moved = _moved(trace, each, {source.index: places})
            places = moved[each.outputs.index(result.index)]
    if places.shape[axis] < 2:
        return False
    distance = int((places.select(axis, 1) - places.select(axis, 0)).flatten()[0])
    return 0 < abs(distance) < channels


def _gives_channels_last(trace: Trace, step: Step) -> bool:
    """Whether a step is a linear layer whose channels lie along its last axis."""
    if step.operation == "linear":
        return True
    tensors = {id(trace.values[index].tensor) for index in step.operands}
    return step.operation in {"matmul", "mm", "addmm"} and linear_weight(step, lambda x: id(x) in tensors) is not None


def _replaced(given: Any, new: dict[int, Tensor]) -> Any:
    if isinstance(given, Tensor):
        return new.get(id(given), given)
    if isinstance(given, dict):
        return {key: _replaced(value, new) for key, value in given.items()}
    if type(given) in (list, tuple):
        return type(given)(_replaced(value, new) for value in given)
    return given
