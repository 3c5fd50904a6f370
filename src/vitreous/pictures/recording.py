"""Recorded runs of one image for figures: tokens, attention and gradients, as methods see them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from vitreous.api.explain import black_pixel, declared_outputs, find_wanted, network_of, stage_of
from vitreous.api.output_detection import find_outputs
from vitreous.api.run_methods import target_reader
from vitreous.api.runs import RunSettings
from vitreous.architecture import find_architecture
from vitreous.inputs.targets import AnyTarget, TargetObjects, find_targets
from vitreous.methods import View
from vitreous.methods.spelling import Recipe
from vitreous.models import LoadedModel
from vitreous.models.pixels import Images, find_pixels
from vitreous.tape import Plan, record
from vitreous.tape.output import CLASS_SCORES, OutputReader, TargetReader
from vitreous.tape.runner import ModelRunner


def open_runner(model: nn.Module | LoadedModel, images: Images) -> ModelRunner:
    """Wrap a model and its images so that it can run again with fewer tokens or other pixels."""
    network = network_of(model)
    pixels, _ = find_pixels(model, network, images)
    black = black_pixel(model, pixels)
    return ModelRunner(network, pixels, black=black, outputs=declared_outputs(model), stage=stage_of(model))


@contextmanager
def recorded(
    model: nn.Module | LoadedModel, images: Images, recipe: Recipe, target: AnyTarget = None
) -> Iterator[View]:
    """Run the model and yield what a recipe reads, for one class per image; it is valid inside the context."""
    network = network_of(model)
    pixels, _ = find_pixels(model, network, images)
    architecture = find_architecture(network, pixels, stage_of(model))
    needs = recipe.needs(architecture.depth)
    network, wanted = find_wanted(model, network, pixels, target, None, None)
    declared = declared_outputs(model)
    reader: OutputReader = CLASS_SCORES
    classes_wanted: AnyTarget = None
    if isinstance(wanted, TargetObjects):
        reader = target_reader(network, pixels, wanted, RunSettings(outputs=declared))
    else:
        classes_wanted = wanted
    with record(network, architecture, pixels, Plan(architecture.depth, needs), reader) as tape:
        if isinstance(reader, TargetReader):
            outputs, targets = reader.found.scale, reader.found.numbers_on(pixels.device)
        else:
            outputs = find_outputs(network, pixels, tape.logits, declared or architecture.scale)
            targets = find_targets(tape.logits, classes_wanted, None).classes
        tape.architecture = tape.architecture.with_outputs(outputs)
        classes = targets[:, 0]
        gradients = {backward: tape.backward(backward, classes, part) for backward, part in needs.gradients.items()}
        runner = ModelRunner(
            network, pixels, classes[:, None], _architecture=tape.architecture, _layout=tape.layout, _reader=reader
        )
        with torch.autocast(pixels.device.type, enabled=False):
            yield View(tape, gradients, classes, runner)
