"""Which axis of a tensor holds the channels."""

from __future__ import annotations

import torch
from torch import Tensor

from vitreous.architecture.operations import MULTI_HEAD, moves_numbers, replay, walk_back
from vitreous.architecture.trace import Step, Trace, Value


def channel_axis(trace: Trace, root: Value) -> int | None:
    """The axis along which the first layer behind a value multiplies or normalises."""
    dims = len(root.shape)
    for step in trace.steps[root.step + 1 :]:
        for index in step.operands:
            given = trace.values[index]
            same = walk_back(trace, given, moves_numbers) is walk_back(trace, root, moves_numbers)
            if not given.comes_from(root) or not same:
                continue
            axis = _layer_axis(step, given)
            if axis is None:
                continue
            moved = replay(trace, root, given) if given is not root else None
            if given is root or moved is None:
                return axis % len(given.shape) if given is root or len(given.shape) == dims else dims - 1
            return _axis_of_step(moved, axis, root.shape)
    return _axis_of_neighbours(trace, root) if dims == 4 else None


def _axis_of_neighbours(trace: Trace, root: Value) -> int | None:
    """The axis by the first layer behind a grid that works on one of the same size, made of it by whatever steps."""
    for step in trace.steps[root.step + 1 :]:
        for given in (trace.values[index] for index in step.operands):
            axis = _layer_axis(step, given) if len(given.shape) == 4 and given.comes_from(root) else None
            if axis == 1 and given.shape[2:] == root.shape[2:]:
                return 1
            if axis == -1 and given.shape[1:3] == root.shape[1:3]:
                return 3
    return None


def _layer_axis(step: Step, given: Value) -> int | None:
    if step.operation in {"layer_norm", "rms_norm", "linear", MULTI_HEAD, "native_layer_norm", "normalize"}:
        return -1
    if step.operation in {"matmul", "addmm", "mm"} and len(step.operands) == 1:
        return -1
    if step.operation in {"conv1d", "conv2d", "conv3d", "batch_norm", "group_norm", "instance_norm"}:
        return 1 if len(given.shape) > 2 else -1
    if step.operation in {"mean", "var", "var_mean", "std", "std_mean", "norm", "vector_norm"}:
        axis = step.argument(1, "dim") if step.kwargs.get("keepdim") else None
        return axis if isinstance(axis, int) else axis[0] if isinstance(axis, list | tuple) and len(axis) == 1 else None
    return None


def _axis_of_step(moved: Tensor, axis: int, shape: torch.Size) -> int:
    """Along which axis of ``shape`` one goes, going along ``axis`` of a tensor of flat indices."""
    if moved.shape[axis] < 2:
        return len(shape) - 1
    distance = int((moved.select(axis, 1) - moved.select(axis, 0)).flatten()[0])
    strides = [shape[place + 1 :].numel() for place in range(len(shape))]
    return strides.index(distance) if distance in strides else len(shape) - 1
