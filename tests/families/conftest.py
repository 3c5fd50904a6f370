"""What the family tests share: readable assertion messages, and one thread."""

from collections.abc import Iterator

import pytest
import torch

pytest.register_assert_rewrite("checks")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Models this small only wait for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
