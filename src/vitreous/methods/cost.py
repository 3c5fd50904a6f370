"""The cost of a method: how many passes it takes, and how deep they go; derived from what its read-out needs."""

from __future__ import annotations

from dataclasses import dataclass

from vitreous.methods.spelling import Recipe, parse
from vitreous.tape import PIXELS

EXAMPLE_DEPTH = 12  # of a ViT-Ti, -S or -B


@dataclass(frozen=True)
class Cost:
    """The passes that a method takes.

    Attributes:
        label: In words, cheapest first: forward; forward + last block; forward + half; forward + backward; forward +
            backward + head again; several backward; many runs.
        passes: The backward passes, by rule and objective, with the lowest block that each has to reach.
        one_run: Whether it reads the recorded run and runs neither the model nor its head again.
    """

    label: str
    passes: tuple[str, ...]
    one_run: bool


def cost_of(spelling: str) -> Cost:
    """Give the cost of a spelling on a model with twelve blocks."""
    recipe = parse(spelling)
    gradients = recipe.needs(EXAMPLE_DEPTH).gradients
    reach = {backward: needs.lowest for backward, needs in gradients.items()}
    passes = tuple(f"{backward.rule}, {backward.objective}, {_reach(lowest)}" for backward, lowest in reach.items())
    # The score of an intermediate block takes another run of the head.
    head_again = any(backward.objective == "intermediate" for backward in gradients)
    lowest = [lowest for lowest in reach.values() if lowest is not None]
    label = _label(recipe, lowest) + (" + head again" if head_again else "")
    return Cost(label, passes, one_run=not (recipe.readout.runs_again or head_again))


def _label(recipe: Recipe, lowest: list[int]) -> str:
    if recipe.readout.runs_again:
        return "many runs"
    if not lowest:
        return "forward"
    if len(lowest) > 1:
        return "several backward"
    if lowest[0] == EXAMPLE_DEPTH - 1:
        return "forward + last block"
    return "forward + half" if lowest[0] >= EXAMPLE_DEPTH // 2 else "forward + backward"


def _reach(lowest: int | None) -> str:
    if lowest is None or lowest >= EXAMPLE_DEPTH:
        return "to the head"
    return "to the pixels" if lowest == PIXELS else f"to block {lowest} of {EXAMPLE_DEPTH}"
