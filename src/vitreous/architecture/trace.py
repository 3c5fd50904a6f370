"""One run of a model as a graph: every call that works on its input, with the values that enter and leave it.

Calls are numbered in the order in which they run. Only calls that take a value which depends on the model's input and
return a tensor count (a *step*): tables of positions that a model computes once and keeps, and questions about shapes,
change nothing in the numbering. So the same step has the same number in every run of the same model on an input of the
same shape, whatever modules the calls were written in.

``flex_attention`` counts as fused attention where it only masks scores or adds constants to them. Without
``torch.compile`` around it, torch compiles it anyway, unless a flag for debugging is set. The flag is set in threads
that trace or record a model, and in no others.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from vitreous.architecture.evaluation_copy import originals_of, runs_an_original
from vitreous.errors import UnsupportedModelError

_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_MODULE, _FLAG = "torch.nn.attention.flex_attention", "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"


class _InSomeThreads:
    """A flag that is set in the threads that trace a model, and has its own value in others."""

    def __init__(self, *, otherwise: bool) -> None:
        self._otherwise = otherwise
        self.depth = threading.local()

    def __bool__(self) -> bool:
        return self._otherwise or getattr(self.depth, "count", 0) > 0


@contextmanager
def uncompiled() -> Iterator[None]:
    """Let this thread's ``flex_attention`` be seen by function modes."""
    module = sys.modules.get(_MODULE)
    flag = getattr(module, _FLAG, None)
    if flag is None:
        yield
        return
    if not isinstance(flag, _InSomeThreads):
        flag = _InSomeThreads(otherwise=bool(flag))
        setattr(module, _FLAG, flag)
    count = getattr(flag.depth, "count", 0)
    try:
        flag.depth.count = count + 1
        yield
    finally:
        flag.depth.count = count


def is_flex_attention(func: Callable[..., Any]) -> bool:
    """Whether a function is the operator that ``flex_attention`` calls."""
    return func.__name__ == "flex_attention" and isinstance(func, torch._ops.HigherOrderOperator)  # noqa: SLF001


def checks_for_kernel(func: Callable[..., Any], caller: FrameType) -> bool:
    """Whether ``flex_attention`` would need gradients, for which it has no CPU kernel; they are not used here."""
    return func.__name__ == "__get__" and func == _REQUIRES_GRAD and caller.f_globals.get("__name__") == _MODULE


def as_fused(
    attend: Callable[[Any, tuple[Any, ...], dict[str, Any]], Tensor], args: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Its result, by ``attend(scaled_dot_product_attention, args, kwargs)``; statistics are left empty.

    Raises:
        UnsupportedModelError: it does something else to its scores.
    """
    query, key, value, score_mod, block_mask, scale = args[:6]
    with torch._C.DisableTorchFunction(), torch.no_grad():  # noqa: SLF001
        bias = _bias(query, key, score_mod, block_mask[-1])
    several = query.shape[1] != key.shape[1]
    output = attend(
        F.scaled_dot_product_attention,
        (query, key, value),
        {"attn_mask": bias, "scale": scale, **({"enable_gqa": True} if several else {})},
    )
    return output, output.new_empty(0), output.new_empty(0)


def _bias(query: Tensor, key: Tensor, score_mod: Callable[..., Any], mask_mod: Callable[..., Any]) -> Tensor | None:
    """What is added to its scores, (batch, head, query, key) or less; ``None`` for nothing."""
    sizes = (*query.shape[:3], key.shape[2])
    places = [
        torch.arange(size, device=query.device).view(*[1] * place, size, *[1] * (3 - place))
        for place, size in enumerate(sizes)
    ]
    none, one = query.new_zeros(sizes), query.new_ones(sizes)
    added, of_one = score_mod(none, *places), score_mod(one, *places)
    if not torch.allclose(of_one - added, one):
        raise UnsupportedModelError(
            "flex_attention has a score_mod that does more than add to the scores, so that A and its gradients are not "
            "known; use another attention, if the model has one"
        )
    visible = torch.as_tensor(mask_mod(*places), device=query.device).expand(sizes)
    bias: Tensor = added.masked_fill(~visible, float("-inf"))
    return bias if bool(bias.any()) else None


_RUNS = itertools.count(1)
# What takes only the dtype, the device or the shape of its second operand: a constant is one afterwards, too.
AS_ANOTHER = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as"})
_MARK = "_vitreous_run"  # the number of the run in which a tensor was made from the model's input
# The same operation as a function, a method, an operator and an in-place method.
_NAMES = {
    **dict.fromkeys(("iadd", "radd"), "add"),
    **dict.fromkeys(("imul", "rmul", "multiply"), "mul"),
    **dict.fromkeys(("truediv", "itruediv", "divide", "true_divide"), "div"),
    **dict.fromkeys(("rtruediv",), "rdiv"),
    **dict.fromkeys(("isub", "subtract"), "sub"),
    **dict.fromkeys(("rmatmul", "imatmul"), "matmul"),
    **dict.fromkeys(("ipow",), "pow"),
    **dict.fromkeys(("swapaxes", "swapdims"), "transpose"),
    **dict.fromkeys(("moveaxis",), "movedim"),
    **dict.fromkeys(("concat", "concatenate"), "cat"),
    **dict.fromkeys(("expit",), "sigmoid"),
}


def operation(func: Callable[..., Any]) -> str:
    """What a function does, whichever way it is called: ``add`` for ``torch.add``, ``Tensor.add_`` and ``+=``."""
    name = func.__name__
    if name == "__get__":  # a property: x.T
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    name = name.split(".")[0].strip("_")
    return _NAMES.get(name, name)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors among arguments or results, also inside lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def as_constant(value: Any) -> Any:
    """A parameter, or a tensor of inference mode, as a tensor without a gradient; other values as they are."""
    if isinstance(value, Tensor):
        if isinstance(value, nn.Parameter) or value.is_inference():
            return value.clone().detach() if value.is_inference() else value.detach()
        return value
    if type(value) in (list, tuple) and any(isinstance(item, Tensor) for item in value):
        return type(value)(as_constant(item) for item in value)
    return value


def is_factory(func: Callable[..., Any]) -> bool:
    """Whether a function makes a new tensor of a given one's shape or kind, and takes no numbers from it."""
    return func.__name__.startswith("new_") or func.__name__.endswith("_like")


def depends_on_input(value: Any) -> bool:
    """Whether a value is a tensor that was made from a model's input in some run."""
    return isinstance(value, Tensor) and getattr(value, _MARK, 0) > 0


class StepCounter:
    """Marks what depends on a model's input and numbers the calls that work on it.

    Attributes:
        number: the number of the next step.
    """

    def __init__(self) -> None:
        self._run = next(_RUNS)
        self.number = 0

    def mark(self, value: Any) -> None:
        """Note that tensors depend on the model's input."""
        for tensor in tensors_in(value):
            setattr(tensor, _MARK, self._run)

    def depends(self, value: Any) -> bool:
        """Whether a value is a tensor that depends on the model's input."""
        return isinstance(value, Tensor) and getattr(value, _MARK, 0) == self._run

    def is_step(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call works on something that depends on the model's input."""
        run = self._run
        if func.__name__ in AS_ANOTHER:
            return self.depends(args[0])
        for value in args:
            if isinstance(value, Tensor):
                if getattr(value, _MARK, 0) == run:
                    return True
            elif isinstance(value, list | tuple) and any(map(self.depends, tensors_in(value))):
                return True
        return bool(kwargs) and any(map(self.depends, tensors_in(kwargs)))

    def finish(self, func: Callable[..., Any], args: tuple[Any, ...], output: Any) -> bool:
        """Note what a call that ``is_step`` returned; whether it counts as a step."""
        if is_factory(func):
            return False
        if func.__name__ == "__setitem__":
            self.mark(args[0])
        elif not any(True for _ in tensors_in(output)):
            return False
        self.mark(output)
        self.number += 1
        return True


@dataclass
class Value:
    """One tensor of a run; an in-place operation makes a new value of the same tensor.

    Attributes:
        index: its place among all values.
        step: the number of the step that made it; -1 for the model's input.
        tensor: the tensor; in a run in which something is changed in place it may hold later numbers.
        parents: the values that its step was given.
        ancestors: all values that it was made from, as bits by index; itself included.
    """

    index: int
    step: int
    tensor: Tensor
    shape: torch.Size
    parents: tuple[int, ...]
    ancestors: int = 0

    def comes_from(self, other: Value) -> bool:
        """Whether this was made from ``other``, or is it."""
        return bool(self.ancestors >> other.index & 1)


@dataclass
class Step:
    """One call that works on what depends on the model's input.

    Attributes:
        number: its place in the run.
        func: what was called.
        args: what with, as the model gave it.
        kwargs: the same.
        operands: the values among its arguments, in order.
        outputs: the values that it returned, in order.
        in_place: whether it changed its first argument.
        result: what it returned.
    """

    number: int
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[int, ...]
    outputs: tuple[int, ...]
    in_place: bool
    result: Any

    @cached_property
    def operation(self) -> str:
        """What it does."""
        return operation(self.func)

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by its place or name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


@dataclass
class ModuleCall:
    """One call of a module: the steps ``first`` to ``last`` (exclusive) ran in it.

    Attributes:
        module: the module.
        name: its dotted name in the model.
        first: the number of the first step in it.
        last: the number of the first step behind it.
        inputs: the values among its positional arguments.
        outputs: the values that it returned.
    """

    module: nn.Module
    name: str
    first: int
    last: int = -1
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


@dataclass
class Trace:
    """A run.

    Attributes:
        batch: how many images or texts were run.
        values: all values, in the order in which they were made; the first is the model's input.
        steps: all steps.
        calls: the module calls, in the order in which they began.
        output: the model's output.
        stale: values that were read after their memory had been changed through another tensor.
        roots: what ``root_of`` found, by the index of a value, as a cache.
    """

    batch: int
    values: list[Value] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    output: Any = None
    stale: set[int] = field(default_factory=set)
    roots: dict[int, Value] = field(default_factory=dict)

    def maker(self, value: Value) -> Step | None:
        """The step that made a value; ``None`` for the model's input."""
        return self.steps[value.step] if value.step >= 0 else None

    def between(self, start: Value, end: Value) -> list[Step]:
        """The steps by which ``end`` was made from ``start``, in order."""
        found = set()
        for index in range(start.index + 1, end.index + 1):
            value = self.values[index]
            if end.ancestors >> index & 1 and value.comes_from(start):
                found.add(value.step)
        return [self.steps[number] for number in sorted(found)]


class Tracer(TorchFunctionMode):
    """Records a run as a ``Trace``."""

    def __init__(self, model: nn.Module, batch: int) -> None:
        super().__init__()
        self.trace = Trace(batch)
        self._counter = StepCounter()
        self._names = {module: name for name, module in model.named_modules(remove_duplicate=True)}
        self._originals = originals_of(self._names)
        self._current: dict[int, int] = {}  # the value that a tensor holds now, by its identity
        self._written: dict[int, int] = {}  # by memory, the value that an in-place operation left there last
        self._open: list[ModuleCall] = []
        self.traced_thread = threading.get_ident()

    def start(self, tensor: Tensor) -> None:
        """The model's input."""
        self._counter.mark(tensor)
        self._value(tensor, -1, ())

    def _value(self, tensor: Tensor, step: int, parents: tuple[int, ...]) -> int:
        index = len(self.trace.values)
        ancestors = 1 << index
        for parent in parents:
            ancestors |= self.trace.values[parent].ancestors
        self.trace.values.append(Value(index, step, tensor, tensor.shape, parents, ancestors))
        self._current[id(tensor)] = index
        return index

    def _read(self, tensor: Tensor) -> int:
        """The value that a tensor holds, also where it was changed through another tensor of the same memory."""
        index = self._current.get(id(tensor))
        written = self._written.get(memory_of(tensor), -1)
        if index is None or (written > index and self.trace.values[written].tensor is not tensor):
            # Marked, and yet not seen as a result: made inside a function that was not intercepted.
            parents = tuple(part for part in (index, written) if part is not None and part >= 0)
            step = self.trace.values[written].step if written >= 0 else len(self.trace.steps) - 1
            index = self._value(tensor, step, parents)
            self.trace.stale.add(index)
        return index

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a call and note it, if it is a step."""
        kwargs = kwargs or {}
        if is_flex_attention(func):
            return as_fused(lambda fused, given, named: self.__torch_function__(fused, types, given, named), args)
        constants = tuple(map(as_constant, args)), {name: as_constant(value) for name, value in kwargs.items()}
        if not self._counter.is_step(func, args, kwargs):
            return func(*constants[0], **constants[1])
        sources = args[:1] if func.__name__ in AS_ANOTHER else (args, kwargs)
        given = [tensor for tensor in tensors_in(sources) if self._counter.depends(tensor)]
        operands = tuple(self._read(tensor) for tensor in given)
        number = self._counter.number
        versions = {id(tensor): tensor._version for tensor in given}  # noqa: SLF001 - there is no public name for it
        output = func(*constants[0], **constants[1])
        if not self._counter.finish(func, args, output):
            return output
        results = [args[0]] if func.__name__ == "__setitem__" else list(tensors_in(output))
        # One that is handed back as it was, by dropout in evaluation, was not changed.
        in_place = any(versions.get(id(result), result._version) != result._version for result in results)  # noqa: SLF001
        outputs = tuple(self._value(result, number, operands) for result in results)
        if in_place:
            for index in outputs:
                self._written[memory_of(self.trace.values[index].tensor)] = index
        # A list that the model goes on filling is kept as it was.
        kept = tuple(list(value) if type(value) is list else value for value in args)
        named = {name: list(value) if type(value) is list else value for name, value in kwargs.items()}
        self.trace.steps.append(Step(number, func, kept, named, operands, outputs, in_place, output))
        return output

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Note which modules run, by hooks that are not on the model and are removed again."""
        handles = []
        try:
            handles.append(register_module_forward_pre_hook(self._enter))
            handles.append(register_module_forward_hook(self._leave, always_call=False))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if threading.get_ident() != self.traced_thread:
            return
        if module in self._originals:
            raise runs_an_original(module)
        if module in self._names:
            inputs = tuple(self._values_of(arguments))
            call = ModuleCall(module, self._names[module], self._counter.number, inputs=inputs)
            self._open.append(call)
            self.trace.calls.append(call)

    def _leave(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        del arguments
        if threading.get_ident() != self.traced_thread or module not in self._names:
            return
        while self._open:
            call = self._open.pop()
            call.last, call.outputs = self._counter.number, tuple(self._values_of(output))
            if call.module is module:
                break

    def _values_of(self, given: Any) -> Iterator[int]:
        for tensor in tensors_in(given):
            if self._counter.depends(tensor):
                yield self._read(tensor)


def memory_of(tensor: Tensor) -> int:
    """Where a tensor's numbers are."""
    try:
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - this question is no call of the model's
            return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, quantised, meta
        return id(tensor)
