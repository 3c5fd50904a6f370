"""Intercepting the calls of a model's forward pass without touching the model.

PyTorch's own ``TorchFunctionMode`` sees every call of the thread that entered it: attention, softmax, normalisation,
activation. Calls that work on what depends on the model's input are numbered as in the run that showed the
architecture, so that what is to happen in a block is known by the number of the call. No hooks are needed, on the model
or elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitreous.architecture import Architecture
from vitreous.architecture.trace import StepCounter, as_constant, operation, tensors_in
from vitreous.errors import UnsupportedModelError
from vitreous.inputs.model_input import Inputs, Texts
from vitreous.torch_state import function_modes

Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
# Attributes that are calls in all but name: x @ W.T multiplies by a constant as F.linear(x, W) does.
_TRANSPOSED = (Tensor.T.__get__, Tensor.mT.__get__, Tensor.H.__get__, Tensor.mH.__get__)  # type: ignore[attr-defined]
_operation = cache(operation)
_OUT_OF_PLACE = {"add": torch.add, "sub": torch.sub, "lerp": torch.lerp, "addcmul": torch.addcmul}


class OtherRunError(UnsupportedModelError):
    """A run took other steps than the one that showed the architecture."""


class Listener(Protocol):
    """What is told about a forward pass.

    Attributes:
        steps: the steps behind which ``after`` is called.
        own_steps: steps that run as they are, whatever handlers there are: from q kᵀ to the weights.
    """

    steps: frozenset[int]
    own_steps: frozenset[int]

    def before(self, number: int) -> None:
        """A step is about to run."""

    def after(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """A step has run; what it gave may be replaced."""


class Interception(TorchFunctionMode):
    """A context in which one thread's forward pass is reported to ``listener`` and ``handlers``."""

    def __init__(
        self,
        architecture: Architecture,
        listener: Listener,
        handlers: Mapping[Callable[..., Any], Handler],
        otherwise: Handler | None = None,
    ) -> None:
        super().__init__()
        self._architecture, self._listener = architecture, listener
        self._handlers, self._otherwise = handlers, otherwise
        self._counter = StepCounter()
        # What changes the stream in place, x += f(x), makes a new tensor here: the one before is needed.
        self._newer: dict[int, tuple[Tensor, Tensor]] = {}

    def start(self, inputs: Inputs) -> None:
        """Say what the model is about to be given."""
        self._counter.mark(inputs.parts["input_ids"] if isinstance(inputs, Texts) else inputs)

    def newest(self, value: Any) -> Any:
        """A value, or what stands in for it where the model changed it in place."""
        if isinstance(value, Tensor):
            while id(value) in self._newer:
                value = self._newer[id(value)][1]
            return value
        if type(value) in (list, tuple):
            return type(value)(map(self.newest, value))
        return {name: self.newest(item) for name, item in value.items()} if type(value) is dict else value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # torch takes a mode from its stack while it tells it of a call; an interrupt may have kept it from coming back.
        if function_modes()[-1:] == [self]:
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Treat parameters as constants and hand calls that somebody waits for to their handler."""
        del types
        kwargs = kwargs or {}
        if self._newer:
            args, kwargs = self.newest(args), self.newest(kwargs)
        # Parameters as constants: the graph starts where the tape starts it, weights' inputs need not be saved, and
        # models with requires_grad on, off or made under inference_mode behave alike. Without a graph they are anyway.
        if torch.is_grad_enabled() and (func.__name__ not in {"__get__", "__set__"} or func in _TRANSPOSED):
            args = tuple(as_constant(value) for value in args)
            kwargs = {name: as_constant(value) for name, value in kwargs.items()}
        if not self._counter.is_step(args, kwargs):
            return self._handle(func, args, kwargs)
        number = self._counter.number
        self._listener.before(number)
        # Questions about its operand come before the step, with the same number: x += positions.to(x.dtype).
        rewritten = number in self._architecture.in_place and _operation(func) == self._architecture.operations[number]
        if rewritten:
            args, output = self._out_of_place(func, args, kwargs)
        elif number in self._listener.own_steps:
            output = func(*args, **kwargs)
        else:
            output = self._handle(func, args, kwargs)
        if self._counter.finish(func, args, output):
            self._check(number, func)
            if number in self._listener.steps:
                assigned = func.__name__ == "__setitem__"  # assignment returns nothing
                made = args[0] if assigned else output
                kept = self._listener.after(number, args, kwargs, made)
                self._counter.mark(kept)
                if kept is not made and (assigned or rewritten) and isinstance(args[0], Tensor):
                    self._newer[id(args[0])] = args[0], kept  # a model need not read what an in-place call returns
                output = None if assigned else kept
        return output

    def _handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(func, *_by_position(args, kwargs))
        return func(*args, **kwargs) if self._otherwise is None else self._otherwise(func, args, kwargs)

    def _out_of_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """The arguments that a call had, and what it gave, on a copy of what it would have changed."""
        function, given = _OUT_OF_PLACE.get(_operation(func)), args[0]
        if function is not None:
            new = output = self._handle(function, args, kwargs)
        else:
            args = (given.clone(), *args[1:])
            output = self._handle(func, args, kwargs)
            new = output if isinstance(output, Tensor) else args[0]
        self._newer[id(given)] = given, new
        return args, output

    def _check(self, number: int, func: Callable[..., Any]) -> None:
        seen = self._architecture.operations
        if number >= len(seen) or seen[number] != _operation(func):
            before = seen[number] if number < len(seen) else "none"
            raise OtherRunError(
                f"{self._architecture.name} does not take the same steps in every run (step {number} is "
                f"{_operation(func)}, and was {before}), so that its blocks are not known"
            )


def _by_position(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The operands of a call in their places, also where they were named."""
    if not kwargs:
        return args, kwargs
    operands = (("query",), ("key",), ("value",)) if "key" in kwargs else (("input", "x", "A"), ("other",))
    for place, names in enumerate(operands):
        name = next((name for name in names if name in kwargs), None) if len(args) == place else None
        if name is not None:
            args, kwargs = (*args, kwargs[name]), {other: value for other, value in kwargs.items() if other != name}
    return args, kwargs


def result_at(output: Any, place: int) -> Tensor:
    """One of the tensors that a call returned."""
    return list(tensors_in(output))[place]


def with_result(output: Any, place: int, value: Tensor) -> Any:
    """What a call returned with another tensor in one place."""
    if isinstance(output, Tensor):
        return value
    assert isinstance(output, list | tuple)
    return type(output)(value if number == place else item for number, item in enumerate(output))


def in_graph(value: Any) -> bool:
    """Whether a value is a tensor that a gradient will reach."""
    return isinstance(value, Tensor) and value.requires_grad


def flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All operands of a call, also those that it was given in a list."""
    operands: list[Any] = []
    for value in (*args, *kwargs.values()):
        operands.extend(value if isinstance(value, list | tuple) else [value])
    return operands


def of_first(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """The call as a function of its first argument, never in place."""
    options = {name: value for name, value in kwargs.items() if name != "inplace"}

    def function(value: Tensor) -> Tensor:
        result: Tensor = func(value, *args[1:], **options)
        return result

    return function


# The functions by which models spell the same thing.
ATTENTION = (F.scaled_dot_product_attention,)
MULTI_HEAD_ATTENTION = (F.multi_head_attention_forward,)
SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
MATRIX_PRODUCT = (
    *(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm),
    *(torch.baddbmm, Tensor.baddbmm, torch.einsum),
)
SAME_VALUES = (F.dropout, torch.dropout, Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.contiguous)
LAYER_NORM = (F.layer_norm, torch.layer_norm)
BATCH_NORM = (F.batch_norm,)
GROUP_NORM = (F.group_norm, torch.group_norm)
RMS_NORM = (F.rms_norm, torch.rms_norm)
TANH = (torch.tanh, Tensor.tanh, F.tanh)
# Functions that weigh something where they are multiplied with it, and their slope at 0.
GATES: Mapping[Callable[..., Any], float] = {
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid, F.sigmoid, torch.special.expit), 0.25),
    F.hardsigmoid: 1 / 6,
    **dict.fromkeys(TANH, 1.0),
    **dict.fromkeys((torch.erf, Tensor.erf), 2 / math.pi**0.5),
}
GATED = (F.glu,)
INVERSE_ROOT = (torch.rsqrt, Tensor.rsqrt)
ROOT = (torch.sqrt, Tensor.sqrt)
DEVIATION = (torch.std, Tensor.std)
DEVIATION_AND_MEAN = (torch.std_mean,)
DEVIATION_STEPS = (
    *(torch.reciprocal, Tensor.reciprocal, Tensor.__rtruediv__),
    *(torch.clamp, Tensor.clamp, torch.clamp_min, Tensor.clamp_min),
)
SQUARE = (torch.square, Tensor.square)
POWER = (torch.pow, Tensor.pow, Tensor.__pow__)
LENGTHS = (torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm)
NORMALIZE = (F.normalize,)
LINEAR = (F.linear,)
ADDMM = (torch.addmm, Tensor.addmm)
ADDED_PRODUCT = (torch.addcmul, Tensor.addcmul)
JOINING = (torch.cat, torch.concat, torch.concatenate)
MULTIPLICATION = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply)
MULTIPLICATION_IN_PLACE = (Tensor.mul_, Tensor.__imul__)
ADDITION = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
ADDITION_IN_PLACE = (Tensor.add_, Tensor.__iadd__)
SUBTRACTION = (torch.sub, Tensor.sub, Tensor.__sub__, torch.subtract, Tensor.subtract, Tensor.sub_, Tensor.__isub__)
SUBTRACTION_FROM = (torch.rsub, Tensor.__rsub__)
DIVISION = (torch.div, Tensor.div, Tensor.__truediv__)
DIVISION_IN_PLACE = (Tensor.div_, Tensor.__itruediv__)
MASKED_FILL = (torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_)
POOLING = (Tensor.__getitem__, torch.mean, Tensor.mean)
CONVOLUTION = (F.conv2d, torch.conv2d)
CONVOLUTION_OF_ROW = (F.conv1d, torch.conv1d)
GRID_POOLING = (F.max_pool2d, torch.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.pixel_unshuffle)
# Activations f, and their slope at 0 (for f(u)/u at u = 0, which is a gate; f(0) counts as a bias where it is not 0).
ACTIVATIONS: Mapping[Callable[..., Any], float] = {
    F.gelu: 0.5,
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu), 0.0),
    F.silu: 0.5,
    F.mish: 0.6,
    F.hardswish: 0.5,
    **dict.fromkeys((F.elu, F.celu), 1.0),
    F.selu: 1.0507009873554805,  # its scale
    F.leaky_relu: 1.0,
    **dict.fromkeys((F.relu6, F.hardtanh), 0.0),
    F.softsign: 1.0,
    **dict.fromkeys((F.tanhshrink, F.hardshrink, F.softshrink), 0.0),
    **dict.fromkeys((F.softplus, F.logsigmoid), 0.5),
}
NOT_0_AT_0 = frozenset(
    {torch.sigmoid, Tensor.sigmoid, F.sigmoid, torch.special.expit, F.hardsigmoid, F.softplus, F.logsigmoid}
)
