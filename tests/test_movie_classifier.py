"""The script that trains the movie classifier, on a handful of made-up reviews and a tiny encoder."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import vitreous
from small_text_models import build, small_tokenizer

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_movie_classifier.py"


def marked(name: str) -> list[dict[str, object]]:
    """The word good or the word bad, which tells the review."""
    place = 3 if name.startswith("pos") else 0
    return [{"docid": name, "start_token": place, "end_token": place + 1, "text": ""}]


@pytest.fixture
def movies(tmp_path) -> Path:
    """An archive in ERASER's layout, in which the validation reviews are among the training ones."""
    reviews = {f"posR_{number}.txt": "the film was good ." for number in range(12)}
    reviews |= {f"negR_{number}.txt": "bad story , not good" for number in range(12)}
    lines = [
        {"annotation_id": name, "classification": name[:3].upper(), "evidences": [marked(name)] if "1" in name else []}
        for name in reviews
    ]
    parts = {"train": lines[:10] + lines[12:22], "val": lines[8:10] + lines[20:22], "test": lines[10:12] + lines[22:]}
    files = {f"movies/docs/{name}": text for name, text in reviews.items()}
    files |= {f"movies/{part}.jsonl": "\n".join(map(json.dumps, some)) for part, some in parts.items()}
    archive = tmp_path / "movies.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            packed.addfile(entry, io.BytesIO(text.encode()))
    return archive


def test_leaves_a_classifier_that_can_be_explained(movies, tmp_path):
    encoder, out = tmp_path / "encoder", tmp_path / "out"
    build("bert").float().bert.save_pretrained(encoder)
    small_tokenizer().save_pretrained(encoder)
    options = ["--movies", movies, "--encoder", encoder, "--out", out, "--marked", "4", "--windows", "16"]
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, check=True, timeout=240)
    assert "16 training, 4 validation and 4 test reviews" in done.stdout  # 20 of which 4 are held out
    assert "test, whole reviews in windows:" in done.stdout
    explanation = vitreous.explain_text(f"hf/{out}", "the film was not bad .", "decompx", 1)
    assert explanation.class_names == ("NEG", "POS")
    assert explanation.label() == "POS"
