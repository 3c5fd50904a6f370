"""The real program, killed and in company: what is stored is what one unbroken run stores, bit for bit."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

import forked
from evaluations import METHODS, MODEL, PROTOCOL, command, everything, only_run, start, wait_for, write_photos
from vitreous.evaluation.evaluate import evaluate
from vitreous.evaluation.run import RunError

IMAGES = 100  # enough shards that a quick machine does not finish before it is killed


def shards(out):
    return len(list(out.glob("*/*.parquet")))


def partial_files(out):
    return list(out.glob("*/shard-*.part"))


def finish(process):
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return output, errors


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Photos of which one is broken, so that rows with errors are stored as well."""
    return write_photos(tmp_path_factory.mktemp("killed") / "photos", IMAGES, broken=(5,))


@pytest.fixture(scope="module")
def unbroken(photos, tmp_path_factory):
    """What an unbroken run in this process prints and stores."""
    out = tmp_path_factory.mktemp("unbroken")
    results = evaluate(MODEL, photos, PROTOCOL, METHODS, controls=False, out=out, threads=1, shard_size=2)
    return results.rows(), everything(only_run(out))


def test_killed_again_and_again_it_resumes_to_the_same_results(photos, unbroken, tmp_path):
    """Interrupted, killed while a shard is being written, and killed at a random moment."""
    for _ in range(3):
        process = start(command(photos, tmp_path))
        wait_for(lambda: shards(tmp_path) >= 1, process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
        if process.returncode != 0:
            break
        # Where this process had to wait for its turn, all is done before the signal arrives: once more from the start.
        assert shards(tmp_path) == IMAGES // 2, errors
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
    assert process.returncode == 130, errors
    assert f"of {IMAGES} images; run the same command to resume" in errors
    assert "Traceback" not in errors

    process, before = start(command(photos, tmp_path)), shards(tmp_path)
    wait_for(lambda: shards(tmp_path) > before + 1 and partial_files(tmp_path), process)
    kill(process)
    process, before = start(command(photos, tmp_path)), shards(tmp_path)
    wait_for(lambda: shards(tmp_path) > before, process)
    time.sleep(random.uniform(0, 0.02))  # any moment must do, so it may be another one each time
    kill(process)

    there = shards(tmp_path)
    assert 2 < there < IMAGES // 2
    output, errors = finish(start(command(photos, tmp_path, "--json")))
    assert f"resumed: {there} of {IMAGES // 2} shards are there" in errors
    assert f"1 of {IMAGES} images could not be measured" in errors
    assert json.loads(output) == unbroken[0]
    assert everything(only_run(tmp_path)).equals(unbroken[1])
    assert {file.suffix for file in only_run(tmp_path).folder.iterdir()} == {".json", ".parquet"}


def test_two_processes_on_one_folder_share_the_work(photos, unbroken, tmp_path):
    processes = [start(command(photos, tmp_path, "--json")) for _ in range(2)]
    for process in processes:
        output, _ = finish(process)
        assert json.loads(output) == unbroken[0]
    assert everything(only_run(tmp_path)).equals(unbroken[1])
    assert {file.suffix for file in only_run(tmp_path).folder.iterdir()} == {".json", ".parquet"}


def test_workers_give_the_same_numbers_also_when_one_dies(photos, unbroken, tmp_path):
    process = start(command(photos, tmp_path, "--json", "--workers", 2))
    wait_for(lambda: shards(tmp_path) >= 2, process)
    children = worker_processes(process.pid)
    if children:  # they may be done already on a fast machine
        os.kill(children[0], signal.SIGKILL)
    output, _ = finish(process)
    assert json.loads(output) == unbroken[0]
    assert everything(only_run(tmp_path)).equals(unbroken[1])


def test_a_worker_whose_starter_is_gone_computes_nothing(photos, tmp_path):
    """The starter may be killed while its workers still import what they need."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    evaluate(MODEL, photos, PROTOCOL, METHODS, controls=False, out=tmp_path, threads=1, shard_size=2, limit=2)
    store = only_run(tmp_path)
    longer = json.dumps(replace(store.run, limit=4).as_json())
    for starter, stored in ((dead.pid, 1), (forked.parent_of_all(), 2)):
        worker = ["-m", "vitreous.evaluation.engines", str(store.folder), str(starter)]
        done = forked.run(worker, given=longer)  # it asks who its parent is
        assert done.returncode == 0, done.stderr
        assert shards(tmp_path) == stored


@pytest.mark.parametrize("deaf", [False, True])
def test_a_worker_that_does_not_start_leaves_none_of_the_others_behind(photos, tmp_path, monkeypatch, deaf):
    """The third cannot be started, or is gone before it was told what to do."""
    started, popen = [], subprocess.Popen

    def start_worker(_command, **options):
        third = len(started) == 2
        if third and not deaf:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(popen([sys.executable, "-c", "" if third else "import time; time.sleep(120)"], **options))
        if third:
            started[-1].wait()
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start_worker)
    try:
        with pytest.raises(RunError, match="workers cannot be started"):
            evaluate(MODEL, photos, PROTOCOL, METHODS, controls=False, out=tmp_path, shard_size=2, limit=4, workers=3)
        assert [process.returncode for process in started[:2]] == [-signal.SIGKILL] * 2
    finally:
        for process in started:
            process.kill()


def worker_processes(parent):
    """The workers that a process has started."""
    listed = os.listdir("/proc") if os.path.isdir("/proc") else []  # noqa: PTH208, PTH112
    found = []
    for number in filter(str.isdigit, listed):
        try:
            with open(f"/proc/{number}/stat") as file:  # noqa: PTH123
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(number))
    return found
