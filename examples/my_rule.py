"""A rule of our own, as an example of a plugin: ``vitreous explain demo --plugin examples/my_rule.py ...``."""
# ruff: noqa: INP001

from torch import Tensor

from vitreous.rules import ElementwiseCall, Rule, register


@register
class GuidedRule(Rule):
    """Guided backpropagation (Springenberg et al. 2015) with constant normalisation.

    Through an activation only a positive gradient passes, and only where its input is positive.
    """

    name = "guided"
    normalisation = "constant"  # the deviation is a constant, so each norm is a linear map

    def backward_activation(self, call: ElementwiseCall, gradient: Tensor) -> Tensor:
        """The gradient at the input of an activation, given the one at its output."""
        return call.gradient(gradient.clamp(min=0)) * (call.input > 0)
