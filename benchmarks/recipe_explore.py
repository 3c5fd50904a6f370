"""Candidates for one map that leads every column, compared on the half of the photos that is there to choose.

    python benchmarks/recipe_explore.py --model tiny --photos 40 --cache FOLDER [--parts free tokens pixels saco]
    python benchmarks/recipe_explore.py --model tiny --photos 120 --cache FOLDER --subsets 4

Everything is made of base maps that ``recipe.py`` keeps. ``free`` columns (segmentation and the grid game) need no run
of the model; they are measured for all candidates, the others for those that ``--only`` names.

``--subsets`` runs every photo with that many noisy sets of patches of each size, from the top and from the bottom of
one order, and prints for every term how well its sum over the kept patches tells which of these sets keeps more of the
probability. That costs as much as measuring a few candidates and judges any number of terms; by it the three terms of
the fine scale of ``twoscale`` were found.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recipe import (
    COLUMNS,
    MODELS,
    base_maps,
    cached,
    grid_game,
    measured,
    mosaics_of,
    open_model,
    samples_of,
    sign_flip,
)
from torch import Tensor

Base = dict[str, Any]


def z(maps: Tensor) -> Tensor:
    """Mean 0 and standard deviation 1 over the patches of every photo."""
    return (maps - maps.mean(1, keepdim=True)) / maps.std(1, keepdim=True).clamp(min=1e-12)


def scaled(maps: Tensor) -> Tensor:
    """Standard deviation 1 over the patches, zero where it was."""
    return maps / maps.pow(2).mean(1, keepdim=True).sqrt().clamp(min=1e-12)


def rank(maps: Tensor) -> Tensor:
    """Ranks from 0 to 1."""
    return maps.argsort(1).argsort(1).float() / (maps.shape[1] - 1)


def root(maps: Tensor) -> Tensor:
    """The signed square root."""
    return maps.sign() * maps.abs().sqrt()


def spread(base: Base, maps: Tensor, blocks: range | None = None) -> Tensor:
    """Mean attention of some blocks, all but the last by default, times the maps."""
    blocks = blocks or range(base["attention"].shape[1] - 1)
    matrix = base["attention"][:, blocks.start : blocks.stop].float().mean(1)
    return (matrix @ maps[..., None])[..., 0]


def alike(base: Base, which: int, temperature: float) -> Tensor:
    """Affinities of patches by the cosine of their centred tokens, rows to 1."""
    tokens = base["features"][:, which].float()
    tokens = torch.nn.functional.normalize(tokens - tokens.mean(1, keepdim=True), dim=-1)
    return (tokens @ tokens.mT / temperature).softmax(-1)


def times(matrix: Tensor, maps: Tensor) -> Tensor:
    """Matrix x map."""
    return (matrix @ maps[..., None])[..., 0]


def fullgrad(base: Base, start: int = 0) -> Tensor:
    """FullGrad+ from a block on."""
    return base["ixg libra logit"][:, start:].sum(1) + base["bias libra logit"][:, start:].sum(1)


def candidates(base: Base) -> dict[str, Tensor]:  # noqa: C901, PLR0915 - a list
    """All of them by name."""
    depth = base["ixg libra logit"].shape[1]
    half = -(-depth // 2)
    full, upper = fullgrad(base), fullgrad(base, half)
    decomposed = base["ixg libra logit"][:, half:].sum(1)
    spread_upper, spread_full = spread(base, upper), spread(base, full)
    found = {
        **{name: maps for name, maps in base["maps"].items() if name != "recipe_probe"},
        "random": torch.rand(full.shape, generator=torch.Generator().manual_seed(0)),
        "FG": full,
        "FG.skipplus": upper,
        "decompx.skipplus": decomposed,
        "decompx.skipplus.propagate": spread(base, decomposed),
        "gae.propagate": spread(base, base["maps"]["gae"]),
        "P": spread_upper,
        "P all": spread_full,
        "P low": spread(base, upper, range(half)),
        "P up": spread(base, upper, range(half, depth - 1)),
    }
    s = torch.sigmoid(4 * z(spread_upper))
    for weight in (0.3, 0.6, 1.0, 1.5):
        found[f"zFG+{weight}zP"] = z(full) + weight * z(spread_upper)
    found["sqrt zFG+0.5zP"] = root(z(full)) + 0.5 * z(spread_upper)
    found["sqrt zFG+zP"] = root(z(full)) + z(spread_upper)
    found["rank FG+s"] = rank(full) + s
    found["0.5rank FG+s"] = 0.5 * rank(full) + s
    for which, name in ((0, "mid"), (2, "last")):
        for temperature in (0.05, 0.1, 0.2):
            matrix = alike(base, which, temperature)
            found[f"aff {name} {temperature} FG"] = times(matrix, full)
            found[f"aff {name} {temperature} P"] = times(matrix, spread_upper)
    matrix = alike(base, 2, 0.1)
    found["zFG+z aff FG"] = z(full) + z(times(matrix, full))
    found["zFG+z aff P"] = z(full) + z(times(matrix, spread_upper))
    found["zFG+0.6zP+0.6z aff FG"] = z(full) + 0.6 * z(spread_upper) + 0.6 * z(times(matrix, full))
    found["FG+ P+"] = full.clamp(min=0) * spread_upper.clamp(min=0)
    found["sqrt FG+ P+"] = (full.clamp(min=0) * spread_upper.clamp(min=0)).sqrt()
    found["zgae+zFG"] = z(base["maps"]["gae"]) + z(full)
    found["z sqrt gae+zFG+zP"] = z(base["maps"]["gae"].clamp(min=0).sqrt()) + z(full) + z(spread_upper)
    found["z sqrt gael+zFG+zP"] = z(base["maps"]["gae:rule=libra"].clamp(min=0).sqrt()) + z(full) + z(spread_upper)
    for which, name, temperature in ((0, "mid", 0.2), (2, "last", 0.2), (0, "mid", 0.15)):
        region = times(alike(base, which, temperature), spread_upper)
        for weight in (1.0, 2.0, 4.0):
            found[f"zFG+{weight}z {name}{temperature} P"] = z(full) + weight * z(region)
            found[f"zU+{weight}z {name}{temperature} P"] = z(upper) + weight * z(region)
            found[f"zU+{weight}tanh {name}{temperature} P"] = z(upper) + weight * torch.tanh(2 * z(region))
            found[f"zU+zP+{weight}z {name}{temperature} P"] = z(upper) + z(spread_upper) + weight * z(region)
        direct = times(alike(base, which, temperature), upper)
        found[f"zU+2z {name}{temperature} U"] = z(upper) + 2 * z(direct)
        found[f"zFG+zU+zP+2z {name}{temperature} P"] = z(full) + z(upper) + z(spread_upper) + 2 * z(region)
    region = times(alike(base, 0, 0.2), spread_upper)
    found["rU+rP"] = scaled(upper) + scaled(spread_upper)
    found["rFG+rP"] = scaled(full) + scaled(spread_upper)
    found["rU+rP+2z mid0.2 P"] = scaled(upper) + scaled(spread_upper) + 2 * z(region)
    found["rU+rP+2r mid0.2 P"] = scaled(upper) + scaled(spread_upper) + 2 * scaled(region)
    found["zU+zP+2z mid0.2 P-1"] = z(z(upper) + z(spread_upper) + 2 * z(region)) - 1
    for weight in (1.0, 2.0, 4.0):
        found[f"zU+{weight}zP"] = z(upper) + weight * z(spread_upper)
        found[f"zU+{weight}tanh P"] = z(upper) + weight * torch.tanh(2 * z(spread_upper))
    gae = z(base["maps"]["gae"].clamp(min=0).sqrt())
    fine, fine_upper = gae + z(full), gae + z(upper)
    soft, softer = torch.tanh(2 * z(region)), torch.tanh(2 * z(spread_upper))
    for weight in (0.5, 1.0, 2.0, 3.0):
        found[f"g+FG+{weight}tC"] = fine + weight * soft
        found[f"g+U+{weight}tC"] = fine_upper + weight * soft
        found[f"g+FG+{weight}tP"] = fine + weight * softer
    found["g+FG+zP+tC"] = fine + z(spread_upper) + soft
    found["g+FG+U+zP+2tC"] = fine + z(upper) + z(spread_upper) + 2 * soft
    found["g+FG+U+a+2tC"] = fine + z(upper) + z(base["maps"]["attcat:rule=libra"]) + 2 * soft
    found["2g+FG+U+2tC"] = fine + fine_upper + 2 * soft
    found["2g+FG+U+4tC"] = fine + fine_upper + 4 * soft
    found["g+FG+U+t+2tC"] = fine + z(upper) + z(base["maps"]["tokentm"].clamp(min=0).sqrt()) + 2 * soft
    # The order of the best patches by what they contribute, the border of the object by regions: cubes of ranks are
    # steep at the top and flat in the middle.
    found["g+FG"], found["g+U"], found["g+FG+a"] = fine, fine_upper, fine + z(base["maps"]["attcat:rule=libra"])
    steps = {"C": torch.sigmoid(4 * z(region)), "P": torch.sigmoid(4 * z(spread_upper))}
    for weight in (1.0, 2.0, 4.0, 8.0):
        for name, step in steps.items():
            found[f"{weight}R3+s{name}"] = weight * rank(fine).pow(3) + step
            found[f"{weight}RU3+s{name}"] = weight * rank(fine_upper).pow(3) + step
            found[f"{weight}R5+s{name}"] = weight * rank(fine).pow(5) + step
    threefold = fine + z(spread_upper)
    found["g+FG+zP"], found["g+U+zP"] = threefold, fine_upper + z(spread_upper)
    found["1.5g+FG+1.5zP"] = 1.5 * gae + z(full) + 1.5 * z(spread_upper)
    for weight in (4.0, 8.0):
        found[f"{weight}RP3+sC"] = weight * rank(threefold).pow(3) + steps["C"]
    found["g+FG+zP+0.5tC"] = threefold + 0.5 * soft
    found["g+FG+zP+zC"] = threefold + z(region)
    found["g+FG+zP+0.5zC"] = threefold + 0.5 * z(region)
    found |= three_terms(base, gae, z(spread_upper), z(region))
    for name in list(found):
        if "R3" in name or "RU3" in name or "R5" in name or "tC" in name or "zP" in name or "RP3" in name:
            found[f"{name}-1"] = z(found[name]) - 1
    return found


def bounded(maps: Tensor) -> Tensor:
    """Standardised, with no patch beyond -2 and 3 standard deviations."""
    return z(z(maps).clamp(-2, 3))


def three_terms(base: Base, gae: Tensor, attended: Tensor, likely: Tensor) -> dict[str, Tensor]:
    """Sums of F, O and H (the logit, the odds, what hiding a patch loses), with GAE and regions."""
    regions = attended + 0.5 * likely
    odds = base["ixg libra probability"].sum(1) + base["bias libra probability"].sum(1)
    own, odds, hidden = bounded(fullgrad(base)), bounded(odds), bounded(base["hide plain probability"].sum(1))
    fine = own + 0.5 * odds + hidden
    found = {"F": own, "O": odds, "H": hidden, "F+O/2+H": fine}
    for weight in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0):
        found[f"F+O/2+H+{weight}r"] = fine + weight * regions
        found[f"F+O/2+H+g+{weight}r"] = fine + gae + weight * regions
        found[f"F+H/2+{weight}r"] = own + 0.5 * hidden + weight * regions
        found[f"F+O/2+H/2+{weight}r"] = fine - 0.5 * hidden + weight * regions
        found[f"F+H+{weight}r"] = own + hidden + weight * regions
    for weight in (1.0, 1.25, 1.5, 2.0, 2.5, 3.0):  # the fine scale as far as a patch lies in a region
        found[f"s(F+O/2+H)+{weight}R"] = torch.sigmoid(2 * z(regions)) * fine + weight * z(regions)
        for alike, name in ((1.0, "Rc"), (2.0, "Rd")):
            region = z(attended + alike * likely)
            found[f"s(F+O/2+H)+{weight}{name}"] = torch.sigmoid(2 * region) * fine + weight * region
            half = fine - 0.5 * hidden
            found[f"s(F+O/2+H/2)+{weight}{name}"] = torch.sigmoid(2 * region) * half + weight * region
    return {name: z(maps) for name, maps in found.items()}


def terms(base: Base) -> dict[str, Tensor]:
    """What a fine scale can be made of: every read-out of every pass, of all blocks and of either half."""
    half = -(-base["ixg libra logit"].shape[1] // 2)
    found = {name: maps for name, maps in base["maps"].items() if name != "recipe_probe"}
    for key, maps in base.items():
        kind = key.split(" ")[0]
        if kind in {"ixg", "hide", "hide_read", "rows"}:
            found |= {key: maps.sum(1), f"{key}, lower": maps[:, :half].sum(1), f"{key}, upper": maps[:, half:].sum(1)}
        elif kind == "bias":
            of = key.removeprefix("bias ")
            found[f"fullgrad+ {of}"] = base[f"ixg {of}"].sum(1) + maps.sum(1)
    return found | {f"{name}, bounded": bounded(maps) for name, maps in found.items()}


def subset_correlations(model: str, base: Base, draws: int, seed: int = 0) -> dict[str, np.ndarray]:
    """By term, how its sums over sets of kept patches go with the probability: from the top, the bottom, and both.

    Compared are only sets of one size and one end of the same photo.
    """
    _, adapter = open_model(model)
    samples = samples_of(model, "choose", len(base["names"]))
    order = z(fullgrad(base)) + z(base["maps"]["gae"].clamp(min=0).sqrt())
    of = {name: z(maps.double()) for name, maps in terms(base).items()}
    random, patches = torch.Generator().manual_seed(seed), order.shape[1]
    sums: dict[tuple[str, bool], list[Tensor]] = {}
    for start in range(0, len(samples), 8):
        some, rows = samples[start : start + 8], slice(start, start + 8)
        batch = adapter.open(some, [adapter.prepare(sample) for sample in some])
        for count, top in ((round(part * patches), top) for part in (0.1, 0.3, 0.5, 0.7, 0.9) for top in (True, False)):
            found: dict[str, list[Tensor]] = {}
            for draw in range(draws):
                noise = torch.randn(order[rows].shape, generator=random) * (0.7 + draw % 2)
                kept = (order[rows] + noise).argsort(1, descending=top)[:, :count].sort(1).values
                chances = batch.runner.logits_of_kept(batch.images, kept).double().softmax(-1)
                found.setdefault("", []).append(chances.gather(1, base["target"][rows, None])[:, 0])
                for name, maps in of.items():
                    found.setdefault(name, []).append(maps[rows].gather(1, kept).sum(1))
            for name, each in found.items():
                values = torch.stack(each, 1)
                sums.setdefault((name, top), []).append((values - values.mean(1, keepdim=True)).flatten())
        print(f"{start + len(some)} of {len(samples)}", flush=True)
    whole = {key: torch.cat(each) for key, each in sums.items()}

    def correlation(name: str, ends: list[bool]) -> float:
        one, other = (torch.cat([whole[which, end] for end in ends]) for which in (name, ""))
        return float(one @ other / (one.norm() * other.norm()))

    return {name: np.array([correlation(name, ends) for ends in ([True], [False], [True, False])]) for name in of}


def orders_of(folder: Path, name: str, count: int) -> Base:
    """The orders in which patches of the first photos go, in eight steps; from a file where they are known."""
    file = folder / f"{name}-choose-orders{count}.pt"
    if not file.exists():
        _, adapter = open_model(name)
        samples = samples_of(name, "choose", count)
        torch.save(base_maps(adapter, samples, explained="predicted", bases=["recipe_orders"]), file)
    return torch.load(file, weights_only=True)


def refined(base: Base, orders: Base, known: dict[str, Tensor]) -> dict[str, Tensor]:
    """Candidates that need runs with fewer patches: by the orders in which they go, or by the averaged fine scale."""
    del base, known
    cubes, average = z(orders["D"].pow(3) + orders["I"].pow(3)), z(orders["MD"] + orders["MI"])
    fine, regions = orders["fine"], orders["R"]
    found = {"D": orders["D"], "I": orders["I"], "O": cubes, "M": average}
    for weight in (2.0, 3.0, 4.0):
        found[f"fine+2O+{weight}R"] = fine + 2 * cubes + weight * regions
        found[f"2M+{weight}R"] = 2 * average + weight * regions
    found["fine+4O+4R"] = fine + 4 * cubes + 4 * regions
    found["2M+O+3R"] = 2 * average + cubes + 3 * regions
    return found


def table_of(table: dict[str, dict[str, np.ndarray]], against: tuple[str, ...]) -> str:
    """A row per candidate; ``*`` marks a column in which it is better than all of ``against`` with p < 0.05."""
    columns = [column for column in COLUMNS if column.name in table]
    lines = ["| map | " + " | ".join(column.name for column in columns) + " |"]
    for name in next(iter(table.values())):
        cells = []
        for column in columns:
            values = table[column.name][name]
            known = [each for each in against if each in table[column.name]]
            gains = [(values - table[column.name][each]) * column.better for each in known if each != name]
            clear = all(gain.mean() > 0 and sign_flip(gain, 2000) < 0.05 for gain in gains)
            ahead = all(gain.mean() > 0 for gain in gains)
            cells.append(f"{values.mean():.2f}{'*' if clear else '+' if ahead else ''}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


AGAINST = ("tokentm", "gradtoken", "gae", "decompx.skipplus")


def main() -> None:
    """Print the table and keep the values."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), default="tiny")
    parser.add_argument("--photos", type=int, default=40)
    parser.add_argument("--first", type=int, help="only so many of them, for columns that run the model")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument(
        "--parts", nargs="+", default=["free"], choices=["free", "segmentation", "tokens", "pixels", "saco"]
    )
    parser.add_argument("--percent", type=int, nargs="+", default=[10, 30, 50, 70, 90])
    parser.add_argument("--orders", action="store_true", help="also candidates that drop patches, eight passes each")
    parser.add_argument("--only", nargs="+", help="candidates")
    parser.add_argument("--subsets", type=int, help="judge terms by so many sets of patches of each size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    base = cached(options.cache, options.model, "choose", options.photos)
    if options.subsets:
        found = subset_correlations(options.model, base["photos"], options.subsets)
        print("| term | from the top | from the bottom | both |\n| --- | ---: | ---: | ---: |")
        for name, values in sorted(found.items(), key=lambda item: -item[1][2]):
            print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in values) + " |")
        return
    photos, mosaics = (candidates(base[part]) for part in ("photos", "mosaics"))
    if options.orders:
        few = options.first or options.photos
        orders = orders_of(options.cache, options.model, few)
        cut = {key: values[:few] for key, values in base["photos"].items() if isinstance(values, Tensor)}
        photos |= refined(cut, orders, {name: maps[:few] for name, maps in photos.items()})
        mosaics = dict.fromkeys(photos, torch.zeros(1, 1))  # not measured for these
    chosen = options.only or list(photos)
    photos, mosaics = ({name: maps[name] for name in chosen} for maps in (photos, mosaics))
    table: dict[str, dict[str, np.ndarray]] = {}
    samples = samples_of(options.model, "choose", options.photos)
    if "free" in options.parts and MODELS[options.model].masks:
        table |= measured(options.model, samples, base["photos"], photos, ["segmentation"], options.percent)
    if "free" in options.parts and not options.orders:
        table |= grid_game(base["mosaics"], list(mosaics_of(samples)), mosaics)
    parts = [part for part in options.parts if part != "free"]
    if parts:
        few = options.first or options.photos
        cut = {"names": base["photos"]["names"][:few], "target": base["photos"]["target"][:few]}
        cut |= {"grid": base["photos"]["grid"]}
        some = {name: maps[:few] for name, maps in photos.items()}
        table |= measured(options.model, samples[:few], cut, some, parts, options.percent)
    file = options.cache / f"explore-{options.model}{'-orders' if options.orders else ''}.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    for column, of in table.items():
        known.setdefault(column, {}).update({name: values.tolist() for name, values in of.items()})
        for name in AGAINST:  # measured before
            count = len(next(iter(of.values())))
            if name not in of and len(known[column].get(name, ())) >= count:
                of[name] = np.array(known[column][name][:count])
    file.write_text(json.dumps(known))
    print(table_of(table, AGAINST))


if __name__ == "__main__":
    main()
