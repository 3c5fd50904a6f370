"""``vitreous speed`` as people use it, and the page that is made of what it keeps."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vitreous.cli import app
from vitreous.speed import SpeedRow
from vitreous.speed.peers import PEERS
from vitreous.speed.timing import one_thread

ROOT = Path(__file__).parents[2]
SMALL = ("--model", "timm/vit_tiny_patch16_224", "--random", "--size", "32", "--batch", "1", "--repeats", "1")
# The names that the rows promise.
NAMES = ["method", "ratio_forward", "ratio_forward_backward", "ratio_limit", "ratio_peak_memory", "passes"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


def run(*arguments):
    return CliRunner().invoke(app, ["speed", *map(str, arguments)], env={"COLUMNS": "200"})


def test_json_is_a_list_of_rows_and_nothing_else():
    result = run(*SMALL, "--methods", "gae,gradtoken:heads=average,ixg.skipplus", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["method"] for row in rows] == ["gae", "gradtoken:heads=average", "ixg.skipplus"]
    for row in rows:
        assert list(row)[:6] == NAMES
        assert all(row[name] > 0 for name in NAMES[1:5])
        assert row["passes"].startswith("1 forward, 1 backward")
        assert (row["peer"], row["ratio_peer"], row["agreement"]) == (None, None, None)
        assert row["milliseconds"] > 0


def test_peers_have_rows_with_agreement():
    if PEERS["captum"].problem:
        pytest.skip(PEERS["captum"].problem)
    result = run(*SMALL, "--methods", "ixg", "--peer", "captum", "--json")
    assert result.exit_code == 0, result.output
    ours, theirs = json.loads(result.stdout)
    assert (ours["peer"], theirs["peer"], theirs["method"]) == (None, "captum", "ixg")
    assert theirs["ratio_peer"] > 0
    assert set(theirs["agreement"]) == {"agrees", "correlation", "largest_difference"}
    assert theirs["agreement"]["agrees"] is True


def test_the_table_has_ratios_before_passes(tmp_path):
    file = tmp_path / "new" / "rows.json"
    result = run(*SMALL, "--methods", "gae,rollout", "--together", "--out", file)
    assert result.exit_code == 0, result.output
    heading = next(line for line in result.stdout.splitlines() if "method" in line)
    assert heading.index(" ms ") < heading.index("/limit") < heading.index("/FB") < heading.index("passes")
    assert "2 methods at once" in result.stdout
    kept = json.loads(file.read_text(encoding="utf-8"))
    assert kept["model"] == "timm/vit_tiny_patch16_224@random"
    assert (kept["batch"], kept["size"], kept["repeats"]) == (1, [32, 32], 1)
    assert {"torch", "timm", "vitreous"} <= set(kept["versions"])
    assert len(kept["rows"]) == 3


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--batch", "0"), "invalid value for '--batch-size' / '--batch'"),
        (("--repeats", "0"), "invalid value for '--repeats'"),
        (("--image-size", "big"), "not a size"),
        (("--batch-size", "0"), "invalid value for '--batch-size'"),
        (("--methods", "gea"), "there is no method 'gea'"),
        (("--model", "demo", "--random"), "random weights are for timm/NAME"),
        (("--peer", "captain"), "there is no peer 'captain'"),
        (("--size", "33"), "multiple of the patch size"),
    ],
)
def test_wrong_use_is_one_line_and_code_2(arguments, reason):
    result = run(*SMALL, *arguments)
    assert result.exit_code == 2
    assert reason in " ".join(result.output.replace("│", " ").split())


class TestPage:
    """``scripts/write_speed_page.py``: figures come from what was kept alone."""

    @pytest.fixture
    def script(self, monkeypatch):
        monkeypatch.syspath_prepend(ROOT / "scripts")  # where the script finds what it shares with the others
        spec = importlib.util.spec_from_file_location("speed_page", ROOT / "scripts" / "write_speed_page.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "speed_page", module)
        spec.loader.exec_module(module)
        return module

    def test_it_is_up_to_date(self, script):
        text = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
        assert text == script.page(text, ROOT / "docs" / "speed"), "run scripts/write_speed_page.py"

    def test_every_measurement_has_its_place(self, script):
        text = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
        places = {place[2] for place in script.PLACE.finditer(text)}
        assert {file.stem for file in (ROOT / "docs" / "speed").glob("*.json")} <= places

    def test_what_was_not_measured_has_no_table(self, script, tmp_path):
        page = script.page("<!-- speed: nothing -->\n| old |\n<!-- end -->", tmp_path)
        assert "Not measured" in page
        assert "old" not in page

    def test_figures_are_those_of_the_rows(self, script, tmp_path):
        ratios = ("ratio_limit", "ratio_forward", "ratio_forward_backward", "ratio_peer")
        spread = dict.fromkeys(ratios, (1.0, 9.0))
        passes = ("1 forward, 1 backward", "forward + backward")
        row = SpeedRow("gae", 4.0, 1.26, 1.257, 1.5, *passes, spread=spread).as_json()
        theirs = {**row, "peer": "captum", "ratio_peer": 3.21, "agreement": {"largest_difference": 2e-6}}
        other = {**row, "ratio_limit": None, "peer": "lxt", "reason": "it gives another map"}
        both = {**row, "method": "2 methods at once", "ratio_forward": 6.0}
        second = {**row, "method": "ixg", "ratio_forward": 2.0}
        kept = {"created": "2026-01-02T03:04:05", "versions": {"torch": "2.15"}, "command": "vitreous speed"}
        kept |= {"model": "demo", "batch": 4}
        (tmp_path / "here.json").write_text(json.dumps({**kept, "rows": [row, theirs, other, second, both]}))
        places = "<!-- speed: here -->\n<!-- end -->\n<!-- speed: here peers -->\n<!-- end -->"
        own, peers = script.page(places, tmp_path).split("<!-- speed: here peers -->")
        assert "| `gae` | 1.26 <small>1.00 to 9.00</small> | 4.00" in own
        assert own.index("`ixg`") < own.index("`gae`") < own.index("| 2 methods at once |"), "sorted by time"
        assert "The 2 methods at once take 1.00 of the time" in own  # 6 / (4 + 2)
        assert "demo, batch 4, measured on 2026-01-02 with torch 2.15" in own
        assert "captum" not in own
        assert "| `gae` | captum | 3.21 <small>1.00 to 9.00</small> | 1.26 | 1.26 | 1.50 | 1.50 | 2e-06 |" in peers
        assert "- `gae` by lxt: it gives another map." in peers

    def test_growth_is_a_line_for_each_method(self, script, tmp_path):
        kept = {"created": "2026-01-02", "versions": {}, "command": "python benchmarks/growth_with_tokens.py"}
        rows = [
            {"method": method, "tokens": tokens, "ratio_forward_backward": ratio, "ratio_peak_memory": ratio / 2}
            for method, tokens, ratio in (("gae", 785, 3.0), ("gae", 197, 2.0), ("alti", 197, 5.0))
        ]
        exponents = [{"method": "gae", "time_exponent": 1.234, "memory_exponent": 1.5}]
        (tmp_path / "growth.json").write_text(json.dumps({**kept, "exponents": exponents, "rows": rows}))
        page = script.page("<!-- speed: growth -->\n<!-- end -->", tmp_path)
        assert "| time grows as n^ | time at 197 | time at 785 | memory grows as n^ |" in page
        assert "| `gae` | 1.23 | 2.00 | 3.00 | 1.50 | 1.00 | 1.50 |" in page
        assert "| `alti` |  | 5.00 |  |  | 2.50 |  |" in page

    def test_rows_with_columns_of_their_own_are_shown_as_they_are(self, script, tmp_path):
        kept = {"created": "2026-01-02", "versions": {}, "command": "python benchmarks/x.py"}
        rows = [{"model": "vit", "gain_in_time": 123.456, "tokens": 197}, {"model": "deit", "note": None}]
        (tmp_path / "own.json").write_text(json.dumps({**kept, "rows": rows}))
        page = script.page("<!-- speed: own -->\n<!-- end -->", tmp_path)
        assert "| model | gain in time | tokens | note |" in page
        assert "| vit | 123 | 197 |  |" in page
