"""Method spellings, ``name[.aggregation...][:option=value,...]``: aggregations, parsing into recipes, and their cost.

An aggregation combines the read-outs of several layers into one map. The cost is the number and the depth of the
passes, derived from the needs of the read-out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from torch import Tensor

from vitreous._utils.messages import close_match
from vitreous.errors import MethodError
from vitreous.methods.checked_view import CheckedView, plugin_errors
from vitreous.methods.gradtoken import spread
from vitreous.methods.readout import MatrixReadout, Procedure, Readout, Residual, TokenReadout, View, total
from vitreous.methods.registry import LRP_PATENT, MethodInfo, OptionInfo, Patent, method_info, options_of
from vitreous.tape import PIXELS, Needs, unite


class Aggregation(ABC):
    """Which layers are read, and how they are combined."""

    @abstractmethod
    def layers(self, depth: int) -> range:
        """The layers that are read in a model of ``depth`` blocks."""

    @abstractmethod
    def combine(self, readout: Readout, view: View) -> Tensor:
        """Scores of all tokens, (batch, tokens)."""

    def needs(self, readout: Readout, depth: int) -> Needs:
        """What the tape must hold for these layers; for a matrix between tokens, only the rows that the head reads."""
        needs = unite(readout.needs(layer, depth) for layer in self.layers(depth))
        return needs.by_rows if isinstance(readout, MatrixReadout) else needs


class OneLayer(Aggregation):
    """The read-out of a single layer; negative numbers count from the top."""

    def __init__(self, *, layer: Annotated[int, "the block that is read; -1 is the last"] = 0) -> None:
        self.layer = layer

    def layers(self, depth: int) -> range:
        """The one layer."""
        layer = _within(self.layer, depth, "layer")
        return range(layer, layer + 1)

    def combine(self, readout: Readout, view: View) -> Tensor:
        """The layer's token scores, or the class token's row of its matrix."""
        (layer,) = self.layers(view.depth)
        if self.layer == -1 and isinstance(readout, MatrixReadout) and view.layout.pooled_by_attention:
            return readout.top_row(view).dense(view.layout.tokens)  # the last attention is the pooling one
        return _read(readout, view, layer)


class Plus(Aggregation):
    """PLUS (SkipPLUS eq. 4): the sum of the read-outs of all layers from ``start`` up."""

    def __init__(self, *, start: Annotated[int, "the first block that counts"] = 0) -> None:
        self.start = start

    def layers(self, depth: int) -> range:
        """All layers from the start."""
        return range(_within(self.start, depth, "start"), depth)

    def combine(self, readout: Readout, view: View) -> Tensor:
        """The sum over layers."""
        layers = self.layers(view.depth)
        if isinstance(readout, TokenReadout):
            return readout.read_sum(view, layers)
        return total(_read(readout, view, layer) for layer in layers)


class SkipPlus(Plus):
    """SkipPLUS: PLUS over the upper half only. The paper starts at ceil(L/2); its program at L//2."""

    def __init__(
        self, *, half: Annotated[Literal["ceil", "floor"], "where the upper half starts if the depth is odd"] = "ceil"
    ) -> None:
        self.half = half

    def layers(self, depth: int) -> range:
        """The upper half."""
        start = math.ceil(depth / 2) if self.half == "ceil" else depth // 2
        return range(min(start, depth - 1), depth)


class Rollout(Aggregation):
    """The product of the layers' matrices with the residual connection; only one row of it is computed."""

    def __init__(
        self,
        *,
        start: Annotated[int, "the lowest block of the product"] = 0,
        depth: Annotated[int | None, "how many blocks, counted from the lowest; all by default"] = None,
        residual: Annotated[
            Literal["default", "add", "half", "none"], "I + M, (I + M)/2, M; default: as the method's paper"
        ] = "default",
    ) -> None:
        self.start = start
        self.depth = depth
        self.residual = residual

    def layers(self, depth: int) -> range:
        """The layers of the product, lowest first."""
        start = _within(self.start, depth, "start")
        if self.depth is None:
            return range(start, depth)
        if not 0 < self.depth <= depth - start:
            raise MethodError(f"depth={self.depth} is not between 1 and {depth - start}, the number of blocks")
        return range(start, start + self.depth)

    def needs(self, readout: Readout, depth: int) -> Needs:
        """All rows of the matrices, except the topmost, where the product starts with the rows that the head reads."""
        *below, top = self.layers(depth)
        return unite([*(readout.needs(layer, depth) for layer in below), readout.needs(top, depth).by_rows])

    def combine(self, readout: Readout, view: View) -> Tensor:
        """The class token's row of the product."""
        assert isinstance(readout, MatrixReadout)
        residual: Residual = readout.residual if self.residual == "default" else self.residual
        row = readout.top_row(view)
        for layer in reversed(self.layers(view.depth)):
            row = readout.step(view, layer, row, residual)
        return readout.finish(view, row)


@dataclass(frozen=True)
class Propagate:
    """GradToken's propagation (its eq. 13) for any map: Ā[patches, patches] times the map."""

    def needs(self, depth: int) -> Needs:
        """The attention of all blocks but the last."""
        return Needs(attention=frozenset(range(depth - 1)))

    def apply(self, view: View, scores: Tensor) -> Tensor:
        """Spread patch scores (batch, patches) by the average attention of the lower blocks."""
        return spread(view, range(view.depth - 1), scores[..., None])[..., 0] if view.depth > 1 else scores


AGGREGATIONS: Mapping[str, Callable[..., Aggregation]] = {"rollout": Rollout, "plus": Plus, "skipplus": SkipPlus}


def _read(readout: Readout, view: View, layer: int) -> Tensor:
    if isinstance(readout, MatrixReadout):
        return readout.row_times(view, layer, readout.top_row(view))
    assert isinstance(readout, TokenReadout)
    return readout.read(view, layer)


def _within(layer: int, depth: int, name: str) -> int:
    if not -depth <= layer < depth:
        raise MethodError(f"{name}={layer} does not exist: the model has {depth} blocks, 0 to {depth - 1}")
    return layer % depth


@dataclass(frozen=True)
class Recipe:
    """A parsed method: read-out, aggregation, and optional propagation."""

    spelling: str
    info: MethodInfo
    readout: Readout
    aggregation: Aggregation
    propagate: Propagate | None

    @property
    def signed(self) -> bool:
        """Whether the sign of the scores carries meaning."""
        return self.info.signed if self.readout.signed is None else self.readout.signed

    def needs(self, depth: int) -> Needs:
        """What the tape of a model with ``depth`` blocks must hold.

        Raises:
            MethodError: it reads a block that the model does not have.
        """
        try:
            needs = self._own_needs(depth)
        except MethodError as error:
            raise MethodError(f"{self.spelling!r}: {error}") from None
        return needs if self.propagate is None else needs | self.propagate.needs(depth)

    def scores(self, view: View) -> Tensor:
        """Raw scores of the patches, (batch, patches), or of all pixels with ``resolution=pixel``."""
        with plugin_errors(self.info):
            seen = CheckedView.over(view, self.readout, self._own_needs(view.depth)) if self.info.is_own else view
            if isinstance(self.readout, Procedure):
                scores = self.readout.map(seen)
            else:
                scores = self.aggregation.combine(self.readout, seen)[:, view.layout.prefix :]
        # Some read-outs compute in float64 to avoid cancellation.
        scores = scores.to(view.dtype)
        return scores if self.propagate is None else self.propagate.apply(view, scores)

    def _own_needs(self, depth: int) -> Needs:
        """The needs of the read-out for the blocks that are read."""
        with plugin_errors(self.info):
            return self.aggregation.needs(self.readout, depth)


def parse(spelling: str) -> Recipe:
    """Parse a method spelling.

    Raises:
        MethodError: a part is unknown, or parts are incompatible.
    """
    try:
        return _parse(spelling.strip())
    except MethodError as error:
        named = "" if repr(spelling) in str(error) else f"{spelling!r}: "  # not twice
        raise MethodError(f"{named}{error}") from None


def plus_from_every_layer(spelling: str, depth: int) -> list[str]:
    """Return the spellings of the same read-out with PLUS from every start layer; its own aggregation is replaced.

    Raises:
        MethodError: the spelling is not valid, or the method has no layers.
    """
    recipe = parse(spelling)
    if not recipe.info.has_layers:
        raise MethodError(f"{spelling!r} has no layers to start at")
    path, _, tail = recipe.spelling.partition(":")
    propagate = ".propagate" if recipe.propagate is not None else ""
    own = [option for option in tail.split(",") if option.partition("=")[0].strip() in recipe.info.options]
    name = path.split(".")[0]
    return [f"{name}.plus{propagate}:{','.join([*own, f'start={layer}'])}" for layer in range(depth)]


def _parse(spelling: str) -> Recipe:
    path, colon, tail = spelling.partition(":")
    name, *aggregations = path.split(".")
    info = method_info(name)
    _check(info, aggregations)
    propagate = "propagate" in aggregations
    combining = [aggregation for aggregation in aggregations if aggregation != "propagate"]
    chosen = combining[0] if combining else info.default_aggregation
    texts = _texts(tail) if colon else {}
    # layer= overrides the default aggregation, but not one in the spelling.
    one_layer = "layer" in texts and not combining and info.layers_stand_alone
    make = OneLayer if chosen is None or one_layer else AGGREGATIONS[chosen]
    combining_options = options_of(make) if info.has_layers else {}
    _check_options(texts, {**info.options, **combining_options})
    values = _values(texts, combining_options)
    aggregation = make(**({"layer": info.default_layer} if make is OneLayer else {}) | values)
    with plugin_errors(info):
        readout = info.make(**_values(texts, info.options))
    if isinstance(readout, MatrixReadout) and make is Rollout:
        _check_effect(readout, values, combining_options)
    if propagate and isinstance(readout, Procedure) and readout.resolution == "pixel":
        raise MethodError("propagate spreads a map of patches by attention: leave out resolution=pixel")
    return Recipe(spelling, info, readout, aggregation, Propagate() if propagate else None)


def _check_options(texts: Mapping[str, str], allowed: Mapping[str, OptionInfo]) -> None:
    unknown = next((option for option in texts if option not in allowed), None)
    if unknown is not None:
        known = f"it takes {', '.join(allowed)}" if allowed else "it takes none"
        raise MethodError(f"unknown option {unknown!r}; {known}{close_match(unknown, allowed)}")


def _check_effect(readout: MatrixReadout, values: Mapping[str, Any], options: Mapping[str, OptionInfo]) -> None:
    """Refuse options of a rollout that have no effect on this read-out."""
    for option, value in values.items():
        is_default = value == options[option].default or (option == "residual" and value == readout.residual)
        if option in readout.unmoved_by and not is_default:
            raise MethodError(f"{option}={value} has no effect: {readout.unmoved_by[option]}")


def _check(info: MethodInfo, aggregations: list[str]) -> None:
    """Refuse aggregations that do not exist or are incompatible, with the reason."""
    known = (*AGGREGATIONS, "propagate")
    for aggregation in aggregations:
        if aggregation not in known:
            raise MethodError(f"there is no aggregation {aggregation!r}{close_match(aggregation, known)}")
        if aggregation not in info.aggregations:
            reasons = {
                "rollout": "a rollout multiplies matrices between tokens, and it gives one score per token",
                "propagate": "it propagates already",
                **dict.fromkeys(
                    ("plus", "skipplus"), "what it does at the end of its product of blocks has no place in a sum"
                ),
            }
            reason = reasons.get(aggregation) if info.has_layers else None
            raise MethodError(f"{info.name} cannot be followed by .{aggregation}: {reason or 'it has no layers'}")
    combining = [aggregation for aggregation in aggregations if aggregation != "propagate"]
    if len(combining) > 1:
        raise MethodError(f"{' and '.join(combining)} both combine layers; choose one")
    if "propagate" in aggregations[:-1]:
        raise MethodError("propagate comes once, and last")


def _texts(tail: str) -> dict[str, str]:
    texts: dict[str, str] = {}
    for item in tail.split(","):
        option, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not option or not value:
            raise MethodError(f"options are written option=value, not {item!r}")
        if option in texts:
            raise MethodError(f"option {option!r} is given twice")
        texts[option] = value
    return texts


def _values(texts: Mapping[str, str], options: Mapping[str, OptionInfo]) -> dict[str, Any]:
    return {option: info.convert(option, texts[option]) for option, info in options.items() if option in texts}


EXAMPLE_DEPTH = 12  # blocks of a ViT-Ti, -S or -B
_LRP_RULES = ("abslrp", "attnlrp", "conservative", "lrp_")  # how the names of rules of LRP begin


@dataclass(frozen=True)
class Cost:
    """The passes that a method takes.

    Attributes:
        label: In words, cheapest first: forward; forward + last block; forward + half; forward + backward; forward +
            backward + head again; several backward; many runs.
        passes: The backward passes, by rule and objective, with the lowest block that each has to reach.
        one_run: Whether it reads one recorded run, without running the model or its head again.
    """

    label: str
    passes: tuple[str, ...]
    one_run: bool


def cost_of(spelling: str) -> Cost:
    """Return the cost of a spelling on a model with twelve blocks."""
    recipe = parse(spelling)
    gradients = recipe.needs(EXAMPLE_DEPTH).gradients
    reach = {backward: needs.lowest for backward, needs in gradients.items()}
    passes = tuple(f"{backward.rule}, {backward.objective}, {_reach(lowest)}" for backward, lowest in reach.items())
    # The score of an intermediate block takes another run of the head.
    head_again = any(backward.reads_blocks_alone for backward in gradients)
    lowest = [lowest for lowest in reach.values() if lowest is not None]
    label = _label(recipe, lowest) + (" + head again" if head_again else "")
    return Cost(label, passes, one_run=not (recipe.readout.runs_again or head_again))


def patent_of(spelling: str) -> Patent | None:
    """Return what is known of patents on a spelling: on its method, or on the rules that its options choose."""
    recipe = parse(spelling)
    uses_lrp = any(rule.startswith(_LRP_RULES) for rule in recipe.needs(EXAMPLE_DEPTH).rules)
    return recipe.info.own_patent or (LRP_PATENT if uses_lrp else None)


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
