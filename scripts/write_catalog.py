"""Write src/vitreous/cli/catalog.json, which the listing commands read, from the registries.

python scripts/write_catalog.py [--check]
"""

from __future__ import annotations

import json

from generated import write_or_check

from vitreous.cli.listings import FILE, build_catalog


def text() -> str:
    """The whole file."""
    return json.dumps(build_catalog(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def main() -> None:
    """Write the file, or with --check fail if it is not what the registries say."""
    write_or_check(FILE, text(), "write_catalog")


if __name__ == "__main__":
    main()
