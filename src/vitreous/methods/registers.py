"""Test-time registers [jiang2025vision][]: high activations of a few neurons, moved from patches to an added token.

Some trained Vision Transformers write large values into a few patches that hold little of the photo, and maps of
attention show these patches. The authors find the neurons that do it, add a token, and let these neurons act on it
alone. What comes out is a model, which methods explain as they explain others; only the relevance rules of LRP have
none for the maximum that is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.errors import InputError, UnsupportedModelError
from vitreous.tape.runner import ModelRunner

Neuron = tuple[int, int]  # block, and channel of its feed-forward part
_ACTIVATIONS = (nn.GELU, nn.ReLU, nn.SiLU, nn.Hardswish)


class TestTimeRegisters(nn.Module):
    """A model with one more token, which some neurons act on instead of the patches.

    The token is all 0 where it enters the first block, stands behind the other prefix tokens, and is gone behind the
    last block. In every forward pass each register neuron has, at the added token, the largest of its activations, and
    0 at the patches; class token and registers keep theirs.

    Attributes:
        model: the model itself, whose weights are not copied.
        neurons: block and channel of the register neurons.
        prefix: tokens in front of the patches, without the added one.
    """

    __test__ = False  # it is no test, whatever test runners make of its name

    def __init__(self, model: nn.Module, neurons: Sequence[Neuron], *, prefix: int = 1) -> None:
        super().__init__()
        self.model, self.neurons, self.prefix = model, tuple(neurons), prefix
        find_feed_forward(model)  # refuses a model that it cannot change

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model with its added token."""
        blocks, activations = find_feed_forward(self.model)
        by_block: dict[int, list[int]] = {}
        for block, channel in self.neurons:
            by_block.setdefault(block, []).append(channel)
        with ExitStack() as hooks:
            hooks.enter_context(_hooked(blocks[0].register_forward_pre_hook(self._add_token)))
            for block, channels in by_block.items():
                shift = self._shifting(torch.tensor(channels))
                hooks.enter_context(_hooked(activations[block].register_forward_hook(shift)))
            hooks.enter_context(_hooked(blocks[-1].register_forward_hook(self._drop_token)))
            return self.model(*args, **kwargs)

    def _add_token(self, _block: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        stream, prefix = given[0], self.prefix
        token = torch.zeros_like(stream[:, :1])
        return (torch.cat((stream[:, :prefix], token, stream[:, prefix:]), dim=1), *given[1:])

    def _drop_token(self, _block: nn.Module, _given: tuple[Any, ...], output: Any) -> Any:
        stream, prefix = output[0] if isinstance(output, tuple) else output, self.prefix
        left = torch.cat((stream[:, :prefix], stream[:, prefix + 1 :]), dim=1)
        return (left, *output[1:]) if isinstance(output, tuple) else left

    def _shifting(self, channels: Tensor) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        def shift(_activation: nn.Module, _given: Any, values: Tensor) -> Tensor:
            chosen = channels.to(values.device)
            at_prefix, patches = values[:, : self.prefix], values[:, self.prefix + 1 :]
            token = values[:, self.prefix : self.prefix + 1]
            highest = values.amax(dim=1, keepdim=True)
            here = torch.zeros(values.shape[-1], dtype=torch.bool, device=values.device).index_fill(0, chosen, True)  # noqa: FBT003
            return torch.cat(
                (at_prefix, torch.where(here, highest, token), torch.where(here, torch.zeros_like(patches), patches)),
                dim=1,
            )

        return shift


def add_test_time_registers(
    model: nn.Module,
    images: Tensor,
    *,
    neurons: int = 10,
    outlier: float = 3.0,
    layer: int = -1,
    highest_block: int | None = None,
    prefix: int | None = None,
) -> TestTimeRegisters:
    """Find a model's register neurons and give it a test-time register.

    Outliers are patches whose token, where it leaves block ``layer``, is more than ``outlier`` times as long as the
    median patch of its photo. A neuron's score is its mean absolute activation at outliers; the highest ones are the
    register neurons.

    Args:
        model: a Vision Transformer whose blocks are a list of modules, each with one activation module.
        images: preprocessed photos to find the neurons with; some dozens are enough.
        neurons: how many neurons are moved.
        outlier: how many times the median length makes a patch an outlier.
        layer: the block behind which outliers are looked for, from the end where below 0.
        highest_block: neurons of later blocks are left alone; by default the block behind which outliers first show,
            since what follows only reacts to them.
        prefix: tokens in front of the patches; by default those that a run of the model shows.

    Returns:
        A model to pass to ``explain`` and all else in the place of the given one.

    Raises:
        UnsupportedModelError: the blocks are not found, or no patch is an outlier, so that there is nothing to move.

    Examples:
        >>> import vitreous
        >>> from PIL import Image
        >>> images = model.preprocessing([Image.open("demo.jpg")])
        >>> changed = vitreous.add_test_time_registers(model.model, images, outlier=1.01)
        >>> vitreous.explain(changed, images, "gae").grid == vitreous.explain(model.model, images, "gae").grid
        True
    """
    if neurons < 1 or not outlier > 1:
        raise InputError("neurons must be at least 1 and outlier larger than 1")
    blocks, activations = find_feed_forward(model)
    last = range(len(blocks))[layer]
    prefix = ModelRunner(model, images[:1]).layout.prefix if prefix is None else prefix
    hidden: dict[int, Tensor] = {}
    lengths: dict[int, Tensor] = {}
    was_training = model.training
    total: Tensor | None = None
    count, first = 0, 0
    with ExitStack() as hooks, torch.no_grad():
        model.eval()
        hooks.callback(model.train, was_training)
        for number in range(last + 1):
            hooks.enter_context(
                _hooked(blocks[number].register_forward_hook(_keeping_lengths(lengths, number, prefix)))
            )
            hooks.enter_context(_hooked(activations[number].register_forward_hook(_keeping(hidden, number, prefix))))
        for image in torch.split(images, 1):
            model(image)
            outliers = lengths[last] > outlier * lengths[last].median()
            if bool(outliers.any()):
                high = [hidden[number][outliers].abs().mean(dim=0) for number in range(last + 1)]
                total = torch.stack(high) if total is None else total + torch.stack(high)
                count += 1
                first = max(first, _first_block(lengths, outliers, outlier))
    if total is None:
        raise UnsupportedModelError(
            f"no patch of {type(model).__name__} is {outlier:g} times as long as the median one on these "
            f"{len(images)} images, so there is nothing that a test-time register could take over"
        )
    total = total[: (first if highest_block is None else min(highest_block, last)) + 1]
    order = (total / count).flatten().argsort(descending=True, stable=True)[:neurons]
    found = [divmod(int(place), total.shape[1]) for place in order]
    return TestTimeRegisters(model, found, prefix=prefix).train(was_training)


def _keeping(found: dict[int, Tensor], number: int, prefix: int) -> Callable[[nn.Module, Any, Tensor], None]:
    def keep(_activation: nn.Module, _given: Any, values: Tensor) -> None:
        found[number] = values[0, prefix:].detach()

    return keep


def _keeping_lengths(found: dict[int, Tensor], number: int, prefix: int) -> Callable[[nn.Module, Any, Any], None]:
    def keep(_block: nn.Module, _given: Any, output: Any) -> None:
        found[number] = (output[0] if isinstance(output, tuple) else output)[0, prefix:].norm(dim=-1).detach()

    return keep


def _first_block(lengths: dict[int, Tensor], outliers: Tensor, outlier: float) -> int:
    """The first block behind which some of the outliers are outliers already."""
    return next(
        number for number, each in sorted(lengths.items()) if bool((each[outliers] > outlier * each.median()).any())
    )


def find_feed_forward(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The blocks of a model, and the activation of each one's feed-forward part.

    Raises:
        UnsupportedModelError: they are not found, or a block has no activation module, or several.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    candidates = [
        (list(each.children()), [list(_activations(block)) for block in each.children()])
        for each in lists
        if len(each) > 1 and len({type(block) for block in each.children()}) == 1
    ]
    fitting = [(blocks, found) for blocks, found in candidates if all(len(each) == 1 for each in found)]
    if not fitting:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of blocks with one activation module each (GELU, ReLU, SiLU), so its "
            "register neurons cannot be found"
        )
    blocks, activations = max(fitting, key=lambda each: len(each[0]))
    return blocks, [each[0] for each in activations]


def _activations(block: nn.Module) -> Iterator[nn.Module]:
    for module in block.modules():
        if isinstance(module, _ACTIVATIONS) or type(module).__name__.endswith(("GELU", "GELUActivation")):
            yield module


@contextmanager
def _hooked(handle: torch.utils.hooks.RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
