"""From the effects of interventions to findings: paired tests, intervals, false discovery rate and power."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import NormalDist

import numpy as np

from vitreous._utils.storage import write_text
from vitreous.auditing.collected import Bools, Collected, Floats
from vitreous.auditing.interventions import Effects, Interventions, InterventionSettings
from vitreous.auditing.suspicions import SHORTCUTS, Suspicion
from vitreous.evaluation.run import hash_of
from vitreous.evaluation.statistics import means_interval

_EXACT = 12  # pairs up to which all signs are tried
_SIGNS = 9999
_POWER = 0.8
VERSION = 4  # of the interventions; raised when their numbers change


@dataclass(frozen=True)
class Decision:
    """When a tested suspicion is a finding.

    Attributes:
        alpha: the false discovery rate that is allowed over all tests (Benjamini-Hochberg).
        effect: the smallest part of predictions that must change, beyond that of the comparison.
    """

    alpha: float = 0.05
    effect: float = 0.15


@dataclass(frozen=True)
class Effect:
    """One effect with its comparison, over the photos of a suspicion.

    Attributes:
        changed: part of the predictions that changed.
        control: the same with the patches to compare with.
        low: lower bound of the 95% interval of ``changed`` - ``control``.
        high: upper bound.
        probability: mean change of the class's probability beyond the comparison.
        p: one-sided, of a paired sign-flip test on the probability.
        q: the same after Benjamini-Hochberg over all tests of the audit.
        detectable: the smallest mean change of the probability that had been found with a power of 80%.
        n: photos.
    """

    changed: float
    control: float
    low: float
    high: float
    probability: float
    p: float
    detectable: float
    n: int
    q: float = 1.0

    @property
    def excess(self) -> float:
        """The part of predictions that changed beyond the comparison."""
        return self.changed - self.control


@dataclass(frozen=True)
class Tested:
    """A suspicion and what interventions say about it.

    Attributes:
        suspicion: what was suspected.
        class_photos: how many photos are predicted as the class.
        removal: dropping and replacing.
        insertion: pasting.
        parts: the mean of every intervention.
        finding: whether it is a finding.
        shown_by: which of the effects decide it.
        covered_by: number of another finding of the class that explains this one.
        label_p: one-sided p that photos labelled as the class have it more than others do, see ``label_test``; None
            where labels are not known.
        label_q: the same after Benjamini-Hochberg over all of these tests of the audit.
        goes_with_label: whether ``label_q`` is at most the level of the audit; True where labels are not known.
    """

    suspicion: Suspicion
    class_photos: int
    removal: Effect | None
    insertion: Effect | None
    parts: Mapping[str, float] = field(default_factory=dict)
    finding: bool = False
    shown_by: tuple[str, ...] = ()
    covered_by: int | None = None
    label_p: float | None = None
    label_q: float | None = None
    goes_with_label: bool = True

    @property
    def effects(self) -> dict[str, Effect]:
        """The effects that were measured, by name."""
        return {name: effect for name in ("removal", "insertion") if (effect := getattr(self, name)) is not None}

    @property
    def shown_share(self) -> float:
        """The part of the class's photos that show what is suspected."""
        return len(self.suspicion.photos) / self.class_photos

    @property
    def decided(self) -> float:
        """How many predictions it decides: the larger part that changes, of the photos that it was measured on.

        Removal is about the photos that show it; so is a colour that is put into others; patches come from any photo of
        the class.
        """
        shown = len(self.suspicion.photos)
        pasted = shown if self.suspicion.kind == "colour" else self.class_photos
        counts = [
            photos * effect.excess
            for photos, effect in ((shown, self.removal), (pasted, self.insertion))
            if effect is not None
        ]
        return max([0.0, *counts])

    @property
    def is_shortcut(self) -> bool:
        """Whether it is about evidence that is not the object, rather than an observation about classes or photos.

        What the model reads though it does not go with the labels is no shortcut: nothing could be learnt from it.
        """
        return self.suspicion.kind in SHORTCUTS and self.goes_with_label


def measure_all(
    suspicions: Sequence[Suspicion],
    interventions: Interventions,
    folder: Path,
    settings: InterventionSettings,
    advance: Callable[[], None],
) -> list[Effects]:
    """Test suspicions; each result is a file in ``folder``, which a later call reads instead of testing again."""
    found = []
    for suspicion in suspicions:
        place = folder / f"{hash_of([suspicion.key, asdict(settings), VERSION])[:24]}.json"
        effects = _stored(place)
        if effects is None:
            effects = interventions.test(suspicion)
            write_text(place, json.dumps({name: _plain(values) for name, values in effects.items()}))
        found.append(effects)
        advance()
    return found


def _plain(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values]


def _stored(place: Path) -> Effects | None:
    """What an earlier process has measured; files are written whole or not at all, others are measured again."""
    try:
        read = json.loads(place.read_text(encoding="utf-8"))
        return {name: [math.nan if value is None else float(value) for value in read[name]] for name in read}
    except (OSError, ValueError, TypeError):
        return None


def judge(
    suspicions: Sequence[Suspicion], measured: Sequence[Effects], collected: Collected, decision: Decision, seed: int
) -> list[Tested]:
    """Turn effects into findings, those that decide most predictions first."""
    tested = [
        _tested(suspicion, effects, collected, decision, seed)
        for suspicion, effects in zip(suspicions, measured, strict=True)
    ]
    adjusted = iter(adjust([effect.p for each in tested for effect in each.effects.values()]))
    label_qs = iter(adjust([each.label_p for each in tested if each.label_p is not None]))
    judged = []
    for each in tested:
        effects = {name: replace(effect, q=next(adjusted)) for name, effect in each.effects.items()}
        shown = tuple(name for name, effect in effects.items() if _counts(each.suspicion.kind, effect, decision))
        found = is_finding(each.suspicion, effects, shown)
        removal, insertion = (effects.get(name) for name in ("removal", "insertion"))
        label_q = None if each.label_p is None else next(label_qs)
        changed = replace(each, removal=removal, insertion=insertion, finding=found, shown_by=shown)
        judged.append(replace(changed, label_q=label_q, goes_with_label=label_q is None or label_q <= decision.alpha))
    judged.sort(key=lambda one: (not one.finding, not one.is_shortcut, -one.decided))
    return _covered(judged)


def _counts(kind: str, effect: Effect, decision: Decision) -> bool:
    """Whether an effect is significant, and large where predictions are counted."""
    return effect.q <= decision.alpha and (kind == "shared evidence" or effect.excess >= decision.effect)


def is_finding(suspicion: Suspicion, effects: Collection[str], shown: Collection[str]) -> bool:
    """Whether the effects that are shown, among those that were measured, make a suspicion a finding.

    What is found has to be sufficient: pasting it makes other photos of the class. That removing patches changes
    predictions is true of every part of an object as well, so it decides only where nothing can be pasted. Where the
    object is estimated, background and clusters may hold a part of it, so both effects are needed.
    """
    if suspicion.kind not in SHORTCUTS or "insertion" not in effects:
        return bool(shown)
    needed = {"removal", "insertion"} if suspicion.details.get("masked") == 0.0 else {"insertion"}
    return needed <= set(shown)


def _tested(suspicion: Suspicion, effects: Effects, collected: Collected, decision: Decision, seed: int) -> Tested:
    photos = len(collected.of_class(suspicion.target))
    if suspicion.kind == "unusual photo":
        return Tested(suspicion, photos, _unusual(effects), None)
    removal = _effect(effects, ("drop", "replace"), decision, seed)
    insertion = _effect(effects, ("paste",), decision, seed)
    parts = {name: float(np.nanmean(values)) for name, values in effects.items() if name != "photo" and _some(values)}
    label_p = label_test(suspicion, effects, collected, seed)
    return Tested(suspicion, photos, removal, insertion, parts, label_p=label_p)


def label_test(suspicion: Suspicion, effects: Effects, collected: Collected, seed: int) -> float | None:
    """One-sided p that what is suspected goes with the labels; None where they are not known or it was not tested.

    Patches: those of photos labelled as the class make others more of the class than those of photos that are not
    (paired sign-flip test). A colour: photos labelled as the class have more of it near the border (permutations of
    the labels). Both are exact where the patches or colours do not depend on the label.
    """
    own = collected.labelled(suspicion.target)
    if suspicion.kind not in SHORTCUTS or own is None or own.all() or not own.any():
        return None
    if suspicion.kind == "colour":
        amounts = np.log(np.maximum(collected.colours, 1e-6)) @ np.log(np.array(suspicion.gains))
        return permutation_test(amounts, own, seed)
    pairs = [effects.get(name, []) for name in ("labelled", "labelled_control")]
    differences = np.array(pairs[0], dtype=np.float64) - np.array(pairs[1], dtype=np.float64)
    differences = differences[np.isfinite(differences)]
    return sign_flip(differences, seed) if len(differences) > 1 else None


def _some(values: Sequence[float]) -> bool:
    return bool(np.isfinite(values).any())


def _effect(effects: Effects, names: Sequence[str], decision: Decision, seed: int) -> Effect | None:
    """Put interventions of one purpose together: photo by photo, the mean over those that were made."""
    there = [name for name in names if name in effects]
    if not there:
        return None

    def mean(suffix: str) -> Floats:
        found = [effects[f"{name}{suffix}"] for name in there if f"{name}{suffix}" in effects]
        table = np.array(found, dtype=np.float64) if found else np.zeros((1, len(effects[there[0]])))
        with np.errstate(all="ignore"):
            values: Floats = np.nanmean(np.where(np.isfinite(table).any(axis=0), table, 0.0), axis=0)
        values[~np.isfinite(table).any(axis=0)] = np.nan
        return values

    columns = np.stack([mean(""), mean("_control"), mean("_flip"), mean("_control_flip")], axis=1)
    columns = columns[np.isfinite(columns).all(axis=1)]
    if len(columns) < 2:
        return None
    differences = columns[:, 0] - columns[:, 1]
    excess = columns[:, 2] - columns[:, 3]
    low, high = means_interval(excess[:, None], seed=seed)
    deviation = float(differences.std(ddof=1))
    needed = NormalDist().inv_cdf(1 - decision.alpha) + NormalDist().inv_cdf(_POWER)
    return Effect(
        changed=float(columns[:, 2].mean()),
        control=float(columns[:, 3].mean()),
        low=float(low[0]),
        high=float(high[0]),
        probability=float(differences.mean()),
        p=sign_flip(differences, seed),
        detectable=needed * deviation / math.sqrt(len(columns)),
        n=len(columns),
    )


def _unusual(effects: Effects) -> Effect | None:
    """One photo: is its own effect outside of what random patches give, by a t-test for one further value?"""
    if "drop" not in effects:
        return None
    from scipy.stats import t  # noqa: PLC0415  # comes with scikit-learn, an extra

    others = np.array(effects["random"])
    deviation = max(float(others.std(ddof=1)), 1e-9) * math.sqrt(1 + 1 / len(others))
    own = effects["drop"][0]
    score = (own - float(others.mean())) / deviation
    flip = effects["drop_flip"][0]
    return Effect(
        changed=flip, control=0.0, low=math.nan, high=math.nan, probability=own - float(others.mean()),
        p=float(t.sf(score, len(others) - 1)), detectable=math.nan, n=1,
    )  # fmt: skip


def sign_flip(differences: Floats, seed: int = 0) -> float:
    """One-sided p that the mean of paired differences is above 0: how often random signs give as much.

    Exact up to 12 pairs; otherwise 9,999 random signs, and the observed ones, which count as one of them.
    """
    observed = differences.mean()
    if len(differences) <= _EXACT:
        signs = np.array(list(product((1.0, -1.0), repeat=len(differences))))
    else:
        drawn = np.random.default_rng(seed).integers(0, 2, (_SIGNS, len(differences))) * 2.0 - 1.0
        signs = np.concatenate([np.ones((1, len(differences))), drawn])
    # Sums of the same numbers in another order differ by rounding, which must not decide.
    slack = 1e-12 * max(float(np.abs(differences).mean()), 1e-300)
    return float(((signs @ differences) / len(differences) >= observed - slack).mean())


def permutation_test(values: Floats, own: Bools, seed: int = 0) -> float:
    """One-sided p that the mean of some values is above that of the others: how often random ones have as high a mean.

    9,999 random choices of as many values, and the observed one, which counts as one of them.
    """
    random = np.random.default_rng(seed)
    count, observed = int(own.sum()), float(values[own].sum())
    sums = [float(random.permutation(values)[:count].sum()) for _ in range(_SIGNS)]
    slack = 1e-12 * max(float(np.abs(values).sum()), 1e-300)  # sums in another order differ by rounding
    return (1 + int((np.array(sums) >= observed - slack).sum())) / (1 + _SIGNS)


def adjust(p_values: Sequence[float]) -> list[float]:
    """Benjamini-Hochberg: the smallest false discovery rate at which each test would be rejected."""
    values = np.asarray(p_values, dtype=np.float64)
    if not len(values):
        return []
    order = np.argsort(values, kind="stable")
    ranked = values[order] * len(values) / np.arange(1, len(values) + 1)
    adjusted = np.minimum.accumulate(ranked[::-1])[::-1].clip(max=1.0)
    found = np.empty(len(values))
    found[order] = adjusted
    return [float(value) for value in found]


def smallest_share(photos: int, fewest: int) -> float | None:
    """The smallest part of photos with a shortcut of which ``fewest`` of ``photos`` show it with a power of 80%.

    None where not even a shortcut in all of them is enough.
    """
    return next((part / 100 for part in range(1, 101) if _at_least(fewest, photos, part / 100) >= _POWER), None)


def _at_least(fewest: int, photos: int, share: float) -> float:
    """The probability that of so many photos, each with a shortcut with probability ``share``, enough have it."""
    if photos > 1000:  # where the sum is long, the normal distribution is as good
        spread = math.sqrt(photos * share * (1 - share))
        return 1.0 if spread == 0 else 1 - NormalDist(photos * share, spread).cdf(fewest - 0.5)
    return sum(math.comb(photos, n) * share**n * (1 - share) ** (photos - n) for n in range(fewest, photos + 1))


def _covered(tested: Sequence[Tested]) -> list[Tested]:
    """Mark findings that another one of the class explains: smaller, overlapping, and with most of the effect."""
    found = list(tested)
    for number, one in enumerate(found):
        for other_number, other in enumerate(found):
            if number != other_number and _explains(other, one):
                found[number] = replace(one, covered_by=other_number)
                break
    return found


def _explains(one: Tested, other: Tested) -> bool:
    """Whether a finding makes another one redundant."""
    pair = (one, other)
    if not all(each.finding and each.is_shortcut for each in pair) or one.covered_by is not None:
        return False
    kinds = {each.suspicion.kind for each in pair}
    strengths = [max(effect.excess for effect in each.effects.values()) for each in pair]
    if one.suspicion.target != other.suspicion.target or (len(kinds) > 1 and kinds & {"background", "colour"}):
        return False
    if kinds == {"colour"}:
        return one.decided >= other.decided
    regions = [each.suspicion.regions.any(axis=0) for each in pair]
    sizes = [float(each.suspicion.regions.sum(axis=1).mean()) for each in pair]
    if not (regions[0] & regions[1]).any():
        return False
    # Per patch, so that a corner explains the edges it is part of, and a border its edges only if these do less.
    return (strengths[0] >= 0.8 * strengths[1] and sizes[0] < sizes[1]) or (
        strengths[0] > 1.25 * strengths[1] and sizes[0] >= sizes[1]
    )
