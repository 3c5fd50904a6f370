"""Peers: other libraries that implement some of the methods, one file each; imported on first use."""

from __future__ import annotations

from collections.abc import Sequence

from vitreous.errors import InputError, MissingDependencyError
from vitreous.speed.peers.captum import CAPTUM
from vitreous.speed.peers.grad_cam import GRAD_CAM
from vitreous.speed.peers.lxt import LXT
from vitreous.speed.peers.peer import Peer, PeerInput, PeerMethod
from vitreous.speed.peers.pnpxai import PNPXAI
from vitreous.speed.peers.quantus import QUANTUS

__all__ = ["PEERS", "Peer", "PeerInput", "PeerMethod", "find_peers", "usual_spellings"]

PEERS = {peer.name: peer for peer in (CAPTUM, GRAD_CAM, LXT, PNPXAI, QUANTUS)}
ALL = "all"


def find_peers(names: Sequence[str]) -> list[Peer]:
    """Return the peers by name, or ``all`` of them; with ``all``, a missing one is reported in its rows.

    Raises:
        InputError: there is no such peer.
        MissingDependencyError: a named peer cannot be imported, or none can.
    """
    unknown = [name for name in names if name not in PEERS and name != ALL]
    if unknown:
        raise InputError(f"there is no peer {unknown[0]!r}: choose from {', '.join(PEERS)}, or {ALL}")
    chosen = list(PEERS.values()) if ALL in names else [PEERS[name] for name in dict.fromkeys(names)]
    missing = [peer for peer in chosen if peer.problem]
    if missing and (ALL not in names or len(missing) == len(chosen)):
        raise MissingDependencyError(f"{missing[0].name}: {missing[0].problem}; {missing[0].installation}")
    return chosen


def usual_spellings(peers: Sequence[Peer]) -> list[str]:
    """Return the default spellings of these peers, without duplicates."""
    return list(dict.fromkeys(spelling for peer in peers for spelling in peer.usual))
