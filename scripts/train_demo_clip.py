"""Train the projections of demo-clip, the demo dual encoder: two frozen towers with one linear layer each.

Data: photos of ImageNet, one of each of 500 classes, and of 37 breeds of pets. Every photo has the name of its class,
and many have the name of a kind as well (dog, bird, boat). Names are put into templates. The image projection starts at
the ridge regression from class tokens to sentence embeddings and the text projection at the identity, both centred.
Then the softmax cross entropy of logit scale x cosine over all names, and over all kinds, is minimised, with a penalty
on the distance from the start: photos of a few hundred names say little about all other names, which the start serves
better.

Held out, by a fixed seed: a third of the ImageNet classes with their photos, so that these names are never trained, and
a third of the pet photos of every breed; besides, the photos of the segmentation set. The strength of the penalty is
chosen by cross-validation over classes of the training part. Held-out photos are used once, for the figures printed at
the end.

    python scripts/train_demo_clip.py --imagenet ../shared/data/imagenet --pets ../shared/data/pets
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image, ImageOps
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from vitreous.inputs.images import read_image
from vitreous.models import demo
from vitreous.models import demo as clip
from vitreous.models.preprocessing import from_timm

TEMPLATES = ("{}", "a {}", "a photo of a {}.", "a picture of the {}.", "there is a {} in the photo.")
PHOTOS_OF_A_BREED = 60  # of those of the training set
HELD_OUT = 3  # one in so many
PET_WEIGHT = 3.0  # of a breed beside a class of ImageNet, of which there is one photo
RIDGE = 1000.0
START_SCALE = 3.0  # the logarithm of the factor on cosines
KIND_WEIGHT = 0.5
PENALTIES = (1.0, 10.0, 100.0)
FOLDS = 2
STEPS = 40
BATCH = 16
CATS = frozenset({
    *("abyssinian", "bengal", "birman", "bombay", "british_shorthair", "egyptian_mau"),
    *("maine_coon", "persian", "ragdoll", "russian_blue", "siamese", "sphynx"),
})  # fmt: skip
# Kinds of ImageNet's classes: first and last index of ranges; classes that belong to none of these have no kind.
KINDS: dict[str, tuple[tuple[int, int], ...]] = {
    "fish": ((0, 6), (389, 397)),
    "bird": ((7, 24), (80, 100), (127, 146)),
    "frog": ((30, 32),),
    "turtle": ((33, 37),),
    "lizard": ((38, 48),),
    "snake": ((52, 68),),
    "spider": ((72, 77),),
    "crab": ((118, 121),),
    "dog": ((151, 268),),
    "wolf": ((269, 275),),
    "fox": ((277, 280),),
    "cat": ((281, 285),),
    "big cat": ((286, 293),),
    "bear": ((294, 297),),
    "insect": ((300, 326),),
    "rabbit": ((330, 332),),
    "monkey": ((369, 384),),
    "boat": tuple((n, n) for n in (472, 484, 510, 554, 576, 628, 780, 814, 914)),
    "car": tuple((n, n) for n in (436, 468, 656, 734)),
    "train": ((466, 466), (820, 820)),
    "musical instrument": tuple((n, n) for n in (402, 420, 432, 486, 546, 558, 566, 594, 642, 684, 776, 822)),
    "ball": tuple((n, n) for n in (430, 522, 574, 722, 768, 852, 890)),
    "furniture": tuple((n, n) for n in (492, 516, 520, 526, 532, 548, 564, 894)),
    "building": tuple((n, n) for n in (498, 538, 580, 668, 698, 832)),
    "shoe": tuple((n, n) for n in (502, 514, 630, 770, 774)),
    "clothes": tuple((n, n) for n in (400, 474, 568, 578, 608, 610, 614, 638, 652, 834, 842)),
    "tool": tuple((n, n) for n in (512, 596, 740, 784, 792)),
    "clock": tuple((n, n) for n in (530, 826, 892)),
    "fruit": tuple((n, n) for n in (948, 950, 952, 954, 956)),
    "vegetable": tuple((n, n) for n in (936, 938, 940, 942, 944, 946)),
    "food": tuple((n, n) for n in (924, 926, 928, 930, 932, 934, 960, 962, 964)),
    "mushroom": tuple((n, n) for n in (992, 994, 996)),
    "landscape": tuple((n, n) for n in (970, 972, 974, 976, 978, 980)),
}


class Photo(NamedTuple):
    """A photo, its class, its kind (empty for none), and whether it is held out."""

    file: Path
    name: str
    kind: str
    held_out: bool


class Features(NamedTuple):
    """Class tokens of the frozen image tower, (rows, width), and the photo of every row."""

    images: Tensor
    photos: list[Photo]

    def part(self, keep: Callable[[Photo], bool]) -> Features:
        """The rows of some photos."""
        rows = [row for row, photo in enumerate(self.photos) if keep(photo)]
        return Features(self.images[rows], [self.photos[row] for row in rows])

    def join(self, other: Features) -> Features:
        """These rows and others."""
        return Features(torch.cat([self.images, other.images]), [*self.photos, *other.photos])


class Projections(NamedTuple):
    """Both linear layers, (outputs, inputs) and (outputs,), and the logarithm of the factor on cosines."""

    image_weight: Tensor
    image_bias: Tensor
    text_weight: Tensor
    text_bias: Tensor
    logit_scale: Tensor

    def logits(self, images: Tensor, texts: Tensor) -> Tensor:
        """Logit scale x cosine, (images, texts)."""
        image = functional.normalize(images @ self.image_weight.T + self.image_bias, dim=-1)
        text = functional.normalize(texts @ self.text_weight.T + self.text_bias, dim=-1)
        return self.logit_scale.exp() * image @ text.T


class Texts:
    """Sentence embeddings before the projection, each computed once."""

    def __init__(self) -> None:
        encoder, self._tokenizer = clip.build_text_encoder()
        self._tower = clip.SentenceEncoder(encoder, nn.Identity()).eval()
        self._known: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Tensor:
        """The embeddings of texts, (texts, width)."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        for start in range(0, len(new), 64):
            some = new[start : start + 64]
            given = self._tokenizer(some, padding=True, return_tensors="pt")
            self._known |= dict(zip(some, self._tower(given["input_ids"], given["attention_mask"]), strict=True))
        return torch.stack([self._known[text] for text in texts])

    def in_templates(self, names: Sequence[str]) -> Tensor:
        """The embeddings of names in all templates, (templates, names, width); every other one has breeds alone."""
        return torch.stack([
            self([written(template, breed_alone(name) if number % 2 else name) for name in names])
            for number, template in enumerate(TEMPLATES)
        ])  # fmt: skip


def written(template: str, name: str) -> str:
    """A name in a template, with "an" in front of a vowel."""
    text = template.format(name)
    return text.replace(f"a {name}", f"an {name}") if name[0].lower() in "aeiou" else text


def breed_alone(name: str) -> str:
    """A breed without the word cat or dog behind it; any other name as it is."""
    return name.removesuffix(" cat").removesuffix(" dog")


def main() -> None:
    """Extract, choose, train, save and measure."""
    options = parse_options()
    started = time.process_time()
    torch.manual_seed(options.seed)
    imagenet, pets, others = read_photos(options.imagenet, options.pets, options.seed)
    backbone = demo.build_backbone()

    def tokens(photos: list[Photo], view: str = "as it is") -> Features:
        return class_tokens(backbone, photos, view, options.cache)

    trained = [photo for photo in imagenet if not photo.held_out]
    views = [tokens(trained, view) for view in VIEWS]
    train = tokens([photo for photo in pets if not photo.held_out])
    for view in views:
        train = train.join(view)
    texts = Texts()
    penalty = choose_penalty(train, texts, options.seed)
    stored = save(fit(train, texts, penalty), options.out)
    held_imagenet, held_pets = (tokens([photo for photo in each if photo.held_out]) for each in (imagenet, pets))
    measured = measure(stored, texts, held_imagenet, held_pets, tokens(others), [photo.name for photo in imagenet])
    spent = time.process_time() - started
    print(f"penalty {penalty:g}, {len(train.photos)} training views, {spent:.0f} s of processor time")
    for line, value in measured.items():
        print(f"| {line} | {value:.1%} |")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--imagenet", type=Path, required=True, help="folder of ImageNet photos with labels.csv")
    parser.add_argument("--pets", type=Path, required=True, help="folder with train/ and seg/, each with labels.csv")
    parser.add_argument("--out", type=Path, default=clip.PROJECTIONS_FILE, help="where the projections are written")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "vitreous-demo-clip")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def read_photos(imagenet: Path, pets: Path, seed: int) -> tuple[list[Photo], list[Photo], list[Photo]]:
    """ImageNet's photos, some of the pets' training photos, and those of the segmentation set, which are held out."""
    generator = torch.Generator().manual_seed(seed)
    segmentation = read_table(pets / "seg")
    breeds = {int(row["imagenet_index"]): row["breed"] for row in segmentation}
    others = [
        pet_photo(pets / "seg" / "images" / f"{row['id']}.jpg", row["breed"], held_out=True) for row in segmentation
    ]
    by_breed: dict[str, list[str]] = {}
    for row in sorted(read_table(pets / "train"), key=lambda row: row["file"]):
        by_breed.setdefault(row["breed"], []).append(row["file"])
    of_pets = []
    for breed, files in sorted(by_breed.items()):
        order = torch.randperm(len(files), generator=generator)[:PHOTOS_OF_A_BREED].tolist()
        last = len(order) - len(order) // HELD_OUT
        of_pets += [
            pet_photo(pets / "train" / files[number], breed, held_out=place >= last)
            for place, number in enumerate(order)
        ]
    rows = read_table(imagenet)
    # A class that is a breed of the pets is trained anyway, so it is not held out.
    free = [row["file"] for row in rows if int(row["class_index"]) not in breeds]
    drawn = torch.randperm(len(free), generator=generator)[: len(rows) // HELD_OUT].tolist()
    held_out = {free[number] for number in drawn}
    of_imagenet = []
    for row in rows:
        index, file = int(row["class_index"]), imagenet / row["file"]
        if index in breeds:
            of_imagenet.append(pet_photo(file, breeds[index], held_out=False))
        else:
            name = row["class_name"].replace("_", " ")
            of_imagenet.append(Photo(file, name, kind_of(index), row["file"] in held_out))
    return of_imagenet, of_pets, others


def read_table(folder: Path) -> list[dict[str, str]]:
    """Read labels.csv."""
    with (folder / "labels.csv").open(newline="") as table:
        return list(csv.DictReader(table))


def pet_photo(file: Path, breed: str, *, held_out: bool) -> Photo:
    """A photo of a pet: its class is the breed with the word cat or dog."""
    kind = "cat" if breed.lower() in CATS else "dog"
    return Photo(file, f"{breed.replace('_', ' ').lower()} {kind}", kind, held_out)


def kind_of(index: int) -> str:
    """The kind of an ImageNet class, or nothing."""
    return next((kind for kind, ranges in KINDS.items() if any(a <= index <= b for a, b in ranges)), "")


def zoomed(image: Image.Image) -> Image.Image:
    """The middle of a photo."""
    edge = round(0.7 * min(image.size))
    left, top = ((size - edge) // 2 for size in image.size)
    return image.crop((left, top, left + edge, top + edge))


VIEWS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "as it is": lambda image: image,
    "mirrored": ImageOps.mirror,
    "zoomed": zoomed,
    "zoomed, mirrored": lambda image: ImageOps.mirror(zoomed(image)),
}


@torch.inference_mode()
def class_tokens(backbone: nn.Module, photos: list[Photo], view: str, cache: Path) -> Features:
    """The final class token of every photo, from the cache where it is there."""
    preprocessing = from_timm(backbone, image_size=(demo.IMAGE_SIZE, demo.IMAGE_SIZE))
    cache.mkdir(parents=True, exist_ok=True)
    keys = [
        hashlib.sha256(f"{photo.file.name} {photo.file.stat().st_size} {view} {preprocessing!r}".encode()).hexdigest()
        for photo in photos
    ]
    kept = cache / "class_tokens.pt"
    known: dict[str, Tensor] = torch.load(kept, weights_only=True) if kept.is_file() else {}
    missing = [(key, photo) for key, photo in zip(keys, photos, strict=True) if key not in known]
    for start in range(0, len(missing), BATCH):
        some = missing[start : start + BATCH]
        found = backbone(preprocessing([VIEWS[view](read_image(photo.file)) for _, photo in some]))
        known |= {key: token.clone() for (key, _), token in zip(some, found, strict=True)}
        print(f"\r{start + len(some)} of {len(missing)} photos {view}", end="", flush=True)
    if missing:
        print()
        torch.save(known, kept)
    return Features(torch.stack([known[key] for key in keys]).clone(), photos)


def fit(train: Features, texts: Texts, penalty: float) -> Projections:
    """Train both projections, and fold centring and standardisation into them."""
    names = sorted({photo.name for photo in train.photos})
    labels = torch.tensor([names.index(photo.name) for photo in train.photos])
    kinds = list(KINDS)
    kind_labels = torch.tensor([kinds.index(photo.kind) if photo.kind else -1 for photo in train.photos])
    weights = row_weights(train.photos)
    mean, std = train.images.mean(0), train.images.std(0)
    images = (train.images - mean) / std
    of_names, of_kinds = texts.in_templates(names), texts.in_templates(kinds)
    centre = of_names.mean((0, 1))
    of_names, of_kinds = of_names - centre, of_kinds - centre

    wanted = functional.normalize(of_names.mean(0), dim=-1)[labels]
    weighed = images.T * weights
    start = torch.linalg.solve(weighed @ images + RIDGE * torch.eye(images.shape[1]), weighed @ wanted).T.contiguous()
    image = start.clone().requires_grad_()
    image_bias, text_bias = (torch.zeros(clip.WIDTH, requires_grad=True) for _ in range(2))
    text = torch.eye(clip.WIDTH, requires_grad=True)
    scale = torch.tensor(START_SCALE, requires_grad=True)
    parameters = [image, image_bias, text, text_bias, scale]
    optimiser = torch.optim.LBFGS(parameters, max_iter=STEPS, line_search_fn="strong_wolfe", history_size=10)
    projections = Projections(image, image_bias, text, text_bias, scale)
    with_kind, share = kind_labels >= 0, weights / weights.sum()

    def objective() -> float:
        optimiser.zero_grad()
        value = penalty * (image - start).square().sum() + (text - torch.eye(clip.WIDTH)).square().sum()
        value = value + image_bias.square().sum() + text_bias.square().sum() + 0.1 * (scale - START_SCALE).square()
        for template in range(len(TEMPLATES)):
            logits = projections.logits(images, torch.cat([of_names[template], of_kinds[template]]))
            by_name = functional.cross_entropy(logits[:, : len(names)], labels, reduction="none")
            by_kind = functional.cross_entropy(
                logits[with_kind, len(names) :], kind_labels[with_kind], reduction="none"
            )
            loss = (share * by_name).sum() + KIND_WEIGHT * (share[with_kind] * by_kind).sum()
            value = value + loss / len(TEMPLATES)
        value.backward()  # type: ignore[no-untyped-call]
        return value.item()

    optimiser.step(objective)  # type: ignore[no-untyped-call]
    image_weight, text_weight = image.detach() / std, text.detach()
    return Projections(
        image_weight,
        image_bias.detach() - image_weight @ mean,
        text_weight,
        text_bias.detach() - text_weight @ centre,
        scale.detach(),
    )


def row_weights(photos: list[Photo]) -> Tensor:
    """How much every row counts: 4 per class, which has four views of one photo of ImageNet; more for a breed."""
    count = Counter(photo.name for photo in photos)
    breeds = {photo.name for photo in photos if photo.kind in {"cat", "dog"} and photo.name.endswith(photo.kind)}
    return torch.tensor(
        [len(VIEWS) / count[photo.name] * (PET_WEIGHT if photo.name in breeds else 1) for photo in photos]
    )


def choose_penalty(train: Features, texts: Texts, seed: int) -> float:
    """The penalty with the best mean of two accuracies: on names left out, and on breeds with some photos left out."""
    names = sorted({photo.name for photo in train.photos})
    breeds = [name for name in names if breed_alone(name) != name]
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).tolist()
    scores = {}
    for penalty in PENALTIES:
        of_names, of_breeds = [], []
        for fold in range(FOLDS):
            some = {names[number] for number in order[fold::FOLDS]} - set(breeds)
            files = {photo.file for photo in [each for each in train.photos if each.name in breeds][fold::FOLDS]}
            kept = train.part(lambda each, out=some, of=files: each.name not in out and each.file not in of)  # type: ignore[misc]
            fitted = fit(kept, texts, penalty)
            others = train.part(lambda each, out=some: each.name in out)  # type: ignore[misc]
            of_names.append(accuracy(fitted, texts, others, sorted(some)))
            others = train.part(lambda each, of=files: each.file in of)  # type: ignore[misc]
            of_breeds.append(accuracy(fitted, texts, others, breeds))
        unseen, seen = sum(of_names) / FOLDS, sum(of_breeds) / FOLDS
        scores[penalty] = (unseen + seen) / 2
        print(f"penalty {penalty:g}: {unseen:.1%} of names that were left out, {seen:.1%} of breeds")
    return max(scores, key=scores.__getitem__)


def accuracy(projections: Projections, texts: Texts, given: Features, names: list[str], top: int = 1) -> float:
    """The share of photos whose name is among the ``top`` best of ``names``, in the template "a photo of a ..."."""
    logits = projections.logits(given.images, texts([written(TEMPLATES[2], name) for name in names]))
    labels = torch.tensor([names.index(photo.name) for photo in given.photos])
    return float((logits.topk(top, dim=1).indices == labels[:, None]).any(1).double().mean())


def kind_accuracy(projections: Projections, texts: Texts, given: Features, kinds: Sequence[str]) -> float:
    """The share of the photos that have one of some kinds which get it."""
    renamed = [photo._replace(name=photo.kind) for photo in given.photos]
    return accuracy(
        projections, texts, Features(given.images, renamed).part(lambda each: each.name in kinds), list(kinds)
    )


def retrieval(projections: Projections, texts: Texts, given: Features, top: int) -> float:
    """The share of names whose photo is among the ``top`` that suit the name best; every name has one photo."""
    names = [photo.name for photo in given.photos]
    logits = projections.logits(given.images, texts([written(TEMPLATES[2], name) for name in names])).T
    return float((logits.topk(top, dim=1).indices == torch.arange(len(names))[:, None]).any(1).double().mean())


def measure(
    projections: Projections, texts: Texts, imagenet: Features, pets: Features, others: Features, all_names: list[str]
) -> dict[str, float]:
    """What the stored projections do on held-out photos."""
    breeds = sorted({photo.name for photo in pets.photos})
    unseen = [photo.name for photo in imagenet.photos]
    everything = sorted({*all_names, *breeds})
    of_kind = imagenet.part(lambda photo: bool(photo.kind))
    kinds = sorted({photo.kind for photo in of_kind.photos})
    return {
        f"{len(pets.photos)} held-out pet photos, breed among {len(breeds)}": accuracy(
            projections, texts, pets, breeds
        ),
        "the same, breeds without the word cat or dog": accuracy(
            projections, texts, alone(pets), [breed_alone(breed) for breed in breeds]
        ),
        f"the same, cat or dog among {len(KINDS)} kinds": kind_accuracy(projections, texts, pets, list(KINDS)),
        "the same, cat or dog": kind_accuracy(projections, texts, pets, ["cat", "dog"]),
        f"{len(others.photos)} photos of the segmentation set, breed among {len(breeds)}": accuracy(
            projections, texts, others, breeds
        ),
        "the segmentation set, cat or dog": kind_accuracy(projections, texts, others, ["cat", "dog"]),
        f"{len(unseen)} ImageNet photos of names never trained, name among these": accuracy(
            projections, texts, imagenet, unseen
        ),
        "the same, among the best 5": accuracy(projections, texts, imagenet, unseen, 5),
        f"the same, name among all {len(everything)} names": accuracy(projections, texts, imagenet, everything),
        f"the same, {len(of_kind.photos)} photos that have a kind, kind among {len(kinds)}": kind_accuracy(
            projections, texts, of_kind, kinds
        ),
        f"text to image: the photo of a name never trained among {len(unseen)}": retrieval(
            projections, texts, imagenet, 1
        ),
        "text to image, among the best 5": retrieval(projections, texts, imagenet, 5),
    }


def alone(given: Features) -> Features:
    """The same photos, their breeds without the word cat or dog."""
    return Features(given.images, [photo._replace(name=breed_alone(photo.name)) for photo in given.photos])


def save(projections: Projections, path: Path) -> Projections:
    """Write the projections in half precision, and give them as they will be read."""
    image, image_bias, text, text_bias, scale = (each.half().contiguous() for each in projections)
    tensors = {"image.weight": image, "image.bias": image_bias, "text.weight": text, "text.bias": text_bias}
    save_file({**tensors, "logit_scale": scale}, path)
    return Projections(*(each.float() for each in (image, image_bias, text, text_bias, scale)))


if __name__ == "__main__":
    main()
