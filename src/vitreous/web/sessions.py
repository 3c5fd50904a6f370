"""What Gradio keeps of every visitor: only what the page needs of it, so that it does not grow with what is shown."""

from __future__ import annotations

from typing import Any

from gradio.blocks import Block
from gradio.state_holder import SessionState, StateHolder

MOST_SESSIONS = 1000


class Session(SessionState):
    """One visitor's state.

    Gradio also keeps the last value of every part of the page, megabytes of pictures, for links to a state of the page,
    which this server does not offer. And a part that is changed by an update is made anew under a number of its own,
    under which it is then kept as well, once more with every photo.
    """

    def __init__(self, blocks: Any) -> None:
        super().__init__(blocks)
        self.config_values = {}

    def __setitem__(self, key: int, value: Any) -> None:
        if isinstance(value, Block):
            value._id = key  # noqa: SLF001  # Gradio looks it up by this
        super().__setitem__(key, value)
        self.config_values.clear()

    def _update_config(self, key: int) -> None:
        """Keep nothing."""

    def _update_value_in_config(self, key: int, value: Any) -> None:
        """Keep nothing."""


class Sessions(StateHolder):
    """The states of all visitors, those that were used last."""

    def __getitem__(self, session_id: str) -> SessionState:
        if session_id not in self.session_data:
            self.session_data[session_id] = Session(self.blocks)
        return super().__getitem__(session_id)


def keep_little(page: Any) -> None:
    """Let a page that was launched keep its visitors' states so."""
    sessions = Sessions()  # type: ignore[no-untyped-call]
    sessions.set_blocks(page)
    page.app.state_holder = sessions
