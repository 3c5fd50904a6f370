"""Small evaluations for tests: generated photos with masks, a small random model, and their stored tables."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

import forked
from forked import Forked
from vitreous._utils.storage import CHECKSUM, sealed
from vitreous.evaluation.run import ModelChoice, Run
from vitreous.evaluation.store import Store

PROTOCOL = "chefer-2021-segmentation"
METHODS = ("gae", "rollout")
MODEL = ModelChoice("timm/test_vit@random", image_size=(32, 32))


def write_photos(folder: Path, count: int, *, broken: tuple[int, ...] = (), size: int = 40) -> str:
    """Write photos of noise with a mask each, and give the data set's spelling."""
    (folder / "images").mkdir(parents=True)
    (folder / "masks").mkdir()
    random = np.random.default_rng(0)
    for number in range(count):
        photo = folder / "images" / f"{number:04d}.png"
        Image.fromarray(random.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(photo)
        mask = np.zeros((size, size), dtype=np.uint8)
        mask[size // 4 : size // 2 + number % (size // 3), size // 4 : -size // 4] = 255
        Image.fromarray(mask).save(folder / "masks" / f"{number:04d}.png")
        if number in broken:
            photo.write_bytes(b"this is not a photo")
    return f"masks:{folder}"


def command(data: str, out: Path, *more: object) -> list[str]:
    """The command line of a small evaluation; everything random has one thread and small shards."""
    arguments = ["--protocol", PROTOCOL, "--model", MODEL.name, "--image-size", "32", "--data", data]
    arguments += ["--methods", ",".join(METHODS), "--out", str(out), "--threads", "1", "--shard-size", "2"]
    arguments += ["--no-controls"]
    return [sys.executable, "-m", "vitreous", "evaluate", *arguments, *map(str, more)]


def start(arguments: list[str]) -> Forked:
    """Start a command line without waiting for it."""
    return forked.start(arguments[1:], env={**os.environ, "OMP_NUM_THREADS": "1"})


def start_worker(store: Store) -> Forked:
    """Start a worker of a run as ``engines._start`` does, which a test replaces by this: it imports nothing again."""
    folder = Path(tempfile.mkdtemp(prefix="worker-"))
    pipe = folder / "given"
    os.mkfifo(pipe)
    # A worker goes on while its parent is the process that is named here.
    arguments = ["-m", "vitreous.evaluation.engines", str(store.folder), str(forked.parent_of_all())]
    environment = {**os.environ, "OMP_NUM_THREADS": str(store.run.threads)}
    nowhere = Path(os.devnull)
    process = Forked(arguments, nowhere, nowhere, None, environment, pipe)
    process.stdin = pipe.open("wb")  # opened when the worker has opened it
    shutil.rmtree(folder)
    return process


def wait_for(condition: Callable[[], bool], *processes: Forked | subprocess.Popen[str]) -> None:
    """Wait until something is so, a process has ended, or two minutes have passed; the caller checks which."""
    deadline = time.monotonic() + 120
    while all(each.poll() is None for each in processes) and time.monotonic() < deadline and not condition():
        time.sleep(0.002)


def only_run(out: Path) -> Store:
    """The one run in a folder of runs."""
    (folder,) = out.iterdir()
    return Store.open(folder)


def rewritten(manifest: dict, **changes) -> bytes:
    """A manifest of which parts of the run are changed, with the key and the checksum that belong to them."""
    values = {**manifest["run"], **changes}
    kept = {name: value for name, value in manifest.items() if name != CHECKSUM}
    return sealed({**kept, "key": Run.from_json(values).key, "run": values})


def everything(store: Store) -> pa.Table:
    """All columns of all images of a run's plan."""
    return store.read(store.run.shards(), ["index", "image", "method", "error", *store.run.columns])


def some_run(**changes) -> Run:
    """A run of invented content, for tests of what is made of one."""
    values = {
        "protocol": "p",
        "settings": {"version": 1},
        "model": ModelChoice("timm/some"),
        "weights": "w",
        "preprocessing": {"mean": (0.5, 0.5, 0.5)},
        "data": "masks:/somewhere",
        "data_fingerprint": "d",
        "images": 10,
        "methods": ("a", "b"),
        "columns": ("x", "y"),
        "shard_size": 4,
        "versions": {"vitreous": "1"},
    }
    return Run(**{**values, **changes})
