"""Finding the blocks inside any ``nn.Module``: the stack of alike modules that attend."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from vitreous.anatomy.description import Anatomy
from vitreous.anatomy.parts import attention_of, describe_block
from vitreous.errors import UnsupportedModelError
from vitreous.outputs import scale_of

_LISTS = (nn.ModuleList, nn.ModuleDict)  # hold modules and are never called themselves
_ATTENTION_FREE_STACK = 4  # fewer alike modules in a row are an accident, not a stack of blocks


def find_anatomy(model: nn.Module) -> Anatomy:
    """Find the blocks of ``model``, which may be wrapped in other modules.

    Raises:
        UnsupportedModelError: there is no stack of transformer blocks, or more than one.
    """
    name = type(model).__name__
    stacks = list(_attending_stacks(model, own_names=False)) or list(_attending_stacks(model, own_names=True))
    if len(stacks) > 1:
        paths = ", ".join(f"{path} ({len(blocks)} x {type(blocks[0]).__name__})" for path, blocks in stacks)
        raise UnsupportedModelError(
            f"{name} has {len(stacks)} separate stacks of attention blocks: {paths}. There is no single stream of "
            "tokens with attention between all patches (windowed, hierarchical and branched models have none), so no "
            "method here serves it; of a model with several towers, give the image tower alone"
        )
    blocks = stacks[0][1] if stacks else _longest_alike(model)
    if not blocks and _holds_lists(model):
        raise UnsupportedModelError(
            f"{name} keeps the parts of its blocks in lists (nn.ModuleList or nn.ModuleDict inside nn.ModuleList), so "
            "that no module is called with the tokens of a block; make a module of each pair of attention and "
            "feed-forward part"
        )
    if not blocks:
        raise UnsupportedModelError(
            f"{name} has no stack of transformer blocks: in no nn.ModuleList or nn.Sequential an attention part is "
            "found by its name (attn, self_attn, attention, mha, ...) in every module, so no method here serves it"
        )
    described = tuple(describe_block(block) for block in blocks)
    batch_first, others = _batch_first(described[0].attention), _alike_outside(model, blocks)
    return Anatomy(name, described, batch_first, scale_of(model), others)


def _attending_stacks(model: nn.Module, *, own_names: bool) -> Iterator[tuple[str, list[nn.Module]]]:
    chunks: set[nn.Module] = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and module not in chunks:
            for blocks in (list(module), _of_numbered_chunks(module)):
                if blocks and all(_attends(block, own_names=own_names) for block in blocks):
                    chunks.update(module)
                    yield path, blocks
                    break


def _of_numbered_chunks(module: nn.ModuleList | nn.Sequential) -> list[nn.Module]:
    """The blocks in a list of lists, each of which begins with as many ``nn.Identity`` as blocks stand before it.

    DINOv2's own code keeps them so: the names of weights tell the number of a block. Lists without these may as well be
    branches that run side by side.
    """
    blocks: list[nn.Module] = []
    for chunk in module:
        if not isinstance(chunk, nn.ModuleList | nn.Sequential):
            return []
        parts = list(chunk)
        if len(parts) <= len(blocks) or not all(isinstance(part, nn.Identity) for part in parts[: len(blocks)]):
            return []
        blocks += parts[len(blocks) :]
    return blocks


def _alike_outside(model: nn.Module, blocks: list[nn.Module]) -> tuple[nn.Module, ...]:
    """Modules of the blocks' own class that attend and are no part of them; a run tells whether they are used."""
    inside = {part for block in blocks for part in block.modules()}
    kinds = {type(block) for block in blocks}
    outside = (module for module in model.modules() if type(module) in kinds and module not in inside)
    return tuple(module for module in outside if attention_of(module) is not None)


def _attends(block: nn.Module, *, own_names: bool) -> bool:
    return not isinstance(block, _LISTS) and attention_of(block, own_names=own_names) is not None


def _longest_alike(model: nn.Module) -> list[nn.Module]:
    """The longest run of modules of one class, for models without attention that still have a residual stream."""
    longest: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            blocks = list(module)
            alike = len({type(block) for block in blocks}) == 1 and any(True for _ in blocks[0].children())
            alike = alike and not isinstance(blocks[0], _LISTS)
            if alike and len(blocks) >= _ATTENTION_FREE_STACK and len(blocks) > len(longest):
                longest = blocks
    return longest


def _holds_lists(model: nn.Module) -> bool:
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return any(isinstance(part, _LISTS) for module in lists for part in module)


def _batch_first(attention: nn.Module | None) -> bool:
    """Only nn.MultiheadAttention may put tokens first, and then the stream runs that way too."""
    if isinstance(attention, nn.MultiheadAttention):
        return bool(attention.batch_first)
    return True
