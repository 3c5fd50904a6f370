"""How far a forward pass has come: the parts of a recorder share this."""

from __future__ import annotations

from bisect import bisect_left

from vitreous.architecture import Architecture


class Progress:
    """Where in the model the running forward pass is.

    Attributes:
        depth: L, the number of blocks.
        batch: how many images there are.
        tokens: how many tokens the stream has.
        step: the number of the step that is running, or has run last.
    """

    def __init__(self, architecture: Architecture, batch: int) -> None:
        self.depth, self.batch = architecture.depth, batch
        self.tokens = 0
        self.step = -1
        blocks = architecture.blocks
        self._ends = [block.output.step for block in blocks]
        self._end = max(self._ends[-1], architecture.stream_end)
        self._start = blocks[0].input.step
        self._spans = [block.attention_steps for block in blocks]

    @property
    def next_block(self) -> int:
        """The block that is running or will run next; L behind the last."""
        return bisect_left(self._ends, self.step) if self.reached_blocks else 0

    @property
    def reached_blocks(self) -> bool:
        """Whether the first block runs, or has run."""
        return self.step > self._start

    @property
    def inside_block(self) -> bool:
        """Whether a block runs, also one of a later stage."""
        return self._start < self.step <= self._end

    @property
    def behind(self) -> bool:
        """Whether all blocks have run, also those of later stages."""
        return self.step > self._end

    @property
    def layer(self) -> int | None:
        """The block that a call belongs to; L behind the last one, ``None`` before the first."""
        return self.next_block if self.reached_blocks else None

    @property
    def attending(self) -> int | None:
        """The block whose attention is running, from its queries, keys and values to O."""
        layer = self.layer
        if layer is None or layer == self.depth:
            return None
        first, last = self._spans[layer]
        return layer if first <= self.step <= last else None
