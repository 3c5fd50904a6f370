"""Prompts: texts for the text tower of a dual encoder, with the position of every token in its text.

Text towers pool differently from text classifiers. CLIP reads the end token, under a causal mask. SigLIP reads the last
of a fixed number of tokens, padding included. BERT towers read the class token or the mean of all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from vitreous._utils.messages import error_message, warn_caller
from vitreous.errors import InputError
from vitreous.inputs.model_input import Texts
from vitreous.inputs.texts import Piece, Reader, TokenizedText, split_words


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
