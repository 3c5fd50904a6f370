"""Loads text classifiers of the transformers library with their tokenizers, never running foreign code."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vitreous._utils.messages import errors_as, reason_of
from vitreous.errors import ModelError
from vitreous.inputs.model_input import Texts
from vitreous.inputs.texts import Reader, knows_no_words
from vitreous.models.fingerprint import kept_fingerprint_of
from vitreous.models.hf_models import architecture_of, class_names_of, load_network, place_of, transformers_library
from vitreous.models.loaded import put_on

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vitreous.inputs.outputs import OutputActivation


@dataclass(frozen=True)
class LoadedTextModel:
    """A text classifier in eval mode with its own tokenizer.

    Attributes:
        name: The name it was asked for by; ``None`` for a model of the caller's.
        model: The network.
        tokenizer: What turns texts into its input.
        class_names: The name of every class in index order, or ``None`` where they are unknown.
        outputs: What its outputs are; ``None`` where its configuration tells, or they are recognised.
    """

    name: str | None
    model: nn.Module
    tokenizer: Any
    class_names: tuple[str, ...] | None
    outputs: OutputActivation | None = None

    def example_input(self) -> Texts:
        """A short text as the model gets it: enough to see its architecture."""
        return self.reader.inputs([self.reader.read("a", "a text").numbers])

    @property
    def fingerprint(self) -> str:
        """The sha256 of its parts, their settings and all weights; worked out again when a weight was written to."""
        return kept_fingerprint_of(self.model)

    @cached_property
    def reader(self) -> Reader:
        """What turns texts into the model's input and knows the place of every piece.

        Raises:
            InputError: the tokenizer is none of the transformers library.
            UnsupportedModelError: the model takes no texts.
        """
        return Reader(self.model, self.tokenizer)


def load_text_model(name: str, *, device: str | torch.device = "cpu") -> LoadedTextModel:
    """Load a text classifier and its tokenizer by name: ``hf/ID`` of the hub, or ``hf/FOLDER``.

    Raises:
        ModelError: the name is not understood, or model or tokenizer cannot be found or loaded.
        MissingDependencyError: the transformers library is not installed.

    Examples:
        >>> import vitreous
        >>> text_model = vitreous.load_text_model("hf/text-model")
        >>> len(text_model.class_names)
        3
    """
    family, _, identifier = name.partition("/") if isinstance(name, str) else ("", "", "")
    if family != "hf" or not identifier:
        raise ModelError(f"text models are named hf/ID or hf/FOLDER, not {name!r}")
    transformers = transformers_library()
    with errors_as(ModelError, f"{name}: the model cannot be loaded"):
        place, options = place_of(name, identifier)
        _, model = load_network(
            name, place, options, lambda config: _class_for(transformers, name, config), "hf/FOLDER"
        )
        tokenizer = load_tokenizer(transformers, name, place, options)
        model = put_on(device, model)
        return LoadedTextModel(name, model, tokenizer, class_names_of(model))


def _class_for(transformers: Any, name: str, config: Any) -> Any:
    architecture = architecture_of(config)
    if "ForImageClassification" in architecture:
        raise ModelError(f"{name} looks at photos ({architecture}): vitreous.explain and `vitreous explain` explain it")
    return transformers.AutoModelForSequenceClassification


def load_tokenizer(transformers: Any, name: str, place: str, options: dict[str, Any]) -> Any:
    """Return the tokenizer that is stored beside a model.

    Raises:
        ModelError: there is none, or it cannot be loaded.
    """
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, **options)
    except Exception as error:  # the files are missing or unreadable, reported with many types
        raise ModelError(f"{name}: its tokenizer cannot be loaded ({reason_of(error)})") from error
    # transformers makes up an empty tokenizer where a folder or a repository has none.
    if knows_no_words(tokenizer):
        raise ModelError(
            f"{name}: there is no tokenizer beside the weights, or an empty one; "
            "tokenizer.save_pretrained puts it into the same folder"
        )
    return tokenizer
