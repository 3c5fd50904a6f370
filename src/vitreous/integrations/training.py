"""Log maps and trust metrics during training to TensorBoard, MLflow or Weights & Biases.

``watch`` counts the steps of an optimizer or is called after every step; ``lightning_callback`` does the same in
PyTorch Lightning. Both write through the interface ``MapLogger``. The explained model is an evaluation-mode copy that
shares the weights; mode, gradients and random generators of the trained model do not change.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitreous._utils.defaults import DEFAULT_METHODS
from vitreous._utils.messages import error_message, short_repr, warn_caller
from vitreous._utils.torch_state import float64_array
from vitreous.api.explain import explain, find_recipes, network_of
from vitreous.api.trust import trust as measure_trust
from vitreous.errors import InputError, MissingDependencyError, VitreousError
from vitreous.explanation.explanation import Explanation
from vitreous.explanation.trust import Trust
from vitreous.explanation.views import find_view
from vitreous.inputs.targets import AnyTarget
from vitreous.metrics.sanity import spearman
from vitreous.models.pixels import Images, Model, find_model, find_pixels

__all__ = [
    "MLflowLogger",
    "MapLogger",
    "TensorBoardLogger",
    "WandbLogger",
    "Watcher",
    "find_logger",
    "lightning_callback",
    "watch",
]


@runtime_checkable
class MapLogger(Protocol):
    """The logger interface: any object with these two methods."""

    def log_numbers(self, numbers: Mapping[str, float], step: int) -> None:
        """Log numbers by name at a training step."""

    def log_images(self, images: Mapping[str, Image.Image], step: int) -> None:
        """Log RGB images by name at a training step."""


class TensorBoardLogger:
    """Logs to a ``torch.utils.tensorboard.SummaryWriter``.

    Args:
        writer: the writer, or a folder for a new one, which ``close`` closes.
    """

    def __init__(self, writer: Any) -> None:
        if not hasattr(writer, "add_image"):
            try:
                from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra
            except ImportError as error:
                raise MissingDependencyError(
                    'TensorBoard is not installed: pip install "vitreous[training]"'
                ) from error
            writer = SummaryWriter(str(writer))
        self.writer = writer

    def log_numbers(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def log_images(self, images: Mapping[str, Image.Image], step: int) -> None:
        for name, image in images.items():
            self.writer.add_image(name, np.asarray(image.convert("RGB")), step, dataformats="HWC")
        self.writer.flush()

    def close(self) -> None:
        """Close the writer."""
        self.writer.close()


class MLflowLogger:
    """Logs to an MLflow run.

    Args:
        run_id: the run; the active one by default.
        client: an ``MlflowClient``; one for the current tracking URI by default.
    """

    def __init__(self, run_id: str | None = None, client: Any = None) -> None:
        if client is None or run_id is None:
            try:
                import mlflow  # noqa: PLC0415 - an extra
            except ImportError as error:
                raise MissingDependencyError('MLflow is not installed: pip install "vitreous[mlflow]"') from error
            active = mlflow.active_run()
            if run_id is None:
                if active is None:
                    raise InputError("there is no active MLflow run: call mlflow.start_run() first, or give run_id")
                run_id = active.info.run_id
            client = client or mlflow.MlflowClient()
        self.run_id, self.client = run_id, client

    def log_numbers(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.client.log_metric(self.run_id, _plain_name(name), value, step=step)

    def log_images(self, images: Mapping[str, Image.Image], step: int) -> None:
        for name, image in images.items():
            self.client.log_image(self.run_id, image, key=_plain_name(name), step=step)


class WandbLogger:
    """Logs to a Weights & Biases run.

    Values have their own axis, ``vitreous/step``, because the step of the run must increase and belongs to the caller.

    Args:
        run: the object that ``wandb.init`` returned; the current run by default.
    """

    _AXIS = "vitreous/step"

    def __init__(self, run: Any = None) -> None:
        try:
            import wandb  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise MissingDependencyError('W&B is not installed: pip install "vitreous[wandb]"') from error
        current: Any = wandb.run if run is None else run
        if current is None:
            raise InputError("there is no active W&B run: call wandb.init() first, or give run")
        self._wandb, self.run = wandb, current
        self._known: set[str] = set()

    def log_numbers(self, numbers: Mapping[str, float], step: int) -> None:
        self._log(dict(numbers), step)

    def log_images(self, images: Mapping[str, Image.Image], step: int) -> None:
        self._log({name: self._wandb.Image(image) for name, image in images.items()}, step)

    def _log(self, values: dict[str, Any], step: int) -> None:
        for name in values.keys() - self._known:
            self.run.define_metric(name, step_metric=self._AXIS)
        self._known |= values.keys()
        self.run.log({**values, self._AXIS: step})


def find_logger(logger: Any) -> MapLogger:
    """Return the adapter for a logger.

    Args:
        logger: a ``MapLogger``, a ``SummaryWriter``, a run of W&B or MLflow, a Lightning logger for one of these,
            ``"mlflow"`` or ``"wandb"`` for the active run, or a folder for TensorBoard.

    Raises:
        InputError: it is none of these.
    """
    if isinstance(logger, MapLogger):
        return logger
    if isinstance(logger, str) and logger in {"mlflow", "wandb"}:
        return MLflowLogger() if logger == "mlflow" else WandbLogger()
    if isinstance(logger, str | Path) or hasattr(logger, "add_image"):
        return TensorBoardLogger(logger)
    inner = getattr(logger, "experiment", None)  # of a Lightning logger
    for run in (logger, inner):
        if (adapter := _adapter_of(run, getattr(logger, "run_id", None))) is not None:
            return adapter
    raise InputError(
        "logger must be a SummaryWriter or a folder (TensorBoard), an MLflow or W&B run, a Lightning logger for one of "
        f"these, or an object with log_numbers and log_images, not {short_repr(logger)}"
    )


def _adapter_of(run: Any, run_id: str | None) -> MapLogger | None:
    """Find the adapter by attributes, so that no package has to be imported."""
    if hasattr(run, "add_image"):
        return TensorBoardLogger(run)
    if hasattr(run, "define_metric"):
        return WandbLogger(run)
    if hasattr(run, "log_image") and run_id:
        return MLflowLogger(run_id, run)
    found = getattr(getattr(run, "info", None), "run_id", None)
    return MLflowLogger(found) if found else None


def _plain_name(name: str) -> str:
    """Replace characters that MLflow does not allow in names."""
    return re.sub(r"[^\w./ -]+", "-", name)


class Watcher:
    """Logs the maps of some images every ``every`` steps; created by ``watch``.

    Attributes:
        count: number of steps so far.
        last: the explanation that was logged last.
    """

    def __init__(
        self,
        model: Model,
        images: Images,
        loggers: Sequence[MapLogger],
        *,
        every: int,
        methods: str | Sequence[str] | None,
        target: AnyTarget,
        names: Sequence[str] | None,
        trust: bool,
        prefix: str,
        options: Mapping[str, Any],
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InputError(f"every must be a whole number of steps above 0, not {short_repr(every)}")
        find_recipes(DEFAULT_METHODS if methods is None else methods)  # raises for a wrong spelling
        self._model = find_model(model, images)
        self._pixels, self._pictures = find_pixels(self._model, network_of(self._model), images)
        self._names = [str(number) for number in range(len(self._pixels))] if names is None else list(names)
        if len(self._names) != len(self._pixels):
            raise InputError(f"there are {len(self._names)} names for {len(self._pixels)} images")
        self._loggers, self._every, self._methods, self._target = tuple(loggers), every, methods, target
        self._trust, self._prefix, self._options = trust, prefix, dict(options)
        self._hook: Any = None
        self._before: dict[str, Tensor] = {}
        self._logged = False
        self.count = 0
        self.last: Explanation | None = None

    def step(self, step: int | None = None) -> bool:
        """Count a training step, and log at every ``every``-th one.

        Args:
            step: the number of steps so far; counted here by default.

        Returns:
            Whether this step was logged.
        """
        self.count = self.count + 1 if step is None else int(step)
        if self.count % self._every:
            return False
        self.log(self.count)
        return True

    def log(self, step: int | None = None) -> None:
        """Explain the images and log maps and metrics now.

        Errors are raised the first time. Later they become warnings, so that training continues.
        """
        step = self.count if step is None else int(step)
        try:
            with _random_states():
                self._log(step)
        except VitreousError as error:
            if not self._logged:
                raise
            warn_caller(f"maps were not logged at step {step}: {error_message(error)}")
        self._logged = True

    def _log(self, step: int) -> None:
        explanation = explain(self._model, self._pixels, self._methods, self._target, **self._options)
        if self._methods is None:  # later steps are compared with the first
            self._methods = explanation.methods
        if self._pictures is not None:
            explanation = replace(explanation, images=self._pictures, images_note=None)
        numbers = self._changes(explanation)
        if self._trust:
            numbers |= self._trust_numbers(measure_trust(self._model, self._pixels, explanation, shift=False))
        draw = find_view(explanation, "overlay")
        images = {
            f"{self._prefix}/{name}/{method}": draw(explanation, method, index)
            for index, name in enumerate(self._names)
            for method in explanation.methods
            if explanation.shows(method, index)
        }
        for logger in self._loggers:
            logger.log_numbers(numbers, step)
            logger.log_images(images, step)
        self.last = explanation

    def _changes(self, explanation: Explanation) -> dict[str, float]:
        """Mean rank correlation with the maps of the previous log, over images and classes."""
        found = {}
        for method, scores in explanation.scores.items():
            now = scores.detach().flatten(0, -2).cpu()
            before = self._before.get(method)
            self._before[method] = now
            if before is None or before.shape != now.shape or not (before.isfinite().all() and now.isfinite().all()):
                continue
            pairs = zip(float64_array(before), float64_array(now), strict=True)
            found[f"{self._prefix}/similarity_to_last/{method}"] = float(np.mean([spearman(*pair) for pair in pairs]))
        return found

    def _trust_numbers(self, measured: Sequence[Trust]) -> dict[str, float]:
        known = [trust for trust in measured if trust.verdict != "not measured"]
        if not known:
            return {}
        place = f"{self._prefix}/trust"
        found = {
            f"{place}/good": float(np.mean([trust.verdict == "good" for trust in known])),
            f"{place}/probability": float(np.mean([trust.probability for trust in known])),
        }
        for method in known[0].maps:
            found[f"{place}/gap/{method}"] = float(np.mean([trust.maps[method].gap for trust in known]))
        agreements = [trust.agreement for trust in known if trust.agreement is not None]
        return found | ({f"{place}/agreement": float(np.mean(agreements))} if agreements else {})

    def hook(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the steps of an optimizer, so that ``step`` need not be called."""

        def count(*_: Any) -> None:
            self.step()

        self._hook = optimizer.register_step_post_hook(count)

    def close(self) -> None:
        """Stop counting steps; the loggers stay open."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def watch(
    model: Model,
    images: Images,
    logger: Any,
    *,
    every: int = 100,
    methods: str | Sequence[str] | None = None,
    target: AnyTarget = None,
    optimizer: torch.optim.Optimizer | None = None,
    names: Sequence[str] | None = None,
    trust: bool = True,
    at_start: bool = True,
    prefix: str = "vitreous",
    **options: Any,
) -> Watcher:
    """Log maps of some images, and how far to trust them, during training.

    Args:
        model: see ``explain``; the object that is trained.
        images: see ``explain``; a few images, which are explained at every log.
        logger: the logger or a list of loggers, see ``find_logger``.
        every: number of steps between two logs.
        methods: see ``explain``.
        target: see ``explain``; a fixed class keeps maps comparable while predictions change.
        optimizer: the optimizer whose steps are counted; without it, call ``step`` of the result after each step.
        names: names of the images.
        trust: log the metrics of ``vitreous.trust`` too, at a cost of about nine forward passes per image.
        at_start: log the untrained model too, so that errors show up before training.
        prefix: prefix of all names.
        **options: options of ``explain``.

    Returns:
        The watcher, which is also a context manager.

    Examples:
        >>> import torch
        >>> from vitreous.integrations.training import watch
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        >>> with watch(model, images, "runs", every=2, methods="gae", optimizer=optimizer) as watcher:
        ...     for _ in range(4):
        ...         model(images).logsumexp(dim=1).sum().backward()
        ...         optimizer.step()
        >>> watcher.count
        4
    """
    loggers = [find_logger(each) for each in (logger if isinstance(logger, list | tuple) else [logger])]
    settings: dict[str, Any] = {"every": every, "methods": methods, "target": target, "names": names}
    watcher = Watcher(model, images, loggers, **settings, trust=trust, prefix=prefix, options=options)
    if at_start:
        watcher.log(0)
    if optimizer is not None:
        watcher.hook(optimizer)
    return watcher


@contextmanager
def _random_states() -> Iterator[None]:
    """Restore the random generators of torch, Python and numpy."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global one that others use
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def lightning_callback(
    images: Images, *, model: str | None = None, logger: Any = None, every: int = 100, **options: Any
) -> Any:
    """Return a callback for PyTorch Lightning's ``Trainer`` that logs maps as ``watch`` does.

    Args:
        images: see ``watch``.
        model: the attribute of the ``LightningModule`` that holds the network, such as ``"net"`` or ``"net.backbone"``;
            by default the module itself, whose ``forward`` takes images.
        logger: see ``watch``; by default all loggers of the trainer that support images.
        every: number of optimizer steps (``trainer.global_step``) between two logs.
        **options: options of ``watch``, such as ``methods``, ``target``, ``trust``.

    Examples:
        >>> from vitreous.integrations.training import lightning_callback
        >>> callback = lightning_callback(images, model="net", every=100, methods="gae")
    """
    base: Any = _lightning().Callback

    class MapCallback(base):  # type: ignore[misc]  # the package that is installed
        """Logs maps and trust metrics every ``every`` optimizer steps."""

        def __init__(self) -> None:
            super().__init__()
            self.watcher: Watcher | None = None
            self._last = -1

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.is_global_zero:
                loggers = _loggers_of(trainer) if logger is None else logger
                self.watcher = watch(_part(pl_module, model), images, loggers, every=every, **options)
                self._last = trainer.global_step

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            # With gradient accumulation, not every batch is a step.
            if self.watcher is not None and trainer.global_step != self._last:
                self._last = trainer.global_step
                self.watcher.step(trainer.global_step)

    return MapCallback()


def _lightning() -> Any:
    """Import Lightning under the name that is already imported, or else installed."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in (*(name for name in names if name in sys.modules), *names):
        try:
            return import_module(name)
        except ImportError:
            continue
    raise MissingDependencyError('PyTorch Lightning is not installed: pip install "vitreous[training]"')


def _loggers_of(trainer: Any) -> list[MapLogger]:
    found = []
    for each in trainer.loggers:
        try:
            found.append(find_logger(each))
        except InputError:
            continue  # such as the CSV logger, which has no images
    if not found:
        raise InputError(
            "the trainer has no logger for images: add one for TensorBoard, MLflow or W&B, or pass logger="
        )
    return found


def _part(module: Any, path: str | None) -> nn.Module:
    for name in () if path is None else path.split("."):
        module = getattr(module, name, None)
    if not isinstance(module, nn.Module):
        raise InputError(f"the LightningModule has no network at {path!r}")
    return module
