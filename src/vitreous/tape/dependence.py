"""Whether one tensor of a forward pass depends on another, by the steps of the graph alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor


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
