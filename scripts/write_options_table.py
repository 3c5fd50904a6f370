"""Write the table of the options of ``evaluate`` in docs/scale.md from their declarations.

python scripts/write_options_table.py [--check]
"""

from __future__ import annotations

import re
from pathlib import Path

from generated import write_or_check

from vitreous.evaluation.options import Option, list_options

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
PLACE = re.compile(r"(?<=<!-- options -->\n).*?(?=<!-- end -->)", re.DOTALL)


def page(text: str) -> str:
    """The page with the table in its place."""
    lines = ["| command line | Python | default | |", "| --- | --- | --- | --- |", *map(_row, list_options())]
    return PLACE.sub(lambda _: "\n".join(lines) + "\n", text)


def _row(option: Option) -> str:
    default = option.default_text or ("none" if option.default in {None, ()} else f"`{option.default}`")
    values = f" One of {', '.join(f'`{choice}`' for choice in option.choices)}." if option.choices else ""
    return f"| `{option.command_line_flag}` | `{option.name}` | {default} | {option.help}{values} |"


def main() -> None:
    """Write the page, or with --check fail if its table is not what the declarations say."""
    write_or_check(PAGE, page(PAGE.read_text(encoding="utf-8")), "write_options_table")


if __name__ == "__main__":
    main()
