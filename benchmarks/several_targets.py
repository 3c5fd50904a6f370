"""Several contrasts or prompts of an image in one call, against as many calls: time over the calls, by method.

    python benchmarks/several_targets.py [--kind contrasts|prompts] [--model NAME] [--targets 8] [--repeats 3]
        [--methods ixg,gae] [--json FILE]

One call has one forward pass and a backward pass for every target; so many calls have as many of both. RISE and other
methods that run masked images run them once for all targets. Both sides run in turn in one process on one thread, and
only their ratio is printed: below 0.7 is what is wanted of eight. Models are timm's (contrasts) or a dual encoder
(prompts, demo-clip by default), whose texts are embedded in both.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import timm
import torch
from rows import ratio_in_turn, write_rows

import vitreous
from vitreous.targets import Contrast, Prompt, Target

METHODS = ("gradtoken", "gae", "tokentm", "ixg", "decompx.skipplus", "attnlrp", "rise:budget=16")


PROMPTS = (
    *("a photo of a cat.", "a photo of a dog.", "a photo of a car.", "a photo of a tabby.", "a photo of a flower."),
    *("a photo of a house.", "a photo of a bird.", "a photo of a bottle."),
)
MODELS = {"contrasts": "vit_tiny_patch16_224", "prompts": "demo-clip"}


def main() -> None:
    """Print a row per method."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=MODELS, default="contrasts")
    parser.add_argument("--model")
    parser.add_argument("--targets", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    name = given.model or MODELS[given.kind]
    model, size, targets = (_with_contrasts if given.kind == "contrasts" else _with_prompts)(name, given.targets)
    image = torch.randn(1, 3, *size)
    rows = []
    for method in given.methods.split(","):
        ratio = ratio_in_turn(
            lambda method=method: vitreous.explain(model, image, method, target=[targets]),  # type: ignore[misc]
            lambda method=method: [vitreous.explain(model, image, method, target=one) for one in targets],  # type: ignore[misc]
            given.repeats,
        )
        rows.append({"method": method, "one call over several": ratio})
        print(f"{method}  {ratio:.3f}", flush=True)
    write_rows(given.json, rows, kind=given.kind, model=name, targets=given.targets)


def _with_contrasts(name: str, count: int) -> tuple[Any, tuple[int, int], list[Target]]:
    model = timm.create_model(name).eval().requires_grad_(requires_grad=False)
    return model, model.pretrained_cfg["input_size"][-2:], [Contrast(index, index + count) for index in range(count)]


def _with_prompts(name: str, count: int) -> tuple[Any, tuple[int, int], list[Target]]:
    dual = vitreous.load_dual_encoder(name)
    return dual, dual.preprocessing.image_size, [Prompt(text) for text in PROMPTS[:count]]


if __name__ == "__main__":
    main()
