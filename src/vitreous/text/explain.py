"""``explain_text``: explain a text classifier with the same methods, rules and read-outs as for images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitreous._utils.defaults import PAPERS
from vitreous._utils.messages import warn_caller
from vitreous._utils.torch_state import preserves_torch_state
from vitreous.api.explain import find_recipes, run_allowed
from vitreous.api.run_methods import concatenate_results, run_in_portions, run_methods, run_target_objects
from vitreous.api.runs import RawResult, RunSettings
from vitreous.architecture.evaluation_copy import run_in_evaluation
from vitreous.errors import InputError, TargetError
from vitreous.explanation.folder import collect_provenance
from vitreous.inputs.model_io import OutputActivation, check_outputs
from vitreous.inputs.target import OriginalRun, Target, TargetContext, class_indices
from vitreous.inputs.target_objects import parse_targets
from vitreous.inputs.targets import AnyTarget, TargetObjects, Targets, find_objects, find_targets, part_of
from vitreous.inputs.texts import Reader, TokenizedText
from vitreous.methods.spelling import Recipe
from vitreous.models.hf_models import LoadedTextModel, class_names_of, load_text_model
from vitreous.models.loaded import with_outputs
from vitreous.tape.runner import ModelRunner
from vitreous.text.explanation import TextExplanation

TextModel = str | LoadedTextModel | tuple[nn.Module, Any]
# Maximum number of tokens per batch, padding included: about as many as 16 images have. The graph of a model of BERT's
# size then fits into 2 GB.
_TOKENS_AT_ONCE = 4096


@preserves_torch_state
def explain_text(
    model: TextModel,
    texts: str | Sequence[str],
    methods: str | Sequence[str] | None = None,
    target: AnyTarget = None,
    *,
    topk: int | None = None,
    outputs: OutputActivation | None = None,
    windows: bool = False,
) -> TextExplanation:
    """Explain the predictions of a text classifier.

    Args:
        model: ``demo-text``, ``hf/ID`` or ``hf/FOLDER``, a model from ``load_text_model``, or a pair of model and
            tokenizer.
        texts: one text or several. A text that exceeds the model's maximum length is truncated, with a warning.
        methods: method spellings, ``name[.aggregation...][:option=value,...]``, as for images. ``None`` for tokentm,
            gradtoken and decompx.skipplus; those that the model does not support are omitted with a warning.
        target: the class to explain: ``None`` for the predicted one, one for all texts, one per text ``(batch,)``, or
            several per text ``(batch, k)``; by index, or by name if the class names are known. Or what else is
            explained: a contrast ``"positive vs negative"`` or any target of ``vitreous.targets`` that reads the output
            of the model.
        topk: instead of ``target``, the k most likely classes of each text.
        outputs: what the model outputs, as in ``explain``: ``logits``, ``probabilities``, ``sigmoid`` or ``value``;
            ``None`` to read the configuration. Probabilities are detected, with a warning.
        windows: explain long texts in windows that overlap by half. The logits are the mean over windows, and the score
            of a word piece is the mean over the windows that contain it.

    Returns:
        Raw signed scores of every word piece for every method. Scores of the class token and other special tokens are
        dropped.

    Examples:
        >>> import vitreous
        >>> explanation = vitreous.explain_text("hf/text-model", "not a good film", "decompx")
        >>> [word.text for word in explanation.words[0]]
        ['not', 'a', 'good', 'film']
        >>> explanation.word_scores("decompx").shape
        torch.Size([4])
    """
    recipes = find_recipes(PAPERS if methods is None else methods)
    check_outputs(outputs)
    loaded = with_outputs(find_text_model(model), outputs)
    given = several_texts(texts)
    wanted = _find_wanted(loaded, target, topk, len(given))
    read = [_fitted(loaded.reader, text, number, windows=windows) for number, text in enumerate(given)]
    return explain_pieces(loaded, read, recipes, wanted, topk, optional=methods is None, windows=windows)


def _find_wanted(loaded: LoadedTextModel, target: Any, topk: int | None, texts: int) -> AnyTarget | TargetObjects:
    """The classes or prepared targets that are explained."""
    target = parse_targets(target, lambda: loaded.class_names)
    objects = find_objects(target, texts, "text")
    if objects is None:
        classes: AnyTarget = class_indices(target, lambda: loaded.class_names)
        return classes
    if topk is not None:
        raise TargetError("give a target or topk, not both")
    if objects.module(loaded.model) is not loaded.model:
        raise TargetError("a prompt is compared with an image, not with a text")

    def refuse(_picture: Any) -> Any:
        raise TargetError("a text classifier does not embed pictures: give an embedding as the reference")

    return objects.prepared(TargetContext(loaded, loaded.model, torch.empty(0), lambda: loaded.class_names, refuse))


def explain_pieces(
    loaded: LoadedTextModel,
    read: Sequence[TokenizedText],
    recipes: list[Recipe],
    target: AnyTarget | TargetObjects,
    topk: int | None = None,
    *,
    optional: bool = False,
    **provenance: Any,
) -> TextExplanation:
    """Explain tokenized texts; if ``optional``, unsupported methods are omitted with a warning."""
    recipes, (found, family, scale), left_out = run_allowed(
        lambda tried: explain_read(loaded, read, tried, target, topk), recipes, optional=optional
    )
    objects = tuple(dict.fromkeys(each for result in found for each in result.objects))
    values = [result.values for result in found if result.values is not None]
    return TextExplanation(
        texts=tuple(text.text for text in read),
        pieces=tuple(text.pieces for text in read),
        words=tuple(text.words for text in read),
        scores={recipe.spelling: tuple(result.scores[recipe.spelling] for result in found) for recipe in recipes},
        target=torch.stack([result.numbered(objects) for result in found]),
        logits=torch.stack([result.logits for result in found]),
        signed={recipe.spelling: recipe.signed for recipe in recipes},
        class_names=loaded.class_names,
        provenance=_provenance(loaded, recipes, family, **provenance),
        scale=scale,
        left_out=left_out,
        targets=objects,
        target_values=torch.stack(values) if values else None,
    )


@dataclass(frozen=True)
class Result:
    """The result for one text.

    Attributes:
        logits: the model's output, (classes,).
        target: the explained classes, () or (k,).
        scores: scores of the word pieces by method spelling, (pieces,) or (k, pieces).
        objects: the targets of its batch that are not classes; in ``target`` they follow the classes in this order.
        values: the number explained of each target, in the shape of ``target``, where targets are objects.
    """

    logits: Tensor
    target: Tensor
    scores: dict[str, Tensor]
    objects: tuple[Target, ...] = ()
    values: Tensor | None = None

    def numbered(self, objects: Sequence[Target]) -> Tensor:
        """The explained targets, by the numbers that objects have among those of all texts."""
        if not self.objects:
            return self.target
        classes = len(self.logits)
        numbers = [*range(classes), *(classes + objects.index(each) for each in self.objects)]
        return torch.tensor(numbers, device=self.target.device)[self.target]


def explain_read(
    loaded: LoadedTextModel,
    read: Sequence[TokenizedText],
    recipes: list[Recipe],
    target: AnyTarget | TargetObjects,
    topk: int | None = None,
) -> tuple[list[Result], str, OutputActivation | None]:
    """Explain tokenized texts; also return the model's family and what its outputs are.

    The arguments are those of ``explain_text``. A text longer than the model's maximum length is explained in windows.
    """
    return run_in_evaluation(loaded.model, lambda network: _explain_read(network, loaded, read, recipes, target, topk))


def _explain_read(
    network: nn.Module,
    loaded: LoadedTextModel,
    read: Sequence[TokenizedText],
    recipes: list[Recipe],
    target: AnyTarget | TargetObjects,
    topk: int | None,
) -> tuple[list[Result], str, OutputActivation | None]:
    """Run ``explain_read`` on the network in evaluation mode."""
    results: list[Result | None] = [None] * len(read)
    family, reader, outputs = "", loaded.reader, loaded.outputs
    for batch in _batches(reader, read):
        if isinstance(target, TargetObjects):
            objects = target._replace(rows=[target.rows[number] for number in batch.texts])
            raw = _run_objects(network, reader, batch, recipes, objects, outputs)
        else:
            batch_target = part_of(target, batch.texts, len(read))
            raw = _run(
                network,
                reader,
                batch,
                recipes,
                lambda logits: batch.targets(logits, batch_target, topk),  # noqa: B023 - called at once
                outputs,
            )
        family, outputs = raw.family, raw.scale
        for place, number in enumerate(batch.texts):
            results[number] = batch.result(reader, raw, place, read[number])
    return [result for result in results if result is not None], family, outputs


@dataclass(frozen=True)
class _Batch:
    """Texts that run in one batch, split into windows.

    Attributes:
        texts: indices of the texts.
        rows: the token ids of every window.
        owners: for every window, the position of its text in ``texts``.
        starts: for every window, the index of its first piece.
    """

    texts: list[int]
    rows: list[tuple[int, ...]]
    owners: list[int]
    starts: list[int]

    @property
    def portions(self) -> list[slice]:
        """Slices of windows that fit into one run: a single one, unless one text alone exceeds the maximum."""
        together = max(1, _TOKENS_AT_ONCE // max(map(len, self.rows)))
        return [slice(start, start + together) for start in range(0, len(self.rows), together)]

    def mean_logits(self, logits: Tensor) -> Tensor:
        """Average the logits over the windows of every text, (texts, classes)."""
        owners = torch.tensor(self.owners, device=logits.device)
        sums = logits.new_zeros(len(self.texts), logits.shape[1]).index_add_(0, owners, logits)
        return sums / owners.bincount()[:, None]

    def targets(self, logits: Tensor, target: AnyTarget, topk: int | None) -> Targets:
        """Return the classes to explain for every window: those of its text."""
        chosen = find_targets(self.mean_logits(logits), target, topk)
        return Targets(chosen.classes[torch.tensor(self.owners, device=logits.device)], chosen.several)

    def result(self, reader: Reader, raw: RawResult, place: int, text: TokenizedText) -> Result:
        """Average logits and scores over the windows of one text."""
        windows = [row for row, owner in enumerate(self.owners) if owner == place]
        scores = {}
        for spelling, maps in raw.scores.items():
            total = maps.new_zeros(*maps.shape[1:-1], len(text.pieces))
            count = maps.new_zeros(len(text.pieces))
            for window in windows:
                inside = slice(self.starts[window], self.starts[window] + len(self.rows[window]))
                total[..., inside] += reader.content_of(maps[window], len(self.rows[window]))
                count[inside] += 1
            scores[spelling] = total / count
        logits = self.mean_logits(raw.logits)[place]
        values = None if raw.target_values is None else raw.target_values[windows].mean(dim=0)
        return Result(logits, raw.target[windows[0]], scores, raw.objects, values)


def _run(
    network: nn.Module,
    reader: Reader,
    batch: _Batch,
    recipes: list[Recipe],
    choose: Callable[[Tensor], Targets],
    outputs: OutputActivation | None,
) -> RawResult:
    """Run all methods on every window of a batch.

    The windows of a very long text run in several portions to bound memory. The classes to explain depend on all of
    its windows, so their logits are computed first.
    """
    portions = batch.portions
    if len(portions) == 1:
        return run_methods(network, reader.inputs(batch.rows), recipes, choose, RunSettings(outputs=outputs))
    windows = reader.inputs(batch.rows)
    targets = choose(ModelRunner(network, windows).logits(windows))
    return run_in_portions(network, windows, recipes, targets, portions, RunSettings(outputs=outputs))


def _run_objects(
    network: nn.Module,
    reader: Reader,
    batch: _Batch,
    recipes: list[Recipe],
    targets: TargetObjects,
    outputs: OutputActivation | None,
) -> RawResult:
    """Run all methods on every window of a batch for targets that are objects.

    What a target of a text in several windows depends on (the predicted class) is that of all its windows.
    """
    windows, settings = reader.inputs(batch.rows), RunSettings(outputs=outputs)
    if len(batch.rows) > len(batch.texts):
        logits = batch.mean_logits(ModelRunner(network, windows).logits(windows))
        original = OriginalRun(logits, logits, outputs, (0, 0))
        rows = [[each.resolve(original, text) for each in row] for text, row in enumerate(targets.rows)]
        targets = targets._replace(rows=rows)

    def run(rows: slice) -> RawResult:
        some = targets._replace(rows=[targets.rows[owner] for owner in batch.owners[rows]])
        return run_target_objects(network, windows[rows], recipes, some, settings)

    return concatenate_results([run(rows) for rows in batch.portions])


def _batches(reader: Reader, read: Sequence[TokenizedText]) -> Iterator[_Batch]:
    """Yield batches of texts of similar length, to minimise padding."""
    order = sorted(range(len(read)), key=lambda number: len(read[number].pieces))
    windows = [list(_windows(len(text.pieces), reader.capacity)) for text in read]
    waiting: list[int] = []
    for number in order:
        together = [*waiting, number]
        longest = max(end - start for text in together for start, end in windows[text])
        if waiting and longest * sum(len(windows[text]) for text in together) > _TOKENS_AT_ONCE:
            yield _batch(waiting, windows, read)
            waiting = []
        waiting.append(number)
    yield _batch(waiting, windows, read)


def _batch(texts: list[int], windows: list[list[tuple[int, int]]], read: Sequence[TokenizedText]) -> _Batch:
    places = [(owner, start, end) for owner, text in enumerate(texts) for start, end in windows[text]]
    return _Batch(
        texts=texts,
        rows=[read[texts[owner]].numbers[start:end] for owner, start, end in places],
        owners=[owner for owner, _, _ in places],
        starts=[start for _, start, _ in places],
    )


def _windows(pieces: int, capacity: int | None) -> Iterator[tuple[int, int]]:
    """Yield start and end of windows that overlap by half; the last one ends with the text."""
    if capacity is None or pieces <= capacity:
        yield 0, pieces
        return
    for start in range(0, pieces - capacity, max(1, capacity // 2)):
        yield start, start + capacity
    yield pieces - capacity, pieces


def _fitted(reader: Reader, text: str, number: int, *, windows: bool) -> TokenizedText:
    read = reader.read(text, f"text {number}")
    if windows or reader.capacity is None or len(read.pieces) <= reader.capacity:
        return read
    warn_caller(
        f"text {number} has {len(read.pieces)} word pieces, of which the model takes the first {reader.capacity}; "
        "windows=True explains all of them"
    )
    return read.shortened(reader.capacity)


def several_texts(texts: str | Sequence[str]) -> list[str]:
    """Texts as a list.

    Raises:
        InputError: there is none.
    """
    given = [texts] if isinstance(texts, str) else texts
    if not isinstance(given, Iterable):
        raise InputError(f"texts must be a text or several, not {type(texts).__name__}")
    found = list(given)
    if not found:
        raise InputError("no text was given")
    return found


def find_text_model(model: TextModel | nn.Module) -> LoadedTextModel:
    """Resolve the model argument of ``explain_text``.

    Raises:
        InputError: there is no tokenizer.
    """
    if isinstance(model, str):
        return load_text_model(model)
    if isinstance(model, LoadedTextModel):
        return model
    given: Any = model
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], nn.Module):
        network: Any = getattr(given[0], "_orig_mod", given[0])  # calls inside a compiled model cannot be intercepted
        return LoadedTextModel(None, network, given[1], class_names_of(network))
    what = "a model alone" if isinstance(given, nn.Module) else type(given).__name__
    raise InputError(
        f"a text model comes with its tokenizer: give demo-text, hf/ID, hf/FOLDER or (model, tokenizer), not {what}"
    )


def _provenance(loaded: LoadedTextModel, recipes: list[Recipe], family: str, **more: Any) -> dict[str, Any]:
    return collect_provenance(
        methods=[recipe.spelling for recipe in recipes],
        model=loaded.name,
        family=family,
        model_class=f"{type(loaded.model).__module__}.{type(loaded.model).__qualname__}",
        fingerprint=loaded.fingerprint if loaded.name else None,
        **more,
    )
