"""Dense heads and detectors: segmentation, depth and detection models of small random weights, by pixels and queries.

``SAME`` is for two runs of the same float64 arithmetic in another order, see test_explain_targets.py.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import vitreous
from small_models import PATCHES, largest_difference, random_images, randomise, small_vit
from vitreous.errors import InputError, TargetError, UnsupportedModelError
from vitreous.speed.timing import one_thread
from vitreous.targets import Box, Contrast, Pixels, Query, Token

SAME = 1e-9
SMALL = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 48}
SMALL |= {"image_size": 32, "patch_size": 8}
MASK = torch.zeros(32, 32, dtype=torch.bool)
MASK[8:20, 8:24] = True
METHODS = ["ixg", "gae", "gradcam", "rollout", "decompx", "attnlrp", "rise:budget=8"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


class Segmenter(nn.Module):
    """A linear head on every patch, enlarged to the picture, as in Segmenter's baseline (Strudel et al. 2021)."""

    def __init__(self):
        super().__init__()
        self.vit = small_vit(depth=3, seed=2, num_classes=0)
        self.head = nn.Linear(24, 5).double()

    def forward(self, images):
        patches = self.head(self.vit.forward_features(images)[:, 1:])
        maps = patches.transpose(1, 2).reshape(len(images), 5, 4, 4)
        return nn.functional.interpolate(maps, images.shape[-2:], mode="bilinear")


def dpt(kind):
    import transformers

    sizes = {"neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8, "num_labels": 5, "is_hybrid": False}
    config = transformers.DPTConfig(
        **{**SMALL, "num_hidden_layers": 4}, **sizes, backbone_out_indices=[0, 1, 2, 3], use_auxiliary_head=False
    )
    return getattr(transformers, kind)(config)


def beit():
    import transformers

    settings = {"out_indices": [1, 2, 3, 4], "pool_scales": [1, 2], "use_auxiliary_head": False, "num_labels": 5}
    config = transformers.BeitConfig(**{**SMALL, "num_hidden_layers": 4}, **settings)
    return transformers.BeitForSemanticSegmentation(config)


def upernet(backbone):
    import transformers

    inner = getattr(transformers, backbone)(
        **{**SMALL, "num_hidden_layers": 4},
        out_indices=[1, 2, 3, 4],
        reshape_hidden_states=True,
        **({"add_fpn": True} if backbone == "BeitConfig" else {}),
    )
    settings = {"hidden_size": 8, "pool_scales": [1, 2], "use_auxiliary_head": False, "num_labels": 5}
    config = transformers.UperNetConfig(backbone_config=inner, **settings)
    return transformers.UperNetForSemanticSegmentation(config)


def unetr():
    from monai.networks.nets import UNETR

    sizes = {"feature_size": 4, "hidden_size": 24, "mlp_dim": 48, "num_heads": 3}
    return UNETR(in_channels=3, out_channels=4, img_size=32, spatial_dims=2, **sizes)


def yolos():
    import transformers

    config = transformers.YolosConfig(**{**SMALL, "image_size": [32, 32]}, num_detection_tokens=5, num_labels=4)
    return transformers.YolosForObjectDetection(config)


def detr():
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 16], depths=[1] * 4, out_features=["stage4"]
    )
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3, "decoder_attention_heads": 3}
    sizes |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 24, "num_queries": 5, "num_labels": 4}
    config = transformers.DetrConfig(
        backbone_config=backbone, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, **sizes
    )
    return transformers.DetrForObjectDetection(config)


DENSE = {
    "segmenter": Segmenter,
    "dpt": lambda: dpt("DPTForSemanticSegmentation"),
    "depth": lambda: dpt("DPTForDepthEstimation"),
    "beit": beit,
    "upernet-beit": lambda: upernet("BeitConfig"),
    "upernet-dinov2": lambda: upernet("Dinov2Config"),
    "unetr": unetr,
}
DETECTORS = {"yolos": yolos, "detr": detr}


@cache
def built(name):
    torch.manual_seed(0)
    model = {**DENSE, **DETECTORS}[name]().double()
    return randomise(model, seed=3).eval()


def given(name, batch=2):
    images = random_images(batch, seed=1)
    return nn.functional.interpolate(images, (128, 128)) if name == "detr" else images


def tokens_of(name, model):
    """By name, the module whose output is the input x_0 of the first block, with all tokens."""
    places = {"segmenter": "vit.norm_pre", "unetr": "vit.patch_embedding"}
    embeddings = (place for place, _ in model.named_modules() if place.endswith(".embeddings"))
    return model.get_submodule(places.get(name) or next(embeddings))


def input_gradient(name, model, images, score):
    """Σ_channels x_0 * d score/dx_0 by autograd, (batch, tokens)."""
    kept = []

    def keep(_module, _inputs, output):
        first = output if isinstance(output, torch.Tensor) else next(iter(output.to_tuple()))
        kept.append(first.detach().requires_grad_())
        if isinstance(output, torch.Tensor):
            return kept[0]
        return type(output)(**{**output, next(iter(output.keys())): kept[0]})

    with tokens_of(name, model).register_forward_hook(keep):
        number = score(model(images)).sum()
    (gradient,) = torch.autograd.grad(number, kept[0])
    return (kept[0] * gradient).sum(dim=2).detach()


def logits_of(output):
    return output if isinstance(output, torch.Tensor) else next(iter(output.values()))


@pytest.mark.parametrize("name", DENSE)
def test_pixels_of_a_dense_head(name):
    model, images = built(name), given(name)
    found = vitreous.explain(model, images, METHODS, target=Pixels(MASK, 0))
    assert found.logits.shape == (2, 0)
    assert found.top() == ()

    def score(output):
        maps = logits_of(output)
        maps = maps[:, None] if maps.dim() == 3 else maps
        # Nearest neighbour: every pixel of the output is the one of the mask at its centre.
        rows, columns = ((torch.arange(size) + 0.5) * 32 / size for size in maps.shape[2:])
        mask = MASK[rows.long()][:, columns.long()]
        return maps[:, 0][:, mask].sum(dim=1)

    assert torch.allclose(found.target_values, score(model(images)).detach())
    patches = found.grid[0] * found.grid[1]
    expected = input_gradient(name, model, images, score)[:, -patches:]
    assert largest_difference(found.scores["ixg"], expected) < SAME
    for method in METHODS:
        assert found.scores[method].isfinite().all()


def test_query_of_yolos():
    """Its detection tokens stand behind the patches: those are tokens 1 to 16."""
    model, images = built("yolos"), given("yolos")
    found = vitreous.explain(model, images, METHODS, target=[[Query(2, 1), Query(4, 0)]] * 2)
    for place, (query, index) in enumerate(((2, 1), (4, 0))):
        expected = input_gradient("yolos", model, images, lambda output: output.logits[:, query, index])  # noqa: B023
        assert largest_difference(found.scores["ixg"][:, place], expected[:, 1:17]) < SAME
    likely = vitreous.explain(model, images, "ixg", target=Query(3))
    classes = model(images).logits[:, 3, :-1].argmax(dim=1).tolist()
    assert [likely.label(image) for image in range(2)] == [f"query 3: class {index}" for index in classes]


def test_methods_that_read_scores_serve_a_stream_whose_order_is_changed():
    """Its detection tokens are put in front of the patches, in the scores before the softmax too."""
    found = vitreous.explain(built("yolos"), given("yolos"), ["agcam", "grad_eclip"], target=Query(2, 1))
    assert all(bool(scores.any()) and scores.isfinite().all() for scores in found.scores.values())


def test_query_of_detr_reads_its_encoder():
    model, images = built("detr"), given("detr")
    found = vitreous.explain(model, images, METHODS, target=Query(1, 2))
    assert found.grid == (4, 4)
    assert torch.allclose(found.target_values, model(images).logits[:, 1, 2].detach())
    assert all(scores.isfinite().all() for scores in found.scores.values())
    assert bool(found.scores["ixg"].any())


@pytest.mark.parametrize("name", DETECTORS)
def test_box_finds_its_query(name):
    model, images = built(name), given(name)
    boxes = model(images).pred_boxes[:, 3].detach()
    rows = []
    for left, top, width, height in boxes.tolist():
        corners = (left - width / 2, top - height / 2, left + width / 2, top + height / 2)
        rows.append(Box(*(min(1, max(0, corner)) for corner in corners), index=1))
    found = vitreous.explain(model, images, "ixg", target=rows)
    expected = model(images)
    for image in range(2):
        query = found.targets[found.class_index(image) - found.logits.shape[1]].query
        assert float(found.target_values[image]) == pytest.approx(float(expected.logits[image, query, 1].detach()))


def test_a_target_is_read_as_if_it_were_alone():
    """Attention methods read the rows of the tokens under the mask, whatever else is explained with it."""
    model, images = built("segmenter"), given("segmenter")
    corner = torch.zeros(32, 32)
    corner[:8, :8] = 1
    other = corner.flip(0)
    together = vitreous.explain(model, images, METHODS, target=[[Pixels(corner, 1), Pixels(other, 1)]] * 2)
    apart = vitreous.explain(model, images, METHODS, target=[Pixels(corner, 1), Pixels(other, 1)])
    for place, mask in enumerate((corner, other)):
        alone = vitreous.explain(model, images, METHODS, target=Pixels(mask, 1))
        for method in METHODS:
            assert largest_difference(together.scores[method][:, place], alone.scores[method]) < SAME, method
            assert largest_difference(apart.scores[method][place], alone.scores[method][place]) < SAME, method
    assert largest_difference(together.scores["rollout"][:, 0], together.scores["rollout"][:, 1]) > 1e-3


def test_token_of_a_backbone():
    model = small_vit(depth=2, seed=2, num_classes=0, global_pool="")
    images = random_images(2)
    found = vitreous.explain(model, images, ["ixg", "rollout"], target=Token(5))
    assert torch.allclose(found.target_values, model(images)[:, 5].norm(dim=1).detach())
    one = vitreous.explain(model, images, ["ixg"], target=Token(5, 3))
    assert torch.allclose(one.target_values, model(images)[:, 5, 3].detach())


@pytest.mark.parametrize(
    ("name", "target", "sentence"),
    [
        (
            "segmenter",
            Pixels(torch.ones(7, 7)),
            "the mask is 7 x 7 pixels, and has to be 32 x 32 as the model's output",
        ),
        ("segmenter", Pixels(MASK, 9), "class 9 is not between 0 and 4"),
        ("segmenter", Contrast(0, 1), "needs class scores"),
        ("segmenter", Query(0), "needs an output of shape"),
        ("yolos", Query(5), "query 5 is not between 0 and 4, the queries of this model"),
        ("yolos", Query(0, 7), "class 7 is not between 0 and 4"),
        ("yolos", Token(9), "token 9 does not exist: the output has 5 tokens"),
        ("yolos", Pixels(MASK), "needs a dense output"),
    ],
)
def test_what_does_not_fit_is_one_plain_sentence(name, target, sentence):
    with pytest.raises(TargetError, match=sentence):
        vitreous.explain(built(name), given(name), "ixg", target=target)


def test_a_mask_that_vanishes_in_a_small_output():
    dot = torch.zeros(32, 32)
    dot[0, 0] = 1
    with pytest.raises(TargetError, match="the mask is empty in the 16 x 16 pixels of the model's output"):
        vitreous.explain(built("beit"), given("beit"), "ixg", target=Pixels(dot, 0))


def test_which_methods_serve_a_dense_output():
    found = vitreous.supported(
        built("segmenter"), given("segmenter"), ["ixg", "gae", "occlusion"], target=Pixels(MASK, 0)
    )
    assert found.methods == ("ixg", "gae", "occlusion")
    with pytest.raises(InputError, match=r"must return class scores .* returned \(1, 5, 32, 32\)"):
        vitreous.supported(built("segmenter"), given("segmenter"), ["ixg"])


def test_grad_cam_of_pixels_is_pytorch_grad_cams():
    """Its SemanticSegmentationTarget sums a class's map inside of a mask; the layer is the last block's first norm.

    It scales a map to [0, 1] and enlarges it to the picture in float32: 1e-4 leaves room for that.
    """
    grad_cam = pytest.importorskip("pytorch_grad_cam")
    from pytorch_grad_cam.utils.model_targets import SemanticSegmentationTarget

    model, images = built("segmenter").float(), given("segmenter").float()

    def patches(tokens):
        return tokens[:, 1:].transpose(1, 2).reshape(len(tokens), -1, 4, 4)

    layer = [model.vit.blocks[-1].norm1]
    with grad_cam.GradCAM(model=model, target_layers=layer, reshape_transform=patches) as peer:
        targets = [SemanticSegmentationTarget(2, MASK.numpy())] * 2
        expected = torch.from_numpy(peer(input_tensor=images, targets=targets))
    found = vitreous.explain(model, images, "gradcam", target=Pixels(MASK, 2)).scores["gradcam"]
    model.double()
    maps = found.reshape(2, 1, 4, 4)
    maps = maps - maps.amin(dim=(2, 3), keepdim=True)
    maps = maps / maps.amax(dim=(2, 3), keepdim=True)
    large = nn.functional.interpolate(maps, (32, 32), mode="bilinear")[:, 0]
    large = large - large.amin(dim=(1, 2), keepdim=True)
    assert found.shape == (2, PATCHES)
    assert largest_difference(large / large.amax(dim=(1, 2), keepdim=True), expected) < 1e-4


def test_a_head_that_reads_earlier_blocks_cannot_run_again_from_the_last():
    with pytest.raises(UnsupportedModelError, match="its output also reads earlier blocks"):
        vitreous.explain(built("dpt"), given("dpt", 1), "vit_recipro_cam", target=Pixels(torch.ones(32, 32), 1))
