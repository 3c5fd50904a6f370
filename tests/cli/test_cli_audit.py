"""``vitreous audit`` from the command line, on a model file and a folder of photos."""

from __future__ import annotations

import csv
import json

import pytest
from typer.testing import CliRunner

from audited import Squares
from vitreous.cli.app import app


@pytest.fixture
def folder(tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    with (photos / "labels.csv").open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(("file", "class_index"))
        data = Squares(24)
        for index in range(len(data)):
            sample = data.load(index)
            sample.image.save(photos / f"{sample.name}.png")
            rows.writerow((f"{sample.name}.png", sample.label))
    return photos


def run(*arguments):
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def test_an_audit_is_written_and_its_limits_decide_the_exit_code(folder, tmp_path):
    out = tmp_path / "audits"
    common = [
        "timm/test_vit@random",
        f"labelled:{folder}",
        "--out",
        out,
        "--method",
        "gae",
        "--threads",
        1,
        "--photos",
        2,
    ]
    done = run(*common, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["examined"]["photos"] == 24
    (place,) = out.iterdir()
    assert {"audit.html", "audit.json", "audit.csv"} <= {file.name for file in place.iterdir()}
    again = run(*common, "--fail-on", "findings=-1")
    assert again.exit_code == 1
    assert "--fail-on: findings" in again.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("timm/test_vit", "labelled:nowhere"), "there is no such file or folder"),
        (("timm/test_vit", "photos"), "a data set is spelled KIND:PATH"),
        (("timm/test_vit", "labelled:.", "--fail-on", "everything"), "--fail-on takes findings"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.output
