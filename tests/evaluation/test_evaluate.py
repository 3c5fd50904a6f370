"""``vitreous.evaluate``: models and data sets in memory, and the same numbers by whatever name."""

import errno
import json
import pickle
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import vitreous
from evaluations import METHODS, MODEL, PROTOCOL, everything, rewritten, some_run, start_worker, write_photos
from small_data import loaded
from small_models import small_vit
from vitreous.datasets import Shuffled, open_dataset
from vitreous.datasets.folders import MaskedFolder
from vitreous.errors import ModelError, ProtocolError
from vitreous.evaluation.engines import SilentProgress
from vitreous.evaluation.protocols import find_protocol, list_protocols
from vitreous.evaluation.run import ModelChoice, RunError
from vitreous.evaluation.runner import adapters
from vitreous.evaluation.runner import prepare_run as starting
from vitreous.evaluation.runner.measure import EvaluationContext, _table, open_context
from vitreous.evaluation.runner.prepare_run import check_labels, prepare_run
from vitreous.models import TwoSided


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("evaluation") / "photos", 6)


def evaluate(model, data, out, **options):
    settings = {"protocol": PROTOCOL, "methods": METHODS, "threads": 1, "shard_size": 4, "controls": False, **options}
    return vitreous.evaluate(model, data, out=out, **settings)


def test_what_is_in_memory_gives_what_is_asked_for_by_name(data, tmp_path):
    by_name = evaluate(MODEL, data, tmp_path / "name")
    loaded = vitreous.load_model(MODEL.name, image_size=32)
    in_memory = evaluate(loaded, open_dataset(data), tmp_path / "memory", protocol=find_protocol(PROTOCOL))
    assert everything(by_name.stores[0]).equals(everything(in_memory.stores[0]))
    assert by_name.rows() == in_memory.rows()
    assert [row["n"] for row in by_name.rows()] == [6] * 6


def test_two_methods_of_ones_choice_are_compared_on_the_same_images(data, tmp_path):
    results = evaluate(MODEL, data, tmp_path)
    means = {(row["method"], row["metric"]): row["mean"] for row in results.rows()}
    compared = results.compare("gae", "rollout")
    assert [one.metric for one in compared] == ["pixel accuracy", "mAP", "mIoU"]
    for one, turned in zip(compared, results.compare("rollout", "gae"), strict=True):
        assert one.difference == pytest.approx(means["gae", one.metric] - means["rollout", one.metric], abs=1e-12)
        assert (turned.difference, turned.p) == (-one.difference, one.p)
        assert one.low <= one.difference <= one.high
        assert one.n == 6
    with pytest.raises(RunError, match="tokentm was not measured; measured methods are gae, rollout"):
        results.compare("gae", "tokentm")


def test_a_network_of_timm_brings_its_preprocessing(data, tmp_path):
    torch.manual_seed(0)
    network = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    results = evaluate(network, data, tmp_path, limit=2, methods="rollout")
    assert results.run.preprocessing["mean"] == (0.5, 0.5, 0.5)
    assert len(results.rows()) == 3


def test_a_network_in_training_mode_is_evaluated_without_being_switched(data, tmp_path):
    torch.manual_seed(0)
    network = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, drop_path_rate=0.5, proj_drop_rate=0.5)
    expected = evaluate(network.eval(), data, tmp_path / "quiet", limit=2, methods="rollout").rows()
    found = evaluate(network.train(), data, tmp_path / "training", limit=2, methods="rollout").rows()
    assert found == expected
    assert all(module.training for module in network.modules())


def test_a_network_of_timm_is_taken_as_one_that_is_loaded_by_name(data, tmp_path):
    options = {"limit": 1, "methods": "rollout"}
    without_head = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=0)
    with pytest.raises(ModelError, match="VisionTransformer: this is a backbone without a classifier"):
        evaluate(without_head, data, tmp_path, **options)
    without_head.head = torch.nn.Linear(192, 5)
    results = evaluate(without_head, data, tmp_path, **options)
    assert results.run.preprocessing["image_size"] == (32, 32)
    of_any_size = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, dynamic_img_size=True)
    results = evaluate(of_any_size, data, tmp_path, **options)
    assert results.run.preprocessing["image_size"] == (224, 224)  # what its configuration says


def test_other_weights_are_another_run(data, tmp_path):
    folders = set()
    for seed in (0, 1):
        torch.manual_seed(seed)
        network = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
        folders.add(evaluate(network, data, tmp_path, limit=1, methods="rollout").stores[0].folder)
    assert len(folders) == 2


def test_the_same_weights_read_in_another_way_are_another_run(data, tmp_path):
    folders = set()
    for heads in (3, 6):
        torch.manual_seed(0)
        network = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_heads=heads)
        folders.add(evaluate(network, data, tmp_path, limit=1, methods="rollout").stores[0].folder)
    assert len(folders) == 2


def mask_of(data, number):
    return Path(data.partition(":")[2]) / "masks" / f"{number:04d}.png"


def test_a_data_set_that_changes_between_two_runs_of_a_process_is_seen(tmp_path):
    data = write_photos(tmp_path / "photos", 2)
    before = evaluate(MODEL, data, tmp_path / "out", methods="rollout")
    mask = mask_of(data, 0)
    size = mask.stat().st_size
    # Upside down; uncompressed, so that the files differ in nothing but their content.
    for turned in (False, True):
        picture = Image.open(mask).convert("L")
        (picture.transpose(Image.Transpose.FLIP_TOP_BOTTOM) if turned else picture).save(mask, compress_level=0)
        evaluate(MODEL, data, tmp_path / "out", methods="rollout")
        sizes = {size, mask.stat().st_size}
        size = mask.stat().st_size
    assert len(sizes) == 1
    assert len(list((tmp_path / "out").iterdir())) == 3
    fresh = evaluate(MODEL, data, tmp_path / "fresh", methods="rollout")
    assert fresh.rows() != before.rows()


def test_an_error_of_the_moment_is_tried_again_where_it_is_asked_for(data, tmp_path, monkeypatch):
    load = MaskedFolder.load
    computed = []

    def out_of_files(self, index):
        computed.append(index)
        if index == 5 and len(computed) <= 6:
            raise OSError(errno.EMFILE, "Too many open files")
        return load(self, index)

    monkeypatch.setattr(MaskedFolder, "load", out_of_files)
    first = evaluate(MODEL, data, tmp_path / "out")
    assert [failure.error for failure in first.failures()] == ["[Errno 24] Too many open files"]
    assert len(evaluate(MODEL, data, tmp_path / "out").failures()) == 1
    assert computed == [0, 1, 2, 3, 4, 5], "without being asked for it, nothing is tried again"
    with pytest.warns(UserWarning, match="1 of 2 shards contain failures and are recomputed"):
        again = evaluate(MODEL, data, tmp_path / "out", retry_failed=True)
    assert computed[6:] == [4, 5], "a shard without failures is not computed again"
    assert not again.failures()
    fresh = evaluate(MODEL, data, tmp_path / "fresh")
    assert everything(again.stores[0]).equals(everything(fresh.stores[0]))


OWN = """
from vitreous.plugin import method

@method("{name}", values=("tokens",))
def own(view, layer):
    return {sign}view.tokens(layer).sum(-1)
"""


def test_a_plugin_that_changes_between_two_runs_of_a_process_is_run_again(data, tmp_path, registry):
    plugin = tmp_path / "changing.py"
    found = []
    for sign in ("", "-"):
        plugin.write_text(OWN.format(name="changing", sign=sign))
        results = evaluate(MODEL, data, tmp_path / "out", methods="changing", plugins=(plugin,))
        found.append([row["mean"] for row in results.rows()])
    assert found[0] != found[1]
    assert len(list((tmp_path / "out").iterdir())) == 2


FAILING = """
from vitreous.plugin import method

asked = []

@method("failing", values=("tokens",))
def own(view, layer):
    asked.append(layer)
    if len(asked) > 1:  # an empty picture is the first: a failure on it would end everything
        raise {error}
    return view.tokens(layer).sum(-1)
"""


def test_what_nobody_foresaw_is_one_methods_failure_and_no_runs(data, tmp_path, registry):
    plugin = tmp_path / "failing.py"
    plugin.write_text(FAILING.format(error="ZeroDivisionError('by zero')"))
    results = evaluate(MODEL, data, tmp_path / "out", methods=["gae", "failing"], plugins=(plugin,))
    assert results.measured_methods == ("gae",)
    assert {failure.error for failure in results.failures() if failure.method == "failing"} == {
        "method failing (failing.py, line 10): ZeroDivisionError: by zero"
    }
    assert results.rows() == evaluate(MODEL, data, tmp_path / "alone", methods="gae").rows()


def test_a_full_memory_ends_a_run(data, tmp_path, registry):
    """It says nothing of a photo, so it is not kept as a photo's error."""
    plugin = tmp_path / "failing.py"
    plugin.write_text(FAILING.format(error="MemoryError"))
    with pytest.raises(MemoryError):
        evaluate(MODEL, data, tmp_path / "out", methods="failing", plugins=(plugin,))


def test_other_code_of_this_package_is_another_run(data, tmp_path, monkeypatch):
    folders = [evaluate(MODEL, data, tmp_path, limit=1).stores[0].folder]
    monkeypatch.setattr(starting, "_own_code_hash", lambda: "0" * 64)
    folders.append(evaluate(MODEL, data, tmp_path, limit=1).stores[0].folder)
    assert folders[0] != folders[1]


def test_a_method_of_the_session_is_known_by_its_code(data, tmp_path, registry):
    folders = []
    for sign in ("", "-", "-"):
        exec(OWN.format(name="typed_in", sign=sign), {"__name__": "__main__"})  # as in a notebook
        folders.append(evaluate(MODEL, data, tmp_path, limit=1, methods="typed_in").stores[0].folder)
    assert folders[0] != folders[1] == folders[2]


def test_photos_of_a_large_shard_are_not_all_in_memory(tmp_path, monkeypatch):
    data = open_dataset(write_photos(tmp_path / "photos", 40))
    load, loaded, most = data.load, [], []

    def watched(index):
        sample = load(index)
        most.append(sum(each() is not None for each in loaded))
        loaded.append(weakref.ref(sample.image))
        return sample

    monkeypatch.setattr(data, "load", watched)
    evaluate(vitreous.load_model(MODEL.name, image_size=32), data, tmp_path / "out", methods="rollout", shard_size=40)
    # Sixteen are measured together, while the sixteen before them may not have been let go yet.
    assert len(most) == 40 > 32 >= max(most)


def test_a_network_whose_preprocessing_is_unknown_is_refused(data, tmp_path):
    network = small_vit(dtype=torch.float32)
    with pytest.raises(ModelError, match="LoadedModel"):
        evaluate(torch.nn.Sequential(network), data, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "rya"}, "engine must be local or ray, not 'rya'"),
        ({"threads": 0}, "threads must be a whole number of at least 1, not 0"),
        ({"workers": 0}, "workers must be a whole number of at least 1, not 0"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"limit": "4"}, "limit must be a whole number of at least 1, not '4'"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_computed(data, tmp_path, options, message):
    with pytest.raises(RunError, match=message):
        vitreous.evaluate(MODEL, data, PROTOCOL, METHODS, out=tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def test_plugins_may_be_given_as_text(data, tmp_path):
    plugin = tmp_path / "own.py"
    plugin.write_text("")
    given = {"limit": 1, "threads": 1}
    text = vitreous.evaluate(MODEL, data, PROTOCOL, ["gae"], out=tmp_path / "a", plugins=[str(plugin)], **given)
    path = vitreous.evaluate(MODEL, data, PROTOCOL, ["gae"], out=tmp_path / "b", plugins=(plugin,), **given)
    assert text.rows() == path.rows()


def test_the_usual_methods_are_those_of_the_command_line(data, tmp_path):
    results = evaluate(MODEL, data, tmp_path, methods=None, limit=1)
    store, _ = prepare_run(
        MODEL, data, PROTOCOL, ["white-box"], tmp_path, {"controls": False, "threads": 1}, SilentProgress().notice
    )
    assert results.run.methods == store.run.methods


def test_what_is_no_model_is_refused_with_all_forms(data, tmp_path):
    with pytest.raises(RunError, match=r"\(model, image processor\) or \(model, tokenizer\), not int"):
        evaluate(5, data, tmp_path)


def test_several_workers_need_names(data, tmp_path):
    with pytest.raises(RunError, match="by name"):
        evaluate(vitreous.load_model(MODEL.name, image_size=32), data, tmp_path, workers=2)


def test_a_worker_refuses_another_model_or_data_set(data, tmp_path):
    store, _ = prepare_run(MODEL, data, PROTOCOL, METHODS, tmp_path, {"threads": 1}, SilentProgress().notice)
    open_context(store.run)
    for change in ({"weights": "other"}, {"data_fingerprint": "other"}, {"settings": {}}):
        changed = type(store.run)(**{**vars(store.run), **change})
        with pytest.raises(RunError, match="not what the run was started with"):
            open_context(changed)


def test_a_protocol_with_rows_of_its_own_says_that_methods_are_not_used(data, tmp_path):
    with pytest.warns(UserWarning, match="has fixed rows"):
        store, _ = prepare_run(
            MODEL, data, "tokentm-ablation", ["gae"], tmp_path, {"threads": 1}, SilentProgress().notice
        )
    assert "gae" not in store.run.methods
    with pytest.raises(ProtocolError):
        evaluate(MODEL, data, tmp_path, protocol="nothing")


@pytest.mark.shared
def test_real_photos_and_a_trained_model(shared, tmp_path):
    """Of eight pets, a good map finds the animal far better than chance; the whole way from files to rows."""
    weights = shared / "data" / "vit_tiny_patch16_224.safetensors"
    model = ModelChoice(f"timm/vit_tiny_patch16_224@{weights}", mean=(0.5,), std=(0.5,))
    photos = f"pets:{shared / 'data' / 'pets' / 'seg'}"
    results = evaluate(model, photos, tmp_path, methods=["decompx.skipplus"], limit=8)
    rows = {row["metric"]: row for row in results.rows()}
    assert rows["pixel accuracy"]["mean"] > 0.8
    assert rows["mIoU"]["n"] == 8
    assert not results.failures()


def test_a_shuffled_set_is_a_run_of_its_own_with_the_same_photos(data, tmp_path, monkeypatch):
    tables = {
        shuffle: everything(evaluate(MODEL, data, tmp_path, shuffle=shuffle).stores[0]).to_pylist()
        for shuffle in (False, True)
    }
    listed, shuffled = ([row["image"] for row in rows] for rows in tables.values())
    assert shuffled != listed
    assert sorted(shuffled) == sorted(listed)
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "again").mkdir()
    monkeypatch.setattr("vitreous.evaluation.engines._start", start_worker)
    again = evaluate(MODEL, data, tmp_path / "again", shuffle=True, workers=2)
    assert everything(again.stores[0]).to_pylist() == tables[True]  # another process shuffles in the same way


def test_the_largest_seed_lasts_to_the_end(data, tmp_path):
    """Every shard adds its place to the seed, and torch takes 64 bits."""
    results = evaluate(MODEL, data, tmp_path, seed=2**63 - 1, shard_size=1, limit=2)
    assert results.counted.all()


def test_two_things_of_one_name_are_not_mixed_up():
    """A data set that lists a name twice would give both the numbers of one."""
    run = some_run(methods=("gae",), columns=("score",))
    rows = {("a", "gae"): {"score": 1.0}, ("b", "gae"): {"score": 2.0}}
    with pytest.raises(RunError, match="not unique"):
        _table(run, [(0, "a", "gae"), (1, "b", "gae"), (2, "b", "gae")], rows)


def test_another_seed_shuffles_otherwise(data):
    listed = open_dataset(data)
    orders = [[Shuffled(listed, seed).name(index) for index in range(len(listed))] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert Shuffled(listed, 0).fingerprint != Shuffled(listed, 1).fingerprint
    assert pickle.loads(pickle.dumps(Shuffled(listed, 1))).name(0) == orders[2][0]


def vit_of(classes):
    return loaded(small_vit(depth=1, num_classes=classes, dtype=torch.float32))


def write_cifar(folder, count=2):
    """Photos of CIFAR-10, whose labels tell ten classes apart."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    np.savez(folder / "test.npz", images=pixels, labels=np.arange(count))
    return f"cifar10:{folder / 'test.npz'}"


def write_voc(folder):
    """One photo of a cat in the layout of PASCAL VOC, whose labels tell twenty classes apart."""
    for place in ("ImageSets/Segmentation", "JPEGImages", "SegmentationClass"):
        (folder / place).mkdir(parents=True)
    (folder / "ImageSets/Segmentation/val.txt").write_text("one\n")
    Image.new("RGB", (40, 40)).save(folder / "JPEGImages/one.jpg")
    Image.fromarray(np.repeat(np.uint8([[0, 8]]), 20, axis=1).repeat(40, axis=0)).save(
        folder / "SegmentationClass/one.png"
    )
    return f"voc:{folder}"


def write_labelled(folder, names, header="file,class_index"):
    folder.mkdir()
    Image.new("RGB", (40, 40)).save(folder / "a.png")
    (folder / "labels.csv").write_text(f"{header}\na.png,1\n")
    if names is not None:
        (folder / "class_names.json").write_text(json.dumps(names))
    return f"labelled:{folder}"


def test_which_protocols_take_labels_for_outputs():
    """Told apart by what their papers say: an accuracy, a true class or the class of an object."""
    using = {protocol.name for protocol in list_protocols() if any(task.uses_labels for task in protocol.tasks)}
    assert using == {
        "chefer-2021-perturbation",
        "eraser-movies",
        "eraser-movies-rationales",
        "gradtoken-ablation",
        "grid-pointing-2x2",
        "grid-pointing-3x3",
        "prompt-pointing-2-classes",
        "prompt-pointing-4-classes",
        "skipplus-faithfulness",
        "skipplus-layers",
        "skipplus-segmentation",
        "tokentm-ablation",
    }


def test_labels_of_another_model_are_refused_before_anything_is_computed(tmp_path):
    options = {"protocol": "skipplus-faithfulness", "methods": "gae"}
    photos = write_cifar(tmp_path)
    for shuffle in (False, True):
        with pytest.raises(RunError, match=r"labels of cifar10 .* 10 classes of labels and 1000 of outputs$"):
            evaluate(MODEL, photos, tmp_path / "out", **options, shuffle=shuffle)
    assert not (tmp_path / "out").exists()
    assert evaluate(vit_of(10), photos, tmp_path / "out", **options).measured_methods
    # Nothing is asked of labels here, so they may be of any model.
    assert evaluate(MODEL, photos, tmp_path / "out", protocol="libra-mif", methods="gae").measured_methods


def test_a_model_with_one_output_has_the_labels_yes_and_no(tmp_path):
    photos = write_labelled(tmp_path / "photos", ["normal", "abnormal"])
    results = evaluate(vit_of(1), photos, tmp_path / "out", protocol="skipplus-faithfulness", methods="gae")
    assert results.measured_methods


def test_a_model_with_one_output_is_given_two_once_for_all_shards(data, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(adapters, "TwoSided", lambda model: made.append(model) or TwoSided(model))
    several = evaluate(vit_of(1), data, tmp_path, protocol="libra-mif", methods="gae", shard_size=2)
    assert len(several.stores[0].run.shards()) == 3
    assert several.measured_methods
    assert len(made) == 1


@pytest.mark.parametrize(
    ("names", "header", "outputs", "fits"),
    [
        (["cat", "dog"], "file,class_index", 5, False),
        (["cat", "dog"], "file,class_index", 2, True),
        (None, "file,class_index", 5, True),  # nothing says what the numbers are
        (["cat"], "file,class_index", 5, True),  # class 1 is not among the names: they do not say it either
        (None, "file,imagenet_index", 5, False),
        (None, "file,imagenet_index", 1000, True),
    ],
)
def test_a_table_of_labels_is_believed_where_it_does_not_say_what_they_count(tmp_path, names, header, outputs, fits):
    data = open_dataset(write_labelled(tmp_path / "photos", names, header))
    context = EvaluationContext(vit_of(outputs), data, find_protocol("skipplus-faithfulness"))
    if fits:
        check_labels(context)
    else:
        with pytest.raises(RunError, match=f"and {outputs} of outputs$"):
            check_labels(context)


def test_a_model_with_background_first_is_refused_where_the_protocol_does_not_know_it(tmp_path):
    data = open_dataset(write_voc(tmp_path / "voc"))
    with pytest.raises(RunError, match="20 classes of labels and 21 of outputs"):
        check_labels(EvaluationContext(vit_of(21), data, find_protocol("skipplus-segmentation")))
    check_labels(EvaluationContext(vit_of(20), data, find_protocol("skipplus-segmentation")))
    results = evaluate(vit_of(21), data, tmp_path / "out", protocol="gradtoken-voc", methods="gae")
    assert results.measured_methods


def test_the_former_name_of_progress_works_and_warns(tmp_path):
    calls = []

    class Recording(SilentProgress):
        def advance(self, images):
            calls.append(images)

    data = write_photos(tmp_path / "data", 2)
    with pytest.warns(DeprecationWarning, match="progress") as warned:
        vitreous.evaluate(MODEL, data, PROTOCOL, METHODS, out=tmp_path / "out", threads=1, watcher=Recording())
    assert sum(calls) == 2
    assert [each.filename for each in warned if each.category is DeprecationWarning] == [__file__]


def test_a_run_of_another_version_is_left_alone_with_the_reason(tmp_path):
    data = write_photos(tmp_path / "data", 2)
    first = vitreous.evaluate(MODEL, data, PROTOCOL, METHODS, out=tmp_path / "out", threads=1)
    (store,) = first.stores
    versions = {**store.run.versions, "vitreous": "0.0.1+0123456789ab"}
    manifest = store.folder / "manifest.json"
    manifest.write_bytes(rewritten(json.loads(manifest.read_text()), versions=versions))
    earlier = store.folder.rename(tmp_path / "out" / f"{PROTOCOL}-0123456789ab")
    stored = {file.name: file.read_bytes() for file in earlier.iterdir()}
    with pytest.warns(
        UserWarning, match=rf"{earlier.name} is not resumed, .* \(vitreous 0.0.1\+0123456789ab instead of"
    ):
        second = vitreous.evaluate(MODEL, data, PROTOCOL, METHODS, out=tmp_path / "out", threads=1)
    assert second.stores[0].folder.name == store.folder.name
    assert {file.name: file.read_bytes() for file in earlier.iterdir()} == stored
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the new run resumes without a word
        vitreous.evaluate(MODEL, data, PROTOCOL, METHODS, out=tmp_path / "out", threads=1)


CONTROLS = ("random", "centre", "edges")


class TestControls:
    def test_they_are_rows_of_every_evaluation_unless_told_otherwise(self, data, tmp_path):
        with_them = evaluate(MODEL, data, tmp_path, limit=2, controls=True)
        assert with_them.methods == (*METHODS, *CONTROLS)
        assert not with_them.failures()
        alone = evaluate(MODEL, data, tmp_path, limit=2)
        assert alone.methods == METHODS
        assert with_them.stores[0].folder != alone.stores[0].folder

    def test_they_leave_the_numbers_of_methods_as_they_are(self, data, tmp_path):
        found = [evaluate(MODEL, data, tmp_path, controls=controls) for controls in (True, False)]
        one, other = (results.values(results.run.columns) for results in found)
        assert all(np.array_equal(one[method], other[method], equal_nan=True) for method in METHODS)

    def test_protocols_with_rows_of_their_own_have_them_too(self, data, tmp_path):
        found = evaluate(MODEL, data, tmp_path, protocol="tokentm-ablation", methods=None, limit=1, controls=True)
        assert found.methods[-3:] == CONTROLS

    def test_ceilings_are_asked_for_and_not_twice(self, data, tmp_path):
        settings = {"protocol": "libra-mif", "methods": ["gae", "random", "oracle:steps=2"], "limit": 1}
        found = evaluate(MODEL, data, tmp_path, controls=True, **settings)
        assert found.methods == ("gae", "random", "oracle:steps=2", "centre", "edges")

    def test_names_of_the_two_groups(self, data, tmp_path):
        found = evaluate(MODEL, data, tmp_path, methods=["gae", "control"], limit=1)
        assert found.methods == ("gae", *CONTROLS)

    def test_an_earlier_run_without_them_is_mentioned_and_not_resumed(self, data, tmp_path):
        first = evaluate(MODEL, data, tmp_path, limit=2)
        folder = first.stores[0].folder
        manifest = json.loads((folder / "manifest.json").read_text())
        versions = {**manifest["run"]["versions"], "vitreous": "0.0.1+0"}
        written = rewritten(manifest, versions=versions)
        (folder / "manifest.json").write_bytes(written)
        folder.rename(folder.with_name(f"{PROTOCOL}-{json.loads(written)['key'][:12]}"))
        with pytest.warns(UserWarning, match=r"is not resumed, because another version computed it \(vitreous 0.0.1"):
            evaluate(MODEL, data, tmp_path, limit=2, controls=True)


class TestStratified:
    @pytest.fixture
    def photos(self, tmp_path):
        folder = tmp_path / "photos"
        folder.mkdir()
        lines = ["file,class_index"]
        for number in range(12):
            Image.new("RGB", (40, 40), (20 * number, 0, 0)).save(folder / f"{number:02d}.png")
            lines.append(f"{number:02d}.png,{number // 4}")
        (folder / "labels.csv").write_text("\n".join(lines))
        return f"labelled:{folder}"

    def test_a_limit_that_leaves_classes_out_says_so(self, photos, tmp_path):
        with pytest.warns(UserWarning, match="first 4 photos are no stratified sample: they show 1 of 3 classes"):
            evaluate(vit_of(3), photos, tmp_path / "runs", protocol="libra-mif", limit=4)

    def test_a_stratified_one_has_all_classes_and_a_folder_of_its_own(self, photos, tmp_path):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = evaluate(vit_of(3), photos, tmp_path / "runs", protocol="libra-mif", limit=3, stratify=True)
            longer = evaluate(vit_of(3), photos, tmp_path / "runs", protocol="libra-mif", limit=6, stratify=True)
        assert len({int(name[:2]) // 4 for name in found.image_names()}) == 3
        assert longer.image_names()[:3] == found.image_names()
        assert longer.stores[0].folder == found.stores[0].folder
