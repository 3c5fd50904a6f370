"""The options of ``evaluate``, declared once: for Python, for the command line and for the documentation.

``EvaluateOptions`` types the keyword arguments of ``vitreous.evaluate``. Each annotation carries an ``Option`` with the
default, the bounds and the help text. ``resolve_options`` fills in the defaults and checks the values; the command line
and ``scripts/write_options_table.py`` read the same declarations. No heavy imports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_args, get_origin, get_type_hints

from vitreous._utils.defaults import OUTPUTS_DEFAULT, OUTPUTS_HELP, PLUGIN_HELP, SHARD_SIZE, OutputActivation
from vitreous.errors import RunError

Engine = Literal["local", "ray"]


@dataclass(frozen=True)
class Option:
    """What is known about an option besides its type.

    Attributes:
        default: its value if it is not given.
        help: one sentence.
        minimum: the smallest value of a number.
        maximum: the largest value of a number.
        default_text: describes the default where it is not a constant.
        flag: its name on the command line, where that is not ``--name``.
        name: the name of the keyword argument; ``list_options`` sets it.
        type: its type; ``list_options`` sets it.
    """

    default: Any
    help: str
    minimum: int | None = None
    maximum: int | None = None
    default_text: str | None = None
    flag: str | None = None
    name: str = ""
    type: Any = None

    @property
    def command_line_flag(self) -> str:
        """How it is written on the command line."""
        return self.flag or f"--{self.name.replace('_', '-')}"

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of an option that is one of a few words; empty for others."""
        literals = [part for part in (self.type, *get_args(self.type)) if get_origin(part) is Literal]
        return get_args(literals[0]) if literals else ()

    def check(self, value: Any) -> None:
        """Raise if a value is not one of the choices, or not a number within the bounds.

        Raises:
            RunError: the value is not valid.
        """
        if value is None and self.default is None:
            return
        if self.choices and value not in self.choices:
            raise RunError(f"{self.name} must be {_joined(self.choices)}, not {value!r}")
        if self.minimum is None:
            return
        most = "" if self.maximum is None else f" and at most {self.maximum}"
        largest = value if self.maximum is None else self.maximum
        if not isinstance(value, int) or isinstance(value, bool) or not self.minimum <= value <= largest:
            raise RunError(f"{self.name} must be a whole number of at least {self.minimum}{most}, not {value!r}")


class EvaluateOptions(TypedDict, total=False):
    """Keyword arguments of ``vitreous.evaluate``; all of them are optional."""

    limit: Annotated[
        int | None, Option(None, "Number of images or texts, from the first on.", minimum=1, default_text="all")
    ]
    shuffle: Annotated[bool, Option(False, "Take the data set in a random order, which depends on the seed.")]  # noqa: FBT003
    stratify: Annotated[
        bool,
        Option(
            False,  # noqa: FBT003
            "Take the classes in turn, in an order that depends on the seed: --limit takes a stratified sample.",
        ),
    ]
    engine: Annotated[Engine, Option("local", "local runs on this machine; ray on a cluster (extra vitreous[ray]).")]
    workers: Annotated[
        int | None,
        Option(
            None,
            "Processes on this machine, or concurrent tasks on Ray.",
            minimum=1,
            default_text="local: 1; ray: as many as fit",
        ),
    ]
    threads: Annotated[
        int | None,
        Option(
            None, "Threads per worker; a resumed run keeps its number.", minimum=1, default_text="processors / workers"
        ),
    ]
    shard_size: Annotated[int, Option(SHARD_SIZE, "Images or texts that are computed and stored together.", minimum=1)]
    seed: Annotated[int, Option(0, "Seed of all random numbers.", minimum=0, maximum=2**63 - 1)]
    plugins: Annotated[Sequence[str | Path], Option((), PLUGIN_HELP, flag="--plugin")]
    controls: Annotated[
        bool,
        Option(
            True,  # noqa: FBT003
            "Add the controls as rows: random, centre and edges; of texts random alone.",
            flag="--controls/--no-controls",
        ),
    ]
    retry_failed: Annotated[bool, Option(False, "Compute shards again that contain failed images or texts.")]  # noqa: FBT003
    outputs: Annotated[OutputActivation | None, Option(None, OUTPUTS_HELP, default_text=OUTPUTS_DEFAULT)]


def list_options() -> tuple[Option, ...]:
    """Return all options in the order of their declaration, with names and types."""
    found = []
    for name, annotated in get_type_hints(EvaluateOptions, include_extras=True).items():
        kind, option = get_args(annotated)
        found.append(replace(option, name=name, type=kind))
    return tuple(found)


def resolve_options(given: EvaluateOptions) -> EvaluateOptions:
    """Fill in the defaults and check all values.

    Raises:
        RunError: a value is not valid.
        TypeError: there is no option of that name.
    """
    options = {option.name: option for option in list_options()}
    for name, value in given.items():
        if name not in options:
            raise TypeError(f"evaluate() got an unexpected keyword argument {name!r}")
        options[name].check(value)
    resolved: Any = {name: option.default for name, option in options.items()} | dict(given)
    complete: EvaluateOptions = resolved
    return complete


def _joined(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]])
