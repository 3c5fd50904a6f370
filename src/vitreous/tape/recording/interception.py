"""Intercepting the calls of a model's forward pass without touching the model.

PyTorch's own ``TorchFunctionMode`` sees every call of the thread that entered it: attention, softmax, normalisation,
activation. Calls that work on what depends on the model's input are numbered as in the run that showed the
architecture, so that what is to happen in a block is known by the number of the call. No hooks are needed, on the model
or elsewhere. Functions of torch that spell the same operation are listed first.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from vitreous._utils.torch_state import function_modes
from vitreous.architecture import Architecture
from vitreous.architecture.trace import (
    StepCounter,
    as_constant,
    as_fused,
    checks_for_kernel,
    is_flex_attention,
    operation,
    tensors_in,
)
from vitreous.errors import UnsupportedModelError
from vitreous.inputs.model_io import Inputs, Texts

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
POOLING = (
    *(Tensor.__getitem__, torch.mean, Tensor.mean, torch.sum, Tensor.sum),
    *(F.adaptive_avg_pool1d, torch.adaptive_avg_pool1d, F.avg_pool1d),
)
NEGATION = (torch.neg, Tensor.neg, Tensor.__neg__, torch.negative, Tensor.negative)
INTERPOLATION = (torch.lerp, Tensor.lerp)
CONVOLUTION = (F.conv2d, torch.conv2d, F.conv3d, torch.conv3d)
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


# Attributes that are calls in all but name: x @ W.T multiplies by a constant as F.linear(x, W) does.
_TRANSPOSED = (Tensor.T.__get__, Tensor.mT.__get__, Tensor.H.__get__, Tensor.mH.__get__)  # type: ignore[attr-defined]
_operation = cache(operation)
_OUT_OF_PLACE: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "lerp": torch.lerp,
    "addcmul": torch.addcmul,
}


class TorchCall:
    """One intercepted call of a torch function, on its way through the handlers of that function.

    A handler gets the call and returns its output. ``proceed`` runs the handlers after it and at last the function
    itself; a handler that does not call it has taken the call over.

    Attributes:
        function: the torch function.
        args: its positional arguments.
        kwargs: its named arguments.
    """

    __slots__ = ("_handlers", "_place", "args", "function", "kwargs")

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        handlers: tuple[Handler, ...] = (),
    ) -> None:
        self.function, self.args, self.kwargs = function, args, {} if kwargs is None else kwargs
        self._handlers, self._place = handlers, 0

    @property
    def name(self) -> str:
        """The function's own name, ``__iadd__`` for ``+=``."""
        return self.function.__name__

    @property
    def operation(self) -> str:
        """What the function does, whichever way it is called: ``add`` for ``+=``."""
        return _operation(self.function)

    def proceed(self) -> Any:
        """Run the next handler, or the function itself after the last one."""
        place = self._place
        if place == len(self._handlers):
            return self.function(*self.args, **self.kwargs)
        self._place = place + 1
        output = self._handlers[place](self)
        self._place = place
        return output

    def proceed_with(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the next handler with other arguments."""
        return TorchCall(self.function, args, kwargs, self._handlers[self._place :]).proceed()

    def rest_of_first(self) -> Callable[[Tensor], Tensor]:
        """The handlers behind the running one, and the function, as a function of the first argument."""
        function, others, kwargs, rest = self.function, self.args[1:], self.kwargs, self._handlers[self._place :]

        def rest_of_first(value: Tensor) -> Tensor:
            result: Tensor = TorchCall(function, (value, *others), kwargs, rest).proceed()
            return result

        return rest_of_first

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by its position or name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def operands(self) -> list[Any]:
        """All arguments, also those inside a list."""
        operands: list[Any] = []
        for value in (*self.args, *self.kwargs.values()):
            operands.extend(value if isinstance(value, list | tuple) else [value])
        return operands

    def of_first(self) -> Callable[[Tensor], Tensor]:
        """The torch function as a function of its first argument, never in place."""
        function, others = self.function, self.args[1:]
        options = {name: value for name, value in self.kwargs.items() if name != "inplace"}

        def of_first(value: Tensor) -> Tensor:
            result: Tensor = function(value, *others, **options)
            return result

        return of_first


Handler = Callable[[TorchCall], Any]


class HandlerTable:
    """By torch function, the handlers that act on its calls, in order; ``default`` acts on all other functions."""

    def __init__(self, default: tuple[Handler, ...] = ()) -> None:
        self._default = default
        self._handlers: dict[Callable[..., Any], tuple[Handler, ...]] = {}

    def add(self, functions: Iterable[Callable[..., Any]], *handlers: Handler) -> None:
        """Have these handlers act on calls of some functions, in this order, in the place of earlier ones."""
        self._handlers.update(dict.fromkeys(functions, handlers))

    def handlers_of(self, function: Callable[..., Any]) -> tuple[Handler, ...]:
        """The handlers of a torch function, in the order in which they act."""
        return self._handlers.get(function, self._default)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function through its handlers."""
        handlers = self._handlers.get(function)
        if handlers is not None:
            args, kwargs = _by_position(args, kwargs)
            return TorchCall(function, args, kwargs, handlers).proceed()
        if self._default:
            return TorchCall(function, args, kwargs, self._default).proceed()
        return function(*args, **kwargs)

    def __str__(self) -> str:
        """One line for every operation: its handlers in the order in which they act."""
        lines = {
            f"{_operation(function)}: {' -> '.join(handler.__qualname__ for handler in handlers) or 'none'}"
            for function, handlers in self._handlers.items()
        }
        default = " -> ".join(handler.__qualname__ for handler in self._default) or "none"
        return "\n".join([*sorted(lines), f"all others: {default}"])


class Progress:
    """Where in the model the running forward pass is.

    Attributes:
        depth: L, the number of blocks.
        batch: how many images there are.
        tokens: how many tokens the stream has.
        step: the number of the step that is running, or has run last.
    """

    def __init__(self, architecture: Architecture, batch: int) -> None:
        self.depth, self.batch = architecture.depth, batch
        self.tokens = 0
        self.step = -1
        blocks = architecture.blocks
        self._ends = [block.output.step for block in blocks]
        self._end = max(self._ends[-1], architecture.stream_end)
        self._start = blocks[0].input.step
        self._spans = [block.attention_steps for block in blocks]

    @property
    def next_block(self) -> int:
        """The block that is running or will run next; L after the last."""
        return bisect_left(self._ends, self.step) if self.reached_blocks else 0

    @property
    def reached_blocks(self) -> bool:
        """Whether the first block runs, or has run."""
        return self.step > self._start

    @property
    def inside_block(self) -> bool:
        """Whether a block runs, also one of a later stage."""
        return self._start < self.step <= self._end

    @property
    def after_blocks(self) -> bool:
        """Whether all blocks have run, also those of later stages."""
        return self.step > self._end

    @property
    def layer(self) -> int | None:
        """The block that a call belongs to; L after the last one, ``None`` before the first."""
        return self.next_block if self.reached_blocks else None

    @property
    def attention_layer(self) -> int | None:
        """The block whose attention is running, from its queries, keys and values to O."""
        layer = self.layer
        if layer is None or layer == self.depth:
            return None
        first, last = self._spans[layer]
        return layer if first <= self.step <= last else None


class OtherRunError(UnsupportedModelError):
    """A run took other steps than the one that showed the architecture."""


class StepHandler(Protocol):
    """What acts on single steps of a forward pass.

    Attributes:
        steps: the steps after which ``after`` is called.
        own_steps: steps that run without handlers: those of written-out attention, from q kᵀ to the weights.
    """

    steps: frozenset[int]
    own_steps: frozenset[int]

    def before(self, number: int) -> None:
        """A step is about to run."""

    def after(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """A step has run; returns its output, or a replacement."""


class Interception(TorchFunctionMode):
    """A context that hands the steps of one thread's forward pass to ``step_handler`` and its calls to ``handlers``.

    Attributes:
        handlers: by torch function, what acts on its calls; ``print(interception.handlers)`` lists it.
    """

    def __init__(
        self,
        architecture: Architecture,
        step_handler: StepHandler,
        handlers: HandlerTable | None = None,
    ) -> None:
        super().__init__()
        self._architecture, self._step_handler = architecture, step_handler
        self.handlers = handlers or HandlerTable()
        self._counter = StepCounter()
        # What changes the stream in place, x += f(x), makes a new tensor here: the one before is needed.
        self._newer: dict[int, tuple[Tensor, Tensor]] = {}

    def start(self, inputs: Inputs) -> None:
        """Mark the model's input, on which all steps depend."""
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
        # torch pops a mode from its stack while the mode handles a call; an interrupt may have kept it off.
        if function_modes()[-1:] == [self]:
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Treat parameters as constants and hand calls to their handlers."""
        if checks_for_kernel(func, sys._getframe(1)):  # noqa: SLF001 - the caller of a function mode
            return False
        if is_flex_attention(func):
            return as_fused(lambda fused, given, named: self.__torch_function__(fused, types, given, named), args)
        if _recomputes():
            with saved_tensors_hooks(_as_it_is, _as_it_is):
                return self._intercept(func, args, kwargs or {})
        return self._intercept(func, args, kwargs or {})

    def _intercept(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._newer:
            args, kwargs = self.newest(args), self.newest(kwargs)
        # Parameters as constants: the graph starts where the tape starts it, weights' inputs need not be saved, and
        # models with requires_grad on, off or made under inference_mode behave alike. Without a graph they are anyway.
        if torch.is_grad_enabled() and (func.__name__ not in {"__get__", "__set__"} or func in _TRANSPOSED):
            args = tuple(as_constant(value) for value in args)
            kwargs = {name: as_constant(value) for name, value in kwargs.items()}
        if not self._counter.is_step(func, args, kwargs):
            return self.handlers.run(func, args, kwargs)
        number = self._counter.number
        self._step_handler.before(number)
        # Questions about its operand come before the step, with the same number: x += positions.to(x.dtype).
        rewritten = number in self._architecture.in_place and _operation(func) == self._architecture.operations[number]
        if rewritten:
            args, output = self._out_of_place(func, args, kwargs)
        elif number in self._step_handler.own_steps:
            output = func(*args, **kwargs)
        else:
            output = self.handlers.run(func, args, kwargs)
        if self._counter.finish(func, args, output):
            self._check(number, func)
            if number in self._step_handler.steps:
                assigned = func.__name__ == "__setitem__"  # assignment returns nothing
                made = args[0] if assigned else output
                kept = self._step_handler.after(number, args, kwargs, made)
                self._counter.mark(kept)
                if kept is not made and (assigned or rewritten) and isinstance(args[0], Tensor):
                    self._newer[id(args[0])] = args[0], kept  # a model need not read what an in-place call returns
                output = None if assigned else kept
        return output

    def _out_of_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """The arguments that a call had, and what it gave, on a copy of what it would have changed."""
        function = _OUT_OF_PLACE.get(_operation(func))
        given = args[0]
        if function is not None:
            new = output = self.handlers.run(function, args, kwargs)
        else:
            args = (given.clone(), *args[1:])
            output = self.handlers.run(func, args, kwargs)
            new = output if isinstance(output, Tensor) else args[0]
        self._newer[id(given)] = given, new
        return args, output

    def _check(self, number: int, func: Callable[..., Any]) -> None:
        seen = self._architecture.operations
        if number >= len(seen) or seen[number] != _operation(func):
            before = seen[number] if number < len(seen) else "none"
            raise OtherRunError(
                f"{self._architecture.name} does not run the same steps every time (step {number} is "
                f"{_operation(func)}, and was {before}), so its blocks cannot be identified"
            )


def _recomputes() -> bool:
    """Whether the call is inside ``torch.utils.checkpoint``, which would run a block again in the backward pass.

    There it would not be intercepted. Saved tensors are kept instead, as if the model did not use it.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001, FBT003 - there is no public name
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


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
