"""Random module trees: what a stranger's nn.Module may do to its tokens, sensible or not."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

CHANNELS, CLASSES, PIXELS, PATCH = 8, 3, 12, 4


class StrangeError(Exception):
    """An error that no library knows."""


def _written(x: Tensor, equations: tuple[str, str], dim: int = -1) -> Tensor:
    """Attention by einsum, with two heads along any axis."""
    split = x.unflatten(-1, (2, -1))
    weights = torch.einsum(equations[0], split, split).softmax(dim)
    return torch.einsum(equations[1], weights, split).flatten(-2)


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def _merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def _numbers_set(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = x[:, -1]
    return x


def _exponentials(x: Tensor) -> Tensor:
    weights = (_heads(x) @ _heads(x).mT).exp()
    return _merged(weights / weights.sum(-1, keepdim=True) @ _heads(x))


def _divided_behind(x: Tensor) -> Tensor:
    weights = (_heads(x) @ _heads(x).mT).exp()
    return _merged((weights @ _heads(x)) / weights.sum(-1, keepdim=True))


def _without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2


def _raise(error: Exception) -> Tensor:
    raise error


def _one_head_rows(x: Tensor) -> Tensor:
    rows = _heads(x).flatten(0, 1)
    weights = torch.baddbmm(rows.new_zeros(len(rows), rows.shape[1], rows.shape[1]), rows, rows.mT).softmax(-1)
    return _merged(torch.bmm(weights, rows).unflatten(0, (-1, 2)))


def _by_token(x: Tensor) -> Tensor:
    return torch.stack([token * (number + 1) for number, token in enumerate(x.unbind(1))], dim=1)


# What a function makes of tokens (batch, tokens, channels); others fail on what it gives, which is part of it.
FUNCTIONS = {
    "same": lambda x: x,
    "relu in place": lambda x: functional.relu(x, inplace=True),
    "multiplied in place": lambda x: x.mul_(2),
    "clone and set": _numbers_set,
    "gelu": functional.gelu,
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "no_grad": _without_gradient,
    "constant": lambda x: torch.ones(x.shape),
    "zeros like": torch.zeros_like,
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
    "float64 and back": lambda x: x.double().float(),
    "nan": lambda x: x * float("nan"),
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 1),
    "sort": lambda x: x.sort(dim=1).values,
    "fft": lambda x: torch.fft.fft2(x).real,
    "cumsum": lambda x: x.cumsum(1),
    "half of the tokens": lambda x: x[:, ::2],
    "first token": lambda x: x[:, :1],
    "no token": lambda x: x[:, :0],
    "tokens twice": lambda x: torch.cat([x, x], dim=1),
    "mean kept": lambda x: x.mean(1, keepdim=True).expand_as(x),
    "pooled": lambda x: functional.avg_pool1d(x.mT, 2).mT,
    "batch in tokens": lambda x: x.flatten(0, 1)[None],
    "batch away": lambda x: x.mean(0, keepdim=True),
    "batch last": lambda x: x.permute(1, 2, 0),
    "tokens first": lambda x: x.transpose(0, 1),
    "channels first": lambda x: x.mT,
    "flat": lambda x: x.flatten(1),
    "number": lambda x: x.sum(),
    "one axis more": lambda x: x[:, None],
    "by token": _by_token,
    "if": lambda x: x if bool(x.sum() > 0) else -x,
    "noise": lambda x: x + torch.rand_like(x),
    "normalised": lambda x: functional.normalize(x, dim=-1),
    "own norm": lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt(),
    "softmax": lambda x: x.softmax(-1),
    "fused": lambda x: _merged(functional.scaled_dot_product_attention(_heads(x), _heads(x), _heads(x))),
    "fused without heads": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "fused, one query": lambda x: functional.scaled_dot_product_attention(x[:, :1], x, x).expand_as(x),
    "matmul": lambda x: _merged((_heads(x) @ _heads(x).mT * 0.5).softmax(-1) @ _heads(x)),
    "over queries": lambda x: _merged((_heads(x) @ _heads(x).mT).softmax(-2) @ _heads(x)),
    "of batch": lambda x: (x.transpose(0, 1) @ x.transpose(0, 1).mT).softmax(-1) @ x.transpose(0, 1),
    "without softmax": lambda x: x @ x.mT @ x,
    "of channels": lambda x: x @ (x.mT @ x).softmax(-1),
    "exponentials": _exponentials,
    "divided behind": _divided_behind,
    "rows": _one_head_rows,
    "einsum": lambda x: _written(x, ("bihc,bjhc->bhij", "bhij,bjhc->bihc")),
    "einsum, heads last": lambda x: _written(x, ("bihc,bjhc->bijh", "bijh,bjhc->bihc"), 2),
    "einsum, heads first": lambda x: _written(x, ("bihc,bjhc->hbij", "hbij,bjhc->bihc")),
    "einsum over heads": lambda x: _written(x, ("bihc,bigc->bihg", "bihg,bigc->bihc")),
    "einsum over images": lambda x: _written(x, ("bihc,aihc->abih", "abih,aihc->bihc"), 0),
    "einsum with dots": lambda x: torch.einsum("...ij,...jc->...ic", torch.einsum("...ic,...jc->...ij", x, x), x),
    "KeyError": lambda x: _raise(KeyError("blocks")),
    "StopIteration": lambda x: next(iter(())),
    "strange error": lambda x: _raise(StrangeError),
    "TypeError": lambda x: x + "positions",
}
SUMS = {
    "add": lambda x, y: x + y,
    "in place": lambda x, y: x.add_(y),
    "branch in place": lambda x, y: y.add_(x),
    "alpha": lambda x, y: torch.add(x, y, alpha=0.5),
    "sub": lambda x, y: x - y,
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, y, torch.ones(())),
    "stack": lambda x, y: torch.stack([x, y]).sum(0),
    "cat": lambda x, y: torch.cat([x[..., None], y[..., None]], -1).mean(-1),
    "scaled": lambda x, y: 0.9 * x + 0.1 * y,
    "gated": lambda x, y: x * y.sigmoid() + x,
    "where": lambda x, y: torch.where(x > 0, x + y, x),
    "python": lambda x, y: sum([x, y]),
    "einsum": lambda x, y: torch.einsum("bnc,bnc->bnc", x, y) + x,
}
HEADS = {
    "class token": lambda x: x[:, 0],
    "mean": lambda x: x.mean(1),
    "max": lambda x: x.amax(1),
    "last": lambda x: x[:, -1],
    "flat": lambda x: x.flatten(1)[:, :CHANNELS],
    "norm": lambda x: functional.layer_norm(x, (CHANNELS,)).mean(1),
    "attention": lambda x: functional.scaled_dot_product_attention(x[:, :1], x, x)[:, 0],
    "softmax": lambda x: (x.sum(-1, keepdim=True).softmax(1) * x).sum(1),
    "constant": lambda x: torch.ones(len(x), CHANNELS),
    "all tokens": lambda x: x,
}
RETURNS = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, y),
    "dictionary": lambda y: {"logits": y},
    "other dictionary": lambda y: {"features": y},
    "none": lambda y: None,
    "list": lambda y: [y],
    "probabilities": lambda y: y.softmax(-1),
    "detached": lambda y: y.detach(),
    "integers": lambda y: y.argmax(-1),
    "one number": lambda y: y.sum(),
    "nan": lambda y: y / 0,
    "string": lambda y: "cat",
}


class Function(nn.Module):
    """A function of the tokens as a module."""

    def __init__(self, table: dict[str, Any], name: str) -> None:
        super().__init__()
        self.function = table[name]

    def forward(self, *tokens: Any) -> Any:
        return self.function(*tokens)


class MultiHead(nn.Module):
    """torch's attention, which returns a tuple."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(CHANNELS, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x)[0]


class ChannelsFirst(nn.Module):
    """A module that takes channels before tokens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mT).mT


class Residual(nn.Module):
    """A sum of what a module gets and gives."""

    def __init__(self, inner: nn.Module, kind: str, *, norm: bool) -> None:
        super().__init__()
        self.inner, self.sum = inner, SUMS[kind]
        self.norm = nn.LayerNorm(CHANNELS) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.sum(x, self.inner(self.norm(x)))


class Loop(nn.Module):
    """Modules in a list that run several times; what they return in a tuple or dictionary is taken out."""

    def __init__(self, modules: list[nn.Module], times: int, wrap: str) -> None:
        super().__init__()
        self.parts, self.times, self.wrap = nn.ModuleList(modules), times, RETURNS[wrap]

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            for part in self.parts:
                given = self.wrap(part(x))
                given = next(iter(given.values())) if isinstance(given, dict) else given
                x = given[0] if isinstance(given, tuple | list) else given
        return x


class Stranger(nn.Module):
    """An image model with any module in its middle."""

    def __init__(self, stem: str, body: nn.Module, head: str, returns: str) -> None:
        super().__init__()
        self.stem, self.body = stem, body
        self.patches = nn.Conv2d(3, CHANNELS, PATCH, PATCH)
        self.cut = nn.Linear(3 * PATCH * PATCH, CHANNELS)
        self.token = nn.Parameter(torch.randn(1, 1, CHANNELS))
        self.positions = nn.Parameter(torch.randn(1, (PIXELS // PATCH) ** 2, CHANNELS))
        self.pool, self.head, self.returned = HEADS[head], nn.Linear(CHANNELS, CLASSES), RETURNS[returns]

    def forward(self, images: Tensor) -> Any:
        if self.stem == "cut":
            rows = images.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).permute(0, 2, 3, 1, 4, 5)
            tokens = self.cut(rows.flatten(3).flatten(1, 2))
        elif self.stem == "pixels":
            tokens = images.flatten(2).mT @ torch.ones(3, CHANNELS)
        elif self.stem == "ignored":
            tokens = self.token.expand(len(images), 9, -1)
        else:
            tokens = self.patches(images)
            tokens = tokens.permute(0, 2, 3, 1) if self.stem == "grid" else tokens.flatten(2).mT
        if self.stem in {"class token", "cut"}:
            tokens = torch.cat([self.token.expand(len(tokens), -1, -1), tokens + self.positions], 1)
        return self.returned(self.head(self.pool(self.body(tokens))))


STEMS = ("patches", "class token", "cut", "grid", "pixels", "ignored")
_LAYERS = {
    "linear": lambda: nn.Linear(CHANNELS, CHANNELS),
    "wide": lambda: nn.Sequential(nn.Linear(CHANNELS, 2 * CHANNELS), nn.GELU(), nn.Linear(2 * CHANNELS, CHANNELS)),
    "norm": lambda: nn.LayerNorm(CHANNELS),
    "batch norm": lambda: ChannelsFirst(nn.BatchNorm1d(CHANNELS)),
    "convolution": lambda: ChannelsFirst(nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1)),
    "convolution of tokens": lambda: nn.Conv1d(9, 9, 1),
    "multi-head": lambda: MultiHead(batch_first=True),
    "multi-head, tokens first": lambda: MultiHead(batch_first=False),
    "encoder": lambda: nn.TransformerEncoderLayer(CHANNELS, 2, 16, batch_first=True),
    "nothing": nn.Sequential,
}


def build(tree: Any) -> nn.Module:
    """The module that a tree of names describes."""
    kind, *parts = tree
    if kind == "layer":
        return _LAYERS[parts[0]]()
    if kind == "function":
        return Function(FUNCTIONS, parts[0])
    if kind == "residual":
        return Residual(build(parts[0]), parts[1], norm=parts[2])
    if kind == "loop":
        return Loop([build(part) for part in parts[0]], parts[1], parts[2])
    return nn.Sequential(*map(build, parts[0]))


def _attending() -> st.SearchStrategy[Any]:
    names = ("fused", "matmul", "einsum", "einsum, heads last", "einsum, heads first", "rows", "exponentials")
    functions = st.tuples(st.just("function"), st.sampled_from(names))
    return functions | st.tuples(st.just("layer"), st.sampled_from(("multi-head", "encoder")))


def trees() -> st.SearchStrategy[Any]:
    """Trees of modules; half of the blocks are sensible ones, so that strange parts meet a stream."""
    layers = st.tuples(st.just("layer"), st.sampled_from(sorted(_LAYERS)))
    functions = st.tuples(st.just("function"), st.sampled_from(sorted(FUNCTIONS)))
    plain = st.tuples(st.just("residual"), _attending(), st.sampled_from(("add", "in place")), st.just(True))  # noqa: FBT003

    def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        several = st.lists(inner, min_size=1, max_size=4)
        return (
            st.tuples(st.just("residual"), inner, st.sampled_from(sorted(SUMS)), st.booleans())
            | st.tuples(st.just("loop"), several, st.integers(1, 3), st.sampled_from(("tensor", "tuple", "dictionary")))
            | st.tuples(st.just("sequential"), several)
        )

    inside = st.recursive(layers | functions | plain, nested, max_leaves=8)
    return st.lists(plain | inside, min_size=1, max_size=4).map(lambda parts: ("sequential", parts))


def specifications() -> st.SearchStrategy[Any]:
    """Stem, tree, head and returned value of a model, the usual ones more often."""
    stems = st.sampled_from(("class token", "patches", *STEMS))
    heads = st.sampled_from(("class token", "mean", "class token", "mean", *sorted(HEADS)))
    returns = st.just("tensor") | st.sampled_from(("tensor", *sorted(RETURNS)))
    return st.tuples(stems, trees(), heads, returns)


def build_model(specification: Any) -> Stranger:
    """The model of a specification, with the same weights every time."""
    torch.manual_seed(0)
    stem, tree, head, returns = specification
    return Stranger(stem, build(tree), head, returns)
