"""Dual encoders: models that embed images and texts in one space, of any library, with one interface.

Models of transformers (CLIP, SigLIP, AltCLIP, Chinese-CLIP, MetaCLIP 2) have ``get_image_features`` and
``get_text_features``. Models of open_clip, OpenAI's clip, demo-clip and your own modules have ``encode_image`` and
``encode_text``.

The score of an image and a text is logit scale x cosine of their embeddings, plus the logit bias if there is one
(SigLIP). It is the logit that the model itself computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vitreous._utils.messages import errors_as
from vitreous.errors import InputError, MissingDependencyError, ModelError, TargetError, UnsupportedModelError
from vitreous.inputs.model_io import TRANSFORMERS_ENCODERS, OutputActivation, encoding_methods
from vitreous.inputs.texts import CallableReader, PromptReader, prompt_reader
from vitreous.models.hf_models import (
    architecture_of,
    load_network,
    load_preprocessing,
    load_tokenizer,
    place_of,
    transformers_library,
)
from vitreous.models.loaded import LoadedModel, put_on
from vitreous.models.loading import infer_preprocessing, load_model, preprocessing_of
from vitreous.models.preprocessing import Preprocessing, Resize, as_image_size

TEMPLATES = ("a photo of a {}.",)

_RESIZE_MODES: dict[str, Resize] = {"shortest": "shorter", "squash": "squash"}


class ImageTower(nn.Module):
    """The image side of a dual encoder: images in, embeddings (batch, width) out, not normalised."""

    def __init__(self, model: nn.Module, method: str) -> None:
        super().__init__()
        self.model = model
        self.method = method

    def forward(self, images: Tensor) -> Tensor:
        """Embed images."""
        return _embedding(getattr(self.model, self.method)(images))


class TextTower(nn.Module):
    """The text side of a dual encoder: token ids in, embeddings (texts, width) out, not normalised."""

    def __init__(self, model: nn.Module, method: str) -> None:
        super().__init__()
        self.model = model
        self.method = method

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Embed texts."""
        encode = getattr(self.model, self.method)
        return _embedding(encode(input_ids) if attention_mask is None else encode(input_ids, attention_mask))


class SimilarityHead(nn.Module):
    """A tower followed by the scores of its embedding with fixed embeddings: scale x cosine, plus a bias.

    Attributes:
        tower: the image or the text tower.
        weight: the fixed embeddings, each of length 1, times the scale, (fixed, width).
        bias: added to every score, (fixed,), or ``None``.
        class_names: the names of the fixed embeddings: prompts, classes or images.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, tower: nn.Module, embeddings: Tensor, scale: float = 1.0, bias: float | Tensor | None = None,
        class_names: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tower = tower
        self.register_buffer("weight", embeddings.detach() * scale)
        biases = embeddings.new_zeros(len(embeddings), dtype=torch.float64) + (0.0 if bias is None else bias)
        self.register_buffer("bias", None if bias is None else biases.to(embeddings.dtype))
        self.class_names = None if class_names is None else tuple(class_names)

    def forward(self, *given: Tensor, **parts: Tensor) -> Tensor:
        """The scores of images or texts, (batch, fixed)."""
        embedding = functional.normalize(self.tower(*given, **parts), dim=-1)
        if embedding.shape[-1] != self.weight.shape[-1]:
            raise TargetError(
                f"the given embedding has {self.weight.shape[-1]} channels, and those of this model have "
                f"{embedding.shape[-1]}"
            )
        return functional.linear(embedding, self.weight.to(embedding), self.bias)


class UnitTower(nn.Module):
    """A tower with normalised embeddings, (batch, width)."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Embed images or texts."""
        given = (input_ids,) if attention_mask is None else (input_ids, attention_mask)
        return functional.normalize(self.tower(*given), dim=-1)


class ZeroShotClassifier(SimilarityHead):
    """An image classifier whose classes are texts; its logits are the scores of the image with each text."""

    def forward(self, images: Tensor) -> Tensor:  # type: ignore[override]  # images alone: signatures are inspected
        """The scores of images and texts, (batch, texts)."""
        return super().forward(images)


class TextScorer(SimilarityHead):
    """The scores of texts with fixed images."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """The scores of texts and images, (texts, images)."""
        parts = {} if attention_mask is None else {"attention_mask": attention_mask}
        return super().forward(input_ids, **parts)


@dataclass(frozen=True)
class DualEncoder:
    """A model of images and texts.

    Attributes:
        name: the name it was loaded by, or its class.
        model: the whole network, in eval mode if vitreous loaded it.
        methods: the names of its methods that embed images and texts.
        tokenizer: the tokenizer of the text tower, or ``None`` if the caller gave none.
        preprocessing: the preprocessing of images, or ``None`` if unknown.
    """

    name: str
    model: nn.Module
    methods: tuple[str, str]
    tokenizer: Any = None
    preprocessing: Preprocessing | None = None

    @property
    def image_tower(self) -> ImageTower:
        """The image side."""
        return ImageTower(self.model, self.methods[0]).train(self.model.training)

    @property
    def text_tower(self) -> TextTower:
        """The text side."""
        return TextTower(self.model, self.methods[1]).train(self.model.training)

    @property
    def scale(self) -> float:
        """The logit scale: the factor on cosines; 1 if the model has none."""
        scale = getattr(self.model, "logit_scale", None)
        return 1.0 if scale is None else float(torch.as_tensor(scale).detach().exp())

    @property
    def bias(self) -> float | None:
        """The logit bias (SigLIP), or ``None``."""
        bias = getattr(self.model, "logit_bias", None)
        return None if bias is None else float(torch.as_tensor(bias).detach())

    @property
    def outputs(self) -> OutputActivation:
        """How scores become probabilities: by a sigmoid each if there is a bias (SigLIP), else by a softmax."""
        return "logits" if self.bias is None else "sigmoid"

    @cached_property
    def reader(self) -> PromptReader | CallableReader:
        """Tokenizes prompts for the text tower and keeps the position of every word.

        Raises:
            InputError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise InputError(
                f"a prompt needs the tokenizer of {self.name}: give (model, processor) or (model, preprocessing, "
                "tokenizer)"
            )
        return prompt_reader(self.text_tower, self.tokenizer, getattr(self.model, "config", None))

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """The normalised embeddings of texts, (texts, width).

        Raises:
            InputError: a text is empty, or not a text.
        """
        read = [
            self.reader.fitted(text, f"prompt {number}") for number, text in enumerate(texts)
        ]  # all are checked first
        tower = self.text_tower.eval() if not self.model.training else self.text_tower
        with torch.no_grad():
            # One at a time, without padding: an embedding does not depend on the other texts.
            embeddings = [tower(**self.reader.inputs([text.numbers]).parts) for text in read]
        return functional.normalize(torch.cat(embeddings), dim=-1)

    def embed_images(self, pixels: Tensor) -> Tensor:
        """The normalised embeddings of preprocessed images, (images, width)."""
        with torch.no_grad():
            return functional.normalize(self.image_tower(pixels), dim=-1)

    def classifier(self, prompts: Sequence[str], class_names: Sequence[str] | None = None) -> ZeroShotClassifier:
        """The image tower followed by its scores with the prompts: logit scale x cosine, plus the logit bias."""
        embeddings = self.embed_texts(prompts)
        return ZeroShotClassifier(self.image_tower, embeddings, self.scale, self.bias, class_names or prompts).eval()

    def zero_shot(self, class_names: Sequence[str], templates: str | Sequence[str] = TEMPLATES) -> ZeroShotClassifier:
        """The image tower followed by its scores with the classes: the mean embedding of a name in all templates."""
        if isinstance(class_names, str):
            raise InputError(f"class names are a list of texts, not one text: [{class_names!r}]")
        names, templates = list(class_names), [templates] if isinstance(templates, str) else list(templates)
        if not names or not all(isinstance(name, str) and name.strip() for name in names):
            raise InputError("zero-shot classification needs the names of its classes, each a text that is not empty")
        if not templates or not all(isinstance(template, str) and "{}" in template for template in templates):
            raise InputError('a template is a text with {} where the name of a class goes, such as "a photo of a {}."')
        of_all = self.embed_texts([template.replace("{}", name) for name in names for template in templates])
        means = of_all.view(len(names), len(templates), -1).mean(dim=1)
        return ZeroShotClassifier(
            self.image_tower, functional.normalize(means, dim=-1), self.scale, self.bias, names
        ).eval()

    def loaded(self, network: nn.Module, *, outputs: OutputActivation | None = None) -> LoadedModel | nn.Module:
        """A classifier made of this model, with its preprocessing if that is known."""
        if self.preprocessing is None:
            return network
        names = getattr(network, "class_names", None)
        return LoadedModel(self.name, network, self.preprocessing, names, outputs=outputs)


def _embedding(output: Any) -> Tensor:
    """The embedding in the output of a tower: transformers 5 returns an object, all others a tensor."""
    found = output if isinstance(output, Tensor) else getattr(output, "pooler_output", None)
    if not isinstance(found, Tensor) or found.dim() != 2:
        raise UnsupportedModelError(f"an embedding (batch, width) was expected of a tower, not {type(output).__name__}")
    return found


def zero_shot(
    model: Any, class_names: Sequence[str], templates: str | Sequence[str] = TEMPLATES
) -> LoadedModel | nn.Module:
    """A model of images and texts as a classifier of images, whose classes are given by their names.

    Args:
        model: a model of images and texts, as ``explain`` takes it with a ``Prompt``.
        class_names: the names of the classes.
        templates: texts with {} where the name goes; the embedding of a class is the mean over all of them.

    Returns:
        A model for ``explain``, ``evaluate`` and the rest. Its outputs are logit scale x cosine, plus the logit bias.
        Probabilities are their softmax, or their sigmoid where there is a bias (SigLIP).

    Examples:
        >>> import vitreous
        >>> classifier = vitreous.zero_shot(clip, ["cat", "dog"])
        >>> explanation = vitreous.explain(classifier, "demo.jpg", "gae", target="dog")
        >>> explanation.label()
        'dog'
    """
    dual = find_dual_encoder(model)
    return dual.loaded(dual.zero_shot(class_names, templates), outputs=dual.outputs)


def find_dual_encoder(model: Any) -> DualEncoder:
    """The dual encoder that a caller means.

    Args:
        model: a name, a loaded model, a network, a pair of a network and its processor (which holds image processor and
            tokenizer) or its tokenizer, or all three: network, preprocessing, tokenizer.

    Raises:
        UnsupportedModelError: it has no text tower.
        InputError: it is something else.
    """
    if isinstance(model, DualEncoder):
        return model
    if isinstance(model, str):
        return load_dual_encoder(model)
    if isinstance(model, LoadedModel):
        return dual_encoder(model.model, name=model.name, preprocessing=model.preprocessing)
    if isinstance(model, tuple) and len(model) in {2, 3} and isinstance(model[0], nn.Module):
        network, *given = model
        tokenizer = next((found for each in reversed(given) if (found := tokenizer_in(each)) is not None), None)
        sources = [each for each in given if tokenizer_in(each) is not each]
        preprocessing = preprocessing_of(network, sources[0]) if sources else None
        return dual_encoder(network, tokenizer, preprocessing)
    if isinstance(model, nn.Module):
        found = infer_preprocessing(model)
        return dual_encoder(model, preprocessing=None if found is None else found.preprocessing)
    raise InputError(f"a model of images and texts was expected, not {type(model).__name__}")


def dual_encoder(
    model: nn.Module, tokenizer: Any = None, preprocessing: Preprocessing | None = None, *, name: str | None = None
) -> DualEncoder:
    """A network of images and texts with its tokenizer.

    Raises:
        UnsupportedModelError: it has no text tower.
    """
    methods = encoding_methods(model)
    name = name or type(model).__name__
    if methods is None:
        raise without_text_tower(name)
    own = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    return DualEncoder(name, model, methods, own, preprocessing)


def without_text_tower(name: str) -> UnsupportedModelError:
    """The error for a prompt and a model without text tower."""
    return UnsupportedModelError(
        f"{name} has no text tower, so that no prompt can be compared with an image: use a model of images and texts "
        "such as CLIP or SigLIP, or demo-clip"
    )


def tokenizer_in(given: Any) -> Any:
    """The tokenizer that an object is or holds, or ``None``."""
    if hasattr(given, "convert_ids_to_tokens"):
        return given
    if hasattr(given, "image_processor") and hasattr(given, "tokenizer"):  # a processor of images and texts
        return given.tokenizer
    of_open_clip = hasattr(given, "context_length") and callable(given)
    return given if of_open_clip or getattr(given, "__name__", "") == "tokenize" else None


def load_dual_encoder(
    name: str,
    *,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    image_size: int | Sequence[int] | None = None,
    device: str | torch.device = "cpu",
) -> DualEncoder:
    """Load a model of images and texts by name: ``demo-clip``, ``hf/ID``, ``hf/FOLDER`` or ``open_clip/NAME@WEIGHTS``.

    The other arguments are those of ``load_model``.

    Raises:
        ModelError: the name is not understood, or the model cannot be found or loaded.
        UnsupportedModelError: it has no text tower.
        MissingDependencyError: the model needs an extra that is not installed.

    Examples:
        >>> import vitreous
        >>> dual = vitreous.load_dual_encoder("hf/clip-model")
        >>> dual.embed_texts(["a cat", "a dog"]).shape[0]
        2
    """
    family, _, identifier = name.partition("/")
    if family not in {"open_clip", "hf"} or not identifier:
        return find_dual_encoder(load_model(name, mean=mean, std=std, image_size=image_size, device=device))
    with errors_as(ModelError, f"{name}: the model cannot be loaded"), torch.random.fork_rng(devices=[]):
        found = (_load_open_clip if family == "open_clip" else _load_transformers)(name, identifier)
        assert found.preprocessing is not None
        native = found.preprocessing.image_size
        if image_size is not None and as_image_size(image_size) != native:
            raise ModelError(f"{name}: this model takes images of {native[0]} x {native[1]} pixels only")
        preprocessing = found.preprocessing.override(mean=mean, std=std)
        return replace(found, model=put_on(device, found.model), preprocessing=preprocessing)


def _load_transformers(name: str, identifier: str) -> DualEncoder:
    transformers = transformers_library()
    place, options = place_of(name, identifier)

    def class_for(config: Any) -> Any:
        architecture = architecture_of(config)
        found = getattr(transformers, architecture, None) or transformers.AutoModel
        if found is not transformers.AutoModel and not all(hasattr(found, method) for method in TRANSFORMERS_ENCODERS):
            raise UnsupportedModelError(f"{name} has no text tower ({architecture}), so that it takes no prompts")
        return found

    config, network = load_network(name, place, options, class_for, "hf/FOLDER or demo-clip")
    tokenizer = load_tokenizer(transformers, name, place, options)
    preprocessing = load_preprocessing(transformers, name, place, config, options)
    return dual_encoder(network, tokenizer, preprocessing, name=name)


def _load_open_clip(name: str, identifier: str) -> DualEncoder:
    try:
        import open_clip  # noqa: PLC0415  (takes seconds, and is optional)
    except ImportError as error:
        raise MissingDependencyError(
            'open_clip/ models need the open_clip library: pip install "vitreous[openclip]"'
        ) from error
    architecture, _, weights = identifier.partition("@")
    if weights == "random":
        torch.manual_seed(0)
        weights = ""
    elif not weights and not architecture.startswith("hf-hub:"):
        known = ", ".join(open_clip.list_pretrained_tags_by_model(architecture)) or "none is known for this name"
        raise ModelError(f"{name}: say which weights, as in {name}@TAG or {name}@FILE: {known}")
    network = open_clip.create_model(architecture, pretrained=weights or None, load_weights_only=True).eval()
    settings = open_clip.get_model_preprocess_cfg(network)
    if settings.get("resize_mode", "shortest") not in _RESIZE_MODES:
        raise ModelError(f"{name}: its resize mode is not supported: {settings['resize_mode']}")
    preprocessing = Preprocessing(
        image_size=as_image_size(settings["size"]),
        mean=tuple(settings["mean"]),
        std=tuple(settings["std"]),
        interpolation=settings.get("interpolation", "bicubic"),
        resize=_RESIZE_MODES[settings.get("resize_mode", "shortest")],
        crop_rounding="nearest",
    )
    return dual_encoder(network, open_clip.get_tokenizer(architecture), preprocessing, name=name)
