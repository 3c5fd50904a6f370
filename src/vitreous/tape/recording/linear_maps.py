"""The linear maps of a block as one run had them: norms, the projection of the heads, the projection to the values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from vitreous._utils.torch_state import at_least_float32
from vitreous.architecture import Architecture
from vitreous.architecture.description import HeadPath, Norm, PathStep, ValueMap
from vitreous.architecture.norms import LinearNorm, linear_norm
from vitreous.architecture.operations import MULTI_HEAD, weight_of_call
from vitreous.architecture.projections import ACTIVATION_SLOPES
from vitreous.architecture.trace import depends_on_input
from vitreous.tape.recording.plan import Needs

if TYPE_CHECKING:
    from vitreous.tape.tape import Tape


@dataclass(frozen=True)
class HeadProjection:
    """T_i, by which what head h takes from token j reaches the residual sum of token i: A_hij T_hi(v_hj).

    T_hi = diag(after_i) W_h diag(before_hi), with all statistics and gates as they were in the run. Where nothing but
    the output projection and LayerScale stands there, it is W_O of head h for every token.

    Attributes:
        weight: W, (channels of the stream, channels of all heads).
        before: factors of the heads' channels, (batch, tokens, channels of all heads); ``None`` is 1.
        after: factors of the stream's channels, (batch, tokens, channels or 1); ``None`` is 1.
    """

    weight: Tensor
    before: Tensor | None = None
    after: Tensor | None = None

    @property
    def same_for_all_tokens(self) -> bool:
        """Whether W is all there is."""
        return self.before is None and self.after is None

    def cut(self, rows: Any, count: int) -> HeadProjection:
        """That of some images and their first tokens."""
        before, after = (None if part is None else part[rows, :count] for part in (self.before, self.after))
        return HeadProjection(self.weight, before, after)

    def in_order(self, order: Tensor) -> HeadProjection:
        """With tokens in another order."""
        before, after = (None if part is None else part[:, order.to(part.device)] for part in (self.before, self.after))
        return HeadProjection(self.weight, before, after)


class _NoLinearMapError(Exception):
    """A path has no form diag(after) W diag(before)."""


class _PathState:
    """The map from the heads to a place on their way, as it grows step by step."""

    def __init__(self) -> None:
        self.weight: Tensor | None = None  # (channels there, channels of all heads)
        self.channels: Tensor | None = None  # without a weight: which of all heads' channels is where
        self.before: Tensor | None = None  # (batch, tokens, channels of all heads)
        self.after: Tensor | None = None  # (batch, tokens, channels there or 1)

    def reorder(self, channels: Tensor | None) -> None:
        """The channels in another order, or some of them; -1 stands for those of another attention call."""
        if channels is None or (self.channels is None and self.weight is None):
            self.channels = channels
            return
        if self.weight is None:
            assert self.channels is not None
            self.channels = self.channels[channels]
        elif not torch.equal(channels, torch.arange(len(self.weight))):
            self.weight = self.weight[channels.to(self.weight.device)]
        if self.after is not None and self.after.shape[-1] > 1:
            self.after = self.after[..., channels.to(self.after.device)]

    def times(self, weight: Tensor) -> None:
        """A linear layer, (out, in)."""
        # In float32 at least: a LayerScale of 1e-5 times a weight is next to nothing in half precision.
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        if self.weight is None:
            own = self._own_channels(weight)
            self.weight = weight if own is None else weight[:, own]
            if self.after is not None and self.after.shape[-1] > 1:
                self.before, self.after = (self.after if own is None else self.after[..., own]), None
            return
        if self.after is not None and self.after.shape[-1] > 1:
            raise _NoLinearMapError
        self.weight = weight @ self.weight.to(weight)

    def _own_channels(self, like: Tensor) -> Tensor | None:
        """Where the channels of all heads stand, in order; ``None`` where they are all there is, in order."""
        if self.channels is None or torch.equal(self.channels, torch.arange(len(self.channels))):
            return None
        own = self.channels.argsort()[int((self.channels < 0).sum()) :]
        return own.to(like.device)

    def scale_channels(self, factor: Tensor | float) -> None:
        """A factor for each channel, the same for all tokens."""
        if isinstance(factor, float | int) and factor == 1:
            return
        if self.weight is None:
            self._become_matrix(factor)
        assert self.weight is not None
        column = factor.to(self.weight).reshape(-1, 1) if isinstance(factor, Tensor) else factor
        self.weight = self.weight * column

    def _become_matrix(self, like: Tensor | float) -> None:
        """Have a matrix instead of an order of channels."""
        if self.channels is None:
            raise _NoLinearMapError
        like = like if isinstance(like, Tensor) else torch.zeros(())
        self.times(torch.eye(len(self.channels), dtype=like.dtype, device=like.device))

    def multiply(self, factor: Tensor | float, step: PathStep, given: Tensor) -> None:
        """Factors of what a step was given, in its shape or one that spreads to it."""
        if not isinstance(factor, Tensor):
            self.scale_channels(float(factor))
            return
        factor = at_least_float32(factor.detach())
        if factor.numel() == 1:
            self.scale_channels(factor.reshape(()))
            return
        spread = None if step.axes is None else step.axes.spread(factor, given.shape)
        if spread is None:
            raise _NoLinearMapError
        if spread.shape[:2].numel() == 1:
            self.scale_channels(spread[0, 0])
            return
        self.after = spread if self.after is None else self.after * spread

    def centre(self, tokens: Tensor) -> None:
        """Take off the mean over the last axis of tokens: all channels, or those of a head where heads lie apart."""
        if self.after is not None and self.after.shape[-1] > 1:
            raise _NoLinearMapError
        if self.weight is None:
            self._become_matrix(tokens)
        assert self.weight is not None
        groups = self.weight.reshape(-1, tokens.shape[-1], self.weight.shape[1])
        self.weight = (groups - groups.mean(dim=1, keepdim=True)).reshape(self.weight.shape)

    def projection(self) -> HeadProjection:
        """The whole way."""
        if self.weight is None:
            self._become_matrix(1.0 if self.after is None else self.after)
        assert self.weight is not None
        return HeadProjection(self.weight, self.before, self.after)


class LinearMaps:
    """Notes weights where they are used: what a module holds need not be what it multiplies with.

    Attributes:
        steps: the steps whose arguments are noted.
    """

    def __init__(self, architecture: Architecture, needs: Needs) -> None:
        self._architecture = architecture
        wanted: set[int] = set()
        for layer, block in enumerate(architecture.blocks):
            if layer in needs.projections:
                wanted |= {step.step for path in block.head_paths for step in path.steps}
                wanted |= {path.multi_head for path in block.head_paths if path.multi_head is not None}
                wanted |= {step.step for steps in block.skips for step in steps}
            if layer in needs.unbiased_values:
                wanted |= {each.step for each in block.value_maps}
            if layer in needs.linear_norms | needs.unbiased_values:
                wanted |= {
                    norm.step
                    for norm in (block.first_norm, block.second_norm)
                    if norm is not None and norm.step is not None
                }
        self.steps = frozenset(wanted)
        paths = [path for block in architecture.blocks for path in block.head_paths]
        self._centres = {step.step for path in paths for step in path.steps if step.kind == "centre"}
        self._noted: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._weights: dict[int, Tensor] = {}

    def after(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A step has run: keep its weight, or its arguments without tokens that nothing is computed from."""
        if number not in self.steps:
            return
        operation = self._architecture.operations[number]
        weight = weight_of_call(operation, args, kwargs, depends_on_input)
        if weight is not None:
            self._weights[number] = weight.detach()
            args, kwargs = (), {}
        elif operation == MULTI_HEAD or (operation in {"add", "sub"} and number not in self._centres):
            args = tuple(None if depends_on_input(value) else value for value in args)
            kwargs = {name: value for name, value in kwargs.items() if not depends_on_input(value)}
        self._noted[number] = args, kwargs

    def head_projection(self, layer: int) -> HeadProjection | None:
        """How the heads of a block reach the residual sum; ``None`` where they do so in no linear way."""
        paths = self._architecture.blocks[layer].head_paths
        found = [self._follow(path) for path in paths]
        known = [each for each in found if each is not None]
        return _beside(known) if known and len(known) == len(found) else None

    def _follow(self, path: HeadPath) -> HeadProjection | None:
        if any(step.step not in self._noted for step in path.steps):
            return None
        state = _PathState()
        if path.multi_head is not None:
            weight = self._weight(path.multi_head, "out_proj_weight") if path.multi_head in self._noted else None
            if weight is None:
                return None
            state.times(weight)
        try:
            for step in path.steps:
                state.reorder(step.channels)
                self._pass(state, step)
        except _NoLinearMapError:
            return None
        return state.projection()

    def _pass(self, state: _PathState, step: PathStep) -> None:
        """One step of the way."""
        args, kwargs = self._noted[step.step]
        operation = self._architecture.operations[step.step]
        given = [*args, *kwargs.values()]
        if step.kind == "linear":
            if step.step not in self._weights:
                raise _NoLinearMapError
            state.times(self._weights[step.step])
        elif step.kind == "batch_norm":
            state.scale_channels(_batch_norm_factor(args, kwargs))
        elif step.kind in {"factor", "sum"}:
            factor = _factor(operation, given, kwargs, step.position)
            state.multiply(factor, step, given[step.position])
        else:
            self._pass_statistic(state, step, at_least_float32(given[0].detach()))

    def _pass_statistic(self, state: _PathState, step: PathStep, tokens: Tensor) -> None:
        """A norm or an activation: what it does to a token is held as it was."""
        if step.kind == "centre":
            state.centre(tokens)
        elif step.kind == "normalize":
            length = tokens.norm(dim=-1, keepdim=True).clamp_min(_argument(self._noted[step.step], 3, "eps", 1e-12))
            state.multiply(length.reciprocal(), step, tokens)
        elif step.kind == "norm":
            norm = self._norm_of_call(step.step)
            if norm is None:
                raise _NoLinearMapError
            if norm.centred:
                state.centre(tokens)
            state.multiply(norm.deviation(tokens)[..., None].reciprocal(), step, tokens)
            if norm.weight is not None:
                state.multiply(norm.weight, step, tokens)
        elif step.kind == "glu":
            passed, gate = tokens.chunk(2, dim=-1)
            state.reorder(torch.arange(passed.shape[-1]))
            state.multiply(gate.sigmoid(), step, passed)
        else:
            # f(u) / u, and f's slope where u is 0.
            (_, *args), kwargs = self._noted[step.step]
            operation = self._architecture.operations[step.step]
            options = {name: value for name, value in kwargs.items() if name not in {"input", "inplace"}}
            made = getattr(F, operation)(tokens, *args, **options)
            state.multiply(torch.where(tokens == 0, ACTIVATION_SLOPES[operation], made / tokens), step, tokens)

    def skip(self, layer: int) -> tuple[Tensor | float, Tensor | float]:
        """What the stream itself is multiplied with in the sum with the attention part, and in those behind it.

        A number, or one factor per channel; 1 in most models.
        """
        attention, *behind = self._architecture.blocks[layer].skips or ((),)
        factors: list[Tensor | float] = [1.0, 1.0]
        for place, steps in ((0, attention), *((1, steps) for steps in behind)):
            for step in steps:
                args, kwargs = self._noted[step.step]
                operation = self._architecture.operations[step.step]
                factor = _factor(operation, [*args, *kwargs.values()], kwargs, step.position)
                factors[place] = factors[place] * (factor.flatten() if isinstance(factor, Tensor) else factor)
        return factors[0], factors[1]

    def value_weight(self, layer: int) -> Tensor | None:
        """W_V, (channels of all heads, channels of the first norm); ``None`` where it is not known."""
        return _joined([self._value_weight(each) for each in self._architecture.blocks[layer].value_maps], dim=0)

    def _value_weight(self, value_map: ValueMap) -> Tensor | None:
        if value_map.step not in self._noted:
            return None
        if self._architecture.operations[value_map.step] == MULTI_HEAD:
            args, kwargs = self._noted[value_map.step]
            joint = args[5] if len(args) > 5 else kwargs.get("in_proj_weight")
            alone = kwargs.get("v_proj_weight")
            if isinstance(alone, Tensor):
                return alone.detach()
            return joint.detach().chunk(3)[-1] if isinstance(joint, Tensor) else None
        weight = self._weight(value_map.step, "weight")
        return None if weight is None else weight[value_map.rows.to(weight.device)]

    def norm(self, norm: Norm | None) -> LinearNorm | None:
        """A norm as a linear map; ``None`` where it is none."""
        if norm is None:
            return None
        if norm.identity:
            return LinearNorm(weight=None, bias=None, eps=0.0, centred=False, divides=False)
        if norm.step is not None and norm.step in self._noted:
            found = self._norm_of_call(norm.step)
            if found is not None:
                return found
        return linear_norm(norm.module)

    def _norm_of_call(self, step: int) -> LinearNorm | None:
        call, name = self._noted[step], self._architecture.operations[step]
        weight, tokens = _argument(call, 2, "weight"), _argument(call, 0, "input")
        if name == "layer_norm":
            bias, eps = _argument(call, 3, "bias"), _argument(call, 4, "eps")
            return LinearNorm(_constant(weight), _constant(bias), 1e-5 if eps is None else eps, centred=True)
        if name == "rms_norm":
            eps = _argument(call, 3, "eps")
            return LinearNorm(
                _constant(weight), None, torch.finfo(tokens.dtype).eps if eps is None else eps, centred=False
            )
        return None

    def _weight(self, step: int, name: str) -> Tensor | None:
        if self._architecture.operations[step] == MULTI_HEAD:
            found = _argument(self._noted[step], 11, name)
            return found.detach() if isinstance(found, Tensor) else None
        return self._weights.get(step)


def through_value_weight(tape: Tape, layer: int, tokens: Tensor) -> Tensor:
    """(batch, tokens, channels) -> (batch, head, tokens, head's channels); several heads may share one value."""
    value_weight = tape.value_weight(layer)
    assert value_weight is not None
    heads, _, width = tape.attention(layer).value.shape[1:]
    value = (tokens @ at_least_float32(value_weight).T).reshape(*tokens.shape[:2], -1, width).transpose(1, 2)
    return value.repeat_interleave(heads // value.shape[1], dim=1)


def _beside(found: list[HeadProjection]) -> HeadProjection | None:
    """The projections of several attention calls as one with all their heads."""
    if len(found) == 1:
        return found[0]
    weight = torch.cat([each.weight for each in found], dim=1)
    if all(each.same_for_all_tokens for each in found):
        return HeadProjection(weight)
    if any(each.after is not None and each.after.shape[-1] > 1 for each in found):
        return None
    like = next(part for each in found for part in (each.before, each.after) if part is not None)
    factors = []
    for each in found:
        ones = like.new_ones(*like.shape[:2], each.weight.shape[1])
        for part in (each.before, each.after):
            ones = ones if part is None else ones * part
        factors.append(ones)
    return HeadProjection(weight, torch.cat(factors, dim=2))


def _factor(operation: str, given: list[Tensor | float], kwargs: dict[str, Any], position: int) -> Tensor | float:
    """What a step multiplies one of its operands with."""
    factor: Tensor | float = 1.0
    if operation in {"mul", "div"}:
        other = given[1 - position]
        factor = 1 / other if operation == "div" else other
    elif operation == "lerp":
        factor = given[2] if position == 1 else 1 - given[2]
    elif operation == "addcmul":
        factor = 1.0 if position == 0 else kwargs.get("value", 1) * given[3 - position]
    elif operation in {"add", "sub"} and position == 1:
        factor = kwargs.get("alpha", 1) * (1.0 if operation == "add" else -1.0)
    elif operation not in {"add", "sub", "sum"}:
        raise _NoLinearMapError
    return factor


def _batch_norm_factor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    call = args, kwargs
    variance, weight = _argument(call, 2, "running_var"), _argument(call, 3, "weight")
    factor: Tensor = (at_least_float32(variance.detach()) + _argument(call, 7, "eps", 1e-5)).rsqrt()
    return factor if weight is None else factor * at_least_float32(weight.detach())


def _argument(call: tuple[tuple[Any, ...], dict[str, Any]], position: int, name: str, default: Any = None) -> Any:
    args, kwargs = call
    return args[position] if len(args) > position else kwargs.get(name, default)


def _joined(weights: list[Tensor | None], dim: int) -> Tensor | None:
    """The weights of several calls side by side; ``None`` where there is none, or one is not known."""
    known = [weight for weight in weights if weight is not None]
    return torch.cat(known, dim=dim) if known and len(known) == len(weights) else None


def _constant(value: Any) -> Tensor | None:
    return value.detach() if isinstance(value, Tensor) else None
