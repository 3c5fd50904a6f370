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

from vitreous.architecture.attention import find_attention
from vitreous.architecture.description import Architecture
from vitreous.architecture.find import describe
from vitreous.architecture.trace import Trace, Tracer
from vitreous.error_boundary import described_error
from vitreous.errors import InputError, UnsupportedModelError, VitreousError
from vitreous.inputs.model_input import FAILURES, Inputs, Texts, ask, failed_inside, failed_on, outside_inference
from vitreous.outputs import scale_of
from vitreous.torch_state import outside_inference_mode

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
    known = _KNOWN.setdefault(model, {})
    key = (_kind(inputs), str(inputs.device), stage)
    if again or key not in known:
        trace = trace_model(model, inputs if again else inputs[_two(inputs)])
        with _analysis(model):
            found = describe(trace, type(model).__name__, stage)
        known[key] = replace(found, scale=scale_of(model))
    return known[key]


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


def _kind(inputs: Inputs) -> Hashable:
    """What a model may go another way for: the shape of images; of texts, whether there is padding to leave out."""
    if isinstance(inputs, Tensor):
        return inputs.shape[1:], inputs.dtype
    return bool((inputs.lengths == inputs.tokens).all())


def _two(inputs: Inputs) -> slice | Tensor:
    """The first two images; the shortest and the longest of texts."""
    if isinstance(inputs, Tensor) or len(inputs) < 3:
        return slice(2)
    return torch.stack([inputs.lengths.argmin(), inputs.lengths.argmax()]).to(inputs.device)


def trace_model(model: nn.Module, inputs: Inputs) -> Trace:
    """Run a model and note every step."""
    if len(inputs) == 1:
        # Two images tell the axis of the batch from the others; a model may take one at a time only.
        twice = torch.zeros(2, dtype=torch.int64, device=inputs.device)
        with suppress(VitreousError, *FAILURES):
            return _traced(model, inputs[twice])
    return _traced(model, inputs)


def _traced(model: nn.Module, inputs: Inputs) -> Trace:
    tracer = Tracer(model, len(inputs))
    given = outside_inference(inputs)
    if isinstance(given, Tensor):
        given = given.clone()
    with outside_inference_mode(), torch.enable_grad():
        tracer.start(given.parts["input_ids"] if isinstance(given, Texts) else given)
        try:
            with tracer.modules(), tracer:
                tracer.trace.output = ask(model, given)
        except (VitreousError, MemoryError):
            raise
        except FAILURES as error:
            with _analysis(model):
                attends = bool(find_attention(tracer.trace))
            if attends:
                raise failed_inside(type(model).__name__, error) from error
            raise failed_on(model, inputs, error) from error
        except Exception as error:  # of a configuration that was believed when the model was built
            raise failed_inside(type(model).__name__, error) from error
    if not tracer.trace.steps:
        raise InputError(f"{type(model).__name__} does nothing with its input that can be seen")
    return tracer.trace
