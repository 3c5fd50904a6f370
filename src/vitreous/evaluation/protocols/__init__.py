"""Protocols: the evaluations of papers as data."""

from vitreous.evaluation.protocols.protocol import Protocol
from vitreous.evaluation.protocols.registry import PROTOCOLS, find_protocol, list_protocols

__all__ = ["PROTOCOLS", "Protocol", "find_protocol", "list_protocols"]
