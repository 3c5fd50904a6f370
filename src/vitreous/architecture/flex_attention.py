"""``flex_attention`` as the fused attention that it is, where it only hides scores or adds constants to them.

Without ``torch.compile`` around it, torch compiles it anyway, unless a flag for debugging is set; then its call is seen
as any other. The flag is set for threads that trace or record a model, and for no others.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from vitreous.errors import UnsupportedModelError

_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_MODULE, _FLAG = "torch.nn.attention.flex_attention", "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"


class _InSomeThreads:
    """A flag that is set in the threads that trace a model, and has its own value in others."""

    def __init__(self, *, otherwise: bool) -> None:
        self._otherwise = otherwise
        self.depth = threading.local()

    def __bool__(self) -> bool:
        return self._otherwise or getattr(self.depth, "count", 0) > 0


@contextmanager
def uncompiled() -> Iterator[None]:
    """Let this thread's ``flex_attention`` be seen by function modes."""
    module = sys.modules.get(_MODULE)
    flag = getattr(module, _FLAG, None)
    if flag is None:
        yield
        return
    if not isinstance(flag, _InSomeThreads):
        flag = _InSomeThreads(otherwise=bool(flag))
        setattr(module, _FLAG, flag)
    count = getattr(flag.depth, "count", 0)
    try:
        flag.depth.count = count + 1
        yield
    finally:
        flag.depth.count = count


def is_flex_attention(func: Callable[..., Any]) -> bool:
    """Whether a function is the operator that ``flex_attention`` calls."""
    return func.__name__ == "flex_attention" and isinstance(func, torch._ops.HigherOrderOperator)  # noqa: SLF001


def checks_for_kernel(func: Callable[..., Any], caller: FrameType) -> bool:
    """Whether ``flex_attention`` asks for gradients, for which it has no kernel on a processor; none will be used."""
    return func.__name__ == "__get__" and func == _REQUIRES_GRAD and caller.f_globals.get("__name__") == _MODULE


def as_fused(
    attend: Callable[[Any, tuple[Any, ...], dict[str, Any]], Tensor], args: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Its result, by ``attend(scaled_dot_product_attention, args, kwargs)``; statistics are left empty.

    Raises:
        UnsupportedModelError: it does something else to its scores.
    """
    query, key, value, score_mod, block_mask, scale = args[:6]
    with torch._C.DisableTorchFunction(), torch.no_grad():  # noqa: SLF001
        bias = _bias(query, key, score_mod, block_mask[-1])
    several = query.shape[1] != key.shape[1]
    output = attend(
        F.scaled_dot_product_attention,
        (query, key, value),
        {"attn_mask": bias, "scale": scale, **({"enable_gqa": True} if several else {})},
    )
    return output, output.new_empty(0), output.new_empty(0)


def _bias(query: Tensor, key: Tensor, score_mod: Callable[..., Any], mask_mod: Callable[..., Any]) -> Tensor | None:
    """What is added to its scores, (batch, head, query, key) or less; ``None`` for nothing."""
    sizes = (*query.shape[:3], key.shape[2])
    places = [
        torch.arange(size, device=query.device).view(*[1] * place, size, *[1] * (3 - place))
        for place, size in enumerate(sizes)
    ]
    none, one = query.new_zeros(sizes), query.new_ones(sizes)
    added, of_one = score_mod(none, *places), score_mod(one, *places)
    if not torch.allclose(of_one - added, one):
        raise UnsupportedModelError(
            "flex_attention has a score_mod that does more than add to the scores, so that A and its gradients are not "
            "known; use another attention, if the model has one"
        )
    visible = torch.as_tensor(mask_mod(*places), device=query.device).expand(sizes)
    bias: Tensor = added.masked_fill(~visible, float("-inf"))
    return bias if bool(bias.any()) else None
