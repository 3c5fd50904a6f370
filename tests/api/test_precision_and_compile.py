"""bfloat16 for the methods that survive it, and compiled evaluations: the same maps, and refusals where not."""

import json
from pathlib import Path

import pytest
import torch
from timm.models.mlp_mixer import MlpMixer

import vitreous
from small_models import golden_model, largest_difference, random_images
from vitreous.api.explain import TOLERANCE, bf16_spellings
from vitreous.errors import InputError, MethodError, UnsupportedModelError
from vitreous.metrics.sanity import pearson
from vitreous.speed.timing import one_thread

MEASURED = Path(__file__).parents[2] / "docs" / "speed" / "precision.json"


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


def test_the_list_of_methods_is_what_was_measured():
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]
    found = {
        row["method"]: row["rank_correlation"] for row in rows if row["option"] == "bf16" and "rank_correlation" in row
    }
    assert {method for method, correlation in found.items() if correlation >= TOLERANCE} == bf16_spellings()


def test_bf16_keeps_the_order_of_patches_and_the_classes():
    model, images = golden_model(torch.float32)
    methods = ["gae", "decompx.skipplus"]
    exact = vitreous.explain(model, images, methods)
    rounded = vitreous.explain(model, images, methods, exact.target, precision="bf16")
    assert rounded.logits.dtype == torch.bfloat16  # it did run in another precision
    for method in methods:
        maps, others = exact.scores[method], rounded.scores[method]
        assert others.dtype == torch.float32
        assert 0 < largest_difference(others, maps) < 0.1  # 8 bits of mantissa, through four blocks and back
        ranks = [scores.argsort(dim=1).argsort(dim=1).double().numpy() for scores in (maps, others)]
        assert pearson(*ranks).min() > 0.9  # sixteen patches: one swap of neighbours costs 0.003


def test_bf16_is_refused_where_maps_do_not_survive_it():
    model, images = golden_model(torch.float32)
    with pytest.raises(MethodError, match=r"occlusion was not found to rank patches in bf16.*gae"):
        vitreous.explain(model, images, ["gae", "occlusion"], precision="bf16")
    with pytest.raises(MethodError, match=r"gae:rule=libra was not found"):  # measured under its own rule alone
        vitreous.explain(model, images, "gae:rule=libra", precision="bf16")
    with pytest.raises(MethodError, match=r"gradient.plus was not found"):  # nor is a sum over layers its last one
        vitreous.explain(model, images, "gradient.plus", precision="bf16")
    with pytest.raises(InputError, match=r"precision=fp8 is not one of model, bf16"):
        vitreous.explain(model, images, "gae", precision="fp8")


def test_the_usual_methods_are_left_out_where_bf16_spoils_them():
    model, images = golden_model(torch.float32)
    with pytest.warns(UserWarning, match=r"gradtoken is left out: it was not found to rank patches in bf16"):
        explanation = vitreous.explain(model, images, precision="bf16")
    assert explanation.methods[0] == "decompx.skipplus"  # twoscale is spoilt, too
    assert explanation.methods[1] in {"tokentm", "gae"}


def test_what_the_model_does_not_allow_is_left_out_too():
    mixer = MlpMixer(img_size=32, patch_size=8, num_blocks=4, embed_dim=24, num_classes=5).eval()
    with pytest.warns(UserWarning, match="is left out") as told:
        explanation = vitreous.explain(mixer, random_images(1, dtype=torch.float32), precision="bf16")
    assert explanation.methods == ("decompx.skipplus",)
    for name in ("gradtoken", "tokentm"):
        assert sum(f"{name} is left out" in str(each.message) for each in told) == 1


@pytest.fixture
def graphs(monkeypatch):
    """Graphs that were compiled, by a backend that runs them as they are: the usual one takes minutes of C++."""
    found, compile_ = [], torch.compile

    def backend(graph, _):
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda model: compile_(model, backend=backend))
    return found


def test_compiled_evaluations_give_the_same_maps(graphs):
    model, images = golden_model(torch.float32)
    plain = vitreous.explain(model, images[:1], ["occlusion", "ixg"], 0).scores
    assert not graphs
    fast = vitreous.explain(model, images[:1], ["occlusion", "ixg"], 0, compile=True).scores
    assert graphs
    assert torch.equal(fast["ixg"], plain["ixg"])  # recorded, so not compiled
    # The same operations in the same order; scores are differences of probabilities.
    assert largest_difference(fast["occlusion"], plain["occlusion"]) < 1e-5


def test_nothing_is_compiled_for_methods_that_ask_nothing_again(graphs):
    model, images = golden_model(torch.float32)
    vitreous.explain(model, images[:1], ["gae", "decompx"], 0, compile=True)
    assert not graphs


def test_a_model_that_cannot_be_compiled_is_refused_in_one_sentence(monkeypatch):
    model, images = golden_model(torch.float32)
    compile_ = torch.compile

    def backend(graph, _):
        raise RuntimeError("there is no compiler")

    monkeypatch.setattr(torch, "compile", lambda model: compile_(model, backend=backend))
    with pytest.raises(UnsupportedModelError, match=r"VisionTransformer cannot be compiled here.*no compiler"):
        vitreous.explain(model, images[:1], "occlusion", 0, compile=True)
