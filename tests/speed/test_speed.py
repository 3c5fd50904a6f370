"""Speed: counted passes, limits, memory and rows, on a small model where all of them are known beforehand."""

from __future__ import annotations

import json
import math

import pytest
import torch
from PIL import Image
from torch import nn

import vitreous
from small_data import loaded
from small_models import largest_difference, random_images, small_vit
from vitreous.architecture import find_architecture
from vitreous.architecture.evaluation_copy import frozen_copy
from vitreous.errors import InputError, MethodError, UnsupportedModelError
from vitreous.evaluation.runner.prepare_run import expand_methods
from vitreous.methods.spelling import cost_of, parse
from vitreous.speed import SpeedRow, measure_speed
from vitreous.speed.measuring import SPEED_METHODS
from vitreous.speed.timing import (
    CountedLimit,
    Limit,
    Passes,
    PlainModel,
    counted_passes,
    limit_of,
    one_thread,
    peak_memory,
    ratio_of,
    seconds_of,
    time_in_turn,
    whole_pass,
)
from vitreous.tape import PIXELS, unite

CPU = torch.device("cpu")
DEPTH = 4
# The same float64 arithmetic in another order.
SAME = 1e-12


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def plain() -> PlainModel:
    model = small_vit(depth=DEPTH).requires_grad_(requires_grad=False)
    vitreous.explain(model, random_images(), "ixg")  # what is looked at once is not what a method takes
    return PlainModel(model, find_architecture(model, random_images()), random_images(), torch.tensor([1, 3]))


def counted(plain: PlainModel, job) -> Passes:
    whole = whole_pass(plain.architecture, plain.forward)
    with counted_passes(plain.architecture, whole) as passes:
        job()
    return passes


# Counting -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("raw_attention", "1 forward"),
        ("gradtoken", "1 forward, 1 backward (from block 3)"),
        ("ixg.skipplus", "1 forward, 1 backward (from block 2)"),
        ("ixg", "1 forward, 1 backward"),
        ("transattr", "1 forward, 2 backward"),
        ("integrated_gradients:steps=3", "4 forward, 3 backward"),
        ("occlusion", "17 forward"),
    ],
)
def test_passes_of_a_method_are_counted(plain, method, expected):
    passes = counted(plain, lambda: vitreous.explain(plain.network, plain.images, method))
    assert str(passes) == expected


def test_passes_of_a_part_of_the_images_or_tokens_are_parts(plain):
    assert str(counted(plain, lambda: plain.network(plain.images[:1]))) == "0.5 forward"
    vitreous.explain(plain.network, plain.images, "pami:by=drop")  # the first call asks whether patches can be dropped
    dropped = counted(plain, lambda: vitreous.explain(plain.network, plain.images, "occlusion:by=drop"))
    # 17 tokens in the recorded run, then 16 runs with one patch less.
    assert math.isclose(dropped.forward_passes, 1 + 16 * 16 / 17)


def test_what_a_model_is_asked_once_is_not_what_a_method_takes():
    model, images = small_vit(), random_images()
    (row,) = measure_speed(model, images, ["occlusion:by=drop"], repeats=1)
    assert row.passes == f"{1 + 16 * 16 / 17:.2f} forward"  # as above


def test_blocks_that_a_method_skips_are_not_counted(plain):
    """ViT-ReciproCAM masks the last block's input, for each of 16 patches; the blocks below run on a single image."""
    passes = counted(plain, lambda: vitreous.explain(plain.network, plain.images, "vit_recipro_cam"))
    shares = [here / whole for here, whole in zip(passes.forward, passes.whole, strict=True)]
    assert shares[3] == 1 + 16
    assert shares[0] == shares[1] == shares[2] < 1 + 16 / 2


def test_gradients_that_stop_at_a_blocks_output_are_not_counted_as_its_backward_pass(plain):
    def to_the_last_blocks_output():
        kept = []
        with plain.architecture.blocks[-1].module.register_forward_hook(lambda *given: kept.append(given[2])):
            logits = plain.network(plain.images.clone().requires_grad_())
        torch.autograd.grad(logits.sum(), kept)

    assert str(counted(plain, to_the_last_blocks_output)) == "1 forward"


def test_counting_leaves_no_hook_behind(plain):
    with pytest.raises(RuntimeError, match="inside"), counted_passes(plain.architecture, [1.0] * DEPTH):
        raise RuntimeError("inside")
    assert not any(block.module._forward_hooks for block in plain.architecture.blocks)


# Limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("methods", "lowest"),
    [
        (["raw_attention"], ()),
        (["gradtoken"], (3,)),
        (["decompx.skipplus"], (2,)),
        (["cat"], (0,)),
        (["lrp"], (PIXELS,)),
        (["transattr"], (0, 0)),
        (["gradtoken", "ixg.skipplus", "decompx"], (2, 0)),  # the first two share a rule
    ],
)
def test_the_limit_reaches_as_deep_as_the_methods_needs(methods, lowest):
    needs = unite(parse(method).needs(DEPTH) for method in methods)
    assert limit_of(needs, DEPTH).lowest == lowest


@pytest.mark.parametrize(
    ("lowest", "expected"),
    [
        ((), "1 forward"),
        ((3,), "1 forward, 1 backward (from block 3)"),
        ((2,), "1 forward, 1 backward (from block 2)"),
        ((2, 0), "1 forward, 1 backward, 1 backward (from block 2)"),
        ((PIXELS,), "1 forward, 1 backward"),
    ],
)
def test_a_limit_is_run_as_it_is_named(plain, lowest, expected):
    assert str(counted(plain, Limit(lowest).job(plain))) == expected


def test_below_the_lowest_block_a_limit_builds_no_graph(plain):
    """The blocks' outputs say so themselves: one without a graph has nothing to undo."""
    graphs = {}
    hooks = [
        block.module.register_forward_hook(
            lambda *given, number=number: graphs.update({number: given[2].requires_grad})
        )
        for number, block in enumerate(plain.architecture.blocks)
    ]
    plain.to_blocks((2,))
    for hook in hooks:
        hook.remove()
    assert graphs == {0: False, 1: False, 2: True, 3: True}


def test_a_limit_holds_less_memory_the_less_deep_it_goes(plain):
    peaks = [peak_memory(Limit(lowest).job(plain), CPU) for lowest in ((), (3,), (2,), (0,))]
    assert peaks == sorted(peaks)
    # Of a graph over four blocks, that of two is about half; what a forward pass takes by itself comes on top.
    assert 0.4 < (peaks[2] - peaks[0]) / (peaks[3] - peaks[0]) < 0.6


def test_the_gradient_of_a_limit_is_the_plain_one(plain):
    (found,) = plain.to_blocks((PIXELS,))
    pixels = plain.images.clone().requires_grad_()
    plain.network(pixels).gather(1, plain.target[:, None]).sum().backward()
    assert largest_difference(found, pixels.grad) < SAME
    ours = vitreous.explain(plain.network, plain.images, "gradient:layer=2", plain.target).scores["gradient:layer=2"]
    (stream,) = plain.to_blocks((2,))
    assert largest_difference(stream.norm(dim=-1)[:, 1:], ours) < SAME


def test_the_limit_of_many_runs_is_the_time_of_as_many_plain_ones():
    passes = Passes([1.0, 1.0], [4.0, 2.0], [2.0, 2.0])
    seconds = {"forward": [1.0, 2.0], "forward + backward": [3.0, 5.0]}
    assert CountedLimit(passes).seconds(seconds) == [3 * 1 + 2 * 2, 3 * 2 + 2 * 3]
    assert str(passes) == "3 forward, 2 backward"


def test_a_frozen_copy_shares_the_weights_and_leaves_the_model():
    model = small_vit()
    wanted = {name: name.startswith("blocks") for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad = wanted[name]
    copy = frozen_copy(model)
    assert not any(parameter.requires_grad for parameter in copy.parameters())
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == wanted
    places = [[one.data_ptr() for one in each.parameters()] for each in (model, copy)]
    assert places[0] == places[1]
    copy.blocks[0].register_forward_hook(lambda *_: None)
    assert not model.blocks[0]._forward_hooks


# Memory and time ------------------------------------------------------------------------------------------------------


def test_peak_memory_is_that_of_tensors_alive_at_once():
    def job():
        first = torch.zeros(1000, dtype=torch.float32)
        second = torch.zeros(500, dtype=torch.float64)
        del first
        third = torch.zeros(100, dtype=torch.float32)
        return second, third

    assert peak_memory(job, CPU) == 4000 + 4000


def test_peak_memory_counts_results_on_the_way_and_nothing_that_was_there_before():
    values = torch.zeros(1000)
    kept = []
    # Both sums are there at once, 4000 bytes each.
    assert peak_memory(lambda: kept.append(values + values + values), CPU) == 8000
    assert peak_memory(lambda: values.add_(values), CPU) == 0
    # One operation: the input of a softmax is made contiguous in a copy that nobody outside sees.
    assert peak_memory(lambda: torch.softmax(values.view(10, 100).T, dim=1), CPU) == 8000


def test_giving_back_what_was_there_before_does_not_hide_what_is_taken():
    held = [torch.zeros(1000)]

    def job():
        held.clear()
        return torch.zeros(500)

    assert peak_memory(job, CPU) == 2000


def test_jobs_are_timed_in_turn():
    order = []
    seconds = time_in_turn({name: lambda name=name: order.append(name) for name in "abc"}, 2, CPU)
    assert "".join(order) == "abcabc"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2, "c": 2}


def test_only_processor_time_counts():
    import time

    assert seconds_of(lambda: time.sleep(0.3), CPU) < 0.1


def test_a_ratio_is_the_median_of_ratios_of_single_repetitions():
    # The machine is ten times slower in the last two repetitions; the ratios do not see it.
    ratio = ratio_of([2, 3, 20, 30, 25], [1, 1, 10, 10, 10])
    assert tuple(ratio) == (2.5, 2, 3)
    assert tuple(ratio_of([3], [2])) == (1.5, 1.5, 1.5)


# Rows -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows() -> dict[str, SpeedRow]:
    model, images = small_vit(depth=DEPTH, dtype=torch.float32), random_images(dtype=torch.float32)
    methods = ["ixg", "ixg.skipplus", "gae", "occlusion", "ixg"]
    return {row.method: row for row in measure_speed(model, images, methods, repeats=2, together=True)}


def test_every_method_has_a_row_with_all_ratios(rows):
    assert list(rows) == ["ixg", "ixg.skipplus", "gae", "occlusion", "4 methods at once"]
    for row in rows.values():
        assert row.reason is None
        for name in ("ratio_forward", "ratio_forward_backward", "ratio_limit"):
            low, high = row.spread[name]
            assert 0 < low <= getattr(row, name) <= high
        assert row.ratio_forward > row.ratio_forward_backward
        assert row.ratio_peak_memory > 0


def test_rows_say_what_the_limit_is(rows):
    assert rows["ixg.skipplus"].limit == "forward + backward (from block 2)"
    assert rows["occlusion"].limit == "the same passes, plain: 17 forward"
    # Half of the backward pass, so half of the graph.
    assert rows["ixg.skipplus"].ratio_peak_memory < 0.7 * rows["ixg"].ratio_peak_memory


def test_rows_as_json(rows):
    row = json.loads(json.dumps(rows["ixg"].as_json(), allow_nan=False))
    names = {"method", "ratio_forward", "ratio_forward_backward", "ratio_limit", "ratio_peak_memory", "passes"}
    assert names | {"peer", "ratio_peer", "agreement"} <= set(row)
    assert (row["method"], row["passes"], row["peer"]) == ("ixg", "1 forward, 1 backward", None)


class Logarithm(nn.Module):
    """A step that is no linear map with factors of its own."""

    def forward(self, values):
        return torch.log1p(values.square())


def test_a_method_that_the_model_cannot_serve_is_a_row_with_the_reason():
    model, images = small_vit(dtype=torch.float32), random_images(dtype=torch.float32)
    for block in model.blocks:
        block.attn.proj = nn.Sequential(block.attn.proj, Logarithm())
    refused, served = measure_speed(model, images, ["tokentm", "ixg"], repeats=1)
    assert refused.reason.startswith("in block 0 no linear map leads")
    assert "Methods that" not in refused.reason
    assert refused.ratio_forward is None
    assert served.reason is None
    assert served.ratio_forward > 0


def test_the_model_is_as_it_was():
    model, images = small_vit(dtype=torch.float32).train(), random_images(dtype=torch.float32)
    measure_speed(model, images, "gradtoken", repeats=1)
    assert model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"repeats": 0}, InputError, "repeats must be at least 1"),
        ({"batch": 0}, InputError, "batch must be at least 1"),
        ({"methods": "gea"}, MethodError, "there is no method 'gea'"),
        ({"methods": []}, MethodError, "no method was given"),
        ({"images": None}, InputError, "the size of this model's input is not known: pass images"),
        ({"images": random_images()[0]}, InputError, "must have shape"),
        ({"images": random_images().byte()}, InputError, "floating point and normalised, not torch.uint8"),
        ({"images": Image.new("RGB", (32, 32))}, InputError, "need a model with known preprocessing"),
        ({"peers": ["captain"]}, InputError, "there is no peer 'captain'"),
    ],
)
def test_what_makes_no_sense_is_refused(options, error, reason):
    given = {"images": random_images(), "methods": "ixg", "repeats": 1, **options}
    with pytest.raises(error, match=reason):
        measure_speed(small_vit(), **given)


class OpenBlocks(nn.Sequential):
    """Runs the parts of its blocks itself."""

    def forward(self, x):
        for block in self:
            x = x + block.attn(block.norm1(x))
            x = x + block.mlp(block.norm2(x))
        return x


@pytest.mark.parametrize("blocks", [OpenBlocks, lambda first, _: nn.Sequential(first, first)])
def test_passes_need_blocks_that_are_modules_of_their_own(blocks):
    model = small_vit(depth=2)
    model.blocks = blocks(*model.blocks)
    assert vitreous.explain(model, random_images(), "gae").scores["gae"].isfinite().all()
    with pytest.raises(UnsupportedModelError, match="cannot be counted, because its blocks are not modules"):
        measure_speed(model, random_images(), "gae", repeats=1)


def test_a_model_that_was_explained_before_is_measured_by_its_own_blocks():
    model, images = small_vit(depth=2), random_images()
    vitreous.explain(model, images, "ixg")
    (row,) = measure_speed(model, images, "ixg", repeats=1)
    assert row.passes == "1 forward, 1 backward"


def test_images_are_what_explain_takes():
    photo = Image.new("RGB", (40, 40))
    (row,) = measure_speed(loaded(small_vit(depth=1)), photo, "gae", repeats=1)
    assert row.ratio_forward > 0
    # Of another precision than the model.
    (row,) = measure_speed(small_vit(depth=1), random_images(dtype=torch.float32), "gae", repeats=1)
    assert row.ratio_forward > 0


def test_the_usual_methods_are_measured_where_none_are_named():
    rows = measure_speed(small_vit(depth=1), random_images(1), None, repeats=1)
    assert tuple(row.method for row in rows) == SPEED_METHODS


def test_one_run_are_the_white_box_methods_that_need_no_other_run():
    chosen = expand_methods(["one-run", "ixg.plus", "ixg"])
    assert len(chosen) == len(set(chosen))
    assert chosen[-1] == "ixg.plus"
    assert {"ixg", "gae", "transattr"} < set(chosen)
    assert not {"integrated_gradients", "occlusion", "iia"} & set(chosen)
    assert all(cost_of(method).one_run for method in chosen)
