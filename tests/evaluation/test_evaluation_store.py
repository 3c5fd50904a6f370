"""A run's folder: complete files or none, damage noticed, limits that grow, processes that die and meet."""

import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import forked
from evaluations import rewritten, some_run, wait_for
from vitreous._utils.storage import StorageError
from vitreous.evaluation.engines import SilentProgress, _watch, worker_loop
from vitreous.evaluation.run import RunError, Shard, content_hash, schema_of, take_lock
from vitreous.evaluation.store import Store

RUN = some_run()


def table(shard, run=RUN, error=None):
    rows = [(index, method) for index in shard for method in run.methods]
    columns = {
        "index": [index for index, _ in rows],
        "image": [f"{index}.png" for index, _ in rows],
        "method": [method for _, method in rows],
        "error": [error for _ in rows],
        "x": [index / 3 if error is None else None for index, _ in rows],
        "y": [float("nan") for _ in rows],
    }
    return pa.table(columns, schema=schema_of(run.columns))


def create(folder, run=RUN, **options):
    return Store.create(folder, run, {"command": ["test"]}, **options)


def fill(store):
    worker_loop(store, table, SilentProgress())


def without_checksum(folder, **changes):
    """A run's manifest as it was before manifests had a checksum."""
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    manifest.pop("sha256")
    return json.dumps(manifest, indent=2).encode()


def nothing(text):
    raise AssertionError(text)


class LateStore(Store):
    """A store in which a shard appears right after somebody has looked for it in vain."""

    def is_there(self, shard):
        there = super().is_there(shard)
        if not there:
            self.write(shard, table(shard))
        return there


class CountingProgress(SilentProgress):
    """Counts images, and lets a worker end after three looks."""

    def __init__(self, worker):
        self.worker, self.looks, self.images = worker, 0, 0

    def advance(self, images):
        self.images += images
        self.looks += 1
        if self.looks == 3:
            self.worker.communicate()


def test_a_shard_that_appears_between_two_looks_is_counted(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as worker:
        progress = CountingProgress(worker)
        _watch(LateStore(create(tmp_path).folder, RUN), [worker], progress)
    assert progress.images == RUN.image_count == 10


class TestFiles:
    def test_what_is_written_is_read(self, tmp_path):
        store = create(tmp_path)
        assert store.missing(nothing) == RUN.shards() == [Shard(0, 3), Shard(4, 7), Shard(8, 9)]
        fill(store)
        assert store.missing(nothing) == []
        expected = pa.concat_tables([table(shard) for shard in RUN.shards()])
        found = store.read(RUN.shards(), expected.column_names)
        assert content_hash(found) == content_hash(expected)
        assert sorted(file.name for file in store.folder.iterdir()) == [
            "manifest.json",
            "shard-00000000-00000003.parquet",
            "shard-00000004-00000007.parquet",
            "shard-00000008-00000009.parquet",
        ]

    def test_a_folder_with_a_colon_is_no_address(self, tmp_path, monkeypatch):
        """As ``--out runs:2`` gives it, relative: pyarrow would look for a file system that is called ``runs``."""
        monkeypatch.chdir(tmp_path)
        store = create(Path("runs:2"))
        assert store.missing(nothing) == RUN.shards()
        fill(store)
        assert store.missing(nothing) == []
        assert len(store.read(RUN.shards(), ["x"])) == RUN.image_count * len(RUN.methods)

    @pytest.mark.parametrize("damage", ["cut", "bytes", "empty", "text", "file gone"])
    def test_a_damaged_shard_is_noticed_and_computed_again(self, tmp_path, damage):
        store = create(tmp_path)
        fill(store)
        file = store.folder / f"{RUN.shards()[1].name}.parquet"
        whole = file.read_bytes()
        middle = len(whole) // 3
        flipped = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
        contents = {"cut": whole[:-20], "bytes": flipped, "empty": b"", "text": b"PAR1 not really"}
        if damage in contents:
            file.write_bytes(contents[damage])
        else:
            file.unlink()
        notices = []
        assert store.missing(notices.append) == [RUN.shards()[1]]
        assert len(notices) == (damage in contents)
        with pytest.warns(UserWarning, match="recomputed") if notices else nullcontext():
            fill(store)
        assert file.read_bytes() == whole

    def test_only_shards_of_the_plan_with_failures_are_forgotten(self, tmp_path):
        store = create(tmp_path)
        broken, whole, last = RUN.shards()
        for shard in (broken, last):
            store.write(shard, table(shard, error="too many open files"))
        store.write(whole, table(whole))
        notices = []
        shorter = create(tmp_path, replace(RUN, limit=8))
        shorter.forget_failed(notices.append)
        assert notices == ["1 of 2 shards contain failures and are recomputed"]
        assert [store.is_there(shard) for shard in RUN.shards()] == [False, True, True]
        assert not list(store.folder.glob("*.lock"))
        fill(shorter)
        shorter.forget_failed(nothing)

    def test_an_interrupt_while_a_shard_is_claimed_gives_it_back(self, tmp_path, monkeypatch):
        store, shard = create(tmp_path), RUN.shards()[0]

        def interrupted(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(Store, "is_done", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.claim(shard)
        again = store.claim(shard)
        assert again is not None
        again.release()

    def test_a_failed_shard_that_another_process_holds_is_left_to_it(self, tmp_path):
        store = create(tmp_path)
        shard = RUN.shards()[0]
        store.write(shard, table(shard, error="too many open files"))
        held = store.claim(shard)
        store.forget_failed(nothing)
        assert store.is_done(shard)
        held.release()
        notices = []
        store.forget_failed(notices.append)
        assert (store.is_there(shard), len(notices)) == (False, 1)

    def test_every_flipped_byte_is_noticed_or_harmless(self, tmp_path):
        store = create(tmp_path)
        fill(store)
        shard = RUN.shards()[0]
        file = store.folder / f"{shard.name}.parquet"
        whole = file.read_bytes()
        before = content_hash(store.read([shard], table(shard).column_names))
        for place in random.Random(0).sample(range(len(whole)), 150):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
            if store.is_done(shard):
                assert content_hash(store.read([shard], table(shard).column_names)) == before

    @pytest.mark.parametrize(
        ("text", "bit"),
        [
            (rb"\d\.png", 0x80),  # the names of images
            (rb"ARROW:schema.+", 0x01),  # names of columns, key and checksum, in base64
            (rb"ARROW:schema.+", 0x04),
        ],
    )
    def test_text_that_is_none_any_more_is_damage(self, tmp_path, text, bit):
        """Flipped bits that leave bytes which are not UTF-8 are damage like any other, not an error of Python's."""
        store = create(tmp_path, replace(RUN, images=4))  # one shard
        fill(store)
        (shard,) = store.run.shards()
        file = store.folder / f"{shard.name}.parquet"
        whole = file.read_bytes()
        before, faults = content_hash(store.read([shard], table(shard).column_names)), []
        for place in (place for found in re.finditer(text, whole, re.DOTALL) for place in range(*found.span())):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            if shard not in store.missing(faults.append):
                assert content_hash(store.read([shard], table(shard).column_names)) == before
        assert all("recomputed" in fault for fault in faults)
        assert any("is damaged ('utf-8' codec can't decode" in fault for fault in faults)

    def test_a_shard_of_another_run_or_place_does_not_count(self, tmp_path):
        store, other = create(tmp_path), create(tmp_path, replace(RUN, weights="other"))
        fill(other)
        assert store.folder != other.folder
        for shard in RUN.shards():
            (store.folder / f"{shard.name}.parquet").write_bytes((other.folder / f"{shard.name}.parquet").read_bytes())
        notices = []
        assert store.missing(notices.append) == RUN.shards()
        assert all("another run" in notice for notice in notices)
        first, second = (other.folder / f"{shard.name}.parquet" for shard in RUN.shards()[:2])
        second.write_bytes(first.read_bytes())
        assert other.missing(notices.append) == [RUN.shards()[1]]

    def test_a_table_of_the_wrong_length_does_not_count(self, tmp_path):
        store = create(tmp_path)
        store.write(Shard(0, 3), table(Shard(0, 2)))
        assert not store.is_done(Shard(0, 3))

    def test_a_missing_number_is_not_a_nan(self):
        shard = Shard(0, 0)
        assert content_hash(table(shard)) != content_hash(table(shard, error="broken"))
        columns = {
            **{name: table(shard)[name] for name in ("index", "image", "method", "error", "x")},
            "y": [None, None],
        }
        assert content_hash(pa.table(columns, schema=schema_of(RUN.columns))) != content_hash(table(shard))


class TestLimits:
    def test_a_growing_limit_keeps_whole_shards_and_reads_its_own_plan(self, tmp_path):
        computed = []

        def compute(shard):
            computed.append(shard)
            return table(shard)

        for limit in (6, 9, 6, None):
            store = create(tmp_path, replace(RUN, limit=limit))
            worker_loop(store, compute, SilentProgress())
            assert store.read(store.run.shards(), ["index"])["index"].to_pylist()[::2] == list(range(limit or 10))
        assert computed == [Shard(0, 3), Shard(4, 5), Shard(4, 7), Shard(8, 8), Shard(8, 9)]
        assert Store.open(store.folder).run.limit is None

    def test_threads_are_fixed_when_the_run_is_started(self, tmp_path):
        create(tmp_path, replace(RUN, threads=3))
        assert create(tmp_path, replace(RUN, threads=1)).run.threads == 3
        with pytest.raises(RunError, match="--threads 3"):
            create(tmp_path, replace(RUN, threads=1), keep_threads=False)


class TestManifest:
    @pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "something"}'])
    def test_a_damaged_manifest_is_refused(self, tmp_path, content):
        store = create(tmp_path)
        fill(store)
        manifest = store.folder / "manifest.json"
        manifest.write_text(content)
        with pytest.raises(StorageError, match=re.escape(f"without {manifest} the same command goes on")):
            create(tmp_path)
        with pytest.raises(StorageError):
            Store.open(store.folder)
        manifest.unlink()
        assert create(tmp_path).missing(nothing) == []

    def test_every_flipped_bit_is_an_error(self, tmp_path):
        """Flipped bits gave wrong method names, labels and numbers before the manifest had a checksum."""
        store = create(tmp_path)
        manifest = store.folder / "manifest.json"
        whole = manifest.read_bytes()
        for place in range(len(whole)):
            for bit in range(8):
                manifest.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :])
                with pytest.raises(StorageError):
                    Store.open(store.folder)
        manifest.write_bytes(whole)
        assert Store.open(store.folder).run.as_json() == RUN.as_json()

    @pytest.mark.parametrize("schema", [1, 2])
    @pytest.mark.parametrize(
        "change",
        [
            {"methods": ["b", "a"]},
            {"methods": ["a", "c"]},
            {"columns": ["y", "x"]},
            {"protocol": "another"},
            {"seed": 1},
        ],
    )
    def test_a_changed_run_is_refused_also_where_there_is_no_checksum(self, tmp_path, schema, change):
        store = create(tmp_path)
        fill(store)
        manifest = store.folder / "manifest.json"
        stored = json.loads(manifest.read_text())
        manifest.write_bytes(without_checksum(store.folder, schema=schema, run={**stored["run"], **change}))
        with pytest.raises(StorageError, match="is damaged"):
            Store.open(store.folder)
        with pytest.raises(StorageError, match="the same command goes on"):
            create(tmp_path)

    def test_a_manifest_from_before_the_checksum_is_read_gone_on_with_and_sealed(self, tmp_path):
        store = create(tmp_path)
        fill(store)
        manifest = store.folder / "manifest.json"
        manifest.write_bytes(without_checksum(store.folder, schema=1))
        assert Store.open(store.folder).readable(nothing).run.as_json() == RUN.as_json()
        assert create(tmp_path).missing(nothing) == []
        assert json.loads(manifest.read_text())["schema"] == 2
        assert Store.open(store.folder).run.as_json() == RUN.as_json()

    def test_the_shards_themselves_say_which_method_a_row_is_of(self, tmp_path):
        """Even a manifest that is forged with key and checksum puts no number under another method's name."""
        store = create(tmp_path)
        fill(store)
        manifest = json.loads((store.folder / "manifest.json").read_text())
        (store.folder / "manifest.json").write_bytes(rewritten(manifest, methods=["b", "a"]))
        forged = Store.open(store.folder)
        faults = []
        assert forged.readable(faults.append).damaged == set(RUN.shards())
        assert all("belongs to another run" in fault for fault in faults)
        read = forged.read(RUN.shards(), ["method", "index", "x"])
        assert read["method"].to_pylist() == ["b", "a"] * 10
        assert read["index"].to_pylist() == [index for index in range(10) for _ in "ab"]
        assert read["x"].to_pylist() == [index / 3 for index in range(10) for _ in "ab"]
        with pytest.raises(StorageError, match="other images or methods"):
            replace(forged, run=replace(RUN, methods=("a", "c"))).read(RUN.shards(), ["x"])

    def test_a_wrong_type_in_it_is_an_error(self, tmp_path):
        store = create(tmp_path)
        file = store.folder / "manifest.json"
        whole, refused = file.read_bytes(), 0
        values = [None, True, 0, -1, 10**30, 0.5, "", "text", [], [0], {}, {"a": 0}, [[]]]
        for name, value in product(RUN.as_json(), values):
            file.write_bytes(whole)
            file.write_bytes(without_checksum(store.folder, schema=1, run={**RUN.as_json(), name: value}))
            try:
                opened = Store.open(store.folder)
            except StorageError:
                refused += 1
            else:  # what is not part of the key may be any number or text
                assert opened.run.as_json()[name] == value
                assert opened.missing(nothing) == opened.run.shards()
        assert refused > 200

    def test_a_folder_that_cannot_be_made_is_one_sentence(self, tmp_path):
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(StorageError, match="cannot be written"):
            create(tmp_path / "file")


class TestLocks:
    def test_a_held_lock_is_not_given_again_and_a_released_one_is(self, tmp_path):
        first = take_lock(tmp_path / "lock")
        assert take_lock(tmp_path / "lock") is None
        first.release()
        assert not (tmp_path / "lock").exists()
        second = take_lock(tmp_path / "lock")
        assert second.certain
        second.release()

    def test_a_lock_whose_file_was_removed_meanwhile_is_not_believed(self, tmp_path, monkeypatch):
        """A process that opened the file just before its holder removed it must not work beside the next one."""
        real, removed = fcntl.flock, []

        def flock(descriptor, flags):
            if not removed:
                removed.append((tmp_path / "lock").unlink())
            real(descriptor, flags)

        monkeypatch.setattr(fcntl, "flock", flock)
        assert take_lock(tmp_path / "lock") is None
        lock = take_lock(tmp_path / "lock")
        assert lock.certain
        assert (tmp_path / "lock").exists()
        assert take_lock(tmp_path / "lock") is None
        lock.release()

    def test_the_next_holder_of_a_removed_file_is_alone(self, tmp_path):
        """One process has the file open when another releases and removes it, and a third makes a new one."""
        first = take_lock(tmp_path / "lock")
        waiting = os.open(tmp_path / "lock", os.O_RDWR)
        first.release()
        third = take_lock(tmp_path / "lock")
        fcntl.flock(waiting, fcntl.LOCK_EX | fcntl.LOCK_NB)  # what is locked has no name any more ...
        assert os.fstat(waiting).st_nlink == 0  # ... which is what filelock looks at
        assert third.certain
        third.release()
        os.close(waiting)

    def test_a_file_that_cannot_be_opened_is_an_error(self, tmp_path):
        with pytest.raises(OSError, match="lock"):
            take_lock(tmp_path / "absent" / "lock")

    def test_without_locks_work_is_done_twice_and_nothing_breaks(self, tmp_path, monkeypatch):
        def refuse(descriptor, flags):
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(fcntl, "flock", refuse)
        store = create(tmp_path)
        claims = [store.claim(Shard(0, 3)) for _ in range(2)]
        for claim in claims:
            assert not claim.done
            store.write(Shard(0, 3), table(Shard(0, 3)))
            claim.release()
        assert store.is_done(Shard(0, 3))

    def test_a_shard_that_another_process_holds_is_waited_for(self, tmp_path):
        store = create(tmp_path)
        held = store.claim(Shard(4, 7))
        computed = []

        def compute(shard):
            computed.append(shard)
            if shard == Shard(8, 9):  # by now the held shard was met and left for later
                held.release()
            return table(shard)

        worker_loop(store, compute, SilentProgress())
        assert computed == [Shard(0, 3), Shard(8, 9), Shard(4, 7)]

    def test_a_shard_that_another_process_has_finished_meanwhile_is_not_computed_again(self, tmp_path):
        """It was missing when this process began, and is there when its turn comes."""
        store, other = create(tmp_path), create(tmp_path)
        computed, theirs = [], store.folder / f"{Shard(4, 7).name}.parquet"

        def compute(shard):
            computed.append(shard)
            if shard == Shard(0, 3):
                other.write(Shard(4, 7), table(Shard(4, 7)))
                os.utime(theirs, ns=(0, 0))
            return table(shard)

        worker_loop(store, compute, SilentProgress())
        assert computed == [Shard(0, 3), Shard(8, 9)]
        assert theirs.stat().st_mtime_ns == 0  # it is the file of the other process
        assert store.missing(nothing) == []


WRITER = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    sys.path[:0] = {paths!r}
    from test_evaluation_store import create, table, RUN, SilentProgress, replace, worker_loop
    store = create(Path(sys.argv[1]), replace(RUN, images=3000, shard_size=10))
    left = iter(range({most}))

    def compute(shard):
        if next(left, None) is None:
            time.sleep(600)  # to be killed, however late, before everything is done
        return table(shard)

    print("ready", flush=True)
    while not Path({start!r}).exists():
        time.sleep(0.0005)
    worker_loop(store, compute, SilentProgress())
""")


def writer(folder, most, start):
    """A process that computes up to so many shards, as soon as a file is there."""
    here = Path(__file__).parent
    script = WRITER.format(paths=[str(here), str(here.parent / "support")], most=most, start=str(start))
    file = start.with_suffix(".py")
    file.write_text(script)
    return forked.start([str(file), str(folder)])


class TestDeath:
    def test_writers_killed_anywhere_leave_what_an_unbroken_run_leaves(self, tmp_path):
        """300 shards by processes that are killed with SIGKILL at random moments, two of them side by side."""
        pauses = random.Random(0)
        for target in (30, 80, 130):
            begin = tmp_path / f"begin {target}"
            processes = [writer(tmp_path / "killed", most=45, start=begin) for _ in range(2)]
            for process in processes:
                wait_for(lambda process=process: process.output() == "ready\n", process)
            begin.touch()  # now that both are there: one alone might be done before the other begins
            wait_for(lambda target=target: len(list(tmp_path.glob("killed/*/*.parquet"))) >= target, *processes)
            time.sleep(pauses.uniform(0.0, 0.01))
            for process in processes:
                process.send_signal(signal.SIGKILL)
                process.communicate()
                assert process.returncode == -signal.SIGKILL
        run = replace(RUN, images=3000, shard_size=10)
        killed, whole = create(tmp_path / "killed", run), create(tmp_path / "whole", run)
        assert 130 <= sum(killed.is_there(shard) for shard in run.shards()) < 300
        assert all(killed.is_done(shard) for shard in run.shards() if killed.is_there(shard))
        fill(killed)
        fill(whole)
        names = [sorted(file.name for file in store.folder.iterdir()) for store in (killed, whole)]
        assert names[0] == names[1]
        for shard in run.shards():
            files = [store.folder / f"{shard.name}.parquet" for store in (killed, whole)]
            assert pq.read_table(files[0]).schema.metadata == pq.read_table(files[1]).schema.metadata
            assert files[0].read_bytes() == files[1].read_bytes()
