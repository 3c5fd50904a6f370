"""Example of a plugin with a rule: ``vitreous explain demo --plugin examples/my_rule.py ...``."""
# ruff: noqa: INP001

from torch import Tensor

from vitreous.rules import ElementwiseCall, Rule, register


@register
class GuidedRule(Rule):
    """Guided backpropagation (Springenberg et al. 2015) with constant normalisation.

    Activations pass only positive gradients, and only where their input is positive.
    """

    name = "guided"
    normalisation = "constant"  # the deviation is a constant, so each norm is a linear map

    def backward_activation(self, call: ElementwiseCall, gradient: Tensor) -> Tensor:
        """Return the gradient at the input of an activation from that at its output."""
        return call.gradient(gradient.clamp(min=0)) * (call.input > 0)
