"""Interrupts at every step: a KeyboardInterrupt is raised at a chosen instruction of a call, wherever that is.

``python tests/support/interrupting.py 500`` interrupts the explanation of every family that often and
prints what was left.
A signal is delivered between two instructions of Python code, so a tracer that raises in front of an instruction comes
wherever a signal can come, and in a few places where none can.
"""

from __future__ import annotations

import gc
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torchvision.models.vision_transformer import VisionTransformer as TorchvisionTransformer

import vitreous
from small_models import CLASSES, random_images, randomise, small_vit
from small_text_models import build, small_tokenizer

METHODS = ["gae", "ixg.skipplus", "atman"]  # recorded, read block by block, and asked again
# Frames in which something is entered, left, registered, restored or copied: interrupts are drawn there more often.
_DELICATE = frozenset({"__enter__", "__exit__", "wrapper", "_copied", "_restore_autocast", "_attributes", "of"})


@dataclass(frozen=True)
class Case:
    """A model in training mode, but for a part of it, and a call that explains it."""

    model: nn.Module
    explain: Callable[[], dict[str, Any]]


def timm_case() -> Case:
    rates = {"drop_path_rate": 0.5, "proj_drop_rate": 0.5, "attn_drop_rate": 0.5, "pos_drop_rate": 0.5}
    model = small_vit(depth=2, **rates).train()
    model.blocks[1].eval()
    return _picture_case(model)


def transformers_case() -> Case:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=CLASSES, hidden_dropout_prob=0.5)
    model = transformers.ViTForImageClassification._from_config(config, attn_implementation="eager")
    return _picture_case(randomise(model).double().train())


def torchvision_case() -> Case:
    sizes = {"num_layers": 2, "num_heads": 3, "hidden_dim": 24, "mlp_dim": 40, "num_classes": CLASSES}
    model = TorchvisionTransformer(image_size=32, patch_size=8, **sizes, dropout=0.5, attention_dropout=0.5)
    return _picture_case(randomise(model).double().train())


def sigmoid_case() -> Case:
    """Its outputs are recognised as probabilities, by running it once more."""
    return _picture_case(nn.Sequential(small_vit(depth=2), nn.Sigmoid()).train())


def text_case() -> Case:
    model, tokenizer = build("bert", num_hidden_layers=2).train(), small_tokenizer()

    def explain() -> dict[str, Any]:
        found = vitreous.explain_text((model, tokenizer), "the film was not very good", METHODS, target=1)
        return {name: maps[0] for name, maps in found.scores.items()} | {"logits": found.logits}

    return Case(model, explain)


def _picture_case(model: nn.Module) -> Case:
    images = random_images(1)

    def explain() -> dict[str, Any]:
        found = vitreous.explain(model, images, [*METHODS, "occlusion"], target=1)
        return found.scores | {"logits": found.logits}

    return Case(model, explain)


def in_evaluation(build_case: Callable[[], Case]) -> Case:
    """The model itself runs then, not a copy."""
    case = build_case()
    case.model.eval()
    return case


CASES = {
    "timm": timm_case,
    "transformers": transformers_case,
    "torchvision": torchvision_case,
    "outputs of a sigmoid": sigmoid_case,
    "texts": text_case,
    "timm in evaluation mode": partial(in_evaluation, timm_case),
    "texts in evaluation mode": partial(in_evaluation, text_case),
}
# What a caller may have set around the call.
SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    "device": partial(torch.device, "cpu"),  # a function mode
}


# State ----------------------------------------------------------------------------------------------------------------


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything about a model and about torch that an interrupt could leave changed."""
    modules = list(model.modules())
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return {
        "flags": [module.training for module in modules],
        "attributes": [
            {name: value if isinstance(value, bool) else id(value) for name, value in vars(module).items()}
            for module in modules
        ],
        "hooks": [[list(held) for name, held in vars(one).items() if "hooks" in name and held] for one in modules],
        "parameters": [(id(one), one.requires_grad, one.grad, one._version) for one in model.parameters()],
        "buffers": [(id(one), one._version) for one in model.buffers()],
        "global hooks": [list(held) for name, held in sorted(vars(torch_module).items()) if name.endswith("_hooks")],
        "function modes": [torch._C._get_function_stack_at(n) for n in range(torch._C._len_torch_function_stack())],
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), nesting),
        "autocast cache": torch.is_autocast_cache_enabled(),
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in one if one[name] != other[name]]


# Interrupts -----------------------------------------------------------------------------------------------------------


class Counter:
    """How many instructions every Python frame of a call runs, in the order in which the frames are entered."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.names: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        number = len(self.counts)
        self.counts.append(0)
        self.names.append(frame.f_code.co_name)
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def local(_frame: FrameType, event: str, _: Any) -> Any:
            if event == "opcode":
                self.counts[number] += 1
            return local

        return local


class Interrupt:
    """Raises in front of one instruction of one frame. Frames are counted as they are entered."""

    def __init__(self, frame: int, instruction: int) -> None:
        self._frame, self._instruction = frame, instruction
        self._entered = itertools.count()
        self.place: str | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if next(self._entered) != self._frame:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        passed = itertools.count()

        def local(frame: FrameType, event: str, _: Any) -> Any:
            if event == "opcode" and next(passed) == self._instruction:
                self.place = f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
                raise KeyboardInterrupt
            return local

        return local


def run_traced(tracer: Any, function: Callable[[], Any]) -> None:
    """Run a function, and nothing else, with a tracer.

    Without garbage collection, which comes at any time: its callbacks and finalisers are frames that would be counted.
    """
    before, hook = sys.gettrace(), sys.unraisablehook
    sys.unraisablehook = lambda _: None  # an interrupt inside a finaliser is swallowed by Python
    collecting = gc.isenabled()
    gc.disable()
    sys.settrace(tracer)
    try:
        function()
    finally:
        sys.settrace(before)
        sys.unraisablehook = hook
        if collecting:
            gc.enable()


@dataclass(frozen=True)
class Map:
    """The instructions of a call."""

    counts: list[int]
    delicate: list[int]

    @classmethod
    def of(cls, case: Case, surroundings: Callable[[], AbstractContextManager[Any]]) -> Map:
        counter = Counter()
        with surroundings():
            case.explain()
            run_traced(counter, case.explain)
        delicate = [frame for frame, name in enumerate(counter.names) if name in _DELICATE and counter.counts[frame]]
        return cls(counter.counts, delicate)

    def draw(self, random_: random.Random, *, delicate: bool) -> Interrupt:
        """An instruction of a delicate frame, or any, all with the same chance."""
        if delicate:
            frame = random_.choice(self.delicate)
        else:
            (frame,) = random_.choices(range(len(self.counts)), self.counts)
        return Interrupt(frame, random_.randrange(self.counts[frame]))


@dataclass
class Outcome:
    """What one interrupt did: where it came, whether the call ended by it, and what it left changed."""

    place: str | None
    raised: bool
    left: list[str]


def outcomes(case: Case, count: int, seed: int) -> Iterator[Outcome]:
    """Interrupt a call again and again at instructions drawn at random, half of them in delicate frames."""
    random_ = random.Random(seed)
    expected = case.explain()
    case.explain()  # what is imported or found out once is there now
    maps = {name: Map.of(case, surroundings) for name, surroundings in SURROUNDINGS.items()}
    numbers = {name: value.clone() for name, value in case.model.state_dict().items()}
    for number in range(count):
        surroundings = random_.choice(list(SURROUNDINGS))
        interrupt = maps[surroundings].draw(random_, delicate=number % 2 == 1)
        with SURROUNDINGS[surroundings]():
            before, raised, held = state_of(case.model), False, None
            try:
                run_traced(interrupt, case.explain)
            except BaseException as error:  # noqa: BLE001 - another one in its place is a finding
                # Held as a notebook holds the last traceback, with all of its frames.
                raised, held = isinstance(error, KeyboardInterrupt), error
            left = differences(before, state_of(case.model))
            if held is not None and not raised:
                left.append(f"{type(held).__name__} instead of the interrupt")
            held = None
            left += [f"{name}, later" for name in differences(before, state_of(case.model)) if name not in left]
        if any(not torch.equal(value, numbers[name]) for name, value in case.model.state_dict().items()):
            left.append("state_dict")
        if not explains_the_same(case, expected):
            left.append("next explanation")
        yield Outcome(interrupt.place, raised, left)


def explains_the_same(case: Case, expected: dict[str, Tensor]) -> bool:
    try:
        return same(case.explain(), expected)
    except Exception:  # noqa: BLE001 - failing is not the same
        return False


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def main() -> None:
    count = int(sys.argv[1])
    names = sys.argv[2:] or list(CASES)
    for name in names:
        found = list(outcomes(CASES[name](), count, seed=0))
        left = [outcome for outcome in found if outcome.left]
        raised = sum(outcome.raised for outcome in found)
        places = len({outcome.place for outcome in found})
        lines = [f"{name}: {count} interrupts at {places} places, {raised} ended the call, {len(left)} left something"]
        lines += [f"    swallowed: {outcome.place}" for outcome in found if not outcome.raised]
        lines += [f"    {outcome.place}: {', '.join(outcome.left)}" for outcome in left]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
