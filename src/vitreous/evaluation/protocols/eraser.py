"""Explanations of movie reviews against human rationales (ERASER), as GradToken and the papers on text measure them."""

from __future__ import annotations

from vitreous.evaluation.protocols.protocol import Protocol
from vitreous.evaluation.tasks.rationales import Rationales
from vitreous.evaluation.tasks.word_perturbation import Erasure, WordErasing

_RATIONALES = (
    "A text is cut where the model ends, and its rationale with it: what nobody showed the model cannot be found.",
    "A text without a word of its rationale in that part does not count for token-F1; n says how many do.",
    "A word is what stands between white space; words that the tokenizer has no piece for take no part.",
    "k is a number of words, not a share, so the best possible token-F1 depends on the length of the rationale.",
    "Scores below 0 are taken as 0, so a method with fewer than k words for the class is filled up from the beginning.",
)

MOVIES = Protocol(
    name="eraser-movies",
    title="Token-F1 against human rationales, AOPC and LOdds with words removed and masked, comprehensiveness and "
    "sufficiency",
    paper="DeYoung et al., ERASER, ACL 2020; Cheng et al., GradToken, Neural Networks 2025",
    version=1,
    tasks=(Rationales(), WordErasing(), Erasure()),
    notes=(
        *_RATIONALES,
        "Token-F1 explains the true class, as GradToken does; all else the predicted one, as ERASER does.",
        "AOPC averages p0 - pk and LOdds log(pk / p0) over the steps, as for pixels.",
        "The steps of AOPC and LOdds, 10 to 90% of the words, are those for pixels; GradToken has none for texts.",
    ),
)

RATIONALES = Protocol(
    name="eraser-movies-rationales",
    title="Token-F1 against human rationales alone, which needs no run of the model beyond the explanation",
    paper="DeYoung et al., ERASER, ACL 2020; Cheng et al., GradToken, Neural Networks 2025",
    version=1,
    tasks=(Rationales(),),
    notes=(*_RATIONALES, "The class that is explained is the true one, as GradToken does."),
)

PROTOCOLS = (MOVIES, RATIONALES)
