"""True Token Masking: a model runs on some of the patches only, the others are dropped after the position embedding.

Dropped tokens are really gone from the first block on, so the cost falls with the tokens kept. The model is not edited
and is written for all tokens; where it brings a table with one row for every token of the whole picture (rotary
positions, relative position bias, attention masks), the rows of the kept ones are taken when the table meets them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitreous.architecture import Architecture
from vitreous.errors import UnsupportedModelError
from vitreous.tape.recording import torch_functions as ops
from vitreous.tape.recording.interception import HandlerTable, Interception, TorchCall, result_at, with_result


class TokenDropping:
    """Removes patches from the stream at the first block of one forward pass.

    Args:
        architecture: where the blocks are.
        kept: the patches that stay, (batch, k), ascending in every row.
        patches: how many patches a whole picture has.
    """

    def __init__(self, architecture: Architecture, kept: Tensor, patches: int) -> None:
        self._architecture, self._kept, self._patches = architecture, kept, patches
        self._point = architecture.blocks[0].input
        self.steps, self.own_steps = frozenset({self._point.step}), frozenset[int]()
        self._tokens: Tensor | None = None  # indices of the kept tokens, prefix included, once the first block has run
        self._prefix = 0

    def interception(self) -> Interception:
        """The context in which the model has to run."""
        table = HandlerTable()
        table.add((*ops.ADDITION, *ops.ADDITION_IN_PLACE), self._on_pair)
        table.add((*ops.MULTIPLICATION, *ops.MULTIPLICATION_IN_PLACE), self._on_pair)
        table.add(ops.MASKED_FILL, self._on_pair)
        table.add(ops.ATTENTION, self._on_attention)
        table.add((torch.split, Tensor.split), self._on_split)
        return Interception(self._architecture, self, table)

    def before(self, number: int) -> None:
        """Nothing to do."""
        del number

    def after(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Take the kept tokens; only at the first block."""
        del number, args, kwargs
        axes = self._point.axes
        made = result_at(output, self._point.output)
        stream = replace(axes, order=None).tokens(made)
        self._prefix = stream.shape[1] - self._patches
        patches = None if axes.order is None else list(axes.order[self._prefix :])
        if axes.dims != 3 or axes.fold > 1 or (patches is not None and patches != sorted(patches)):
            raise UnsupportedModelError(
                f"the stream of {self._architecture.name} is a grid, or its patches do not stand row by row, so that "
                "none can be left out; paint them instead (by=paint)"
            )
        self._tokens = with_prefix(self._kept, self._prefix)
        if axes.order is not None:  # other tokens stand behind or among the patches
            self._tokens = torch.tensor(axes.order, device=made.device)[self._tokens].sort(dim=1).values
        taken = torch.take_along_dim(stream, self._tokens[..., None], dim=1)
        sizes = list(made.shape)
        sizes[axes.token_axes[0]] = taken.shape[1]
        left = replace(axes, order=None).stream(taken, torch.Size(sizes))
        return with_result(output, self._point.output, left)

    def _on_pair(self, call: TorchCall) -> Any:
        """A table that is added to the kept tokens, multiplied with them, or tells where to fill them."""
        args, kwargs = call.args, call.kwargs
        if self._tokens is not None and len(args) > 1 and isinstance(args[0], Tensor) and isinstance(args[1], Tensor):
            first, second = args[0], args[1]
            args = (self._fitted(first, second), self._fitted(second, first), *args[2:])
        return call.proceed_with(args, kwargs)

    def _on_attention(self, call: TorchCall) -> Any:
        """The mask or position bias of a fused attention call."""
        args, kwargs = call.args, call.kwargs
        if self._tokens is not None:
            query, key = args[0], args[1]
            scores = query[..., :1].expand(*query.shape[:-1], key.shape[-2])
            if len(args) > 3 and isinstance(args[3], Tensor):
                args = (*args[:3], self._fitted(args[3], scores), *args[4:])
            elif isinstance(kwargs.get("attn_mask"), Tensor):
                kwargs = {**kwargs, "attn_mask": self._fitted(kwargs["attn_mask"], scores)}
        return call.proceed_with(args, kwargs)

    def _on_split(self, call: TorchCall) -> Any:
        """Prefix tokens and patches taken apart by the size of the table that the patches will meet."""
        args, kwargs = call.args, call.kwargs
        sizes = args[1] if len(args) > 1 else None
        if self._tokens is not None and isinstance(sizes, tuple | list) and tuple(sizes[1:]) == (self._patches,):
            args = (args[0], [self._prefix, self._kept.shape[1]], *args[2:])
        return call.proceed_with(args, kwargs)

    def _fitted(self, table: Tensor, stream: Tensor) -> Tensor:
        """``table`` as it is, or its rows for the kept tokens where ``stream`` has those only."""
        assert self._tokens is not None
        for index, whole in ((self._tokens, self._prefix + self._patches), (self._kept, self._patches)):
            count = index.shape[1]
            if stream.dim() < 3 or table.dim() < 2 or table.shape[-2] != whole or stream.shape[-2] != count:
                continue
            index = index.view(len(index), *[1] * (stream.dim() - 3), count)  # noqa: PLW2901
            if table.shape[-1] == whole and stream.shape[-1] == count:  # one row and one column for every token
                rows = torch.take_along_dim(_lifted(table, stream), index[..., None], dim=-2)
                return torch.take_along_dim(rows, index[..., None, :], dim=-1)
            if table.shape[-1] in (1, stream.shape[-1]):
                return torch.take_along_dim(_lifted(table, stream), index[..., None], dim=-2)
        return table


def with_prefix(kept: Tensor, prefix: int) -> Tensor:
    """Token indices (batch, prefix + k) of the prefix tokens and the kept patches."""
    first = torch.arange(prefix, device=kept.device).expand(len(kept), -1)
    return torch.cat((first, kept + prefix), dim=1)


def check_kept(kept: Tensor, images: int, patches: int) -> Tensor:
    """``kept`` with ascending rows: which patches stay is a set, and tables have their rows in the picture's order.

    Raises:
        ValueError: it is not (images, k) indices of patches, each at most once.
    """
    if kept.dim() != 2 or len(kept) != images or kept.dtype != torch.int64:
        raise ValueError(f"kept must be int64 of shape ({images}, k), not {kept.dtype} {tuple(kept.shape)}")
    ascending = kept.sort(dim=1).values
    if kept.shape[1] and (ascending.min() < 0 or ascending.max() >= patches):
        raise ValueError(f"kept must hold patches from 0 to {patches - 1}")
    if bool((ascending.diff(dim=1) == 0).any()):
        raise ValueError("kept must hold every patch at most once")
    return ascending


def nothing_left(name: str) -> UnsupportedModelError:
    """What is wrong with dropping all patches of a model that averages or attends over them."""
    return UnsupportedModelError(
        f"the head of {name} reads the patches, so nothing is left to read when all of them are dropped; "
        "paint them instead (by=paint)"
    )


def _lifted(table: Tensor, stream: Tensor) -> Tensor:
    """With as many dimensions as the stream, so that the first is the batch."""
    return table.view(*[1] * (stream.dim() - table.dim()), *table.shape)
