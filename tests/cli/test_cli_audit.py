"""``vitreous audit`` from the command line, on a model file and a folder of photos."""

from __future__ import annotations

import csv
import json
import signal
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import audited
from audited import Squares
from evaluations import start, start_worker, wait_for
from vitreous.cli.app import app

MODEL = """
import sys
sys.path.insert(0, {support!r})
from audited import reader

def build():
    return reader().model
"""


@pytest.fixture
def folder(tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    with (photos / "labels.csv").open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(("file", "class_index"))
        data = Squares(48)
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
    assert told["examined"]["photos"] == 48
    (place,) = out.iterdir()
    assert {"audit.html", "audit.json", "audit.csv"} <= {file.name for file in place.iterdir()}
    again = run(*common, "--fail-on", "findings=-1")
    assert again.exit_code == 1
    assert "--fail-on: findings" in again.output


def killed(process):
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


def test_the_program_killed_with_its_maps_and_with_its_tests_goes_on(folder, tmp_path, monkeypatch):
    """SIGKILL while maps are made and while suspicions are tested; the reports are those of an unbroken audit."""
    model = folder.parent / "stamp_reader.py"
    model.write_text(MODEL.format(support=str(Path(audited.__file__).parent)))
    arguments = [f"py/{model}:build", f"labelled:{folder}"]
    arguments += ["--mean", "0.5,0.5,0.5", "--std", "0.5,0.5,0.5", "--image-size", "32"]
    arguments += ["--method", "gae", "--threads", "1", "--shard-size", "2", "--photos", "6"]
    program = [sys.executable, "-m", "vitreous", "audit", *arguments]
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    for files in ("*/*.parquet", "*/tests/*.json"):
        before = len(list(broken.glob(files)))
        process = start([*program, "--out", str(broken)])
        wait_for(lambda files=files, before=before: len(list(broken.glob(files))) > before, process)
        assert killed(process), "it was done before it was killed"
    assert not list(broken.glob("*/audit.*"))
    monkeypatch.setattr("vitreous.evaluation.engines._start", start_worker)  # as it does, without importing anew
    resumed = run(*arguments, "--out", broken, "--workers", "2")
    assert resumed.exit_code == 0, resumed.output
    process = start([*program, "--out", str(whole)])
    _, errors = process.communicate(240)
    assert process.returncode == 0, errors
    reports = [{file.name: file.read_text() for file in out.glob("*/audit.*")} for out in (broken, whole)]
    assert reports[0]["audit.csv"] == reports[1]["audit.csv"]
    told = [json.loads(each["audit.json"]) for each in reports]
    for each in told:  # when and how it was started
        del each["examined"]["created"], each["examined"]["command"]
    assert told[0] == told[1]
    assert [each["place"] for each in told[0]["findings"]] == ["lower-left corner"]


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
