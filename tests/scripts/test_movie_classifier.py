"""The script that trains the movie classifier, on a handful of made-up reviews and a tiny encoder."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path

import pytest

import forked

pytest.importorskip("transformers", reason="transformers is not installed")

import vitreous
from small_text_models import build, small_tokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_movie_classifier.py"


def review(word: str, number: int) -> list[str]:
    """One of two sentences, which say nothing but for the word."""
    return (["the", "film", "was", word, "."], [word, "story", "!"])[number % 2]


def marked(name: str, place: int) -> list[dict[str, object]]:
    """The word good or the word bad, which tells the review."""
    return [{"docid": name, "start_token": place, "end_token": place + 1, "text": ""}]


def write_movies(folder: Path) -> Path:
    """An archive in ERASER's layout, in which the validation reviews are among the training ones."""
    reviews = {
        f"{kind}R_{number}.txt": (word, review(word, number))
        for kind, word in (("pos", "good"), ("neg", "bad"))
        for number in range(40)
    }
    lines = [
        {
            "annotation_id": name,
            "classification": name[:3].upper(),
            "evidences": [marked(name, words.index(word))] if "1" in name else [],
        }
        for name, (word, words) in reviews.items()
    ]
    good, bad = lines[:40], lines[40:]
    parts = {"train": good[:36] + bad[:36], "val": good[32:36] + bad[32:36], "test": good[36:] + bad[36:]}
    files = {f"movies/docs/{name}": " ".join(words) for name, (_, words) in reviews.items()}
    files |= {f"movies/{part}.jsonl": "\n".join(map(json.dumps, some)) for part, some in parts.items()}
    archive = folder / "movies.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            packed.addfile(entry, io.BytesIO(text.encode()))
    return archive


def test_leaves_a_classifier_that_tells_what_it_was_taught(tmp_path):
    """As it is drawn, the model tells a quarter of the test reviews, with the best shift of its bias."""
    encoder, out = tmp_path / "encoder", tmp_path / "out"
    build("bert", hidden_dropout_prob=0.0).float().bert.save_pretrained(encoder)
    small_tokenizer().save_pretrained(encoder)
    options = ["--movies", write_movies(tmp_path), "--encoder", encoder, "--out", out, "--rate", "0.003"]
    options += ["--marked", "5", "5", "--windows", *["16"] * 10]
    done = forked.run([SCRIPT, *options])
    assert done.returncode == 0, done.stderr
    assert "64 training, 8 validation and 8 test reviews" in done.stdout  # 72 of which 8 are held out
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 12
    assert losses[-1] < losses[0] / 2
    assert re.findall(r"test, .*: +(\S+)", done.stdout) == ["100.0%", "100.0%"]  # their first tokens, and in windows
    for word, name in (("good", "POS"), ("bad", "NEG")):
        explanation = vitreous.explain_text(f"hf/{out}", " ".join(review(word, 0)), "decompx")
        assert explanation.class_names == ("NEG", "POS")
        assert explanation.label() == name
