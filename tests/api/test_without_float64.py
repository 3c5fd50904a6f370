"""Everything runs on a device without float64, as Apple's GPUs are, and gives the numbers of the processor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import vitreous
from device_without_float64 import There, device_without_float64
from few_evaluations import runs_again, with_few
from small_data import batch_of
from small_models import largest_difference, random_images, small_vit
from vitreous._utils.torch_state import float64_array, in_float64
from vitreous.evaluation.tasks.sanity import Concentration, randomise
from vitreous.evaluation.tasks.task import Case, generator_of
from vitreous.methods import list_methods
from vitreous.speed.measuring import agreement_of

# The same operations in float32 on either device, but for the order of sums in another layout of memory: a few units
# in the last of 7 digits, which relevance carries through some differences of almost equal numbers.
ROUNDING = 1e-3
# LRP divides by sums of both signs, and in this model one of them is so near 0 that an image's map reaches 1e6.
ROUNDING_OF = {"lrp": 0.1}


def vit(**options):
    return small_vit(depth=3, dtype=torch.float32, **options)


def images(count: int = 2):
    return random_images(count, dtype=torch.float32)


def test_the_device_refuses_float64_and_computes_everything_else():
    with device_without_float64() as device:
        there = images().to(device)
        assert there.device == device
        with pytest.raises(TypeError, match="float64"):
            there.double()
        with pytest.raises(TypeError, match="float64"):
            images().double().to(device)
        with pytest.raises(RuntimeError):
            there.numpy()
        assert torch.equal((there * 2).cpu(), images() * 2)
        wide = in_float64(there)
        assert (wide.device.type, wide.dtype) == ("cpu", torch.float64)
        assert np.array_equal(float64_array(there), images().double().numpy())


@pytest.fixture(scope="module")
def here():
    """A model of this machine, whose architecture is found once."""
    return vit()


def check_maps(names, here):
    """Explain by some methods in one call, here and there."""
    spellings = {name: with_few(name) for name in names}
    expected = vitreous.explain(here, images(), list(spellings.values()), target=1)
    model, pictures = vit(), images()
    with device_without_float64() as device:
        found = vitreous.explain(model.to(device), pictures.to(device), list(spellings.values()), target=1)
        for name, spelling in spellings.items():
            scores = found.scores[spelling]
            assert isinstance(scores, There), name
            difference = largest_difference(scores.cpu(), expected.scores[spelling])
            assert difference < ROUNDING_OF.get(name, ROUNDING), name


def test_maps_of_every_method_that_reads_one_run(here):
    check_maps([info.name for info in list_methods() if not runs_again(info)], here)


@pytest.mark.parametrize("name", [info.name for info in list_methods() if runs_again(info)])
def test_maps_of_every_method_that_runs_the_model_again(name, here):
    check_maps([name], here)


@pytest.mark.parametrize("pooling", ["avg", "map"])
def test_maps_of_heads_that_read_patches(pooling):
    options = {"global_pool": pooling, "class_token": False} if pooling == "map" else {"global_pool": pooling}
    expected = vitreous.explain(vit(**options), images(), "ixg").scores["ixg"]
    model, pictures = vit(**options), images()
    with device_without_float64() as device:
        found = vitreous.explain(model.to(device), pictures.to(device), "ixg").scores["ixg"].cpu()
    assert largest_difference(found, expected) < ROUNDING


def test_what_is_measured_of_maps():
    maps, case = torch.rand(1, 4, 4), Case(0, "made up")
    batch = batch_of(vit(), images(1), {case.method: maps})
    expected = Concentration().measure(batch, [case])
    with device_without_float64() as device:
        moved = {case: dict.fromkeys(batch.maps[case], maps[0].to(device))}
        assert Concentration().measure(replace(batch, maps=moved), [case]) == expected


def test_random_weights_are_those_of_the_processor():
    before = torch.rand(50, 4)
    here = before.clone()
    randomise(here, generator_of("weight", "seed"))
    with device_without_float64() as device:
        there = before.clone().to(device)
        randomise(there, generator_of("weight", "seed"))
        assert torch.equal(there.cpu(), here)


def test_agreement_of_maps():
    ours, theirs = torch.rand(2, 16), torch.rand(2, 16)
    expected = agreement_of(theirs, ours)
    with device_without_float64() as device:
        assert agreement_of(theirs, ours.to(device)) == expected
