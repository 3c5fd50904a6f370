"""Where gradients end: at kernels without a backward pass, such as those of quantised layers.

Autograd raises no error there: the gradient goes on along the residual stream, past the call, and maps would look
plausible and be wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from vitreous.architecture.trace import AS_ANOTHER, is_factory, tensors_in
from vitreous.tape.recording.interception import Progress, TorchCall, in_graph
from vitreous.tape.recording.plan import PIXELS, Needs

# What gives numbers without a gradient on purpose; by name, for most exist as a function and as a method.
_CONSTANT = {"__get__", "__set__", "detach", "detach_", "tensor", "as_tensor", "asarray", "scalar_tensor"}
_BELOW = "_vitreous_below_graph"  # the mark of tensors that a graph from the input on would hold, and this one does not
_NO_KERNEL = "WarnNotImplemented"  # autograd's own mark of an operator that was registered without a way back


class GradientBreaks:
    """Notes the calls at which gradients end, by the block in which that happens.

    With ``marks_below`` also what was made from the model's input below the start of the graph: it has no gradient, and
    is no constant.
    """

    def __init__(self, progress: Progress, *, marks_below: bool = False) -> None:
        self._progress, self._marks_below = progress, marks_below
        self._names: dict[int, str] = {}

    def behind(self, layer: int | None) -> str | None:
        """Why a gradient that has to reach a layer does not; ``None`` where it does, or none has to."""
        last = max(self._names, default=None)
        if layer is None or last is None or last < layer:
            return None
        where = "in front of its blocks"
        if last >= 0:
            where = "behind its blocks" if last == self._progress.depth else f"in block {last}"
        return (
            f"its {self._names[last]}() {where} has no gradient (a quantised layer, or a kernel for the forward pass "
            "alone), so that only what leads past it would be seen"
        )

    def gap_of(self, needs: Needs) -> str | None:
        """Why a method's gradients would be wrong in this run; ``None`` where they are not, or none are needed."""
        reached = [part.lowest for part in needs.gradients.values()]
        wanted = [layer for layer in reached if layer is not None] + [PIXELS] * needs.gradients_again
        return self.behind(min(wanted, default=None))

    def check(self, call: TorchCall) -> Any:
        """Run a call and note it if its output has lost the gradient of its operands."""
        output = call.proceed()
        # Most calls end here.
        if in_graph(output) and not isinstance(call.function, OpOverload | OpOverloadPacket):
            return output
        name = call.name
        if torch.is_grad_enabled() and name not in _CONSTANT:
            operands = call.args[:1] if name in AS_ANOTHER else call.operands()
            if any(map(in_graph, operands)):
                self._note(name, output)
            elif self._marks_below and not is_factory(call.function) and any(map(is_below_graph, operands)):
                mark_below_graph(call.args[0] if name == "__setitem__" else output)
        return output

    def _note(self, name: str, output: Any) -> None:
        if name.startswith("new_") or name.endswith("_like"):
            return
        parts = output if isinstance(output, list | tuple) else [output]
        # Where one of several has a gradient, the others are without one on purpose: weights for display, indices.
        if any(map(_is_broken, parts)) and not any(in_graph(part) and not _is_broken(part) for part in parts):
            self._names.setdefault(self._layer, name)

    @property
    def _layer(self) -> int:
        """The block that a gradient would have to pass this place from; between blocks, the one before."""
        progress = self._progress
        return progress.next_block if progress.inside_block or progress.after_blocks else progress.next_block - 1


def mark_below_graph(value: Any) -> None:
    """Note that tensors would be in a graph that begins at the model's input."""
    for tensor in tensors_in(value):
        if tensor.is_floating_point():  # places, counts and comparisons have no gradient anyway
            setattr(tensor, _BELOW, True)


def is_below_graph(value: Any) -> bool:
    """Whether a value was made from the model's input before the start of the graph."""
    return isinstance(value, Tensor) and hasattr(value, _BELOW)


def is_constant(value: Any) -> bool:
    """Whether a value depends neither on the tokens nor, before the start of the graph, on the model's input."""
    return not in_graph(value) and not is_below_graph(value)


def _is_broken(value: Any) -> bool:
    """Whether numbers that were computed from tokens have no gradient; places, counts and comparisons never have."""
    if not isinstance(value, Tensor):
        return False
    if value.grad_fn is not None:
        return _NO_KERNEL in value.grad_fn.name()
    rounded = value.is_quantized or value.dtype == torch.int8
    return not value.requires_grad and (value.is_floating_point() or rounded)


def depends(output: Tensor, leaf: Tensor, *, apart_from: Tensor | None = None) -> bool:
    """Whether ``output`` was made from ``leaf``, where the graph begins, in another way than through ``apart_from``."""
    if leaf is apart_from:
        return False
    through = None if apart_from is None else apart_from.grad_fn
    seen: set[Any] = set()
    waiting: list[Any] = [output.grad_fn]
    while waiting:
        step = waiting.pop()
        if step is None or step is through or step in seen:
            continue
        if getattr(step, "variable", None) is leaf:
            return True
        seen.add(step)
        waiting.extend(earlier for earlier, _ in step.next_functions)
    return False
