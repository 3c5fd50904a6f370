"""What lies between the attention heads and the residual sum, as one linear map T_i of every token.

Models differ in that part and in the sum alone. The reference writes the part once more with its statistics and gates
detached, takes T_i as its Jacobian by autograd, and TokenTM's equations with update matrices written out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import vitreous
from vitreous.architecture import find_architecture
from vitreous.errors import UnsupportedModelError
from vitreous.speed.timing import one_thread
from vitreous.tape import Needs, Plan, record
from vitreous.tape.diagnosis import missing_part
from zoo import ENTRIES, Entry

WIDTH, HEADS, DEPTH, CLASSES = 12, 3, 2, 4
EXACT = 1e-10  # float64: sums of some hundred terms of order 1 in another order; a wrong factor is off by 1e-2
Freeze = Callable[[Tensor], Tensor]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Part(nn.Module):
    """From the heads (batch, head, token, channel) to what is added; ``freeze`` detaches statistics and gates."""

    inner = WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(self.inner, WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.twice = nn.Linear(self.inner, 2 * WIDTH)
        self.gamma, self.beta = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.statistics = nn.BatchNorm1d(WIDTH)

    def forward(self, heads: Tensor, x: Tensor, freeze: Freeze = lambda gate: gate) -> Tensor:
        return self.out(merge(heads))


def merge(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


def layer_norm(part: Part, tokens: Tensor, freeze: Freeze) -> Tensor:
    """LayerNorm with its deviation frozen; as one call where nothing is."""
    if freeze(tokens).requires_grad or not tokens.requires_grad:
        return F.layer_norm(tokens, (WIDTH,), part.gamma, part.beta, 1e-3)
    centred = tokens - tokens.mean(-1, keepdim=True)
    return centred / freeze((centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()) * part.gamma + part.beta


class Sandwich(Part):
    def forward(self, heads, x, freeze=lambda gate: gate):
        return layer_norm(self, self.out(merge(heads)), freeze)


class WrittenLayerNorm(Part):
    def forward(self, heads, x, freeze=lambda gate: gate):
        tokens = self.out(merge(heads))
        centred = tokens - tokens.mean(dim=-1, keepdim=True)
        deviation = freeze((centred.pow(2).mean(dim=-1, keepdim=True) + 1e-5).sqrt())
        return centred / deviation * self.gamma + self.beta


class WrittenRMSNorm(Part):
    def forward(self, heads, x, freeze=lambda gate: gate):
        tokens = self.out(merge(heads))
        return tokens * freeze(torch.rsqrt(tokens.pow(2).mean(-1, keepdim=True) + 1e-6)) * (1 + self.gamma)


class UnitLength(Part):
    def forward(self, heads, x, freeze=lambda gate: gate):
        tokens = self.out(merge(heads))
        if freeze(tokens).requires_grad or not tokens.requires_grad:
            return F.normalize(tokens, dim=-1) * self.gamma
        return tokens / freeze(tokens.norm(dim=-1, keepdim=True)) * self.gamma


class NormInFront(Part):
    """Between the heads and W_O, over all heads (sub-norm)."""

    def forward(self, heads, x, freeze=lambda gate: gate):
        return self.out(layer_norm(self, merge(heads), freeze))


class NormOfHeads(Part):
    """RMSNorm of every head by itself, as differential attention has it."""

    def forward(self, heads, x, freeze=lambda gate: gate):
        length = freeze((heads.square().mean(-1, keepdim=True) + 1e-6).rsqrt())
        return self.out(merge(heads * length * self.gamma[: WIDTH // HEADS]))


class GatedChannels(Part):
    def forward(self, heads, x, freeze=lambda gate: gate):
        return self.out(merge(heads) * freeze(torch.sigmoid(self.extra(x))))


class GatedHeads(Part):
    def forward(self, heads, x, freeze=lambda gate: gate):
        gate = self.extra(x)[..., :HEADS].transpose(1, 2)[..., None]
        return self.out(merge(heads * freeze(torch.tanh(gate))))  # of either sign


class GLU(Part):
    def forward(self, heads, x, freeze=lambda gate: gate):
        tokens = self.twice(merge(heads))
        if freeze(tokens).requires_grad or not tokens.requires_grad:
            return F.glu(tokens, dim=-1)
        return tokens[..., :WIDTH] * freeze(tokens[..., WIDTH:].sigmoid())


class GLUInChunks(Part):
    def forward(self, heads, x, freeze=lambda gate: gate):
        gate, tokens = self.twice(merge(heads)).chunk(2, dim=-1)
        return tokens * freeze(torch.sigmoid(gate))


class Activated(Part):
    def forward(self, heads, x, freeze=lambda gate: gate):
        tokens = merge(heads)
        if freeze(tokens).requires_grad or not tokens.requires_grad:
            return self.out(F.gelu(tokens))
        return self.out(tokens * freeze(F.gelu(tokens) / tokens))


class GateOfNormed(Part):
    """Everything at once: gated heads, W_O, a norm, LayerScale."""

    def forward(self, heads, x, freeze=lambda gate: gate):
        tokens = self.out(merge(heads) * freeze(F.silu(self.extra(x))))
        return 0.3 * self.gamma * layer_norm(self, tokens, freeze)


class Batched(Part):
    def forward(self, heads, x, freeze=lambda gate: gate):
        return self.statistics(self.out(merge(heads)).transpose(1, 2)).transpose(1, 2)


class TwoLayers(Part):
    def forward(self, heads, x, freeze=lambda gate: gate):
        return self.extra(self.out(merge(heads)))


class NoProjection(Part):
    def forward(self, heads, x, freeze=lambda gate: gate):
        return merge(heads)


PARTS = {each.__name__: each for each in Part.__subclasses__()}


def added(x: Tensor, branch: Tensor) -> Tensor:
    return x + branch


# What is done to x and to the branch, as a model writes it and as two factors.
ONE = torch.ones((), dtype=torch.float64)
SCALES = 0.5 + noise(WIDTH, seed=9).abs()
SUMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]] = {
    "sum": (added, ONE, ONE),
    "scaled": (lambda x, branch: branch + x * SCALES, SCALES, ONE),
    "lerp": (lambda x, branch: x.lerp(branch, 0.1 * SCALES), 1 - 0.1 * SCALES, 0.1 * SCALES),
    "alpha": (lambda x, branch: torch.add(x, branch, alpha=0.5), ONE, ONE / 2),
    "difference": (lambda x, branch: 0.7 * x - branch, 0.7 * ONE, -ONE),
    "addcmul": (lambda x, branch: torch.addcmul(x, branch, SCALES), ONE, SCALES),
}


@dataclass
class Run:
    """What a run passes, by block."""

    x: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    heads: list[Tensor] = field(default_factory=list)
    middle: list[Tensor] = field(default_factory=list)
    fed: list[Tensor] = field(default_factory=list)


class Model(nn.Module):
    def __init__(self, part: type[Part] = Part, how: str = "sum") -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 8, 8)
        self.cls = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * DEPTH + 1))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(DEPTH))
        self.parts = nn.ModuleList(part() for _ in range(DEPTH))
        self.feed = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.add = SUMS[how][0]
        self.double().eval()
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(0.4 * noise(*parameter.shape, seed=number) + 0.5 * (parameter.dim() == 1))

    def forward(self, pictures: Tensor, run: Run | None = None) -> Tensor:
        run = Run() if run is None else run
        tokens = self.patch(pictures).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(tokens), -1, -1), tokens], dim=1)
        for layer in range(DEPTH):
            normed = self.norms[2 * layer](x)
            q, k, v = self.qkv[layer](normed).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            weights = (q @ k.transpose(-2, -1) * (WIDTH // HEADS) ** -0.5).softmax(-1)
            heads = weights @ v
            middle = self.add(x, self.parts[layer](heads, normed))
            fed = torch.tanh(self.feed[layer](self.norms[2 * layer + 1](middle)))
            for kept, value in zip(
                (run.x, run.weights, run.values, run.heads, run.middle, run.fed),
                (x, weights, v, heads, middle, fed),
                strict=True,
            ):
                kept.append(value)
            x = self.add(middle, fed)
        return self.head(self.norms[-1](x)[:, 0])

    def frozen_maps(self, run: Run, layer: int, how: str) -> Tensor:
        """T_hi of image 0, (token i, head, channels, head's channels), by autograd."""
        heads, normed = run.heads[layer][:1].detach(), self.norms[2 * layer](run.x[layer][:1]).detach()
        tokens = heads.shape[2]

        def frozen(given: Tensor) -> Tensor:
            return SUMS[how][2] * self.parts[layer](given, normed, Tensor.detach)

        jacobian = torch.autograd.functional.jacobian(frozen, heads)[0, :, :, 0]  # (token, channel, head, token, k)
        own = torch.arange(tokens)
        maps = jacobian[own, :, :, own]
        others = jacobian.clone()
        others[own, :, :, own] = 0
        assert others.abs().max() == 0  # every token by itself
        return maps.permute(0, 2, 1, 3)


def weight(original: Tensor, transformed: Tensor) -> Tensor:
    """L * NECC of tokens, (n,)."""
    ratio = transformed.norm(dim=-1) / original.norm(dim=-1)
    return ratio * torch.softmax(F.cosine_similarity(original, transformed, dim=-1), dim=-1)


def literal_tokentm(model: Model, picture: Tensor, target: int, how: str) -> Tensor:
    """C = U_L ... U_1 C_0 with every U written out, for image 0."""
    run = Run()
    probability = model(picture, run).softmax(-1)[0, target]
    slopes = torch.autograd.grad(probability, run.weights, retain_graph=True)
    tokens = run.x[0].shape[1]
    skip, of_branch = SUMS[how][1:]
    contribution = torch.diag(run.x[0][0].norm(dim=-1))
    for layer in range(DEPTH):
        original, attention = run.x[layer][0], run.weights[layer][0]
        maps = model.frozen_maps(run, layer, how)
        update = torch.diag((skip * original).norm(dim=-1) / original.norm(dim=-1))
        for head in range(HEADS):
            value = run.values[layer][0, head]
            for row in range(tokens):
                own = weight(original, value @ maps[row, head].T)
                update[row] += slopes[layer][0, head, row].clamp(min=0) * attention[head, row] * own / HEADS
        contribution = update @ contribution
        middle, fed = run.middle[layer][0], of_branch * run.fed[layer][0]
        own = (skip * middle).norm(dim=-1) / middle.norm(dim=-1)
        contribution = torch.diag(own + weight(middle, fed)) @ contribution
    return contribution[0, 1:].detach()


def literal_attin(model: Model, picture: Tensor, how: str) -> Tensor:
    """||Σ_h A_hij T_hi(v_hj)|| of the last block, the class token's row."""
    run = Run()
    model(picture, run)
    maps, layer = model.frozen_maps(run, DEPTH - 1, how), DEPTH - 1
    values, weights = run.values[layer][0], run.weights[layer][0]
    parts = [weights[head, 0, :, None] * (values[head] @ maps[0, head].T) for head in range(HEADS)]
    return torch.stack(parts).sum(0).norm(dim=-1)[1:].detach()


CASES = sorted({*((part, "sum") for part in PARTS), *((part, how) for part in ("Part", "Sandwich") for how in SUMS)})


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.mark.parametrize(("part", "how"), CASES)
def test_tokentm_has_what_lies_between_the_heads_and_the_sum(part: str, how: str) -> None:
    model, pictures = Model(PARTS.get(part, Part), how), noise(2, 3, 24, 16, seed=3)
    found = vitreous.explain(model, pictures, "tokentm", 1).scores["tokentm"]
    for number in range(2):
        expected = literal_tokentm(model, pictures[number : number + 1], 1, how)
        torch.testing.assert_close(found[number], expected, rtol=EXACT, atol=EXACT * float(expected.max()))


@pytest.mark.parametrize(("part", "how"), CASES)
def test_lengths_of_what_attention_moves_have_it_too(part: str, how: str) -> None:
    model, pictures = Model(PARTS.get(part, Part), how), noise(1, 3, 24, 16, seed=4)
    found = vitreous.explain(model, pictures, "attin", 1).scores["attin"][0]
    torch.testing.assert_close(found, literal_attin(model, pictures, how), rtol=EXACT, atol=EXACT)


def literal_stream_lengths(model: Model, picture: Tensor, how: str) -> Tensor:
    """Rollout of ||Σ_h A_hij T_hi(v_hj) + 1{i=j} s x_j||, every block, the class token's row."""
    run = Run()
    model(picture, run)
    tokens = run.x[0].shape[1]
    row = torch.eye(tokens, dtype=torch.float64)[0]
    for layer in reversed(range(DEPTH)):
        maps, values, weights = model.frozen_maps(run, layer, how), run.values[layer][0], run.weights[layer][0]
        matrix = torch.zeros(tokens, tokens, dtype=torch.float64)
        for to in range(tokens):
            vectors = sum(weights[head, to, :, None] * (values[head] @ maps[to, head].T) for head in range(HEADS))
            vectors[to] = vectors[to] + SUMS[how][1] * run.x[layer][0, to]
            matrix[to] = vectors.norm(dim=-1)
        row = row @ matrix
    return row[1:].detach()


@pytest.mark.parametrize("how", ["sum", "scaled", "lerp"])
@pytest.mark.parametrize("part", ["Part", "Sandwich", "GatedChannels", "GatedHeads", "GLU"])
def test_contributions_count_the_stream_as_the_sum_does(part: str, how: str) -> None:
    model, pictures = Model(PARTS.get(part, Part), how), noise(1, 3, 24, 16, seed=5)
    spelling = "attin_residual.rollout:norm=none"
    found = vitreous.explain(model, pictures, spelling, 1).scores[spelling][0]
    expected = literal_stream_lengths(model, pictures, how)
    torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT * float(expected.max()))


class LogOfHeads(Part):
    def forward(self, heads, x, freeze=lambda gate: gate):
        return self.out(torch.log1p(merge(heads).abs()))


class Squared(Part):
    def forward(self, heads, x, freeze=lambda gate: gate):
        tokens = self.out(merge(heads))
        return tokens * tokens


class WeighedTwice(Part):
    """Channels are weighed by token, mixed, and weighed again: no diag(a) W diag(b) with a second mixing behind."""

    def forward(self, heads, x, freeze=lambda gate: gate):
        return self.extra(torch.sigmoid(self.extra(x)) * self.out(merge(heads)))


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (LogOfHeads, r"no linear map leads .*: log1p\(\) is between them"),
        (Squared, r"no linear map leads .*: they are multiplied with each other \(mul\(\)\)"),
        (WeighedTwice, r"no linear map leads .*: their channels are weighed .* between two projections"),
    ],
)
def test_what_is_no_linear_map_is_refused_with_its_name(part: type[Part], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        vitreous.explain(Model(part), noise(1, 3, 24, 16), "tokentm", 1)


# Nothing but attention is added to the stream by the sum.
ALONE = [
    entry
    for entry in ENTRIES
    if entry.package in {"vit_pytorch", "x_transformers", "monai", "kornia"} and entry.kind == "plain"
]


@pytest.mark.parametrize("entry", ALONE, ids=str)
def test_in_every_model_the_map_of_what_the_heads_give_is_what_is_added(entry: Entry) -> None:
    """T_i(O_i) + biases is what the model itself adds to its stream; without biases it is T_i(O_i) alone."""
    pytest.importorskip(entry.package)
    model = entry.build()
    for module in model.modules():
        for name in ("bias", "in_proj_bias"):
            if isinstance(getattr(module, name, None), nn.Parameter):
                nn.init.zeros_(getattr(module, name))
    images = entry.images()
    try:
        architecture = find_architecture(model, images)
    except UnsupportedModelError:
        return  # docs/served.md lists the models that no method serves
    if any(call.key_tokens for block in architecture.blocks for call in block.attention):
        return  # keys that are learned add a part that belongs to no token
    layers = frozenset(range(architecture.depth))
    needs = Needs(tokens=layers, residual=layers, attention=layers, projections=layers)
    try:
        with record(model, architecture, images, Plan(architecture.depth, needs)) as tape:
            if missing_part(tape, needs) is not None:
                return  # no attention between all patches
            for layer in layers:
                attention, projection = tape.attention(layer), tape.head_projection(layer)
                assert projection is not None
                heads = merge(attention.rows(slice(None)) @ attention.value)
                found = (heads if projection.before is None else heads * projection.before) @ projection.weight.T
                found = found if projection.after is None else found * projection.after
                expected = tape.residual_mid(layer) - tape.tokens(layer) * tape.skip(layer)[0]
                # A few roundings of sums of 24 terms in float64.
                torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12 * float(expected.abs().max()))
    except UnsupportedModelError:
        return
