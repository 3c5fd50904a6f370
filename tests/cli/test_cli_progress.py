"""What commands print on standard error while they work, without a terminal: short plain lines, not too many."""

from __future__ import annotations

import io
import json
import time

import pytest
from rich.console import Console

import forked
from vitreous.cli import console as progress
from vitreous.cli.console import progress_bar, steps


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.05)
    monkeypatch.setattr(progress, "_SECONDS_UNTIL_REPEATED", 0.2)


@pytest.fixture
def written():
    return io.StringIO()


def plain(written) -> Console:
    return Console(file=written, force_terminal=False, highlight=False)


def wait_for(text: str, written: io.StringIO) -> None:
    end = time.monotonic() + 20  # as long as a machine may be busy with other things
    while text not in written.getvalue():
        assert time.monotonic() < end, written.getvalue()
        time.sleep(0.01)


@pytest.mark.usefixtures("quick")
def test_each_step_is_a_line_and_a_long_one_is_repeated_with_its_time(written):
    with steps(plain(written), "loading [red]") as step:
        wait_for("loading [red]\n", written)
        step("measuring")
        wait_for("measuring\n", written)
        wait_for("measuring (for ", written)
    lines = written.getvalue().splitlines()
    assert lines[0] == "loading [red]"
    assert lines.count("measuring") == 1


def test_a_quick_command_prints_nothing(written):
    with steps(plain(written), "loading"):
        pass
    with progress_bar(plain(written), 3) as advance:
        advance(3)
    assert written.getvalue() == ""


@pytest.mark.usefixtures("quick")
def test_photos_are_counted(written):
    with progress_bar(plain(written), 3) as advance:
        wait_for("explaining, 0 of 3 done\n", written)
        advance(2)
        wait_for("explaining, 2 of 3 done\n", written)


@pytest.mark.usefixtures("quick")
def test_nothing_is_printed_after_an_error(written):
    def fail() -> None:
        with steps(plain(written), "loading"):
            raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        fail()
    before = written.getvalue()
    time.sleep(0.2)
    assert written.getvalue() == before


def test_speed_tells_what_it_does_on_standard_error_alone(tmp_path):
    code = (
        "import sys\n"
        "from vitreous.cli import console as progress\n"
        "progress._SECONDS_BETWEEN_LINES = 0.02\n"
        "from vitreous.cli import main\n"
        "main()\n"
    )
    arguments = [
        "speed",
        "--model",
        "timm/test_vit",
        "--random",
        "--methods",
        "gae,rollout",
        "--repeats",
        "2",
        "--json",
    ]
    program = tmp_path / "program.py"
    program.write_text(code)
    done = forked.run([str(program), *arguments])
    assert done.returncode == 0, done.stderr
    assert [row["method"] for row in json.loads(done.stdout)] == ["gae", "rollout"]
    assert "measuring gae\n" in done.stderr
    assert "measuring times of" in done.stderr
