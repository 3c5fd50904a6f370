"""Models by name (``demo``, ``timm/...``, ``hf/...``, ``py/FILE:function``), or passed by the caller.

Of a model that the caller passes, preprocessing and class names are inferred. ``TwoSided`` turns a binary classifier
with one output into one with two classes, so that both can be explained.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vitreous._utils.messages import error_message, errors_as, run_user_file, short_repr, source_hash
from vitreous._utils.storage import expanded
from vitreous.errors import InputError, ModelError, UnsupportedModelError, VitreousError
from vitreous.models.checkpoints import load_strictly, read_checkpoint
from vitreous.models.hf_models import class_names_of, image_size_of
from vitreous.models.loaded import LoadedModel, put_on
from vitreous.models.preprocessing import (
    Preprocessing,
    VolumePreprocessing,
    as_image_size,
    as_volume_size,
    from_processor,
    from_torchvision,
    from_video_processor,
)

Pair = tuple[nn.Module, Any]

_TORCHVISION_SETTINGS = ("crop_size", "resize_size", "mean", "std", "interpolation")


def infer_preprocessing(model: nn.Module | Pair) -> LoadedModel | None:
    """Wrap a network with its preprocessing; None if the preprocessing is unknown.

    Args:
        model: A network with an attribute ``preprocessing`` or with timm's configuration, or a pair of a network and
            its preprocessing: a ``Preprocessing``, an image processor of transformers, torchvision weights or their
            ``transforms()``.

    Raises:
        InputError: The pair contains something else.
        ModelError: The preprocessing is not valid.
    """
    if isinstance(model, tuple):
        return model_with_processor(model)
    with errors_as(ModelError, f"the preprocessing of {type(model).__name__} cannot be read"):
        return _self_described(model)


def _self_described(model: nn.Module) -> LoadedModel | None:
    own = getattr(model, "preprocessing", None)
    if isinstance(own, Preprocessing):
        return LoadedModel(type(model).__name__, model, own, own_class_names(model))
    if hasattr(model, "pretrained_cfg"):
        from vitreous.models.timm_models import described_timm  # noqa: PLC0415  (timm takes a second to import)

        return described_timm(type(model).__name__, model)
    return None


def own_class_names(model: nn.Module) -> tuple[str, ...] | None:
    """Return the class names from the attribute ``class_names`` or from the configuration of transformers."""
    names: Any = getattr(model, "class_names", None)
    return tuple(map(str, names)) if isinstance(names, Iterable) else class_names_of(model)


def known_class_names(model: LoadedModel | nn.Module) -> tuple[str, ...] | None:
    """Return the class names of a loaded model or of a network, from its attribute or configuration."""
    if isinstance(model, LoadedModel):
        return model.class_names
    names = own_class_names(model)
    if names is None and (found := infer_preprocessing(model)) is not None:
        return found.class_names
    return names


class CalledModel(nn.Module):
    """A model with a custom call, for models that take more than images."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.model, self.call = model, call
        self.train(model.training)

    def forward(self, images: Tensor) -> Any:
        """What the function returns."""
        return self.call(self.model, images)


def called_by(model: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> nn.Module:
    """The model as a module that is called by a function ``call(model, images)``.

    Raises:
        InputError: it is no function.
    """
    if not callable(call):
        raise InputError(f"call must be a function of the model and its images, not {short_repr(call)}")
    return CalledModel(model, call)


def model_with_processor(pair: Pair) -> LoadedModel:
    """Wrap a pair of a network and its preprocessing, see ``infer_preprocessing``.

    Raises:
        InputError: The pair contains something else.
        ModelError: The preprocessing is not valid.
    """
    if len(pair) != 2 or not isinstance(pair[0], nn.Module):
        raise InputError("a pair must be a model and its preprocessing, such as (model, image_processor)")
    with errors_as(ModelError, f"the preprocessing of {type(pair[0]).__name__} cannot be read"):
        return _joined(*pair)


def _joined(network: nn.Module, source: Any) -> LoadedModel:
    class_names = own_class_names(network)
    if hasattr(source, "transforms") and hasattr(source, "meta"):  # torchvision's weights
        class_names = tuple(source.meta.get("categories") or ()) or class_names
        source = source.transforms()
    return LoadedModel(type(network).__name__, network, preprocessing_of(network, source), class_names)


def preprocessing_of(network: nn.Module, source: Any) -> Preprocessing:
    """Return the preprocessing of a network, read from another object.

    Raises:
        InputError: The object does not define a preprocessing.
    """
    if isinstance(source, Preprocessing):
        return source
    processor = getattr(source, "image_processor", source)  # a multimodal processor contains an image processor
    settings = processor.to_dict() if hasattr(processor, "to_dict") else {}
    if "image_mean" in settings and type(network).__name__.endswith("ForVideoClassification"):
        return from_video_processor(settings, getattr(network, "config", None))
    if {"image_mean", "data_config"} & settings.keys():
        return from_processor(settings, image_size_of(getattr(network, "config", None)))
    if all(hasattr(source, name) for name in _TORCHVISION_SETTINGS):
        return from_torchvision(source)
    steps = {type(step).__name__: step for step in getattr(source, "transforms", ())}
    if {"Resize", "Normalize"} <= steps.keys():  # a Compose, as open_clip and OpenAI's clip give it
        return from_torchvision(_as_preset(steps))
    raise InputError(
        "the preprocessing of a model is a vitreous.models.Preprocessing, an image processor of transformers, or "
        f"torchvision weights or their transforms(), not {type(source).__name__}"
    )


def _as_preset(steps: Mapping[str, Any]) -> SimpleNamespace:
    """What torchvision's Resize, CenterCrop and Normalize say together, named as in its own presets."""
    resize, normalize = steps["Resize"], steps["Normalize"]
    return SimpleNamespace(
        crop_size=getattr(steps.get("CenterCrop"), "size", resize.size),
        resize_size=resize.size,
        interpolation=resize.interpolation,
        mean=normalize.mean,
        std=normalize.std,
    )


class TwoSided(nn.Module):
    """Outputs [-z, z] for a wrapped model with the single logit z: two classes, each with its sigmoid as probability.

    The probabilities are unchanged and sum to 1. Explaining class 1 explains z, explaining class 0 explains -z, both at
    full scale: methods that add the gradient to an identity (gae, transattr, iia) would give another map for a scaled
    z. Methods that separate positive and negative parts of every layer (transattr, plrp, lrp_rollout, abslrp) see the
    sign as one more layer; for the class that the model rejects they give zeros or another map.

    If the wrapped model outputs a probability p (``probability``), the output is [1 - p, p].
    """

    sides: Tensor

    def __init__(self, model: nn.Module, *, probability: bool = False) -> None:
        super().__init__()
        self.model, self.probability = model, probability
        # Overrides the configuration of the wrapped model: each of the two outputs is a sigmoid logit.
        problem = None if probability else "multi_label_classification"
        self.config = SimpleNamespace(problem_type=problem)
        # Not persistent, so that checkpoints of the wrapped model still load.
        self.register_buffer("sides", torch.tensor([[-1.0], [1.0]]), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the two scores, (batch, 2)."""
        logit: Tensor = self.model(images)
        logit = logit.unsqueeze(-1) if logit.ndim == 1 else logit
        if logit.ndim != 2 or logit.shape[1] != 1:
            raise UnsupportedModelError(f"the model has {tuple(logit.shape)[1:]} outputs where one logit is needed")
        sides = self.sides.to(logit)
        # 1 - p for "no": half of 1 - (-1) and of 1 - 1.
        return functional.linear(logit, sides, (1 - sides[:, 0]) / 2 if self.probability else None)


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
        from vitreous.models.demo import load_demo_clip  # noqa: PLC0415

        return load_demo_clip(size)
    if family == "timm" and identifier:
        from vitreous.models.timm_models import load_timm  # noqa: PLC0415

        return load_timm(identifier, size)
    if family == "hf" and identifier:
        from vitreous.models.hf_models import load_hf  # noqa: PLC0415

        return load_hf(identifier, size)
    if family == "py" and identifier:
        return load_own(identifier, size, mean, std)
    import timm  # noqa: PLC0415

    if timm.is_model(name.partition("@")[0]):
        raise ModelError(f"the model name {name!r} lacks its family; did you mean timm/{name}?")
    raise ModelError(f"the model name {name!r} is not understood; names look like {_spellings()}")


def _spellings() -> str:
    """Return the kinds of names, each once."""
    return ", ".join(dict.fromkeys(name for names in _KINDS for name in names.split(", ")))


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
