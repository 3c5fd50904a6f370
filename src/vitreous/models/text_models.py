"""Load text classifiers of the transformers library with their tokenizers, without running remote code."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vitreous._utils.messages import error_message, errors_as
from vitreous.errors import ModelError
from vitreous.inputs.model_input import Texts
from vitreous.inputs.texts import Reader, knows_no_words
from vitreous.models.demo import TEXT_FOLDER
from vitreous.models.fingerprint import cached_fingerprint_of
from vitreous.models.hf_models import architecture_of, class_names_of, load_network, place_of, transformers_library
from vitreous.models.loaded import put_on

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vitreous.inputs.outputs import OutputActivation


DEMO_TEXT = "demo-text"  # the classifier that is shipped


@dataclass(frozen=True)
class LoadedTextModel:
    """A text classifier in eval mode with its own tokenizer.

    Attributes:
        name: The name it was loaded by; ``None`` for a model passed by the caller.
        model: The network.
        tokenizer: The tokenizer.
        class_names: The class names in index order; ``None`` if unknown.
        outputs: What its outputs are; ``None`` to read the configuration or detect it.
    """

    name: str | None
    model: nn.Module
    tokenizer: Any
    class_names: tuple[str, ...] | None
    outputs: OutputActivation | None = None

    def example_input(self) -> Texts:
        """Return a short text as model input, for tracing the architecture."""
        return self.reader.inputs([self.reader.read("a", "a text").numbers])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of its modules, their settings and all weights; computed again when a weight changes."""
        return cached_fingerprint_of(self.model)

    @cached_property
    def reader(self) -> Reader:
        """Converts texts to the model's input and maps word pieces to positions in the text.

        Raises:
            InputError: the tokenizer is not one of the transformers library.
            UnsupportedModelError: the model does not take texts.
        """
        return Reader(self.model, self.tokenizer)


def load_text_model(name: str, *, device: str | torch.device = "cpu") -> LoadedTextModel:
    """Load a text classifier and its tokenizer by name: ``demo-text``, ``hf/ID`` of the hub, or ``hf/FOLDER``.

    ``demo-text`` is shipped: a BERT of three narrow layers that tells praise of films from blame, see its card.

    Raises:
        ModelError: the name is not valid, or the model or tokenizer cannot be found or loaded.
        MissingDependencyError: the transformers library is not installed.

    Examples:
        >>> import vitreous
        >>> text_model = vitreous.load_text_model("hf/text-model")
        >>> len(text_model.class_names)
        3
    """
    family, _, identifier = name.partition("/") if isinstance(name, str) else ("", "", "")
    if name == DEMO_TEXT:
        identifier = str(TEXT_FOLDER)
    elif family != "hf" or not identifier:
        raise ModelError(f"text models are named {DEMO_TEXT}, hf/ID or hf/FOLDER, not {name!r}")
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
        raise ModelError(f"{name} reads images ({architecture}): vitreous.explain and `vitreous explain` explain it")
    return transformers.AutoModelForSequenceClassification


def load_tokenizer(transformers: Any, name: str, place: str, options: dict[str, Any]) -> Any:
    """Return the tokenizer that is stored beside a model.

    Raises:
        ModelError: there is none, or it cannot be loaded.
    """
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, **options)
    except Exception as error:  # missing or unreadable files raise many types
        raise ModelError(f"{name}: its tokenizer cannot be loaded ({error_message(error)})") from error
    # Without tokenizer files, transformers returns an empty tokenizer.
    if knows_no_words(tokenizer):
        raise ModelError(
            f"{name}: there is no tokenizer beside the weights, or an empty one; "
            "save it to the same folder with tokenizer.save_pretrained"
        )
    return tokenizer
