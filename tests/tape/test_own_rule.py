"""A rule of one's own: the example of docs/own-rule.md, against plain autograd through a model written again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import vitreous
from small_models import largest_difference, random_images, small_vit
from vitreous.errors import MethodError
from vitreous.evaluation.runner.measure import own_code_of
from vitreous.methods.registry import _methods
from vitreous.plugin import load_plugin, method
from vitreous.rules import RULES, FrozenRule, LrpRule, Rule, register
from vitreous.tape import Pass

ROOT = Path(__file__).parents[2]
EXACT = 1e-12  # float64: the same sums in another order
TARGET = torch.tensor([1, 3])


@pytest.fixture(autouse=True)
def _registry():
    """What is registered in a test is forgotten again."""
    tables = (RULES, _methods)
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


def guided_gelu(values: Tensor) -> Tensor:
    """A GELU through which positive gradients pass where its input is positive."""
    passed = torch.where(values > 0, values, values.detach())
    output = nn.functional.gelu(passed)
    output.register_hook(lambda gradient: gradient.clamp(min=0))
    return output


def detached_norm(norm: nn.LayerNorm, tokens: Tensor) -> Tensor:
    """LayerNorm with a constant deviation."""
    centred = tokens - tokens.mean(dim=-1, keepdim=True)
    deviation = (centred.square().mean(dim=-1, keepdim=True) + norm.eps).sqrt().detach()
    return centred / deviation * norm.weight + norm.bias


def written_again(model: nn.Module, tokens: Tensor) -> Tensor:
    """The blocks and the head of a small timm ViT, by einsum, with the norms and activations above."""
    for block in model.blocks:
        normed, heads = detached_norm(block.norm1, tokens), block.attn.num_heads
        qkv = normed @ block.attn.qkv.weight.T + block.attn.qkv.bias
        query, key, value = qkv.unflatten(-1, (3, heads, -1)).unbind(dim=2)
        scores = torch.einsum("bihc,bjhc->bhij", query, key) * query.shape[-1] ** -0.5
        weights = scores.exp() / scores.exp().sum(dim=-1, keepdim=True)
        attended = torch.einsum("bhij,bjhc->bihc", weights, value).flatten(2)
        tokens = tokens + block.ls1.gamma * (attended @ block.attn.proj.weight.T + block.attn.proj.bias)
        hidden = detached_norm(block.norm2, tokens) @ block.mlp.fc1.weight.T + block.mlp.fc1.bias
        output = guided_gelu(hidden) @ block.mlp.fc2.weight.T + block.mlp.fc2.bias
        tokens = tokens + block.ls2.gamma * output
    return detached_norm(model.norm, tokens)[:, 0] @ model.head.weight.T + model.head.bias


def test_the_example_of_the_page_is_the_file_and_gives_what_plain_autograd_gives() -> None:
    page = (ROOT / "docs" / "own-rule.md").read_text(encoding="utf-8")
    file = ROOT / "examples" / "my_rule.py"
    assert re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0] == file.read_text(encoding="utf-8")
    load_plugin(file)
    model, images = small_vit(), random_images()
    tokens = model._pos_embed(model.patch_embed(images)).detach().requires_grad_()
    logits = written_again(model, tokens)
    assert largest_difference(logits, model(images)) < EXACT  # the forward pass is the model's own
    (gradient,) = torch.autograd.grad(logits.gather(1, TARGET[:, None]).sum(), tokens)
    expected = (tokens * gradient).sum(dim=-1)[:, 1:]
    found = vitreous.explain(model, images, ["ixg:rule=guided", "ixg", "ixg:rule=conservative"], TARGET).scores
    assert largest_difference(found["ixg:rule=guided"], expected) < EXACT
    assert largest_difference(found["ixg"], expected) > 1e-3  # it is no other rule
    assert largest_difference(found["ixg:rule=conservative"], expected) > 1e-3


def test_attributes_alone_make_a_rule() -> None:
    @register
    class Mine(Rule):
        """The attributes of FrozenRule, written again."""

        name = "mine"
        softmax = "constant"
        normalisation = "constant"
        activation = "ratio"
        gate = "constant"

    spellings = ["ixg:rule=mine", "ixg:rule=frozen", "gae:rule=mine", "gae:rule=frozen"]
    found = vitreous.explain(small_vit(), random_images(), spellings, TARGET).scores
    assert torch.equal(found["ixg:rule=mine"], found["ixg:rule=frozen"])
    assert torch.equal(found["gae:rule=mine"], found["gae:rule=frozen"])


def test_an_own_attention_method_acts_on_fused_and_on_written_attention() -> None:
    @register
    class ValuesOnly(Rule):
        """A is a constant, by a method of its own."""

        name = "values_only"

        def backward_attention(self, call, gradient):
            return None, None, call.rows(slice(None)).mT @ gradient

    class SoftmaxConstant(Rule):
        name = "softmax_constant"
        softmax = "constant"

    register(SoftmaxConstant)
    model, images = small_vit(), random_images()
    spellings = ["ixg:rule=values_only", "ixg:rule=softmax_constant"]
    fused = vitreous.explain(model, images, spellings, TARGET).scores
    for block in model.blocks:
        block.attn.fused_attn = False
    written = vitreous.explain(model, images, spellings, TARGET).scores
    for scores in (fused["ixg:rule=values_only"], *written.values()):
        assert largest_difference(scores, fused["ixg:rule=softmax_constant"]) < EXACT


def test_a_relevance_rule_of_ones_own_is_for_own_methods() -> None:
    @register
    class Mine(LrpRule):
        name = "mine"

    @method("own_relevance", gradients=("tokens",), rule="mine")
    def own_relevance(view, layer):
        """Relevance under the own rule."""
        return view.token_gradient(Pass("mine", "logit"), layer).sum(dim=-1)

    @method("their_relevance", gradients=("tokens",), rule="lrp_ours")
    def their_relevance(view, layer):
        """Relevance under the rule that it inherits from."""
        return view.token_gradient(Pass("lrp_ours", "logit"), layer).sum(dim=-1)

    found = vitreous.explain(small_vit(), random_images(), ["own_relevance", "their_relevance"], TARGET).scores
    assert torch.equal(found["own_relevance"], found["their_relevance"])
    with pytest.raises(MethodError, match="rule=mine is not one of plain, frozen"):
        vitreous.explain(small_vit(), random_images(), "ixg:rule=mine", TARGET)


def test_what_cannot_be_a_rule_is_refused_in_one_sentence() -> None:
    def rule(base=Rule, **attributes):
        return type("Mine", (base,), attributes)

    for wrong, message in {
        rule(): "set name to",
        rule(name="Not A Name"): "set name to",
        rule(name="libra"): "there is a rule 'libra' already",
        rule(name="mine", softmax="constnat"): r"softmax 'constnat' is not one of gradient, constant; did you mean",
        rule(base=nn.Module, name="mine"): "inherits from vitreous.rules.Rule",
    }.items():
        with pytest.raises(MethodError, match=message):
            register(wrong)
    assert "mine" not in RULES


def test_an_evaluation_depends_on_the_code_of_the_rule(tmp_path) -> None:
    file = tmp_path / "my_rule.py"
    source = 'from vitreous.rules import Rule, register\n@register\nclass Mine(Rule):\n    name = "mine"\n'
    file.write_text(source)
    load_plugin(file)
    before = own_code_of(["ixg:rule=mine", "ixg"])
    assert list(before) == ["rule mine"]
    file.write_text(source + '    softmax = "constant"\n')
    load_plugin(file)
    assert own_code_of(["ixg:rule=mine", "ixg"]) != before


def test_the_rules_of_the_page_are_those_of_the_package() -> None:
    page = (ROOT / "docs" / "own-rule.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(class LibraRule.*?)```", page, re.DOTALL)[0]
    scope = {"FrozenRule": FrozenRule}
    exec(code, scope)
    ours, shown = RULES["libra"], scope["LibraRule"]
    parts = ("softmax", "attention_product", "normalisation", "activation", "gate", "product", "length")
    assert [getattr(ours, part) for part in parts] == [getattr(shown, part) for part in parts]
    for part in parts:
        assert f"| `{part}` | `{getattr(Rule, part)}`" in page
