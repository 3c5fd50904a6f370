"""What is explained of a batch: none, one target for all images, one or several per image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitreous._utils.messages import short_repr
from vitreous._utils.torch_state import special_kind
from vitreous.errors import TargetError
from vitreous.inputs.target import Target, TargetContext
from vitreous.inputs.target_objects import Class

One = int | str | Target  # a class by number, or by name where the model's class names are known, or a target
AnyTarget = None | One | Sequence[One] | Sequence[Sequence[One]] | Tensor

_SHOWN = 5  # classes of a longer list are not repeated in a message


class Targets(NamedTuple):
    """Classes (batch, k), and whether several per image were requested (k may still be 1).

    An index from the number of classes on refers to a target that is not a class, see ``vitreous.tape.output``.
    """

    classes: Tensor
    several: bool


class TargetObjects(NamedTuple):
    """Target objects of every image, (batch, k), and whether several per image were requested."""

    rows: list[list[Target]]
    several: bool

    def prepared(self, context: TargetContext) -> TargetObjects:
        """The same with what each of them needs of the model; what several images share is prepared once."""
        done: dict[int, Target] = {}
        for row in self.rows:
            for target in row:
                if id(target) not in done:
                    done[id(target)] = target.prepare(context)
        return self._replace(rows=[[done[id(target)] for target in row] for row in self.rows])

    def module(self, network: nn.Module) -> nn.Module:
        """The module that is run: the network, or what the targets run instead.

        Raises:
            TargetError: they run different ones.
        """
        others = {type(target): target for row in self.rows for target in row if _runs_another(target)}
        if len(others) > 1:
            names = " and ".join(sorted(kind.__name__ for kind in others))
            raise TargetError(f"{names} run different parts of the model: explain them by two calls")
        return next(iter(others.values())).module(network) if others else network


def _runs_another(target: Target) -> bool:
    return type(target).module is not Target.module


def find_objects(target: Any, batch: int, noun: str = "image") -> TargetObjects | None:
    """Target objects in the shape of images (or texts) and targets; ``None`` where there are classes only.

    Raises:
        TargetError: there are not as many as images.
    """
    if isinstance(target, Target):
        return TargetObjects([[target]] * batch, several=False)
    if not isinstance(target, list | tuple) or not _holds_objects(target):
        return None
    several = any(isinstance(row, list | tuple) for row in target)
    rows = [list(row) if isinstance(row, list | tuple) else [row] for row in target]
    counts = sorted({len(row) for row in rows})
    if len(rows) == batch and len(counts) > 1:
        listed = " and ".join(map(str, counts))
        raise TargetError(f"every {noun} has equally many targets, not {listed}: repeat one, or explain in two calls")
    if len(rows) != batch or (several and not all(isinstance(row, list | tuple) for row in target)):
        things = f"1 {noun}" if batch == 1 else f"{batch} {noun}s"
        raise TargetError(
            f"there are targets for {len(rows)} {noun}s, and {things}: a plain list is one target per {noun}; for "
            f"several targets of each {noun} give [[...]]{'' if batch == 1 else f' * {batch}'}, equally many for each"
        )
    return TargetObjects([[_as_object(each) for each in row] for row in rows], several)


def _holds_objects(target: Sequence[Any]) -> bool:
    return any(isinstance(each, Target) or (isinstance(each, list | tuple) and _holds_objects(each)) for each in target)


def _as_object(target: Any) -> Target:
    return target if isinstance(target, Target) else Class(target)


def find_targets(logits: Tensor, target: AnyTarget, topk: int | None) -> Targets:
    """Find the classes to explain from the caller's target and the model's predictions."""
    if topk is not None:
        return Targets(_most_likely(logits, target, topk), several=True)
    if target is None:
        return Targets(logits.argmax(dim=1, keepdim=True), several=False)
    wanted = _integers(target).to(logits.device)
    batch, classes = logits.shape
    several = wanted.dim() == 2
    shaped = wanted if several else wanted.expand(batch)[:, None] if wanted.dim() == 0 else wanted[:, None]
    if wanted.dim() > 2 or len(shaped) != batch or shaped.shape[1] == 0:
        raise _wrong_shape(wanted, batch, "image")
    check_classes(shaped, classes)
    return Targets(shaped, several)


def check_classes(target: Tensor, classes: int) -> None:
    """Raise unless all targets are classes of the model."""
    outside = target[(target < 0) | (target >= classes)]
    if len(outside):
        raise TargetError(f"class {int(outside[0])} is not between 0 and {classes - 1}, the classes of this model")


def part_of(target: AnyTarget, rows: Sequence[int], batch: int) -> AnyTarget:
    """Select the targets of some of ``batch`` texts."""
    if target is None:
        return None
    wanted = _integers(target)
    if wanted.dim() == 0:
        return wanted
    if wanted.dim() > 2 or len(wanted) != batch or 0 in wanted.shape:
        raise _wrong_shape(wanted, batch, "text")
    return wanted[list(rows)]


def _wrong_shape(wanted: Tensor, batch: int, thing: str) -> TargetError:
    things = thing if batch == 1 else f"{thing}s"
    message = f"target has shape {tuple(wanted.shape)} for {batch} {things}"
    if wanted.dim() != 1 or not len(wanted):
        return TargetError(f"{message}: give one class, one per {thing}, or several per {thing} as ({batch}, k)")
    several = f"[{wanted.tolist()}]" if len(wanted) <= _SHOWN else "[[...]]"
    each = f"one class per {thing}"
    several = several if batch == 1 else f"{several} * {batch}"
    return TargetError(f"{message}: a plain list is {each}; for several classes of each {thing} give {several}")


def _most_likely(logits: Tensor, target: AnyTarget, topk: int) -> Tensor:
    if target is not None:
        raise TargetError("give a target or topk, not both")
    if isinstance(topk, bool) or not isinstance(topk, int | np.integer):
        raise TargetError(f"topk must be a whole number, not {short_repr(topk)}")
    topk = int(topk)
    if not 1 <= topk <= logits.shape[1]:
        raise TargetError(f"topk={topk} is not between 1 and {logits.shape[1]}, the number of classes")
    return logits.topk(topk, dim=1).indices


def _holds_something(each: Any) -> bool:
    return not isinstance(each, list | tuple) or len(each) > 0


def _integers(target: AnyTarget) -> Tensor:
    if callable(target):
        raise TargetError("target must not be a function: vitreous.targets.Output(function) explains what one returns")
    if isinstance(target, list | tuple) and not any(map(_holds_something, target)):
        raise TargetError("the list of targets is empty: give None for the predicted class")
    try:
        wanted = torch.as_tensor(target)
    except Exception:  # noqa: BLE001  # objects of any kind fail in ways of their own
        raise TargetError(
            "target must be None, an integer, (batch,) or (batch, k) integers, or targets of vitreous.targets, not "
            f"{short_repr(target)}"
        ) from None
    if (kind := special_kind(wanted)) is not None:
        raise TargetError(f"target must be a plain tensor of integers, not {kind} one")
    if wanted.is_floating_point() or wanted.is_complex() or wanted.dtype == torch.bool:
        raise TargetError(f"target must be integers, not {wanted.dtype}")
    return wanted.to(torch.int64)
