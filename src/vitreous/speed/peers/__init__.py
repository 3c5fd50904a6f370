"""Peers: other projects that have some of the methods, one file each; imported only when they are asked for."""

from vitreous.speed.peers.choosing import PEERS, find_peers, usual_spellings
from vitreous.speed.peers.peer import Answer, Peer, Scene

__all__ = ["PEERS", "Answer", "Peer", "Scene", "find_peers", "usual_spellings"]
