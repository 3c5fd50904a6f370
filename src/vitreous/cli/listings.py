"""``vitreous methods``, ``models``, ``protocols`` and ``datasets``: list what there is.

``catalog.json`` holds the catalog of this version, so that listing commands answer without importing torch. It is
written by ``scripts/write_catalog.py`` from the registries; a test compares the two.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from vitreous._utils.defaults import PLUGIN_ENTRY_POINTS, split_spellings
from vitreous._utils.messages import close_match
from vitreous.cli.console import (
    DebugOption,
    DeviceOption,
    ImageSizeOption,
    JsonOption,
    MeanOption,
    PluginOption,
    StdOption,
    json_values,
    parse_channels,
    parse_image_size,
    plain_warnings,
    print_json,
    print_line,
    stderr_console,
    stdout_console,
    steps,
)
from vitreous.errors import MethodError

if TYPE_CHECKING:
    from rich.console import Console

    from vitreous.methods import OptionInfo


FILE = Path(__file__).with_name("catalog.json")
_NOTES = (
    "c: depends on the class; s: signed; then the cost: forward, + backward pass down to a block, many runs.",
    "Spelling: name[.aggregation...][:option=value,...]",
    "`vitreous methods NAME` shows the paper and options of a method, `vitreous methods WORD` searches.",
)
_NAME_WIDTH, _COST_WIDTH = 21, 16  # the longest name and cost: columns of all families are aligned


def load_catalog() -> dict[str, Any]:
    """Read the catalog of this version, without methods of plugins."""
    catalog: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return catalog


def load_methods(plugins: list[Path]) -> list[dict[str, Any]]:
    """Return all methods; with plugins, given or installed, from the registry."""
    from importlib import metadata  # noqa: PLC0415  # takes a while, and only this command needs it

    if not plugins and not metadata.entry_points(group=PLUGIN_ENTRY_POINTS):
        methods: list[dict[str, Any]] = load_catalog()["methods"]
        return methods
    from vitreous.plugin import load_plugins  # noqa: PLC0415  # imports torch

    load_plugins(plugins)
    return build_methods()


def build_catalog() -> dict[str, Any]:
    """Build the catalog from the registries."""
    from importlib import metadata  # noqa: PLC0415

    from vitreous.datasets import list_datasets  # noqa: PLC0415  # these import torch
    from vitreous.models import list_models  # noqa: PLC0415

    catalog: dict[str, Any] = json_values(
        {
            "methods": build_methods(),
            "aggregations": _build_aggregations(),
            "protocols": _build_protocols(),
            "models": {**list_models(), "timm_version": metadata.version("timm")},
            "datasets": [{"kind": kind, "help": summary} for kind, summary in list_datasets().items()],
        }
    )
    return catalog


def build_methods() -> list[dict[str, Any]]:
    """Return the registered methods as JSON values."""
    from vitreous.methods import list_controls, list_methods  # noqa: PLC0415  # imports torch

    return [
        {
            "name": method.name,
            "family": method.family,
            "summary": method.summary,
            "paper": method.paper,
            "year": method.year,
            "note": method.note,
            **({} if (patent := method.patent) is None else {"patent": str(patent)}),
            "citation": method.citation,
            "link": method.link,
            "bf16": list(method.bf16),
            "class_specific": method.class_specific,
            "signed": method.signed,
            "cost": method.cost.label,
            "passes": list(method.cost.passes),
            "aggregations": list(method.aggregations),
            "options": _options_as_json(method.options),
        }
        for method in (*list_methods(), *list_controls())
    ]


def _build_aggregations() -> list[dict[str, Any]]:
    from vitreous.methods.registry import options_of  # noqa: PLC0415
    from vitreous.methods.spelling import AGGREGATIONS  # noqa: PLC0415  # these import torch

    return [
        {"name": name, "summary": _summary(make), "options": _options_as_json(options_of(make))}
        for name, make in AGGREGATIONS.items()
    ]


def _build_protocols() -> list[dict[str, Any]]:
    from vitreous.evaluation.protocols import list_protocols  # noqa: PLC0415  # imports torch

    return [
        {
            "name": protocol.name,
            "title": protocol.title,
            "paper": protocol.paper,
            "version": protocol.version,
            "metrics": [
                {
                    "name": metric.name,
                    "direction": metric.direction,
                    "range": list(metric.range),
                    "description": metric.description,
                }
                for metric in protocol.metrics()
            ],
            "settings": protocol.settings(),
        }
        for protocol in list_protocols()
    ]


def _options_as_json(options: Mapping[str, OptionInfo]) -> dict[str, Any]:
    return {
        name: {
            "default": option.default,
            "choices": None if option.choices is None else list(option.choices),
            "help": option.help,
            "most": option.most,
        }
        for name, option in options.items()
    }


def _summary(make: Callable[..., object]) -> str:
    return (make.__doc__ or "").strip().splitlines()[0].replace("``", "")


models_app = typer.Typer(
    help="List the kinds of model names that --model takes, or check one model.",
    rich_markup_mode=None,
    add_completion=False,
)


def methods(
    *,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME|WORD", help="One method in detail, or words to find in names, summaries and papers."
        ),
    ] = None,
    family: Annotated[str | None, typer.Option(metavar="NAME", help="List the methods of one family only.")] = None,
    patents: Annotated[
        bool,
        typer.Option(help="--no-patents leaves out methods that their authors call patented. No legal advice."),
    ] = True,
    as_json: JsonOption = False,
    plugin: PluginOption = None,
    _debug: DebugOption = False,
) -> None:
    """List the explanation methods, one line each; `vitreous methods NAME` shows the paper and options of one."""
    known = [method for method in load_methods(plugin or []) if patents or "patent" not in method]
    listed = _select_methods(known, words or [], family)
    if as_json:
        print_json(listed)
        return
    console = stdout_console()
    if words and len(listed) == 1:
        console.print(_describe_method(listed[0]))
        return
    families = dict.fromkeys(method["family"] for method in listed)
    rows = {name: [_method_row(method) for method in listed if method["family"] == name] for name in families}
    if not words and family is None:
        rows["aggregation"] = [
            (f".{one['name']}", "", "", "", one["summary"]) for one in load_catalog()["aggregations"]
        ]
    for heading, members in rows.items():
        console.print(Text(f"\n{heading}", style="bold"))
        for row in members:
            console.print(_method_line(console, row), soft_wrap=True)
    console.print()
    for note in _NOTES:
        print_line(console, note, "dim")


def _select_methods(listed: list[dict[str, Any]], words: list[str], family: str | None) -> list[dict[str, Any]]:
    """Keep the methods of a family that have a name, or contain all words."""
    if family is not None:
        families = list(dict.fromkeys(method["family"] for method in listed))
        if family not in families:
            raise MethodError(f"there is no family {family!r}; the families are {', '.join(families)}")
        listed = [method for method in listed if method["family"] == family]
    name = words[0].split(":")[0].split(".")[0].lower() if len(words) == 1 else None
    exact = [method for method in listed if method["name"] == name]
    if exact or not words:
        return exact or listed
    searched = {
        method["name"]: f"{method['name']} {method['family']} {method['summary']} {method['citation']}".lower()
        for method in listed
    }
    found = [method for method in listed if all(word.lower() in searched[method["name"]] for word in words)]
    if not found:
        raise MethodError(f"no method contains {' '.join(words)!r}{close_match(words[0], searched)}")
    return found


def _method_row(method: Mapping[str, Any]) -> tuple[str, ...]:
    marks = f"{'c' if method['class_specific'] else '-'}{'s' if method['signed'] else '-'}"
    cost = method["cost"].removesuffix(" + head again")
    return method["name"], str(method["year"] or ""), marks, cost.removeprefix("forward ") or cost, method["summary"]


def _method_line(console: Console, row: tuple[str, ...]) -> Text:
    """A row on one line; on a terminal the last column as far as it fits."""
    name, year, marks, cost, summary = row
    line = Text(f"{name:<{_NAME_WIDTH}}", style="bold")
    line.append(f" {year:<4} {marks:<2} {cost:<{_COST_WIDTH}} ", style="not bold cyan")
    left = console.width - len(line)
    shortened = textwrap.shorten(summary, left, placeholder=" ...") if console.is_terminal and left > 0 else summary
    return line.append(shortened, style="not bold")


def protocols(*, as_json: JsonOption = False, _debug: DebugOption = False) -> None:
    """List the protocols that --protocol takes, with their papers and metrics."""
    listed = load_catalog()["protocols"]
    if as_json:
        print_json(listed)
        return
    rows = {}
    for protocol in listed:
        rows[protocol["name"]] = about = Text(protocol["title"])
        about.append(f"\n{protocol['paper']}", style="dim")
        about.append(f"\n{'; '.join(metric['name'] for metric in protocol['metrics'])}", style="cyan")
    stdout_console().print(_table("--protocol", "what it measures", rows.items()))


def datasets(*, as_json: JsonOption = False, _debug: DebugOption = False) -> None:
    """List the kinds of data sets that --data KIND:PATH takes, and what PATH must contain."""
    listed = load_catalog()["datasets"]
    if as_json:
        print_json(listed)
        return
    rows = ((f"{dataset['kind']}:PATH", Text(dataset["help"])) for dataset in listed)
    stdout_console().print(_table("--data", "what PATH must contain", rows))


@models_app.callback(invoke_without_command=True)
def models(context: typer.Context, *, as_json: JsonOption = False, _debug: DebugOption = False) -> None:
    """List the kinds of model names that --model takes; `vitreous models check MODEL` inspects one model."""
    if context.invoked_subcommand is not None:
        return
    listed = load_catalog()["models"]
    if as_json:
        print_json(listed)
        return
    console = stdout_console()
    console.print(_table("--model", "what it is", ((kind["name"], Text(kind["help"])) for kind in listed["names"])))
    count = listed["timm_vision_transformers"]
    print_line(console, f"timm {listed['timm_version']} has {count} names of Vision Transformers.", "dim")


def check(
    *,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A model by name: demo, timm/NAME, timm/NAME@FILE, hf/ID, py/FILE.py:FUNCTION."
        ),
    ],
    method: Annotated[
        list[str] | None,
        typer.Option("--method", "--methods", help="Methods to try, separated by commas.", show_default="all"),
    ] = None,
    mean: MeanOption = None,
    std: StdOption = None,
    image_size: ImageSizeOption = None,
    device: DeviceOption = "cpu",
    plugin: PluginOption = None,
    as_json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Show the architecture seen in a run of a model (stream, blocks, attention, patches) and the supported methods."""
    spellings = split_spellings(method) if method else None
    channel_mean, channel_std = parse_channels(mean, "--mean"), parse_channels(std, "--std")
    size = parse_image_size(image_size)

    import vitreous  # noqa: PLC0415  # these import torch
    from vitreous.models import demo, load_model  # noqa: PLC0415
    from vitreous.plugin import load_plugins  # noqa: PLC0415

    load_plugins(plugin or [])
    console = stderr_console()
    with plain_warnings(console), steps(console, f"loading {model}") as step:
        loaded = load_model(model, mean=channel_mean, std=channel_std, image_size=size, device=device)
        step("running the model")
        inspection = vitreous.inspect(loaded, demo.PHOTO, spellings)
    if as_json:
        print_json({"model": model, **inspection.as_dict()})
        return
    for line in str(inspection).splitlines():
        print_line(stdout_console(), line)


def _table(name: str, description: str, rows: Iterable[tuple[str, Text]]) -> Table:
    table = Table(box=None)
    table.add_column(name, no_wrap=True, style="bold")
    table.add_column(description)
    for first, second in rows:
        table.add_row(Text(first), second)
    return table


def _describe_method(method: Mapping[str, Any]) -> Text:
    """Describe a method: summary, paper, properties, aggregations and options."""
    properties = [
        "class-specific" if method["class_specific"] else "the same for every class",
        "signed" if method["signed"] else "not signed",
        method["cost"],
    ]
    about = Text(method["name"], style="bold").append(f"  {method['family']}\n", style="not bold dim")
    about.append(method["summary"], style="not bold")
    about.append(f"\n\n{method['citation']}", style="not bold")
    about.append(f"\n{method['link']}" if method["link"] else "", style="not bold blue")
    about.append(f"\n\nPatents (no legal advice): {method['patent']}" if "patent" in method else "", style="not bold")
    about.append(f"\n\n{', '.join(properties)}", style="not bold cyan")
    aggregations = " ".join(f".{name}" for name in method["aggregations"])
    about.append(f"\naggregations: {aggregations}" if aggregations else "", style="not bold cyan")
    return _add_options(about, method)


def _add_options(about: Text, entry: Mapping[str, Any]) -> Text:
    for name, option in entry["options"].items():
        about.append(f"\n\n:{name}={_values(option)}", style="not bold green")
        most = "" if option["most"] is None else f"at most {option['most']:,}"
        details = "; ".join(part for part in (option["help"], most) if part)
        about.append(f"\n    {details}" if details else "", style="not bold dim")
    return about


def _values(option: Mapping[str, Any]) -> str:
    """Return the choices of an option, or its default."""
    default = option["default"]
    if option["choices"] is None:
        return "NUMBER" if default is None else str(default)
    return " | ".join(f"{choice} (default)" if choice == default else choice for choice in option["choices"])
