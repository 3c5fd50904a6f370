"""Texts as a caller gives them, turned into what a text model takes, with the place of every token in its text."""

from __future__ import annotations

import hashlib
import inspect
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitreous.errors import InputError, UnsupportedModelError
from vitreous.tape.inputs import Texts

_NO_LIMIT = 100_000  # tokenizers without a limit say a number with thirty digits


class Piece(NamedTuple):
    """A word piece: how the tokenizer writes it, where it stands in the text, and the number of its word."""

    text: str
    start: int
    end: int
    word: int


class Word(NamedTuple):
    """A stretch of the text without white space, and where it stands."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class ReadText:
    """A text with its pieces, their numbers for the model, and its words; words that have no piece are left out."""

    text: str
    pieces: tuple[Piece, ...]
    numbers: tuple[int, ...]
    words: tuple[Word, ...]

    def shortened(self, pieces: int) -> ReadText:
        """The same with its first pieces only."""
        kept = self.pieces[:pieces]
        return replace(self, pieces=kept, numbers=self.numbers[:pieces], words=self.words[: kept[-1].word + 1])


class Reader:
    """A tokenizer and what its model takes of it.

    Attributes:
        capacity: how many pieces fit into the model besides the special tokens; ``None`` for any number.
        leading: the special tokens in front of a text: the class token.
        blank: the number of the piece that says nothing: the mask token, or where there is none the unknown token, or
            padding.
    """

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        if not callable(tokenizer) or not hasattr(tokenizer, "convert_ids_to_tokens"):
            raise InputError(f"the tokenizer must be one of the transformers library, not {type(tokenizer).__name__}")
        if knows_no_words(tokenizer):
            raise InputError(
                f"the vocabulary of {type(tokenizer).__name__} is empty, so that every word is unknown to it"
            )
        self._name, self._tokenizer = type(model).__name__, tokenizer
        weight = next(model.parameters(), None)
        self._device = torch.device("cpu") if weight is None else weight.device
        accepted = inspect.signature(model.forward).parameters
        if "input_ids" not in accepted:
            raise UnsupportedModelError(f"{self._name} takes no input_ids, so it is no text model")
        if "attention_mask" not in accepted:
            raise UnsupportedModelError(f"{self._name} takes no attention_mask, so it cannot tell padding from text")
        named = ("input_ids", "attention_mask", *tokenizer.model_input_names)
        self._arguments = [name for name in dict.fromkeys(named) if name in accepted]
        self._pad = 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
        blanks = (tokenizer.mask_token_id, tokenizer.unk_token_id, self._pad)
        self.blank = int(next(number for number in blanks if number is not None))
        self.leading, self._trailing = self._special_tokens()
        longest = _longest(model, tokenizer)
        self.capacity = None if longest is None else longest - len(self.leading) - len(self._trailing)
        if self.capacity is not None and self.capacity < 1:
            raise UnsupportedModelError(f"{self._name} takes {longest} tokens, which leaves no room for a text")

    def read(self, text: str, name: str) -> ReadText:
        """Cut a text into pieces; ``name`` says in errors which one it is.

        Raises:
            InputError: it is not a text, or there is nothing in it.
        """
        if not isinstance(text, str):
            raise InputError(f"{name} is not a text but {type(text).__name__}")
        if not text.strip():
            raise InputError(f"{name} is empty")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # an argument of a command that is not UTF-8 arrives like this
            raise InputError(
                f"{name} is not valid Unicode: there is half a character at place {error.start}"
            ) from error
        encoded = self._encode(text, special=False)
        numbers, offsets = encoded["input_ids"], encoded["offset_mapping"]
        special = set(self._tokenizer.all_special_ids) - {self._tokenizer.unk_token_id}
        if special.issuperset(numbers):
            raise InputError(f"{name} holds nothing but special tokens: {text.strip()[:40]!r}")
        words = [Word(match[0], *match.span()) for match in re.finditer(r"\S+", text)]
        starts = [word.start for word in words]
        spans = [_trimmed(text, *offset) for offset in offsets]
        homes = [_home(starts, words, start) for start, _ in spans]
        used = sorted(set(homes))
        pieces = tuple(
            Piece(written, *span, bisect_right(used, home) - 1)
            for written, span, home in zip(self._tokenizer.convert_ids_to_tokens(numbers), spans, homes, strict=True)
        )
        return ReadText(text, pieces, tuple(numbers), tuple(words[home] for home in used))

    def inputs(self, rows: Sequence[Sequence[int]]) -> Texts:
        """What the model takes for rows of pieces: special tokens around each, padding behind the short ones."""
        whole = [[*self.leading, *row, *self._trailing] for row in rows]
        lengths = torch.tensor([len(row) for row in whole])
        places = torch.arange(int(lengths.max()))
        real = places < lengths[:, None]
        first, last = len(self.leading), lengths[:, None] - len(self._trailing)
        numbers = torch.full(real.shape, self._pad, dtype=torch.int64)
        numbers[real] = torch.tensor([number for row in whole for number in row])
        known = {"input_ids": numbers, "attention_mask": real.to(torch.int64)}
        # Of a single text all other parts (token types) are 0.
        parts = {name: known.get(name, torch.zeros_like(numbers)) for name in self._arguments}
        blanks = {"pad": self._tokenizer.pad_token_id, "mask": self._tokenizer.mask_token_id}
        return Texts(
            parts={name: part.to(self._device) for name, part in parts.items()},
            lengths=lengths,
            content=((places >= first) & (places < last)).to(self._device),
            blanks={name: int(number) for name, number in blanks.items() if number is not None},
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What the numbers of a text depend on besides the model: how it is cut into pieces, and after how many."""
        rules = self._tokenizer.backend_tokenizer.to_str()
        return {"tokenizer": hashlib.sha256(rules.encode()).hexdigest(), "pieces": self.capacity, "blank": self.blank}

    def content_of(self, scores: Tensor, pieces: int) -> Tensor:
        """The scores of a row's own pieces among those of all its tokens but the class token, (..., tokens - 1)."""
        first = len(self.leading) - 1
        return scores[..., first : first + pieces]

    def _encode(self, text: str, *, special: bool) -> Any:
        try:
            encoded = self._tokenizer(
                text, add_special_tokens=special, return_offsets_mapping=True, return_special_tokens_mask=True,
                truncation=False, verbose=False,
            )  # fmt: skip
        except NotImplementedError:  # what older versions of transformers say; newer ones leave the offsets out
            encoded = {}
        if "offset_mapping" not in encoded:
            raise InputError(
                f"{type(self._tokenizer).__name__} does not tell where its tokens stand in a text; use its fast form"
            )
        return encoded

    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts in front of a text and behind it, seen on an example."""
        encoded = self._encode("a", special=True)
        numbers, special = encoded["input_ids"], encoded["special_tokens_mask"]
        leading = len(list(takewhile(bool, special)))
        trailing = len(list(takewhile(bool, reversed(special))))
        if leading == 0:
            raise UnsupportedModelError(
                f"{type(self._tokenizer).__name__} puts no class token in front of a text for {self._name} to read"
            )
        return numbers[:leading], numbers[len(numbers) - trailing :]


def knows_no_words(tokenizer: Any) -> bool:
    """Whether a tokenizer has nothing but special tokens in its vocabulary: no text could be told from another."""
    return set(tokenizer.get_vocab()) <= {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}


def _longest(model: nn.Module, tokenizer: Any) -> int | None:
    """How many tokens a model takes: as its tokenizer says and as it has positions for."""
    limits = [limit for limit in (getattr(tokenizer, "model_max_length", None),) if limit and limit < _NO_LIMIT]
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "position_embeddings" and isinstance(module, nn.Embedding):
            # RoBERTa counts positions from behind the one of padding.
            limits.append(module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1))
    return int(min(limits)) if limits else None


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """Without white space at the beginning, which some tokenizers count to the piece behind it."""
    while start < end and text[start].isspace():
        start += 1
    return start, end


def _home(starts: list[int], words: list[Word], start: int) -> int:
    """The word that a place belongs to: the one it is in, or the next, or the last."""
    word = max(0, bisect_right(starts, start) - 1)
    behind = start >= words[word].end and word + 1 < len(words)
    return word + 1 if behind else word
