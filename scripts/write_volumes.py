"""Draw the pictures of docs/volumes.md: small models trained on drawn volumes and clips, and what decides for them.

    python scripts/write_volumes.py

A volume is noise with one ball, brighter or darker than the rest, or without one: that is its class. In a clip a square
appears in three of eight frames, red or green. Both models are trained from scratch in some minutes, with fixed seeds,
and the script prints their accuracy on new examples and how often the highest patch of a map is one that the object
touches. ``slices`` or ``frames`` as an argument does one of the two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from transformers import VideoMAEConfig, VideoMAEForVideoClassification
from vit_pytorch.vit_3d import ViT

import vitreous

OUT = Path(__file__).parents[1] / "docs" / "images" / "volumes"
METHODS = ("gae", "tokentm", "gradtoken", "decompx", "decompx.skipplus", "twoscale")
VOLUME, FRAMES = (16, 32, 32), 8
WIDE = 1400  # pixels of a picture on the page
Examples = tuple[Tensor, Tensor, Tensor]  # inputs, classes, where the object is (batch, depth, height, width)


def volumes(count: int, generator: torch.Generator) -> Examples:
    """Noise with a ball of radius 4 that is darker (class 0) or brighter (class 1); without one (class 2)."""
    noise = 0.5 + 0.12 * torch.randn(count, *VOLUME, generator=generator)
    noise = functional.avg_pool3d(noise[:, None], 3, stride=1, padding=1, count_include_pad=False)[:, 0]
    classes = torch.randint(0, 3, (count,), generator=generator)
    inside = torch.zeros(count, *VOLUME, dtype=torch.bool)
    for number in torch.where(classes < 2)[0].tolist():
        centre = [int(torch.randint(4, length - 4, (), generator=generator)) for length in VOLUME]
        axes = torch.meshgrid(*(torch.arange(length) for length in VOLUME), indexing="ij")
        inside[number] = sum((axis - at) ** 2 for axis, at in zip(axes, centre, strict=True)) <= 16
    drawn = (noise + torch.where(inside, 0.3, 0.0) * (2 * classes - 1)[:, None, None, None]).clamp(0, 1)
    return drawn[:, None], classes, inside


def clips(count: int, generator: torch.Generator) -> Examples:
    """A grey square that moves all the time, and three frames with another one, red (class 0) or green (class 1)."""
    frames = 0.4 + 0.08 * torch.randn(count, FRAMES, 3, 32, 32, generator=generator)
    classes = torch.randint(0, 2, (count,), generator=generator)
    inside = torch.zeros(count, FRAMES, 32, 32, dtype=torch.bool)
    for number in range(count):
        row, column, start = (int(torch.randint(0, most, (), generator=generator)) for most in (24, 24, FRAMES - 2))
        for frame in range(FRAMES):
            frames[number, frame, :, 4 + frame : 10 + frame, 2 + 3 * frame : 8 + 3 * frame] = 0.75
        for frame in range(start, start + 3):
            inside[number, frame, row : row + 8, column : column + 8] = True
            frames[number, frame, :, row : row + 8, column : column + 8] = 0.15
            frames[number, frame, int(classes[number]), row : row + 8, column : column + 8] = 0.85
    return frames.clamp(0, 1), classes, inside


def trained(model: nn.Module, draw: Callable[[int, torch.Generator], Examples], steps: int, rate: float) -> nn.Module:
    """Train on new examples in every step."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    model.train()
    for step in range(steps):
        inputs, classes, _ = draw(32, generator)
        loss = functional.cross_entropy(logits_of(model(inputs)), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: loss {float(loss.detach()):.3f}", flush=True)
    return model.eval()


def logits_of(output: object) -> Tensor:
    """The class scores of either model."""
    return output if isinstance(output, Tensor) else output.logits


def measured(name: str, model: nn.Module, draw: Callable[[int, torch.Generator], Examples]) -> None:
    """Print the accuracy on 96 new examples, and for each method how often its highest patch touches the object."""
    inputs, classes, inside = draw(96, torch.Generator().manual_seed(1))
    with torch.no_grad():
        right = (logits_of(model(inputs)).argmax(dim=1) == classes).float().mean()
    inputs, inside = inputs[classes < 2], inside[classes < 2]
    explanation = vitreous.explain(model, inputs, METHODS)
    touched = functional.adaptive_max_pool3d(inside.float()[:, None], explanation.grid).flatten(1)
    print(f"{name}: grid {explanation.grid}, accuracy {float(right):.2f}, {len(inputs)} with an object")
    print(f"  patches that the object touches: {float(touched.mean()):.2f}")
    for method in METHODS:
        hit = touched.gather(1, explanation.scores[method].argmax(dim=1, keepdim=True)).mean()
        print(f"  {method}: {float(hit):.2f}")


def draw_figure(model: nn.Module, examples: Examples, kind: str, names: tuple[str, ...]) -> None:
    """Save the figure of the first example of class 1."""
    inputs = examples[0][examples[1] == 1]
    explanation = vitreous.explain(model, inputs[:1], ["tokentm", "decompx"])
    named = vitreous.Explanation(**{**vars(explanation), "class_names": names})
    picture = named.figure(kind, opacity=0.75).image()
    picture = picture.resize((WIDE, round(WIDE * picture.height / picture.width)), Image.Resampling.LANCZOS)
    OUT.mkdir(parents=True, exist_ok=True)
    picture.save(OUT / f"{kind}.jpg", quality=88)


def of_volumes() -> None:
    """Train vit-pytorch's ViT, measure and draw it."""
    torch.manual_seed(0)
    model: nn.Module = ViT(
        image_size=32, image_patch_size=8, frames=16, frame_patch_size=4, num_classes=3, channels=1,
        dim=48, depth=3, heads=3, mlp_dim=96,
    )  # fmt: skip
    model = trained(model, volumes, 600, 1e-3)
    measured("volumes", model, volumes)
    draw_figure(model, volumes(8, torch.Generator().manual_seed(2)), "slices", ("darker ball", "brighter ball", "none"))


def of_clips() -> None:
    """Train VideoMAE, measure and draw it."""
    torch.manual_seed(0)
    config = VideoMAEConfig(
        image_size=32, patch_size=8, num_frames=FRAMES, tubelet_size=2, hidden_size=48, num_hidden_layers=3,
        num_attention_heads=3, intermediate_size=96, num_labels=2,
    )  # fmt: skip
    model = trained(VideoMAEForVideoClassification(config), clips, 200, 2e-3)
    measured("clips", model, clips)
    draw_figure(model, clips(8, torch.Generator().manual_seed(2)), "frames", ("red square", "green square"))


def main() -> None:
    """Do what was asked for, or both."""
    torch.set_num_threads(1)
    parts = {"slices": of_volumes, "frames": of_clips}
    for name in sys.argv[1:] or parts:
        parts[name]()


if __name__ == "__main__":
    main()
