"""Writes tests/baseline/baseline.npz: the numbers of all methods on small models of every family that is served.

    python scripts/write_baseline.py [--only NAME ...]
    python scripts/write_baseline.py --evaluations [--only PROTOCOL ...]

It is for the state before a change that must leave numbers as they are; the test beside the file compares with it. With
``--only`` nothing is written: the given models are run, and what is served is printed. With ``--evaluations`` it writes
evaluation.npz instead: the numbers of every protocol, or, with ``--only``, of the given ones beside those stored.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / "baseline"), str(TESTS / "support")]

import baseline_models  # noqa: E402
import baseline_numbers  # noqa: E402
import evaluation_numbers  # noqa: E402


def main() -> None:
    """Take the numbers and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--evaluations", action="store_true")
    given = parser.parse_args()
    only = given.only
    torch.set_num_threads(1)
    if given.evaluations:
        with tempfile.TemporaryDirectory() as out:
            evaluation_numbers.save(Path(out), only)
        return
    methods = baseline_numbers.spellings()
    found = {}
    for name in only or [*baseline_models.IMAGE_MODELS, *baseline_models.TEXT_MODELS]:
        start = time.process_time()
        numbers = found[name] = baseline_numbers.numbers_of(name, methods)
        served = [method for method, value in numbers.items() if not isinstance(value, str)]
        print(f"{name}: {len(served)} of {len(methods)} served, {time.process_time() - start:.2f} s", flush=True)
        if only:
            print("  refused:", *(f"{method} ({numbers[method]})" for method in methods if method not in served))
    if not only:
        baseline_numbers.save(found)


if __name__ == "__main__":
    main()
