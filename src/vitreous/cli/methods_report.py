"""What ``vitreous methods`` tells about the methods and the aggregations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from vitreous.aggregate import AGGREGATIONS
from vitreous.cost import cost_of
from vitreous.methods import list_methods
from vitreous.methods.options import options_of
from vitreous.methods.registry import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import Console

    from vitreous.methods import MethodInfo, OptionInfo


def show(console: Console) -> None:
    """Print the methods and the aggregations with their options."""
    for family in FAMILIES:
        members = {method.name: _about_method(method) for method in list_methods() if method.family == family}
        if members:
            console.print(_table(members, family))
    console.print(_table({f".{name}": _about_aggregation(make) for name, make in AGGREGATIONS.items()}, "aggregation"))
    console.print(Text("Spelling: name[.aggregation...][:option=value,...]", style="dim"))


def as_json() -> list[dict[str, Any]]:
    """Give the registry as JSON values."""
    return [_as_json(method) for method in list_methods()]


def _table(rows: Mapping[str, Text], heading: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column(heading, no_wrap=True, style="bold")
    table.add_column("what it is")
    for name, about in rows.items():
        table.add_row(name, about.append("\n"))
    return table


def _about_method(method: MethodInfo) -> Text:
    """Describe a method: what it shows, its paper, what it depends on and what may follow its name."""
    traits = [
        "depends on the class" if method.class_specific else "the same for every class",
        "signed" if method.signed else "not signed",
        cost_of(method.name).label,
    ]
    about = Text(method.summary)
    about.append(f"\n{method.citation}", style="dim")
    about.append(f"\n{', '.join(traits)}; {' '.join(f'.{name}' for name in method.aggregations)}", style="cyan")
    return _with_options(about, method.options)


def _about_aggregation(make: Callable[..., object]) -> Text:
    summary = (make.__doc__ or "").strip().splitlines()[0].replace("``", "")
    return _with_options(Text(summary), options_of(make))


def _with_options(about: Text, options: Mapping[str, OptionInfo]) -> Text:
    for name, option in options.items():
        about.append(f"\n:{_option(name, option)}", style="green")
        most = "" if option.most is None else f"at most {option.most:,}"
        told = "; ".join(part for part in (option.help, most) if part)
        about.append(f"  {told}" if told else "", style="dim")
    return about


def _option(name: str, option: OptionInfo) -> str:
    """Write an option as it is typed, with its choices or its default."""
    if option.choices is None:
        return f"{name}={'NUMBER' if option.default is None else option.default}"
    marked = (f"{choice} (default)" if choice == option.default else choice for choice in option.choices)
    return f"{name}={' | '.join(marked)}"


def _as_json(method: MethodInfo) -> dict[str, Any]:
    cost = cost_of(method.name)
    return {
        "name": method.name,
        "family": method.family,
        "summary": method.summary,
        "paper": method.paper,
        "year": method.year,
        "note": method.note,
        "link": method.link,
        "bf16": list(method.bf16),
        "class_specific": method.class_specific,
        "signed": method.signed,
        "cost": cost.label,
        "passes": list(cost.passes),
        "aggregations": list(method.aggregations),
        "options": {
            name: {
                "default": option.default,
                "choices": None if option.choices is None else list(option.choices),
                "help": option.help,
                "most": option.most,
            }
            for name, option in method.options.items()
        },
    }
