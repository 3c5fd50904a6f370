"""How far a forward pass has come: the parts of a recorder share this."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """Where in the model the running forward pass is.

    Attributes:
        depth: L, the number of blocks.
        batch: how many images there are.
        next_block: the block that is running or will be entered next; L behind the last.
        inside_block: whether it is running.
        tokens: how many tokens the running block got.
        attending: the block whose attention module is running.
    """

    depth: int
    batch: int
    next_block: int = 0
    inside_block: bool = False
    tokens: int = 0
    attending: int | None = None

    @property
    def reached_blocks(self) -> bool:
        """Whether the first block has been entered."""
        return self.inside_block or self.next_block > 0

    @property
    def behind(self) -> bool:
        """Whether all blocks have run."""
        return self.next_block == self.depth and not self.inside_block

    @property
    def layer(self) -> int | None:
        """The block that a call belongs to; L behind the last one, ``None`` before the first and between blocks.

        A block that has no attention module of its own may still attend, and a rule must take hold of that.
        """
        if self.attending is not None:
            return self.attending
        return self.next_block if self.inside_block or self.behind else None

    @property
    def counting(self) -> int | None:
        """The block that a bias counts with: between two blocks, where a head may read what one gives, the next."""
        return self.next_block if self.layer is None and self.next_block > 0 else self.layer
