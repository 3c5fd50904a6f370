"""Interrupts leave nothing behind, and a model in training mode is explained without being switched."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from timm.models.deit import VisionTransformerDistilled
from torch import nn
from torch.overrides import TorchFunctionMode

import interrupting
import vitreous
from interrupting import CASES, SURROUNDINGS, Counter, Interrupt, differences, run_traced, state_of
from small_models import CLASSES, random_images, small_vit
from vitreous._utils.torch_state import preserves_torch_state
from vitreous.architecture import find_architecture
from vitreous.architecture.evaluation_copy import evaluation_copy, run_in_evaluation
from vitreous.errors import UnsupportedModelError
from vitreous.tape.recording.interception import Interception

RATES = {"drop_path_rate": 0.5, "proj_drop_rate": 0.5, "attn_drop_rate": 0.5, "pos_drop_rate": 0.5, "drop_rate": 0.5}
METHODS = ["gae", "ixg.skipplus", "atman"]


def maps_of(model, **options):
    found = vitreous.explain(model, random_images(), METHODS, target=1, **options)
    return found.scores | {"logits": found.logits}


def check_explained_as_in_evaluation(model):
    """To the bit as in evaluation mode, and not switched."""
    expected = maps_of(model.eval())
    model.train()
    before = state_of(model)
    numbers = {name: value.clone() for name, value in model.state_dict().items()}
    assert interrupting.same(maps_of(model), expected)
    assert not differences(before, state_of(model))
    assert all(torch.equal(value, numbers[name]) for name, value in model.state_dict().items())


# Interrupts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CASES)
def test_an_interrupt_at_any_instruction_leaves_nothing_behind(family):
    """12 of them; ``python tests/support/interrupting.py 500`` makes more."""
    found = list(interrupting.outcomes(CASES[family](), 12, seed=1))
    assert not [outcome for outcome in found if outcome.left]
    assert sum(outcome.raised for outcome in found) >= 11  # Python swallows those that come inside a finaliser


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Ears:
    steps = own_steps = frozenset()

    def before(self, number):
        pass


@preserves_torch_state
def leave_everything_behind(architecture):
    torch.autocast("cpu", dtype=torch.float16).__enter__()
    torch.set_grad_enabled(not torch.is_grad_enabled())
    Mode().__enter__()
    Interception(architecture, Ears(), {}).__enter__()


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_the_state_is_restored_whichever_instruction_is_interrupted(surroundings):
    model = nn.Linear(1, 1)
    leave_behind = partial(leave_everything_behind, find_architecture(small_vit(depth=1), random_images()))
    counter = Counter()
    with SURROUNDINGS[surroundings]():
        before = state_of(model)
        leave_behind()
        assert not differences(before, state_of(model))
        run_traced(counter, leave_behind)
        for frame, count in enumerate(counter.counts):
            for instruction in range(count):
                interrupt = Interrupt(frame, instruction)
                with pytest.raises(KeyboardInterrupt) as held:
                    run_traced(interrupt, leave_behind)
                assert not differences(before, state_of(model)), interrupt.place
                del held
                assert not differences(before, state_of(model)), interrupt.place
    assert sum(counter.counts) > 200


# Threads --------------------------------------------------------------------------------------------------------------


def test_a_thread_that_trains_the_model_meanwhile_has_its_dropout():
    model = small_vit(depth=2, **RATES).train()
    expected = maps_of(model)
    finished, off = threading.Event(), []

    def train():
        with torch.no_grad():
            while not finished.is_set():
                model(random_images())

    def see(module, *_):
        if threading.current_thread() is trainer:
            off.append(not module.training)

    hooks = [one.register_forward_hook(see) for one in model.modules() if isinstance(one, nn.Dropout)]
    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        for _ in range(5):
            assert interrupting.same(maps_of(model), expected)
    finally:
        finished.set()
        trainer.join()
    assert len(hooks) <= len(off)
    assert not any(off)


def test_a_model_that_is_switched_to_training_in_the_middle_is_explained_as_in_evaluation():
    model = small_vit(depth=2, **RATES)
    expected = maps_of(model)
    switched = []

    def switch(*_):
        if not switched:
            switched.append(model.train())

    model.blocks[0].register_forward_hook(switch)
    assert interrupting.same(maps_of(model), expected)
    assert model.training


def test_what_runs_in_evaluation_runs_once():
    runs = []
    run_in_evaluation(small_vit(depth=1), runs.append)
    run_in_evaluation(small_vit(depth=1).train(), runs.append)
    assert [model.training for model in runs] == [False, False]


# Copies ---------------------------------------------------------------------------------------------------------------


def test_a_model_in_evaluation_mode_is_not_copied():
    model = small_vit(depth=1)
    assert evaluation_copy(model) is model


def test_a_copy_shares_every_tensor_and_is_what_the_model_is():
    model = small_vit(depth=2, **RATES).train()
    copy = evaluation_copy(model)
    assert type(copy) is type(model)
    for one, other in zip(copy.modules(), model.modules(), strict=True):
        assert type(one) is type(other)
        assert one is not other
        assert other.training
        assert not one.training
    assert [*map(id, copy.parameters())] == [*map(id, model.parameters())]
    assert copy.state_dict().keys() == model.state_dict().keys()
    assert find_architecture(copy, random_images()).depth == 2


class ListOfBlocks(nn.Module):
    """Reaches its parts by other ways than as children: a list, a tuple in a dictionary, a bound method, a closure."""

    def __init__(self, how):
        super().__init__()
        self.vit = small_vit(depth=3, **RATES)
        self.how = how
        vit = self.vit
        if how == "closure":
            vit.forward = lambda images: vit.forward_head(vit.forward_features(images))
        if how == "defaults":

            def forward(images, *, inner=vit):
                return inner.forward_head(inner.forward_features(images))

            vit.forward = forward
        if how == "method":
            self.run = vit.forward_features
        if how == "partial":
            vit.forward = partial(type(vit).forward, vit)
        self.kept = {"parts": (vit.head, [vit])}

    def forward(self, images):
        if self.how == "list":
            return self.kept["parts"][1][0](images)
        if self.how == "method":
            return self.vit.forward_head(self.run(images))
        return self.vit(images)


@pytest.mark.parametrize("how", ["list", "closure", "defaults", "method", "partial"])
def test_modules_that_are_reached_by_other_ways_than_as_children(how):
    check_explained_as_in_evaluation(ListOfBlocks(how))


class Holder:
    def __init__(self, module):
        self.module = module


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.vit = small_vit(depth=2, **RATES)
        self.holder = Holder(self.vit)

    def forward(self, images):
        return self.holder.module(images)


def test_what_no_copy_reaches_is_refused_in_training_mode_only():
    model = Hidden()
    assert maps_of(model.eval())
    with pytest.raises(UnsupportedModelError, match=r"VisionTransformer is called .* call eval\(\) on the model first"):
        maps_of(model.train())


def test_hooks_of_the_user_run_and_hooks_of_the_model_see_the_copy():
    model = small_vit(depth=2, **RATES).train()
    seen = []
    model.blocks[0].register_forward_hook(lambda module, *_: seen.append(module.training))
    vitreous.explain(model, random_images(), "gae")
    assert seen
    assert not any(seen)


class BatchNormHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.vit = small_vit(depth=2, **RATES)
        self.norm = nn.BatchNorm1d(CLASSES).double()
        self.act = nn.RReLU()

    def forward(self, images):
        return self.act(self.norm(self.vit(images)))


def test_batch_statistics_are_those_of_evaluation_and_are_not_updated():
    check_explained_as_in_evaluation(BatchNormHead())


def test_a_model_that_answers_otherwise_in_training_mode():
    """DeiT gives two outputs in training mode, and their mean in evaluation mode."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 3, "depth": 2, "num_classes": CLASSES}
    model = VisionTransformerDistilled(**sizes).double()
    model.set_distilled_training()
    check_explained_as_in_evaluation(model)


def test_parametrised_weights_and_spectral_norms():
    model = small_vit(depth=2, **RATES)
    nn.utils.parametrizations.spectral_norm(model.blocks[0].mlp.fc1)  # iterates in training mode
    check_explained_as_in_evaluation(model)


def test_a_scripted_part_in_training_mode_is_refused():
    model = small_vit(depth=1).train()
    model.norm = torch.jit.script(nn.Sequential(nn.LayerNorm(24).double(), nn.Dropout(0.5)))
    with pytest.raises(UnsupportedModelError, match=r"scripted part in training mode: call eval\(\)"):
        vitreous.explain(model, random_images(), "gae")
