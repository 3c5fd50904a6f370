"""What methods may cost, in operations and not in time: passes, products, softmaxes, attention matrices, bytes.

These are the counts of the present code. Where one is above the least that the method needs, a comment says by what; a
change that raises a count has to say why.
"""

import pytest
import torch

import vitreous
from operations import Operations, count_operations
from small_models import CLASSES, random_images, small_vit
from vitreous.methods import list_methods
from vitreous.methods.spelling import cost_of

DEPTH, WIDTH, HEADS, TOKENS, BATCH = 6, 24, 3, 17, 2
NONE, ALL = (0,) * DEPTH, (4,) * DEPTH  # products of a gradient with weights: qkv, projection, two of the MLP
TO_FIRST_ATTENTION = (3, *(4,) * (DEPTH - 1))  # the gradient at O of block 0 has not passed its qkv
UPPER_HALF = (0, 0, 0, 4, 4, 4)
LAST_ATTENTION = (0, 0, 0, 0, 0, 3)
LINEAR_FLOPS = 2 * BATCH * TOKENS * 12 * WIDTH**2  # of one block; 12 d²: qkv 3, projection 1, MLP 8
ATTENTION_PRODUCT_FLOPS = 2 * BATCH * TOKENS**2 * WIDTH  # q kᵀ or A v of all heads
HEAD_FLOPS = 2 * BATCH * WIDTH * CLASSES
EMBEDDING_FLOPS = 2 * BATCH * (TOKENS - 1) * WIDTH * 3 * 8 * 8
ONE_RUN = [info.name for info in list_methods() if cost_of(info.name).one_run]
FUSED_ALL_THE_WAY = ["ixg", "ixg.plus", "gradient", "cat", "fullgrad", "fullgrad_plus"]


@pytest.fixture(scope="module")
def model():
    """Without LayerScale and with parameters that ask for gradients, as any freshly made model has them.

    It has been explained before: the first time a model is asked about pictures of some size, its grid is looked at.
    """
    fresh = small_vit(depth=DEPTH, init_values=None)
    explained(fresh, "rollout")
    return fresh


def explained(model, *spellings: str, **options) -> Operations:
    return count_operations(
        model, random_images(BATCH), lambda: vitreous.explain(model, random_images(BATCH), spellings, 0, **options)
    )


def forward_backward(model, *, frozen: bool) -> Operations:
    def job() -> None:
        model.requires_grad_(not frozen)
        pixels = random_images(BATCH).requires_grad_()
        model(pixels)[:, 0].sum().backward()

    try:
        return count_operations(model, random_images(BATCH), job)
    finally:
        model.requires_grad_(requires_grad=True).zero_grad()


def test_plain_passes_are_counted_as_written_down(model):
    with torch.no_grad():
        forward = count_operations(model, random_images(BATCH), lambda: model(random_images(BATCH)))
    assert forward.forward_passes == 1
    assert forward.block_calls == (1,) * DEPTH
    assert forward.backward_products == NONE
    blocks = DEPTH * (LINEAR_FLOPS + 2 * ATTENTION_PRODUCT_FLOPS)
    assert forward.forward_flops == EMBEDDING_FLOPS + blocks + HEAD_FLOPS
    assert forward.backward_flops == forward.softmaxes == forward.attention_matrices == 0

    both = forward_backward(model, frozen=True)
    assert both.backward_products == ALL
    assert both.head_products == 1
    assert both.weight_gradients == 0
    # Fused attention keeps no A: q kᵀ once more, then dv, dA, dq and dk.
    blocks = DEPTH * (LINEAR_FLOPS + 5 * ATTENTION_PRODUCT_FLOPS)
    assert both.backward_flops == EMBEDDING_FLOPS + blocks + HEAD_FLOPS


def test_gradients_of_weights_are_seen(model):
    assert forward_backward(model, frozen=False).weight_gradients == 4 * DEPTH + 1


def test_inference_mode_hides_nothing(model):
    def run(mode) -> Operations:
        with mode():
            return count_operations(model, random_images(BATCH), lambda: model(random_images(BATCH)))

    assert run(torch.inference_mode).forward_flops == run(torch.no_grad).forward_flops


def test_softmaxes_and_matrices_are_seen_in_attention_that_is_not_fused():
    model = small_vit(depth=2)
    for block in model.blocks:
        block.attn.fused_attn = False
    with torch.no_grad():
        found = count_operations(model, random_images(1), lambda: model(random_images(1)))
    assert found.softmaxes == 2
    assert found.attention_matrices == 4  # scores and A


def test_bytes_are_those_of_tensors_alive_together(model):
    def job() -> None:
        first = torch.zeros(1000)
        second = first + 1
        second += 1  # in place
        del first
        views = second[:500].view(5, 100)
        third = views * 2
        del second, views, third

    found = count_operations(model, random_images(BATCH), job)
    assert found.peak_bytes == 8000  # first and second; later second and half as much
    assert found.largest_tensor == 4000


@pytest.mark.parametrize(
    ("spelling", "backward_products", "softmaxes", "matrices"),
    [
        # Fused attention in both directions: nothing of ours is as large as A.
        ("ixg", ALL, 0, 0),
        ("ixg.plus", ALL, 0, 0),
        ("fullgrad_plus", ALL, 0, 0),
        ("ixg.skipplus", UPPER_HALF, 0, 0),
        # Above the least by one softmax and one matrix per block: Aᵀ dO rebuilds A, which the forward pass had fused.
        ("decompx", ALL, DEPTH, DEPTH),
        ("decompx.plus", ALL, DEPTH, DEPTH),
        ("decompx.skipplus", UPPER_HALF, 3, 3),
        # One softmax per block below the last and one for the class token's row in it. Above the least by the mean over
        # heads, a matrix per block: maps could be multiplied with every head's A and averaged then.
        ("gradtoken", LAST_ATTENTION, DEPTH, 2 * (DEPTH - 1)),
        ("gradtoken:propagation=none", LAST_ATTENTION, 1, 0),
        # Only the class token's rows are read, and nothing else of A is built.
        ("raw_attention", NONE, 1, 0),
        ("attcam", LAST_ATTENTION, 1, 0),
        ("gradsam", TO_FIRST_ATTENTION, DEPTH, 0),
        # A once per block and its mean over heads; of the last block one row.
        ("rollout", NONE, DEPTH, 2 * (DEPTH - 1)),
        # A once per block below the last; in the backward pass of those but the first dA and the gradient of the
        # scores; to be read dA once more (one above the least: it is gone by then) and its mean over heads.
        ("gae", TO_FIRST_ATTENTION, DEPTH, 3 * (DEPTH - 1) + 2 * (DEPTH - 2)),
        # Its other softmax per block is over the tokens' cosines (NECC), one row for every head.
        ("tokentm", TO_FIRST_ATTENTION, 2 * DEPTH, 3 * (DEPTH - 1) + 2 * (DEPTH - 2)),
    ],
)
def test_methods_do_no_more_than_this(model, spelling, backward_products, softmaxes, matrices):
    found = explained(model, spelling)
    assert found.forward_passes == 1
    assert found.block_calls == (1,) * DEPTH
    assert found.backward_products == backward_products
    assert found.softmaxes == softmaxes
    assert found.attention_matrices == matrices
    # Where the head's gradient lands shows which tokens it reads: one product besides that of the backward pass.
    assert found.head_products == 1 + any(backward_products)


def test_the_first_explanation_embeds_fourteen_pictures_and_runs_two_more_and_no_other_does():
    model = small_vit(depth=DEPTH, init_values=None)
    first, second = explained(model, "rollout"), explained(model, "ixg")
    assert first.forward_passes == 3  # begun: one of them ends in front of the blocks
    assert first.block_calls == (2,) * DEPTH
    assert second.block_calls == (1,) * DEPTH
    assert second.forward_passes == 1
    plain = explained(model, "rollout")
    run = EMBEDDING_FLOPS + DEPTH * (LINEAR_FLOPS + 2 * ATTENTION_PRODUCT_FLOPS) + HEAD_FLOPS
    more, expected = first.forward_flops - plain.forward_flops, 14 * EMBEDDING_FLOPS // BATCH + 2 * run // BATCH
    assert expected <= more <= 1.05 * expected  # besides, the receptive fields of eight tokens are summed
    assert first.backward_flops - plain.backward_flops == 14 * EMBEDDING_FLOPS // BATCH


@pytest.mark.parametrize("spelling", FUSED_ALL_THE_WAY)
def test_methods_that_need_no_attention_do_the_plain_passes_and_nothing_else(model, spelling):
    found, plain = explained(model, spelling), forward_backward(model, frozen=True)
    assert found.forward_flops == plain.forward_flops
    # The picture's own gradient is not needed; the head is asked which tokens it reads.
    assert found.backward_flops == plain.backward_flops - EMBEDDING_FLOPS + HEAD_FLOPS


def test_the_frozen_rule_costs_less_than_a_plain_backward_pass(model):
    found = explained(model, "decompx")
    # Through attention only Aᵀ dO, and q kᵀ once more to rebuild A.
    blocks = DEPTH * (LINEAR_FLOPS + 2 * ATTENTION_PRODUCT_FLOPS)
    assert found.backward_flops == blocks + 2 * HEAD_FLOPS
    assert explained(model, "decompx.skipplus").backward_flops == blocks // 2 + 2 * HEAD_FLOPS


@pytest.mark.parametrize("spelling", ONE_RUN)
def test_no_method_computes_gradients_of_weights(model, spelling):
    found = explained(model, spelling)
    assert found.weight_gradients == 0
    assert found.forward_passes == 1


def test_ten_methods_share_one_forward_pass_and_one_backward_pass_per_rule(model):
    plain = ["ixg", "cat", "gae", "gradsam", "attcam", "gradtoken", "rollout", "attcat"]
    together = explained(model, *plain, "decompx", "decompx.skipplus")
    assert together.forward_passes == 1
    assert together.block_calls == (1,) * DEPTH
    assert together.backward_products == (8,) * DEPTH  # plain and frozen
    assert together.softmaxes == DEPTH


def test_several_targets_share_one_forward_pass(model):
    found = count_operations(
        model,
        random_images(BATCH),
        lambda: vitreous.explain(model, random_images(BATCH), ["decompx.skipplus"], topk=CLASSES),
    )
    assert found.forward_passes == 1
    assert found.block_calls == (1,) * DEPTH


@pytest.mark.parametrize("spelling", ["ixg", "decompx", "gradtoken", "decompx.skipplus", "rollout", "gae", "tokentm"])
def test_peak_of_tensors_stays_near_that_of_a_plain_pass(spelling):
    model = small_vit(depth=DEPTH, img_size=128, init_values=None)  # 257 tokens: A is larger than the stream
    images = torch.randn(1, 3, 128, 128, dtype=torch.float64)

    def plain() -> None:
        pixels = images.clone().requires_grad_()
        model(pixels)[:, 0].sum().backward()

    model.requires_grad_(requires_grad=False)
    vitreous.explain(model, images, spelling, 0)  # the first time, architecture and places are looked for
    baseline = count_operations(model, images, plain).peak_bytes
    found = count_operations(model, images, lambda: vitreous.explain(model, images, spelling, 0)).peak_bytes
    assert found < 2.5 * baseline
