"""Errors of other libraries become part of one line."""

import pytest

from vitreous._utils.messages import error_message


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            ValueError("\n  Error(s) in loading:\n\tMissing key(s): head.weight "),
            "Error(s) in loading: Missing key(s): head.weight",
        ),
        (ValueError("x" * 1000), "x" * 200),
        (ValueError(), "ValueError"),
        (RuntimeError(" \n "), "RuntimeError"),
    ],
)
def test_a_reason_is_one_short_line(error, reason):
    assert error_message(error) == reason
