"""Write docs/protocols.md, all protocols with every choice, from their data.

python scripts/write_protocols_page.py [--check]
"""

from __future__ import annotations

import inspect
from pathlib import Path

from generated import first_paragraph, metric_rows, write_or_check

from vitreous.evaluation.protocols import Protocol, list_protocols
from vitreous.evaluation.tasks.task import Task

PAGE = Path(__file__).parents[1] / "docs" / "protocols.md"
INTRODUCTION = """# Protocols

Written by `scripts/write_protocols_page.py` from the protocols' data; do not edit.

Published tables are not comparable, because they were measured under different protocols. Here the name of a protocol
fixes every choice below. Its version is raised when a release changes numbers, and every result records both. Input
size, mean, standard deviation and interpolation are always those of the model. An image without a required annotation
(a label, a mask) is reported and does not count; in a protocol with several tasks it counts for those that it has the
annotations for. Every number over a data set is a function of means over images, so that bootstrap intervals of all
metrics are computed in the same way.
"""
RESIZE = {
    "squash": "resized to the model's input size, nothing cropped; masks by nearest neighbour in the same way",
    "model": "resized and cropped as in the model's own preprocessing; masks by nearest neighbour in the same way",
}

CUT = "as many word pieces as the model takes, from the beginning; what the tokenizer puts around them always stays"


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *(_about(protocol) for protocol in list_protocols())])


def _about(protocol: Protocol) -> str:
    lines = [
        f"## {protocol.name}\n",
        f"{protocol.title} ({protocol.paper}). Version {protocol.version}.\n",
        f"- images: {RESIZE[protocol.resize]}" if protocol.reads == "photos" else f"- texts: {CUT}",
        f"- methods: {_rows(protocol)}",
        *(f"- {note}" for note in protocol.notes),
        "",
        *(_task(task) for task in protocol.tasks),
        *metric_rows(protocol.metrics()),
        "",
    ]
    return "\n".join(lines)


def _rows(protocol: Protocol) -> str:
    if protocol.start_layers:
        return "the caller's, each as PLUS from every layer on"
    if protocol.methods is None:
        return "the caller's"
    fixed = [f"`{spelling}`" for spelling in protocol.methods]
    over = {"blocks": "0 to the depth less 1", "quarters": "a quarter, half, three quarters and all of the depth"}
    swept = [
        f"`{sweep.template.replace('{number}', 'N')}` with N being {over[sweep.over]}" for sweep in protocol.sweeps
    ]
    return ", ".join([*fixed, *swept])


def _task(task: Task) -> str:
    meanings = _meanings(type(task))
    settings = {name: value for name, value in task.settings().items() if name != "task"}
    lines = [f"Task: {task.kind}. {first_paragraph(type(task))}\n"]
    lines += ["| setting | value | |", "| --- | --- | --- |"]
    lines += [f"| {name} | {_value(value)} | {meanings[name]} |" for name, value in settings.items()]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _meanings(kind: type) -> dict[str, str]:
    """What the docstrings of a task and of the tasks it is made from say about each setting."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        name = None
        _, _, attributes = inspect.cleandoc(each.__doc__ or "").partition("Attributes:\n")
        for line in attributes.splitlines():
            head, colon, text = line.strip().partition(": ")
            if colon and line.startswith("    ") and not line.startswith("     "):
                name = head
                found[name] = text
            elif name is not None and line.strip():
                found[name] += f" {line.strip()}"
    return {name: text.replace("``", "`") for name, text in found.items()}


def main() -> None:
    """Write the page, or with --check fail if it is not what the protocols say."""
    write_or_check(PAGE, page(), "write_protocols_page")


if __name__ == "__main__":
    main()
