"""Sliding windows over the patches: occlusion hides the window, PAMI hides everything else.

Occlusion is [zeiler2014visualizing][], PAMI is [shi2023pami][].
"""

from __future__ import annotations

from typing import Annotated, Literal

from torch import Tensor

from vitreous.errors import MethodError
from vitreous.methods.masks import PatchMasks, windows, windows_within
from vitreous.methods.options import AtMost
from vitreous.methods.perturbation import By, PerturbationMethod, masked_outputs, original_output
from vitreous.methods.registry import register
from vitreous.methods.view import View

Of = Literal["probability", "logit"]
Painting = Annotated[By, "paint patches with 0, or drop their tokens"]
WindowBudget = Annotated[
    int | None,
    "how many evaluations an image may cost at most; where there are more squares, the stride is raised until they are "
    "few enough, and the square with it so that none of the picture is left out; any number by default",
    AtMost(100_000),
]
Stride = Annotated[int, "patches from one square to the next", AtMost(1000)]


def check_windows(window: int, stride: int, budget: int | None) -> None:
    """Refuse here rather than when the model has run."""
    if budget is not None and budget < 1:
        raise MethodError("budget must be at least 1")
    windows((1, 1), window, stride)


class Occlusion(PerturbationMethod):
    """f(x) - f(x without a window), averaged over the windows that a patch lies in (Zeiler and Fergus, section 4.2).

    Args:
        by: whether patches are painted or dropped.
        of: what f is.
        window: patches of a window in each direction.
        stride: patches from one window to the next.
        budget: windows at most; see ``windows_within``. ``None`` for any number.
    """

    def __init__(self, *, by: By, of: Of, window: int, stride: int, budget: int | None = None) -> None:
        check_windows(window, stride, budget)
        self._by, self._of, self._window, self._stride, self._budget = by, of, window, stride, budget

    def maps(self, view: View) -> Tensor:
        """What hiding each patch costs."""
        hidden = windows_within(self._budget, view.layout.grid, self._window, self._stride)
        outputs = masked_outputs(view, PatchMasks(~hidden, view.layout, view.runner.size), self._by, self._of)
        return average_over(hidden, original_output(view, self._of)[..., None] - outputs.mT)


class Pami(PerturbationMethod):
    """f(x with nothing but a window), averaged over the windows that a patch lies in (PAMI section 3).

    Args:
        by: whether patches are painted or dropped.
        of: what f is.
        window: patches of a window in each direction; ``None`` for a quarter of the picture.
        stride: patches from one window to the next.
        budget: windows at most; see ``windows_within``. ``None`` for any number.
    """

    def __init__(self, *, by: By, of: Of, window: int | None, stride: int, budget: int | None = None) -> None:
        check_windows(1 if window is None else window, stride, budget)
        self._by, self._of, self._window, self._stride, self._budget = by, of, window, stride, budget
        self.signed = of == "logit"

    def maps(self, view: View) -> Tensor:
        """What each patch achieves with its neighbours alone."""
        grid = view.layout.grid
        shown = windows_within(self._budget, grid, self._window or max(1, round(min(grid) / 4)), self._stride)
        outputs = masked_outputs(view, PatchMasks(shown, view.layout, view.runner.size), self._by, self._of)
        return average_over(shown, outputs.mT)


def average_over(inside: Tensor, values: Tensor) -> Tensor:
    """The mean of ``values`` (..., windows) over the windows each patch is inside of, (..., patches); 0 if in none."""
    inside = inside.to(values)
    return values @ inside / inside.sum(dim=0).clamp(min=1)


@register(
    "occlusion",
    family="perturbation",
    paper="Zeiler and Fergus, Visualizing and Understanding Convolutional Networks",
    year=2014,
    arxiv="1311.2901",
    class_specific=True,
    signed=True,
)
def occlusion(
    *,
    by: Painting = "paint",
    of: Annotated[Of, "of what the change is measured"] = "probability",
    window: Annotated[int, "patches of the hidden square in each direction", AtMost(1000)] = 1,
    stride: Stride = 1,
    budget: WindowBudget = None,
) -> Occlusion:
    """What the model says less when a square of patches is hidden; one evaluation for every square."""
    return Occlusion(by=by, of=of, window=window, stride=stride, budget=budget)


@register(
    "pami",
    family="perturbation",
    paper="Shi et al., PAMI: Partition Input and Aggregate Outputs for Model Interpretation",
    year=2023,
    arxiv="2302.03318",
    class_specific=True,
    signed=False,
)
def pami(
    *,
    by: Painting = "paint",
    of: Annotated[Of, "what the shown part is measured by"] = "probability",
    window: Annotated[
        int | None, "patches of the shown square in each direction; a quarter of the picture by default", AtMost(1000)
    ] = None,
    stride: Stride = 1,
    budget: WindowBudget = None,
) -> Pami:
    """What the model says when it sees nothing but a square of patches; one evaluation for every square."""
    return Pami(by=by, of=of, window=window, stride=stride, budget=budget)
