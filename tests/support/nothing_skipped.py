"""Skips that are failures: with VITREOUS_NOTHING_SKIPPED set, what a test needs has to be there.

On anybody's machine a test without its browser or its peer skips and says why. Where a change is judged, that would be
green without having looked, so ``.ci/run`` sets the variable. Some things may still be missing there, for no
installation brings them: the development data, a user who is not allowed to read everything, another file system,
FiftyOne with its database server.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

VARIABLE = "VITREOUS_NOTHING_SKIPPED"
EXCUSED_MARKER = "shared"
EXCUSED_REASONS = (
    "the superuser may read everything",
    "a full disk that Linux has",
    "this file system takes only names that are text",
    "poppler-utils is not installed",  # the same is read from the bytes of the file
    "dicom3tools is not installed",
    "FiftyOne is not installed (extra fiftyone)",  # it brings a database server; make does not install it
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, object, object]:
    """Turn the skip of one test into its failure."""
    report = yield
    if report.skipped and call.excinfo is not None and item.get_closest_marker(EXCUSED_MARKER) is None:
        _refuse(report, str(call.excinfo.value))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, object, object]:
    """Turn the skip of a whole file into an error."""
    report = yield
    if report.skipped:
        _refuse(report, report.longrepr[2].removeprefix("Skipped: "))
    return report


def _refuse(report: pytest.TestReport | pytest.CollectReport, reason: str) -> None:
    if os.environ.get(VARIABLE) and reason not in EXCUSED_REASONS:
        report.outcome, report.longrepr = "failed", f"{VARIABLE} is set, and this would be skipped: {reason}"
