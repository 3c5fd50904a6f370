"""What has been found out about one text with one model, so that nothing is worked out twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from vitreous.text_explanation import TextExplanation
from vitreous.web.findings import Findings

_BYTES_OF_A_PIECE = 400  # with its word, as Python keeps them


@dataclass
class TextRecord(Findings[TextExplanation]):
    """A text, what the model says of it, and the scores of its word pieces so far.

    Attributes:
        text: The text.
        pieces: How many word pieces it has.
        taken: How many of them the model takes; fewer where the text was cut.
    """

    text: str
    pieces: int
    taken: int

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        scores = sum(scores.nbytes for scores in list(self.scores.values()))
        return 4 * len(self.text) + _BYTES_OF_A_PIECE * self.pieces + scores

    def keep(self, explanation: TextExplanation) -> None:
        """Take over the scores of an explanation of this text."""
        if self.sample is None:
            self.sample = replace(explanation, logits=explanation.logits.clone().cpu())
        for method in explanation.methods:
            self.signed[method] = explanation.signed[method]
            for number in range(explanation.classes_per_image):
                scores = explanation.piece_scores(method, 0, number).clone().cpu()
                self.scores[method, explanation.class_index(0, number)] = scores

    def explanation(self, methods: Sequence[str], classes: Sequence[int]) -> TextExplanation:
        """Put scores that are there together as one explanation."""
        assert self.sample is not None
        return replace(
            self.sample,
            scores={method: (torch.stack([self.scores[method, one] for one in classes]),) for method in methods},
            signed={method: self.signed[method] for method in methods},
            target=torch.tensor([list(classes)]),
            provenance={**self.sample.provenance, "methods": list(methods)},
        )
