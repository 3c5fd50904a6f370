"""Write docs/methods.md, the list of all methods, from the registry.

python scripts/write_methods_page.py [--check]
"""

from __future__ import annotations

from pathlib import Path

from generated import first_paragraph, write_or_check

from vitreous.methods import MethodInfo, OptionInfo, list_controls, list_methods
from vitreous.methods.registry import CONTROL_FAMILIES, FAMILIES, options_of
from vitreous.methods.spelling import AGGREGATIONS, OneLayer, Propagate, cost_of

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
INTRODUCTION = """# Methods

Written by `scripts/write_methods_page.py` from the registry; do not edit.

A method is spelled `name[.aggregation...][:option=value,...]`. In the formulas x_l is the input of block l, A its
attention after the softmax (to, from), y_c the logit and p_c the probability of the explained class, ^+ the positive
part, and mean_h the mean over heads. The cost is given for a model with twelve blocks.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for family in (*FAMILIES, *CONTROL_FAMILIES):
        members = [info for info in (*list_methods(), *list_controls()) if info.family == family]
        if members:
            parts.append(f"## {family.capitalize()}\n")
            parts += [_about(info) for info in members]
    parts.append("## Aggregations\n")
    for name, make in {"one layer": OneLayer, **AGGREGATIONS}.items():
        parts.append(f"### {name}\n\n{first_paragraph(make)}\n{_options(options_of(make))}")
    parts.append(f"### propagate\n\n{first_paragraph(Propagate)}\n")
    return "\n".join(parts)


def _about(info: MethodInfo) -> str:
    readout = info.make()
    cost = cost_of(info.name)
    traits = ["depends on the class" if info.class_specific else "the same for every class"]
    traits.append("signed" if info.signed else "not signed")
    follows = " ".join(f"`.{name}`" for name in info.aggregations) or "nothing"
    lines = [
        f"### {info.name}\n",
        info.summary + "\n",
        f"- formula: {first_paragraph(type(readout))}",
        f"- reference: {info.citation} [[{info.citation_key}](bibliography.md#{info.citation_key})]",
        f"- {', '.join(traits)}; cost: {cost.label}{''.join(f' ({each})' for each in cost.passes)}",
        f"- may be followed by {follows}",
    ]
    return "\n".join(lines) + "\n" + _options(info.options)


def _options(options: dict[str, OptionInfo]) -> str:
    lines = []
    for name, option in options.items():
        values = " \\| ".join(option.choices) if option.choices else option.kind.__name__
        default = "" if option.default is None else f", default `{option.default}`"
        lines.append(f"- option `{name}`: {values}{default}{'; ' + option.help if option.help else ''}")
    return "\n".join(lines) + "\n" if lines else ""


def main() -> None:
    """Write the page, or with --check fail if it is not what the registry says."""
    write_or_check(PAGE, page(), "write_methods_page")


if __name__ == "__main__":
    main()
