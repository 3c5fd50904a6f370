"""Running a model once to see its architecture, and remembering what was seen."""

from __future__ import annotations

import traceback
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vitreous._utils.messages import described_error
from vitreous._utils.torch_state import outside_inference_mode
from vitreous.architecture.description import Architecture
from vitreous.architecture.evaluation_copy import original_of
from vitreous.architecture.find import describe
from vitreous.architecture.find_attention import find_attention
from vitreous.architecture.trace import Trace, Tracer, uncompiled
from vitreous.errors import UnsupportedModelError, VitreousError
from vitreous.inputs.model_io import (
    FAILURES,
    Inputs,
    Texts,
    ask,
    encoding_methods,
    failed_inside,
    failed_on,
    outside_inference,
    scale_of,
)

# What was seen of a model, by the shape of its input. A run that takes other steps is seen again.
_KNOWN: WeakKeyDictionary[nn.Module, dict[Hashable, Architecture]] = WeakKeyDictionary()


def find_architecture(
    model: nn.Module, inputs: Inputs, stage: int | None = None, *, again: bool = False
) -> Architecture:
    """What a run of ``model`` shows; costs a run of two images, the first time.

    Args:
        model: the model, in evaluation mode.
        inputs: images or texts; the first two are run.
        stage: which stage of the stream is read, where there are several; the last in which tokens can be told apart
            by default.
        again: whether to run the model even if it is known, and on all of ``inputs``.

    Raises:
        UnsupportedModelError: there is no stream of tokens.
        InputError: the model does not take these inputs.
    """
    # Every call makes another copy of a model in training mode; they all take the same steps.
    known = _KNOWN.setdefault(original_of(model), {})
    # Many models leave out their mask where no text has padding, and take other steps then.
    kind = (inputs.shape[1:], inputs.dtype) if isinstance(inputs, Tensor) else ("texts", inputs.padded)
    key: Hashable = (kind, str(inputs.device), stage)
    alone: Hashable = (key, "alone")
    if len(inputs) == 1 and alone in known and not again:
        return known[alone]
    if again or key not in known:
        try:
            trace = trace_model(model, inputs if again else _two_of(inputs))
            found = _described(model, trace, stage)
        except UnsupportedModelError:
            if len(inputs) > 1:
                raise
            # Two at once may be joined where one is served.
            key, found = alone, _described(model, _traced(model, inputs), stage)
        known[key] = replace(found, scale=scale_of(model))
    return known[key]


def architecture_of_copy(model: nn.Module, inputs: Inputs) -> Architecture:
    """What a run of this very object shows, by its own modules where it is a copy; it is not remembered."""
    return replace(_described(model, trace_model(model, _two_of(inputs)), None), scale=scale_of(model))


def _two_of(inputs: Inputs) -> Inputs:
    """The first two; of texts the shortest and the longest, so that there is padding if any has some."""
    if isinstance(inputs, Tensor) or len(inputs) < 2:
        return inputs[:2]
    return inputs[inputs.lengths.argsort(stable=True)[[0, -1]].to(inputs.device)]


def _described(model: nn.Module, trace: Trace, stage: int | None) -> Architecture:
    with _analysis(model):
        return describe(trace, type(model).__name__, stage)


@contextmanager
def _analysis(model: nn.Module) -> Iterator[None]:
    """Turn what no one foresaw in a run of somebody's code into a refusal that names the place."""
    try:
        yield
    except (VitreousError, MemoryError):
        raise
    except Exception as error:
        *_, frame = traceback.extract_tb(error.__traceback__)
        raise UnsupportedModelError(
            f"the architecture of {type(model).__name__} cannot be read from its run ({described_error(error)}, in "
            f"{Path(frame.filename).name}, line {frame.lineno}); please report this model"
        ) from error


def trace_model(model: nn.Module, inputs: Inputs) -> Trace:
    """Run a model and note every step."""
    if len(inputs) == 1:
        # Two images tell the axis of the batch from the others; a model may take one at a time only.
        twice = torch.zeros(2, dtype=torch.int64, device=inputs.device)
        with suppress(VitreousError, *FAILURES):
            return _traced(model, inputs[twice])
    return _traced(model, inputs)


def _attends(model: nn.Module, tracer: Tracer) -> bool:
    """Whether a run got as far as its first attention call."""
    with _analysis(model):
        return bool(find_attention(tracer.trace))


def _traced(model: nn.Module, inputs: Inputs) -> Trace:
    tracer = Tracer(model, len(inputs))
    given = outside_inference(inputs)
    if isinstance(given, Tensor):
        given = given.clone()
    with outside_inference_mode(), torch.enable_grad():
        tracer.start(given.parts["input_ids"] if isinstance(given, Texts) else given)
        try:
            with tracer.modules(), uncompiled(), tracer:
                tracer.trace.output = ask(model, given)
        except (VitreousError, MemoryError):
            raise
        except Exception as error:  # also of a configuration that was believed when the model was built
            inside = not isinstance(error, FAILURES) or _attends(model, tracer)
            if inside and encoding_methods(model) is None:
                raise failed_inside(type(model).__name__, error) from error
            raise failed_on(model, inputs, error) from error
    if not tracer.trace.steps:
        raise UnsupportedModelError(f"{type(model).__name__} calls no PyTorch function on its input that can be traced")
    return tracer.trace
