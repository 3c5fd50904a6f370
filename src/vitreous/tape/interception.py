"""Listening in on a model's forward pass without touching the model.

Two ears, both open only inside the ``with`` block and only for the thread that entered it: PyTorch's own
``TorchFunctionMode`` hears every function call (attention, softmax, normalisation, activation), and module hooks that
are registered globally, not on the model, say in which block a call happens. Both are removed on every exit; what an
interrupt during the exit leaves of them is removed by ``vitreous.tape.torch_state``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import _C, Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from vitreous.tape.evaluation_copy import originals_of, runs_an_original

Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
# Attributes that are calls in all but name: x @ W.T multiplies by a constant as F.linear(x, W) does.
_TRANSPOSED = (Tensor.T.__get__, Tensor.mT.__get__, Tensor.H.__get__, Tensor.mH.__get__)  # type: ignore[attr-defined]


class Listener(Protocol):
    """What is told about a forward pass: the tape's recorder."""

    def enter(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """A module is about to run; its positional arguments may be replaced."""

    def leave(self, module: nn.Module, output: Any) -> Any:
        """A module has run; its output may be replaced."""


class Interception(TorchFunctionMode):
    """A context in which one thread's forward passes are reported to ``listener`` and ``handlers``."""

    def __init__(
        self,
        listener: Listener,
        handlers: Mapping[Callable[..., Any], Handler],
        modules: frozenset[nn.Module],
        otherwise: Handler | None = None,
    ) -> None:
        super().__init__()
        self._listener = listener
        self._handlers = handlers
        self._otherwise = otherwise
        self._modules = modules
        self._originals = originals_of(modules)
        self._thread = threading.get_ident()
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        self._hooks.append(torch_module.register_module_forward_pre_hook(self._enter_module))  # type: ignore[arg-type]
        self._hooks.append(torch_module.register_module_forward_hook(self._leave_module))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        # torch takes a mode from its stack while it tells it of a call; an interrupt may have kept it from coming back.
        if function_modes()[-1:] == [self]:
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Treat parameters as constants and hand calls that somebody waits for to their handler."""
        del types
        kwargs = kwargs or {}
        # Parameters as constants: the graph starts where the tape starts it, weights' inputs need not be saved, and
        # models with requires_grad on, off or made under inference_mode behave alike. Without a graph they are anyway.
        if torch.is_grad_enabled() and (func.__name__ not in {"__get__", "__set__"} or func in _TRANSPOSED):
            args = tuple(_as_constant(value) for value in args)
            kwargs = {name: _as_constant(value) for name, value in kwargs.items()}
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(func, *_by_position(args, kwargs))
        return func(*args, **kwargs) if self._otherwise is None else self._otherwise(func, args, kwargs)

    def _enter_module(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if threading.get_ident() != self._thread:
            return None
        if module in self._originals:
            raise runs_an_original(module)
        return self._listener.enter(module, arguments) if module in self._modules else None

    def _leave_module(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        del arguments
        if module not in self._modules or threading.get_ident() != self._thread:
            return None
        return self._listener.leave(module, output)

    def belongs_to(self, thread: int) -> bool:
        """Whether that thread listens."""
        return self._thread == thread


def function_modes() -> list[Any]:
    """The modes that this thread's calls of torch are told to, the innermost last."""
    return [_C._get_function_stack_at(place) for place in range(_C._len_torch_function_stack())]  # noqa: SLF001


def hooks_of_this_thread() -> list[tuple[int, dict[int, Any]]]:
    """The hooks that interceptions of this thread have in torch: their numbers, and the dictionaries they are in."""
    thread, found = threading.get_ident(), []
    for hooks in (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks):  # noqa: SLF001
        for number, hook in list(hooks.items()):
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, Interception) and owner.belongs_to(thread):
                found.append((number, hooks))
    return found


def _as_constant(value: Any) -> Any:
    if isinstance(value, Tensor):
        if isinstance(value, nn.Parameter) or value.is_inference():
            return value.clone().detach() if value.is_inference() else value.detach()
        return value
    if type(value) in (list, tuple) and any(isinstance(item, Tensor) for item in value):
        return type(value)(_as_constant(item) for item in value)
    return value


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
MATRIX_PRODUCT = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
SAME_VALUES = (F.dropout, torch.dropout, Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.contiguous)
RESHAPE = (Tensor.view, Tensor.reshape)
LAYER_NORM = (F.layer_norm, torch.layer_norm)
BATCH_NORM = (F.batch_norm,)
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
MULTIPLICATION = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply)
MULTIPLICATION_IN_PLACE = (Tensor.mul_, Tensor.__imul__)
ADDITION = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
ADDITION_IN_PLACE = (Tensor.add_, Tensor.__iadd__)
SUBTRACTION = (torch.sub, Tensor.sub, Tensor.__sub__, torch.subtract, Tensor.subtract, Tensor.sub_, Tensor.__isub__)
SUBTRACTION_FROM = (torch.rsub, Tensor.__rsub__)
DIVISION = (torch.div, Tensor.div, Tensor.__truediv__)
DIVISION_IN_PLACE = (Tensor.div_, Tensor.__itruediv__)
MASKED_FILL = (torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_)
SCORE_STEPS = (
    *(*MULTIPLICATION, *MULTIPLICATION_IN_PLACE, *DIVISION, *DIVISION_IN_PLACE),
    *(*ADDITION, *ADDITION_IN_PLACE, *MASKED_FILL),
)
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
