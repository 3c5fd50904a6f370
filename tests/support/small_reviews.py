"""Small reviews with rationales, as samples and in ERASER's own layout, and a classifier that reads them."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from small_text_models import build, small_tokenizer
from vitreous.datasets import Review
from vitreous.models.hf_models import LoadedTextModel

SPOKEN = ("good", "bad", "film", "story", "the", "was", "not", "unbelievably", "very", ",", ".", "!")


def text_model(kind: str = "bert", **options: object) -> LoadedTextModel:
    """A classifier of two classes with random weights in float64, which takes 22 pieces."""
    return LoadedTextModel("small", build(kind, num_labels=2), small_tokenizer(**options), ("NEG", "POS"))


def save_text_model(folder: Path) -> str:
    """The same in float32, as a folder; gives its name."""
    build("bert", num_labels=2).float().save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return f"hf/{folder}"


def reviews(count: int = 3, *, words: int = 12, seed: int = 0) -> list[Review]:
    """Random words, of which about a third are a rationale; one word is cut into three pieces."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        chosen = tuple(str(word) for word in random.choice(SPOKEN, words + number))
        rationale = random.random(words + number) < 0.3
        rationale[1] = True
        found.append(Review(f"posR_{number}.txt", chosen, int(random.integers(2)), rationale))
    return found


def write_movies(archive: Path, test: Sequence[Review]) -> str:
    """Write an archive in the layout of ERASER with these test reviews, and give the data set's spelling."""
    lines = [
        {
            "annotation_id": review.name,
            "classification": ("NEG", "POS")[review.label],
            "evidences": [
                [{"docid": review.name, "start_token": int(place), "end_token": int(place) + 1} for place in (marked,)]
                for marked in np.flatnonzero(review.rationale)
            ],
            "query": "What is the sentiment of this review?",
        }
        for review in test
    ]
    files = {f"movies/docs/{review.name}": " ".join(review.words) for review in test}
    files["movies/test.jsonl"] = "".join(json.dumps(line) + "\n" for line in lines)
    files |= {"movies/train.jsonl": "", "movies/val.jsonl": ""}
    with tarfile.open(archive, "w:gz") as packed:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            packed.addfile(entry, io.BytesIO(text.encode()))
    return f"eraser-movies:{archive}"


def probabilities(model: LoadedTextModel, pieces: Sequence[int]) -> np.ndarray:
    """What the network says of one text, without padding or anything else of the benchmark."""
    numbers = torch.tensor([[*model.reader.leading, *pieces, model.tokenizer.sep_token_id]])
    with torch.no_grad():
        logits = model.model(input_ids=numbers, attention_mask=torch.ones_like(numbers)).logits[0].double()
    return logits.softmax(dim=0).numpy()
