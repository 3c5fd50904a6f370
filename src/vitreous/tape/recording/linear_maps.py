"""The linear maps of a block as one run had them: norms, the projection of the heads, the projection to the values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitreous.architecture import Architecture
from vitreous.architecture.description import Norm, Projection, ValueMap
from vitreous.architecture.norms import LinearNorm, linear_norm
from vitreous.architecture.operations import MULTI_HEAD, weight_of_call
from vitreous.architecture.trace import depends_on_input
from vitreous.float64 import exact
from vitreous.tape.recording.plan import Needs

if TYPE_CHECKING:
    from vitreous.tape.tape import Tape


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
                wanted |= {step for each in block.output_projections for step in (each.step, *each.scales)}
            if layer in needs.unbiased_values:
                wanted |= {each.step for each in block.value_maps}
            if layer in needs.linear_norms | needs.unbiased_values:
                wanted |= {
                    norm.step
                    for norm in (block.first_norm, block.second_norm)
                    if norm is not None and norm.step is not None
                }
        self.steps = frozenset(wanted)
        self._noted: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def after(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A step has run."""
        if number in self.steps:
            self._noted[number] = args, kwargs

    def output_projection(self, layer: int) -> Tensor | None:
        """W_O, LayerScale included, (channels of the stream, channels of all heads); ``None`` where it is not known."""
        return _joined([self._projection(each) for each in self._architecture.blocks[layer].output_projections], dim=1)

    def _projection(self, projection: Projection) -> Tensor | None:
        if projection.step not in self._noted:
            return None
        weight = self._weight(projection.step, "out_proj_weight")
        if weight is None:
            return None
        # In float32 at least: a LayerScale of 1e-5 times a weight is next to nothing in half precision.
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        if projection.columns is not None:
            weight = weight[:, projection.columns.flatten().to(weight.device)]
        for step in projection.scales:
            factor = self._factor(step)
            if factor is None:
                return None
            weight = weight * (factor.to(weight).reshape(-1, 1) if isinstance(factor, Tensor) else factor)
        return weight

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
        args, kwargs = self._noted[step]
        name = self._architecture.operations[step]

        def argument(position: int, keyword: str) -> Any:
            return args[position] if len(args) > position else kwargs.get(keyword)

        weight, tokens = argument(2, "weight"), argument(0, "input")
        if name == "layer_norm":
            bias, eps = argument(3, "bias"), argument(4, "eps")
            return LinearNorm(_constant(weight), _constant(bias), 1e-5 if eps is None else eps, centred=True)
        if name == "rms_norm":
            eps = argument(3, "eps")
            return LinearNorm(
                _constant(weight), None, torch.finfo(tokens.dtype).eps if eps is None else eps, centred=False
            )
        return None

    def _weight(self, step: int, name: str) -> Tensor | None:
        args, kwargs = self._noted[step]
        operation = self._architecture.operations[step]
        if operation == MULTI_HEAD:
            found = args[11] if len(args) > 11 else kwargs.get(name)
            return found.detach() if isinstance(found, Tensor) else None
        weight = weight_of_call(operation, args, kwargs, depends_on_input)
        return None if weight is None else weight.detach()

    def _factor(self, step: int) -> Tensor | float | None:
        """What a step multiplies with."""
        args, kwargs = self._noted[step]
        operands = [*args[:2], *kwargs.values()][:2]
        streams = [
            value for value in operands if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[-2] > 1
        ]
        others = [value for value in operands if not streams or value is not streams[0]]
        if len(streams) != 1 or len(others) != 1:
            return None
        factor = others[0].detach() if isinstance(others[0], Tensor) else others[0]
        if isinstance(factor, Tensor) and factor.numel() not in (1, streams[0].shape[-1]):
            return None
        return 1 / factor if self._architecture.operations[step] == "div" else factor


def through_value_weight(tape: Tape, layer: int, tokens: Tensor) -> Tensor:
    """(batch, tokens, channels) -> (batch, head, tokens, head's channels); several heads may share one value."""
    value_weight = tape.value_weight(layer)
    assert value_weight is not None
    heads, _, width = tape.attention(layer).value.shape[1:]
    value = (tokens @ exact(value_weight).T).reshape(*tokens.shape[:2], -1, width).transpose(1, 2)
    return value.repeat_interleave(heads // value.shape[1], dim=1)


def _joined(weights: list[Tensor | None], dim: int) -> Tensor | None:
    """The weights of several calls side by side; ``None`` where there is none, or one is not known."""
    known = [weight for weight in weights if weight is not None]
    return torch.cat(known, dim=dim) if known and len(known) == len(weights) else None


def _constant(value: Any) -> Tensor | None:
    return value.detach() if isinstance(value, Tensor) else None
