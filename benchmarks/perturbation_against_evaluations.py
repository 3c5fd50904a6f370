"""Perturbation methods against the bare evaluations of the model that they need, measured in one interleaved run.

    python benchmarks/perturbation_against_evaluations.py [--model vit_tiny_patch16_224] [--budget 64] [--repeats 3]

The baseline of a method is the plain model under ``no_grad`` on as many pictures, 16 at a time; for dropped tokens it
is the same number of whole pictures, so a ratio below 1 is what dropping saves. A deletion curve drops 0%, 10%, ...
90% of the patches; its baseline is ten evaluations of whole pictures. Processor time of one thread is counted, since
it does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse

import timm
import torch
from rows import bare, ratio_in_turn
from torch import Tensor, nn

import vitreous
from vitreous.tape.runner import ModelRunner

AT_ONCE = 16


def spellings(budget: int) -> list[str]:
    """The methods, each with about ``budget`` evaluations where it can be told."""
    random = [f"{name}:budget={budget}" for name in ("rise", "lime", "kernel_shap", "hsic", "vitcx")]
    dropped = [f"{name}:budget={budget},by=drop" for name in ("lime", "kernel_shap", "hsic")]
    windows = [f"{name}:window=4,stride=2{by}" for name in ("occlusion", "pami") for by in ("", ",by=drop")]
    return [*random, f"rise:budget={budget},resolution=patch,by=drop", *dropped, *windows, "atman"]


def evaluations(model: nn.Module, images: Tensor, spelling: str) -> int:
    """How many pictures the model is asked about besides the recorded run."""
    asked: list[int] = []
    with model.patch_embed.register_forward_pre_hook(lambda _, given: asked.append(len(given[0]))):
        vitreous.explain(model, images, spelling)
    return sum(asked) - len(images)


def main() -> None:
    """Print one ratio for each method, for plain evaluations and for a deletion curve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = timm.create_model(options.model).eval()
    pictures = torch.randn(AT_ONCE, 3, *model.pretrained_cfg["input_size"][1:])
    runner = ModelRunner(model, pictures)
    patches = runner.layout.patches

    def deletion_curve() -> None:
        for percent in range(0, 100, 10):
            kept = torch.stack([torch.randperm(patches)[: patches - percent * patches // 100] for _ in pictures])
            runner.logits_of_kept(pictures, kept)

    ratio = ratio_in_turn(lambda: runner.logits(pictures), lambda: bare(model, pictures, AT_ONCE), 2 * options.repeats)
    print(f"{'ModelRunner.logits':42} {ratio:.2f}")
    ratio = ratio_in_turn(deletion_curve, lambda: bare(model, pictures, 10 * AT_ONCE), options.repeats)
    print(f"{'deletion curve, tokens dropped':42} {ratio:.2f}")
    image = pictures[:1]
    for spelling in spellings(options.budget):
        count = evaluations(model, image, spelling)
        ratio = ratio_in_turn(
            lambda spelling=spelling: vitreous.explain(model, image, spelling),
            lambda count=count: bare(model, pictures, count + 1),  # the recorded run is one more
            options.repeats,
        )
        print(f"{spelling:42} {ratio:.2f}  ({count} evaluations)")


if __name__ == "__main__":
    main()
