"""``vitreous evaluate``, ``report``, ``protocols`` and ``datasets`` as people use them."""

import csv
import io
import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from evaluations import MODEL, PROTOCOL, everything, only_run, rewritten, some_run, start_worker, write_photos
from loading_scripts import load_script
from vitreous._utils.storage import sealed
from vitreous.cli import app
from vitreous.cli import evaluate as progress_module
from vitreous.cli.evaluate import EvaluationProgress
from vitreous.evaluation.runner import measure
from vitreous.evaluation.store import Store
from vitreous.speed.timing import one_thread

SMALL = ("--model", MODEL.name, "--image-size", "32", "--threads", "1", "--shard-size", "4", "--protocol", PROTOCOL)
SMALL += ("--no-controls",)


def run(*arguments, **environment):
    with one_thread():
        return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200", **environment})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("evaluations")


@pytest.fixture(scope="module")
def photos(folder):
    return write_photos(folder / "photos", 10, broken=(7,))


@pytest.fixture(scope="module")
def labelled(folder):
    """Photos with labels."""
    write_photos(folder / "labelled", 7)
    photos = folder / "labelled" / "images"
    (photos / "labels.csv").write_text("file,class_index\n" + "".join(f"{n:04d}.png,{n}\n" for n in range(7)))
    return f"labelled:{photos}"


@pytest.fixture(scope="module")
def out(folder, photos):
    """Two runs of the same protocol, model and data set with different methods."""
    for methods in ("gae,rollout", "tokentm:gradient=probability,gae"):
        result = run("evaluate", *SMALL, "--data", photos, "--methods", methods, "--out", folder / "runs")
        assert result.exit_code == 0, result.output
    return folder / "runs"


NOWHERE = """
from vitreous.plugin import method

@method("nowhere", values=("tokens",))
def nowhere(view, layer):
    return view.tokens(layer).sum(-1) * float("nan")
"""


class TestEvaluate:
    def test_rows_are_all_there_is_on_standard_output(self, out, photos):
        result = run("evaluate", *SMALL, "--data", photos, "--methods", "gae,rollout", "--out", out, "--json")
        rows = json.loads(result.stdout)
        assert [list(row) for row in rows] == [["method", "kind", "metric", "mean", "low", "high", "n"]] * 6
        assert {(row["method"], row["metric"]) for row in rows} == {
            (method, metric) for method in ("gae", "rollout") for metric in ("pixel accuracy", "mAP", "mIoU")
        }
        assert all(row["low"] <= row["mean"] <= row["high"] and row["n"] == 9 for row in rows)
        assert "resumed: 3 of 3 shards" in result.stderr
        assert "0007.png" in result.stderr
        assert "1 of 10 images could not be measured" in result.stderr

    def test_failed_shards_are_computed_again_on_request(self, out, photos):
        asked = ("evaluate", *SMALL, "--data", photos, "--methods", "gae,rollout", "--out", out, "--json")
        before, after = run(*asked), run(*asked, "--retry-failed")
        assert "resumed: 2 of 3 shards" in after.stderr
        assert "1 of 3 shards contain failures and are recomputed" in after.stderr
        assert "1 of 10 images could not be measured" in after.stderr  # a broken photo stays broken
        assert json.loads(after.stdout) == json.loads(before.stdout)

    def test_the_table_shows_published_numbers_apart(self, out, photos):
        asked = ("evaluate", *SMALL, "--data", photos, "--methods", "gae,rollout", "--out", out)
        assert "Published by others" not in run(*asked).stdout
        result = run(*asked, "--published")
        own, published = result.stdout.split("Published by others, not measured here")
        assert "rollout" in own
        assert "TokenTM" not in own
        assert "TokenTM" in published
        assert "81.79" in published

    def test_a_longer_limit_computes_only_what_is_missing(self, folder, photos):
        arguments = ("evaluate", *SMALL, "--data", photos, "--methods", "rollout", "--out", folder / "growing")
        assert run(*arguments, "--limit", 6).exit_code == 0
        store = only_run(folder / "growing")
        whole = store.folder / "shard-00000000-00000003.parquet"
        before = whole.stat().st_mtime_ns
        result = run(*arguments, "--limit", 9)
        assert "resumed: 1 of 3 shards are there, 4 images" in result.stderr
        assert whole.stat().st_mtime_ns == before
        assert only_run(folder / "growing").run.limit == 9

    @pytest.mark.parametrize(
        "change",
        [("--mean", "0.4"), ("--image-size", "48"), ("--methods", "gae"), ("--shard-size", "5"), ("--seed", "1")],
    )
    def test_what_is_measured_differently_is_kept_elsewhere(self, folder, photos, change):
        base = {"--methods": "rollout", "--limit": "2", "--image-size": "32", "--shard-size": "4"}
        place = folder / f"apart{change[0]}"
        for options in (base, {**base, change[0]: change[1]}):
            flat = [word for pair in options.items() for word in pair]
            model = ("--model", MODEL.name, "--threads", "1", "--protocol", PROTOCOL)
            result = run("evaluate", *model, "--data", photos, *flat, "--out", place)
            assert result.exit_code == 0, result.output
        assert len(list(place.iterdir())) == 2

    def test_a_family_stands_for_its_methods(self, folder, photos):
        options = ("--data", photos, "--limit", "1", "--methods", "cam,gae", "--out", folder / "family", "--json")
        result = run("evaluate", *SMALL, *options)
        assert result.exit_code == 0, result.output
        measured = {row["method"] for row in json.loads(result.stdout)}
        assert {"gradcam", "hirescam", "layercam", "gae"} <= measured
        assert "rollout" not in measured
        asked = only_run(folder / "family").run.methods
        assert asked[-1] == "gae"
        assert set(asked) == measured

    def test_a_group_leaves_out_what_a_protocol_cannot_measure(self, folder, labelled):
        """SkipPLUS' sweep starts at every layer; methods of attention that have no layers have no place in it."""
        options = ("--model", MODEL.name, "--image-size", "32", "--threads", "1", "--data", labelled, "--limit", "1")
        protocol = ("--protocol", "skipplus-layers", "--out", folder / "layers", "--json")
        result = run("evaluate", *options, *protocol, "--methods", "attention")
        assert result.exit_code == 0, result.output
        assert "warning: iia is left out: 'iia' has no layers to start at" in result.stderr
        measured = {row["method"] for row in json.loads(result.stdout)}
        assert {f"raw_attention.plus:start={layer}" for layer in range(6)} <= measured
        refused = run("evaluate", *options, *protocol, "--methods", "iia")
        assert refused.exit_code == 2
        assert "no layers to start at" in refused.stderr

    def test_a_run_without_one_good_image_fails_with_a_sentence(self, folder):
        photos = write_photos(folder / "all broken", 3, broken=(0, 1, 2))
        result = run("evaluate", *SMALL, "--data", photos, "--methods", "rollout", "--out", folder / "none", "--json")
        assert result.exit_code == 1
        assert "none of the 3 images could be measured" in result.stderr
        assert json.loads(result.stdout) == []
        report = run("report", folder / "none", "--out", folder / "none.html")
        assert report.exit_code == 0, report.output
        assert "of which 3 do not count" in (folder / "none.html").read_text(encoding="utf-8")

    def test_why_a_method_could_not_be_measured_is_said(self, folder, photos, registry):
        (folder / "nowhere.py").write_text(NOWHERE)
        options = ("--data", photos, "--methods", "gae,nowhere", "--plugin", folder / "nowhere.py", "--limit", "2")
        result = run("evaluate", *SMALL, *options, "--out", folder / "nowhere")
        assert result.exit_code == 0, result.output
        said = "nowhere could not be measured on any of the images: nowhere gave a map with NaN or infinite scores"
        assert said in " ".join(result.stderr.split())
        assert "0000.png" not in result.stderr  # said once for the method, not for every image

    def test_going_on_with_a_run_leaves_its_manifest_as_it_was(self, folder, photos):
        place, seen = folder / "again", []
        for _ in range(2):
            run("evaluate", *SMALL, "--data", photos, "--methods", "rollout", "--limit", "2", "--out", place)
            seen.append(next(place.glob("*/manifest.json")).read_text(encoding="utf-8"))
        assert seen[0] == seen[1]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--protocol", "chefer-2021-segmentatoin"), "chefer-2021-segmentation"),
            (("--data", "masks:/not/there"), "/not/there"),
            (("--data", "photos"), "KIND:PATH"),
            (("--methods", "tokntm"), "tokentm"),
            (("--methods", "rollout:heads=all"), "rollout"),
            (("--model", "timm/nonsense@random"), "nonsense"),
            (("--threads", "2"), "--threads 1"),
            (("--plugin", "/not/there.py"), "/not/there.py"),
        ],
    )
    def test_mistakes_are_one_line(self, out, photos, options, message):
        base = {"--model": MODEL.name, "--image-size": "32", "--threads": "1", "--shard-size": "4"}
        base |= {"--protocol": PROTOCOL, "--data": photos, "--methods": "gae,rollout", "--out": str(out)}
        base |= {options[0]: options[1]}
        result = run("evaluate", "--no-controls", *[word for pair in base.items() for word in pair])
        assert result.exit_code == 2, result.output
        lines = [line for line in result.stderr.splitlines() if line.startswith("error:")]
        assert len(lines) == 1
        assert message in lines[0]

    def test_home_folders_are_followed_for_results_too(self, photos, tmp_path, monkeypatch):
        """A shell leaves ``--out=~/runs`` as it is, and ``vitreous.evaluate`` has no shell."""
        home, here = tmp_path / "home", tmp_path / "here"
        home.mkdir()
        here.mkdir()
        monkeypatch.chdir(here)
        at_home = {"HOME": str(home), "USERPROFILE": str(home)}
        asked = ("evaluate", *SMALL, "--data", photos, "--methods", "rollout", "--limit", "2", "--out=~/runs")
        assert run(*asked, **at_home).exit_code == 0
        assert run("report", "~/runs", "--out=~/page.html", "--pictures", "0", **at_home).exit_code == 0
        assert sorted(place.name for place in home.iterdir()) == ["page.html", "runs"]
        assert not list(here.iterdir())

    def test_a_file_in_the_way_is_one_line(self, folder, photos):
        (folder / "file").write_text("")
        result = run("evaluate", *SMALL, "--data", photos, "--methods", "rollout", "--out", folder / "file" / "runs")
        assert result.exit_code == 2
        assert "cannot be written" in result.stderr


class TestProgress:
    """Elsewhere than on a terminal: a line of how far it is, every half a minute."""

    def test_rate_and_time_left_are_of_what_was_done_since_the_start(self, tmp_path, monkeypatch):
        clock, console = SimpleNamespace(now=100.0), Console(file=io.StringIO(), width=200)
        monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
        with EvaluationProgress(console) as progress:
            progress.begin(Store.create(tmp_path, some_run(), {}), 4)  # of ten images
            # Two in 40 seconds, so that the four that are left take 80; the four of an earlier start say nothing.
            # Soon after, there is no line; then five in 80 seconds, and one is left.
            for now, images in ((140.0, 2), (150.0, 2), (180.0, 1)):
                clock.now = now
                progress.advance(images)
        first, resumed, *lines = console.file.getvalue().splitlines()
        assert "(2 methods, 10 images)" in first
        assert resumed.endswith("4 images")
        assert lines == ["6 of 10 images, 0.05 images/s, 0:01:20 left", "9 of 10 images, 0.06 images/s, 0:00:16 left"]


class Page(HTMLParser):
    """What a page asks the network for, and its text."""

    def __init__(self, text):
        super().__init__()
        self.addresses, self.words, self.tags, self._inside = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in {"src", "href", "data", "action"}]

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(self.words)


def only_methods(folder):
    return json.loads((folder / "manifest.json").read_text())["run"]["methods"]


def only_data(runs):
    (data,) = {json.loads(file.read_text())["run"]["data"] for file in runs.glob("*/manifest.json")}
    return data


def methods_of(table):
    return {row["method"] for row in table["rows"]}


def copied(out, place, method, shards):
    """A copy of the runs where the one that has a method was killed after some shards: only those files are there."""
    runs = place / "runs"
    if not runs.exists():
        shutil.copytree(out, runs)
    (killed,) = (folder for folder in runs.iterdir() if folder.is_dir() and method in only_methods(folder))
    for file in sorted(killed.glob("*.parquet"))[shards:]:
        file.unlink()
    return runs


class TestReport:
    def test_one_page_holds_everything_and_asks_nobody(self, out, folder):
        result = run("report", out, "--out", folder / "page.html", "--pictures", "2")
        assert result.exit_code == 0, result.output
        text = (folder / "page.html").read_text()
        page = Page(text)
        assert page.addresses
        assert "Content-Security-Policy" in text
        page.addresses.remove("data:,")  # no icon
        assert all(address.startswith(("data:image/", "#")) for address in page.addresses)
        assert not re.search(r"@import|url\(|<script|https?://(?!www\.w3\.org)", text)
        assert page.tags.count("img") == 2 * 3 * 4  # a photo and a map each
        for expected in ("gae", "rollout", "tokentm:gradient=probability", "Not measured (1)", "0007.png"):
            assert expected in page.text
        assert "prefers-color-scheme: dark" in text
        assert 'name="viewport"' in text

    def test_runs_of_one_context_are_one_table(self, out):
        (merged,) = json.loads(run("report", out, "--format", "json").stdout)
        methods = list(dict.fromkeys(row["method"] for row in merged["rows"]))
        assert sorted(methods) == ["gae", "rollout", "tokentm:gradient=probability"]
        assert len(merged["runs"]) == 2
        assert all(row["n"] == 9 for row in merged["rows"])
        assert [failure["image"] for failure in merged["failures"]] == ["0007.png"]
        single = json.loads(run("report", merged["runs"][0], "--format", "json").stdout)[0]
        of_both = {(row["method"], row["metric"]): row["mean"] for row in merged["rows"]}
        assert all(of_both[row["method"], row["metric"]] == row["mean"] for row in single["rows"])

    def test_a_run_that_has_stored_nothing_hides_no_other(self, out, tmp_path):
        runs = copied(out, tmp_path, "rollout", shards=0)
        result = run("report", runs, "--format", "json")
        (finished,) = json.loads(result.stdout)
        assert (finished["images"], finished["wanted"], len(finished["runs"])) == (10, 10, 1)
        assert methods_of(finished) == {"tokentm:gradient=probability", "gae"}
        (line,) = result.stderr.splitlines()
        assert re.fullmatch(rf"warning: left out: {PROTOCOL}-\w+: it has not stored anything yet", line)

    def test_a_run_that_was_killed_shrinks_no_finished_one(self, out, tmp_path):
        runs = copied(out, tmp_path, "rollout", shards=1)
        result = run("report", runs, "--format", "json")
        assert not result.stderr
        finished, killed = json.loads(result.stdout)
        assert (finished["images"], killed["images"], killed["wanted"]) == (10, 4, 10)
        assert {row["n"] for row in finished["rows"]} == {9}
        assert {row["n"] for row in killed["rows"]} == {4}
        assert methods_of(killed) == {"gae", "rollout"}
        alone = json.loads(run("report", finished["runs"][0], "--format", "json").stdout)
        assert finished["rows"] == alone[0]["rows"]
        shown = run("report", runs, "--format", "markdown").stdout
        assert [line for line in shown.splitlines() if line.endswith("4 images (not finished: 4 of 10)**")]
        assert shown.count("not finished") == 1
        assert run("report", runs, "--out", tmp_path / "page.html", "--pictures", "0").exit_code == 0
        page = Page((tmp_path / "page.html").read_text()).text
        assert page.count("This run is not finished: 4 of 10 images.") == 1
        rows = list(csv.DictReader(io.StringIO(run("report", runs, "--format", "csv").stdout)))
        assert {(row["images"], row["wanted"]) for row in rows if row["method"] == "rollout"} == {("4", "10")}

    @pytest.mark.parametrize("damage", ["cut", "another number", "of another run"])
    def test_a_damaged_shard_is_told_and_hides_no_other(self, out, tmp_path, damage):
        runs = copied(out, tmp_path, "rollout", shards=3)
        changed, other = sorted(runs.iterdir(), key=lambda place: "rollout" not in only_methods(place))
        file = sorted(changed.glob("*.parquet"))[1]
        if damage == "cut":
            file.write_bytes(file.read_bytes()[:-100])
        elif damage == "of another run":
            shutil.copy(other / file.name, file)
        else:
            table = pq.read_table(file)
            last = table.num_columns - 1
            pq.write_table(table.set_column(last, table.schema.names[last], pc.add(table.column(last), 0.25)), file)
        result = run("report", runs, "--format", "json")
        assert result.exit_code == 0, result.output
        whole, damaged = json.loads(result.stdout)
        assert (whole["images"], damaged["images"], damaged["wanted"]) == (10, 6, 10)
        assert methods_of(damaged) == {"gae", "rollout"}
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"warning: {file} ")
        assert line.endswith("; evaluate again to recompute it")

    def test_a_run_of_which_nothing_can_be_read_is_no_run_that_has_just_begun(self, out, tmp_path):
        runs = copied(out, tmp_path, "rollout", shards=1)
        (changed,) = (place for place in runs.iterdir() if "rollout" in only_methods(place))
        next(changed.glob("*.parquet")).write_bytes(b"")
        result = run("report", changed, "--format", "json")
        assert result.exit_code == 2
        assert result.stderr.splitlines()[-1].endswith(": nothing of it can be read)")

    def test_runs_that_were_killed_at_the_same_place_are_one_table(self, out, tmp_path):
        runs = copied(out, tmp_path, "rollout", shards=1)
        copied(out, tmp_path, "tokentm:gradient=probability", shards=1)
        (both,) = json.loads(run("report", runs, "--format", "json").stdout)
        assert (both["images"], len(both["runs"])) == (4, 2)

    @pytest.mark.parametrize("foreign", ["explanation", "protocol", "columns", "damaged", "reversed"])
    def test_a_folder_that_is_no_run_from_here_is_left_out(self, out, tmp_path, foreign):
        runs = copied(out, tmp_path, "rollout", shards=3)
        changed = next(place for place in runs.iterdir() if "rollout" in only_methods(place)) / "manifest.json"
        manifest = json.loads(changed.read_text())
        contents = {
            "explanation": b'{"format": "vitreous explanation", "schema": 1}',
            "damaged": b'{"format": "vitr',
            "protocol": rewritten(manifest, protocol="from-the-future"),
            "columns": rewritten(manifest, columns=["another"]),
            # The two methods' numbers were swapped by this, without a word.
            "reversed": sealed({**manifest, "run": {**manifest["run"], "methods": manifest["run"]["methods"][::-1]}}),
        }
        changed.write_bytes(contents[foreign])
        result = run("report", runs, "--format", "json")
        assert result.exit_code == 0, result.output
        (left,) = json.loads(result.stdout)
        assert methods_of(left) == {"tokentm:gradient=probability", "gae"}
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"warning: left out: {changed.parent.name}: ")
        alone = run("report", changed.parent, "--format", "json")
        assert alone.exit_code == 2
        assert alone.stderr.startswith("error: ")
        assert len(alone.stderr.splitlines()) == 1

    def test_the_page_of_results_has_finished_runs_whole(self, out, tmp_path, monkeypatch):
        """Beside a run that was killed there are both tables, each with the command that makes it."""
        runs = copied(out, tmp_path, "rollout", shards=1)
        keeping, writing = (load_script(name, monkeypatch) for name in ("keep_results", "write_results_page"))
        kept = tmp_path / "kept"
        kept.mkdir()
        monkeypatch.setattr(keeping, "KEPT", kept)
        monkeypatch.setattr("sys.argv", ["keep_results.py", str(runs)])
        keeping.main()
        data = writing.ending_of(only_data(runs))
        page = writing.page(f"<!-- results: {PROTOCOL} {data} -->\n<!-- end -->\n", kept)
        whole, killed = page.split("95% bootstrap intervals.")[1:]
        assert page.count("9 photos, 2 methods") == 1
        assert "--limit" not in whole
        assert "--limit 4 " in killed
        assert len(list(kept.iterdir())) == 2

    def test_tables_for_other_documents(self, out):
        rows = list(csv.DictReader(io.StringIO(run("report", out, "--format", "csv").stdout)))
        assert len(rows) == 9
        assert {row["protocol"] for row in rows} == {PROTOCOL}
        assert "| `rollout` |" in run("report", out, "--format", "markdown").stdout
        assert r"\toprule" in run("report", out, "--format", "latex").stdout
        for form in ("markdown", "latex", "json"):
            plain, with_published = (
                run("report", out, "--format", form, *more).stdout for more in ((), ("--published",))
            )
            assert "TokenTM" not in plain
            assert "TokenTM" in with_published
        for form in ("markdown", "latex"):
            plain, tested = (run("report", out, "--format", form, *more).stdout for more in ((), ("--p-values",)))
            assert "paired bootstrap against" not in plain
            assert "paired bootstrap against" in tested

    def test_the_page_shows_published_numbers_on_request(self, out, folder):
        for more in ((), ("--published",)):
            assert run("report", out, "--out", folder / "page.html", "--pictures", 0, *more).exit_code == 0
            assert ("TokenTM" in (folder / "page.html").read_text()) == bool(more)

    def test_without_its_data_set_it_names_images(self, out, folder):
        photos = folder / "photos"
        photos.rename(folder / "moved")
        try:
            result = run("report", out, "--out", folder / "moved.html")
        finally:
            (folder / "moved").rename(photos)
        assert result.exit_code == 0, result.output
        page = Page((folder / "moved.html").read_text())
        assert "img" not in page.tags
        assert "Pictures are missing" in page.text
        assert "0003.png" in page.text

    def test_a_model_beside_the_folder_that_a_run_was_started_from_is_found_again(self, photos, tmp_path, monkeypatch):
        (tmp_path / "here").mkdir()
        (tmp_path / "here" / "own.py").write_text(
            "import timm\n\n\ndef build():\n    return timm.create_model('test_vit', img_size=32, num_classes=3)\n"
        )
        monkeypatch.chdir(tmp_path / "here")
        given = ("--model", "py/own.py:build", "--image-size", 32, "--mean", 0.5, "--std", 0.5, "--protocol", PROTOCOL)
        done = run("evaluate", *given, "--data", photos, "--methods", "gae", "--limit", 2, "--out", tmp_path / "runs")
        assert done.exit_code == 0, done.output
        monkeypatch.chdir(tmp_path)
        measure._opened.clear()  # as in another process
        assert run("report", "runs", "--out", "page.html").exit_code == 0
        page = Page((tmp_path / "page.html").read_text())
        assert "Pictures are missing" not in page.text
        assert "img" in page.tags
        assert Path.cwd() == tmp_path

    def test_a_run_may_have_been_started_from_a_folder_that_others_cannot_enter(self, out, tmp_path, monkeypatch):
        def refuse(folder):
            raise PermissionError(13, "Permission denied", str(folder))

        monkeypatch.setattr("os.chdir", refuse)  # tests may run as root, whom no folder refuses
        result = run("report", out, "--out", tmp_path / "page.html", "--pictures", "1")
        assert result.exit_code == 0, result.output
        assert "img" in Page((tmp_path / "page.html").read_text()).tags

    def test_what_files_say_is_not_markup(self, folder):
        """A data set with hostile names: everything on the page is text."""
        photos = folder / "<img src=x onerror=alert(1)>"
        data = write_photos(photos, 2)
        for kind in ("images", "masks"):
            (photos / kind / "0000.png").rename(photos / kind / "<script>alert(1)<&script>.png")
        (photos / "images" / "<script>alert(1)<&script>.png").write_bytes(b"broken")
        result = run("evaluate", *SMALL, "--data", data, "--methods", "rollout", "--out", folder / "hostile")
        assert result.exit_code == 0, result.output
        assert run("report", folder / "hostile").exit_code == 0
        text = (folder / "hostile" / "report.html").read_text()
        assert "<script" not in text
        assert "onerror=alert(1)>" not in text
        assert "&lt;script&gt;alert(1)" in text

    def test_names_that_are_no_text(self, folder, monkeypatch):
        """Files and a folder called by bytes that are no UTF-8: measured, or an error of one photo, and reported."""
        photos = folder / os.fsdecode(b"photos \xe9")
        try:
            data = write_photos(photos, 3)
            for kind in ("images", "masks"):
                (photos / kind / "0000.png").rename(photos / kind / os.fsdecode(b"good \xe9.png"))
                (photos / kind / "0001.png").rename(photos / kind / os.fsdecode(b"broken \xe9.png"))
        except OSError:
            pytest.skip("this file system takes only names that are text")
        (photos / "images" / os.fsdecode(b"broken \xe9.png")).write_bytes(b"broken")
        monkeypatch.setattr("vitreous.evaluation.engines._start", start_worker)
        for workers in (1, 2):
            place = folder / f"not text {workers}"
            arguments = ("evaluate", *SMALL, "--data", data, "--methods", "rollout", "--out", place, "--json")
            result = run(*arguments, "--workers", workers)
            assert result.exit_code == 0, result.output
            assert {row["n"] for row in json.loads(result.stdout)} == {2}
            stored = everything(only_run(place)).to_pylist()
            assert [row["image"] for row in stored] == ["0002.png", "broken \\udce9.png", "good \\udce9.png"]
            assert "not an image" in stored[1]["error"]
        assert run("report", place).exit_code == 0
        assert "good \\udce9.png" in (place / "report.html").read_text(encoding="utf-8")

    def test_curves_and_dots_of_a_faithfulness_protocol(self, folder, labelled):
        options = ("--model", MODEL.name, "--image-size", "32", "--threads", "1", "--data", labelled)
        place = folder / "faithfulness"
        protocol = ("--protocol", "skipplus-faithfulness", "--methods", "rollout,gae,gradcam")
        result = run("evaluate", *options, *protocol, "--out", place)
        assert result.exit_code == 0, result.output
        assert run("report", place, "--pictures", "1").exit_code == 0
        text = (place / "report.html").read_text()
        assert text.count("<polyline") == 4 * 6  # three methods and three controls
        assert text.count('class="band ') == 4 * 6  # around random and the leading rows, here all
        assert text.count("<circle") == 4 * 6
        charts = text.partition("<h3>Curves")[2].partition("<h3>Best")[0]
        assert "nan" not in charts.lower()

    def test_every_method_is_tested_against_the_best(self, out):
        (merged,) = json.loads(run("report", out, "--format", "json").stdout)
        rows = {(row["method"], row["metric"]): row for row in merged["rows"]}
        compared = [row for row in merged["rows"] if "p" in row]
        assert len(compared) == len(rows) - 3  # three metrics, of which each has its best method
        for row in compared:
            best = rows[row["best"], row["metric"]]
            assert "p" not in best
            # All metrics here are better where they are larger, and the same images count for all methods.
            assert row["difference"] == pytest.approx(row["mean"] - best["mean"], abs=1e-12)
            assert row["difference_low"] <= row["difference"] <= min(0, row["difference_high"])
            assert 2**-8 <= row["p"] <= 1  # nine images: never below 2^(1 - 9)
        page = out.parent / "against.html"
        assert run("report", out, "--out", page).exit_code == 0
        text = Page(page.read_text()).text
        assert "Against the best method" in text
        for row in compared:
            assert f"p = {row['p']:.2g}" in text

    def test_one_image_has_no_interval_and_no_order(self, folder, photos):
        """In every form the means stand alone: no "nan", and nothing tells the methods apart."""
        place = folder / "one image"
        options = ("--data", photos, "--methods", "gae,rollout", "--limit", "1", "--out", place)
        shown = run("evaluate", *SMALL, *options)
        assert shown.exit_code == 0, shown.output
        printed = run("evaluate", *SMALL, *options, "--json").stdout
        texts = [run("report", place, "--format", form).stdout for form in ("markdown", "latex", "csv", "json")]
        assert run("report", place, "--out", place / "page.html").exit_code == 0
        texts += [Page((place / "page.html").read_text()).text.partition("Manifest of")[0], shown.stdout, printed]
        assert all(texts)
        assert not any(re.search(r"\bnan\b", text, re.IGNORECASE) for text in texts)
        rows = json.loads(printed) + json.loads(texts[3])[0]["rows"]
        assert all(row["mean"] is not None and row["low"] is None and row["high"] is None for row in rows)
        assert all(row.get("tied", True) for row in rows)

    @pytest.mark.parametrize("content", [None, "empty", "other"])
    def test_a_folder_without_runs_is_one_line(self, tmp_path, content):
        place = tmp_path / "place"
        if content is not None:
            place.mkdir()
        if content == "other":
            (place / "manifest.json").write_text("{}")
        result = run("report", place)
        assert result.exit_code == 2
        assert result.stderr.count("error:") == 1


class TestLists:
    def test_protocols(self):
        listed = json.loads(run("protocols", "--json").stdout)
        names = [protocol["name"] for protocol in listed]
        assert PROTOCOL in names
        assert all(protocol["metrics"] and protocol["settings"] for protocol in listed)
        shown = run("protocols").stdout
        assert all(name in shown for name in names)

    def test_datasets(self):
        listed = json.loads(run("datasets", "--json").stdout)
        assert {"imagenet", "masks", "pets", "voc"} <= {entry["kind"] for entry in listed}
        assert "masks:PATH" in run("datasets").stdout


def test_metrics_of_the_table_are_those_of_the_stored_numbers(out):
    """The table's mIoU is that of intersections and unions summed over the images that count."""
    (merged,) = json.loads(run("report", out, "--format", "json").stdout)
    shown = {row["method"]: row["mean"] for row in merged["rows"] if row["metric"] == "mIoU"}
    for folder in out.iterdir():
        if not folder.is_dir():
            continue
        store = Store.open(folder)
        table = store.read(store.run.shards(), ["method", "error", *store.run.columns]).to_pylist()
        for method in store.run.methods:
            rows = [row for row in table if row["method"] == method and row["error"] is None]
            sums = {name: np.sum([row[name] for row in rows]) for name in store.run.columns}
            both = [sums[f"intersection_{part}"] / sums[f"union_{part}"] for part in ("background", "foreground")]
            assert shown[method] == pytest.approx(np.mean(both), rel=1e-12)
