"""Relevance propagation on models of other libraries, in batches, beside other methods; conservation."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import vitreous
from small_models import SIZE, largest_difference, random_images, randomise, small_vit
from vitreous.architecture import find_architecture
from vitreous.speed.timing import one_thread
from vitreous.tape import GradientNeeds, Needs, Pass, Plan, record
from vitreous.tape.rules import RULES
from vitreous.tape.rules.gradient_rules import EmbeddingCall, LinearCall, SumCall

ALL = ["transattr", "plrp", "lrp_rollout", "lrp", "lrp:rules=ours", "abslrp", "abslrp:shortcut=share"]
CHEFER = ALL[:5]
# Maps of one model computed in another order differ by rounding, which divisions by small numbers magnify: measured
# below 1e-10 of the largest score.
ROUNDING = 1e-8


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


def assert_same_maps(found, expected, methods, tolerance: float = ROUNDING) -> None:
    for method in methods:
        assert largest_difference(found.scores[method], expected.scores[method]) < tolerance, method


def torchvision_twin(model: VisionTransformer) -> nn.Module:
    """torchvision's ViT, with nn.MultiheadAttention, and the weights of a timm model."""
    torchvision = pytest.importorskip("torchvision")
    twin = torchvision.models.VisionTransformer(
        SIZE, 8, num_layers=len(model.blocks), num_heads=3, hidden_dim=24, mlp_dim=96, num_classes=5
    )
    names = {"cls_token": "class_token", "pos_embed": "encoder.pos_embedding", "patch_embed.proj": "conv_proj"}
    names |= {"norm": "encoder.ln", "head": "heads.head"}
    parts = {"norm1": "ln_1", "norm2": "ln_2", "mlp.fc1": "mlp.0", "mlp.fc2": "mlp.3"}
    parts |= {"attn.proj": "self_attention.out_proj", "attn.qkv.weight": "self_attention.in_proj_weight"}
    parts |= {"attn.qkv.bias": "self_attention.in_proj_bias"}
    for layer in range(len(model.blocks)):
        theirs = f"encoder.layers.encoder_layer_{layer}"
        names |= {f"blocks.{layer}.{ours}": f"{theirs}.{other}" for ours, other in parts.items()}
    return filled(twin, model, names)


def transformers_twin(model: VisionTransformer, attention: str) -> nn.Module:
    """transformers' ViT, with separate q, k and v, and the weights of a timm model."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=24,
        num_hidden_layers=len(model.blocks),
        num_attention_heads=3,
        intermediate_size=96,
        image_size=SIZE,
        patch_size=8,
        num_labels=5,
        attn_implementation=attention,
    )
    names = {"cls_token": "vit.embeddings.cls_token", "pos_embed": "vit.embeddings.position_embeddings"}
    names |= {"patch_embed.proj": "vit.embeddings.patch_embeddings.projection"}
    names |= {"norm": "vit.layernorm", "head": "classifier"}
    parts = {"norm1": "layernorm_before", "norm2": "layernorm_after", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
    parts |= {"attn.proj": "attention.o_proj", "attn.qkv": "attention.{}_proj"}
    for layer in range(len(model.blocks)):
        names |= {f"blocks.{layer}.{ours}": f"vit.layers.{layer}.{other}" for ours, other in parts.items()}
    return filled(transformers.ViTForImageClassification(config), model, names)


def filled(twin: nn.Module, model: VisionTransformer, names: dict[str, str]) -> nn.Module:
    """``twin`` with ``model``'s weights; names of modules or parameters, ours to theirs, ``{}`` for q, k and v each."""
    weights = {}
    for ours, value in model.state_dict().items():
        known = next(name for name in names if ours == name or ours.startswith(name + "."))
        theirs = names[known] + ours.removeprefix(known)
        if "{}" in theirs:
            weights |= {theirs.format(part): piece for part, piece in zip("qkv", value.chunk(3), strict=True)}
        else:
            weights[theirs] = value
    twin.double().eval().load_state_dict(weights)
    for module in twin.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = model.norm.eps
    return twin


LIBRARIES = {
    "torchvision": ROUNDING,
    "transformers, fused": ROUNDING,
    # Queries are scaled before the product, not after it, so the 1e-9 in its denominator weighs more: measured 6e-6.
    "timm, eager": 1e-4,
    # Its softmax is in float32, and divisions by small numbers magnify that: measured 1e-4.
    "transformers, eager": 1e-2,
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_same_model_in_another_library_has_the_same_maps(library):
    """All but absLRP, which scales the relevance of every module: libraries differ in dropouts and packed q, k, v."""
    model = small_vit(depth=3, seed=4, init_values=None)
    expected = vitreous.explain(model, random_images(), CHEFER, 1)
    if library == "torchvision":
        twin = torchvision_twin(model)
    elif library == "timm, eager":
        twin = model
        for block in model.blocks:
            block.attn.fused_attn = False
    else:
        twin = transformers_twin(model, "sdpa" if library.endswith("fused") else "eager")
    found = vitreous.explain(twin, random_images(), CHEFER, 1)
    assert largest_difference(found.logits, expected.logits) < min(LIBRARIES[library], 1e-6)
    assert_same_maps(found, expected, CHEFER, LIBRARIES[library])
    absolute = vitreous.explain(twin, random_images(), "abslrp", 1).scores["abslrp"]
    assert absolute.isfinite().all()
    assert absolute.any()


def test_torchvisions_attention_is_one_layer_for_absolute_relevance():
    """Its packed projection is timm's ``qkv``; dropouts, which absLRP counts too, are taken out of both."""
    model = small_vit(depth=3, seed=4, init_values=None)
    twin = torchvision_twin(model)
    for each in (model, twin):
        for module in list(each.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.Dropout):
                    setattr(module, name, nn.Identity())
    methods = ["abslrp", "abslrp:shortcut=share"]
    assert_same_maps(
        vitreous.explain(twin, random_images(), methods, 1),
        vitreous.explain(model, random_images(), methods, 1),
        methods,
        ROUNDING,
    )


VARIANTS = {
    "class token": {},
    "average pooling": {"global_pool": "avg", "class_token": False},
    "average pooling beside a class token": {"global_pool": "avg"},
    "pooling by attention": {"global_pool": "map", "class_token": False},
    "query and key norms": {"qk_norm": True},
    "gated feed-forward part": {"mlp_layer": timm.layers.SwiGLU},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_gives_what_its_images_give_alone(variant):
    model = small_vit(depth=2, seed=5, **VARIANTS[variant])
    images = random_images(3)
    targets = [0, 3, 1]
    together = vitreous.explain(model, images, ALL, targets)
    for number, target in enumerate(targets):
        alone = vitreous.explain(model, images[number : number + 1], ALL, target)
        assert_same_maps(together.select(number), alone, ALL)
        assert all(alone.scores[method].isfinite().all() and alone.scores[method].any() for method in ALL)


def token_first_model() -> nn.Module:
    """A pre-norm nn.TransformerEncoder over (token, batch, channel)."""

    class TokenFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Conv2d(3, 24, 8, 8)
            self.cls_token = nn.Parameter(torch.zeros(1, 1, 24))
            self.pos_embed = nn.Parameter(torch.zeros(1, 17, 24))
            layer = nn.TransformerEncoderLayer(24, 3, 48, activation="gelu", norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(24, 5)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            tokens = self.embed(images).flatten(2).transpose(1, 2)
            tokens = torch.cat([self.cls_token.expand(len(images), -1, -1), tokens], dim=1) + self.pos_embed
            return self.head(self.encoder(tokens.transpose(0, 1)).transpose(0, 1)[:, 0])

    return randomise(TokenFirst(), 7).double().eval()


def test_a_batch_behind_the_tokens_is_told_apart_too():
    model, images = token_first_model(), random_images(3)
    together = vitreous.explain(model, images, CHEFER, 2)
    for number in range(3):
        alone = vitreous.explain(model, images[number : number + 1], CHEFER, 2)
        assert_same_maps(together.select(number), alone, CHEFER)


def test_other_methods_on_the_same_tape_are_not_disturbed():
    """The parts that carry relevance behave plainly under every other rule, and the other way round."""
    model, images = small_vit(depth=3, seed=8), random_images()
    others = ["gae", "decompx", "ixg", "tokentm", "gradtoken"]
    together = vitreous.explain(model, images, [*ALL, *others], 1)
    for method in [*ALL, *others]:
        alone = vitreous.explain(model, images, method, 1)
        assert largest_difference(together.scores[method], alone.scores[method]) < 1e-10, method
    assert largest_difference(together.logits, model(images)) < 1e-12


def test_float32_maps_are_close_to_float64():
    """1e-2 of the largest score: float32 carries 7 digits, of which divisions by small numbers eat some."""
    methods = ["transattr", "plrp", "abslrp"]
    exact = vitreous.explain(small_vit(seed=9), random_images(), methods, 1)
    single = vitreous.explain(small_vit(seed=9, dtype=torch.float32), random_images(dtype=torch.float32), methods, 1)
    for method in methods:
        assert single.scores[method].dtype == torch.float32
        assert largest_difference(single.scores[method], exact.scores[method]) < 1e-2, method


# Conservation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"global_pool": "avg"}, {"reg_tokens": 2}], ids=str)
def test_ours_conserves_relevance_from_the_logit_down_to_every_block(options):
    """Σ R = 1 at every block's input: the rules ignore biases instead of giving them a share.

    Only the 1e-9 in each denominator Z takes something, a part 1e-9/Z; 1e-5 allows for Z down to 1e-4.
    """
    model, images = small_vit(depth=4, seed=10, **options), random_images(3)
    backward, needs = Pass("lrp_ours", "logit"), GradientNeeds(tokens=frozenset(range(4)))
    with record(model, find_architecture(model, images), images, Plan(4, Needs(gradients={backward: needs}))) as tape:
        found = tape.backward(backward, torch.tensor([0, 3, 1]), needs).tokens
    totals = torch.stack([found[layer].sum(dim=(1, 2)) for layer in range(4)])
    assert (totals - 1).abs().max() < 1e-5


def rule_parts():
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return draw(2, 5, 64), draw(6, 64), draw(2, 5, 6), draw(2, 5, 64)


def test_a_linear_layer_conserves_relevance_with_ours_and_doubles_it_with_orig():
    """With separate denominators the positive and the negative part each pass on all that arrived: so it explodes."""
    tokens, weight, relevance, _ = rule_parts()
    (ours,) = RULES["lrp_ours"].backward_call(LinearCall(weight, None), (tokens,), relevance)
    (orig,) = RULES["lrp_orig"].backward_call(LinearCall(weight, None), (tokens,), relevance)
    assert abs(ours.sum() - relevance.sum()) < 1e-7 * relevance.abs().sum()
    assert abs(orig.sum() - 2 * relevance.sum()) < 1e-7 * relevance.abs().sum()


@pytest.mark.parametrize("rule", ["lrp_ours", "lrp_orig"])
def test_a_sum_conserves_relevance_of_every_image(rule):
    left, _, _, right = rule_parts()
    relevance = torch.rand(2, 5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    call = SumCall(torch.add, 0, False, lambda *_: None)  # noqa: FBT003
    shares = RULES[rule].backward_call(call, (left, right), relevance)
    found = sum(share.sum(dim=(1, 2)) for share in shares)
    assert (found - relevance.sum(dim=(1, 2))).abs().max() < 1e-6


def test_the_patch_embedding_conserves_relevance():
    pixels, weight = random_images(2), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    convolve = lambda picture, kernel: nn.functional.conv2d(picture, kernel, stride=8)  # noqa: E731
    relevance = torch.rand(2, 4, 4, 4, dtype=torch.float64)
    (found,) = RULES["lrp_ours"].backward_call(EmbeddingCall(None, weight, convolve), (pixels,), relevance)
    assert (found.sum(dim=(1, 2, 3)) - relevance.sum(dim=(1, 2, 3))).abs().max() < 1e-6


def test_a_zero_denominator_gives_zero_not_nan():
    tokens, weight, relevance, _ = rule_parts()
    tokens[0] = 0
    for rule in ("lrp_ours", "lrp_orig", "abslrp"):
        (found,) = RULES[rule].backward_call(LinearCall(weight, None), (tokens,), relevance)
        assert found.isfinite().all()
        assert not found[0].any()
