"""Train the demo model's head: multinomial logistic regression on the class token of the frozen backbone.

The training photos give two views each, as they are and mirrored. The weight decay is chosen by cross-validation on
the training photos alone, with both views of a photo always in the same fold; the evaluation photos are used once, for
the accuracy that is printed at the end.

    python scripts/train_demo_head.py --train ../shared/data/pets/train --evaluate ../shared/data/pets/seg
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import ImageOps
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from vitreous.inputs.images import read_image
from vitreous.models import demo
from vitreous.models.preprocessing import Preprocessing, from_timm

WEIGHT_DECAYS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
FOLDS = 5
BATCH = 32


class Photos(NamedTuple):
    """Files, the class of each, and the names of all classes in index order."""

    files: list[Path]
    labels: Tensor
    class_names: list[str]


class Head(NamedTuple):
    """A linear layer's weight (classes, width) and bias (classes,)."""

    weight: Tensor
    bias: Tensor

    def accuracy(self, features: Tensor, labels: Tensor) -> float:
        """Return the share of features that are given their label."""
        predicted = (features @ self.weight.T + self.bias).argmax(1)
        return float((predicted == labels).double().mean())


def main() -> None:
    """Train, choose, evaluate and save."""
    options = parse_options()
    torch.manual_seed(options.seed)
    train, evaluation = read_folder(options.train), read_folder(options.evaluate)
    backbone = demo.build_backbone()
    preprocessing = from_timm(backbone, image_size=(demo.IMAGE_SIZE, demo.IMAGE_SIZE))

    plain = class_tokens(backbone, preprocessing, train.files, mirrored=False, cache=options.cache)
    mirrored = class_tokens(backbone, preprocessing, train.files, mirrored=True, cache=options.cache)
    decay = choose_weight_decay(plain, mirrored, train.labels, options.seed)
    head = fit(torch.cat([plain, mirrored]), train.labels.repeat(2), decay)
    save(head, train.class_names, options.out)

    tokens = class_tokens(backbone, preprocessing, evaluation.files, mirrored=False, cache=options.cache)
    print(f"weight decay {decay:g}, {len(train.files)} training photos, {len(train.class_names)} breeds")
    print(f"accuracy on {len(evaluation.files)} held-out photos: {head.accuracy(tokens, evaluation.labels):.1%}")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="folder of training photos with labels.csv")
    parser.add_argument("--evaluate", type=Path, required=True, help="folder of held-out photos with labels.csv")
    parser.add_argument("--out", type=Path, default=demo.HEAD_FILE, help="where the head is written")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "vitreous-demo-head")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def read_folder(folder: Path) -> Photos:
    """Read labels.csv: files lie beside it (column ``file``) or in ``images/`` (column ``id``)."""
    with (folder / "labels.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    files = [folder / row["file"] if "file" in row else folder / "images" / f"{row['id']}.jpg" for row in rows]
    names = {int(row["breed_index"]): row["breed"].replace("_", " ").title() for row in rows}
    labels = torch.tensor([int(row["breed_index"]) for row in rows])
    return Photos(files, labels, [names[index] for index in sorted(names)])


@torch.inference_mode()
def class_tokens(
    backbone: nn.Module, preprocessing: Preprocessing, files: list[Path], *, mirrored: bool, cache: Path
) -> Tensor:
    """Return the final class token of every photo, from the cache where it is there."""
    key = json.dumps([[file.name, file.stat().st_size] for file in files] + [repr(preprocessing), mirrored])
    stored = cache / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.pt"
    if stored.is_file():
        stored_tokens: Tensor = torch.load(stored, weights_only=True)
        return stored_tokens
    tokens = []
    for start in range(0, len(files), BATCH):
        images = [read_image(file) for file in files[start : start + BATCH]]
        views = [ImageOps.mirror(image) for image in images] if mirrored else images
        tokens.append(backbone(preprocessing(views)))
        print(f"\r{start + len(images)} of {len(files)} photos", end="", flush=True)
    print()
    cache.mkdir(parents=True, exist_ok=True)
    torch.save(torch.cat(tokens), stored)
    return torch.cat(tokens)


def choose_weight_decay(plain: Tensor, mirrored: Tensor, labels: Tensor, seed: int) -> float:
    """Return the weight decay with the best cross-validated accuracy on unmirrored training photos."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    scores = {}
    for decay in WEIGHT_DECAYS:
        correct = []
        for fold in range(FOLDS):
            held_out = order[fold::FOLDS]
            kept = torch.ones(len(labels), dtype=torch.bool).index_fill(0, held_out, value=False)
            head = fit(torch.cat([plain[kept], mirrored[kept]]), labels[kept].repeat(2), decay)
            correct.append(head.accuracy(plain[held_out], labels[held_out]))
        scores[decay] = sum(correct) / FOLDS
        print(f"weight decay {decay:g}: {scores[decay]:.2%} in {FOLDS}-fold cross-validation")
    return max(scores, key=scores.__getitem__)


def fit(features: Tensor, labels: Tensor, decay: float) -> Head:
    """Minimise cross entropy + decay / 2 |W|^2 over standardised features, and fold the standardisation into W."""
    mean, std = features.mean(0), features.std(0)
    standardised = (features - mean) / std
    classes = int(labels.max()) + 1
    weight = torch.zeros(classes, features.shape[1], requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=100, tolerance_grad=1e-5, line_search_fn="strong_wolfe")

    def loss() -> float:
        optimiser.zero_grad()
        value = functional.cross_entropy(standardised @ weight.T + bias, labels) + decay / 2 * weight.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value.item()

    optimiser.step(loss)  # type: ignore[no-untyped-call]
    scaled = weight.detach() / std
    return Head(scaled, bias.detach() - scaled @ mean)


def save(head: Head, class_names: list[str], path: Path) -> None:
    """Write the head with its class names as safetensors."""
    tensors = {"weight": head.weight.float().contiguous(), "bias": head.bias.float().contiguous()}
    save_file(tensors, path, metadata={"class_names": json.dumps(class_names)})


if __name__ == "__main__":
    main()
