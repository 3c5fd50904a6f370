"""``explain``: images in, an ``Explanation`` out; any model, any number of methods, one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor, nn

from vitreous.anatomy import Anatomy, find_anatomy
from vitreous.errors import InputError, MethodError, TargetError, UnsupportedModelError
from vitreous.explanation import Explanation
from vitreous.images import read_image
from vitreous.methods import View, list_methods
from vitreous.models import LoadedModel, load_model
from vitreous.provenance import collect_provenance
from vitreous.spelling import Recipe, parse
from vitreous.tape import Gradients, Needs, Plan, Tape, record

if TYPE_CHECKING:
    from vitreous.tape import Pass

Images = Tensor | Sequence[Image.Image | str | Path] | Image.Image | str | Path
Target = None | int | Sequence[int] | Sequence[Sequence[int]] | Tensor


def explain(
    model: nn.Module | LoadedModel | str,
    images: Images,
    methods: str | Sequence[str] = ("tokentm", "gradtoken", "decompx.skipplus"),
    target: Target = None,
    *,
    topk: int | None = None,
) -> Explanation:
    """Explain why ``model`` says a class of each image.

    Args:
        model: any ``nn.Module`` that is a Vision Transformer inside, or a name that ``load_model`` understands.
        images: a preprocessed tensor (batch, 3, height, width); PIL images or paths where vitreous loaded the model.
        methods: spellings, ``name[.aggregation...][:option=value,...]``. All of them share one forward pass.
        target: the class to explain: ``None`` for the predicted one, one for all images, one per image ``(batch,)``, or
            several per image ``(batch, k)``.
        topk: instead of ``target``, the k most likely classes of each image.

    Returns:
        Raw signed scores of every patch for every method, (batch, patches) or (batch, k, patches).
    """
    recipes = _recipes(methods)
    loaded = load_model(model) if isinstance(model, str) else model
    network = loaded.model if isinstance(loaded, LoadedModel) else loaded
    if not isinstance(network, nn.Module):
        raise InputError(f"model must be an nn.Module or a name, not {type(network).__name__}")
    pixels, pictures = _pixels(loaded, network, images)
    anatomy = find_anatomy(network)
    needs = {recipe.spelling: recipe.needs(anatomy.depth) for recipe in recipes}
    _check_parts(anatomy, recipes, needs)
    with record(network, anatomy, pixels, Plan.of(anatomy.depth, needs.values())) as tape:
        targets = _targets(tape.logits, target, topk)
        scores = _scores(tape, recipes, needs, targets)
        several = topk is not None or _rank(target) == 2
        return Explanation(
            scores={name: maps if several else maps[:, 0] for name, maps in scores.items()},
            grid=tape.layout.grid,
            target=targets if several else targets[:, 0],
            logits=tape.logits,
            image_size=(pixels.shape[-2], pixels.shape[-1]),
            signed={recipe.spelling: recipe.signed for recipe in recipes},
            class_names=loaded.class_names if isinstance(loaded, LoadedModel) else None,
            images=pictures,
            provenance=_provenance(loaded, network, recipes),
        )


def _recipes(methods: str | Sequence[str]) -> list[Recipe]:
    spellings = [methods] if isinstance(methods, str) else list(dict.fromkeys(methods))
    if not spellings:
        raise MethodError("no method was asked for")
    return [parse(spelling) for spelling in spellings]


def _provenance(loaded: LoadedModel | nn.Module, network: nn.Module, recipes: list[Recipe]) -> dict[str, Any]:
    named = loaded if isinstance(loaded, LoadedModel) else None
    return collect_provenance(
        methods=[recipe.spelling for recipe in recipes],
        model=named.name if named else None,
        model_class=f"{type(network).__module__}.{type(network).__qualname__}",
        fingerprint=named.fingerprint if named else None,
    )


# Images ---------------------------------------------------------------------------------------------------------------


def _pixels(
    loaded: LoadedModel | nn.Module, network: nn.Module, images: Images
) -> tuple[Tensor, tuple[Image.Image, ...] | None]:
    """The model's input and, where they are known, the pictures it sees."""
    if isinstance(images, Tensor):
        _check_pixels(images)
        return _placed(images, network), None
    given = [images] if isinstance(images, Image.Image | str | Path) else list(images)
    if not isinstance(loaded, LoadedModel):
        raise InputError(
            "pictures and paths need a model that vitreous loaded by name, since it knows the preprocessing; "
            "give a preprocessed tensor (batch, 3, height, width) with a model of your own"
        )
    if not given:
        raise InputError("no image was given")
    pictures = [read_image(picture) for picture in given]
    pixels = loaded.preprocessing(pictures)
    return _placed(pixels, network), tuple(loaded.preprocessing.displayed(picture) for picture in pictures)


def _check_pixels(images: Tensor) -> None:
    shape = tuple(images.shape)
    if images.dim() != 4:
        raise InputError(f"images must have shape (batch, 3, height, width), not {shape}")
    if 0 in shape:
        raise InputError(f"images of shape {shape} are empty")
    if not images.is_floating_point():
        raise InputError(f"images must be floating point and normalised, not {images.dtype}")
    if not bool(torch.isfinite(images).all()):
        raise InputError("images hold NaN or infinite pixels")


def _placed(pixels: Tensor, network: nn.Module) -> Tensor:
    """On the model's device, in its precision; the number of channels must be what its first convolution takes."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            if pixels.shape[1] != module.in_channels:
                raise InputError(f"images have {pixels.shape[1]} channels, but the model takes {module.in_channels}")
            break
    weight = next(network.parameters(), None)
    return pixels if weight is None else pixels.to(weight.device, weight.dtype)


# Targets --------------------------------------------------------------------------------------------------------------


def _rank(target: Target) -> int:
    return 0 if target is None else torch.as_tensor(target).dim()


def _targets(logits: Tensor, target: Target, topk: int | None) -> Tensor:
    """Classes to explain, (batch, k)."""
    batch, classes = logits.shape
    if topk is not None:
        if target is not None:
            raise TargetError("give a target or topk, not both")
        if not 1 <= topk <= classes:
            raise TargetError(f"topk={topk} is not between 1 and {classes}, the number of classes")
        return logits.topk(topk, dim=1).indices
    if target is None:
        return logits.argmax(dim=1, keepdim=True)
    try:
        wanted = torch.as_tensor(target)
    except (TypeError, ValueError, RuntimeError):
        raise TargetError("target must be None, an integer, (batch,) or (batch, k) integers") from None
    if wanted.is_floating_point() or wanted.is_complex() or wanted.dtype == torch.bool:
        raise TargetError(f"target must be integers, not {wanted.dtype}")
    wanted = wanted.to(logits.device, torch.int64)
    if wanted.dim() == 0:
        wanted = wanted.expand(batch)
    if wanted.dim() == 1:
        wanted = wanted[:, None]
    if wanted.dim() != 2 or len(wanted) != batch or wanted.shape[1] == 0:
        raise TargetError(f"target has shape {tuple(torch.as_tensor(target).shape)} for {batch} images")
    if bool(((wanted < 0) | (wanted >= classes)).any()):
        raise TargetError(f"target is not between 0 and {classes - 1}, the classes of this model")
    return wanted


# Methods --------------------------------------------------------------------------------------------------------------


def _check_parts(anatomy: Anatomy, recipes: list[Recipe], needs: dict[str, Needs]) -> None:
    """Refuse methods that need a part which the model's blocks do not have, and say which methods do not."""
    for recipe in recipes:
        missing = _missing_part(anatomy, needs[recipe.spelling])
        if missing is not None:
            serving = [
                info.name
                for info in list_methods()
                if not _missing_part(anatomy, parse(info.name).needs(anatomy.depth))
            ]
            raise UnsupportedModelError(
                f"{recipe.spelling} cannot explain {anatomy.name}: {missing}. "
                f"Methods that work on it: {', '.join(serving) or 'none'}"
            )


def _missing_part(anatomy: Anatomy, needs: Needs) -> str | None:
    if needs.uses_attention and not anatomy.has_attention:
        return "its blocks have no attention part"
    for layer in needs.halves:
        block = anatomy.blocks[layer]
        if block.heads_to_stream is None:
            return f"in block {layer} no linear projection leads from the attention heads to the residual stream"
        if block.first_norm is None or block.second_norm is None:
            return f"the norm between attention and feed-forward part of block {layer} was not found"
    return None


def _scores(tape: Tape, recipes: list[Recipe], needs: dict[str, Needs], targets: Tensor) -> dict[str, Tensor]:
    """Scores (batch, k, patches) of every method, one backward pass per rule, objective and target."""
    found: dict[str, list[Tensor]] = {recipe.spelling: [] for recipe in recipes}
    for backward, group in _by_pass(recipes, needs).items():
        united = Needs()
        for recipe in group:
            united |= needs[recipe.spelling]
        for target in targets.unbind(dim=1):
            gradients = Gradients() if backward is None else tape.backward(backward, target, united)
            view = View(tape, gradients)
            for recipe in group:
                if backward is not None or not found[recipe.spelling]:
                    found[recipe.spelling].append(recipe.scores(view))
    count = targets.shape[1]
    return {
        name: torch.stack(maps, dim=1) if len(maps) == count else maps[0][:, None].expand(-1, count, -1).clone()
        for name, maps in found.items()
    }


def _by_pass(recipes: list[Recipe], needs: dict[str, Needs]) -> dict[Pass | None, list[Recipe]]:
    groups: dict[Pass | None, list[Recipe]] = {}
    for recipe in recipes:
        groups.setdefault(needs[recipe.spelling].backward, []).append(recipe)
    return groups
