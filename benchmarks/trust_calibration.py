"""Whether the verdict of ``vitreous.trust`` orders maps by their faithfulness: thresholds on one half of the photos.

    python benchmarks/trust_calibration.py --model NAME --data KIND:PATH --rows FILE [--limit N] [--again] [--out FILE]

Every photo gets one map, by a method that its name chooses, so that good and bad maps are among them. Its faithfulness
is measured in another way than trust measures it: by the area between the curves of the predicted class's probability
while black pixels cover the least and the most relevant pixels first (18 runs of the whole photo). The two thresholds
of the verdict are chosen on the photos of one half, by the hash of their names, as those that explain most of the
variance of the faithfulness; all figures are those of the other half.

Every photo becomes a line of --rows; photos that have one are not measured again. --again measures trust again, after
it was changed, and keeps the faithfulness, which takes most of the time and does not depend on it.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import vitreous
from vitreous.datasets import Sample, Stratified, open_dataset
from vitreous.evaluation.protocols import find_protocol
from vitreous.evaluation.runner.measure import measure
from vitreous.evaluation.tasks.pixel_masking import AreaBetweenCurves
from vitreous.explanation.trust import DOUBTFUL_BOUND
from vitreous.metrics.metric import Weighted
from vitreous.metrics.sanity import spearman
from vitreous.metrics.segmentation import half_of
from vitreous.models import LoadedModel, load_model

METHODS = ("gae", "tokentm", "gradtoken", "decompx.skipplus", "attcat", "rollout", "edges", "random")
STEPS = tuple(range(10, 100, 10))
TASK = AreaBetweenCurves(percent=STEPS, filling="black before normalisation")


def main() -> None:
    """Measure, choose the thresholds and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--data", required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = measured(given)
    report = {"model": given.model, "photos": len(rows), **calibrated(rows)}
    print(json.dumps(report, indent=2))
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def measured(given: argparse.Namespace) -> list[dict]:
    """Trust and faithfulness of one map of every photo."""
    model = load_model(given.model)
    listed = Stratified(open_dataset(given.data), 0)
    squashed = replace(model, preprocessing=replace(model.preprocessing, resize="squash", resize_size=None))
    lines = given.rows.read_text(encoding="utf-8").splitlines() if given.rows.exists() else []
    before = {row["photo"]: row for row in map(json.loads, lines)}
    rows = []
    with given.rows.open("a", encoding="utf-8") as stream:  # the last line of a photo counts
        for index in range(min(given.limit or len(listed), len(listed))):
            sample = listed.load(index)
            assert isinstance(sample, Sample)
            row = before.get(sample.name, {})
            if "gap" not in row or given.again:
                method = METHODS[index % len(METHODS)]
                known = row.get("faithfulness")
                row = trusted(squashed, sample, method)
                row["faithfulness"] = faithfulness(squashed, sample, method) if known is None else known
                print(json.dumps(row), file=stream, flush=True)
            rows.append(row)
    return rows


def trusted(model: LoadedModel, sample: Sample, method: str) -> dict:
    """What trust says of a map."""
    explanation = vitreous.explain(model, [sample.image], [method])
    (trust,) = explanation.trust()
    map_ = trust.maps.get(method)
    return {
        "photo": sample.name,
        "method": method,
        "probability": trust.probability,
        "gap": 0.0 if map_ is None else map_.gap,
        "bound": 1.0 if map_ is None else map_.bound,
        "stability": None if map_ is None else map_.stability,
        "notes": list(trust.notes),
        "verdict": trust.verdict,
    }


def faithfulness(model: LoadedModel, sample: Sample, method: str) -> float:
    """The area between the curves of the least and of the most relevant pixels first."""
    protocol = replace(find_protocol("agcam-perturbation"), tasks=(TASK,))
    (row,) = measure(model, [sample], protocol, [method])
    metric = TASK.metrics[0]
    assert isinstance(metric.combine, Weighted)
    return float(metric.combine(np.array([row[column] for column in metric.columns])))


def calibrated(rows: list[dict]) -> dict:
    """Thresholds of one half, and what the verdicts are worth on the other."""
    halves = [[row for row in rows if half_of(row["photo"]) == half] for half in (0, 1)]
    fair, good = chosen(halves[0])
    return {
        "thresholds": {"fair": fair, "good": good},
        "chosen on": len(halves[0]),
        "with these": figures([with_thresholds(row, fair, good) for row in halves[1]], halves[1]),
        "with those of the package": figures([row["verdict"] for row in halves[1]], halves[1]),
        # For a model that they were not chosen with: there is nothing to hold out.
        "with those of the package, both halves": figures([row["verdict"] for row in rows], rows),
        "rank correlation of the gap with faithfulness": spearman(
            [relative(row) for row in halves[1]], [row["faithfulness"] for row in halves[1]]
        ),
    }


def relative(row: dict) -> float:
    """The gap as a part of the probability."""
    return row["gap"] / row["probability"]


def chosen(rows: list[dict]) -> tuple[float, float]:
    """The two thresholds, in steps of 0.05, that explain most of the variance of the faithfulness."""
    gaps = np.array([relative(row) for row in rows])
    values = np.array([row["faithfulness"] for row in rows])
    best, found = np.inf, (0.2, 0.5)
    for low, high in itertools.combinations(np.arange(-0.2, 0.9, 0.05).round(2).tolist(), 2):
        groups = [values[gaps < low], values[(gaps >= low) & (gaps < high)], values[gaps >= high]]
        if min(map(len, groups)) < len(rows) / 10:
            continue
        left = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
        if left < best:
            best, found = left, (low, high)
    return found


def with_thresholds(row: dict, fair: float, good: float) -> str:
    """The verdict by other thresholds on the gap; everything else as in the package."""
    if relative(row) < fair or row["bound"] > DOUBTFUL_BOUND:
        return "poor"
    return "good" if relative(row) >= good and not row["notes"] else "fair"


def figures(verdicts: list[str], rows: list[dict]) -> dict:
    """The mean faithfulness of every verdict, how many there are, and the rank correlation of the two."""
    values = np.array([row["faithfulness"] for row in rows])
    order = {"poor": 0, "fair": 1, "good": 2}
    found = {
        name: {
            "photos": verdicts.count(name),
            "faithfulness": float(np.mean([value for one, value in zip(verdicts, values, strict=True) if one == name]))
            if name in verdicts
            else None,
        }
        for name in order
    }
    return {**found, "rank correlation": spearman([float(order[one]) for one in verdicts], values)}


if __name__ == "__main__":
    main()
