"""What tells runs apart, and which shards they have."""

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evaluations import some_run
from vitreous.evaluation.run import ModelChoice, Run, RunError

# A busy machine is slow to draw numbers, which says nothing about the plan.
steady = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


class TestKey:
    @pytest.mark.parametrize(
        "change",
        [
            {"protocol": "q"},
            {"settings": {"version": 2}},
            {"model": ModelChoice("timm/other")},
            {"model": ModelChoice("timm/some", mean=(0.5,))},
            {"model": ModelChoice("timm/some", image_size=(32, 32))},
            {"model": ModelChoice("timm/some", device="cuda")},
            {"weights": "other"},
            {"preprocessing": {"mean": (0.4, 0.5, 0.5)}},
            {"data": "pets:/somewhere"},
            {"data_fingerprint": "other"},
            {"methods": ("a",)},
            {"methods": ("b", "a")},
            {"columns": ("x",)},
            {"plugins": {"/a.py": "hash"}},
            {"shard_size": 5},
            {"seed": 1},
            {"versions": {"vitreous": "2"}},
        ],
    )
    def test_everything_the_numbers_depend_on_changes_it(self, change):
        assert some_run(**change).key != some_run().key

    @pytest.mark.parametrize("change", [{"limit": 3}, {"threads": 2}, {"data": "masks:/moved"}])
    def test_what_they_do_not_depend_on_leaves_it(self, change):
        assert some_run(**change).key == some_run().key

    def test_a_plugin_is_known_by_its_content(self):
        assert some_run(plugins={"/a.py": "hash"}).key == some_run(plugins={"/b.py": "hash"}).key

    def test_a_run_read_from_json_has_the_same_key(self):
        run = some_run(model=ModelChoice("m", (0.5,), (0.1, 0.2, 0.3), (32, 48)), limit=3)
        again = Run.from_json(json.loads(json.dumps(run.as_json())))
        assert again.key == run.key
        assert again.model == run.model
        assert again.shards() == run.shards()

    def test_nonsense_does_not_make_a_run(self):
        with pytest.raises(RunError, match="does not describe a run"):
            Run.from_json({"model": {}})
        with pytest.raises(RunError, match="at least 1"):
            some_run(limit=0)


class TestContext:
    """What two runs must have in common to stand in one table."""

    @pytest.mark.parametrize(
        "change",
        [
            {"protocol": "q"},
            {"settings": {"version": 2}},
            {"weights": "other"},
            {"preprocessing": {"mean": (0.4, 0.5, 0.5)}},
            {"data": "pets:/somewhere"},
            {"data_fingerprint": "other"},
            {"model": ModelChoice("timm/some", device="cuda")},
            {"seed": 1},
            {"versions": {"vitreous": "2"}},
        ],
    )
    def test_other_weights_data_or_settings_change_it(self, change):
        assert some_run(**change).context != some_run().context

    @pytest.mark.parametrize(
        "change",
        [
            {"methods": ("c",)},
            {"plugins": {"/a.py": "hash"}},
            {"model": ModelChoice("timm/some@elsewhere")},  # the same weights by another name
            {"data": "masks:/moved"},
            {"shard_size": 5},
            {"limit": 3},
            {"threads": 2},
        ],
    )
    def test_other_methods_and_places_leave_it(self, change):
        assert some_run(**change).context == some_run().context


class TestPlan:
    @steady
    @given(images=st.integers(1, 200), size=st.integers(1, 30), limit=st.none() | st.integers(1, 250))
    def test_every_wanted_image_is_in_exactly_one_shard(self, images, size, limit):
        run = some_run(images=images, shard_size=size, limit=limit)
        planned = [index for shard in run.shards() for index in shard]
        assert planned == list(range(min(images, limit or images)))
        assert all(1 <= len(shard) <= size for shard in run.shards())

    @steady
    @given(
        images=st.integers(1, 200), size=st.integers(1, 30), limits=st.tuples(st.integers(1, 200), st.integers(1, 200))
    )
    def test_a_longer_run_has_all_whole_shards_of_a_shorter_one(self, images, size, limits):
        run = some_run(images=images, shard_size=size)
        short, long = (set(replace(run, limit=limit).shards()) for limit in sorted(limits))
        assert all(len(shard) < size for shard in short - long)


def test_so_many_threads_as_end_the_process_are_refused():
    """torch ended in a segmentation fault when it was to start 100,000 of them."""
    assert some_run(threads=1024).threads == 1024
    with pytest.raises(RunError, match="more than the maximum of 1024"):
        some_run(threads=100_000)
