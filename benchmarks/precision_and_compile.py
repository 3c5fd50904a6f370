"""What bfloat16 and torch.compile save, and what they do to the maps.

    python benchmarks/precision_and_compile.py --model timm/vit_tiny_patch16_224@FILE --mean 0.5 --std 0.5
        --photos FOLDER [--count 4] [--methods gae ...] [--compile] [--repeats 3] [--json FILE]

Maps of the model in its own precision are compared with those of the same model under autocast to bfloat16, for the
classes that the first says: the lowest rank correlation over the photos, and the largest difference as a part of the
largest score. Time is processor time of one thread, the two side by side. ``--compile`` asks the same of perturbation
methods with the model compiled instead, which is the only place where a compiled model is of use: what is listened to
cannot be compiled.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rows import median_ratio, time_in_turn, write_rows
from torch import Tensor

import vitreous
from vitreous.errors import VitreousError
from vitreous.inputs.images import read_image
from vitreous.methods import list_methods
from vitreous.methods.spelling import cost_of
from vitreous.metrics.sanity import pearson
from vitreous.models import LoadedModel, load_model

TIMED = ["decompx.skipplus", "ixg", "gae", "gradtoken"]
# Sums over layers and propagation are maps of their own, which may survive bfloat16 where the plain ones do not.
AGGREGATED = [
    *("gae.propagate", "attcat.skipplus", "ixg.plus", "ixg.skipplus", "fullgrad_plus.skipplus", "alti.plus"),
    *("alti.skipplus", "decompx.plus", "decompx.skipplus", "decompx.propagate", "decompx.skipplus.propagate"),
]
COMPILED = ["occlusion:window=4,stride=4", "rise:budget=64"]


def bfloat16() -> AbstractContextManager[Any]:
    """The model's matrix products in bfloat16."""
    return torch.autocast("cpu", dtype=torch.bfloat16)


def maps_of(
    model: LoadedModel, images: Tensor, spellings: list[str], target: Tensor | None, mode: AbstractContextManager[Any]
) -> vitreous.Explanation:
    """The maps of all methods, in one run."""
    with mode:
        return vitreous.explain(model, images, spellings, target)


def bf16_errors(model: LoadedModel, images: Tensor, spelling: str) -> dict[str, Any]:
    """What bfloat16 does to the maps of a method, or why it does not run in it."""
    exact = maps_of(model, images, [spelling], None, nullcontext())
    try:
        rounded = maps_of(model, images, [spelling], exact.target, bfloat16())
    except VitreousError as error:
        return {"refused": str(error).partition(". Methods")[0]}
    return errors(exact.scores[spelling], rounded.scores[spelling])


def errors(exact: Tensor, rounded: Tensor) -> dict[str, Any]:
    """How far maps (photos, patches) are from those that they should be."""
    ranks, other_ranks = (maps.double().argsort(dim=1, stable=True).argsort(dim=1).numpy() for maps in (exact, rounded))
    differences = (rounded.double() - exact.double()).abs().amax(dim=1) / exact.double().abs().amax(dim=1)
    return {
        "rank_correlation": float(np.nanmin(pearson(ranks, other_ranks))),
        "largest_difference": float(np.nanmax(differences.numpy())),  # of maps that are all 0 there is none
    }


def compiled_row(model: LoadedModel, images: Tensor, spelling: str, repeats: int) -> dict[str, Any]:
    """A perturbation method with its evaluations compiled and not."""
    plain, fast = (partial(vitreous.explain, model, images, spelling, 0, compile=on) for on in (False, True))
    row = {"method": spelling} | errors(plain().scores[spelling], fast().scores[spelling])
    times = time_in_turn({"plain": plain, "compiled": fast}, repeats)
    return {"option": "compile", **row, "gain": median_ratio(times["plain"], times["compiled"])}


def main() -> None:
    """Print and write a row for every method and option."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--mean", type=float, default=0.5)
    parser.add_argument("--std", type=float, default=0.5)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--count", type=int, default=4)
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(given.model, mean=(given.mean,) * 3, std=(given.std,) * 3)
    photos = sorted(given.photos.glob("*.jpg"))[: given.count]
    images = model.preprocessing([read_image(photo) for photo in photos])
    if given.compile:
        compiled = [compiled_row(model, images[:1], spelling, given.repeats) for spelling in given.methods or COMPILED]
        write_rows(given.json, compiled, model=given.model.partition("@")[0], photos=1)
        for row in compiled:
            print(" ".join(f"{name} {value}" for name, value in row.items()))
        return
    one_run = [info.name for info in list_methods() if cost_of(info.name).one_run]
    spellings = given.methods or [*one_run, *AGGREGATED]
    rows: list[dict[str, Any]] = []
    for spelling in spellings:
        rows.append({"option": "bf16", "method": spelling, **bf16_errors(model, images, spelling)})
        print(" ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
        write_rows(given.json, rows, model=given.model.partition("@")[0], photos=len(images))

    def forward(mode: AbstractContextManager[Any]) -> None:
        with torch.no_grad(), mode:
            model.model(images)

    for name in ("forward", *TIMED):
        run = forward if name == "forward" else lambda mode, name=name: maps_of(model, images, [name], None, mode)
        jobs = {"exact": lambda run=run: run(nullcontext()), "bf16": lambda run=run: run(bfloat16())}
        times = time_in_turn(jobs, given.repeats)
        rows.append({"option": "bf16", "method": name, "gain": median_ratio(times["exact"], times["bf16"])})
        print(f"bf16 {name:24} {rows[-1]['gain']:.2f} times as fast", flush=True)
        write_rows(given.json, rows, model=given.model.partition("@")[0], photos=len(images))


if __name__ == "__main__":
    main()
