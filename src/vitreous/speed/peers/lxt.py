"""lxt: AttnLRP and CP-LRP by patched modules, as input x gradient at the first block."""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from vitreous.speed.peers.peer import Peer, PeerInput, PeerMethod

_LANGUAGE_MODELS = "lxt.efficient.models"
_ACTIVATIONS = (nn.GELU, nn.ReLU, nn.SiLU)


def load() -> Any:
    """Import lxt's patches without its language models, which fail to import with other versions of transformers."""
    if "lxt.efficient.patches" not in sys.modules:
        importlib.import_module("lxt")
        unused = types.ModuleType(_LANGUAGE_MODELS)
        vars(unused)["get_default_map"] = None
        sys.modules[_LANGUAGE_MODELS] = unused
        try:
            with warnings.catch_warnings(action="ignore"):  # it warns that zennit is not installed
                importlib.import_module("lxt.efficient.patches")
        finally:
            del sys.modules[_LANGUAGE_MODELS]
    return sys.modules["lxt.efficient.patches"]


def relevance(attention: str, given: PeerInput) -> Tensor:
    """Relevance of the first block's tokens; ``attention`` names lxt's wrapper of the attention call."""
    patches, entering = load(), []

    def catch(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        entering.append(arguments[0].detach().requires_grad_())
        return (entering[0], *arguments[1:])

    with _patched(given.model, patches, getattr(patches, attention)), given.block(0).register_forward_pre_hook(catch):
        logits = given.model(given.images)
        chosen = logits.gather(1, given.target[:, None]).sum()
        (gradient,) = torch.autograd.grad(chosen, entering)
    return given.patches((entering[0] * gradient).sum(dim=-1).detach())


@contextmanager
def _patched(model: nn.Module, patches: Any, wrap: Callable[..., Any]) -> Iterator[None]:
    """Apply lxt's rules to a model's norms, activations and fused attention calls inside the context.

    lxt itself patches classes permanently; here the same functions are set on instances and removed again.
    """
    fused = F.scaled_dot_product_attention
    wrapped = wrap(lambda _, *given, **options: fused(*given, **options))
    touched: list[nn.Module] = []
    F.scaled_dot_product_attention = lambda *given, **options: wrapped(None, *given, **options)
    try:
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                vars(module)["forward"] = types.MethodType(patches.layer_norm_forward, module)
                touched.append(module)
            elif isinstance(module, _ACTIVATIONS):
                vars(module)["original_forward"] = module.forward
                vars(module)["forward"] = types.MethodType(patches.non_linear_forward, module)
                touched.append(module)
        yield
    finally:
        F.scaled_dot_product_attention = fused
        for module in touched:
            vars(module).pop("original_forward", None)
            del vars(module)["forward"]


LXT = Peer(
    "lxt",
    load,
    (
        PeerMethod(("attnlrp",), partial(relevance, "wrap_attention_forward")),
        PeerMethod(("decompx",), partial(relevance, "cp_wrap_attention_forward")),
    ),
    usual=("attnlrp", "decompx"),
    apart=True,
)
