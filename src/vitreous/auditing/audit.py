"""``audit``: maps of a whole data set, suspicions about them, and tests of each by intervention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from vitreous._utils.storage import expanded
from vitreous._utils.torch_state import preserves_torch_state
from vitreous.auditing.collected import Collected, read_collected
from vitreous.auditing.interventions import Interventions, InterventionSettings
from vitreous.auditing.suspicions import SHORTCUTS, SuspicionSettings, find_suspicions
from vitreous.auditing.testing import Decision, Effect, Tested, judge, measure_all, smallest_share
from vitreous.datasets import DataSet
from vitreous.errors import RunError
from vitreous.evaluation.engines import ProgressCallback, SilentProgress
from vitreous.evaluation.evaluate import compute
from vitreous.evaluation.options import EvaluateOptions, resolve_options
from vitreous.evaluation.protocols import AUDIT_MAPS
from vitreous.evaluation.run import Run, hash_of
from vitreous.evaluation.runner.measure import EvaluationContext
from vitreous.evaluation.runner.prepare_run import Model, expand_methods, prepare_run
from vitreous.evaluation.store import Store, read_manifest
from vitreous.models import LoadedModel
from vitreous.plugin import load_plugins

METHOD = "twoscale"
LIMITS = ("findings", "observations", "removed", "pasted", "decided")
_TESTS = "tests"


@dataclass(frozen=True, eq=False)
class Audit:
    """What an audit has found.

    Attributes:
        store: the folder of the run.
        context: model and data set.
        collected: maps and what else was kept of every photo.
        tested: all suspicions with their tests, findings first, by how many predictions they decide.
        left_out: suspicions that were not tested for being too many.
        settings: everything that the findings depend on besides the run.
    """

    store: Store
    context: EvaluationContext
    collected: Collected
    tested: tuple[Tested, ...]
    left_out: int
    settings: Mapping[str, Any]

    @property
    def run(self) -> Run:
        """What was examined."""
        return self.store.run

    @property
    def findings(self) -> list[Tested]:
        """Shortcuts that interventions confirm; one that another explains is left out."""
        return [each for each in self.tested if each.finding and each.is_shortcut and each.covered_by is None]

    @property
    def observations(self) -> list[Tested]:
        """What else is confirmed.

        Classes that share evidence, photos with an unusual explanation, and what the model reads though it does not go
        with the labels.
        """
        return [each for each in self.tested if each.finding and not each.is_shortcut]

    @property
    def rejected(self) -> list[Tested]:
        """Suspicions that interventions do not confirm."""
        return [each for each in self.tested if not each.finding]

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of the run's key, its photos, the settings and all suspicions that were tested."""
        parts = [self.run.key, self.run.image_count, dict(self.settings), [each.suspicion.key for each in self.tested]]
        return hash_of(parts)

    def class_name(self, number: int) -> str:
        """The name of a class: of the model, or of the data set if it has as many labels, or its number."""
        for names in (self.context.classifier.class_names, self.context.data.class_names):
            if names is not None and 0 <= number < len(names):
                return names[number]
        return f"class {number}"

    def sentence(self, tested: Tested) -> str:
        """Say in one sentence what was found, or what was suspected."""
        suspicion = tested.suspicion
        name = self.class_name(suspicion.target)
        if suspicion.kind == "shared evidence":
            assert suspicion.other is not None
            effect = tested.removal
            told = "" if effect is None else f"; without its peaks {self.class_name(suspicion.other)} loses as well"
            return f"{name} shares evidence with {self.class_name(suspicion.other)}{told} ({_p(effect)})"
        if suspicion.kind == "unusual photo":
            return f"{suspicion.place}, predicted as {name}: {suspicion.reason} ({_p(tested.removal)})"
        what = f"the {suspicion.place}" + (" (a cluster of maps)" if suspicion.kind == "cluster" else "")
        shown = f"{what} suspected in {tested.shown_share:.0%} of photos"
        if tested.finding:
            decided = tested.decided / tested.class_photos
            shown = f"{decided:.0%} of photos decided by {what} (suspected in {tested.shown_share:.0%})"
        parts = [f"{name}: {shown}"]
        if tested.removal is not None:
            removal = tested.removal
            parts.append(f"removing it flips {removal.changed:.0%} (compared with {removal.control:.0%})")
        if tested.insertion is not None:
            paste = tested.insertion
            parts.append(f"pasting it into others makes {paste.changed:.0%} {name} (compared with {paste.control:.0%})")
        if tested.finding and not tested.goes_with_label:
            parts.append(f"it does not go with the label {name} here (q = {tested.label_q:.2g}), so it is no shortcut")
        deciding = [tested.effects[effect] for effect in tested.shown_by] if tested.finding else []
        weakest = max(deciding or tested.effects.values(), key=lambda effect: effect.q, default=None)
        return "; ".join([*parts, _p(weakest)])

    @property
    def decided(self) -> float:
        """The part of all predictions that findings decide; a photo that shows several counts by the strongest."""
        strongest = np.zeros(len(self.collected))
        for each in self.findings:
            photos = each.suspicion.photos
            strongest[photos] = np.maximum(strongest[photos], min(each.decided / len(photos), 1.0))
        return float(strongest.mean())

    @property
    def power(self) -> list[dict[str, Any]]:
        """By class, the smallest part of its photos whose shortcut had become a suspicion with a power of 80%.

        This holds if maps or colours show the shortcut; None where the class has too few photos.
        """
        settings = self.settings["suspicions"]
        rows = []
        for number in self.collected.classes:
            photos = len(self.collected.of_class(number))
            share = smallest_share(photos, max(settings["photos"], math.ceil(settings["share"] * photos)))
            rows.append({"class": number, "class name": self.class_name(number), "photos": photos, "share": share})
        return rows

    def exceeded(self, limits: Mapping[str, float]) -> list[str]:
        """Which of some limits are exceeded, see ``parse_limits``."""
        measured = {
            "findings": float(len(self.findings)),
            "observations": float(len(self.observations)),
            "removed": max((each.removal.excess for each in self.findings if each.removal), default=0.0),
            "pasted": max((each.insertion.excess for each in self.findings if each.insertion), default=0.0),
            "decided": self.decided,
        }
        over = {name: limit for name, limit in limits.items() if measured[name] > limit}
        return [f"{name} {measured[name]:.4g} > {limit:.4g}" for name, limit in over.items()]

    def as_json(self) -> dict[str, Any]:
        """The audit as JSON values."""
        run, collected = self.run, self.collected
        manifest = read_manifest(self.store.folder)
        return {
            "format": "vitreous audit",
            "schema": 1,
            "fingerprint": self.fingerprint,
            "examined": {
                "model": asdict(run.model),
                "weights": run.weights,
                "data": run.data,
                "data fingerprint": run.data_fingerprint,
                "photos": len(collected),
                "not explained": [list(failure) for failure in collected.failures],
                "classes": len(collected.classes),
                "method": run.methods[0],
                "grid": list(collected.grid),
                "masks": int(collected.masked.sum()),
                "accuracy": self.accuracy,
                "versions": dict(run.versions),
                "software": manifest.get("software", {}),
                "created": manifest.get("created", ""),
                "command": manifest.get("command", []),
                "run": run.key,
            },
            "settings": dict(self.settings),
            "findings": [{**self._row(each), "explains": self._explained_by(each)} for each in self.findings],
            "observations": [self._row(each) for each in self.observations],
            "explained by other findings": [self._row(each) for each in self.tested if each.covered_by is not None],
            "not confirmed": [self._row(each) for each in self.rejected],
            "tests": sum(len(each.effects) for each in self.tested),
            "suspicions left out": self.left_out,
            "power": self.power,
            "decided": self.decided,
        }

    @property
    def accuracy(self) -> float | None:
        """The part of photos with a label that are predicted as it; None without labels of the model's classes."""
        known = self.collected.label >= 0
        names = self.context.classifier.class_names
        if names is not None and (self.collected.label >= len(names)).any():
            return None  # the labels count the classes of another list
        return float((self.collected.predicted == self.collected.label)[known].mean()) if known.any() else None

    def _explained_by(self, finding: Tested) -> list[str]:
        """Return the sentences of what a finding explains."""
        place = self.tested.index(finding)
        return [self.sentence(each) for each in self.tested if each.covered_by == place]

    def _row(self, tested: Tested) -> dict[str, Any]:
        suspicion = tested.suspicion
        regions = suspicion.regions
        return {
            "sentence": self.sentence(tested),
            "kind": suspicion.kind,
            "class": suspicion.target,
            "class name": self.class_name(suspicion.target),
            "place": suspicion.place,
            "other class": suspicion.other,
            "suspected because": suspicion.reason,
            "photos": [self.collected.names[photo] for photo in suspicion.photos],
            "share of class": tested.shown_share,
            "predictions decided": tested.decided,
            "patches": float(regions.sum(axis=1).mean()) if regions.size else 0.0,
            "shown by": list(tested.shown_by),
            "labels": {"p": tested.label_p, "q": tested.label_q, "goes with them": tested.goes_with_label},
            "gains": list(suspicion.gains),
            **suspicion.details,
            **{name: asdict(effect) | {"excess": effect.excess} for name, effect in tested.effects.items()},
            "interventions": dict(tested.parts),
        }


def _p(effect: Effect | None) -> str:
    if effect is None:
        return "not tested"
    return ", ".join(
        f"{name} < 0.001" if value < 0.001 else f"{name} = {value:.3f}"
        for name, value in (("p", effect.p), ("q", effect.q))
    )


def parse_limits(given: Sequence[str]) -> dict[str, float]:
    """Read limits such as ``findings=0`` or ``removed=0.1``; a name alone stands for 0.

    Raises:
        RunError: a name is unknown, or a number is none.
    """
    limits = {}
    for text in given:
        name, equals, number = text.strip().partition("=")
        if name not in LIMITS:
            raise RunError(f"--fail-on takes {', '.join(LIMITS)} with a number, such as removed=0.1, not {text!r}")
        try:
            limits[name] = float(number) if equals else 0.0
        except ValueError as error:
            raise RunError(f"--fail-on {name} needs a number, such as {name}=0.1, not {number!r}") from error
    return limits


@preserves_torch_state
def audit(
    model: Model,
    data: str | DataSet,
    *,
    method: str = METHOD,
    out: str | Path = "vitreous-audits",
    alpha: float = Decision.alpha,
    effect: float = Decision.effect,
    photos: int = InterventionSettings.photos,
    suspicions: int = SuspicionSettings.most,
    progress: ProgressCallback | None = None,
    **options: Unpack[EvaluateOptions],
) -> Audit:
    """Examine what a model relies on over a data set, and test every suspicion by intervention.

    Maps, tests and reports lie in one folder in ``out``; the same call goes on with an audit that was stopped.

    Args:
        model: as ``evaluate`` takes it.
        data: ``KIND:PATH`` or an open data set of photos; labels and masks are used where it has them.
        method: the method whose maps are examined.
        out: the folder of all audits.
        alpha: the false discovery rate over all tests.
        effect: the smallest part of predictions that must change for a finding, beyond that of the comparison.
        photos: how many photos of a suspicion are intervened on at most.
        suspicions: how many suspicions are tested at most, the most conspicuous first.
        progress: receives progress and notices.
        **options: see ``vitreous.evaluation.options.EvaluateOptions``; ``controls`` does not apply.

    Raises:
        VitreousError: an argument does not exist, or the arguments do not fit together.

    Examples:
        >>> import vitreous
        >>> found = vitreous.audit(model, "labelled:photos", method="gae")
        >>> len(found.findings)
        0
    """
    decision = Decision(alpha, effect)
    _check(decision, photos, suspicions)
    callback = progress or SilentProgress()
    load_plugins(map(str, options.get("plugins", ())))
    if len(expand_methods([method])) != 1:
        raise RunError(f"an audit examines the maps of one method, but {method} is a group of them")
    chosen = resolve_options({**options, "controls": False})
    protocol = AUDIT_MAPS.name
    store, context = prepare_run(model, data, protocol, [method], expanded(out), chosen, callback.notice)
    if not isinstance(context.model, LoadedModel):
        raise RunError("an audit examines a classifier of photos; this model is none")
    compute(store, context, chosen, callback)
    return examine(store, context, decision, photos=photos, suspicions=suspicions)


def _check(decision: Decision, photos: int, suspicions: int) -> None:
    if not 0 < decision.alpha < 1:
        raise RunError(f"alpha must lie between 0 and 1, not be {decision.alpha!r}")
    if not 0 <= decision.effect <= 1:
        raise RunError(f"effect must lie between 0 and 1, not be {decision.effect!r}")
    if photos < 2 or suspicions < 1:
        raise RunError("an audit needs at least 2 photos per suspicion and 1 suspicion")


def examine(store: Store, context: EvaluationContext, decision: Decision, *, photos: int, suspicions: int) -> Audit:
    """Find and test suspicions about the maps of a finished run."""
    seed = store.run.seed
    collected = read_collected(store)
    looked = SuspicionSettings(most=suspicions, seed=seed)
    settings = InterventionSettings(photos=photos, seed=seed)
    found, left_out = find_suspicions(collected, looked)
    tested: list[Tested] = []
    if found:
        interventions = Interventions(context, collected, settings)
        measured = measure_all(found, interventions, store.folder / _TESTS, settings, lambda: None)
        tested = judge(found, measured, collected, decision, seed)
    everything = {
        "decision": asdict(decision),
        "suspicions": asdict(looked),
        "interventions": asdict(settings),
        "shortcuts": list(SHORTCUTS),
    }
    return Audit(store, context, collected, tuple(tested), left_out, everything)
