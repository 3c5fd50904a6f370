"""Running a model without some of its patches, or with less attention on them.

True Token Masking drops the patches behind the position embedding: they are gone from the first block on, so the cost
falls with the tokens kept. The model is not edited and is written for all tokens; where it brings a table with one row
for every token of the whole picture (rotary positions, relative position bias, attention masks), the rows of the kept
ones are taken when the table meets them.

Which patches stay is a set. A block that works out positions from how many tokens it has (rotary ones, distances, a
grid of neighbours) takes the kept ones for the first of a picture and raises no error; but to such a block their order
matters, so the model is run with patches in two orders to find out. Where patches cannot be dropped they can be hidden,
if blocks look at each other's tokens by attention alone.

Damped attention (AtMan): column j of the scores before the softmax belongs to key token j. A factor on it is a factor
on key j and on the bias of its column, so fused attention stays fused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vitreous._utils.messages import error_message
from vitreous._utils.torch_state import HALF
from vitreous.architecture import Architecture
from vitreous.architecture.attention import AttentionCall
from vitreous.errors import UnsupportedModelError, VitreousError
from vitreous.inputs.model_io import FAILURES, Inputs
from vitreous.tape.attention import written as multihead
from vitreous.tape.attention.record import attention_arguments, bias_of_heads, heads_of, rows_of
from vitreous.tape.recording import interception as ops
from vitreous.tape.recording.interception import Handler, HandlerTable, Interception, TorchCall, result_at, with_result


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
        for function, handler in self.handlers().items():
            table.add((function,), handler)
        return Interception(self._architecture, self, table)

    def handlers(self) -> dict[Callable[..., Any], Handler]:
        """What acts on calls of torch functions, so that tables made for all tokens fit the kept ones."""
        pairs = (*ops.ADDITION, *ops.ADDITION_IN_PLACE, *ops.MULTIPLICATION, *ops.MULTIPLICATION_IN_PLACE)
        return {
            **dict.fromkeys((*pairs, *ops.MASKED_FILL), self._on_pair),
            **dict.fromkeys(ops.ATTENTION, self._on_attention),
            **dict.fromkeys((torch.split, Tensor.split), self._on_split),
        }

    def before(self, number: int) -> None:
        """Nothing to do."""
        del number

    def after(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Take the kept tokens; only at the first block."""
        del number, args, kwargs
        axes = self._point.axes
        made = result_at(output, self._point.output)
        if axes.dims != 3 or axes.order is not None:
            # A head may read its tokens by their places, which those behind dropped patches would lose.
            raise UnsupportedModelError(
                f"the stream of {self._architecture.name} is a grid, or other tokens follow its patches, so none "
                "can be dropped; paint patches instead (by=paint)"
            )
        stream = axes.tokens(made)
        self._prefix = stream.shape[1] - self._patches
        self._tokens = with_prefix(self._kept, self._prefix)
        taken = torch.take_along_dim(stream, self._tokens[..., None], dim=1)
        sizes = list(made.shape)
        sizes[axes.token_axes[0]] = taken.shape[1]
        return with_result(output, self._point.output, axes.stream(taken, torch.Size(sizes)))

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


class ScoreEditing:
    """Edits the attention scores of all blocks and of a pooling attention after them.

    Args:
        architecture: where the blocks are.
        factor: what the scores of a token's column are multiplied with, (batch, tokens); ``None`` leaves them.
        kept: patches that may be attended to, (batch, k), ascending; the columns of the others are hidden, and the
            others are dropped after the last block. ``None`` keeps all.
        patches: how many patches a whole picture has.
    """

    def __init__(self, architecture: Architecture, *, factor: Tensor | None, kept: Tensor | None, patches: int) -> None:
        self._architecture, self._factor, self._kept, self._patches = architecture, factor, kept, patches
        blocks = architecture.blocks
        self._calls: dict[int, tuple[int, AttentionCall]] = {}  # by the step at which scores are edited
        for layer, calls in [
            *((layer, block.attention) for layer, block in enumerate(blocks)),
            (len(blocks), architecture.pooling),
        ]:
            for call in (call for call in calls if call.over_tokens):
                step = call.entering_step if call.spelling == "written" else call.output_step
                self._calls[step] = layer, call
        self._start, self._end = blocks[0].input, blocks[-1].output
        self.steps = frozenset({self._start.step, self._end.step, *self._calls})
        self.own_steps: frozenset[int] = frozenset()
        self._step = -1
        self._batch = 1
        self._count = 0
        self._hidden: Tensor | None = None  # (batch, tokens), 0 or -inf
        self._edited: set[int] = set()

    def interception(self) -> Interception:
        """The context in which the model has to run."""
        table = HandlerTable()
        table.add(ops.ATTENTION, self._on_fused)
        table.add(ops.MULTI_HEAD_ATTENTION, self._on_multi_head)
        return Interception(self._architecture, self, table)

    def check(self) -> None:
        """Refuse a model in which some block's attention was not seen."""
        unseen = set(range(self._architecture.depth)) - self._edited
        if unseen:
            raise UnsupportedModelError(
                f"{self._architecture.name}: no attention was seen in block {min(unseen)}, so none can be held back "
                "from single patches and no patch can be dropped; paint them instead (by=paint)"
            )

    def before(self, number: int) -> None:
        """Note where the forward pass is."""
        self._step = number

    def after(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Edit scores; after the last block, drop what was hidden in all of them."""
        del args, kwargs
        if number in self._calls and self._calls[number][1].spelling == "written":
            output = self._edit(self._calls[number], output)
        if number == self._start.step:
            axes, stream = self._start.axes, result_at(output, self._start.output)
            entered = axes.stream(self._enter_stream(axes.tokens(stream)), stream.shape)
            output = with_result(output, self._start.output, entered)
        if number == self._end.step and self._kept is not None:
            left = self._leave_stream(result_at(output, self._end.output))
            output = with_result(output, self._end.output, left)
        return output

    def _enter_stream(self, stream: Tensor) -> Tensor:
        """The stream before the first block, (batch, tokens, channels)."""
        self._batch, self._count = stream.shape[:2]
        if self._kept is not None:
            tokens = with_prefix(self._kept, self._count - self._patches)
            hidden = stream.new_full((len(tokens), self._count), float("-inf"))
            self._hidden = hidden.scatter_(1, tokens, 0.0)
        return stream

    def _leave_stream(self, output: Tensor) -> Tensor:
        assert self._kept is not None
        axes = self._end.axes
        if axes.dims != 3 or axes.order is not None:
            raise UnsupportedModelError(
                f"the stream of {self._architecture.name} is a grid, or other tokens follow its patches, so none "
                "can be dropped; paint patches instead (by=paint)"
            )
        tokens = with_prefix(self._kept, self._count - self._patches)
        taken = torch.take_along_dim(axes.tokens(output), tokens[..., None], dim=1)
        sizes = list(output.shape)
        sizes[axes.token_axes[0]] = taken.shape[1]
        self._hidden = None
        return axes.stream(taken, torch.Size(sizes))

    def _on_fused(self, call: TorchCall) -> Any:
        found = self._calls.get(self._step)
        if found is None:
            return call.proceed()
        layer, spec = found
        query, key, value, bias, scale = attention_arguments(*call.args, **call.kwargs)
        batch = self._batch
        if query.dim() != 3 or len(query) % batch:
            return self._attend(layer, query, key, value, bias, scale)
        first = spec.heads_first
        query, key, value = (heads_of(part, batch, heads_first=first) for part in (query, key, value))
        bias = bias_of_heads(bias, batch, heads_first=first)
        return rows_of(self._attend(layer, query, key, value, bias, scale), heads_first=first)

    def _on_multi_head(self, call: TorchCall) -> Any:
        found = self._calls.get(self._step)
        if found is None or not multihead.can_open(call.args, call.kwargs):
            return call.proceed()
        layer, _ = found

        def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
            return self._attend(layer, query, key, value, bias, query.shape[-1] ** -0.5)

        return multihead.open_up(attend, nn.functional.linear, call.args, call.kwargs)

    def _attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
    ) -> Tensor:
        factor, hidden = self._columns(layer, key.shape[2], key.dtype)
        if factor is not None:
            key = key * factor.mT
            bias = None if bias is None else bias * factor
        if hidden is not None:
            bias = hidden if bias is None else bias + hidden
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)

    def _edit(self, found: tuple[int, AttentionCall], scores: Tensor) -> Tensor:
        """Scores that a model has written out itself."""
        layer, call = found
        arranged = call.arrange_scores(scores, self._batch)
        if arranged is None or arranged.shape[0] != self._batch:
            return scores
        factor, hidden = self._columns(layer, arranged.shape[-1], scores.dtype)
        arranged = arranged if factor is None else arranged * factor
        arranged = arranged if hidden is None else arranged + hidden
        return call.restore_scores(arranged, self._batch, scores.shape)

    def _columns(self, layer: int, keys: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Factors and biases of the looked-at tokens, (batch, 1, 1, keys); a pooling may leave out the prefix."""
        if keys not in (self._count, self._patches):
            return None, None
        self._edited.add(layer)
        factor = None if self._factor is None else self._of_keys(self._factor, keys).to(dtype)
        hidden = None if self._hidden is None else self._of_keys(self._hidden, keys).to(dtype)
        return factor, hidden

    def _of_keys(self, values: Tensor, keys: int) -> Tensor:
        """Values of tokens (batch, tokens) as the keys lie, (batch, 1, 1, keys)."""
        order = self._start.axes.order
        if order is not None and keys == len(order):
            values = values[:, torch.tensor(order, device=values.device).argsort()]
        return values[:, None, None, -keys:]


RemovalStrategy = Literal["drop", "hide"]
_FEW_TOKENS = 8  # tokens: so many have orders enough
_ROUNDING = 1e-3  # of the largest logit: sums in another order differ by far less, other positions by far more
_ROUNDING_OF_HALF = 1e-2  # if rounding is taken for more, patches are hidden, which costs more and is as right

# Found once for a model and an input size, and again when its parameters have changed.
_KNOWN: WeakKeyDictionary[nn.Module, dict[object, RemovalStrategy]] = WeakKeyDictionary()


class Interceptor(Protocol):
    """What intercepts a run."""

    def interception(self) -> Interception:
        """The context in which the model has to run."""


Run = Callable[[Inputs, Interceptor], Tensor]


def removal_strategy(
    model: nn.Module, architecture: Architecture, inputs: Inputs, patches: int, run: Run
) -> RemovalStrategy:
    """How some of the ``patches`` can be taken from a model; the first time it costs a part of a picture, or two more.

    Raises:
        UnsupportedModelError: they can be neither dropped nor hidden.
    """
    known = _KNOWN.setdefault(model, {})
    # Texts have many lengths, but a short one's order tells less.
    shape = inputs.shape[1:] if isinstance(inputs, Tensor) else min(patches, _FEW_TOKENS)
    key = (shape, sum(map(_version, model.parameters())))
    if key not in known:
        same_twice = inputs[torch.zeros(2, dtype=torch.int64, device=inputs.device)]
        known[key] = _find_strategy(architecture, same_twice, patches, run)
    return known[key]


def _find_strategy(architecture: Architecture, same_twice: Inputs, patches: int, run: Run) -> RemovalStrategy:
    few = max(1, min(patches - 1, _FEW_TOKENS), patches // 8)  # they cost what they are, and their order tells as much
    some = torch.randperm(patches, generator=torch.Generator().manual_seed(0))[:few]
    if bool((some.diff() > 0).all()):  # of a few it may be the ascending order itself
        some = some.roll(1)
    two_orders = torch.stack((some.sort().values, some)).to(same_twice.device)
    with suppress(UnsupportedModelError, *FAILURES):
        if few > 1 and _alike(run(same_twice, TokenDropping(architecture, two_orders, patches))):
            return "drop"
    check_hiding(architecture, same_twice, patches, two_orders, run)
    return "hide"


def check_hiding(architecture: Architecture, same_twice: Inputs, patches: int, kept: Tensor, run: Run) -> None:
    """Refuse a model in which what is hidden is seen: one and the same picture, with other hidden tokens.

    ``kept`` may name the same patches in two orders: after the last block they stand in it, and a head must not mind.

    Raises:
        UnsupportedModelError: something else than attention reads them, or the model cannot do without them.
    """
    editing = _OtherwiseHidden(architecture, factor=None, kept=kept, patches=patches)
    try:
        logits = run(same_twice, editing)
    except (VitreousError, torch.OutOfMemoryError):
        raise
    except FAILURES as error:
        raise UnsupportedModelError(
            f"{architecture.name} does not run with fewer patches ({error_message(error).rstrip('.')}), so none can be "
            "dropped; paint patches instead (by=paint)"
        ) from error
    editing.check()
    if not _alike(logits):
        raise UnsupportedModelError(
            f"the tokens of {architecture.name} are mixed other than by attention (a convolution over neighbours or a "
            "mean over all tokens in its blocks, or randomness), so no patch can be dropped; paint patches instead "
            "(by=paint)"
        )


class _OtherwiseHidden(ScoreEditing):
    """Hides patches, and puts other numbers into those of the second picture."""

    def _enter_stream(self, stream: Tensor) -> Tensor:
        stream = super()._enter_stream(stream)
        assert self._hidden is not None
        changed = self._hidden.isinf() & torch.tensor([[False], [True]], device=stream.device)
        return torch.where(changed[..., None], stream.roll(1, dims=-1), stream)


def _alike(logits: Tensor) -> bool:
    """Whether two pictures have the same logits, of which some may be -inf."""
    one, other = logits.unbind()
    largest = logits[logits.isfinite()].abs().amax() if bool(logits.isfinite().any()) else 0
    rounding = _ROUNDING_OF_HALF if logits.dtype in HALF else _ROUNDING
    return bool(((one == other) | ((one - other).abs() <= rounding * largest)).all())


def _version(parameter: Tensor) -> int:
    """How often a parameter was changed in place; those of inference mode are not."""
    return 0 if parameter.is_inference() else parameter._version  # noqa: SLF001  # there is no public name for it
