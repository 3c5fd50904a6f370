"""The tape listens to a model without editing it, restores everything, and keeps nothing alive.

``SAME`` compares two runs of the same arithmetic that may be served by other kernels (fused attention or not, another
layout in memory): a few roundings of float64, 1e-16 each, grown through four blocks. 1e-12 of the largest score leaves
three digits for that and would still notice any step that was computed in single precision (1e-7).
"""

from __future__ import annotations

import copy
import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from timm.models.vision_transformer import Block
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

import vitreous
from small_models import golden_model, largest_difference, random_images, small_vit
from vitreous.architecture import find_architecture
from vitreous.errors import UnsupportedModelError, VitreousError
from vitreous.methods import View
from vitreous.methods.spelling import cost_of
from vitreous.speed.timing import one_thread
from vitreous.tape import GradientNeeds, Needs, Pass, Plan, record
from vitreous.tape.recording.interception import HandlerTable
from vitreous.tape.recording.recorder import Recorder

SAME = 1e-12
# All that read one recorded run: the tape. LeGrad asks the head once more, the others that run again ask much more.
METHODS = [
    *(info.name for info in vitreous.list_methods() if cost_of(info.name).one_run),
    *("decompx.skipplus", "tokentm:variant=third_party"),
]
FEW = ["decompx.skipplus", "gae", "tokentm", "gradtoken"]  # both rules, both objectives


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def expected():
    """What all methods say of ``small_vit()`` and ``random_images()``."""
    return vitreous.explain(small_vit(), random_images(), METHODS).scores


def check(scores, expected, tolerance=SAME):
    for name, maps in scores.items():
        assert largest_difference(maps, expected[name]) < tolerance, name


def state_of(model):
    """Everything about a model and about torch that an explanation could leave changed."""
    return {
        "modules": [
            {name: value if isinstance(value, bool) else id(value) for name, value in vars(module).items()}
            for module in model.modules()
        ],
        "hooks": [
            [list(hooks) for name, hooks in vars(module).items() if "hooks" in name and hooks]
            for module in model.modules()
        ],
        "classes": [(type(module), id(type(module).forward)) for module in model.modules()],
        "parameters": [
            (name, id(parameter), parameter.requires_grad, parameter.grad, parameter._version)
            for name, parameter in model.named_parameters()
        ],
        "buffers": [(name, id(buffer), buffer._version) for name, buffer in model.named_buffers()],
        "global hooks": [len(hooks) for name, hooks in sorted(vars(torch_module).items()) if name.endswith("_hooks")],
        "function modes": torch._C._len_torch_function_stack(),
        "functions": [
            id(function)
            for function in (
                torch.nn.functional.scaled_dot_product_attention,
                torch.nn.functional.layer_norm,
                torch.nn.functional.gelu,
                torch.softmax,
                torch.matmul,
            )
        ],
        "torch": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
    }


# Edits nothing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
def test_model_and_torch_are_as_before(training):
    model = small_vit().train(training)
    weights = copy.deepcopy(model.state_dict())
    before = state_of(model)
    vitreous.explain(model, random_images(), METHODS)
    assert state_of(model) == before
    assert list(model.state_dict()) == list(weights)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])


def test_state_of_notices_what_it_should():
    """The comparison above would be worth nothing if it could not fail."""
    model = small_vit()
    before = state_of(model)
    hook = model.blocks[1].register_forward_hook(lambda *_: None)
    assert state_of(model) != before
    hook.remove()
    assert state_of(model) == before
    model.blocks[2].attn.training = True
    assert state_of(model) != before


def test_a_copy_made_afterwards_is_an_ordinary_model(expected):
    model = small_vit()
    vitreous.explain(model, random_images(), FEW)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(random_images()), model(random_images()))
    check(vitreous.explain(copied, random_images(), FEW).scores, expected)


def test_a_training_step_afterwards_is_an_ordinary_one():
    model, other = small_vit(), small_vit()
    vitreous.explain(model, random_images(), METHODS)
    for network in (model, other):
        network(random_images()).square().sum().backward()
    for parameter, untouched in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter.grad, untouched.grad)


def test_a_users_own_gradients_are_left_alone():
    model = small_vit()
    model(random_images()).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    vitreous.explain(model, random_images(), METHODS)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_images_are_not_changed_and_get_no_gradient():
    images = random_images().requires_grad_()
    vitreous.explain(small_vit(), images, METHODS)
    assert images.grad is None
    assert torch.equal(images, random_images())


def test_a_users_own_hooks_stay_and_fire_once(expected):
    model = small_vit()
    fired = []
    model.blocks[0].register_forward_hook(lambda *_: fired.append("block"))
    model.blocks[1].attn.register_forward_pre_hook(lambda *_: fired.append("attention"))
    model.head.register_forward_hook(lambda *_: fired.append("head"))
    vitreous.explain(model, random_images(), METHODS)  # the first time, the model also runs to show its architecture
    fired.clear()
    check(vitreous.explain(model, random_images(), METHODS).scores, expected)
    assert fired == ["block", "attention", "head"]
    fired.clear()
    model(random_images())
    assert fired == ["block", "attention", "head"]


def test_a_users_hook_that_changes_the_model_is_explained_too(expected):
    model = small_vit()
    model.head.register_forward_hook(lambda module, arguments, output: 3 * output)
    found = vitreous.explain(model, random_images(), ["ixg"]).scores["ixg"]
    assert largest_difference(found, 3 * expected["ixg"]) < SAME


# Restores everything on every exit ------------------------------------------------------------------------------------


class BombError(Exception):
    pass


def explode(*_):
    raise BombError("in the middle of the model")


@contextmanager
def bomb_expected():
    """The user's own exception is the cause of the sentence that says that the model fails."""
    with pytest.raises(UnsupportedModelError, match=r"fails when it runs \(BombError") as caught:
        yield
    assert isinstance(caught.value.__cause__, BombError)


PLACES = ["patch_embed", "blocks.0", "blocks.2.attn", "blocks.2.attn.proj", "blocks.3.mlp.act", "norm", "head"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("training", [False, True])
def test_an_exception_inside_the_model_restores_everything(place, training, expected):
    model = small_vit().train(training)
    before = state_of(model)
    bomb = model.get_submodule(place).register_forward_hook(explode)
    with bomb_expected():
        vitreous.explain(model, random_images(), METHODS)
    bomb.remove()
    assert state_of(model) == before
    check(vitreous.explain(model, random_images(), FEW).scores, expected)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_an_exception_while_reading_restores_everything(monkeypatch, error):
    """After the forward pass: in a method, with the backward passes done."""
    model = small_vit().train()
    before = state_of(model)

    def interrupt(*_):
        raise error

    monkeypatch.setattr(View, "attention_gradient", interrupt)
    with pytest.raises(error):
        vitreous.explain(model, random_images(), ["gae"])
    assert state_of(model) == before


def test_an_error_of_vitreous_itself_restores_everything():
    model = small_vit().train()
    before = state_of(model)
    with pytest.raises(vitreous.errors.TargetError):
        vitreous.explain(model, random_images(), FEW, target=99)  # noticed when the forward pass is done
    assert state_of(model) == before


# Keeps no graph alive -------------------------------------------------------------------------------------------------


class Token:
    """Lives as long as the autograd node that holds it."""


class Probe(torch.autograd.Function):
    """Changes nothing; its node in the graph holds a token."""

    @staticmethod
    def forward(ctx, values, token):
        ctx.token = token
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def live_tensors():
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.fixture
def no_collector():
    """Without the collector, whatever is in a reference cycle stays alive: nothing here may be."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_no_graph_outlives_the_call():
    model = small_vit()
    tokens = []

    def probe(module, arguments, output):
        token = Token()
        tokens.append(weakref.ref(token))
        return Probe.apply(output, token)

    for block in model.blocks:
        block.register_forward_hook(probe)
    explanation = vitreous.explain(model, random_images(), METHODS)
    assert len(tokens) == 3 * len(model.blocks)  # to see the architecture, recorded, to see where patches stay
    assert all(token() is None for token in tokens)
    kept = [*explanation.scores.values(), explanation.logits, explanation.target]
    assert not any(tensor.requires_grad or tensor.grad_fn is not None for tensor in kept)


@pytest.mark.usefixtures("no_collector")
def test_twelve_explanations_leave_no_tensor_behind():
    model, images = small_vit(depth=2), random_images(1)
    counts = []
    for number in range(1, 13):
        vitreous.explain(model, images, METHODS)
        if number in {1, 2, 12}:  # counting takes longer than explaining
            counts.append(live_tensors())
    assert counts == [counts[0]] * 3


@pytest.mark.usefixtures("no_collector")
def test_an_exception_leaves_no_tensor_behind():
    model, images = small_vit(depth=2), random_images(1)
    model.head.register_forward_hook(explode)
    counts = []
    for _ in range(3):
        with bomb_expected():
            vitreous.explain(model, images, FEW)
        gc.collect()  # a traceback and its frames are a cycle by nature
        counts.append(live_tensors())
    assert counts == [counts[0]] * 3


# Parameters, gradient modes and precisions ----------------------------------------------------------------------------


def test_requires_grad_makes_no_difference(expected):
    model = small_vit().requires_grad_(requires_grad=False)
    check(vitreous.explain(model, random_images(), METHODS).scores, expected)
    model.blocks[2].requires_grad_()
    check(vitreous.explain(model, random_images(), METHODS).scores, expected)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_inside_no_grad(expected):
    with torch.no_grad():
        check(vitreous.explain(small_vit(), random_images(), METHODS).scores, expected)
        assert not torch.is_grad_enabled()


def test_inside_inference_mode(expected):
    model = small_vit()
    with torch.inference_mode():
        images = random_images()
        assert images.is_inference()
        explanation = vitreous.explain(model, images, METHODS)
        assert torch.is_inference_mode_enabled()
    check(explanation.scores, expected)
    # The result can be used in a graph later, which a tensor made under inference_mode could not.
    assert not any(maps.is_inference() for maps in explanation.scores.values())


def test_images_from_inference_mode_used_outside(expected):
    with torch.inference_mode():
        images = random_images()
    check(vitreous.explain(small_vit(), images, METHODS).scores, expected)


def test_parameters_created_in_inference_mode(expected):
    with torch.inference_mode():
        model = small_vit()
    assert all(parameter.is_inference() for parameter in model.parameters())
    check(vitreous.explain(model, random_images(), METHODS).scores, expected)
    with torch.inference_mode():
        check(vitreous.explain(model, random_images(), METHODS).scores, expected)


def test_float32_agrees_with_float64(expected):
    """1e-4 of the largest score: float32 rounds at 6e-8, cancellation in signed sums over layers costs two digits.

    Grad-CAM++ divides by sums that nearly vanish, which costs one more.
    LRP divides by numbers near 0 until its relevance is of order 1e7, and that magnifies rounding: measured 1e-3.
    """
    model = small_vit(dtype=torch.float32)
    target = vitreous.explain(small_vit(), random_images(), ["rollout"]).target
    explanation = vitreous.explain(model, random_images(dtype=torch.float32), METHODS, target=target)
    assert all(maps.dtype == torch.float32 for maps in explanation.scores.values())
    for name, maps in explanation.scores.items():
        check({name: maps}, expected, {"gradcampp": 1e-3, "lrp": 1e-2}.get(name, 1e-4))


@pytest.mark.parametrize("gap", [8, 15, 25])
@pytest.mark.parametrize("classes", [1, 2, 6])
def test_the_gradient_of_a_probability_survives_a_sure_model(classes, gap):
    """1e-3 of the largest score, as scores of float32 are some 1e-5 off and e to the gap makes ``gap`` times that.

    1 - p, of which that gradient is made, is 3e-7 with a gap of 15 between the likeliest class and the next: five units
    of what float32 can tell from 1. With 25 it takes p for 1. A single class is a yes-or-no model, sure of its yes.
    """
    model, images = small_vit(num_classes=classes), random_images(1)
    with torch.no_grad():
        likeliest, *following = model(images)[0].sort(descending=True).values.tolist()
    scale_head(model, gap / (likeliest - following[0] if following else likeliest))
    expected = vitreous.explain(model, images, "tokentm").scores["tokentm"]
    found = vitreous.explain(model.float(), images.float(), "tokentm").scores["tokentm"]
    assert float(expected.abs().max()) > 0
    assert largest_difference(found.double(), expected) < 1e-3


def test_images_are_taken_to_the_models_precision(expected):
    check(vitreous.explain(small_vit(), random_images().float().double(), FEW).scores, expected, 1e-4)
    single = vitreous.explain(small_vit(), random_images(dtype=torch.float32), FEW).scores
    assert all(maps.dtype == torch.float64 for maps in single.values())
    check(single, expected, 1e-4)  # the pixels themselves were rounded to float32


HALF = [
    pytest.param(torch.bfloat16, False, id="bfloat16"),
    pytest.param(torch.float16, False, id="float16"),
    pytest.param(torch.bfloat16, True, id="autocast to bfloat16"),
    pytest.param(torch.float16, True, id="autocast to float16"),
]


def in_half(dtype, autocast, methods, target=None, surer=1.0):
    """The golden model with its head times ``surer``, explained in half precision."""
    model, images = golden_model(torch.float32)
    scale_head(model, surer)
    with torch.autocast("cpu", dtype, enabled=autocast):
        return vitreous.explain(model if autocast else model.to(dtype), images, methods, target=target).scores


def scale_head(model, factor):
    with torch.no_grad():
        model.head.weight *= factor
        model.head.bias *= factor


@pytest.mark.parametrize(("dtype", "autocast"), HALF)
def test_half_precision_gives_finite_maps_in_single_precision(dtype, autocast):
    """All but relevance, which is refused: it divides by numbers that half precision does not have."""
    methods = [name for name in METHODS if vitreous.methods.spelling.parse(name).info.family != "relevance"]
    for name, maps in in_half(dtype, autocast, methods).items():
        assert torch.isfinite(maps).all(), name
        assert maps.dtype == torch.float32, name


@pytest.mark.parametrize(("which", "surer"), [("predicted", 1.0), ("predicted", 1.6), ("another class", 1.0)])
@pytest.mark.parametrize(("dtype", "autocast"), HALF)
def test_half_precision_agrees_with_double_precision(dtype, autocast, which, surer):
    """Correlation over patches above 0.98 (measured: 0.993 at least) and a relative error of some dozen roundings.

    bfloat16 rounds at 0.4% and was measured at 14% at most, float16 rounds at 0.05% and was measured at 1.5%: sixty
    operations deep, with the differences that softmax and LayerNorm make of nearly equal numbers. The model says its
    class with probability 0.999 (0.99999 where its head is made surer), so 1 - p, of which TokenTM's gradient is made,
    is below what half precision can tell from 0: without care for that TokenTM's correlation fell to 0.83. GradToken's
    default clamps all patches but one to 0 for one of the images (that one is 0.2% of the signed map: rounding decides
    it), so it is compared before the clamp.
    """
    methods = ["decompx.skipplus", "gae", "tokentm", "gradtoken:heads=average"]
    model, images = golden_model()
    scale_head(model, surer)
    target = model(images).argmax(dim=1)
    target = target if which == "predicted" else (target + 3) % 10
    exact = vitreous.explain(model, images, methods, target=target).scores
    for name, maps in in_half(dtype, autocast, methods, target, surer).items():
        for found, wanted in zip(maps.double(), exact[name], strict=True):
            assert torch.corrcoef(torch.stack([found, wanted]))[0, 1] > 0.98, name
            assert (found - wanted).norm() < (0.2 if dtype == torch.bfloat16 else 0.03) * wanted.norm(), name


# Evaluation mode ------------------------------------------------------------------------------------------------------

RANDOM = {"drop_path_rate": 0.5, "proj_drop_rate": 0.5, "attn_drop_rate": 0.5, "pos_drop_rate": 0.5, "drop_rate": 0.5}


def modes(model):
    return [module.training for module in model.modules()]


def training_model():
    """In training mode, with dropout everywhere and stochastic depth, but for two parts that are frozen."""
    model = small_vit(**RANDOM).train()
    model.blocks[1].eval()
    model.norm.eval()
    return model


def test_a_training_model_is_explained_as_in_evaluation(expected):
    model = training_model()
    assert not torch.equal(model(random_images()), model(random_images()))
    before = modes(model)
    check(vitreous.explain(model, random_images(), METHODS).scores, expected)
    assert modes(model) == before
    assert True in before
    assert False in before


def test_modes_are_restored_after_an_exception():
    model = training_model()
    before = modes(model)
    model.blocks[2].attn.register_forward_hook(explode)
    with bomb_expected():
        vitreous.explain(model, random_images(), FEW)
    assert modes(model) == before


# Threads --------------------------------------------------------------------------------------------------------------

THREADS, ROUNDS = 8, 20


@pytest.fixture
def eager_switching():
    """Threads take turns a thousand times more often than usual, so that they meet in the middle of things."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def single_threads(count):
    """Threads that use one processor per operation each, as the main thread does here."""
    return ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))


@pytest.mark.usefixtures("eager_switching")
@pytest.mark.parametrize("training", [False, True])
def test_threads_with_one_model_do_not_see_each_other(training):
    model = small_vit(depth=2, **RANDOM).train(training)
    before = state_of(model)
    cases = [
        (random_images(1, seed=number), METHODS[number % len(METHODS)], number % 5) for number in range(THREADS * 3)
    ]
    alone = [vitreous.explain(model, images, [name], target=target) for images, name, target in cases]
    with torch.no_grad():
        plain_outputs = [model(images) for images, _, _ in cases]
    finished = threading.Event()

    def use_plainly():
        """The model itself, meanwhile, as its owner uses it. (In training mode its output is random anyway.)"""
        count = 0
        with torch.no_grad():
            while not finished.is_set() or count < 20:
                number = count % len(cases)
                output = model(cases[number][0])
                assert not output.requires_grad
                assert training or torch.equal(output, plain_outputs[number])
                count += 1

    def explain_many(thread):
        for round_ in range(ROUNDS):
            number = (thread + 5 * round_) % len(cases)
            images, name, target = cases[number]
            found = vitreous.explain(model, images, [name], target=target)
            assert torch.equal(found.logits, alone[number].logits)
            assert torch.equal(found.scores[name], alone[number].scores[name]), name

    with single_threads(THREADS + 1) as pool:
        plain = pool.submit(use_plainly)
        explaining = [pool.submit(explain_many, thread) for thread in range(THREADS)]
        try:
            for job in explaining:
                job.result()
        finally:
            finished.set()
        plain.result()
    assert state_of(model) == before


@pytest.mark.usefixtures("eager_switching")
def test_an_exception_in_one_thread_does_not_disturb_the_others(expected):
    model = small_vit().train()
    before = state_of(model)
    doomed = threading.local()

    def explode_for_some(*_):
        if getattr(doomed, "yes", False):
            raise BombError

    hook = model.blocks[2].register_forward_hook(explode_for_some)

    def work(number):
        doomed.yes = number % 2 == 0
        if not doomed.yes:
            return check(vitreous.explain(model, random_images(), FEW).scores, expected)
        with bomb_expected():
            vitreous.explain(model, random_images(), FEW)
        return None

    with single_threads(4) as pool:
        list(pool.map(work, range(16)))
    hook.remove()
    assert state_of(model) == before


# Models that are run in unusual ways ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("how", ["wrapped", "in place", "blocks wrapped", "blocks in place"])
def test_compiled_models_are_explained_as_they_are_written(how, expected):
    """Compiled code does not call the functions that are listened to: their rules would be lost in silence."""
    model = small_vit()
    if how == "wrapped":
        model = torch.compile(model, backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    else:
        for number, block in enumerate(model.blocks):
            if how == "blocks in place":
                block.compile(backend="eager")
            else:
                model.blocks[number] = torch.compile(block, backend="eager")
    check(vitreous.explain(model, random_images(), METHODS).scores, expected)
    with torch.no_grad():
        model(random_images())  # compiled now
    check(vitreous.explain(model, random_images(), METHODS).scores, expected)
    calls = []
    torch._dynamo.reset()
    counting = torch.compile(lambda x: x + 1, backend=lambda graph, _: calls.append(1) or graph.forward)
    counting(torch.ones(2))
    assert calls  # compiling works again afterwards
    torch._dynamo.reset()


@pytest.mark.parametrize("training", [False, True])
def test_gradient_checkpointing_is_off_while_explaining_and_on_again_after(training, expected):
    model = small_vit()
    model.set_grad_checkpointing()
    model.train(training)
    before = state_of(model)
    check(vitreous.explain(model, random_images(), METHODS).scores, expected)
    assert state_of(model) == before
    assert model.grad_checkpointing


class Checkpointed(nn.Module):
    """A model that always recomputes its blocks, whatever its mode."""

    def __init__(self, model, *, reentrant):
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, images):
        model = self.model
        tokens = model._pos_embed(model.patch_embed(images))
        for block in model.blocks:
            tokens = checkpoint(block, tokens, use_reentrant=self.reentrant)
        return model.forward_head(model.norm(tokens))


def test_blocks_that_are_checkpointed_in_every_mode_are_not_recomputed(expected):
    model = Checkpointed(small_vit(), reentrant=False)
    check(vitreous.explain(model, random_images(), METHODS).scores, expected)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("method", FEW)
def test_reentrant_checkpointing_that_cannot_be_switched_off_is_refused(method):
    model = Checkpointed(small_vit(), reentrant=True)
    with pytest.raises(UnsupportedModelError, match="checkpointing") as caught:
        vitreous.explain(model, random_images(), [method])
    assert "\n" not in str(caught.value)


def test_methods_without_gradient_serve_such_a_model(expected):
    methods = ["raw_attention", "rollout"]
    model = Checkpointed(small_vit(), reentrant=False)
    check(vitreous.explain(model, random_images(), methods).scores, expected)


def test_a_head_without_gradient_is_refused():
    class Sealed(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = small_vit()

        def forward(self, images):
            with torch.no_grad():
                return self.model(images)

    with pytest.raises(VitreousError, match="no gradient"):
        vitreous.explain(Sealed(), random_images(), ["gae"])


class LowerBlocksFrozen(nn.Module):
    """Runs its patch embedding and first two blocks without a gradient, as some fine-tuning code does."""

    def __init__(self):
        super().__init__()
        self.model = small_vit()

    def forward(self, images):
        model = self.model
        with torch.no_grad():
            tokens = model.blocks[:2](model._pos_embed(model.patch_embed(images)))
        return model.forward_head(model.norm(model.blocks[2:](tokens)))


@pytest.mark.parametrize("method", ["ixg", "gae", "tokentm", "legrad", "fullgrad", "attnlrp", "decompx"])
def test_blocks_without_gradient_are_refused_where_it_is_needed(method):
    with pytest.raises(UnsupportedModelError, match="a block of LowerBlocksFrozen has no gradient"):
        vitreous.explain(LowerBlocksFrozen(), random_images(), [method])


def test_the_blocks_above_them_are_explained(expected):
    methods = ["decompx.skipplus", "raw_attention", "rollout", "attcam", "gradtoken"]
    check(vitreous.explain(LowerBlocksFrozen(), random_images(), methods).scores, expected)


# What is read of each image -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.1, 0.3, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("norm_first", [True, False])
def test_an_average_over_all_tokens_is_seen_however_long_the_class_token_is(norm_first, norm, factor):
    """A norm in front of the average divides each token, and so multiplies its gradient, by its length."""
    options = {"global_pool": "avg", "pool_include_prefix": True, "fc_norm": not norm_first, "norm_layer": norm}
    model = small_vit(depth=1, block_fn=block_with_class_token(factor), **options)
    assert recorded_layout(model).read.tolist() == list(range(17))


@pytest.mark.parametrize("factor", [0.3, 1.0, 3.0])
def test_a_class_token_beside_an_average_of_patches_is_what_the_head_reads(factor):
    """As DINOv2's linear classifier: each of 16 patches has a sixteenth of the weight that the class token has."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = small_vit(depth=1, block_fn=block_with_class_token(factor))
            self.head = nn.Linear(48, 5, dtype=torch.float64)

        def forward(self, images):
            tokens = self.model.forward_features(images)
            return self.head(torch.cat([tokens[:, 0], tokens[:, 1:].mean(dim=1)], dim=1))

    assert recorded_layout(Both()).read.tolist() == [0]


def block_with_class_token(factor):
    class LongerOrShorter(Block):
        """Its class token comes in so many times as long, and keeps that length along the residual stream."""

        def forward(self, tokens, **options):
            return super().forward(torch.cat([factor * tokens[:, :1], tokens[:, 1:]], dim=1), **options)

    return LongerOrShorter


def recorded_layout(model):
    architecture = find_architecture(model, random_images(3))
    with record(model, architecture, random_images(3), Plan(architecture.depth, Needs())) as tape:
        return tape.layout


@pytest.mark.parametrize("options", [{"global_pool": "max"}, {"global_pool": "max", "class_token": False}])
def test_a_head_that_reads_other_tokens_of_each_image_is_explained_as_of_single_images(options):
    """A maximum over tokens: rows of matrices that the other image's maxima stand in say nothing of this one."""
    model, images = small_vit(**options), random_images()
    methods = [*FEW, "rollout", "attcam", "gae:rule=libra", "rise:budget=4"]
    together = vitreous.explain(model, images, methods, topk=2)
    assert torch.equal(together.target, model(images).topk(2).indices)
    for index, image in enumerate(images):
        alone = vitreous.explain(model, image[None], methods, together.target[index : index + 1])
        assert largest_difference(alone.logits[0], together.logits[index]) < SAME
        for method in methods:
            assert largest_difference(together.scores[method][index], alone.scores[method][0]) < SAME, method


def test_the_handlers_of_an_operation_are_one_ordered_list():
    model, images = small_vit(), random_images()
    architecture = find_architecture(model, images)

    def names(function, *rules):
        gradients = {Pass(rule, "logit"): GradientNeeds(tokens=frozenset({0})) for rule in rules}
        recorder = Recorder(architecture, Plan(architecture.depth, Needs(gradients=gradients)), len(images))
        table = recorder.interception().handlers
        assert " -> ".join(handler.__qualname__ for handler in table.handlers_of(function)) in str(table)
        return [handler.__qualname__ for handler in table.handlers_of(function)]

    linear = torch.nn.functional.linear
    assert names(linear, "plain") == ["GradientBreaks.check"]
    assert names(linear, "libra") == ["GradientBreaks.check", "RuleHandler.on_linear"]
    assert names(linear, "lrp_ours") == [
        "GradientBreaks.check",
        "RuleHandler.on_linear",
        "RelevanceHandler.on_linear",
    ]
    assert names(torch.matmul, "plain", "lrp_ours") == [
        "GradientBreaks.check",
        "RuleHandler.on_matrix_product",
        "AttentionHandler.on_matrix_product",
        "RelevanceHandler.on_matrix_product",
    ]
    assert names(torch.Tensor.permute, "lrp_ours") == ["GradientBreaks.check", "RelevanceHandler.on_unknown"]


def test_a_handler_acts_before_and_after_those_behind_it_and_may_take_a_call_over():
    seen = []

    def outer(call):
        seen.append("outer")
        output = call.proceed()
        seen.append("outer again")
        return output + 1

    def inner(call):
        seen.append("inner")
        return call.proceed_with((call.args[0] * 2,), call.kwargs)

    def takes_over(call):
        seen.append("takes over")
        return call.args[0]

    table = HandlerTable()
    table.add((torch.neg,), outer, inner)
    table.add((torch.exp,), takes_over, outer)
    one = torch.ones(())
    assert table.run(torch.neg, (one,), {}) == -1
    assert table.run(torch.exp, (one,), {}) == 1
    assert table.run(torch.abs, (-one,), {}) == 1
    assert seen == ["outer", "inner", "outer again", "takes over"]
