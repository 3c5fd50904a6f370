"""The method registry: ``@register`` declares a method with its paper, properties and options.

Options are annotated keyword arguments, parsed from text.
"""

from __future__ import annotations

import inspect
import math
import re
import types
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints
from urllib.parse import quote_plus

from vitreous._utils.messages import close_match, source_hash
from vitreous.errors import MethodError
from vitreous.methods.readout import MatrixReadout, Procedure, Readout, RuleName
from vitreous.tape.rules import own_rules

if TYPE_CHECKING:
    from vitreous.methods.spelling import Cost


_LARGEST = 2**63  # torch takes 64-bit integers as seeds and counts


class AlsoOwnRules:
    """Annotation: registered user rules are valid values, too."""


# The rule option, for methods that read the attention's gradient and for those that read the stream's.
RuleOption = Annotated[RuleName, "how the backward pass treats attention, norms and activations", AlsoOwnRules()]
StreamRuleOption = Annotated[
    Literal["plain", "frozen", "libra", "attnlrp", "conservative"],
    "how the backward pass treats attention, norms and activations; under residual no gradient would reach the patches",
    AlsoOwnRules(),
]


@dataclass(frozen=True)
class AtMost:
    """Annotation: the largest value of an option that determines the cost of a method.

    Attributes:
        value: the bound, far above practical values and still feasible.
    """

    value: int


MOST_EVALUATIONS = AtMost(100_000)  # forward passes for one image


@dataclass(frozen=True)
class OptionInfo:
    """One option: its default, its choices (``None``: any value of ``kind``) and a line of help.

    Attributes:
        own_rules: whether registered user rules are valid values, too.
        most: the largest value, if the option determines the cost of the method.
    """

    default: Any
    choices: tuple[str, ...] | None
    help: str
    kind: type
    most: int | None = None
    own_rules: bool = False

    def convert(self, name: str, text: str) -> Any:
        """Parse a value from text."""
        if self.choices is not None:
            choices = (*self.choices, *own_rules()) if self.own_rules else self.choices
            if text not in choices:
                reason = f" ({self.help})" if self.help else ""
                raise MethodError(
                    f"{name}={text} is not one of {', '.join(choices)}{close_match(text, choices)}{reason}"
                )
            return text
        try:
            value = self.kind(text)
        except ValueError:
            raise MethodError(f"{name}={text} is not {'a whole number' if self.kind is int else 'a number'}") from None
        # No option needs infinity: a large number has the same effect.
        if isinstance(value, float) and not math.isfinite(value):
            raise MethodError(f"{name}={text} is not a finite number")
        if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
            raise MethodError(f"{name}={text} is out of range: whole numbers have 64 bits")
        if self.most is not None and value > self.most:
            raise MethodError(f"{name}={text} is more than {self.most:,}, the most that {name} may be")
        return value


def options_of(function: Callable[..., Any]) -> Mapping[str, OptionInfo]:
    """Return the options declared by the keyword arguments of a function."""
    hints = get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)
    parameters = inspect.signature(function).parameters
    return {name: _option(hints[name], parameter.default) for name, parameter in parameters.items()}


def _option(hint: Any, default: Any) -> OptionInfo:
    explanation, most, also_own = "", None, False
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        explanation = next((note for note in notes if isinstance(note, str)), "")
        most = next((note.value for note in notes if isinstance(note, AtMost)), None)
        also_own = any(isinstance(note, AlsoOwnRules) for note in notes)
    if get_origin(hint) is Literal:
        return OptionInfo(default, get_args(hint), explanation, str, own_rules=also_own)
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(kind for kind in get_args(hint) if kind is not types.NoneType)
    return OptionInfo(default, None, explanation, hint, most)


ReadoutMaker = Callable[..., Readout]


@dataclass(frozen=True)
class Patent:
    """What the authors of a method state about patents, with sources. Not legal advice.

    Attributes:
        statement: one or two sentences.
        sources: where the authors say so, and the patents.
    """

    statement: str
    sources: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.statement} Sources: {'; '.join(self.sources)}."


LRP_PATENT = Patent(
    "It propagates relevance by rules of LRP. The authors of AttnLRP, some of whom are authors of LRP, call LRP a "
    "patented technology that is free of charge for personal and scientific purposes only; the licence of their code "
    "grants no patent rights.",
    (
        "README and LICENSE (Clear BSD) of lxt 2.1 (LRP eXplains Transformers, by the authors of AttnLRP)",
        "LICENSE of the LRP toolbox (2017, by the authors of LRP): free for academic use only, patent pending",
        "WO 2016/150472, Relevance score assignment for artificial neural networks (Fraunhofer, TU Berlin)",
        "US 12,061,966 B2 (2024)",
        "EP 3 271 863 B1",
        "CA 2,979,579 (2020)",
    ),
)


@dataclass(frozen=True)
class MethodInfo:
    """The registry entry of a method.

    Attributes:
        name: Spelling of the method.
        family: One of ``FAMILIES`` or ``CONTROL_FAMILIES``.
        summary: What the map shows, in one sentence.
        paper: Authors and title of the paper.
        year: Year of publication.
        class_specific: Whether the map depends on the explained class.
        signed: Whether the sign of the scores carries meaning.
        aggregations: Aggregations that may follow the name.
        options: Options of the method itself.
        default_aggregation: How layers are combined when the spelling does not say.
        default_layer: The layer that is read when layers are not combined.
        arxiv: arXiv number of the paper.
        doi: DOI of the paper.
        url: Address of the paper when it has neither.
        note: How the method relates to the paper, such as the name it has there.
        bf16: Spellings whose maps rank patches in bfloat16 as they do in float32.
        own_patent: What is known of patents on it, where that does not follow from its rules; see ``patent``.

    Examples:
        >>> import vitreous
        >>> info = next(info for info in vitreous.list_methods() if info.name == "gae")
        >>> info.family, info.year, info.arxiv, info.cost.label
        ('attention', 2021, '2103.15679', 'forward + backward')
    """

    name: str
    family: str
    summary: str
    paper: str
    year: int
    class_specific: bool
    signed: bool
    aggregations: tuple[str, ...]
    options: Mapping[str, OptionInfo]
    default_aggregation: str | None
    default_layer: int
    make: ReadoutMaker
    arxiv: str | None = None
    doi: str | None = None
    url: str | None = None
    note: str = ""
    bf16: tuple[str, ...] = ()
    own_patent: Patent | None = None

    @property
    def patent(self) -> Patent | None:
        """What is known of patents on the method: declared, or because it propagates by rules of LRP."""
        from vitreous.methods.spelling import patent_of  # noqa: PLC0415  # spellings are parsed with this registry

        return patent_of(self.name)

    @property
    def link(self) -> str:
        """Address of the paper, or of a search for its title when no address is known."""
        if self.arxiv:
            return f"https://arxiv.org/abs/{self.arxiv}"
        if self.doi:
            return f"https://doi.org/{self.doi}"
        return self.url or f"https://scholar.google.com/scholar?q={quote_plus(self.paper)}"

    @property
    def citation(self) -> str:
        """Paper, year and note, as reports print them."""
        return f"{self.paper}, {self.year}" + (f" ({self.note})" if self.note else "")

    @property
    def citation_key(self) -> str:
        """Key of the paper in the bibliography: first author, year and first word of the title."""
        authors, _, title = self.paper.partition(", ")
        plain = unicodedata.normalize("NFKD", authors.lower()).encode("ascii", "ignore").decode()
        author = re.split(r"\W", plain)[0]
        words = [word for word in re.findall(r"[a-z0-9]+", title.lower()) if word not in _SHORT_WORDS]
        return f"{author}{self.year}{words[0] if words else ''}"

    @property
    def cost(self) -> Cost:
        """Passes that the method takes, derived from what its read-out declares to need."""
        from vitreous.methods.spelling import cost_of  # noqa: PLC0415  # spellings are parsed with this registry

        return cost_of(self.name)

    @property
    def written(self) -> Callable[..., object]:
        """The function or class in source code: for a plugin, the decorated function."""
        return _written(self.make)

    @property
    def is_control(self) -> bool:
        """Whether it is a control or a ceiling, which is listed with the methods but not ranked."""
        return self.family in CONTROL_FAMILIES

    @property
    def is_own(self) -> bool:
        """Whether it is a plugin, not a method of this package."""
        return _package(self.written) != _PACKAGE

    @property
    def has_layers(self) -> bool:
        """Whether it can be read at one layer or combined over several."""
        return self.layers_stand_alone or "rollout" in self.aggregations

    @property
    def layers_stand_alone(self) -> bool:
        """Whether one layer is a map by itself, and so is a sum of layers."""
        return "plus" in self.aggregations


FAMILIES = ("attention", "gradient", "cam", "relevance", "decomposition", "perturbation", "plugin")
# Rows that tables are read by, and that explain nothing: what any method must beat, and about the most it can reach.
CONTROL_FAMILIES = ("control", "ceiling")

_PACKAGE = "vitreous"
_SHORT_WORDS = frozenset({"a", "an", "on", "the"})
_methods: dict[str, MethodInfo] = {}


def register(
    name: str,
    *,
    family: str,
    paper: str,
    year: int,
    class_specific: bool,
    signed: bool,
    arxiv: str | None = None,
    doi: str | None = None,
    url: str | None = None,
    note: str = "",
    bf16: tuple[str, ...] = (),
    patent: Patent | None = None,
    aggregation: str | None = None,
    layer: int = 0,
    propagates: bool = False,
) -> Callable[[ReadoutMaker], ReadoutMaker]:
    """Register a function that turns options into a read-out. The first line of its docstring is the summary.

    The cost is not declared: it follows from the read-out's own needs, see ``MethodInfo.cost``.

    Args:
        name: Spelling of the method.
        family: One of ``FAMILIES`` or ``CONTROL_FAMILIES``.
        paper: ``"Authors, Title"``.
        year: Year of publication.
        class_specific: Whether the map depends on the explained class.
        signed: Whether the sign of the scores carries meaning.
        arxiv: arXiv number of the paper.
        doi: DOI of a paper that is not on arXiv.
        url: Address of a paper that has neither.
        note: How the method relates to the paper.
        bf16: Spellings that keep the order of patches in bfloat16, as measured by
            ``benchmarks/precision_and_compile.py``.
        patent: What is known of patents on it; of methods that use rules of LRP it is known without.
        aggregation: How layers are combined when the spelling does not say; ``None`` reads ``layer`` alone.
        layer: The layer that is read when layers are not combined.
        propagates: Whether the map is already propagated by attention, so that ``.propagate`` would do it twice.
    """
    families = (*FAMILIES, *CONTROL_FAMILIES)
    if family not in families:
        raise MethodError(f"family {family!r} is not one of {', '.join(families)}")

    def enter(make: ReadoutMaker) -> ReadoutMaker:
        if name in _methods and not _same_place(_methods[name].make, make):
            raise MethodError(f"there is a method {name!r} already")
        readout = make()
        aggregations = ["rollout"] if isinstance(readout, MatrixReadout) else []
        whole = isinstance(readout, Procedure) or (isinstance(readout, MatrixReadout) and readout.only_as_product)
        aggregations += [] if whole else ["plus", "skipplus"]
        if aggregation is not None and aggregation not in aggregations:
            raise MethodError(
                f"the method {name!r}: aggregation {aggregation!r} is not one of {', '.join(aggregations) or 'none'}"
                f"{close_match(aggregation, aggregations)}"
            )
        aggregations += [] if propagates else ["propagate"]
        _methods[name] = MethodInfo(
            name=name,
            family=family,
            summary=(make.__doc__ or "").strip().splitlines()[0],
            paper=paper,
            year=year,
            class_specific=class_specific,
            signed=signed,
            aggregations=tuple(aggregations),
            options=options_of(make),
            default_aggregation=aggregation,
            default_layer=layer,
            make=make,
            arxiv=arxiv,
            doi=doi,
            url=url,
            note=note,
            bf16=bf16,
            own_patent=patent,
        )
        return make

    return enter


def own_code(spelled: Iterable[str]) -> dict[str, str]:
    """Return the plugins among some methods, each with the hash of its code."""
    infos = {name: method_info(name) for name in spelled}
    return {name: source_hash(info.written) for name, info in infos.items() if info.is_own}


def _same_place(before: ReadoutMaker, now: ReadoutMaker) -> bool:
    """Whether a method is defined where it was before: a plugin file or a notebook cell that runs again."""
    one, other = _written(before), _written(now)
    if one.__module__ != other.__module__ or _package(other) == _PACKAGE:
        return False
    # Each cell of a notebook is a file of its own.
    return other.__module__ == "__main__" or inspect.getfile(one) == inspect.getfile(other)


def _written(make: ReadoutMaker) -> Callable[..., object]:
    """Return the function in source code: for a plugin, the decorated one."""
    written: Callable[..., object] = getattr(make, "written", make)
    return written


def _package(written: Callable[..., object]) -> str:
    """Return the package that defines a function; empty for functions made by ``exec``."""
    return (getattr(written, "__module__", None) or "").partition(".")[0]


def method_info(name: str) -> MethodInfo:
    """Return the registry entry of a method."""
    if name not in _methods:
        hint = close_match(name, _methods) or "; `vitreous methods` lists them"
        raise MethodError(f"there is no method {name!r}{hint}")
    return _methods[name]


def list_methods(*, patents: bool = True) -> list[MethodInfo]:
    """List all methods, in the order of families; for controls and ceilings see ``list_controls``.

    Args:
        patents: False leaves out methods that their authors call patented, see ``MethodInfo.patent``. Nothing is known
            about the others; this is not legal advice.

    Examples:
        >>> import vitreous
        >>> [info.name for info in vitreous.list_methods() if info.family == "attention"][:3]
        ['raw_attention', 'rollout', 'attcam']
        >>> "attnlrp" in [info.name for info in vitreous.list_methods(patents=False)]
        False
    """
    explaining = [info for info in _methods.values() if info.family in FAMILIES and (patents or info.patent is None)]
    return sorted(explaining, key=lambda info: FAMILIES.index(info.family))


def is_control(spelling: str) -> bool:
    """Whether a spelling is that of a control or a ceiling; one that is not registered is a method."""
    name = re.split(r"[.:]", spelling.strip(), maxsplit=1)[0]
    return name in _methods and _methods[name].is_control


def list_controls() -> list[MethodInfo]:
    """List the controls (``random``, ``centre``, ``edges``) and the ceilings (``oracle``, ``mda``, ``lima``).

    They are spelled like methods and stand in every evaluation, but ``list_methods`` leaves them out.

    Examples:
        >>> from vitreous.methods import list_controls
        >>> [info.name for info in list_controls() if info.family == "control"]
        ['random', 'centre', 'edges']
        >>> [info.name for info in list_controls() if info.family == "ceiling"]
        ['mda', 'lima', 'oracle']
    """
    apart = [info for info in _methods.values() if info.family in CONTROL_FAMILIES]
    return sorted(apart, key=lambda info: CONTROL_FAMILIES.index(info.family))
