"""``prepare_run``: from the arguments of ``evaluate`` to a run's folder and the context that its shards need.

Methods are given as spellings or as names of groups.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitreous._utils.storage import expanded
from vitreous.api.explain import explain
from vitreous.api.runs import find_outputs, try_methods
from vitreous.architecture import find_architecture
from vitreous.architecture.evaluation_copy import evaluation_copy
from vitreous.datasets import DataSet, open_dataset
from vitreous.datasets.dataset import Things
from vitreous.errors import MethodError, ModelError, RefusedMethodsError
from vitreous.evaluation.options import EvaluateOptions, resolve_options
from vitreous.evaluation.protocols import AUDIT_MAPS, Protocol, find_protocol, list_protocols
from vitreous.evaluation.run import ModelChoice, Run, RunError
from vitreous.evaluation.runner.adapters import first_run
from vitreous.evaluation.runner.measure import (
    AnyModel,
    EvaluationContext,
    arranged,
    columns_of,
    hash_files,
    load,
    own_code_of,
    preprocessing_of,
    weights_of,
)
from vitreous.evaluation.store import Notice, Store, earlier_runs
from vitreous.explanation.folder import software_versions
from vitreous.inputs.model_io import Inputs, OutputActivation, scale_of
from vitreous.methods import list_controls, list_methods
from vitreous.methods.registry import CONTROL_FAMILIES, FAMILIES
from vitreous.methods.spelling import EXAMPLE_DEPTH, cost_of, parse
from vitreous.models import LoadedModel
from vitreous.models.dual_encoder import DualEncoder, find_dual_encoder
from vitreous.models.hf_models import LoadedTextModel
from vitreous.models.loaded import with_outputs, with_resolved_outputs
from vitreous.models.loading import Pair, infer_preprocessing
from vitreous.plugin import load_plugins
from vitreous.tape.runner import ModelRunner
from vitreous.text.explain import TextModel, explain_text, find_text_model

WHITE_BOX = "white-box"
ONE_RUN = "one-run"
ALL = "all"
_BLACK_BOX_FAMILIES = ("perturbation", "plugin")
_FAMILY_SUFFIX = "-methods"


def choose_methods(
    requested: Sequence[str],
    model: LoadedModel | LoadedTextModel,
    expand: Callable[[Sequence[str]], list[str]],
    notice: Callable[[str], None],
) -> list[str]:
    """Resolve spellings and groups of methods to spellings, each once.

    ``white-box`` is every method except the family perturbation and plugins. ``one-run`` is those of them that need no
    run beyond forward and backward, ``all`` every method there is, and the name of a family all its methods
    (``gradient-methods`` where a method has the same name). Methods of a group that the model or the protocol does not
    support are left out with a notice; one that was given by name is an error.

    Args:
        requested: spellings and names of groups.
        model: the model to explain.
        expand: turns spellings into the rows of a protocol.
        notice: receives what is left out.

    Raises:
        MethodError: a spelling is wrong, or the protocol does not support it.
        UnsupportedModelError: a method that was given by name does not work on the model.
    """
    spelled, grouped = [], []
    chosen: dict[str, None] = {}
    for word in requested:
        members = _group(word.strip())
        if members is None:
            spelled.append(parse(word).spelling)
        else:
            grouped += members
        chosen |= dict.fromkeys([spelled[-1]] if members is None else members)
    _ask(model, expand(spelled))
    left_out = _unsupported(model, expand, [name for name in dict.fromkeys(grouped) if name not in spelled])
    for name, reason in left_out.items():
        notice(f"{name} is left out: {reason}")
    return [spelling for spelling in chosen if spelling not in left_out]


def expand_methods(requested: Sequence[str]) -> list[str]:
    """Resolve spellings and groups of methods to spellings, each once, without checking a model."""
    found = (_group(word.strip()) or [parse(word).spelling] for word in requested)
    return list(dict.fromkeys(spelling for group in found for spelling in group))


def _group(word: str) -> list[str] | None:
    """The methods of a group, or None for a spelling."""
    methods = list_methods()
    names = {method.name for method in methods}
    if word in CONTROL_FAMILIES:
        return [info.name for info in list_controls() if info.family == word]
    if word == ALL:
        return [method.name for method in methods]
    white_box = [method.name for method in methods if method.family not in _BLACK_BOX_FAMILIES]
    if word == WHITE_BOX:
        return white_box
    if word == ONE_RUN:
        return [name for name in white_box if cost_of(name).one_run]
    family = word.removesuffix(_FAMILY_SUFFIX)
    if family in FAMILIES and word not in names:
        return [method.name for method in methods if method.family == family]
    return None


def _unsupported(
    model: LoadedModel | LoadedTextModel, expand: Callable[[Sequence[str]], list[str]], names: Sequence[str]
) -> dict[str, str]:
    """Why the protocol or the model does not support some of the methods."""
    reasons: dict[str, str] = {}
    rows: dict[str, list[str]] = {}
    for name in names:
        try:
            rows[name] = expand([name])
        except MethodError as error:
            reasons[name] = str(error)
    return reasons | _refused(model, rows)


def _refused(model: LoadedModel | LoadedTextModel, rows: Mapping[str, list[str]]) -> dict[str, str]:
    """Why the model does not support some of the methods, each with its rows."""

    def run(names: list[str]) -> None:
        try:
            _ask(model, [row for name in names for row in rows[name]])
        except RefusedMethodsError as error:  # per row; reasons are reported per method
            reasons = {name: error.reasons[row] for name in names for row in rows[name] if row in error.reasons}
            raise RefusedMethodsError(str(error), reasons) from error

    return try_methods(run, list(rows)).reasons


def _ask(model: LoadedModel | LoadedTextModel, spellings: Sequence[str]) -> None:
    """Explain a zero image or a short text: whether a method works shows in a run.

    Outputs are settled first, because those of a zero image are not typical.
    """
    if isinstance(model, LoadedTextModel):
        if spellings:
            explain_text(with_resolved_outputs(model), "a", spellings)
        return
    # Skips perturbation methods: they need many forward passes.
    tried = [spelling for spelling in spellings if not parse(spelling).readout.runs_again]
    if tried:
        explain(with_resolved_outputs(model), empty_picture(model), tried)


def empty_picture(model: LoadedModel) -> Tensor:
    """A zero image or volume to try a model with, (1, 3, height, width) of images."""
    like = next(model.model.parameters(), torch.empty(0))
    return torch.zeros(1, *model.preprocessing.input_shape, dtype=like.dtype, device=like.device)


Model = str | ModelChoice | nn.Module | LoadedModel | TextModel | DualEncoder
_DECISIVE = ("vitreous", "torch")  # packages whose version is part of a run's key, besides the model's library


def controls_of(reads: Things) -> list[str]:
    """The controls in every table of a protocol on images or texts; ceilings must be requested."""
    controls = [info.name for info in list_controls() if info.family == "control"]
    needs = {name: parse(name).needs(EXAMPLE_DEPTH) for name in controls}
    if reads == "volumes":
        return [name for name in controls if not needs[name].plane]
    return [name for name in controls if reads == "photos" or not needs[name].picture]


def check_labels(context: EvaluationContext) -> None:
    """Check that the labels of a data set match the outputs of the model, where the protocol uses labels.

    Data sets with an unknown number of classes are not checked, nor are protocols that ignore labels or map them to
    outputs themselves.

    Raises:
        RunError: The labels are not those of the model's outputs.
    """
    counted = context.data.classes
    if isinstance(context.model, LoadedTextModel | DualEncoder):
        return  # class names map labels to outputs, see label_outputs and prompted_model
    if counted is None or not any(task.uses_labels for task in context.protocol.tasks):
        return
    outputs = count_outputs(context.model)
    if outputs != counted:
        raise RunError(
            f"{context.protocol.name} uses the labels of {context.data.kind} as outputs of the model, but there are "
            f"{counted} classes of labels and {outputs} of outputs"
        )


def count_outputs(model: LoadedModel) -> int:
    """The number of classes of a model; a single logit counts as two."""
    _, logits = first_run(model, empty_picture(model))
    return max(2, logits.shape[1])


def prepare_run(
    model: Model,
    data: str | DataSet,
    protocol: str | Protocol,
    methods: Sequence[str],
    out: Path,
    options: EvaluateOptions,
    notice: Notice,
) -> tuple[Store, EvaluationContext]:
    """Open model, data set and protocol, resolve the methods, and create or find the run's folder."""
    options = resolve_options(options)
    _check(model, data, protocol, options)
    chosen = find_protocol(protocol) if isinstance(protocol, str) else protocol
    plugins = [str(expanded(file).resolve()) for file in options["plugins"]]
    load_plugins(plugins)
    listed = open_dataset(_absolute(data)) if isinstance(data, str) else data
    if listed.holds == "volumes" and not chosen.takes_volumes:
        raise RunError(_not_for_volumes(chosen))
    if listed.holds not in {chosen.reads, "volumes"}:
        raise RunError(f"{chosen.name} is measured on {chosen.reads}, but {listed.kind} holds {listed.holds}")
    if not len(listed):
        raise RunError(f"there are no {listed.holds} in {listed.kind}:{listed.path}")
    order = {"shuffled": options["shuffle"], "stratified": options["stratify"]}
    opened = arranged(listed, chosen, options["seed"], **order)
    if options["limit"] is not None and not any(order.values()):
        _mention_classes(opened, options["limit"], notice)
    choice, loaded = _load(model, chosen)
    _check_volumes(loaded, listed)
    choice, loaded = _with_outputs(choice, loaded, options["outputs"])
    context = EvaluationContext(loaded, opened, chosen, choice.stage)
    check_labels(context)
    spellings = _spellings(context, methods, notice)
    if options["controls"]:
        spellings = tuple(dict.fromkeys((*spellings, *controls_of(listed.holds))))
    run = Run(
        protocol=chosen.name,
        settings=chosen.settings(),
        model=choice,
        weights=weights_of(loaded),
        preprocessing=preprocessing_of(loaded, opened.class_names),
        data=f"{opened.kind}:{opened.path.absolute()}",
        data_fingerprint=opened.fingerprint,
        images=len(opened),
        methods=spellings,
        own_methods=own_code_of(spellings),
        columns=columns_of(chosen),
        plugins=hash_files(plugins),
        shard_size=options["shard_size"],
        seed=options["seed"],
        **order,
        versions=_versions(loaded.model),
        limit=options["limit"],
        threads=threads_for(options["workers"] or 1) if options["threads"] is None else options["threads"],
    )
    _mention_earlier_runs(out, run, notice)
    return Store.create(out, run, _details(context), keep_threads=options["threads"] is None), context


def _not_for_volumes(protocol: Protocol) -> str:
    if protocol.name == AUDIT_MAPS.name:
        return "an audit examines images: it pastes patches from one into another and looks for places in their plane"
    able = [each.name for each in list_protocols() if each.takes_volumes]
    return f"{protocol.name} is not for volumes and clips, which are measured by dropped tokens: {', '.join(able)}"


def _check_volumes(model: AnyModel, listed: DataSet) -> None:
    """Check that model and data set agree on whether images or volumes are measured."""
    if not isinstance(model, LoadedModel) or model.takes_volumes == (listed.holds == "volumes"):
        return
    if model.takes_volumes:
        raise RunError(f"{model.name} takes volumes or clips: give a data set volumes:FOLDER, not {listed.kind}")
    raise RunError(f"{listed.kind} holds volumes or clips, but {model.name} takes images")


def _mention_earlier_runs(out: Path, run: Run, notice: Notice) -> None:
    """Say why a run that was started by another version is not resumed."""
    if (out / run.folder_name).exists():
        return
    for folder, other in earlier_runs(out, run).items():
        names = sorted({*run.versions, *other.versions})
        changed = [
            f"{name} {other.versions.get(name, 'missing')} instead of {run.versions.get(name, 'missing')}"
            for name in names
            if other.versions.get(name) != run.versions.get(name)
        ]
        notice(
            f"{folder} is not resumed, because another version computed it ({', '.join(changed)}): this run starts in "
            "a folder of its own, and `vitreous report` shows both"
        )


def _check(model: Model, data: str | DataSet, protocol: str | Protocol, options: EvaluateOptions) -> None:
    several = options["engine"] == "ray" or (options["workers"] or 1) > 1
    if several and not (isinstance(model, str | ModelChoice) and isinstance(data, str) and isinstance(protocol, str)):
        raise RunError("several processes open model, data set and protocol by name: give names, or use one worker")


def _mention_classes(data: DataSet, limit: int, notice: Notice) -> None:
    """Say so where the first samples are of fewer classes than a stratified sample would be."""
    labels = data.labels()
    if labels is None or limit >= len(labels):
        return
    seen, known = set(labels[:limit]), set(labels)
    if len(seen) < min(limit, len(known)):
        notice(
            f"the first {limit} {data.holds} are no stratified sample: they show {len(seen)} of {len(known)} classes; "
            "stratify (--stratify) takes the classes in turn"
        )


def _load(model: Model, protocol: Protocol) -> tuple[ModelChoice, AnyModel]:
    reads = protocol.reads
    if isinstance(model, str):
        model = ModelChoice(model)
    if isinstance(model, ModelChoice):
        return model, load(model, protocol)
    if protocol.prompt is not None:
        dual = find_dual_encoder(model)
        dual = replace(dual, model=evaluation_copy(dual.model))
        return ModelChoice(dual.name, device=_device_of(dual.model)), dual
    if reads == "texts" and isinstance(model, tuple | nn.Module):
        model = find_text_model(model)
    loaded = model if isinstance(model, LoadedModel | LoadedTextModel) else _with_preprocessing(model)
    if isinstance(loaded, LoadedTextModel) != (reads == "texts"):
        other = "photos" if reads == "texts" else "texts"
        raise RunError(f"this protocol is measured on {reads}, but the given model reads {other}")
    loaded = replace(loaded, model=evaluation_copy(loaded.model))
    stage = loaded.stage if isinstance(loaded, LoadedModel) else None
    name = loaded.name or type(loaded.model).__name__
    return ModelChoice(name, device=_device_of(loaded.model), stage=stage), loaded


def _device_of(network: nn.Module) -> str:
    return next((str(parameter.device) for parameter in network.parameters()), "cpu")


def _with_outputs(choice: ModelChoice, model: AnyModel, given: OutputActivation | None) -> tuple[ModelChoice, AnyModel]:
    """Decide what a model's outputs are: as given, or else from its configuration or from the outputs.

    A run stores them only where a worker would not find the same. The outputs of prompts are scores.
    """
    if isinstance(model, DualEncoder):
        if given is not None:
            raise RunError("a protocol of prompts explains scores of images and texts: leave out outputs")
        return choice, model
    declared = given or model.outputs
    usual = scale_of(model.model)
    found = declared or usual or _recognised(model)
    named = None if found in {None, usual or "logits"} else found
    return replace(choice, outputs=named), with_resolved_outputs(with_outputs(model, found))


def _recognised(model: LoadedModel | LoadedTextModel) -> OutputActivation | None:
    """Detect what a model's outputs are from an image of noise or a short text."""
    if isinstance(model, LoadedTextModel):
        inputs: Inputs = model.reader.inputs([model.reader.read(text, "a text").numbers for text in ("a", "b c")])
    else:
        empty = empty_picture(model)
        noise = torch.randn(empty.shape, generator=torch.Generator().manual_seed(0))
        inputs = noise.to(empty)
    logits = ModelRunner(model.model, inputs).logits(inputs)
    return find_outputs(model.model, inputs, logits, None)


def _with_preprocessing(model: nn.Module | Pair | DualEncoder) -> LoadedModel:
    """The classifier with its preprocessing, which must be known."""
    if not isinstance(model, nn.Module | tuple):
        raise RunError(
            "model must be a name, an nn.Module, a LoadedModel, a LoadedTextModel, (model, image processor) or "
            f"(model, tokenizer), not {type(model).__name__}"
        )
    found = infer_preprocessing(model)
    if found is None:
        raise ModelError(
            f"the preprocessing of {type(model).__name__} is not known: give (model, image processor) or "
            "a vitreous.models.LoadedModel with its preprocessing"
        )
    if hasattr(found.model, "pretrained_cfg"):
        from vitreous.models.timm_models import check_classifier  # noqa: PLC0415  (timm takes a second to import)

        check_classifier(found.name, found.model)
    return found


def _spellings(context: EvaluationContext, methods: Sequence[str], notice: Notice) -> tuple[str, ...]:
    model = context.classifier
    stage = model.stage if isinstance(model, LoadedModel) else None
    depth = find_architecture(model.model, model.example_input(), stage).depth

    def expand(requested: Sequence[str]) -> list[str]:
        return context.protocol.spellings(requested, depth)

    if context.protocol.methods is not None:
        if list(methods) != [WHITE_BOX]:
            notice(f"{context.protocol.name} has fixed rows; the given methods are ignored")
        return tuple(expand([]))
    spellings = expand(choose_methods(methods, model, expand, notice))
    if not spellings:
        raise RunError("no method was given")
    return tuple(spellings)


def _versions(model: nn.Module) -> dict[str, str]:
    """The versions that the numbers depend on; for vitreous with a hash of its code, for development versions."""
    decisive = {*_DECISIVE, type(model).__module__.partition(".")[0]}
    versions = {name: version for name, version in software_versions().items() if name in decisive}
    return versions | {"vitreous": f"{versions['vitreous']}+{_own_code_hash()[:12]}"}


@cache
def _own_code_hash() -> str:
    """The sha256 over the modules of this package."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _absolute(data: str) -> str:
    """Make the path absolute, so that workers open the same files."""
    kind, colon, path = data.partition(":")
    return f"{kind}:{expanded(path).absolute()}" if colon and path else data


def _details(context: EvaluationContext) -> dict[str, Any]:
    """The fields of the manifest that the numbers do not depend on."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "title": context.protocol.title,
        "paper": context.protocol.paper,
        "software": software_versions(),
    }


def threads_for(workers: int) -> int:
    """Threads per process when so many processes share the processor."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, available // workers)
