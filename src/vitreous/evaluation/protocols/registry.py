"""All protocols by name."""

from __future__ import annotations

from collections.abc import Mapping

from vitreous.close_match import close_match
from vitreous.errors import ProtocolError
from vitreous.evaluation.protocols import agcam, chefer, eraser, gradtoken, libra, sanity, skipplus, tokentm
from vitreous.evaluation.protocols.protocol import Protocol

PROTOCOLS: Mapping[str, Protocol] = {
    protocol.name: protocol
    for module in (chefer, tokentm, gradtoken, skipplus, libra, agcam, sanity, eraser)
    for protocol in module.PROTOCOLS
}


def find_protocol(name: str) -> Protocol:
    """The protocol of that name.

    Raises:
        ProtocolError: there is none.
    """
    if name not in PROTOCOLS:
        raise ProtocolError(
            f"there is no protocol {name!r}{close_match(name, PROTOCOLS)}; there are {', '.join(PROTOCOLS)}"
        )
    return PROTOCOLS[name]


def list_protocols() -> list[Protocol]:
    """All protocols, paper by paper."""
    return list(PROTOCOLS.values())
