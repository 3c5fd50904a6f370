"""Rules: the gradient that each one means, on literal forward passes and in peers, and that they do not mix.

``EXACT``: the same float64 arithmetic in another order, as in ``test_literal``.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import vitreous
from golden_numbers import PATCHES, assert_agrees, golden
from literal.ruled import run_under
from small_models import golden_model, largest_difference, random_images, randomise, small_vit
from vitreous.errors import MethodError
from vitreous.methods import method_info
from vitreous.speed.peers import LXT
from vitreous.speed.timing import one_thread
from vitreous.tape.attention import AttentionRecord, attend_fused, plain_gradients
from vitreous.tape.recording import interception as ops
from vitreous.tape.rules import RULES
from vitreous.tape.rules.autograd import ActiveRule, Product
from vitreous.tape.rules.gradient_rules import ElementwiseCall
from whole_maps import all_token_scores

EXACT = 1e-10
DEPTH = 3
STREAM_RULES = ["plain", "frozen", "libra", "attnlrp", "conservative"]
ALL_RULES = [*STREAM_RULES, "residual"]
# Read-outs of a stream, and of the attention's gradient, with the option that they share.
STREAM_METHODS = [
    *("gradient", "ixg", "cat", "attixg", "attcat", "fullgrad", "fullgrad_plus", "gradcam", "gradcampp"),
    *("xgradcam", "xgradcam_abs", "hirescam", "layercam", "gradcam_elementwise"),
]
ATTENTION_METHODS = ["gae", "gradsam", "attcam", "tokentm", "gradtoken:heads=average"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


def spelled(method: str, **options: object) -> str:
    tail = ",".join(f"{option}={value}" for option, value in options.items())
    return f"{method}{',' if ':' in method else ':'}{tail}"


# What each rule means -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[0.5, None], ids=["LayerScale", "no LayerScale"])
def literal_case(request):
    model = small_vit(depth=DEPTH, seed=5, init_values=request.param)
    images = random_images(2, seed=5)
    return model, images, {rule: [run_under(rule, model, image) for image in images] for rule in ALL_RULES}


def test_rules_leave_the_forward_pass_alone(literal_case):
    model, images, runs = literal_case
    explanation = vitreous.explain(model, images, [f"gae:rule={rule}" for rule in ALL_RULES])
    assert largest_difference(explanation.logits, model(images)) < 1e-14
    for records in runs.values():
        assert largest_difference(torch.stack([record.logits for record in records]), model(images)) < 1e-12


@pytest.mark.parametrize("rule", STREAM_RULES)
def test_input_times_gradient_is_the_literal_one(literal_case, rule):
    """With the class token: the patches' own scores nearly vanish in the last block under the plain rule."""
    model, images, runs = literal_case
    for layer in range(DEPTH):
        scores, _ = all_token_scores(model, images, f"ixg:rule={rule},layer={layer}", 3)
        expected = torch.stack([record.input_times_gradient(layer, 3) for record in runs[rule]])
        assert largest_difference(scores, expected) < EXACT


@pytest.mark.parametrize("rule", ALL_RULES)
def test_attention_times_gradient_is_the_literal_one(literal_case, rule):
    model, images, runs = literal_case
    methods = [f"gae:rule={rule},layer={layer}" for layer in range(DEPTH)]
    scores = vitreous.explain(model, images, methods, 3).scores
    for layer, method in enumerate(methods):
        expected = torch.stack([record.attention_times_gradient(layer, 3)[1:] for record in runs[rule]])
        assert largest_difference(scores[method], expected) < EXACT


def test_literal_rules_differ_but_for_libra_without_gated_products(literal_case):
    """Where two rules give the same, comparing with the literal one of either proves nothing."""
    _, _, runs = literal_case
    maps = {rule: runs[rule][0].attention_times_gradient(0, 3) for rule in ALL_RULES}
    for one, other in itertools.combinations(ALL_RULES, 2):
        difference = largest_difference(maps[one], maps[other])
        assert difference < EXACT if {one, other} == {"frozen", "libra"} else difference > 1e-2


def test_methods_are_the_rule_with_a_read_out():
    model, images = small_vit(), random_images()
    same = {
        "attnlrp": "ixg:rule=attnlrp",
        "conservative_lrp": "ixg:rule=conservative",
        "decompx": "ixg:rule=frozen",
        "decompx.plus": "cat:rule=libra",
        "decompx:bias=token": "fullgrad:rule=libra",
        "gradsam:rule=libra": "gae.plus:rule=libra",
        "attcat:rule=libra": "attixg.plus:rule=libra",
    }
    scores = vitreous.explain(model, images, [*same, *same.values()]).scores
    for one, other in same.items():
        assert largest_difference(scores[one], scores[other]) < EXACT, one


@pytest.mark.parametrize("method", [*STREAM_METHODS, *ATTENTION_METHODS])
def test_every_gradient_method_takes_rules_and_rules_do_not_mix(method):
    """One recording serves all rules: what they give together is what each gives alone, and none is the plain one."""
    model, images = small_vit(depth=2), random_images()
    rules = ALL_RULES if method in ATTENTION_METHODS else STREAM_RULES
    # The lower of the two blocks, where a gradient has passed everything that rules treat.
    options = {} if method in {"gae", "gradsam", "cat", "attcat", "tokentm", "fullgrad_plus"} else {"layer": 0}
    methods = {rule: spelled(method, rule=rule, **options) for rule in rules}
    together = vitreous.explain(model, images, list(methods.values()), 2).scores
    for rule in rules:
        alone = vitreous.explain(model, images, methods[rule], 2).scores[methods[rule]]
        assert largest_difference(together[methods[rule]], alone) < EXACT
        assert rule == "plain" or largest_difference(alone, together[methods["plain"]]) > 1e-4


@pytest.mark.parametrize("method", STREAM_METHODS)
def test_a_rule_that_cuts_attention_is_refused_where_only_the_stream_is_read(method):
    with pytest.raises(MethodError, match=r"rule=residual is not one of .*under residual no gradient would reach"):
        vitreous.explain(small_vit(), random_images(), spelled(method, rule="residual"))
    with pytest.raises(MethodError, match="rule=residual no gradient passes through attention"):
        method_info(method).make().under("residual")


def test_unknown_rules_are_refused_with_those_that_there_are():
    with pytest.raises(MethodError, match=r"not one of plain, frozen, libra, .*did you mean libra"):
        vitreous.explain(small_vit(), random_images(), "gae:rule=libre")


def test_decompx_has_no_other_rule():
    with pytest.raises(MethodError, match="unknown option 'rule'; it takes bias"):
        vitreous.explain(small_vit(), random_images(), "decompx:rule=plain")


@pytest.mark.parametrize(("rule", "share"), [("libra", 0.5), ("attnlrp", 0.5), ("frozen", 1), ("plain", 1)])
def test_factors_of_a_product_get_their_share(rule, share):
    """Also where a factor is broadcast, and its gradient is a sum."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((2, 3, 4), (3, 1)))
    left, right = left.requires_grad_(), right.requires_grad_()
    slope = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    found = torch.autograd.grad(Product.apply(left, right, ActiveRule(RULES[rule])), (left, right), slope)
    expected = torch.autograd.grad(left * right, (left, right), slope)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, share * other)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (F.gelu, lambda values: 0.5 * (1 + torch.erf(values / 2**0.5))),
        (torch.tanh, lambda values: (values.tanh() / values).nan_to_num(1.0)),
        (torch.sigmoid, lambda values: ((values.sigmoid() - 0.5) / values).nan_to_num(0.25)),
        (F.softplus, lambda values: (torch.log((1 + values.exp()) / 2) / values).nan_to_num(0.5)),
    ],
)
def test_an_activation_held_constant_is_its_slope_from_zero(function, expected):
    """Also at 0 and next to it, where f(u)/u of a function that is not 0 at 0 has no bound."""
    values = torch.tensor([-3.0, -0.4, 0.0, 1e-12, 0.7, 5.0], dtype=torch.float64)
    slope = ops.ACTIVATIONS.get(function, ops.GATES.get(function))
    call = ElementwiseCall(values, function, slope, float(function(torch.zeros((), dtype=torch.float64))))
    found = RULES["libra"].backward_activation(call, torch.full_like(values, 2.0))
    # The expected value itself is a difference that is rounded at 1e-16, and divided by 1e-12.
    torch.testing.assert_close(found, 2 * expected(values), rtol=1e-3, atol=1e-12)


# Goldens and peers ----------------------------------------------------------------------------------------------------


def test_conservative_lrp_of_the_skipplus_authors():
    stored = golden("alilrp_gradinput_as_coded_by_skipplus_authors")["tokens17"]
    assert_agrees("conservative_lrp", stored[..., PATCHES])


def torchvision_vit() -> nn.Module:
    from torchvision.models.vision_transformer import VisionTransformer

    return randomise(VisionTransformer(32, 8, 3, 3, 24, 48, num_classes=5), 4).double().eval()


def lxt_relevance(model: nn.Module, images: torch.Tensor, target: int) -> torch.Tensor:
    """Input x gradient at the first block, of a model whose parts lxt has patched."""
    caught = []

    def catch(_, arguments):
        caught.append(arguments[0].detach().requires_grad_())
        return (caught[0],)

    hook = model.encoder.layers[0].register_forward_pre_hook(catch)
    logits = model(images)
    hook.remove()
    (slope,) = torch.autograd.grad(logits[:, target].sum(), caught)
    return (caught[0] * slope).sum(dim=-1).detach()


@pytest.mark.parametrize("method", ["attnlrp", "decompx"])
def test_agrees_with_lxt_on_torchvisions_vit(method, monkeypatch):
    """lxt patches classes; here its patches are put on and taken off again by hand.

    Its own map for torchvision holds the attention matrix constant, which is the frozen rule. Its rule for q, k and v
    (AttnLRP proper) is put on the attention call that torchvision's model makes.
    """
    if LXT.problem:
        pytest.skip(LXT.problem)
    patches = LXT.load()
    model, images = torchvision_vit(), random_images()
    scores = vitreous.explain(model, images, [method, "ixg"], 3).scores
    monkeypatch.setattr(nn.LayerNorm, "forward", patches.layer_norm_forward)
    monkeypatch.setattr(nn.GELU, "original_forward", nn.GELU.forward, raising=False)
    monkeypatch.setattr(nn.GELU, "forward", patches.non_linear_forward)
    if method == "attnlrp":
        fused = F.scaled_dot_product_attention
        wrapped = patches.wrap_attention_forward(lambda _, *args, **kwargs: fused(*args, **kwargs))
        monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: wrapped(None, *args, **kwargs))
    else:
        attention = nn.MultiheadAttention
        monkeypatch.setattr(attention, "original_forward", attention.forward, raising=False)
        monkeypatch.setattr(attention, "forward", patches.cp_multi_head_attention_forward)
    expected = lxt_relevance(model, images, 3)[:, 1:]
    # lxt divides by u + 1e-10 where the gate is f(u)/u, and u may be as small as 1e-4.
    assert largest_difference(scores[method], expected) < 1e-6
    assert largest_difference(scores["ixg"], expected) > 1e-2


# Precision ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ixg:rule=libra", "attnlrp", "conservative_lrp", "fullgrad_plus:rule=libra"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 0.01), (torch.bfloat16, 0.1)])
def test_half_precision_gives_the_map_of_float64(method, dtype, tolerance):
    """Of the size of the map: the dtypes keep 3 and 2 digits, and some hundred roundings add up in four blocks."""
    model, images = golden_model()
    exact = vitreous.explain(model, images, method, 3).scores[method]
    rough = vitreous.explain(model.to(dtype), images.to(dtype), method, 3).scores[method]
    assert rough.dtype == torch.float32
    assert float((rough - exact).norm() / exact.norm()) < tolerance


@pytest.mark.parametrize("masked", [False, True])
def test_the_fused_kernel_gives_the_gradients_of_the_attention_that_is_rebuilt(masked):
    generator = torch.Generator().manual_seed(5)
    query, key, value, gradient = torch.randn(4, 2, 3, 19, 8, dtype=torch.float64, generator=generator)
    hidden = torch.zeros(2, 1, 1, 19, dtype=torch.float64)
    hidden[1, ..., 13:] = float("-inf")
    record = AttentionRecord(query, key, value, 0.3, hidden if masked else None)
    rebuilt = plain_gradients(record, gradient)
    record.fused = attend_fused(record)
    assert record.fused is not None
    torch.testing.assert_close(record.fused.output, record.rows(slice(None)) @ value, rtol=1e-12, atol=1e-13)
    for _ in range(2):  # one recording serves several backward passes
        for one, other in zip(plain_gradients(record, gradient), rebuilt, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_without_a_fused_kernel_attention_is_rebuilt_in_pieces():
    query, key, value = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attend_fused(AttentionRecord(query, key, value, 0.5)) is None
