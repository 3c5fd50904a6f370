"""Peers: the same map before the same is timed, a different one reported, one that is not there named."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import forked
from small_models import random_images, small_vit
from vitreous.errors import MissingDependencyError
from vitreous.methods.spelling import parse
from vitreous.speed import measure_speed
from vitreous.speed.measuring import agreement_of
from vitreous.speed.peers import PEERS, Peer, PeerMethod, find_peers, usual_spellings
from vitreous.speed.timing import one_thread

# What each package computes like us, in a size that is quick here.
AGREEING = {
    "captum": [
        *("ixg", "ixg:layer=2", "integrated_gradients:steps=3", "integrated_gradients:at=tokens,steps=3"),
        *("smoothgrad:samples=5", "occlusion:of=logit,window=2,stride=2", "lime:of=logit,budget=20"),
    ],
    "grad-cam": [
        *("gradcam", "gradcampp", "xgradcam", "hirescam", "layercam", "gradcam_elementwise:layer=1", "eigencam"),
        "scorecam",
    ],
    "lxt": ["attnlrp", "decompx"],
    "pnpxai": ["ixg:layer=2", "integrated_gradients:steps=3"],
    "quantus": ["ixg:layer=2"],
}

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return small_vit(dtype=torch.float32)


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return random_images(3, dtype=torch.float32)


@pytest.mark.parametrize("name", AGREEING)
def test_a_peer_with_our_map_is_timed(name, model, images):
    if PEERS[name].problem:
        pytest.skip(f"{name}: {PEERS[name].problem}")
    rows = measure_speed(model, images, AGREEING[name], repeats=1, peers=[name])
    assert [row.method for row in rows if row.peer] == AGREEING[name]
    for row in rows:
        assert row.reason is None, (row.method, row.reason)
        if row.peer:
            # float32 on both sides, over four small blocks.
            assert row.agreement.agrees
            assert row.agreement.largest_difference < 1e-5, row.method
            assert row.ratio_peer > 0
            assert row.passes


def test_peers_leave_the_model_and_torch_as_they_were(model, images):
    before = (F.scaled_dot_product_attention, torch.normal, nn.LayerNorm.forward, nn.GELU.forward)
    installed = [name for name, peer in PEERS.items() if not peer.problem]
    methods = [AGREEING[name][0] for name in installed]
    measure_speed(model, images, methods, repeats=1, peers=installed)
    assert before == (F.scaled_dot_product_attention, torch.normal, nn.LayerNorm.forward, nn.GELU.forward)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not {"forward", "original_forward"} & set(vars(module))
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_a_peer_with_another_map_is_reported_and_not_timed(model, images, monkeypatch):
    """The peer reads the stream one block too high."""
    captum = PEERS["captum"]
    if captum.problem:
        pytest.skip(captum.problem)
    runs = []

    def one_block_too_high(given):
        runs.append(1)
        return captum.method_for("ixg:layer=1")(given)

    monkeypatch.setitem(PEERS, "captum", replace(captum, methods=(PeerMethod(("ixg",), one_block_too_high),)))
    ours, theirs = measure_speed(model, images, "ixg", repeats=3, peers=["captum"])
    assert ours.ratio_forward > 0
    assert not theirs.agreement.agrees
    assert theirs.agreement.largest_difference > 0.01
    assert "another map" in theirs.reason
    assert f"{theirs.agreement.largest_difference:.2g}" in theirs.reason
    assert theirs.ratio_peer is None
    assert theirs.ratio_forward is None
    assert len(runs) == 1, "it was compared once and never timed"


def test_captums_own_random_sets_are_another_map(model, images):
    if PEERS["captum"].problem:
        pytest.skip(PEERS["captum"].problem)
    _, theirs = measure_speed(model, images, "kernel_shap:of=logit,budget=20", repeats=1, peers=["captum"])
    assert "another map" in theirs.reason


def broken(_scene):
    raise RuntimeError("no such layer")


def wrong_shape(given):
    return given.images.sum(dim=1)


@pytest.mark.parametrize(
    ("explain", "reason"), [(broken, "RuntimeError: no such layer"), (wrong_shape, r"shape \(3, 32, 32\)")]
)
def test_a_peer_that_fails_is_reported(model, images, monkeypatch, explain, reason):
    monkeypatch.setitem(PEERS, "other", Peer("other", object, (PeerMethod(("ixg",), explain),), ()))
    ours, theirs = measure_speed(model, images, "ixg", repeats=1, peers=["other"])
    assert ours.reason is None
    assert re.search(reason, theirs.reason)


def absent():
    raise ImportError("No module named 'absent'")


def test_a_peer_that_is_not_installed(model, images, monkeypatch):
    monkeypatch.setitem(PEERS, "absent", Peer("absent", absent, (PeerMethod(("ixg",), broken),), (), apart=True))
    with pytest.raises(MissingDependencyError, match=r"vitreous\[peers\].*--no-deps absent"):
        find_peers(["absent"])
    monkeypatch.setitem(PEERS, "here", Peer("here", object, (), ()))
    rows = measure_speed(model, images, "ixg", repeats=1, peers=["all"])
    (row,) = (row for row in rows if row.peer == "absent")
    assert "cannot be imported: No module named 'absent'" in row.reason
    for name in list(PEERS):
        monkeypatch.delitem(PEERS, name)
    monkeypatch.setitem(PEERS, "absent", Peer("absent", absent, (), ()))
    with pytest.raises(MissingDependencyError):
        find_peers(["all"])


def test_peers_are_not_imported_unless_they_are_asked_for():
    code = (
        f"import sys; sys.path.insert(0, {str(SUPPORT)!r})\n"
        "from small_models import small_vit, random_images\n"
        "from vitreous.speed import measure_speed\n"
        "measure_speed(small_vit(depth=1), random_images(), 'ixg', repeats=1)\n"
        "print([name for name in ('captum', 'pytorch_grad_cam', 'lxt', 'pnpxai', 'quantus') if name in sys.modules])"
    )
    assert forked.run_code(code).strip() == "[]"


def test_spellings_with_numbers():
    seen = []
    answer = PeerMethod(("ixg", "ixg:layer={layer}"), lambda given, layer=0: seen.append(layer))
    for spelling in ("ixg", "ixg:layer=3", "ixg:layer=-1"):
        answer.match(spelling)(None)
    assert seen == [0, 3, -1]
    assert answer.match("ixg:layer=3,rule=libra") is None
    assert answer.match("ixg.plus") is None


def test_what_peers_show_can_be_spelled_and_is_theirs():
    for peer in PEERS.values():
        for spelling in peer.usual:
            assert parse(spelling)
            assert peer.method_for(spelling) is not None
    assert len(usual_spellings([*PEERS.values(), *PEERS.values()])) == len(usual_spellings(list(PEERS.values())))


def test_agreement_is_measured_against_our_largest_value():
    ours = torch.tensor([[0.0, 2.0, 4.0]])
    found = agreement_of(torch.tensor([[0.0, 2.0, 4.002]]), ours)
    assert found.agrees
    assert found.largest_difference == pytest.approx(0.0005, rel=1e-3)
    assert found.correlation > 0.999
    turned = agreement_of(-ours, ours)
    assert (turned.agrees, round(turned.correlation, 6), turned.largest_difference) == (False, -1, 2)
    assert agreement_of(torch.zeros(1, 3), torch.zeros(1, 3)) == (True, None, 0)
