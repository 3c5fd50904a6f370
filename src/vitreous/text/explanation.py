"""The explanation of texts, as data: pages and notebooks register how they show it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch

from vitreous._utils.messages import errors_as
from vitreous._utils.storage import StorageError, write_text
from vitreous.explanation.prediction import ExplanationError, Predicted, check_predictions
from vitreous.explanation.views import find_view
from vitreous.inputs.target import restore_target, store_target
from vitreous.inputs.texts import Piece, Word

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from vitreous.inputs.model_io import OutputActivation
    from vitreous.inputs.target import Target

By = Literal["max", "sum"]
_FORMAT = "vitreous text explanation"
_SCHEMA = 1
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, eq=False, repr=False)
class TextExplanation(Predicted):
    """Scores of every word piece of some texts, by one or more methods, for one or more classes per text.

    Attributes:
        texts: The texts.
        pieces: The word pieces of every text, with their position and the index of their word.
        words: The words of every text that have a piece: separated by white space, or single Chinese characters.
        scores: For each method spelling and text, raw signed scores (pieces,), or (k, pieces) for k classes.
        target: The classes explained, int64, (batch,) or (batch, k).
        logits: The model's output (batch, classes); the mean over windows for texts explained in windows.
        signed: For each method spelling, whether the sign of its scores carries meaning.
        class_names: One name per class, if known.
        provenance: Versions, model and methods, as JSON values; see ``vitreous.explanation.folder``.
        scale: What the outputs are, see ``vitreous.inputs.model_io``; ``None``: logits. ``outputs`` is the same
            by name.
        left_out: Default methods that the model does not support, and why.
        targets: The targets explained that are not classes, see ``vitreous.targets``; in ``target`` they have the
            numbers from the number of classes on.
        target_values: The number explained of each target, in the shape of ``target``, when targets were objects.

    Examples:
        >>> import vitreous
        >>> explanation = vitreous.explain_text("hf/text-model", "not a good film", ["decompx", "gae"])
        >>> word, score = explanation.strongest("decompx", count=1)[0]
        >>> html = explanation.html()
        >>> vitreous.TextExplanation.load(explanation.save("texts.json")).texts
        ('not a good film',)
    """

    noun: ClassVar[str] = "texts"

    texts: tuple[str, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    words: tuple[tuple[Word, ...], ...]
    scores: Mapping[str, tuple[Tensor, ...]]
    target: Tensor
    logits: Tensor
    signed: Mapping[str, bool]
    class_names: tuple[str, ...] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    scale: OutputActivation | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    targets: tuple[Target, ...] = ()
    target_values: Tensor | None = None

    def __post_init__(self) -> None:
        check_predictions(self)
        _check(self)

    def __repr__(self) -> str:
        classes = f" x {self.classes_per_image} classes" if self.target.ndim == 2 else ""
        return (
            f"TextExplanation({len(self)} text{'s' if len(self) > 1 else ''}{classes}, methods={list(self.methods)}, "
            f"model={self.provenance.get('model')!r})"
        )

    def piece_scores(self, method: str, index: int = 0, target_index: int = 0) -> Tensor:
        """Return the scores of a text's pieces for one class, (pieces,)."""
        index, target_index = self.position(index, target_index)
        scores: Tensor = self._scores_of(method)[index]
        return scores if scores.ndim == 1 else scores[target_index]

    def word_scores(self, method: str, index: int = 0, target_index: int = 0, *, by: By = "max") -> Tensor:
        """Return the scores of a text's words for one class, (words,): the maximum or the sum over a word's pieces."""
        if by not in ("max", "sum"):
            raise ExplanationError(f"by must be max or sum, not {by!r}")
        pieces = self.piece_scores(method, index, target_index)
        word_index = torch.tensor([piece.word for piece in self.pieces[index]], device=pieces.device)
        pieces, word_index = pieces[word_index >= 0], word_index[word_index >= 0]  # white space belongs to no word
        empty = pieces.new_zeros(len(self.words[index]))
        if by == "sum":
            return empty.index_add(0, word_index, pieces)
        return empty.scatter_reduce(0, word_index, pieces, "amax", include_self=False)

    def shows(self, method: str, index: int = 0, target_index: int = 0, *, by: By = "max") -> bool:
        """Whether words can be coloured: no score is NaN or infinite."""
        return bool(self.word_scores(method, index, target_index, by=by).isfinite().all())

    def is_flat(self, method: str, index: int = 0, target_index: int = 0, *, by: By = "max") -> bool:
        """Whether all words have the same score, so that a method prefers none of them."""
        scores = self.word_scores(method, index, target_index, by=by)
        return len(scores) > 1 and bool((scores == scores[0]).all())

    def display_scores(self, method: str, index: int = 0, target_index: int = 0, *, by: By = "max") -> Tensor:
        """Scale the scores of a text's words for display.

        Signed scores are divided by their largest absolute value, into [-1, 1]; others are stretched from the smallest
        to the largest over [0, 1]. Scores that are all the same give zeros.
        """
        scores = self.word_scores(method, index, target_index, by=by)
        if not self.shows(method, index, target_index, by=by):
            raise ExplanationError(f"the scores of {method!r} contain NaN or infinity and cannot be shown")
        lowest = scores.new_zeros(()) if self.signed[method] else scores.min()
        size = (scores - lowest).abs().max()
        return (scores - lowest) / torch.where(size > 0, size, 1)

    def strongest(
        self, method: str, index: int = 0, target_index: int = 0, *, by: By = "max", count: int = 5
    ) -> list[tuple[int, float]]:
        """Return the words of a text with the largest absolute scores: their indices and scores."""
        scores = self.word_scores(method, index, target_index, by=by)
        order = scores.abs().argsort(descending=True, stable=True)[:count].tolist()
        return [(word, float(scores[word])) for word in order]

    def spans(self, index: int = 0) -> Iterator[tuple[str, int | None]]:
        """Split a text into spans, each with the index of its word; ``None`` for text between words."""
        text, place = self.texts[index], 0
        for number, word in enumerate(self.words[index]):
            if word.start > place:
                yield text[place : word.start], None
            yield text[word.start : word.end], number
            place = word.end
        if place < len(text):
            yield text[place:], None

    def select(self, index: int) -> TextExplanation:
        """Return the explanation of one text."""
        index, _ = self.position(index)
        one = slice(index, index + 1)
        return replace(
            self,
            texts=self.texts[one],
            pieces=self.pieces[one],
            words=self.words[one],
            scores={method: scores[one] for method, scores in self.scores.items()},
            target=self.target[one],
            logits=self.logits[one],
            target_values=None if self.target_values is None else self.target_values[one],
        )

    def html(self, *, by: By = "max") -> str:
        """Render a self-contained HTML page with every text in colours."""
        shown: str = find_view(self, "html")(self, by=by)
        return shown

    def _repr_html_(self) -> str:
        """Show the texts in colours in a notebook."""
        shown: str = find_view(self, "notebook:html")(self)
        return shown

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write everything into one JSON file.

        Returns:
            The file.
        """
        file = Path(path)
        if file.exists() and not overwrite:
            raise StorageError(f"{file} already exists; overwrite=True replaces it")
        write_text(file, json.dumps(_as_json(self), ensure_ascii=False))
        return file

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read an explanation that ``save`` wrote."""
        if Path(path).exists() and not Path(path).is_file():  # reading a pipe would block
            raise StorageError(f"{path} is not a file")
        try:
            stored = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise StorageError(f"{path} is damaged: it is not JSON") from error
        if not isinstance(stored, dict) or (stored.get("format"), stored.get("schema")) != (_FORMAT, _SCHEMA):
            raise StorageError(f"{path} does not hold a {_FORMAT} that this version of vitreous reads")
        with errors_as(StorageError, f"{path} is damaged"):
            return cls(**_from_json(stored))


def _check(explanation: TextExplanation) -> None:
    """Raise unless there are pieces, words and scores for every text."""
    count = len(explanation)
    if not len(explanation.texts) == len(explanation.pieces) == len(explanation.words) == count:
        raise ExplanationError(f"texts, pieces and words must be those of {count} texts")
    if not explanation.scores or set(explanation.signed) != set(explanation.scores):
        raise ExplanationError("scores and signed must have the same methods, at least one")
    for method, scores in explanation.scores.items():
        expected = [(*explanation.target.shape[1:], len(pieces)) for pieces in explanation.pieces]
        if [tuple(one.shape) for one in scores] != expected:
            raise ExplanationError(f"the scores of {method!r} must be one for every piece and class of every text")


def _as_json(explanation: TextExplanation) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "schema": _SCHEMA,
        "texts": explanation.texts,
        "pieces": explanation.pieces,
        "words": explanation.words,
        "scores": {name: _numbers(scores) for name, scores in explanation.scores.items()},
        "target": explanation.target.tolist(),
        "logits": _numbers([explanation.logits])[0],
        "signed": dict(explanation.signed),
        "class_names": explanation.class_names,
        "provenance": dict(explanation.provenance),
        "scale": explanation.scale,
        "left_out": dict(explanation.left_out),
        **_targets_as_json(explanation),
    }


def _targets_as_json(explanation: TextExplanation) -> dict[str, Any]:
    """The targets that are not classes, and the numbers explained; nothing where there are none."""
    if explanation.target_values is None:
        return {}
    stored = []
    for target in explanation.targets:
        fields, tensors = store_target(target)
        stored.append({**fields, "values": {name: _numbers([tensor])[0] for name, tensor in tensors.items()}})
    return {"targets": stored, "target_values": _numbers([explanation.target_values])[0]}


def _numbers(tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Convert tensors to JSON values; float32 and float64 are restored exactly."""
    return [{"dtype": str(tensor.dtype).removeprefix("torch."), "values": tensor.tolist()} for tensor in tensors]


def _tensor(stored: dict[str, Any]) -> Tensor:
    return torch.tensor(stored["values"], dtype=_DTYPES[stored["dtype"]])


def _from_json(stored: dict[str, Any]) -> dict[str, Any]:
    names = stored["class_names"]
    return {
        "texts": tuple(stored["texts"]),
        "pieces": tuple(tuple(Piece(*piece) for piece in pieces) for pieces in stored["pieces"]),
        "words": tuple(tuple(Word(*word) for word in words) for words in stored["words"]),
        "scores": {name: tuple(map(_tensor, scores)) for name, scores in stored["scores"].items()},
        "target": torch.tensor(stored["target"], dtype=torch.int64),
        "logits": _tensor(stored["logits"]),
        "signed": stored["signed"],
        "class_names": None if names is None else tuple(names),
        "provenance": stored["provenance"],
        "scale": stored.get("scale"),  # files of earlier versions have none of these
        "left_out": dict(stored.get("left_out", {})),
        "targets": tuple(
            restore_target(target, {name: _tensor(value) for name, value in target["values"].items()})
            for target in stored.get("targets", ())
        ),
        "target_values": _tensor(stored["target_values"]) if "target_values" in stored else None,
    }
