"""``inspect``: what a run shows of a model's architecture, and which methods work on it.

``supported``: which methods work on a model, and why others do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from vitreous._utils.torch_state import preserves_torch_state
from vitreous.api.explain import black_pixel, declared_outputs, find_recipes, find_wanted, network_of
from vitreous.api.run_methods import run_on_images, target_reader
from vitreous.api.runs import RunSettings, try_methods
from vitreous.architecture import Architecture, find_architecture
from vitreous.architecture.attention import AttentionCall
from vitreous.architecture.description import Block, StreamStage
from vitreous.architecture.evaluation_copy import run_in_evaluation
from vitreous.errors import UnsupportedModelError
from vitreous.inputs.model_io import OutputPart
from vitreous.inputs.targets import One, TargetObjects
from vitreous.methods import list_methods
from vitreous.methods.spelling import Recipe
from vitreous.models import LoadedModel
from vitreous.models.loaded import resolved_outputs
from vitreous.models.loading import called_by
from vitreous.models.pixels import Images, Model, find_model, find_pixels
from vitreous.tape import Layout, Needs, Plan, record
from vitreous.tape.output import OutputReader
from vitreous.tape.runner import EvaluationLimitReached, limited_evaluations

Found = TypeVar("Found")

_EVALUATIONS = 2  # of a method that runs the model again: the first of them show whether it works


@dataclass(frozen=True)
class Supported:
    """Which methods work on a model.

    Attributes:
        methods: spellings of those that work.
        refused: by spelling, why the others do not.
    """

    methods: tuple[str, ...]
    refused: Mapping[str, str] = field(default_factory=dict)

    def __contains__(self, method: object) -> bool:
        """Whether a method works."""
        return method in self.methods

    def __iter__(self) -> Iterator[str]:
        """The methods that work."""
        return iter(self.methods)

    def __len__(self) -> int:
        """How many methods work."""
        return len(self.methods)

    def __str__(self) -> str:
        lines = [f"methods that work: {', '.join(self.methods) or 'none'}"]
        by_reason: dict[str, list[str]] = {}
        for method, reason in self.refused.items():
            by_reason.setdefault(reason, []).append(method)
        lines += [f"not {', '.join(methods)}: {reason}" for reason, methods in by_reason.items()]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {"methods": list(self.methods), "refused": dict(self.refused)}


@preserves_torch_state
def supported(
    model: Model,
    images: Images,
    methods: str | Sequence[str] | None = None,
    target: One | None = None,
    *,
    output: OutputPart | None = None,
    call: Callable[[nn.Module, Tensor], Any] | None = None,
) -> Supported:
    """Find which methods work on a model, by trying them on the first image.

    Args:
        model: what ``explain`` takes.
        images: what ``explain`` takes; the first one is used.
        methods: spellings; ``None`` for all methods there are.
        target: one class, or one target of ``vitreous.targets``; a dense output needs one.
        output: what ``explain`` takes.
        call: what ``explain`` takes.

    Returns:
        The methods that work, and why the others do not. Methods that run the model many times (perturbation) are
        stopped after a few runs.

    Raises:
        InputError: the model does not take the images.

    Examples:
        >>> import vitreous
        >>> found = vitreous.supported(model, "demo.jpg", methods=["gae", "tokentm"])
        >>> "gae" in found, dict(found.refused)
        (True, {})
    """
    return examine_model(model, images, methods, partial(find_supported, target=target, output=output), call)


def examine_model(
    model: Model,
    images: Images,
    methods: str | Sequence[str] | None,
    examine: Callable[[nn.Module, LoadedModel | nn.Module, Tensor, Sequence[Recipe]], Found],
    call: Callable[[nn.Module, Tensor], Any] | None = None,
) -> Found:
    """Call ``examine`` with the network in evaluation mode, the model, its input for one image and the methods."""
    recipes = find_recipes([info.name for info in list_methods()] if methods is None else methods)
    loaded = find_model(model, images)
    network = network_of(loaded)
    if call is not None:
        network = called_by(network, call)
    pixels, _ = find_pixels(loaded, network, images)
    return run_in_evaluation(network, lambda copy: examine(copy, loaded, pixels[:1], recipes))


def find_supported(
    network: nn.Module,
    loaded: LoadedModel | nn.Module,
    pixels: Tensor,
    recipes: Sequence[Recipe],
    *,
    target: One | None = None,
    output: OutputPart | None = None,
) -> Supported:
    """Find which methods work on a network in evaluation mode, given the input for one image."""
    by_spelling = {recipe.spelling: recipe for recipe in recipes}
    network, wanted = find_wanted(loaded, network, pixels, target, None, output)
    outputs = resolved_outputs(network, declared_outputs(loaded))
    settings = RunSettings(black_pixel(loaded, pixels), outputs=outputs, reader=OutputReader(output))
    reader = settings.reader
    if isinstance(wanted, TargetObjects):
        reader = target_reader(network, pixels, wanted, settings)
    try:
        architecture = find_architecture(network, pixels)
        with record(network, architecture, pixels, Plan(architecture.depth, Needs()), reader):
            pass
    except UnsupportedModelError as error:  # of no method in particular: none of them has to be tried
        return Supported((), dict.fromkeys(by_spelling, str(error)))

    def run(spellings: list[str]) -> None:
        some = [by_spelling[spelling] for spelling in spellings]
        with _a_few_evaluations():
            run_on_images(network, pixels, some, wanted, None, settings)

    # One that is stopped would stop those that it runs together with.
    groups = [[name for name, recipe in by_spelling.items() if not recipe.readout.runs_again]]
    groups += [[name] for name, recipe in by_spelling.items() if recipe.readout.runs_again]
    reasons: dict[str, str] = {}
    for group in groups:
        reasons |= try_methods(run, group).reasons
    refused = {name: reasons[name] for name in by_spelling if name in reasons}
    return Supported(tuple(name for name in by_spelling if name not in refused), refused)


@contextmanager
def _a_few_evaluations() -> Iterator[None]:
    """Stop a method that works after a few further runs of the model."""
    try:
        with limited_evaluations(_EVALUATIONS):
            yield
    except EvaluationLimitReached:
        pass


_SPELLINGS = {"fused": "fused", "multi_head": "multi-head", "written": "written out"}
_LISTED = 4  # tokens that are listed one by one


@dataclass(frozen=True)
class InspectedAttention:
    """One attention call.

    Attributes:
        spelling: how it is written: ``fused`` (scaled_dot_product_attention), ``multi-head``
            (multi_head_attention_forward), or ``written out`` as products and a softmax.
        step: the step of the run that gives its output.
        queries: how many tokens look.
        keys: how many tokens each of them looks at.
        heads: how many heads it has; ``None`` if they cannot be distinguished from windows.
        windows: in how many windows tokens attend to each other; 1 where all tokens do.
    """

    spelling: str
    step: int
    queries: int
    keys: int
    heads: int | None
    windows: int

    def __str__(self) -> str:
        heads = "" if self.heads is None else f", {self.heads} head{'s' if self.heads > 1 else ''}"
        windows = f", {self.windows} windows" if self.windows > 1 else ""
        return f"{self.spelling} {self.queries} x {self.keys}{heads}{windows}"


@dataclass(frozen=True)
class InspectedBlock:
    """One transformer block.

    Attributes:
        name: the dotted name of the module that the block is; empty where it is none.
        module: that module's class; empty where it is none.
        steps: the first and the last step of the run that belong to it.
        norms: where its norms stand: ``pre``, ``post`` or ``branch`` (behind a branch, before the sum).
        attention: its attention calls.
        output_projection: whether W_O, from the heads to the stream, is known.
        value_weights: whether W_V, from the first norm to the values, is known.
        one_sum: whether attention and feed-forward part are added at once.
    """

    name: str
    module: str
    steps: tuple[int, int]
    norms: str
    attention: tuple[InspectedAttention, ...]
    output_projection: bool
    value_weights: bool
    one_sum: bool


@dataclass(frozen=True)
class InspectedStage:
    """The residual stream while it has one size.

    Attributes:
        grid: the sizes of the axes of its tokens; a single one where they lie in one row.
        tokens: how many tokens it has.
        channels: how many channels a token has.
        blocks: its blocks.
    """

    grid: tuple[int, ...]
    tokens: int
    channels: int
    blocks: tuple[InspectedBlock, ...]


@dataclass(frozen=True)
class Inspection:
    """What a run of a model shows.

    Attributes:
        name: the model's class.
        image_size: height and width of its input; of a volume or clip all lengths of the tensor but the batch's.
        steps: how many steps the run has.
        stages: the stages of its residual stream, in order; a plain Vision Transformer has one.
        stage: the index of the stage that methods read.
        patch_grid: rows and columns of patches, behind the depth of a volume; ``None`` where they do not show.
        prefix_tokens: how many tokens (class, distillation, registers) stand before the patches.
        pooling: in words, which tokens the head reads.
        read_tokens: the numbers of these tokens.
        problem: why patches or the tokens that the head reads do not show, where they do not.
        supported: which methods work, and why others do not.
    """

    name: str
    image_size: tuple[int, ...]
    steps: int
    stages: tuple[InspectedStage, ...]
    stage: int
    patch_grid: tuple[int, ...] | None
    prefix_tokens: int | None
    pooling: str | None
    read_tokens: tuple[int, ...]
    problem: str | None
    supported: Supported

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        found = asdict(self)
        found["supported"] = self.supported.as_dict()
        return found

    def __str__(self) -> str:
        size = " x ".join(map(str, self.image_size))
        what = f"images of {size} pixels" if len(self.image_size) == 2 else f"volumes or clips of {size} numbers"
        lines = [f"{self.name}, {what}, {self.steps} steps"]
        for number, stage in enumerate(self.stages):
            grid = " x ".join(map(str, stage.grid))
            read = ", read by methods" if number == self.stage and len(self.stages) > 1 else ""
            tokens = f"{stage.tokens} tokens" if len(stage.grid) == 1 else f"{grid} = {stage.tokens} tokens"
            lines += ["", f"stage {number}: {tokens} of {stage.channels} channels, {_count(stage.blocks)}{read}"]
            lines += [f"  {line}" for line in _table(stage.blocks)]
        lines.append("")
        if self.patch_grid is not None:
            lines.append(f"patch grid: {' x '.join(map(str, self.patch_grid))}")
            lines.append(f"prefix tokens: {self.prefix_tokens}")
            lines.append(f"pooling: {self.pooling}")
        if self.problem is not None:
            lines.append(f"problem: {self.problem}")
        return "\n".join([*lines, "", str(self.supported)])


@preserves_torch_state
def inspect(model: Model, images: Images, methods: str | Sequence[str] | None = None) -> Inspection:
    """Show what is seen of a model in a run: its residual stream, blocks, attention calls and patches.

    Args:
        model: what ``explain`` takes.
        images: what ``explain`` takes; the first one is used.
        methods: which methods are tried; ``None`` for all there are.

    Returns:
        What was seen; ``print`` shows it as text, ``as_dict`` gives JSON values.

    Raises:
        UnsupportedModelError: there is no residual stream of tokens.
        InputError: the model does not take the images.

    Examples:
        >>> import vitreous
        >>> found = vitreous.inspect(model, "demo.jpg", methods=["gae", "rollout"])
        >>> len(found.as_dict()["stages"])
        1
        >>> print(found)  # doctest: +SKIP
    """
    return examine_model(model, images, methods, _inspect)


def _inspect(
    network: nn.Module, loaded: LoadedModel | nn.Module, pixels: Tensor, recipes: Sequence[Recipe]
) -> Inspection:
    architecture = find_architecture(network, pixels)
    layout, problem = _layout(network, architecture, pixels)
    return Inspection(
        name=architecture.name,
        image_size=tuple(pixels.shape[-2:] if pixels.dim() == 4 else pixels.shape[1:]),
        steps=len(architecture.operations),
        stages=tuple(_stage(stage, architecture.batch) for stage in architecture.stages),
        stage=architecture.stage,
        patch_grid=None if layout is None else layout.grid,
        prefix_tokens=None if layout is None else layout.prefix,
        pooling=None if layout is None else _pooling(layout),
        read_tokens=() if layout is None else tuple(layout.read.tolist()),
        problem=problem,
        supported=find_supported(network, loaded, pixels, recipes),
    )


def _layout(network: nn.Module, architecture: Architecture, pixels: Tensor) -> tuple[Layout | None, str | None]:
    """How tokens are laid out, or why that does not show."""
    try:
        with record(network, architecture, pixels, Plan(architecture.depth, Needs())) as tape:
            return tape.layout, None
    except UnsupportedModelError as error:
        return None, str(error)


def _stage(stage: StreamStage, batch: int) -> InspectedStage:
    blocks = tuple(_block(block, stage.tokens, batch) for block in stage.blocks)
    return InspectedStage(stage.grid, stage.tokens, stage.channels, blocks)


def _block(block: Block, tokens: int, batch: int) -> InspectedBlock:
    return InspectedBlock(
        name=block.name,
        module="" if block.module is None else type(block.module).__name__,
        steps=(block.input.step + 1, block.output.step),
        norms=block.norm_place,
        attention=tuple(_attention(call, tokens, batch) for call in block.attention),
        output_projection=bool(block.head_paths),
        value_weights=bool(block.value_maps),
        one_sum=block.one_sum,
    )


def _attention(call: AttentionCall, tokens: int, batch: int) -> InspectedAttention:
    in_windows = call.queries == call.keys and tokens > call.queries and tokens % call.queries == 0
    windows = tokens // call.queries if in_windows else 1
    heads, rest = divmod(call.rows, batch * windows)
    known = rest == 0 and heads > 0
    return InspectedAttention(
        spelling=_SPELLINGS[call.spelling],
        step=call.output_step,
        queries=call.queries,
        keys=call.keys,
        heads=heads if known else None,
        windows=windows if known else 1,
    )


def _pooling(layout: Layout) -> str:
    """Which tokens the head reads."""
    if layout.pooling_queries is not None:
        count = len(layout.pooling_queries)
        return f"attention behind the last block, {count} quer{'ies' if count > 1 else 'y'}"
    if not layout.alike:
        return "other tokens of each image"
    read = set(layout.read.tolist())
    prefix, tokens = set(range(layout.prefix)), set(range(layout.tokens))
    if read == tokens:
        return "all tokens"
    if read == tokens - prefix:
        return "all patches"
    if read == {0} and prefix:
        return "class token"
    listed = ", ".join(map(str, sorted(read)[:_LISTED]))
    kind = "prefix tokens" if read <= prefix else "tokens"
    return f"{kind} {listed}{' and others' if len(read) > _LISTED else ''}"


def _count(blocks: Sequence[InspectedBlock]) -> str:
    return f"{len(blocks)} block{'s' if len(blocks) != 1 else ''}"


def _table(blocks: Sequence[InspectedBlock]) -> list[str]:
    """A line for every block, in columns."""
    rows: list[tuple[str, ...]] = [("block", "steps", "module", "norms", "attention", "W_O", "W_V")]
    for number, block in enumerate(blocks):
        module = f"{block.name} ({block.module})" if block.module and block.name else block.module or "-"
        calls = "; ".join(map(str, block.attention)) or "none"
        projection, values = ("yes" if one else "no" for one in (block.output_projection, block.value_weights))
        first, last = block.steps
        rows.append((str(number), f"{first}-{last}", module, block.norms, calls, projection, values))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
