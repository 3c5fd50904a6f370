"""Load models by name: ``demo``, ``timm/...``, ``hf/...`` or ``py/FILE:function``."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vitreous._utils.messages import error_message, errors_as, run_user_file, source_hash
from vitreous._utils.storage import expanded
from vitreous.errors import ModelError, VitreousError
from vitreous.models.checkpoints import load_strictly, read_checkpoint
from vitreous.models.loaded import LoadedModel, put_on
from vitreous.models.preprocessing import Preprocessing, VolumePreprocessing, as_image_size, as_volume_size
from vitreous.models.wrap_model import infer_preprocessing, own_class_names

if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = ["LoadedModel", "list_models", "load_model"]

_KINDS = {
    "demo": "the demo model: 37 breeds of cats and dogs, works offline (extra vitreous[demo])",
    "demo-clip": "a small model of images and texts for prompts, works offline (extra vitreous[demo-clip])",
    "timm/NAME": "any timm model with its published weights, for example timm/vit_base_patch16_224.augreg_in1k",
    "timm/NAME@FILE": "a timm model with weights from a local safetensors file or weights-only checkpoint",
    "timm/NAME@random": "a timm model with random weights, the same ones every time",
    "timm/local-dir:FOLDER": "a folder in timm's own format: config.json and weights",
    "py/FILE.py:FUNCTION": "your own nn.Module: the file is run, and the function (no arguments) returns the model",
    "py/FILE.py:FUNCTION@WEIGHTS": "the same with weights from a local safetensors file or weights-only checkpoint",
    "hf/ID": "an image classifier or CLIP-like model of the Hugging Face hub (extra vitreous[hf])",
    "hf/FOLDER": "the same from a local folder written by save_pretrained (extra vitreous[hf])",
    "open_clip/NAME@WEIGHTS": "with prompts: a model of open_clip and its tag or file (extra vitreous[openclip])",
    "demo-text": "for explain-text: a shipped classifier that tells praise of films from blame (extra vitreous[hf])",
    "hf/ID, hf/FOLDER": "for explain-text: a text classifier with its tokenizer (extra vitreous[hf])",
}
_VIT_LIKE = ("vit_*", "deit*", "eva*", "beit*", "cait*", "flexivit*", "samvit*", "naflexvit*")


def load_model(
    name: str,
    *,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    image_size: int | Sequence[int] | None = None,
    device: str | torch.device = "cpu",
) -> LoadedModel:
    """Load a model by name, in eval mode, with its preprocessing and class names.

    Args:
        name: A model name, see ``list_models``.
        mean: Replaces the mean of the model's preprocessing; one number or three.
        std: Replaces the standard deviation; one number or three.
        image_size: Builds the model for another image size; one number, or height and width. Of a model of volumes or
            clips that does not define it: depth, height and width.
        device: The device of the model.

    Raises:
        ModelError: The name is not valid, or the model cannot be found or loaded.
        MissingDependencyError: The model needs an extra that is not installed.

    Examples:
        >>> import vitreous
        >>> model = vitreous.load_model("timm/test_vit@random")
        >>> model.preprocessing.image_size
        (160, 160)
    """
    if not isinstance(name, str):  # nor a Path, which would collapse the slashes in hf//FOLDER
        raise ModelError(f"a model is named by a text such as demo or hf/FOLDER, not by {type(name).__name__}")
    with errors_as(ModelError, f"{name}: the model cannot be loaded"):
        size = None if image_size is None else as_volume_size(image_size) or as_image_size(image_size)
        if size is not None and len(size) == 3 and not name.startswith("py/"):
            raise ModelError(f"{name}: depth, height and width are for models of your own, py/FILE.py:FUNCTION")
        # Weight initialisation must not advance the caller's random generator.
        with torch.random.fork_rng(devices=[]):
            loaded = _load(name, size, mean, std)
        preprocessing = loaded.preprocessing.override(mean=mean, std=std)
        return replace(loaded, name=name, model=put_on(device, loaded.model), preprocessing=preprocessing)


def list_models() -> dict[str, object]:
    """Return the kinds of model names, each with one line of help, and the number of ViT-like models in timm."""
    import timm  # noqa: PLC0415  (timm takes a second to import)

    return {
        "names": [{"name": name, "help": text} for name, text in _KINDS.items()],
        "timm_vision_transformers": len(timm.list_models(list(_VIT_LIKE))),
    }


def _load(
    name: str,
    size: Any,
    mean: float | Sequence[float] | None,
    std: float | Sequence[float] | None,
) -> LoadedModel:
    """Load a model with the loader of its family, which is imported on first use.

    ``mean`` and ``std`` are for models without preprocessing of their own.
    """
    family, _, identifier = name.partition("/")
    if name == "demo":
        from vitreous.models.demo import load_demo  # noqa: PLC0415

        return load_demo(size)
    if name == "demo-clip":
        from vitreous.models.demo.clip import load_demo_clip  # noqa: PLC0415

        return load_demo_clip(size)
    if family == "timm" and identifier:
        from vitreous.models.timm_models import load_timm  # noqa: PLC0415

        return load_timm(identifier, size)
    if family == "hf" and identifier:
        from vitreous.models.hf_models import load_hf  # noqa: PLC0415

        return load_hf(identifier, size)
    if family == "py" and identifier:
        from vitreous.models.loading import load_own  # noqa: PLC0415

        return load_own(identifier, size, mean, std)
    import timm  # noqa: PLC0415

    if timm.is_model(name.partition("@")[0]):
        raise ModelError(f"the model name {name!r} lacks its family; did you mean timm/{name}?")
    raise ModelError(f"the model name {name!r} is not understood; names look like {', '.join(_KINDS)}")


_SPELLING = re.compile(r"(?P<file>.+?\.py):(?P<function>[A-Za-z_]\w*)(?:@(?P<weights>.+))?")
_SEED = 0


def load_own(
    identifier: str,
    image_size: tuple[int, ...] | None,
    mean: float | Sequence[float] | None,
    std: float | Sequence[float] | None,
) -> LoadedModel:
    """Load ``FILE.py:FUNCTION`` or ``FILE.py:FUNCTION@WEIGHTS``; the file is run like a plugin.

    The function takes no arguments and returns an ``nn.Module`` or a ``LoadedModel``. A module may define its
    preprocessing by an attribute ``preprocessing`` (a ``Preprocessing``) or by ``image_size``, ``mean`` and ``std``; a
    timm model has it in its configuration. An ``image_size`` of three lengths, (depth, height, width), says that the
    model takes volumes or clips. The arguments given here take precedence.
    """
    name = f"py/{identifier}"
    spelled = _SPELLING.fullmatch(identifier)
    if spelled is None:
        raise ModelError(f"{name}: your own model is spelled py/FILE.py:FUNCTION or py/FILE.py:FUNCTION@WEIGHTS")
    module = _run(name, expanded(spelled["file"]))
    built = _build(name, module, spelled["function"])
    network = built.model if isinstance(built, LoadedModel) else built
    if spelled["weights"]:
        load_strictly(network, read_checkpoint(spelled["weights"]), source=spelled["weights"])
    if isinstance(built, LoadedModel):
        preprocessing, class_names = built.preprocessing.override(image_size=image_size), built.class_names
    else:
        preprocessing, class_names = _preprocessing(name, network, image_size, mean, std), own_class_names(network)
    # The hash of the file is part of the fingerprint: not every change of the code shows in the network.
    return LoadedModel(name, network.eval(), preprocessing, class_names, source_hash(module))


def _build(name: str, module: ModuleType, function: str) -> nn.Module | LoadedModel:
    build = getattr(module, function, None)
    if not callable(build):
        raise ModelError(f"{name}: there is no function {function} in {module.__file__}")
    torch.manual_seed(_SEED)  # so that random weights are the same in every process
    try:
        with redirect_stdout(sys.stderr):  # standard output is for results
            built = build()
    except VitreousError:
        raise
    except Exception as error:
        raise ModelError(f"{name}: {function} fails: {type(error).__name__}: {error_message(error)}") from error
    if not isinstance(built, nn.Module | LoadedModel):
        raise ModelError(f"{name}: {function} must return an nn.Module, not {type(built).__name__}")
    return built


def _run(name: str, file: Path) -> ModuleType:
    """Run the file as a module; it can import modules from its folder."""
    folder = str(file.resolve().parent)
    if file.is_file() and folder not in sys.path:
        sys.path.append(folder)  # at the end, so that it shadows no installed package
    try:
        module = run_user_file(file, "model")
    except Exception as error:
        raise ModelError(f"{name}: {file} does not run: {type(error).__name__}: {error_message(error)}") from error
    if module is None:
        raise ModelError(f"{name}: there is no file {file}")
    return module


def _preprocessing(
    name: str,
    model: nn.Module,
    image_size: tuple[int, ...] | None,
    mean: float | Sequence[float] | None,
    std: float | Sequence[float] | None,
) -> Preprocessing:
    """Return the preprocessing from the arguments and from the attributes of the model."""
    own: Any = getattr(model, "preprocessing", None)
    if isinstance(own, Preprocessing):
        return own.override(mean=mean, std=std, image_size=image_size)
    size = image_size or getattr(model, "image_size", None)
    mean = getattr(model, "mean", None) if mean is None else mean
    std = getattr(model, "std", None) if std is None else std
    if inferred := infer_preprocessing(model):  # timm's configuration; attributes take precedence
        return inferred.preprocessing.override(mean=mean, std=std, image_size=size)
    required = (("--image-size", "image_size", size), ("--mean", "mean", mean), ("--std", "std", std))
    missing = [(option, attribute) for option, attribute, value in required if value is None]
    if missing:
        options, attributes = (" ".join(words) for words in zip(*missing, strict=True))
        raise ModelError(
            f"{name}: the model does not define its preprocessing; give {options}, or set its attributes "
            f"{attributes.replace(' ', ', ')}"
        )
    assert size is not None
    if volume := as_volume_size(size):
        return _volume_preprocessing(name, model, volume).override(mean=mean, std=std)
    plain = Preprocessing(image_size=as_image_size(size), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    return plain.override(mean=mean, std=std)


def _volume_preprocessing(name: str, model: nn.Module, size: tuple[int, int, int]) -> VolumePreprocessing:
    """Find in a run which input a model takes: one channel or three, before the slices or frames or behind them."""
    depth, height, width = size
    tried = [
        VolumePreprocessing(
            (height, width), (0.0,) * 3, (1.0,) * 3, depth=depth, clip=channels == 3, frames_first=frames_first
        )
        for channels in (1, 3)
        for frames_first in (False, True)
    ]
    model.eval()
    for preprocessing in tried:
        with suppress(Exception), torch.no_grad():  # a model may raise anything on an input of another shape
            model(torch.zeros(1, *preprocessing.input_shape))
            return preprocessing
    shapes = ", ".join(str((1, *each.input_shape)) for each in tried)
    raise ModelError(f"{name}: the model runs on no input of {depth} x {height} x {width}; tried were {shapes}")
