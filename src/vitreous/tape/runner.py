"""Running a model: once, recorded on a tape, and again, with another input or with fewer tokens.

Methods that need more than one run (integrated gradients, perturbation) see this, never the model itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from vitreous._utils.torch_state import at_least_float32, outside_inference_mode
from vitreous.architecture import Architecture, find_architecture
from vitreous.architecture.trace import uncompiled
from vitreous.errors import InputError, UnsupportedModelError, VitreousError
from vitreous.inputs.model_io import (
    FAILURES,
    Inputs,
    OutputActivation,
    Rows,
    Texts,
    ask,
    failed_inside,
    failed_on,
    outside_inference,
    scale_of,
)
from vitreous.inputs.patch_geometry import PatchGeometry
from vitreous.tape.output import CLASS_SCORES, OutputReader, Quantity, explained
from vitreous.tape.patches.grid_probe import PatchGridProbe
from vitreous.tape.patches.layout import Layout
from vitreous.tape.patches.receptive_fields import first_block_input
from vitreous.tape.recording.gradient_breaks import depends
from vitreous.tape.recording.interception import OtherRunError
from vitreous.tape.recording.plan import Intervention, Needs, Plan
from vitreous.tape.recording.recorder import Recorder
from vitreous.tape.removal import Interceptor, ScoreEditing, TokenDropping, check_kept, nothing_left, removal_strategy
from vitreous.tape.tape import Tape

# Bare evaluations are run this many pixels at a time. Measured on ViT-Ti: 8 to 32 pictures of 224 x 224 at once cost
# the same per picture, one alone 1.6 times as much, and 64 leave the processor's caches.
_PIXELS_AT_ONCE = 16 * 224 * 224
TOKENS_AT_ONCE = 16 * 196  # the same for texts
# So many images are recorded together even where fewer are explained: one at a time leaves most of a processor idle.
_A_FEW = 8
# How many images a runner evaluates at most before it stops, where a limit is set.
_LIMIT: ContextVar[int | None] = ContextVar("evaluation_limit", default=None)


@contextmanager
def record(
    model: nn.Module, architecture: Architecture, inputs: Inputs, plan: Plan, reader: OutputReader = CLASS_SCORES
) -> Iterator[Tape]:
    """Run ``model`` once on pictures or texts and keep what ``plan`` names, until the context ends.

    The plan's intervention may put another stream in the place of a block's input, or scale attention. ``reader`` says
    what is read of the model's output.

    The model is not edited; it has to be in evaluation mode, as those of ``evaluation_copy`` are. A caller's
    ``no_grad``, ``inference_mode`` or ``autocast`` may surround this.
    """
    with outside_inference_mode(), torch.enable_grad():
        try:
            recorder, output = _record_run(model, architecture, inputs, plan)
        except OtherRunError:
            # A model may go another way with these inputs than with the two that were traced: trace these.
            architecture = find_architecture(model, inputs, architecture.chosen, again=True)
            try:
                recorder, output = _record_run(model, architecture, inputs, plan)
            except OtherRunError:
                if plan.intervention.stream is None:
                    raise
                raise UnsupportedModelError(
                    f"{architecture.name} cannot run again from block {plan.intervention.layer} on with other tokens: "
                    "its output also reads earlier blocks (as that of a dense head does), which keep the tokens of the "
                    "image"
                ) from None
        except _OtherBatchError:
            # A head that counts its pictures (to lay out a grid, perhaps) gets as many of them as of other streams.
            assert plan.intervention.stream is not None
            recorder, output = _record_run(model, architecture, _as_many(inputs, len(plan.intervention.stream)), plan)
        try:
            logits = reader.read(output, architecture.name, recorder.progress.batch)
        except InputError:
            stream = plan.intervention.stream
            if stream is None or len(stream) == len(inputs):
                raise
            # A head may take the number of its pictures from them, without an error.
            recorder, output = _record_run(model, architecture, _as_many(inputs, len(stream)), plan)
            logits = reader.read(output, architecture.name, recorder.progress.batch)
        if recorder.embedded is not None and depends(logits, recorder.embedded):
            raise _reads_again(architecture)

        def again(rows: Rows, needs: Needs, intervention: Intervention) -> AbstractContextManager[Tape]:
            return record(model, architecture, inputs[rows], Plan(architecture.depth, needs, intervention), reader)

        yield Tape(recorder, logits, inputs, again, PatchGridProbe(architecture, model, inputs), reader)


def _as_many(inputs: Inputs, count: int) -> Inputs:
    """The first picture or text so many times."""
    return inputs[torch.zeros(count, dtype=torch.int64, device=inputs.device)]


class _OtherBatchError(UnsupportedModelError):
    """A model failed when other streams were put in the place of its tokens, and not as many as it got pictures."""


def _record_run(model: nn.Module, architecture: Architecture, inputs: Inputs, plan: Plan) -> tuple[Recorder, Any]:
    """Run a model, and give what was kept of the run and its output."""
    given = outside_inference(inputs)
    recorder = Recorder(architecture, plan, len(inputs), reads_text=isinstance(inputs, Texts))
    if isinstance(given, Tensor):
        given = given.clone()
        recorder.start(given)
    interception = recorder.interception()
    interception.start(given)
    with uncompiled(), interception:
        output = _run(model, given, recorder)
    return recorder, interception.newest(output)


def _run(model: nn.Module, inputs: Inputs, recorder: Recorder) -> Any:
    """The model's output; what it cannot embed at all is the picture's or text's fault, not the model's."""
    try:
        return ask(model, inputs)
    except (VitreousError, MemoryError):
        raise
    except FAILURES as error:
        if recorder.progress.batch != len(inputs) and not isinstance(error, torch.OutOfMemoryError):
            raise _OtherBatchError(str(_reads_again(recorder.architecture))) from error
        if recorder.progress.reached_blocks:
            raise failed_inside(recorder.architecture.name, error) from error
        raise failed_on(model, inputs, error) from error
    except Exception as error:  # of a configuration that was believed when the model was built
        raise failed_inside(recorder.architecture.name, error) from error


def _reads_again(architecture: Architecture) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{architecture.name} reads the tokens of several blocks at once (a head on the outputs of the last few, "
        "perhaps), so that no others can be put in the place of one block's alone, which this method does"
    )


class EvaluationLimitReached(BaseException):  # no error, and nothing that handles errors may catch it
    """A method has run the model as often as ``limited_evaluations`` allows."""


@contextmanager
def limited_evaluations(limit: int) -> Iterator[None]:
    """Let methods evaluate ``limit`` images at most, a few at a time; enough to see whether they work at all."""
    token = _LIMIT.set(limit)
    try:
        yield
    finally:
        _LIMIT.reset(token)


@dataclass
class ModelRunner:
    """A model with the images or texts that are explained.

    Attributes:
        inputs: the model's input: pictures (batch, channel, height, width), or texts.
        targets: the classes that are explained of each image, (batch, k), where they are known.
        black: what the model gets for a black pixel, (channel,), where its preprocessing is known.
        outputs: kind of the model's outputs, if known; ``None`` takes it from its configuration.
        evaluations: how many images the model has evaluated so far, besides the recorded run.
        memory: results that methods share between targets and with each other.
        stage: which stage of a hierarchical model is read; ``None`` for the last.
        geometry: where patches are centred, where maps of these images have shown it; ``None`` for equal cells.
    """

    _model: nn.Module
    inputs: Inputs
    targets: Tensor | None = None
    black: Tensor | None = None
    outputs: OutputActivation | None = None
    evaluations: int = 0
    memory: dict[Hashable, Tensor] = field(default_factory=dict)
    stage: int | None = None
    geometry: PatchGeometry | None = None
    _architecture: Architecture | None = None
    _layout: Layout | None = None
    _cannot_drop: bool | None = None  # whether patches have to be hidden instead; None: not known yet
    _bare: Callable[..., Any] | None = None  # the model in another form, for evaluations that are not intercepted
    _reader: OutputReader = CLASS_SCORES  # what is read of the model's output

    def __post_init__(self) -> None:
        # Methods read a tape outside the caller's autocast; further runs of the model are inside it.
        kind = self.inputs.device.type
        self._autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    @property
    def architecture(self) -> Architecture:
        """What a run of the model shows."""
        if self._architecture is None:
            self._architecture = find_architecture(self._model, self.inputs, self.stage)
        return self._architecture

    @property
    def layout(self) -> Layout:
        """Patch grid, prefix tokens and the tokens that the head reads."""
        if self._layout is None:
            plan = Plan(self.architecture.depth, Needs())
            with record(self._model, self.architecture, self.inputs[:1], plan, self._reader) as tape:
                self._layout = tape.layout
        return self._layout

    def note_layout(self, layout: Layout) -> None:
        """Take the layout from a run that was made, so that none has to be made for it."""
        self._layout = self._layout or layout

    @property
    def scale(self) -> OutputActivation | None:
        """Kind of the model's outputs, if its configuration declares it."""
        if self.outputs is not None:
            return self.outputs
        return scale_of(self._model) if self._architecture is None else self._architecture.scale

    @property
    def images(self) -> Tensor:
        """The pictures, (batch, channel, height, width), or volumes and clips with one axis more.

        Raises:
            UnsupportedModelError: the model reads texts.
        """
        if isinstance(self.inputs, Texts):
            raise UnsupportedModelError(f"{type(self._model).__name__} reads texts, and a text has no pixels")
        return self.inputs

    @property
    def size(self) -> tuple[int, ...]:
        """Height and width of the images, in pixels, behind the depth of a volume or the frames of a clip.

        A text is as high as one of its tokens and has no prefix.
        """
        if isinstance(self.inputs, Texts):
            return self.layout.grid
        if self.inputs.dim() == 4:
            return self.inputs.shape[-2], self.inputs.shape[-1]
        return self.layout.size_of(self.inputs)

    @property
    def channel_axis(self) -> int:
        """The axis of the images' channels: 1, or 2 in a clip (batch, frames, channels, height, width)."""
        return self.layout.channel_axis if isinstance(self.inputs, Tensor) and self.inputs.dim() == 5 else 1

    def colour(self, channels: Tensor) -> Tensor:
        """One number for each channel, in the shape of an image of one pixel: (1, channel, 1, 1)."""
        shape = [1] * self.images.dim()
        shape[self.channel_axis] = len(channels)
        return channels.view(shape)

    @property
    def batch(self) -> int:
        """How many images or texts are run at once in bare evaluations, of which nothing is recorded."""
        if (limit := _LIMIT.get()) is not None:
            return limit
        if isinstance(self.inputs, Texts):
            return max(1, TOKENS_AT_ONCE // self.inputs.tokens)
        return max(1, _PIXELS_AT_ONCE // math.prod(self.size))

    def cut(self, rows: Rows, count: int) -> ModelRunner:
        """The same model with some of the texts, without the padding after their ``count`` tokens."""
        assert isinstance(self.inputs, Texts)
        targets = None if self.targets is None else self.targets[rows]
        # Not with this architecture: without padding a model may take other steps.
        part = ModelRunner(
            self._model, self.inputs.cut(rows, count), targets, _layout=self.layout.cut(count), _reader=self._reader
        )
        part._autocast, part._bare = self._autocast, self._bare
        return part

    def with_model(self, model: nn.Module) -> ModelRunner:
        """The same inputs with another form of the model, such as a copy in evaluation mode."""
        if model is self._model:
            return self
        other: ModelRunner = replace(self, _model=model, _architecture=None)
        other._autocast = self._autocast
        return other

    @property
    def at_once(self) -> int:
        """How many images fit into one recorded run: as many as were explained together, and a few in any case."""
        return _LIMIT.get() or max(len(self.inputs), _A_FEW)

    def record(
        self, inputs: Inputs, needs: Needs, intervention: Intervention | None = None
    ) -> AbstractContextManager[Tape]:
        """Run the model on other images or texts and keep what ``needs`` names, until the context ends."""
        self._count(len(inputs))
        plan = Plan(self.architecture.depth, needs, intervention or Intervention())
        return record(self._model, self.architecture, inputs, plan, self._reader)

    def explained(self, logits: Tensor, quantity: Quantity) -> Tensor:
        """The explained quantity of every class and target, given what ``logits`` or a recorded run has returned."""
        return explained(logits, quantity, self.scale, self._reader.targets_in(logits))

    def record_kept(self, images: Inputs, kept: Tensor, needs: Needs) -> AbstractContextManager[Tape]:
        """Run the model without all patches but ``kept``, (images, k), and keep what ``needs`` names.

        The tape's patches are those of every row of ``kept`` in ascending order, in one row of k.

        Raises:
            UnsupportedModelError: its patches cannot be dropped.
        """
        kept = check_kept(kept.to(images.device), len(images), self.layout.patches)
        if not self._can_drop(images):
            raise UnsupportedModelError(
                f"patches of {self.architecture.name} can be hidden from attention but not dropped (its blocks work "
                "out positions from how many tokens there are), and only a run without them can be recorded"
            )
        return self.record(images, needs, Intervention(kept=kept, patches=self.layout.patches))

    def embedded(self, images: Tensor) -> Tensor | None:
        """The first block's tokens of other images, without a run of the blocks; ``None`` where they do not show."""
        stream = first_block_input(self.architecture, self._model, images)
        return at_least_float32(stream) if stream is not None and len(stream) == len(images) else None

    def logits(self, images: Inputs) -> Tensor:
        """The logits of other images, (images, classes)."""
        with self._evaluating():
            return torch.cat([self._run(images[part]) for part in self._parts(images)])

    def logits_of_kept(self, images: Inputs, kept: Tensor) -> Tensor:
        """The logits with all patches dropped but ``kept``, (images, k); prefix tokens always stay.

        Patches are dropped at the input of the first block, after the positional embedding (True Token Masking), so
        the cost falls with the tokens kept.

        Raises:
            UnsupportedModelError: the model cannot do without a patch, or all are dropped and it reads nothing else.
        """
        kept = check_kept(kept.to(images.device), len(images), self.layout.patches)
        if kept.shape[1] == self.layout.patches:
            return self.logits(images)
        if kept.shape[1] == 0 and not self.layout.reads_prefix_only:
            raise nothing_left(self.architecture.name)
        with self._evaluating():
            return torch.cat([self._run_kept(images[part], kept[part]) for part in self._parts(images)])

    def logits_of_damped(self, images: Inputs, factors: Tensor) -> Tensor:
        """The logits with the attention scores of token j times ``factors[:, j]``, (images, tokens)."""
        with self._evaluating():
            return torch.cat([self._run_edited(images[part], factor=factors[part]) for part in self._parts(images)])

    def _parts(self, images: Inputs) -> Iterator[slice]:
        """As many at once as bare evaluations run."""
        for start in range(0, len(images), self.batch):
            yield slice(start, start + self.batch)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        kind, dtype, enabled = self._autocast
        autocast = torch.autocast(kind, dtype=dtype) if enabled else nullcontext()
        with outside_inference_mode(), torch.no_grad(), autocast:
            yield

    def _count(self, images: int) -> None:
        """Note that some images are evaluated next."""
        limit = _LIMIT.get()
        if limit is not None and self.evaluations >= limit:
            raise EvaluationLimitReached
        self.evaluations += images

    def _run(self, images: Inputs, interceptor: Interceptor | None = None) -> Tensor:
        self._count(len(images))
        name = type(self._model).__name__
        try:
            if interceptor is not None:
                return self._run_intercepted(images, interceptor)
            output = ask(self._model if self._bare is None else self._bare, images)
        except (VitreousError, MemoryError):
            raise
        except Exception as error:  # it took the images that are explained, and not these
            raise failed_inside(name, error) from error
        return self._reader.read(output, name, len(images))

    def _run_intercepted(self, images: Inputs, interceptor: Interceptor) -> Tensor:
        given = outside_inference(images)
        interception = interceptor.interception()
        interception.start(given)
        with uncompiled(), interception:
            output = ask(self._model, given)
        return self._reader.read(interception.newest(output), type(self._model).__name__, len(images))

    def _run_kept(self, images: Inputs, kept: Tensor) -> Tensor:
        if self._can_drop(images):
            return self._run(images, TokenDropping(self.architecture, kept, self.layout.patches))
        # Patches that are masked in every attention and dropped after the last block give the same numbers, at full
        # cost.
        return self._run_edited(images, kept=kept)

    def _can_drop(self, images: Inputs) -> bool:
        """Whether patches can be dropped; found once, with a few of them."""
        if self._cannot_drop is None:
            with self._evaluating():
                strategy = removal_strategy(
                    self._model, self.architecture, images, self.layout.patches, self._run_intercepted
                )
            self._cannot_drop = strategy == "hide"
        return not self._cannot_drop

    def _run_edited(self, images: Inputs, *, factor: Tensor | None = None, kept: Tensor | None = None) -> Tensor:
        editing = ScoreEditing(self.architecture, factor=factor, kept=kept, patches=self.layout.patches)
        logits = self._run(images, editing)
        editing.check()
        return logits
