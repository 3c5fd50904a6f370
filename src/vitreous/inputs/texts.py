"""Texts and prompts as a caller gives them, tokenized for a model, with the position of every token in its text.

Text towers pool differently from text classifiers. CLIP reads the end token, under a causal mask. SigLIP reads the last
of a fixed number of tokens, padding included. BERT towers read the class token or the mean of all tokens.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitreous._utils.messages import error_message, warn_caller
from vitreous.errors import InputError, UnsupportedModelError
from vitreous.inputs.model_io import Texts

_BLANKS = "▁Ġ"  # how SentencePiece and byte-level tokenizers write the blank in front of a word
# The characters that BERT takes apart: unified ideographs with extensions A to F, and those for compatibility.
_IDEOGRAPH = re.compile("[\\u3400-\\u4dbf\\u4e00-\\u9fff\\uf900-\\ufaff\\U00020000-\\U0002ceaf\\U0002f800-\\U0002fa1f]")
_NO_LIMIT = 100_000  # tokenizers without a limit say a number with thirty digits


class Piece(NamedTuple):
    """A word piece: how the tokenizer writes it, where it stands in the text, and the number of its word.

    A piece of nothing but white space (a line break, a tab) belongs to no word: -1.
    """

    text: str
    start: int
    end: int
    word: int


class Word(NamedTuple):
    """A stretch of the text without white space, and where it stands.

    Where the tokenizer takes Chinese characters apart, each of them is a word.
    """

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class TokenizedText:
    """A text with its pieces, their numbers for the model, and its words; words that have no piece are left out."""

    text: str
    pieces: tuple[Piece, ...]
    numbers: tuple[int, ...]
    words: tuple[Word, ...]

    def shortened(self, pieces: int) -> TokenizedText:
        """The same with its first pieces only.

        Raises:
            InputError: these are nothing but white space.
        """
        kept = self.pieces[:pieces]
        words = self.words[: max(piece.word for piece in kept) + 1]
        if not words:
            raise InputError(f"the first {pieces} pieces of the text, which the model takes, are white space")
        return replace(self, pieces=kept, numbers=self.numbers[:pieces], words=words)


class Reader:
    """A tokenizer and what its model takes of it.

    Attributes:
        longest: how many tokens the model takes; ``None`` for any number.
        capacity: how many pieces fit into the model besides the special tokens; ``None`` for any number.
        leading: the special tokens in front of a text: the class token.
        blank: index of a neutral piece: the mask token, or else the unknown token, or else padding.
    """

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        if not callable(tokenizer) or not hasattr(tokenizer, "convert_ids_to_tokens"):
            raise InputError(f"the tokenizer must be one of the transformers library, not {type(tokenizer).__name__}")
        if knows_no_words(tokenizer):
            raise InputError(
                f"the vocabulary of {type(tokenizer).__name__} is empty, so that every word is unknown to it"
            )
        self._name, self._model, self._tokenizer = type(model).__name__, model, tokenizer
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
        self.longest = longest = _longest(model, tokenizer)
        self.capacity = None if longest is None else longest - len(self.leading) - len(self._trailing)
        if self.capacity is not None and self.capacity < 1:
            raise UnsupportedModelError(f"{self._name} takes {longest} tokens, which leaves no room for a text")

    def read(self, text: str, name: str) -> TokenizedText:
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
        words = split_words(text, _taken_apart(text, encoded))
        found = list(_placed(text, words, self._tokenizer.convert_ids_to_tokens(numbers), offsets))
        used = sorted({piece.word for piece in found} - {-1})
        if not used:
            raise InputError(f"{name} is nothing but white space to this model: {text.strip()[:40]!r}")
        pieces = tuple(piece._replace(word=bisect_right(used, piece.word) - 1) for piece in found)
        return TokenizedText(text, pieces, tuple(numbers), tuple(words[home] for home in used))

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
        weight = next(self._model.parameters(), None)  # now: a model can be moved
        device = torch.device("cpu") if weight is None else weight.device
        blanks = {"pad": self._tokenizer.pad_token_id, "mask": self._tokenizer.mask_token_id}
        return Texts(
            parts={name: part.to(device) for name, part in parts.items()},
            lengths=lengths,
            content=((places >= first) & (places < last)).to(device),
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
    """Whether a tokenizer has nothing but special tokens in its vocabulary: texts could not be distinguished."""
    return set(tokenizer.get_vocab()) <= {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}


def _longest(model: nn.Module, tokenizer: Any) -> int | None:
    """Find the maximum number of tokens: the smaller of the tokenizer's limit and the number of positions.

    Models with relative (DeBERTa) or rotary (ModernBERT) positions have no position table and run on any length, but
    far tokens share a position or are rotated further than in training. For them the tokenizer's limit applies, which
    was set by those who trained the model, or else ``max_position_embeddings`` of the configuration.
    """
    limits = [limit for limit in (getattr(tokenizer, "model_max_length", None),) if limit and limit < _NO_LIMIT]
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "position_embeddings" and isinstance(module, nn.Embedding):
            # RoBERTa counts positions from behind the one of padding.
            limits.append(module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1))
    if limits:
        return int(min(limits))
    made_for = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return made_for if isinstance(made_for, int) and made_for > 0 else None


def split_words(text: str, apart: AbstractSet[int] = frozenset()) -> list[Word]:
    """Split a text at white space, and at further positions."""
    words = []
    for match in re.finditer(r"\S+", text):
        start, end = match.span()
        cuts = [start, *(place for place in range(start + 1, end) if place in apart), end]
        words += [Word(text[first:last], first, last) for first, last in pairwise(cuts)]
    return words


def _taken_apart(text: str, encoded: Any) -> set[int]:
    """Where Chinese characters begin and end that are words of their own to the tokenizer, as they are to BERT's."""
    spans: dict[int, tuple[int, int]] = {}
    for number, (start, end) in zip(encoded.word_ids(), encoded["offset_mapping"], strict=False):
        if number is not None:
            spans[number] = spans.get(number, (start, end))[0], end
    single = [start for start, end in spans.values() if end == start + 1 and _IDEOGRAPH.match(text[start])]
    return {place for start in single for place in (start, start + 1)}


def _placed(
    text: str, words: list[Word], written: Sequence[str], offsets: Sequence[tuple[int, int]]
) -> Iterator[Piece]:
    """The pieces with their places and the numbers of their words."""
    starts = [word.start for word in words]
    for piece, (start, end) in zip(written, offsets, strict=True):
        if _is_white_space(text, piece, start, end):
            yield Piece(piece, start, end, -1)
        else:
            place = _trimmed(text, start, end)
            yield Piece(piece, *place, _home(starts, words, place[0]))


def _is_white_space(text: str, piece: str, start: int, end: int) -> bool:
    """Whether a piece is only white space and not the beginning of the following word.

    Tokenizers that write a blank as part of the next piece give it a piece of its own where they lack the two together.
    """
    begins_word = not piece.strip(_BLANKS) and end < len(text) and not text[end].isspace()
    return text[start:end].isspace() and not begins_word


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


class PromptReader(Reader):
    """Tokenizes prompts with a tokenizer of transformers."""

    def __init__(
        self, tower: nn.Module, tokenizer: Any, *, padded: int | None = None, longest: int | None = None
    ) -> None:
        """Create the reader.

        Args:
            tower: takes ``input_ids`` and ``attention_mask``.
            tokenizer: a tokenizer of transformers that returns offsets.
            padded: the fixed number of tokens of a tower that reads padding like any other token (SigLIP).
            longest: the maximum number of tokens, if known.
        """
        super().__init__(tower, tokenizer)
        self._padded = padded
        if padded is not None:
            self._arguments = ["input_ids"]
        limits = [limit for limit in (padded, longest, self.longest) if limit is not None]
        self.capacity = min(limits) - len(self.leading) - len(self._trailing) if limits else None

    def fitted(self, text: str, name: str) -> TokenizedText:
        """Tokenize a prompt; pieces beyond the maximum length are left out, with a warning."""
        read = self.read(text, name)
        if self.capacity is None or len(read.pieces) <= self.capacity:
            return read
        warn_caller(
            f"{name} has {len(read.pieces)} word pieces, of which the model takes the first {self.capacity}: the rest "
            "is left out"
        )
        return read.shortened(self.capacity)

    def inputs(self, rows: Sequence[Sequence[int]]) -> Texts:
        """The input of the tower for rows of token ids."""
        texts = super().inputs(rows)
        texts = replace(texts, prefix=min(1, len(self.leading)), end=True)
        if self._padded is None:
            return texts
        missing = self._padded - texts.tokens
        numbers = nn.functional.pad(texts.parts["input_ids"], (0, missing), value=self._pad)
        content = nn.functional.pad(texts.content, (0, missing), value=False)
        # The tower reads padding like any other token, so it counts as part of the text.
        lengths = torch.full_like(texts.lengths, self._padded)
        return replace(texts, parts={"input_ids": numbers}, content=content, lengths=lengths)

    def content_of(self, scores: Tensor, pieces: int) -> Tensor:
        """The scores of the pieces, given those of all tokens after the prefix."""
        first = len(self.leading) - min(1, len(self.leading))
        return scores[..., first : first + pieces]

    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text, found on an example; there may be none."""
        encoded = self._encode("a", special=True)
        numbers, special = encoded["input_ids"], encoded["special_tokens_mask"]
        leading = len(list(takewhile(bool, special)))
        trailing = len(list(takewhile(bool, reversed(special))))
        return numbers[:leading], numbers[len(numbers) - trailing :]


class CallableReader:
    """Tokenizes prompts with a function from texts to token ids (texts, context length): open_clip, OpenAI's clip.

    Attributes:
        capacity: the maximum number of pieces, without the two special tokens.
    """

    def __init__(self, tower: nn.Module, tokenizer: Any) -> None:
        if not callable(tokenizer):
            raise InputError(f"the tokenizer must be a function of texts, not {type(tokenizer).__name__}")
        self._tower, self._tokenizer = tower, tokenizer
        self._context = self._numbers("a").shape[0]
        self.capacity: int | None = self._context - 2

    def fitted(self, text: str, name: str) -> TokenizedText:
        """Tokenize a prompt; pieces beyond the maximum length are left out, with a warning.

        Such tokenizers return no offsets. The pieces of a word are counted by tokenizing the text with and without it.
        """
        if not isinstance(text, str):
            raise InputError(f"{name} is not a text but {type(text).__name__}")
        if not text.strip():
            raise InputError(f"{name} is empty")
        numbers = self._numbers(text)
        own = numbers[1 : self._length(numbers) - 1].tolist()
        words = split_words(text)
        pieces: list[Piece] = []
        for place, word in enumerate(words):
            upto = self._length(self._numbers(text[: word.end])) - 2
            pieces += [Piece(word.text, word.start, word.end, place) for _ in range(upto - len(pieces))]
        if not own:
            raise InputError(f"{name} holds no word that the tokenizer knows: {text.strip()[:40]!r}")
        if len(own) == self.capacity and self._more_than(text, len(own)):
            warn_caller(
                f"{name} is longer than the {self.capacity} word pieces that the model takes: the rest is left out"
            )
        return TokenizedText(text, tuple(pieces[: len(own)]), tuple(own), tuple(words[: pieces[len(own) - 1].word + 1]))

    def inputs(self, rows: Sequence[Sequence[int]]) -> Texts:
        """The input of the tower for rows of token ids: with special tokens, padded with 0 to the context length."""
        example = self._numbers("a")
        start, end = int(example[0]), int(example[self._length(example) - 1])
        numbers = torch.zeros(len(rows), self._context, dtype=example.dtype)
        for place, row in enumerate(rows):
            numbers[place, : len(row) + 2] = torch.tensor([start, *row, end])
        lengths = torch.tensor([len(row) + 2 for row in rows])
        places = torch.arange(self._context)
        weight = next(self._tower.parameters(), None)
        device = torch.device("cpu") if weight is None else weight.device
        content = (places >= 1) & (places < lengths[:, None] - 1)
        return Texts({"input_ids": numbers.to(device)}, lengths, content.to(device), {"pad": 0}, prefix=1, end=True)

    def content_of(self, scores: Tensor, pieces: int) -> Tensor:
        """The scores of the pieces, given those of all tokens after the first."""
        return scores[..., :pieces]

    def _numbers(self, text: str) -> Tensor:
        try:
            numbers = torch.as_tensor(self._tokenizer([text]))
        except Exception as error:  # OpenAI's refuses what is too long by a RuntimeError
            raise InputError(f"the tokenizer cannot take {text[:40]!r}: {error_message(error)}") from error
        if numbers.dim() != 2 or len(numbers) != 1 or numbers.is_floating_point():
            raise InputError("a tokenizer that is a function gives whole numbers (texts, context length) for texts")
        return numbers[0]

    @staticmethod
    def _length(numbers: Tensor) -> int:
        """The number of tokens without padding, which is 0."""
        return int(numbers.nonzero()[-1]) + 1

    def _more_than(self, text: str, pieces: int) -> bool:
        """Whether a text has more pieces than the context holds."""
        encode = getattr(self._tokenizer, "encode", None)
        return encode is None or len(encode(text)) > pieces


def prompt_reader(tower: nn.Module, tokenizer: Any, config: Any = None) -> PromptReader | CallableReader:
    """The reader of prompts for a text tower.

    Args:
        tower: takes ``input_ids``, and optionally ``attention_mask``.
        tokenizer: a tokenizer of transformers, or a function.
        config: the transformers configuration of the model, if it has one.
    """
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        return CallableReader(tower, tokenizer)
    of_texts = getattr(config, "text_config", config)
    longest = getattr(of_texts, "max_position_embeddings", None)
    padded = longest if str(getattr(config, "model_type", "")).startswith("siglip") else None
    return PromptReader(tower, tokenizer, padded=padded, longest=longest if padded is None else None)
