"""Hierarchical and windowed models: the stage that is read, its grid, and numbers against plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial

import pytest
import timm
import torch
import transformers
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from timm.models import focalnet, metaformer
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from torch import Tensor, nn
from torchvision.models import maxvit, swin_transformer
from typer.testing import CliRunner

import vitreous
from vitreous.api.explain import explain_again
from vitreous.architecture import find_architecture
from vitreous.cli import app
from vitreous.errors import MethodError, RefusedMethodsError
from vitreous.evaluation.protocols import find_protocol
from vitreous.evaluation.run import ModelChoice
from vitreous.evaluation.runner.adapters import first_run
from vitreous.evaluation.runner.measure import load
from vitreous.tape import GradientNeeds, Needs, Pass, Plan, record
from vitreous.tape.patches.receptive_fields import first_block_input

FOUR = {"depths": (1, 1, 1, 2), "embed_dims": (8, 16, 24, 32)}
TWO = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
MAXVIT = {"embed_dim": (16, 16), "stem_width": 8, "transformer_dim_head": 8}
CLASSES = 4


def _timm(name: str, **options: object) -> nn.Module:
    return timm.create_model(name, num_classes=CLASSES, **options)


def _hf(name: str, **options: object) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(num_labels=CLASSES, **options)
    return getattr(transformers, f"{name}ForImageClassification")(config)


# By name: how it is built, and the module whose output is the stream in front of the last block of the last stage, with
# how that output lies: (B, H, W, C), (B, C, H, W) or (B, N, C).
FAMILIES: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "swin": (
        partial(_timm, "swin_tiny_patch4_window7_224", img_size=64, window_size=4, **TWO),
        "layers.1.blocks.0",
        "bhwc",
    ),
    "swinv2": (
        partial(_timm, "swinv2_tiny_window8_256", img_size=64, window_size=4, **TWO),
        "layers.1.blocks.0",
        "bhwc",
    ),
    "pvt_v2": (partial(_timm, "pvt_v2_b0", num_heads=(1, 2, 3, 4), **FOUR), "stages.3.blocks.0", "bnc"),
    "maxvit": (
        partial(
            _timm, "maxvit_tiny_rw_224", img_size=64, depths=(1, 1), block_type=("M", "M"),
            transformer_window_size=(4, 4), **MAXVIT,
        ),
        "stages.1.blocks.0.attn_block",
        "bhwc",
    ),
    "coatnet": (
        partial(_timm, "coatnet_0_rw_224", img_size=64, depths=(1, 2), block_type=("C", "T"), **MAXVIT),
        "stages.1.blocks.0",
        "bchw",
    ),
    "hiera": (
        partial(_timm, "hiera_tiny_224", img_size=64, embed_dim=16, num_heads=1, stages=(1, 1, 1, 2)),
        "blocks.3",
        "bnc",
    ),
    "mvitv2": (
        lambda: MultiScaleVit(
            MultiScaleVitCfg(depths=(1, 2), embed_dim=(16, 32), num_heads=(1, 2)), img_size=64, num_classes=CLASSES
        ),
        "stages.1.blocks.0",
        "mvit",
    ),
    "poolformer": (
        partial(metaformer.MetaFormer, dims=(8, 16, 24, 32), depths=(1, 1, 1, 2), num_classes=CLASSES),
        "stages.3.blocks.0",
        "bchw",
    ),
    "tiny_vit": (
        partial(_timm, "tiny_vit_5m_224", num_heads=(2, 2, 4, 4), window_sizes=(4, 4, 4, 2), **FOUR),
        "stages.3.blocks.0",
        "bhwc",
    ),
    "focalnet": (
        partial(focalnet.FocalNet, embed_dim=8, depths=(1, 1, 1, 2), num_classes=CLASSES),
        "layers.3.blocks.0",
        "bchw",
    ),
    "efficientformerv2": (
        partial(
            _timm, "efficientformerv2_s0", img_size=64, depths=(1, 1, 1, 3), embed_dims=(8, 16, 24, 32), num_vit=2,
            mlp_ratios=((4,), (4,), (4,), (4, 4, 4)),
        ),
        "stages.3.blocks.1",
        "bchw",
    ),
    "twins_svt": (
        partial(_timm, "twins_svt_small", img_size=64, num_heads=(1, 2, 3, 4), **FOUR),
        "pos_block.3",
        "bnc",
    ),
    "torchvision swin": (
        partial(
            swin_transformer.SwinTransformer, patch_size=[4, 4], embed_dim=16, depths=[2, 2], num_heads=[2, 4],
            window_size=[4, 4], num_classes=CLASSES,
        ),
        "features.3.0",
        "bhwc",
    ),
    "transformers Swin": (
        partial(
            _hf, "Swin", image_size=64, patch_size=4, embed_dim=12, depths=[1, 2], num_heads=[2, 2], window_size=4
        ),
        "swin.encoder.layers.1.blocks.0",
        "bnc",
    ),
    "transformers Cvt": (
        partial(_hf, "Cvt", embed_dim=[8, 12, 16], num_heads=[1, 2, 2], depth=[1, 2, 3]),
        "cvt.encoder.stages.2.layers.1",
        "bnc",
    ),
}  # fmt: skip
SIZES = {"tiny_vit": 224}


@cache
def _built(name: str) -> tuple[nn.Module, Tensor]:
    """Built, and its architecture found, once: no test changes it."""
    torch.manual_seed(0)
    model = FAMILIES[name][0]().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # So that no layer scale or bias is 0, and everything takes part.
            parameter.add_(0.1 * torch.randn_like(parameter))
        for norm in model.modules():
            if isinstance(norm, nn.modules.batchnorm._BatchNorm):
                norm.running_mean.normal_(0, 0.1)
    size = SIZES.get(name, 64)
    return model, torch.randn(2, 3, size, size, dtype=torch.float64)


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    output = model(images)
    return output if isinstance(output, Tensor) else output.logits


def _as_tokens(stream: Tensor, layout: str) -> Tensor:
    if layout == "bchw":
        return stream.flatten(2).transpose(1, 2)
    return stream.flatten(1, 2) if stream.dim() == 4 else stream


def _autograd(name: str, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """The stream that the last block gets, and the gradient of logit 1 at it, (batch, tokens, channels), by a hook."""
    _, place, layout = FAMILIES[name]
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        del module, args
        kept.append(output[0] if isinstance(output, tuple | list) else output)

    handle = model.get_submodule(place).register_forward_hook(keep)
    logits = _logits(model, images)
    handle.remove()
    (gradient,) = torch.autograd.grad(logits[:, 1].sum(), kept[-1])
    return _as_tokens(kept[-1], layout).detach(), _as_tokens(gradient, layout)


@pytest.mark.parametrize("name", FAMILIES)
def test_input_x_gradient_of_the_last_block_is_that_of_plain_autograd(name: str) -> None:
    model, images = _built(name)
    found = vitreous.explain(model, images, "ixg:layer=-1", target=1)
    tokens, gradient = _autograd(name, model, images)
    expected = (tokens * gradient).sum(-1)[:, -found.grid[0] * found.grid[1] :]
    # Both are float64 sums of a few hundred products.
    torch.testing.assert_close(found.scores["ixg:layer=-1"], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_fullgrad_under_libra_adds_up_to_the_logit_at_every_stage(name: str) -> None:
    model, images = _built(name)
    backward = Pass("libra", "logit")
    for stage in range(len(find_architecture(model, images).stages)):
        architecture = find_architecture(model, images, stage)
        wanted = GradientNeeds(tokens=frozenset({0}), biases=frozenset(range(architecture.depth + 1)))
        needs = Needs(tokens=frozenset({0}), gradients={backward: wanted})
        with record(model, architecture, images, Plan(architecture.depth, needs)) as tape:
            target = torch.ones(2, dtype=torch.int64)
            gradients = tape.backward(backward, target, wanted)
            total = (tape.tokens(0) * gradients.tokens[0]).sum(dim=(1, 2))
            for biases in gradients.biases.values():
                assert biases.shape == (2, tape.layout.tokens)
                total = total + biases.sum(dim=1)
            # Every rounding of a float64 run is below 1e-12 of what it adds up.
            torch.testing.assert_close(total, tape.logits[:, 1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_change_in_a_cell_of_the_picture_shows_in_that_cell_of_the_first_stage(name: str) -> None:
    model, images = _built(name)
    architecture = find_architecture(model, images, 0)
    with record(model, architecture, images[:1], Plan(architecture.depth, Needs())) as tape:
        (rows, columns), prefix = tape.layout.grid, tape.layout.prefix
    height, width = images.shape[-2] // rows, images.shape[-1] // columns
    stream = first_block_input(architecture, model, images[:1])
    assert stream is not None
    for row, column in ((1, 1), (1, columns - 2), (rows - 2, 1), (rows // 2, columns // 3)):
        changed = images[:1].clone()
        changed[..., row * height : (row + 1) * height, column * width : (column + 1) * width] += 0.1
        other = first_block_input(architecture, model, changed)
        assert other is not None
        most = int((other - stream).norm(dim=-1)[0, prefix:].argmax())
        # Convolutions in front of the first block may overlap by one cell.
        assert abs(most // columns - row) <= 1
        assert abs(most % columns - column) <= 1


NORMS = {
    "pvt_v2": "stages.3.blocks.1.norm1",
    "maxvit": "stages.1.blocks.0.attn_grid.norm1",
    "hiera": "blocks.4.norm1",
    "mvitv2": "stages.1.blocks.1.norm1",
    "poolformer": "stages.3.blocks.1.norm1",
    "focalnet": "layers.3.blocks.1.norm1",
    "twins_svt": "blocks.3.1.norm1",
    "torchvision swin": "features.3.1.norm1",
    "transformers Swin": "swin.encoder.layers.1.blocks.1.layernorm_before",
}


@pytest.mark.parametrize("name", NORMS)
def test_grad_cam_is_that_of_plain_autograd_at_the_last_first_norm(name: str) -> None:
    model, images = _built(name)
    kept: list[Tensor] = []
    handle = model.get_submodule(NORMS[name]).register_forward_hook(lambda _module, _args, output: kept.append(output))
    logits = _logits(model, images)
    handle.remove()
    for target in range(CLASSES):
        (gradient,) = torch.autograd.grad(logits[:, target].sum(), kept[-1], retain_graph=True)
        tokens, slopes = (_as_tokens(each, FAMILIES[name][2]) for each in (kept[-1], gradient))
        expected = (tokens * slopes.mean(dim=1, keepdim=True)).sum(-1).clamp(min=0)
        found = vitreous.explain(model, images, "gradcam", target=target).scores["gradcam"]
        torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-12)


def test_grad_cam_on_swin_is_that_of_pytorch_grad_cam() -> None:
    model, images = copy.deepcopy(_built("swin"))  # hooks and gradients are left on it
    norm = model.layers[-1].blocks[-1].norm1
    found = vitreous.explain(model, images, "gradcam", target=1)
    assert found.grid == (8, 8)

    def as_maps(tokens: Tensor) -> Tensor:
        return tokens.permute(0, 3, 1, 2)

    with GradCAM(model, [norm], reshape_transform=as_maps) as cam:
        cam(images, [ClassifierOutputTarget(1)] * 2)
        kept, gradient = cam.activations_and_grads.activations[0], cam.activations_and_grads.gradients[0]
        theirs = cam.get_cam_image(images, norm, None, kept.numpy(), gradient.numpy(), eigen_smooth=False)
    theirs = torch.from_numpy(theirs).clamp(min=0).flatten(1)
    # pytorch-grad-cam keeps activations and gradients as they are, float64.
    torch.testing.assert_close(found.scores["gradcam"].clamp(min=0), theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stage", [0, 1, -2])
def test_the_stage_that_is_read_can_be_chosen(stage: int) -> None:
    model, images = _built("swin")
    found = vitreous.explain(model, images, ["ixg", "gradcam", "vit_recipro_cam"], target=1, stage=stage)
    assert found.grid == ((16, 16), (8, 8))[stage % 2]
    kept: list[Tensor] = []
    handle = model.layers[stage % 2].blocks[0].register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    logits = model(images)
    handle.remove()
    (gradient,) = torch.autograd.grad(logits[:, 1].sum(), kept[0])
    torch.testing.assert_close(found.scores["ixg"], (kept[0] * gradient).sum(-1).flatten(1), rtol=1e-9, atol=1e-12)


def test_a_stage_that_is_not_there_is_refused() -> None:
    model, images = _built("swin")
    with pytest.raises(MethodError, match=r"stage=2: SwinTransformer has 2 stages, counted from 0"):
        vitreous.explain(model, images, "ixg", stage=2)


def test_methods_that_read_attention_between_all_patches_are_refused_with_the_reason() -> None:
    model, images = _built("swin")
    for method in ("rollout", "gae", "tokentm", "raw_attention", "gradtoken"):
        with pytest.raises(RefusedMethodsError, match="windowed, pooled or between channels"):
            vitreous.explain(model, images, method)


SERVED = (
    *("ixg", "gradient", "fullgrad", "gradcam", "layercam", "gradcam++", "xgradcam", "eigencam", "scorecam:budget=4"),
    *("integrated_gradients:steps=2", "smoothgrad:samples=2", "vit_recipro_cam", "rise:budget=4"),
    *("occlusion:window=2,stride=2", "ixg:rule=libra", "ixg:rule=frozen", "fullgrad:rule=libra"),
)


@pytest.mark.parametrize("name", FAMILIES)
def test_methods_without_attention_between_all_patches_work(name: str) -> None:
    model, images = _built(name)
    known = {info.name for info in vitreous.list_methods()}
    asked = [method for method in SERVED if method.split(":")[0] in known]
    found = vitreous.explain(model, images, asked, target=1)
    patches = found.grid[0] * found.grid[1]
    for method, scores in found.scores.items():
        assert bool(scores.isfinite().all()), method
        assert scores.shape[0] == 2
        assert scores.shape[1] in (patches, images.shape[-1] * images.shape[-2]), method
        # Grad-CAM and its kin cut off what is below 0, which may be all of a small map.
        assert "cam" in method or bool((scores != 0).any()), method


def test_tokens_that_lie_window_by_window_are_put_into_rows() -> None:
    """torchvision's MaxViT keeps windows apart in its stream, first in blocks and then as a grid."""
    torch.manual_seed(0)
    model = maxvit.MaxVit(
        input_size=(64, 64), stem_channels=8, partition_size=4, block_channels=[8, 16], block_layers=[1, 1], head_dim=4,
        stochastic_depth_prob=0.0, num_classes=CLASSES,
    ).double().eval()  # fmt: skip
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    found = vitreous.explain(model, images, ["ixg", "ixg:layer=-1"], target=1)
    assert found.grid == (8, 8)
    layer = model.blocks[1].layers[0].layers
    for spelling, attention in (("ixg", layer.window_attention), ("ixg:layer=-1", layer.grid_attention)):
        kept: list[Tensor] = []
        handle = attention.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0]))
        logits = model(images)
        handle.remove()
        # What the attention layer gets before it cuts it into windows: (B, C, H, W).
        (gradient,) = torch.autograd.grad(logits[:, 1].sum(), kept[0])
        expected = (kept[0] * gradient).sum(1).flatten(1)
        torch.testing.assert_close(found.scores[spelling], expected, rtol=1e-9, atol=1e-12)


def test_images_and_windows_that_share_an_axis_are_told_apart() -> None:
    """MobileViT puts the pixels of a patch beside the images."""
    torch.manual_seed(0)
    model = _timm("mobilevit_xxs").double().eval()
    images = torch.randn(3, 3, 64, 64, dtype=torch.float64)
    found = vitreous.explain(model, images, "ixg", target=1, stage=3)
    block = model.stages[3][1]
    kept: list[Tensor] = []
    handle = block.transformer[0].register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    logits = model(images)
    handle.remove()
    (gradient,) = torch.autograd.grad(logits[:, 1].sum(), kept[0])
    product = (kept[0] * gradient).sum(-1).view(3, 2, 2, 2, 2)  # image, row and column in a patch, row and column of it
    expected = product.permute(0, 3, 1, 4, 2).flatten(1)
    assert found.grid == (4, 4)
    torch.testing.assert_close(found.scores["ixg"], expected, rtol=1e-9, atol=1e-12)


SWIN_FILE = """import timm


def build():
    return timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4),
        num_classes=4,
    )
"""


def test_the_command_line_reads_the_stage_that_is_asked_for(tmp_path) -> None:
    source = tmp_path / "swin.py"
    source.write_text(SWIN_FILE, encoding="utf-8")
    result = CliRunner().invoke(
        app,
        ["explain", "demo", "--model", f"py/{source}:build", "--method", "ixg", "--stage", "0", "--image-size", "64",
         "--out", str(tmp_path / "out"), "--json"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    saved = next((tmp_path / "out").glob("*/*.npz"), None) or next((tmp_path / "out").iterdir())
    loaded = vitreous.Explanation.load(saved.parent if saved.is_file() else saved)
    assert loaded.grid == (16, 16)


def test_evaluations_read_the_stage_that_is_asked_for(tmp_path) -> None:
    source = tmp_path / "swin.py"
    source.write_text(SWIN_FILE, encoding="utf-8")
    images = torch.randn(2, 3, 64, 64)
    for stage, grid in ((None, (8, 8)), (0, (16, 16))):
        choice = ModelChoice(f"py/{source}:build", mean=(0.5,), std=(0.5,), image_size=(64, 64), stage=stage)
        model = load(choice, find_protocol("chefer-2021-segmentation"))
        assert explain_again(model, images, ["ixg"], target=1).grid == grid
        runner, _ = first_run(model, images)
        assert runner.layout.grid == grid
