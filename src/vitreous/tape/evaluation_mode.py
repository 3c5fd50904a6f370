"""Running a model in evaluation mode for a while, also when several threads do so with the same model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn


@dataclass
class _Visit:
    users: int
    training: list[nn.Module]


_visits: dict[int, _Visit] = {}
_lock = threading.Lock()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation mode; the last of all concurrent users restores exactly what the first one found."""
    with _lock:
        visit = _visits.setdefault(id(model), _Visit(0, []))
        if visit.users == 0:
            visit.training = [module for module in model.modules() if module.training]
            for module in visit.training:
                module.training = False
        visit.users += 1
    try:
        yield
    finally:
        with _lock:
            visit.users -= 1
            if visit.users == 0:
                for module in visit.training:
                    module.training = True
                del _visits[id(model)]
