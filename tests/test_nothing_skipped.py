"""Where a change is judged, a test that cannot run has failed; anywhere else it is skipped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nothing_skipped import EXCUSED_REASONS, VARIABLE

TESTS = Path(__file__).parent
FILES = {
    "test_whole.py": "import pytest\npytest.importorskip('no_such_package')\ndef test_one(): pass\n",
    "test_some.py": f"""
import pytest

@pytest.fixture
def browser():
    pytest.skip("the browser does not start here")

def test_browser(browser): pass

@pytest.mark.skipif(True, reason="there is no chromedriver on this machine")
def test_driver(): pass

def test_peer():
    pytest.skip("it cannot be imported")

@pytest.mark.shared
def test_data():
    pytest.skip("the development data is not there")

@pytest.mark.skipif(True, reason={EXCUSED_REASONS[0]!r})
def test_superuser(): pass

def test_passes(): pass
""",
}
REASONS = (
    "the browser does not start here",
    "there is no chromedriver on this machine",
    "it cannot be imported",
    "could not import 'no_such_package'",
)


@pytest.mark.parametrize(
    ("variable", "processes", "outcome"),
    [
        ("", "0", "1 passed, 6 skipped"),
        ("1", "0", "1 failed, 1 passed, 2 skipped, 3 errors"),
        ("1", "1", "1 failed, 1 passed, 2 skipped, 3 errors"),  # as `make test` runs them
    ],
)
def test_skips_are_failures_where_nothing_may_be_skipped(tmp_path, variable, processes, outcome):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = shared\naddopts = -p no:zarr -p no:anyio\n")
    # Without this option an error in one file would keep the others from being run.
    command = [sys.executable, "-m", "pytest", "-p", "nothing_skipped", "--continue-on-collection-errors"]
    command += ["--numprocesses", processes]
    settings = {**os.environ, VARIABLE: variable, "PYTHONPATH": os.pathsep.join([str(TESTS / "support"), *sys.path])}
    result = subprocess.run(
        command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=120, check=False
    )
    assert outcome in result.stdout.splitlines()[-1]
    assert result.returncode == (1 if variable else 0)
    refused = [f"{VARIABLE} is set, and this would be skipped: {reason}" in result.stdout for reason in REASONS]
    assert refused == [bool(variable)] * len(REASONS)
