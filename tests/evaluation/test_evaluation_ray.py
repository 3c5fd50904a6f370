"""The Ray engine against a real local cluster of two workers, one of which is killed half-way."""

import json
import os
import threading
from types import SimpleNamespace

import pytest

import forked
from evaluations import METHODS, MODEL, PROTOCOL, command, everything, some_run, write_photos
from vitreous.datasets import open_dataset
from vitreous.evaluation.engines import RETRIES, SilentProgress, _InFlight, run_on_ray
from vitreous.evaluation.evaluate import evaluate
from vitreous.evaluation.run import RunError
from vitreous.evaluation.runner.prepare_run import prepare_run
from vitreous.evaluation.store import Store

pytestmark = pytest.mark.usefixtures("registry")  # the driver loads plugins into this process

ray = pytest.importorskip("ray", reason='needs Ray: pip install "vitreous[ray]"')


@pytest.fixture(scope="module")
def cluster():
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()


DEADLY = """
import os, signal
from pathlib import Path
from vitreous.plugin import method

@method("deadly", values=("attention",), summary="Kills its process once, when half of the run is stored.")
def deadly(view, layer):
    if os.getpid() != {driver} and len(list(Path({out!r}).glob("*/*.parquet"))) >= {half}:
        try:
            Path({marker!r}).touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    return view.attention(layer).value.norm(dim=-1).mean(dim=1)
"""


def test_a_cluster_whose_worker_dies_gives_what_the_local_engine_gives(cluster, tmp_path):
    data = write_photos(tmp_path / "photos", 40, broken=(3,))
    plugin, marker, out = tmp_path / "deadly.py", tmp_path / "killed", tmp_path / "ray"
    plugin.write_text(DEADLY.format(driver=os.getpid(), out=str(out), half=10, marker=str(marker)))
    settings = {"model": MODEL, "data": data, "protocol": PROTOCOL, "methods": [*METHODS, "deadly"]}
    settings |= {"threads": 1, "shard_size": 2, "plugins": (plugin,)}
    on_ray = evaluate(**settings, out=out, engine="ray", workers=2)
    assert marker.exists(), "no worker was killed"
    local = evaluate(**settings, out=tmp_path / "local")
    assert on_ray.stores[0].run.key == local.stores[0].run.key
    assert everything(on_ray.stores[0]).equals(everything(local.stores[0]))
    assert {file.suffix for file in on_ray.stores[0].folder.iterdir()} == {".json", ".parquet"}


def test_only_json_is_on_standard_output_when_a_worker_dies(tmp_path):
    """Ray tells of dead workers on standard output. With a cluster of the command's own."""
    data = write_photos(tmp_path / "photos", 8)
    plugin, marker, out = tmp_path / "deadly.py", tmp_path / "killed", tmp_path / "out"
    # The driver does not compute before all shards that were handed to Ray are done.
    plugin.write_text(DEADLY.format(driver=0, out=str(out), half=1, marker=str(marker)))
    more = ["--engine", "ray", "--workers", "1", "--methods", "deadly", "--plugin", str(plugin), "--json"]
    done = forked.run(command(data, out, *more)[1:], timeout=300)
    assert done.returncode == 0, done.stderr
    assert marker.exists(), "no worker was killed"
    assert {row["method"] for row in json.loads(done.stdout)} == {*METHODS, "deadly"}


@pytest.mark.parametrize("protocol", ["grid-pointing-2x2", "road"])
def test_protocols_with_draws_of_their_own_give_what_the_local_engine_gives(cluster, protocol, tmp_path):
    """Mosaics and the noise of imputed pixels are drawn by photo, whatever the process."""
    folder = tmp_path / "photos"
    write_photos(folder, 8)
    (folder / "labels.csv").write_text("file,class_index\n" + "".join(f"{n:04d}.png,{n % 4}\n" for n in range(8)))
    for photo in (folder / "images").iterdir():
        photo.rename(folder / photo.name)
    settings = {"model": MODEL, "data": f"labelled:{folder}", "protocol": protocol, "methods": ["gae", "ixg"]}
    settings |= {"threads": 1, "shard_size": 3, "limit": 6}
    on_ray = evaluate(**settings, out=tmp_path / "ray", engine="ray", workers=2)
    local = evaluate(**settings, out=tmp_path / "local")
    assert on_ray.stores[0].run.key == local.stores[0].run.key
    rows = everything(on_ray.stores[0])
    assert rows.equals(everything(local.stores[0]))
    assert len(rows) == 6 * len(on_ray.stores[0].run.methods)


def test_texts_on_a_cluster_give_what_the_local_engine_gives(cluster, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from small_reviews import reviews, save_text_model, write_movies

    model = save_text_model(tmp_path / "classifier")
    data = write_movies(tmp_path / "movies.tar.gz", reviews(6))
    settings = {"model": model, "data": data, "protocol": "eraser-movies", "methods": METHODS}
    settings |= {"threads": 1, "shard_size": 2}
    on_ray = evaluate(**settings, out=tmp_path / "ray", engine="ray", workers=2)
    local = evaluate(**settings, out=tmp_path / "local")
    assert on_ray.stores[0].run.key == local.stores[0].run.key
    assert everything(on_ray.stores[0]).equals(everything(local.stores[0]))


def test_an_error_on_a_worker_is_told_as_it_would_be_here(cluster, tmp_path):
    """The data set is changed behind the back of a run that was planned: its worker notices."""
    folder = tmp_path / "photos"
    data = write_photos(folder, 4)
    store, _ = prepare_run(MODEL, data, PROTOCOL, METHODS, tmp_path / "out", {"threads": 1}, SilentProgress())
    (folder / "images" / "0003.png").write_bytes(b"another size")
    with pytest.raises(RunError, match="data set found here is not what the run was started with"):
        run_on_ray(store, SilentProgress())


@pytest.mark.parametrize("death", ["WorkerCrashedError", "OutOfMemoryError", "NodeDiedError"])
def test_a_shard_whose_workers_all_die_is_told_of(death, tmp_path):
    """Without a cluster: with this machine's, six workers would have to be started and killed."""
    error = getattr(ray.exceptions, death)(*[] if death == "WorkerCrashedError" else ["what Ray knows of it"])

    def give_up(_task):
        raise error

    silent = SimpleNamespace(
        exceptions=ray.exceptions, put=lambda run: run, wait=lambda tasks, **_: (tasks, []), get=give_up
    )
    store = Store.create(tmp_path, some_run(), {})
    in_flight = _InFlight(silent, store, SilentProgress(), SimpleNamespace(remote=lambda *_: "task"))
    shard = store.run.shards()[0]
    in_flight.start(shard)
    with pytest.raises(RunError, match=rf"{shard.name} was not computed, .* replaced {RETRIES} times: .*\w"):
        in_flight.finish_one()
    assert not len(in_flight)
    store.claim(shard).release()  # nobody holds it any more


def test_more_threads_than_a_node_has_processors_are_refused_at_once(cluster, tmp_path):
    """Ray lets a task wait for ever that no node is large enough for, so this is asked from a thread that may wait."""
    data = write_photos(tmp_path / "photos", 2)
    settings = {"model": MODEL, "data": data, "protocol": PROTOCOL, "methods": METHODS, "engine": "ray"}
    refusals = []

    def ask():
        try:
            evaluate(**settings, out=tmp_path / "refused", threads=3)
        except RunError as error:
            refusals.append(str(error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(60)
    (refusal,) = refusals
    assert "takes 3 processors" in refusal
    assert "has 2: give --threads 2 or fewer" in refusal
    assert not list(tmp_path.glob("refused/*/*.parquet"))
    assert len(evaluate(**settings, out=tmp_path / "as told", threads=2).images) == 2


def test_what_cannot_be_opened_by_name_is_refused(tmp_path):
    data = open_dataset(write_photos(tmp_path / "photos", 2))
    with pytest.raises(RunError, match="by name"):
        evaluate(MODEL, data, PROTOCOL, METHODS, out=tmp_path / "out", engine="ray")
