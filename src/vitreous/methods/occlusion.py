"""Methods that slide a window over the patches: occlusion hides it, PAMI hides everything else."""

from __future__ import annotations

from typing import Annotated, Literal

from torch import Tensor

from vitreous.methods.asking import By, Questioning, responses, unperturbed
from vitreous.methods.masks import PatchMasks, windows
from vitreous.methods.registry import register
from vitreous.methods.view import View

Of = Literal["probability", "logit"]
Painting = Annotated[By, "paint patches with 0, or drop their tokens"]


class Occlusion(Questioning):
    """f(x) - f(x without a window), averaged over the windows that a patch lies in (Zeiler and Fergus, section 4.2)."""

    def __init__(self, *, by: By, of: Of, window: int, stride: int) -> None:
        self._by, self._of, self._window, self._stride = by, of, window, stride
        windows((1, 1), window, stride)  # refused here rather than when the model has run

    def maps(self, view: View) -> Tensor:
        """What hiding each patch costs."""
        hidden = windows(view.layout.grid, self._window, self._stride)
        said = responses(view, PatchMasks(~hidden, view.layout, view.subject.size), self._by, self._of)
        return average_over(hidden, unperturbed(view, self._of)[..., None] - said.mT)


class Pami(Questioning):
    """f(x with nothing but a window), averaged over the windows that a patch lies in (PAMI section 3)."""

    def __init__(self, *, by: By, of: Of, window: int | None, stride: int) -> None:
        self._by, self._of, self._window, self._stride = by, of, window, stride
        self.signed = of == "logit"
        windows((1, 1), 1 if window is None else window, stride)

    def maps(self, view: View) -> Tensor:
        """What each patch achieves with its neighbours alone."""
        grid = view.layout.grid
        shown = windows(grid, self._window or max(1, round(min(grid) / 4)), self._stride)
        said = responses(view, PatchMasks(shown, view.layout, view.subject.size), self._by, self._of)
        return average_over(shown, said.mT)


def average_over(inside: Tensor, values: Tensor) -> Tensor:
    """The mean of ``values`` (..., windows) over the windows each patch is inside of, (..., patches); 0 if in none."""
    inside = inside.to(values)
    return values @ inside / inside.sum(dim=0).clamp(min=1)


@register(
    "occlusion",
    family="perturbation",
    paper="Zeiler, Fergus: Visualizing and Understanding Convolutional Networks, ECCV",
    year=2014,
    class_specific=True,
    signed=True,
)
def occlusion(
    *,
    by: Painting = "paint",
    of: Annotated[Of, "of what the change is measured"] = "probability",
    window: Annotated[int, "patches of the hidden square in each direction"] = 1,
    stride: Annotated[int, "patches from one square to the next"] = 1,
) -> Occlusion:
    """What the model says less when a square of patches is hidden; one evaluation for every square."""
    return Occlusion(by=by, of=of, window=window, stride=stride)


@register(
    "pami",
    family="perturbation",
    paper="Shi, Zhang, Zheng, Wang: PAMI: Partition Input and Aggregate Outputs for Model Interpretation, "
    "Pattern Recognition",
    year=2023,
    class_specific=True,
    signed=False,
)
def pami(
    *,
    by: Painting = "paint",
    of: Annotated[Of, "what the shown part is measured by"] = "probability",
    window: Annotated[
        int | None, "patches of the shown square in each direction; a quarter of the picture by default"
    ] = None,
    stride: Annotated[int, "patches from one square to the next"] = 1,
) -> Pami:
    """What the model says when it sees nothing but a square of patches; one evaluation for every square."""
    return Pami(by=by, of=of, window=window, stride=stride)
