"""``measure_speed``: time methods, plain passes and peers in turn in one process.

Each job runs once before it is timed, to get its map, its number of passes and its peak memory.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vitreous._utils.torch_state import in_float64, preserves_torch_state
from vitreous.api.explain import explain, find_recipes, network_of
from vitreous.api.runs import refusal_reason
from vitreous.architecture.evaluation_copy import frozen_copy
from vitreous.architecture.survey import architecture_of_copy
from vitreous.errors import InputError, UnsupportedModelError, VitreousError
from vitreous.methods.spelling import Recipe
from vitreous.models import LoadedModel
from vitreous.models.pixels import Images, Model, find_model, find_pixels
from vitreous.speed.peers import Peer, PeerInput, find_peers
from vitreous.speed.timing import (
    BOTH,
    FORWARD,
    Agreement,
    CountedLimit,
    Job,
    Limit,
    Passes,
    PlainModel,
    SpeedRow,
    counted_passes,
    limit_of,
    one_thread,
    peak_memory,
    ratio_of,
    time_in_turn,
    whole_pass,
)
from vitreous.tape import unite
from vitreous.tape.runner import ModelRunner

# Relative to the largest value of a map: above float32 rounding over dozens of blocks, far below other methods.
_SAME = 1e-3


@dataclass(frozen=True)
class Probe:
    """The result of the warm-up run of a job.

    Attributes:
        job: the job.
        answer: its map, (batch, patches).
        passes: its passes through the model.
        memory: its peak relative to that of a plain forward and backward pass; None if the device does not report it.
    """

    job: Callable[[], Tensor]
    answer: Tensor
    passes: Passes
    memory: float | None


class Prober:
    """Runs jobs once on one model and its images."""

    def __init__(self, plain: PlainModel) -> None:
        self._plain, self._device = plain, plain.images.device
        self._whole = whole_pass(plain.architecture, plain.forward)
        plain.forward_backward()  # warm-up, so that one-time allocations do not count
        self._memory = peak_memory(plain.forward_backward, self._device)

    def probe(self, job: Callable[[], Tensor]) -> Probe:
        """Run a job once."""
        answers: list[Tensor] = []
        with counted_passes(self._plain.architecture, self._whole) as passes:
            memory = peak_memory(lambda: answers.append(job()), self._device)
        return Probe(job, answers[0], passes, memory / self._memory if self._memory else None)


def agreement_of(theirs: Tensor, ours: Tensor) -> Agreement:
    """Compare a peer's map with ours, both (batch, patches)."""
    found, expected = in_float64(theirs.detach().to(ours.device)), in_float64(ours.detach())
    scale = float(expected.abs().max())
    difference = float((found - expected).abs().max())
    largest = difference / scale if scale > 0 else difference
    correlation = float(torch.corrcoef(torch.stack((found.flatten(), expected.flatten())))[0, 1])
    return Agreement(largest < _SAME, None if math.isnan(correlation) else correlation, largest)


SPEED_METHODS = (
    *("raw_attention", "rollout", "gae", "gradtoken", "tokentm", "ixg", "ixg.skipplus"),
    *("decompx", "decompx.skipplus", "fullgrad_plus", "attnlrp"),
)
Notice = Callable[[str], object]


@preserves_torch_state
def measure_speed(
    model: Model,
    images: Images | None = None,
    methods: str | Sequence[str] | None = None,
    *,
    batch: int = 4,
    repeats: int = 5,
    peers: Sequence[str] = (),
    together: bool = False,
    notice: Notice = lambda _: None,
) -> list[SpeedRow]:
    """Measure time and memory of methods on a model, relative to plain passes.

    Every job runs once to count its passes, measure its peak memory, and compare a peer's map with ours. Then all jobs
    are timed in turn, ``repeats`` times, with one thread, on a copy of the model with frozen parameters.

    Args:
        model: the model, in any form that ``explain`` takes.
        images: the images, in any form that ``explain`` takes; ``None`` for random images if the input size is known.
        methods: method spellings, each measured separately; ``None`` for ``SPEED_METHODS``.
        batch: number of random images, if no images are given.
        repeats: number of repetitions.
        peers: libraries to compare with; ``all`` for every one that can be imported.
        together: also measure all methods in one call.
        notice: called with a description of the current step.

    Returns:
        One row per method, followed by those of its peers. A method that the model does not support has a reason
        instead of numbers, as has a peer that cannot be imported, fails, or gives another map, which is not timed.

    Raises:
        MethodError: a spelling is not valid.
        InputError: the batch, the number of repetitions, or the images are not valid.
        MissingDependencyError: a peer that was given by name is not installed.
        UnsupportedModelError: blocks are not modules, so that passes cannot be counted.

    Examples:
        >>> from vitreous.speed import measure_speed
        >>> (row,) = measure_speed(model, "demo.jpg", "rollout", repeats=1)
        >>> row.method, row.ratio_forward > 0
        ('rollout', True)
    """
    if repeats < 1:
        raise InputError(f"repeats must be at least 1, not {repeats}")
    if batch < 1:
        raise InputError(f"batch must be at least 1, not {batch}")
    recipes = find_recipes(SPEED_METHODS if methods is None else methods)
    chosen_peers = find_peers(peers)
    loaded = find_model(model, images)
    network = frozen_copy(network_of(loaded))
    loaded = replace(loaded, model=network) if isinstance(loaded, LoadedModel) else network
    pixels, _ = find_pixels(loaded, network, _noise(loaded, batch) if images is None else images)
    with one_thread():
        bench = _Bench(loaded, _plain(network, pixels), notice)
        entries = [entry for recipe in recipes for entry in bench.entries_of(recipe, chosen_peers)]
        served = [recipe for recipe in recipes if recipe.spelling in {e.row.method for e in entries if e.probe}]
        if together and len(served) > 1:
            entries.append(bench.own_entry(f"{len(served)} methods at once", served))
        return bench.timed(entries, repeats)


def _noise(model: LoadedModel | nn.Module, batch: int) -> Tensor:
    """Return random images of the model's input size."""
    if not isinstance(model, LoadedModel):
        raise InputError("the size of this model's input is not known: pass images")
    return torch.randn(batch, 3, *model.preprocessing.image_size, generator=torch.Generator().manual_seed(0))


def _plain(network: nn.Module, images: Tensor) -> PlainModel:
    """Return the plain model with the predicted classes as targets."""
    architecture = architecture_of_copy(network, images)  # the hooks belong on the blocks of this copy
    modules = [block.module for block in architecture.blocks]
    if None in modules or len(set(modules)) < len(modules):
        raise UnsupportedModelError(
            f"the passes of {architecture.name} cannot be counted, because its blocks are not modules: put each block "
            "into one nn.Module"
        )
    plain = PlainModel(network, architecture, images, torch.zeros(len(images), dtype=torch.int64))
    return replace(plain, target=plain.forward().argmax(dim=1))


@dataclass(frozen=True)
class _Entry:
    """A row before timing; without a probe it is not timed."""

    row: SpeedRow
    probe: Probe | None = None
    limit: Limit | CountedLimit | None = None

    @property
    def name(self) -> str:
        """Name of its job."""
        return f"{self.row.method} by {self.row.peer or 'vitreous'}"


class _Bench:
    """A model with images, on which all jobs are probed, then timed."""

    def __init__(self, model: LoadedModel | nn.Module, plain: PlainModel, notice: Notice) -> None:
        self._model, self._plain, self._notice = model, plain, notice
        self._prober = Prober(plain)
        runner = ModelRunner(plain.network, plain.images)
        with suppress(UnsupportedModelError):  # warm-up: whether patches can be dropped is tested once per model
            runner.logits_of_kept(plain.images[:1], torch.zeros((1, 1), dtype=torch.int64))
        self._peer_input = PeerInput(plain.network, plain.architecture, plain.images, plain.target, runner.layout)

    def entries_of(self, recipe: Recipe, peers: Sequence[Peer]) -> list[_Entry]:
        """Probe a method and the peers that implement it."""
        ours = self.own_entry(recipe.spelling, [recipe])
        if ours.probe is None:
            return [ours]
        having = [peer for peer in peers if peer.method_for(recipe.spelling)]
        return [ours, *(self._peer_entry(peer, recipe.spelling, ours) for peer in having)]

    def own_entry(self, name: str, recipes: Sequence[Recipe]) -> _Entry:
        """Probe one method, or several in one call."""
        self._notice(name)
        spellings = [recipe.spelling for recipe in recipes]

        def job() -> Tensor:
            return explain(self._model, self._plain.images, spellings, self._plain.target).scores[spellings[0]]

        depth = self._plain.architecture.depth
        try:
            probe = self._prober.probe(job)
            needs = unite(recipe.needs(depth) for recipe in recipes)
        except VitreousError as error:
            return _Entry(SpeedRow(name, reason=refusal_reason(error)))
        again = any(recipe.readout.runs_again for recipe in recipes)
        limit = CountedLimit(probe.passes) if again else limit_of(needs, depth)
        return _Entry(SpeedRow(name), probe, limit)

    def _peer_entry(self, peer: Peer, spelling: str, ours: _Entry) -> _Entry:
        """Probe the implementation of a peer and compare its map with ours."""
        self._notice(f"{spelling} by {peer.name}")
        answer, row = peer.method_for(spelling), SpeedRow(spelling, peer=peer.name)
        assert answer is not None
        assert ours.probe is not None
        if peer.problem:
            return _Entry(replace(row, reason=peer.problem))
        try:
            probe = self._prober.probe(lambda: answer(self._peer_input))
        except Exception as error:  # noqa: BLE001 - other libraries can raise anything; it is reported
            return _Entry(replace(row, reason=f"it fails: {type(error).__name__}: {error}"))
        if probe.answer.shape != ours.probe.answer.shape:
            return _Entry(replace(row, reason=f"it gives a map of shape {tuple(probe.answer.shape)}"))
        agreement = agreement_of(probe.answer, ours.probe.answer)
        row = replace(row, agreement=agreement)
        if not agreement.agrees:
            return _Entry(replace(row, reason=_difference(agreement)))
        return _Entry(row, probe, ours.limit)

    def timed(self, entries: Sequence[_Entry], repeats: int) -> list[SpeedRow]:
        """Time everything in turn and complete the rows."""
        jobs: dict[str, Job] = {FORWARD: self._plain.forward, BOTH: self._plain.forward_backward}
        for entry in entries:
            if isinstance(entry.limit, Limit) and entry.limit.name not in jobs:
                jobs[entry.limit.name] = entry.limit.job(self._plain)
                jobs[entry.limit.name]()
        jobs |= {entry.name: entry.probe.job for entry in entries if entry.probe is not None}
        seconds: dict[str, list[float]] = {name: [] for name in jobs}
        for repeat in range(1, repeats + 1):
            self._notice(f"times of {len(jobs)} jobs, round {repeat} of {repeats}")
            for name, measured in time_in_turn(jobs, 1, self._plain.images.device).items():
                seconds[name] += measured
        return [_completed(entry, seconds) for entry in entries]


def _completed(entry: _Entry, seconds: Mapping[str, list[float]]) -> SpeedRow:
    if entry.probe is None or entry.limit is None:
        return entry.row
    ours = seconds[entry.name]
    against = {
        "ratio_forward": seconds[FORWARD],
        "ratio_forward_backward": seconds[BOTH],
        "ratio_limit": entry.limit.seconds(seconds),
    }
    if entry.row.peer is not None:
        against["ratio_peer"] = seconds[_Entry(SpeedRow(entry.row.method)).name]
    ratios = {name: ratio_of(ours, baseline) for name, baseline in against.items()}
    medians: dict[str, Any] = {name: ratio.median for name, ratio in ratios.items()}
    return replace(
        entry.row,
        **medians,
        milliseconds=1000 * statistics.median(ours),
        ratio_peak_memory=entry.probe.memory,
        passes=str(entry.probe.passes),
        limit=entry.limit.name,
        spread={name: (ratio.low, ratio.high) for name, ratio in ratios.items()},
    )


def _difference(agreement: Agreement) -> str:
    correlation = "" if agreement.correlation is None else f", correlation {agreement.correlation:.3f}"
    return (
        f"it gives another map (largest difference {agreement.largest_difference:.2g} of the largest value"
        f"{correlation}), so that it is not timed"
    )
