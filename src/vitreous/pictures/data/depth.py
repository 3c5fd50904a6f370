"""The depth strip: a map as more and more blocks are aggregated (TokenTM Fig. 5, GradToken Fig. 11)."""

from __future__ import annotations

from vitreous.aggregate import Plus, Rollout
from vitreous.errors import MethodError
from vitreous.methods.gradtoken import QueryGradientKey
from vitreous.pictures.data.strip import Strip, depth_of, strip_of_spellings, with_options
from vitreous.pixels import Images, Model, find_model
from vitreous.spelling import parse
from vitreous.targets import Target


def depth_strip(model: Model, image: Images, method: str, target: Target = None) -> Strip:
    """Give the maps of a method for every number of blocks that it can aggregate."""
    loaded = find_model(model, image)
    spellings = depth_spellings(method, depth_of(loaded, image))
    captions = {_blocks(count): spelling for count, spelling in spellings.items()}
    return strip_of_spellings(loaded, image, method, captions, target)


def depth_spellings(method: str, depth: int) -> dict[int, str]:
    """Give the spellings of a method by how many blocks they aggregate, in a model of ``depth`` blocks.

    A rollout multiplies its lowest blocks, 1 to all of them; gradtoken spreads its map through the blocks below the
    last one, from none to all of them.
    """
    recipe = parse(method)
    if isinstance(recipe.aggregation, Rollout):
        most = depth - (recipe.aggregation.start % depth)
        return {count: with_options(method, depth=count) for count in range(1, most + 1)}
    if isinstance(recipe.readout, QueryGradientKey) and recipe.readout.propagation != "none":
        return {count: with_options(method, depth=count) for count in range(depth)}
    if isinstance(recipe.aggregation, Plus):
        raise MethodError(f"{method!r} adds up blocks from a start layer; the layers figure shows that")
    raise MethodError(f"{method!r} aggregates no blocks, so there is no depth to vary; tokentm and gradtoken do")


def _blocks(count: int) -> str:
    return f"{count} block" if count == 1 else f"{count} blocks"
