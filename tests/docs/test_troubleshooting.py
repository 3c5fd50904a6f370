"""Every message of the page on troubleshooting is one that the source really has."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)


def text_of(node: ast.expr) -> str:
    """A string as the source has it, with ``...`` for what is put in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(text_of(part) if isinstance(part, ast.Constant) else "..." for part in node.values)


@pytest.fixture(scope="module")
def strings():
    found = set()
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                found.add(text_of(node))
    return found


def test_there_are_many():
    assert len(MESSAGES) > 20


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_is_in_the_source(message, strings):
    pattern = re.compile(".*".join(re.escape(part) for part in message.split("...")), re.DOTALL)
    assert any(pattern.search(text) for text in strings)
