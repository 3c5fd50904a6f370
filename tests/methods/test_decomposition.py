"""AttIN, GlobEnc and ALTI against written-out vectors, and against what they promise."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from timm.layers import RmsNormFp32
from torch import Tensor, nn
from torch.nn.utils import prune
from transformers.models.aimv2.modeling_aimv2 import Aimv2RMSNorm

import vitreous
from literal import decomposition as literal
from literal import forward
from recorded import Recorded, whole_matrix
from small_models import golden_model, largest_difference, random_images, small_case, small_vit
from vitreous.architecture import find_architecture
from vitreous.architecture.norms import linear_norm
from vitreous.errors import UnsupportedModelError
from vitreous.methods.spelling import parse
from vitreous.speed.timing import one_thread
from vitreous.tape import Needs, Plan, record
from vitreous.tape.diagnosis import missing_linear_part
from vitreous.web.image_service import block_rows

# As in test_literal: rounding is five digits smaller, any missing or doubled term far larger.
EXACT = 1e-10


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


# Written out ---------------------------------------------------------------------------------------------------------

MODELS = {
    "LayerScale": {"depth": 4, "seed": 1},
    "registers": {"depth": 3, "seed": 2, "reg_tokens": 2, "no_embed_class": True},
    "no LayerScale": {"depth": 3, "seed": 3, "init_values": None},
    "one head": {"depth": 3, "seed": 4, "num_heads": 1},
}
LITERALS = {
    "attin": literal.attin,
    "attin:heads=apart": lambda *block: literal.attin(*block, heads="apart"),
    "attin_residual": literal.attin_residual,
    "attin_residual:norm=following": lambda *block: literal.attin_residual(*block, norm="following"),
    "globenc": literal.globenc,
    "alti": literal.alti,
    "alti:zero=farthest": lambda *block: literal.alti(*block, zero="farthest"),
    "alti:setting=original": lambda *block: literal.alti(*block, setting="original"),
}


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: name)
def case(request):
    """A model, two images, and the literal forward pass of each."""
    model, pictures = small_case(**MODELS[request.param])
    return model, pictures, [forward.run(model, picture) for picture in pictures]


def with_option(spelling: str, aggregation: str, option: str) -> str:
    name, _, options = spelling.partition(":")
    both = ",".join(part for part in (options, option) if part)
    return f"{name}{aggregation}:{both}" if both else f"{name}{aggregation}"


@torch.no_grad()
def matrices(case, function) -> list[list[Tensor]]:
    """The literal matrix of every image and block."""
    model, _, records = case
    return [[function(model, record, block) for block in range(record.depth)] for record in records]


@pytest.mark.parametrize("spelling", LITERALS)
def test_written_out_matrices_of_all_blocks(case, spelling):
    model, pictures, records = case
    expected = matrices(case, LITERALS[spelling])
    for layer in range(records[0].depth):
        at_layer = with_option(spelling, "", f"layer={layer}")
        with Recorded(model, pictures, at_layer) as view:
            found = whole_matrix(view, at_layer, at_once=True)
        assert largest_difference(found, torch.stack([blocks[layer] for blocks in expected])) < EXACT


@pytest.mark.parametrize("spelling", LITERALS)
def test_written_out_aggregations(case, spelling):
    model, pictures, records = case
    prefix, depth = records[0].prefix, records[0].depth
    identity = torch.eye(len(records[0].tokens[0]), dtype=torch.float64)
    rolled = with_option(spelling, ".rollout", "residual=none")
    halved = with_option(spelling, ".rollout", "residual=half")
    summed, upper = with_option(spelling, ".plus", ""), with_option(spelling, ".skipplus", "")
    found = vitreous.explain(model, pictures, [rolled, halved, summed, upper]).scores
    for image, blocks in enumerate(matrices(case, LITERALS[spelling])):
        product, halves = identity, identity
        for matrix in blocks:
            product, halves = matrix @ product, (identity + matrix) / 2 @ halves
        expected = {rolled: product, halved: halves, summed: sum(blocks), upper: sum(blocks[(depth + 1) // 2 :])}
        for name, matrix in expected.items():
            assert largest_difference(found[name][image], matrix[0, prefix:]) < EXACT, name


def test_defaults_are_the_last_block_of_attin_and_plain_products_of_the_others(case):
    model, pictures, _ = case
    names = {
        "attin": "attin:layer=-1",
        "attin_residual": "attin_residual:layer=-1",
        "globenc": "globenc.rollout:residual=none",
        "alti": "alti.rollout:residual=none,setting=skipplus,zero=length",
    }
    found = vitreous.explain(model, pictures, [*names, *names.values()]).scores
    for short, long in names.items():
        assert torch.equal(found[short], found[long])


def test_the_written_out_parts_add_up_to_the_stream(case):
    """All parts of token i, with the biases of the values, and the output projection's bias are the real token i."""
    model, _, records = case
    with torch.no_grad():
        for block, module in enumerate(model.blocks):
            bias = forward.scaled(module.ls1, module.attn.proj.bias)
            whole = literal.stream_parts(model, records[0], block, biases=True).sum(dim=1) + bias
            assert largest_difference(whole, records[0].middle[block]) < EXACT


# What they promise ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["alti", "alti:zero=farthest", "alti:setting=original"])
def test_alti_shares_out_the_whole_of_every_token(case, spelling):
    model, pictures, records = case
    at_layer = with_option(spelling, "", f"layer={records[0].depth - 1}")
    with Recorded(model, pictures, at_layer) as view:
        shares = whole_matrix(view, at_layer, at_once=True)
    assert (shares >= 0).all()
    torch.testing.assert_close(shares.sum(dim=-1), torch.ones_like(shares[..., 0]), rtol=0, atol=1e-12)
    assert (shares.std(dim=-1) > 1e-3).all()  # equal shares would do it, too


def test_a_token_with_nothing_near_it_has_no_shares_rather_than_nan():
    """LayerScale of 0 and a large feed-forward bias: every part is farther from the output than zero is."""
    model, pictures = small_vit(depth=2, seed=5), random_images(1)
    with torch.no_grad():
        model.blocks[1].ls1.gamma.zero_()
        model.blocks[1].mlp.fc2.weight.zero_()
        model.blocks[1].norm2.weight.zero_()
        # Far on the other side of where the tokens are.
        tokens = forward.run(model, pictures[0]).middle[1]
        model.blocks[1].mlp.fc2.bias.copy_(-100 * tokens[0])
    scores = vitreous.explain(model, pictures, ["alti:layer=1", "alti"]).scores
    for maps in scores.values():
        assert not maps.any()


def test_attin_of_one_head_is_attention_times_the_values_length():
    model, pictures = small_vit(num_heads=1, seed=7), random_images(1)
    record_ = forward.run(model, pictures[0])
    block = model.blocks[-1]
    with torch.no_grad():
        carried = forward.scaled(block.ls1, record_.value[-1][0] @ block.attn.proj.weight.T)
        expected = record_.attention[-1][0][0] * carried.norm(dim=-1)
    for spelling in ("attin", "attin:heads=apart"):
        scores = vitreous.explain(model, pictures, spelling).scores[spelling]
        assert largest_difference(scores[0], expected[1:]) < EXACT


def test_heads_together_are_no_longer_than_heads_apart():
    """||Σ_h|| <= Σ_h ||: the triangle inequality, and three heads that do not point the same way."""
    model, pictures = small_vit(seed=8), random_images(2)
    scores = vitreous.explain(model, pictures, ["attin", "attin:heads=apart"]).scores
    assert (scores["attin"] < 3 * scores["attin:heads=apart"]).all()


def test_value_biases_count_in_attin_and_not_in_globenc():
    model, pictures = small_vit(depth=1, seed=9), random_images(1)
    names = ["attin", "alti:setting=original", "globenc", "alti"]
    before = vitreous.explain(model, pictures, names).scores
    with torch.no_grad():
        # A bias of the values that the output projection's takes back: the model stays the same function.
        block = model.blocks[0].attn
        block.qkv.bias[48:] += 1
        block.proj.bias -= block.proj.weight.sum(dim=1)
    after = vitreous.explain(model, pictures, names).scores
    for name in names:
        assert (largest_difference(after[name], before[name]) < EXACT) == (name in {"globenc", "alti"}), name


@pytest.mark.parametrize("spelling", [*LITERALS, "globenc.skipplus", "alti.plus"])
def test_a_batch_gives_what_single_images_give(spelling):
    model, pictures = small_vit(seed=10), random_images(3)
    together = vitreous.explain(model, pictures, spelling).scores[spelling]
    for index, picture in enumerate(pictures):
        alone = vitreous.explain(model, picture[None], spelling).scores[spelling]
        assert largest_difference(alone[0], together[index]) < EXACT


def test_several_pieces_give_what_one_gives(monkeypatch):
    """Pieces of rows and of columns, both smaller than the 17 tokens and not dividing them."""
    model, pictures = small_vit(seed=11), random_images(2)
    whole = vitreous.explain(model, pictures, list(LITERALS)).scores
    monkeypatch.setattr("vitreous.tape.attention.record._PIECE", 2 * 3 * 17 * 5)
    monkeypatch.setattr("vitreous.methods.contributions._CACHED", 5 * 24 * 3)
    pieces = vitreous.explain(model, pictures, list(LITERALS)).scores
    for spelling in LITERALS:
        assert largest_difference(pieces[spelling], whole[spelling]) < EXACT


def test_a_deep_rollout_of_lengths_keeps_within_float32_by_a_power_of_2():
    """Lengths multiply: rows that sum to some hundreds leave float32's range within 16 blocks. Others stay as they are.

    1e-4 as in test_tape: float32 rounds at 6e-8, and 24 blocks add up some hundred roundings.
    """
    model, pictures = small_vit(depth=24, seed=12), random_images(2)
    with torch.no_grad():
        model.blocks[0].ls1.gamma *= 30
    names = ["globenc", "globenc:depth=3"]
    exact = vitreous.explain(model, pictures, names).scores
    assert exact["globenc"].amax() > 1e3 * torch.finfo(torch.float32).max
    single = vitreous.explain(model.float(), pictures.float(), names).scores
    factor = exact["globenc"].amax(dim=1) / single["globenc"].amax(dim=1)
    assert single["globenc"].dtype == torch.float32
    assert (factor > 2).all()
    assert largest_difference(factor.log2(), factor.log2().round()) < 1e-4
    assert largest_difference(single["globenc"] * factor[:, None], exact["globenc"]) < 1e-4
    assert largest_difference(single["globenc:depth=3"], exact["globenc:depth=3"]) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_the_same_picture(dtype):
    """Half precision has 3 digits (bfloat16: 2); the maps' shape survives, which a wrong part would not."""
    model, pictures = golden_model()
    names = ["attin", "attin_residual", "globenc.skipplus", "alti", "alti:setting=original"]
    exact = vitreous.explain(model, pictures, names).scores
    half = vitreous.explain(model.to(dtype), pictures.to(dtype), names).scores
    for name in names:
        assert largest_difference(half[name], exact[name]) < 0.1, name


@pytest.mark.parametrize("spelling", ["alti", "globenc", "tokentm"])
def test_weights_are_those_of_the_run(spelling):
    """A pruned layer computes its weight when it runs: what stood there before is older than weights loaded since."""

    def pruned(seed):
        model = small_vit(seed=seed)
        for block in model.blocks:
            for part, name in ((block.attn.qkv, "weight"), (block.attn.proj, "weight"), (block.ls1, "gamma")):
                prune.l1_unstructured(part, name, 0.3)
        return model

    trained, loaded, pictures = pruned(seed=17), pruned(seed=18), random_images(1)
    loaded.load_state_dict(trained.state_dict())
    found = vitreous.explain(loaded, pictures, spelling, 1).scores[spelling]
    for block in trained.blocks:
        for part, name in ((block.attn.qkv, "weight"), (block.attn.proj, "weight"), (block.ls1, "gamma")):
            prune.remove(part, name)
    expected = vitreous.explain(trained, pictures, spelling, 1).scores[spelling]
    assert torch.equal(found, expected)  # the same operations


# Refusals ------------------------------------------------------------------------------------------------------------


class NormedValues(nn.Module):
    """Attention whose values are not what qkv gives: they have a norm of their own."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.qkv, self.proj, self.num_heads = attention.qkv, attention.proj, attention.num_heads

    def forward(self, tokens: Tensor, **_: object) -> Tensor:
        batch, count, width = tokens.shape
        query, key, value = self.qkv(tokens).reshape(batch, count, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        value = nn.functional.normalize(value, dim=-1)
        output = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.proj(output.transpose(1, 2).reshape(batch, count, width))


def test_values_that_are_no_linear_map_are_seen_and_refused():
    model, pictures = small_vit(seed=13), random_images(1)
    for block in model.blocks:
        block.attn = NormedValues(block.attn)
    with pytest.raises(UnsupportedModelError, match=r"globenc .*lead from the first norm to the values.*attin"):
        vitreous.explain(model, pictures, "globenc")
    # These take the values as they are.
    scores = vitreous.explain(model, pictures, ["attin", "alti:setting=original"]).scores
    assert all(torch.isfinite(maps).all() for maps in scores.values())


# Every read-out that takes W_O from the weights.
BY_PROJECTION = ("tokentm", "bi_token", "attin", "attin_residual", "globenc", "alti", "alti:setting=original")


class OwnBlock(nn.Module):
    """A pre-norm block by the usual names that has its own way ``how`` to add up the parts."""

    def __init__(self, block, how):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = block.norm1, block.attn, block.norm2, block.mlp
        self.how = how

    def forward(self, tokens: Tensor) -> Tensor:
        return self.how(self, tokens)


def sequential(scale=None):
    """x + scale f(x) under no name that is known, as ReZero and LayerScale have it."""

    def forward(block, tokens):
        attended = block.attn(block.norm1(tokens))
        tokens = tokens + (attended if scale is None else scale * attended)
        return tokens + block.mlp(block.norm2(tokens))

    return forward


def in_place(block, tokens):
    tokens = tokens.clone()
    tokens += block.attn(block.norm1(tokens))
    return tokens + block.mlp(block.norm2(tokens))


PARALLEL = {
    "left to right": lambda block, tokens: tokens + block.attn(block.norm1(tokens)) + block.mlp(block.norm1(tokens)),
    "parts first": lambda block, tokens: tokens + (block.mlp(block.norm1(tokens)) + block.attn(block.norm1(tokens))),
    "attention last": lambda block, tokens: tokens + block.mlp(block.norm1(tokens)) + block.attn(block.norm1(tokens)),
}


def own_blocks(how, **options):
    model = small_vit(init_values=None, seed=15, **options)
    model.blocks = nn.Sequential(*(OwnBlock(block, how) for block in model.blocks))
    return model


@pytest.mark.parametrize("spelling", BY_PROJECTION)
def test_a_factor_under_an_unknown_name_counts_with_the_projection(spelling):
    """The same logits, and the same maps, as with the factor folded into W_O."""
    scale = torch.rand(24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for factor in (scale, torch.tensor(0.9, dtype=torch.float64)):
        folded = own_blocks(sequential())
        for block in folded.blocks:
            block.attn.proj.weight.data *= factor.expand(24)[:, None]
            block.attn.proj.bias.data *= factor
        images = random_images()
        # Float64: the same sums in another order.
        scaled = own_blocks(sequential(factor))
        torch.testing.assert_close(folded(images), scaled(images), rtol=1e-11, atol=1e-12)
        expected, found = (vitreous.explain(model, images, spelling).scores[spelling] for model in (folded, scaled))
        assert largest_difference(found, expected) < 1e-9


def test_rows_of_a_block_show_no_contributions_where_attin_is_refused():
    images = random_images()[:1]
    assert block_rows(own_blocks(sequential()), images, 1).contribution is not None
    adapted = own_blocks(sequential())
    for block in adapted.blocks:
        block.attn.proj = LowRankAdapted(block.attn.proj)
    rows = block_rows(adapted, images, 1)
    assert rows.contribution is None
    assert rows.attention.isfinite().all()


class LowRankAdapted(nn.Linear):
    """A linear layer that gives a few per cent more than its weight says."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, dtype=torch.float64)
        self.load_state_dict(linear.state_dict())
        generator = torch.Generator().manual_seed(1)
        self.update = 0.1 * torch.randn(2, 24, generator=generator, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + tokens @ self.update.T @ self.update.flip(0)


@pytest.mark.parametrize("spelling", BY_PROJECTION)
@pytest.mark.parametrize("how", [sequential(), PARALLEL["parts first"]])
def test_a_projection_with_a_forward_of_its_own_is_seen_and_refused(spelling, how):
    model = own_blocks(how)
    for block in model.blocks:
        block.attn.proj = LowRankAdapted(block.attn.proj)
    with pytest.raises(
        UnsupportedModelError, match=r"no linear map leads|adds attention and feed-forw|norm between attention"
    ) as refusal:
        vitreous.explain(model, random_images(), spelling)
    assert "gae" in str(refusal.value)


@pytest.mark.parametrize("how", [*PARALLEL.values(), in_place, sequential()], ids=[*PARALLEL, "in place", "sequential"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_ways_to_add_up_a_block_are_known_in_every_precision(how, dtype):
    model, pictures = own_blocks(how).to(dtype), random_images(dtype=dtype)
    for spelling in ("attin.rollout", "attin_residual"):
        assert vitreous.explain(model, pictures, spelling).scores[spelling].isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            vitreous.explain(model.float(), pictures.float(), "attin.rollout").scores["attin.rollout"].isfinite().all()
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_scale_that_half_precision_nearly_loses_is_still_known(dtype):
    model, pictures = small_vit(seed=17), random_images()
    for block in model.blocks:
        block.ls1.gamma.data.mul_(1e-5)
    whole = vitreous.explain(model, pictures, "attin").scores["attin"]
    rounded = vitreous.explain(model.to(dtype), pictures.to(dtype), "attin").scores["attin"]
    # Half precision: some per cent of the largest score. LayerScale times weight in float16 would lose half of them.
    assert largest_difference(rounded, whole) < 0.1


def test_pictures_of_one_colour_have_tokens_that_differ_by_rounding_alone():
    """No position embedding: all patches are the same token, and no difference of two of them says anything."""
    model = small_vit(class_token=False, global_pool="avg", seed=16)
    model.pos_embed.data.zero_()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        grey = torch.full((2, 3, 32, 32), 0.3, dtype=dtype)
        assert vitreous.explain(model.to(dtype), grey, "attin.rollout").scores["attin.rollout"].isfinite().all()


class TanhNorm(nn.Module):
    """A norm that is no linear map even with its deviation held fixed."""

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(tokens)


def test_norms_that_are_no_linear_map_are_refused():
    model, pictures = small_vit(seed=14), random_images(1)
    for block in model.blocks:
        block.norm2 = TanhNorm()
    for spelling in ("globenc", "alti", "attin_residual:norm=following"):
        with pytest.raises(
            UnsupportedModelError, match=r"norm .*block \d was not found, or it is neither LayerNorm nor RMSNorm"
        ):
            vitreous.explain(model, pictures, spelling)
    assert torch.isfinite(vitreous.explain(model, pictures, "attin_residual").scores["attin_residual"]).all()


class OwnNorm(nn.Module):
    """A norm as people write it, its eps a number in the code."""

    def __init__(self, width: int, *, centred: bool = False, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.centred, self.offset = nn.Parameter(torch.ones(width)), centred, offset

    def forward(self, tokens: Tensor) -> Tensor:
        if self.centred:
            tokens = tokens - tokens.mean(-1, keepdim=True)
        return tokens * (tokens.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * (self.offset + self.weight)


OWN_NORMS = {
    "timm's, in float32": (RmsNormFp32, nn.RMSNorm, 0.0),
    "transformers' eps": (partial(Aimv2RMSNorm, eps=1e-6), nn.RMSNorm, 0.0),
    "eps in the code": (OwnNorm, nn.RMSNorm, 0.0),
    "1 + weight": (partial(OwnNorm, offset=1.0), nn.RMSNorm, 1.0),
    "LayerNorm": (partial(OwnNorm, centred=True), partial(nn.LayerNorm, bias=False), 0.0),
}


@pytest.mark.parametrize("name", OWN_NORMS)
def test_norms_are_known_by_what_they_do(name):
    own, of_torch, offset = OWN_NORMS[name]
    same, pictures = small_vit(seed=15), random_images(2)
    model = copy.deepcopy(same)
    for block, block_of_torch in zip(model.blocks, same.blocks, strict=True):
        for part in ("norm1", "norm2"):
            width = getattr(block, part).weight.numel()
            weight = torch.linspace(0.5, 1.5, width)
            for owner, norm, values in (
                (block, own(width), weight - offset),
                (block_of_torch, of_torch(width, eps=1e-6), weight),
            ):
                norm.weight.data.copy_(values)
                setattr(owner, part, norm.double())
                assert linear_norm(norm).eps == pytest.approx(1e-6, rel=1e-4)  # measured in float32 by some
    for spelling in ("globenc", "alti"):
        expected = vitreous.explain(same, pictures, spelling).scores[spelling]
        # timm's and transformers' norms compute in float32, whatever they are given.
        assert largest_difference(vitreous.explain(model, pictures, spelling).scores[spelling], expected) < 1e-5


def test_a_run_that_was_recorded_for_others_can_still_be_asked_what_would_work():
    model, pictures = small_vit(depth=2), random_images(1)
    architecture = find_architecture(model, pictures)
    with record(model, architecture, pictures, Plan(architecture.depth, Needs())) as tape:
        assert missing_linear_part(tape, parse("globenc").needs(tape.depth)) is None
