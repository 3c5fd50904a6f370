"""Readable assertion messages of what the family tests share."""

import pytest

pytest.register_assert_rewrite("checks")
