"""A peer: which of our spellings it implements, and how to run it on the same model and images."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from vitreous.architecture import Architecture
from vitreous.tape import Layout


@dataclass(frozen=True)
class PeerInput:
    """The model, images and classes that a peer is run on.

    Attributes:
        model: the network with frozen parameters.
        architecture: where its blocks are.
        images: (batch, channel, height, width).
        target: one class per image, (batch,).
        layout: patch grid and prefix tokens.
    """

    model: nn.Module
    architecture: Architecture
    images: Tensor
    target: Tensor
    layout: Layout

    def block(self, layer: int) -> nn.Module:
        """Return a block; negative numbers count from the last."""
        module = self.architecture.blocks[layer].module
        assert module is not None, f"block {layer} is no module"
        return module

    def first_norm(self, layer: int) -> nn.Module:
        """Return the norm before a block's attention."""
        norm = self.architecture.blocks[layer].first_norm
        assert norm is not None, f"block {layer} has no first norm"
        assert norm.module is not None, f"the first norm of block {layer} is no module"
        return norm.module

    def previous_block(self, layer: int) -> nn.Module:
        """Return the module whose output is a block's input: the previous block."""
        assert layer > 0, "there is no block below the first"
        return self.block(layer - 1)

    def patches(self, scores: Tensor) -> Tensor:
        """(batch, tokens) -> (batch, patches)."""
        return scores[:, self.layout.prefix :].detach()

    def as_grid(self, tokens: Tensor) -> Tensor:
        """(batch, tokens, channels) -> (batch, channels, rows, columns), the layout of a convolution."""
        rows, columns = self.layout.grid
        return tokens[:, self.layout.prefix :].reshape(len(tokens), rows, columns, -1).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class PeerMethod:
    """One method of a peer.

    Attributes:
        spellings: its spellings in vitreous; ``{name}`` matches an integer, passed to ``explain`` under that name.
        explain: returns the map, (batch, patches).
    """

    spellings: tuple[str, ...]
    explain: Callable[..., Tensor]

    def match(self, spelling: str) -> Callable[[PeerInput], Tensor] | None:
        """Return the function for a spelling; ``None`` if it is another method."""
        for template in self.spellings:
            pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>-?\\d+)", re.escape(template))
            match = re.fullmatch(pattern, spelling)
            if match is not None:
                return self._quietly(**{name: int(number) for name, number in match.groupdict().items()})
        return None

    def _quietly(self, **numbers: int) -> Callable[[PeerInput], Tensor]:
        """Suppress the peer's progress bars and warnings."""

        def explain(given: PeerInput) -> Tensor:
            with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()):
                return self.explain(given, **numbers)

        return explain


@dataclass(frozen=True)
class Peer:
    """Another library.

    Attributes:
        name: name of the package.
        load: imports the parts that are used.
        methods: the methods that it implements.
        usual: the spellings that are compared by default.
        apart: whether to install it without its dependencies, because it pins old or unrelated packages.
    """

    name: str
    load: Callable[[], Any]
    methods: tuple[PeerMethod, ...]
    usual: tuple[str, ...]
    apart: bool = False

    @property
    def installation(self) -> str:
        """The command that installs it."""
        extra = 'pip install "vitreous[peers]"'
        return f"{extra} and pip install --no-deps {self.name}" if self.apart else extra

    @cached_property
    def problem(self) -> str | None:
        """Why it cannot be used; ``None`` if it can."""
        try:
            self.load()
        except ImportError as error:
            return f"it cannot be imported: {error}"
        return None

    def method_for(self, spelling: str) -> Callable[[PeerInput], Tensor] | None:
        """Return the function for a spelling; ``None`` if the peer has no such method."""
        found = (method.match(spelling) for method in self.methods)
        return next((function for function in found if function is not None), None)
