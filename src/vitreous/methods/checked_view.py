"""Checks for plugin methods.

Their view refuses reads that the method did not declare. Their errors name the method, its file and line.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from vitreous._utils.messages import described_error
from vitreous.errors import MethodError, VitreousError
from vitreous.methods.readout import Readout, View
from vitreous.methods.registry import MethodInfo
from vitreous.tape import AttentionRecord, GradientNeeds, Needs, Pass, Plan
from vitreous.tape.attention import Rows

_GRADIENT_OF = {
    "tokens": "the gradient of the tokens",
    "norms": "the gradient of the first norm's output",
    "attention": "the gradient of the attention",
    "biases": "bias x gradient",
}


@dataclass(frozen=True, repr=False)
class CheckedView(View):
    """A view that refuses undeclared reads, even if another method had the same activation recorded.

    Attributes:
        readout: the read-out of the method.
        declared: its needs for the blocks that the spelling reads.
    """

    readout: Readout
    declared: Needs

    @classmethod
    def over(cls, view: View, readout: Readout, declared: Needs) -> CheckedView:
        """Wrap a view."""
        return cls(view.tape, view.gradients, view.target, view.runner, readout, declared)

    def tokens(self, layer: int) -> Tensor:
        if layer != self.depth:  # the last block's output is always recorded
            self._check("activations", "tokens", "the tokens", layer, self._plan.tokens)
        return super().tokens(layer)

    def norm(self, layer: int) -> Tensor:
        self._check("activations", "norms", "the first norm's output", layer, self._plan.norms)
        return super().norm(layer)

    def residual_mid(self, layer: int) -> Tensor:
        self._check_residual(layer)
        return super().residual_mid(layer)

    def after_attention(self, layer: int) -> Tensor:
        self._check_residual(layer)
        return super().after_attention(layer)

    def residual_post(self, layer: int) -> Tensor:
        self._check_residual(layer)
        return super().residual_post(layer)

    def attention(self, layer: int) -> AttentionRecord:
        self._check_attention("attention", "the attention", layer)
        return super().attention(layer)

    def value(self, layer: int) -> Tensor:
        self._check_attention("attention_rows", "the values", layer)
        return super().value(layer)

    def output_projection(self, layer: int) -> Tensor:
        self._check("activations", "projections", "the output projection W_O", layer, self.declared.projections)
        self._check_attention("attention_rows", "the heads", layer)
        return super().output_projection(layer)

    def token_gradient(self, backward: Pass, layer: int) -> Tensor:
        self._check_gradient(backward, "tokens", layer)
        return super().token_gradient(backward, layer)

    def norm_gradient(self, backward: Pass, layer: int) -> Tensor:
        self._check_gradient(backward, "norms", layer)
        return super().norm_gradient(backward, layer)

    def biases(self, backward: Pass, layer: int) -> Tensor:
        self._check_gradient(backward, "biases", layer)
        return super().biases(backward, layer)

    def attention_gradient(self, backward: Pass, layer: int, rows: Rows = slice(None)) -> Tensor:
        self._check_gradient(backward, "attention", layer)
        return super().attention_gradient(backward, layer, rows)

    def attention_relevance(self, backward: Pass, layer: int, rows: Rows = slice(None)) -> Tensor:
        self._check_gradient(backward, "attention", layer)
        return super().attention_relevance(backward, layer, rows)

    @cached_property
    def _plan(self) -> Plan:
        return Plan(self.depth, self.declared)

    def _check_residual(self, layer: int) -> None:
        self._check("activations", "residual", "the stream inside", layer, self.declared.residual)

    def _check_attention(self, name: str, what: str, layer: int) -> None:
        if not self._pools(layer):
            self._check("activations", name, what, layer, self._plan.attention)

    def _check_gradient(self, backward: Pass, name: str, layer: int) -> None:
        passes = self.declared.gradients
        if passes and backward not in passes:
            declared = " or ".join(map(str, passes))
            raise MethodError(f"it reads a gradient of {backward}, but declares {declared}: make both the same")
        held: frozenset[int] = getattr(passes.get(backward, GradientNeeds()), name)
        if not (name == "attention" and held and self._pools(layer)):
            self._check("gradients", name, _GRADIENT_OF[name], layer, held)

    def _pools(self, layer: int) -> bool:
        """Whether this is the attention pooling after the last block, which is always recorded."""
        return layer == self.depth and self.layout.pooled_by_attention

    def _check(self, argument: str, name: str, what: str, layer: int, held: frozenset[int]) -> None:
        """Raise unless a read was declared; the message shows what to declare.

        Args:
            argument: the argument of ``plugin.method`` that declares it, ``activations`` or ``gradients``.
            name: the entry of that argument.
            what: its description for the message.
            layer: the block that is read.
            held: the blocks for which it was declared.
        """
        if layer in held:
            return
        reads = f"it reads {what} of block {layer}"
        if held:
            blocks = ", ".join(map(str, sorted(held)))
            raise MethodError(
                f"{reads}, but this spelling has it recorded of block {blocks} alone: read the block that is given as "
                "layer, or write a TokenReadout whose needs() names the others"
            )
        given: tuple[str, ...] = getattr(self.readout, argument)
        raise MethodError(f"{reads}, which it did not declare: add {argument}={(*given, name)!r}")


@contextmanager
def plugin_errors(info: MethodInfo) -> Iterator[None]:
    """Convert exceptions of a plugin to a ``MethodError`` that names the plugin; methods of this package pass.

    Errors about the model or the input, and out-of-memory errors, are not converted.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not info.is_own or (isinstance(error, VitreousError) and type(error) is not MethodError):
            raise
        reason = str(error) if isinstance(error, MethodError) else described_error(error)
        raise MethodError(f"method {info.name} ({place_of(info, error)}): {reason}") from error


def place_of(info: MethodInfo, error: BaseException) -> str:
    """Return file and line of an error in the method's file; the line of the definition if it arose elsewhere."""
    code = getattr(info.written, "__code__", None)
    file = code.co_filename if code is not None else inspect.getfile(info.written)
    line = line_in(file, error) or (code.co_firstlineno if code is not None else None)
    # Code of a notebook cell has the name of a file that does not exist.
    named = f"{Path(file).name}, " if Path(file).is_file() else ""
    return f"{named}line {line}" if line else Path(file).name


def line_in(file: str, error: BaseException) -> int | None:
    """Return the innermost line of a file in the traceback of an error."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return lines[-1] if lines else None
