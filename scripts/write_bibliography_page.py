"""Write docs/bibliography.md: the papers of all methods, from the registry, and those of metrics and protocols.

python scripts/write_bibliography_page.py [--check]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from generated import write_or_check

from vitreous.methods import MethodInfo, list_controls, list_methods

PAGE = Path(__file__).parents[1] / "docs" / "bibliography.md"
INTRODUCTION = """# Bibliography

Written by `scripts/write_bibliography_page.py` from the method registry; do not edit.

Docstrings and pages cite papers by the keys below: first author, year, first word of the title.
"""


@dataclass
class Entry:
    """A paper: key, authors and title, year, address and its text, and the methods that it proposes."""

    key: str
    paper: str
    year: int
    link: str
    link_text: str
    methods: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        authors, _, title = self.paper.partition(", ")
        used = ", ".join(f"[`{name}`](methods.md#{name})" for name in self.methods)
        about = f" Methods: {used}." if used else ""
        link = f"[{self.link_text}]({self.link})"
        return f"### {self.key}\n\n{authors.removesuffix('.')}. *{title}*. {self.year}. {link}.{about}\n"


def _arxiv(key: str, paper: str, year: int, number: str) -> Entry:
    return Entry(key, paper, year, f"https://arxiv.org/abs/{number}", f"arXiv:{number}")


# Papers that propose no method of the registry: metrics, protocols, rules and data sets.
OTHERS = (
    _arxiv(
        "arras2022clevr",
        "Arras et al., CLEVR-XAI: A Benchmark Dataset for the Ground Truth Evaluation of Neural Network Explanations",
        2022,
        "2003.07258",
    ),
    _arxiv(
        "bhatt2020evaluating",
        "Bhatt et al., Evaluating and Aggregating Feature-based Model Explanations",
        2020,
        "2005.00631",
    ),
    _arxiv(
        "bohle2021convolutional",
        "Böhle et al., Convolutional Dynamic Alignment Networks for Interpretable Classifications",
        2021,
        "2104.00032",
    ),
    _arxiv(
        "chalasani2020concise",
        "Chalasani et al., Concise Explanations of Neural Networks using Adversarial Training",
        2020,
        "1810.06583",
    ),
    _arxiv(
        "deyoung2020eraser",
        "DeYoung et al., ERASER: A Benchmark to Evaluate Rationalized NLP Models",
        2020,
        "1911.03429",
    ),
    _arxiv(
        "dosovitskiy2021image",
        "Dosovitskiy et al., An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale",
        2021,
        "2010.11929",
    ),
    _arxiv(
        "hedstrom2024sanity",
        "Hedström et al., Sanity Checks Revisited: An Exploration to Repair the Model Parameter Randomisation Test",
        2024,
        "2401.06465",
    ),
    _arxiv(
        "hesse2024benchmarking",
        "Hesse et al., Benchmarking the Attribution Quality of Vision Models",
        2024,
        "2407.11910",
    ),
    _arxiv("jiang2025vision", "Jiang et al., Vision Transformers Don't Need Trained Registers", 2025, "2506.08010"),
    _arxiv(
        "nguyen2020quantitative",
        "Nguyen and Martínez, On quantitative aspects of model interpretability",
        2020,
        "2007.07584",
    ),
    _arxiv(
        "rong2022consistent",
        "Rong et al., A Consistent and Efficient Evaluation Strategy for Attribution Methods",
        2022,
        "2202.00449",
    ),
    _arxiv(
        "sixt2020explanations",
        "Sixt et al., When Explanations Lie: Why Many Modified BP Attributions Fail",
        2020,
        "1912.09818",
    ),
    _arxiv(
        "wu2024faithfulness", "Wu et al., On the Faithfulness of Vision Transformer Explanations", 2024, "2404.01415"
    ),
    Entry(
        "wang2004image",
        "Wang et al., Image Quality Assessment: From Error Visibility to Structural Similarity",
        2004,
        "https://doi.org/10.1109/TIP.2003.819861",
        "doi:10.1109/TIP.2003.819861",
    ),
    _arxiv("yeh2019infidelity", "Yeh et al., On the (In)fidelity and Sensitivity of Explanations", 2019, "1901.09392"),
    _arxiv("zhang2016top", "Zhang et al., Top-down Neural Attention by Excitation Backprop", 2016, "1608.00507"),
)


def page() -> str:
    """Give the whole page."""
    entries = {entry.key: entry for entry in (*_of_methods([*list_methods(), *list_controls()]), *OTHERS)}
    return "\n".join([INTRODUCTION, *(str(entries[key]) for key in sorted(entries))])


def _of_methods(infos: Iterable[MethodInfo]) -> list[Entry]:
    found: dict[str, Entry] = {}
    for info in infos:
        if info.is_own:
            continue
        entry = found.setdefault(
            info.citation_key, Entry(info.citation_key, info.paper, info.year, info.link, _link_text(info))
        )
        if (entry.paper, entry.link) != (info.paper, info.link):
            raise SystemExit(f"{info.name}: two papers have the key {info.citation_key}")
        entry.methods.append(info.name)
    return list(found.values())


def _link_text(info: MethodInfo) -> str:
    if info.arxiv:
        return f"arXiv:{info.arxiv}"
    return f"doi:{info.doi}" if info.doi else "paper" if info.url else "search"


def main() -> None:
    """Write the page, or with --check fail if it is not what the registry says."""
    write_or_check(PAGE, page(), "write_bibliography_page")


if __name__ == "__main__":
    main()
