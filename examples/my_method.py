"""Two methods of our own, as an example of a plugin: ``vitreous explain demo --plugin examples/my_method.py ...``."""
# ruff: noqa: INP001

from torch import Tensor
from torch.nn.functional import cosine_similarity

from vitreous.methods import View
from vitreous.plugin import method
from vitreous.tape import Pass

LOGIT = Pass("plain", "logit")  # an ordinary backward pass of the explained class's logit


@method("value_length", values=("attention_rows",), layer=-1)
def value_length(view: View, layer: int) -> Tensor:
    """How long a token's value vectors are, averaged over heads."""
    return view.value(layer).norm(dim=-1).mean(dim=1)


@method("agreement", values=("tokens",), slopes=("tokens",), signed=True, aggregation="skipplus")
def agreement(view: View, layer: int) -> Tensor:
    """Cosine of a token and the gradient at it: whether more of the token means more of the class."""
    return cosine_similarity(view.tokens(layer), view.token_gradient(LOGIT, layer), dim=-1)
