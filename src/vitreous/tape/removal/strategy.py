"""How patches can be removed from a model: dropped or hidden. It is run with patches in two orders to find out.

Which patches stay is a set. A block that works out positions from how many tokens it has (rotary ones, distances, a
grid of neighbours) takes the kept ones for the first of a picture and raises no error; but to such a block their order
matters. Where patches cannot be dropped they can be hidden, if blocks look at each other's tokens by attention alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Literal, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vitreous._utils.tensors import HALF
from vitreous._utils.text import reason_of
from vitreous.architecture import Architecture
from vitreous.errors import UnsupportedModelError, VitreousError
from vitreous.inputs.model_input import FAILURES, Inputs
from vitreous.tape.recording.interception import Interception
from vitreous.tape.removal.dropping import TokenDropping
from vitreous.tape.removal.score_editing import ScoreEditing

RemovalStrategy = Literal["drop", "hide"]
_FEW_TOKENS = 8  # tokens: so many have orders enough
_ROUNDING = 1e-3  # of the largest logit: sums in another order differ by far less, other positions by far more
_ROUNDING_OF_HALF = 1e-2  # if rounding is taken for more, patches are hidden, which costs more and is as right

# Found once for a model and an input size, and again when its parameters have changed.
_KNOWN: WeakKeyDictionary[nn.Module, dict[object, RemovalStrategy]] = WeakKeyDictionary()


class Interceptor(Protocol):
    """What intercepts a run."""

    def interception(self) -> Interception:
        """The context in which the model has to run."""


Run = Callable[[Inputs, Interceptor], Tensor]


def removal_strategy(
    model: nn.Module, architecture: Architecture, inputs: Inputs, patches: int, run: Run
) -> RemovalStrategy:
    """How some of the ``patches`` can be taken from a model; the first time it costs a part of a picture, or two more.

    Raises:
        UnsupportedModelError: they can be neither dropped nor hidden.
    """
    known = _KNOWN.setdefault(model, {})
    # Texts have many lengths, but a short one's order tells less.
    shape = inputs.shape[1:] if isinstance(inputs, Tensor) else min(patches, _FEW_TOKENS)
    key = (shape, sum(map(_version, model.parameters())))
    if key not in known:
        same_twice = inputs[torch.zeros(2, dtype=torch.int64, device=inputs.device)]
        known[key] = _find_strategy(architecture, same_twice, patches, run)
    return known[key]


def _find_strategy(architecture: Architecture, same_twice: Inputs, patches: int, run: Run) -> RemovalStrategy:
    few = max(1, min(patches - 1, _FEW_TOKENS), patches // 8)  # they cost what they are, and their order tells as much
    some = torch.randperm(patches, generator=torch.Generator().manual_seed(0))[:few]
    if bool((some.diff() > 0).all()):  # of a few it may be the ascending order itself
        some = some.roll(1)
    two_orders = torch.stack((some.sort().values, some)).to(same_twice.device)
    with suppress(UnsupportedModelError, *FAILURES):
        if few > 1 and _alike(run(same_twice, TokenDropping(architecture, two_orders, patches))):
            return "drop"
    check_hiding(architecture, same_twice, patches, two_orders, run)
    return "hide"


def check_hiding(architecture: Architecture, same_twice: Inputs, patches: int, kept: Tensor, run: Run) -> None:
    """Refuse a model in which what is hidden is seen: one and the same picture, with other hidden tokens.

    ``kept`` may name the same patches in two orders: after the last block they stand in it, and a head must not mind.

    Raises:
        UnsupportedModelError: something else than attention reads them, or the model cannot do without them.
    """
    editing = _OtherwiseHidden(architecture, factor=None, kept=kept, patches=patches)
    try:
        logits = run(same_twice, editing)
    except (VitreousError, torch.OutOfMemoryError):
        raise
    except FAILURES as error:
        raise UnsupportedModelError(
            f"{architecture.name} counts on all of its patches ({reason_of(error).rstrip('.')}), so none can be "
            "dropped; paint them instead (by=paint)"
        ) from error
    editing.check()
    if not _alike(logits):
        raise UnsupportedModelError(
            f"the tokens of {architecture.name} meet in another way than by attention (a convolution over neighbours "
            "or a mean over all of them in its blocks, or chance), so that no patch can be dropped; paint them "
            "instead (by=paint)"
        )


class _OtherwiseHidden(ScoreEditing):
    """Hides patches, and puts other numbers into those of the second picture."""

    def _enter_stream(self, stream: Tensor) -> Tensor:
        stream = super()._enter_stream(stream)
        assert self._hidden is not None
        changed = self._hidden.isinf() & torch.tensor([[False], [True]], device=stream.device)
        return torch.where(changed[..., None], stream.roll(1, dims=-1), stream)


def _alike(logits: Tensor) -> bool:
    """Whether two pictures have the same logits, of which some may be -inf."""
    one, other = logits.unbind()
    largest = logits[logits.isfinite()].abs().amax() if bool(logits.isfinite().any()) else 0
    rounding = _ROUNDING_OF_HALF if logits.dtype in HALF else _ROUNDING
    return bool(((one == other) | ((one - other).abs() <= rounding * largest)).all())


def _version(parameter: Tensor) -> int:
    """How often a parameter was changed in place; those of inference mode are not."""
    return 0 if parameter.is_inference() else parameter._version  # noqa: SLF001  # there is no public name for it
