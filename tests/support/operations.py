"""Counts of what a job does that do not depend on the machine: passes, products, attention matrices, bytes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from vitreous.architecture import find_architecture

_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm}
_SOFTMAX = {_ATEN._softmax, _ATEN.softmax}


@dataclass(frozen=True)
class Operations:
    """What one job did.

    Attributes:
        forward_passes: runs of the whole model.
        block_calls: runs of each block.
        backward_products: of each block, products of an arriving gradient with a weight matrix. A block with qkv,
            output projection and two feed-forward layers has four of them in a full backward pass.
        head_products: the same of everything behind and before the blocks.
        weight_gradients: products in backward passes that are as large as a weight matrix: gradients of weights, which
            no explanation needs.
        softmaxes: over the tokens that a token looks at, in attention that is not fused.
        attention_matrices: tensors made whose last two axes are tokens x tokens.
        forward_flops: floating point operations of matrix products, convolutions and fused attention.
        backward_flops: the same inside backward passes.
        largest_tensor: in bytes.
        peak_bytes: of all tensors made by the job that were alive at one time, inputs and parameters not counted, nor
            what one operation needs inside itself.
    """

    forward_passes: int
    block_calls: tuple[int, ...]
    backward_products: tuple[int, ...]
    head_products: int
    weight_gradients: int
    softmaxes: int
    attention_matrices: int
    forward_flops: int
    backward_flops: int
    largest_tensor: int
    peak_bytes: int


def count_operations(model: nn.Module, images: Tensor, job: Callable[[], object]) -> Operations:
    """Run ``job``, which does something with ``model``, and count.

    The run is slower than an ordinary one and has the same results.
    """
    counter = _Counter(model, images)
    with counter.hooked(), counter:
        job()
    return counter.found()


class _Counter(TorchDispatchMode):
    """Sees every operation of this thread, those of backward passes included."""

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        architecture = find_architecture(model, images)
        self._model, self._batch_first = model, architecture.blocks[0].input.axes.batch_first
        self._blocks = [block.module for block in architecture.blocks]
        self._weights = dict(_weights(model, self._blocks))
        self._weight_shapes = {shape for matrix in _matrices(model) for shape in (matrix, matrix[::-1])}
        self._forward_passes, self._tokens = 0, 0
        self._calls = [0] * len(self._blocks)
        self._products = [0] * (len(self._blocks) + 1)  # the last is what belongs to no block
        self._weight_gradients, self._softmaxes, self._matrices = 0, 0, 0
        self._flops = {False: 0, True: 0}
        self._bytes, self._peak, self._largest = 0, 0, 0

    def found(self) -> Operations:
        """What was counted."""
        return Operations(
            forward_passes=self._forward_passes,
            block_calls=tuple(self._calls),
            backward_products=tuple(self._products[:-1]),
            head_products=self._products[-1],
            weight_gradients=self._weight_gradients,
            softmaxes=self._softmaxes,
            attention_matrices=self._matrices,
            forward_flops=self._flops[False],
            backward_flops=self._flops[True],
            largest_tensor=self._largest,
            peak_bytes=self._peak,
        )

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Be told when the model and its blocks are called."""
        hooks = [self._model.register_forward_pre_hook(self._on_model)]
        hooks += [block.register_forward_pre_hook(self._on_block(number)) for number, block in enumerate(self._blocks)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _on_model(self, model: nn.Module, arguments: tuple[Any, ...]) -> None:
        del model, arguments
        self._forward_passes += 1

    def _on_block(self, number: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(block: nn.Module, arguments: tuple[Any, ...]) -> None:
            del block
            self._calls[number] += 1
            self._tokens = arguments[0].shape[1 if self._batch_first else 0]

        return hook

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and count it."""
        del types
        kwargs = kwargs or {}
        operation = func._overloadpacket
        if operation not in flop_registry and operation not in _SOFTMAX:
            # Under inference_mode composed operations arrive as they were called; their parts are what counts.
            with self:
                composed = func.decompose(*args, **kwargs)
            if composed is not NotImplemented:
                return composed
        output = func(*args, **kwargs)
        backward = torch._C._current_graph_task_id() != -1
        if operation in flop_registry:
            self._flops[backward] += flop_registry[operation](*args, **kwargs, out_val=output)
        if backward and operation in _PRODUCTS:
            self._on_backward_product(args, output)
        if operation in _SOFTMAX:
            self._softmaxes += output.dim() == 4 and output.shape[-1] == self._tokens
        given = {_address(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        for tensor in tree_leaves(output):
            # What lies where an argument lies is a view of it, or the operation was in place.
            if isinstance(tensor, Tensor) and _address(tensor) not in given:
                self._on_tensor(tensor)
        return output

    def _on_backward_product(self, args: tuple[Any, ...], output: Tensor) -> None:
        operands = (_address(value) for value in args if isinstance(value, Tensor))
        owner = next((self._weights[operand] for operand in operands if operand in self._weights), None)
        if owner is not None:
            self._products[owner] += 1
        elif tuple(output.shape) in self._weight_shapes:
            self._weight_gradients += 1

    def _on_tensor(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self._bytes += size
        self._peak, self._largest = max(self._peak, self._bytes), max(self._largest, size)
        weakref.finalize(storage, self._on_freed, size).atexit = False
        self._matrices += self._tokens > 0 and tuple(tensor.shape[-2:]) == (self._tokens, self._tokens)

    def _on_freed(self, size: int) -> None:
        self._bytes -= size


def _address(tensor: Tensor) -> int:
    """Where its numbers lie, the same for all views of them."""
    return tensor.untyped_storage().data_ptr()


def _weights(model: nn.Module, blocks: list[nn.Module]) -> Iterator[tuple[int, int]]:
    """Every parameter's address with the number of its block; the number behind the last is for those of none."""
    for parameter in model.parameters():
        yield _address(parameter), len(blocks)
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            yield _address(parameter), number


def _matrices(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """The shapes of weight matrices; a convolution's is flattened as a product would have it."""
    for parameter in model.parameters():
        if parameter.dim() >= 2 and math.prod(parameter.shape[1:]) > 1:
            yield len(parameter), math.prod(parameter.shape[1:])
