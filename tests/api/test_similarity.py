"""Similar images: maps of both sides are those of the cosine, pairs of patches add up, neighbours are the nearest."""

import copy
from contextlib import suppress

import pytest
import torch
from PIL import Image
from torch.nn import functional

import vitreous
from small_dual_encoders import FAMILIES, IMAGE, image_blocks
from small_models import random_images, randomise, small_vit
from vitreous.api.similarity import PatchMatch, SkipZeroRows, embedding_tower, match_patches, similar
from vitreous.errors import InputError, MethodError
from vitreous.models import LoadedModel, Preprocessing
from vitreous.targets import Similarity

EXACT = 1e-12  # float64: both sides do the same sums in another order


def dinov2():
    import transformers

    config = transformers.Dinov2WithRegistersConfig(
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=3,
        image_size=IMAGE,
        patch_size=8,
        num_register_tokens=2,
    )
    return transformers.Dinov2WithRegistersModel(config).double().eval()


def transformers_vit(name, **options):
    import transformers

    sizes = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 40}
    config = getattr(transformers, f"{name}Config")(**sizes, image_size=IMAGE, patch_size=8, **options)
    return randomise(getattr(transformers, f"{name}Model")(config).double(), seed=1).eval()


class KeepsPatches(torch.nn.Module):
    """Embeddings of ViT-MAE as they are without masking, written out."""

    def __init__(self, embeddings):
        super().__init__()
        self.inner = embeddings

    def forward(self, pixel_values, **_options):
        inner = self.inner
        patches = inner.patch_embeddings(pixel_values) + inner.position_embeddings[:, 1:]
        first = (inner.cls_token + inner.position_embeddings[:, :1]).expand(len(patches), -1, -1)
        tokens = torch.cat([first, patches], dim=1)
        return tokens, tokens.new_zeros(patches.shape[:2]), torch.arange(patches.shape[1]).expand(len(patches), -1)


def without_masking(model):
    """What plain autograd is taken of: a masked autoencoder would drop other patches in every run."""
    if type(model).__name__ != "ViTMAEModel":
        return model
    plain = copy.deepcopy(model)
    plain.embeddings = KeepsPatches(plain.embeddings)
    return plain


MODELS = {
    "timm, class token": lambda: small_vit(depth=3),
    "timm, average (MAE)": lambda: small_vit(depth=3, class_token=False, global_pool="avg"),
    "timm, no head": lambda: small_vit(depth=3, num_classes=0),
    "DINOv2": dinov2,
    "DINOv3": lambda: transformers_vit("DINOv3ViT", num_register_tokens=2),
    "ViT-MAE": lambda: transformers_vit("ViTMAE"),
    "CLIP": lambda: FAMILIES["clip"]()[0],
    "SigLIP": lambda: FAMILIES["siglip"]()[0],
    "open_clip": lambda: FAMILIES["open_clip"]()[0],
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return MODELS[request.param]()


def first_block(model):
    if hasattr(model, "blocks"):
        return model.blocks[0]
    for part in ("encoder.layer", "model.layer", "layers", "layer"):
        with suppress(AttributeError):
            return model.get_submodule(part)[0]
    return image_blocks(model)[0]


def shares_by_autograd(model, image, patches):
    """Σ_channels x du_k/dx at the first block's input for every coordinate u_k of the embedding, (width, patches)."""
    model, kept = without_masking(model), []

    def keep(_module, given):
        kept.append(given[0].detach().requires_grad_())
        return (kept[0], *given[1:])

    handle = first_block(model).register_forward_pre_hook(keep)
    unit = functional.normalize(embedding_tower(model)(image), dim=-1)[0]
    handle.remove()
    slopes = [torch.autograd.grad(each, kept[0], retain_graph=True)[0] for each in unit]
    return unit.detach(), torch.stack([(kept[0] * slope).sum(dim=-1)[0, -patches:] for slope in slopes]).detach()


def test_pairs_of_patches_are_the_bilinear_form_of_both_embeddings(model):
    first, second = random_images(2).split(1)
    found = match_patches(model, first, second, "ixg:layer=0")
    (u, shares), (v, others) = (shares_by_autograd(model, image, len(found.first)) for image in (first, second))
    assert abs(found.similarity - float(u @ v)) < EXACT
    assert (found.scores - shares.T @ others).abs().max() < EXACT


def test_both_maps_are_those_of_the_cosine(model):
    first, second = random_images(2).split(1)
    found = match_patches(model, first, second, "decompx")
    tower = embedding_tower(without_masking(model))
    for image, other, scores in ((first, second, found.first), (second, first, found.second)):
        reference = functional.normalize(tower(other), dim=-1).detach()

        class Cosine(torch.nn.Module):
            def __init__(self, reference=reference):
                super().__init__()
                self.tower, self.reference = tower, torch.nn.Parameter(reference)

            def forward(self, images):
                return functional.normalize(self.tower(images), dim=-1) @ self.reference.T

        expected = vitreous.explain(Cosine(), image, "decompx", target=0, outputs="value").scores["decompx"][0]
        assert (scores - expected).abs().max() < EXACT * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("name", ["DINOv2", "DINOv3", "ViT-MAE"])
def test_the_target_similarity_is_the_cosine_of_the_same_embedding(name):
    """Of a masked autoencoder all patches take part, each time; the model itself still masks."""
    model, images = MODELS[name](), random_images(2)
    maps = [vitreous.explain(model, images[:1], ["ixg", "gae"], target=Similarity(images[1])) for _ in range(2)]
    with torch.no_grad():
        output = without_masking(model)(pixel_values=images)
    pooled = output.get("pooler_output")
    pooled = output["last_hidden_state"].mean(dim=1) if pooled is None else pooled
    expected = functional.cosine_similarity(pooled[:1], pooled[1:])
    assert abs(float(maps[0].target_values) - float(expected)) < EXACT
    assert maps[0].grid == (4, 4)
    for method in ("ixg", "gae"):
        assert torch.equal(maps[0].scores[method], maps[1].scores[method])
    if name == "ViT-MAE":
        assert model(pixel_values=images).last_hidden_state.shape[1] == 1 + 4  # three quarters of 16 patches are masked


def test_a_picture_matches_itself():
    model, image = small_vit(depth=2), random_images(1)
    found = match_patches(model, image, image, "decompx")
    assert abs(found.similarity - 1) < EXACT
    assert (found.scores - found.scores.T).abs().max() < EXACT
    rows, columns = found.grids[0]
    assert found.best(1, 2) == divmod(int(found.scores[columns + 2].argmax()), columns)
    assert rows * columns == len(found.first)


def test_the_best_pairs_take_every_patch_once_and_none_below_zero():
    scores = torch.tensor([[5.0, 4.0, 1.0], [4.5, 3.0, -2.0]])
    found = PatchMatch(scores, scores.sum(1), scores.sum(0), ((1, 2), (3, 1)), 0.5, "ixg")
    assert found.pairs() == [((0, 0), (0, 0), 5.0), ((0, 1), (1, 0), 3.0)]
    assert found.pairs(1) == [((0, 0), (0, 0), 5.0)]
    assert PatchMatch(-scores, scores.sum(1), scores.sum(0), ((1, 2), (3, 1)), 0.5, "ixg").pairs() == [
        ((0, 1), (2, 0), 2.0)
    ]


@pytest.mark.parametrize("zero", ["rows", "columns", "nothing", "everything"])
def test_products_without_rows_and_columns_of_zeros_are_the_same(zero):
    first, second = torch.randn(64, 40, dtype=torch.float64), torch.randn(40, 24, dtype=torch.float64)
    if zero in {"rows", "everything"}:
        first[5:] = 0
    if zero in {"columns", "everything"}:
        first[:, 3:] = 0
    whole = first @ second
    with SkipZeroRows():
        found = first @ second
    assert (found - whole).abs().max() < EXACT * whole.abs().max()


def test_methods_that_are_not_linear_are_refused():
    first, second = random_images(2).split(1)
    with pytest.raises(MethodError, match="gae is not linear in what it explains, so that no relevance of a pair"):
        match_patches(small_vit(depth=2), first, second, "gae")


def test_one_image_is_compared_with_one():
    with pytest.raises(InputError, match="one image is compared with another one, not 2"):
        match_patches(small_vit(depth=2), random_images(2), random_images(1))


@pytest.fixture
def loaded():
    half = (0.5, 0.5, 0.5)
    return LoadedModel("small", small_vit(depth=2).float(), Preprocessing((32, 32), half, half), None)


@pytest.fixture
def photos(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for number in range(4):
        pixels = torch.randint(0, 255, (40, 40, 3), generator=generator, dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    with Image.open(tmp_path / "2.png") as photo:
        photo.rotate(2).save(tmp_path / "query.png")  # nearly the same as 2
    return tmp_path


def test_neighbours_are_the_nearest_and_have_maps(loaded, photos):
    found = similar(loaded, photos / "query.png", photos, ["gae", "ixg"], k=3)
    tower = embedding_tower(loaded.model)
    files = [photos / f"{number}.png" for number in range(4)]
    with torch.no_grad():
        units = functional.normalize(
            tower(loaded.preprocessing([Image.open(file) for file in [photos / "query.png", *files]])), dim=-1
        )
    cosines = units[1:] @ units[0]
    order = cosines.argsort(descending=True)[:3].tolist()
    assert found.files == tuple(files[number] for number in order)
    # Float32; images of one batch and of another are summed in another order.
    assert found.similarities == pytest.approx([float(cosines[number]) for number in order], abs=1e-5)
    assert found.query.scores["gae"].shape == (1, 3, 16)
    assert found.neighbours.scores["gae"].shape == (3, 16)
    assert found.query.logits[0].tolist() == pytest.approx(list(found.similarities), abs=1e-5)
    assert found.neighbours.logits[:, 0].tolist() == pytest.approx(list(found.similarities), abs=1e-5)
    assert found.query.label(0, 0) == found.files[0].name
    assert found.neighbours.label(1) == "query.png"


def test_a_folder_without_other_images_is_refused(loaded, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "alone.png")
    with pytest.raises(InputError, match="there is no other image to compare the query with"):
        similar(loaded, tmp_path / "alone.png", tmp_path)
    with pytest.raises(InputError, match="k must be a whole number above 0, not 0"):
        similar(loaded, tmp_path / "alone.png", tmp_path, k=0)
