"""The heads strip: every head's signed map before the heads are integrated (GradToken Fig. 10)."""

from __future__ import annotations

from vitreous.errors import MethodError
from vitreous.explaining import explain
from vitreous.methods.gradtoken import QueryGradientKey
from vitreous.pictures.data.recording import recorded
from vitreous.pictures.data.strip import Strip
from vitreous.pixels import Images, Model, find_model
from vitreous.spelling import parse
from vitreous.tape.torch_state import leaves_torch_as_it_was
from vitreous.targets import Target


@leaves_torch_as_it_was
def heads_strip(model: Model, image: Images, method: str = "gradtoken", target: Target = None) -> Strip:
    """Give the maps M_h of gradtoken, propagated as its spelling says, signed and on one scale."""
    recipe = parse(method)
    readout = recipe.readout
    if not isinstance(readout, QueryGradientKey):
        raise MethodError(f"{method!r} has no map for each head; gradtoken has")
    loaded = find_model(model, image)
    explanation = explain(loaded, image, method, target)  # refuses, with reasons, what cannot be explained
    with recorded(loaded, image, recipe, target) as view:
        layers = recipe.aggregation.layers(view.depth)
        if len(layers) > 1:
            raise MethodError(f"{method!r} adds up several blocks, and their heads have nothing to do with each other")
        maps = readout.propagate(view, readout.maps(view, layers[0]), layers[0])[0].T.clone()
    # Spread maps may be far from zero and nearly flat; then the numbers tell more than the colours.
    captions = tuple(f"head {n}: {one.min():.2g} to {one.max():.2g}" for n, one in enumerate(maps))
    return Strip(method, explanation, captions, maps.cpu(), signed=True, shared=True)
