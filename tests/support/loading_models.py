"""What tests of loading share: the sentence of a refusal, and whether weights arrived."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vitreous.errors import ModelError
from vitreous.models import load_model


def error_of(name: str, **options) -> str:
    """The one line that loading a model ends in."""
    with pytest.raises(ModelError) as caught:
        load_model(name, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    """Whether all that one model holds is the same in another."""
    theirs = other.state_dict()
    return all(torch.equal(value, theirs[key]) for key, value in one.state_dict().items())
