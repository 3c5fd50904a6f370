"""Example of a plugin with three methods: ``vitreous explain demo --plugin examples/my_method.py ...``."""
# ruff: noqa: INP001

from torch import Tensor
from torch.nn.functional import cosine_similarity

from vitreous.methods import View
from vitreous.plugin import method
from vitreous.tape import Pass

LOGIT = Pass("plain", "logit")  # an ordinary backward pass of the explained class's logit


@method("value_length", activations=("attention_rows",), layer=-1)
def value_length(view: View, layer: int) -> Tensor:
    """Norm of a token's value vectors, averaged over heads."""
    return view.value(layer).norm(dim=-1).mean(dim=1)


@method("agreement", activations=("tokens",), gradients=("tokens",), signed=True, aggregation="skipplus")
def agreement(view: View, layer: int) -> Tensor:
    """Cosine similarity of a token and its gradient: positive if scaling the token up increases the logit."""
    return cosine_similarity(view.tokens(layer), view.token_gradient(LOGIT, layer), dim=-1)


@method("attention_gain", activations=("attention_rows",), gradients=("attention",), layer=-1)
def attention_gain(view: View, layer: int) -> Tensor:
    """Positive part of attention x its gradient: attention to a token that increases the logit."""
    rows = view.layout.read  # the tokens that the head reads: the class token, or all pooled tokens
    attention = view.attention_matrix(layer, rows)  # A, (batch, head, rows, tokens)
    gradient = view.attention_gradient(LOGIT, layer, rows)  # dy/dA, same shape
    return (attention * gradient).clamp(min=0).mean(dim=(1, 2))  # over heads and rows: (batch, tokens)
