"""The functions of torch by which models spell the same operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

ATTENTION = (F.scaled_dot_product_attention,)
MULTI_HEAD_ATTENTION = (F.multi_head_attention_forward,)
SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
MATRIX_PRODUCT = (
    *(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm),
    *(torch.baddbmm, Tensor.baddbmm, torch.einsum),
)
SAME_VALUES = (F.dropout, torch.dropout, Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.contiguous)
LAYER_NORM = (F.layer_norm, torch.layer_norm)
BATCH_NORM = (F.batch_norm,)
GROUP_NORM = (F.group_norm, torch.group_norm)
RMS_NORM = (F.rms_norm, torch.rms_norm)
TANH = (torch.tanh, Tensor.tanh, F.tanh)
# Functions that weigh something where they are multiplied with it, and their slope at 0.
GATES: Mapping[Callable[..., Any], float] = {
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid, F.sigmoid, torch.special.expit), 0.25),
    F.hardsigmoid: 1 / 6,
    **dict.fromkeys(TANH, 1.0),
    **dict.fromkeys((torch.erf, Tensor.erf), 2 / math.pi**0.5),
}
GATED = (F.glu,)
INVERSE_ROOT = (torch.rsqrt, Tensor.rsqrt)
ROOT = (torch.sqrt, Tensor.sqrt)
DEVIATION = (torch.std, Tensor.std)
DEVIATION_AND_MEAN = (torch.std_mean,)
DEVIATION_STEPS = (
    *(torch.reciprocal, Tensor.reciprocal, Tensor.__rtruediv__),
    *(torch.clamp, Tensor.clamp, torch.clamp_min, Tensor.clamp_min),
)
SQUARE = (torch.square, Tensor.square)
POWER = (torch.pow, Tensor.pow, Tensor.__pow__)
LENGTHS = (torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm)
NORMALIZE = (F.normalize,)
LINEAR = (F.linear,)
ADDMM = (torch.addmm, Tensor.addmm)
ADDED_PRODUCT = (torch.addcmul, Tensor.addcmul)
JOINING = (torch.cat, torch.concat, torch.concatenate)
MULTIPLICATION = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply)
MULTIPLICATION_IN_PLACE = (Tensor.mul_, Tensor.__imul__)
ADDITION = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
ADDITION_IN_PLACE = (Tensor.add_, Tensor.__iadd__)
SUBTRACTION = (torch.sub, Tensor.sub, Tensor.__sub__, torch.subtract, Tensor.subtract, Tensor.sub_, Tensor.__isub__)
SUBTRACTION_FROM = (torch.rsub, Tensor.__rsub__)
DIVISION = (torch.div, Tensor.div, Tensor.__truediv__)
DIVISION_IN_PLACE = (Tensor.div_, Tensor.__itruediv__)
MASKED_FILL = (torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_)
POOLING = (
    *(Tensor.__getitem__, torch.mean, Tensor.mean, torch.sum, Tensor.sum),
    *(F.adaptive_avg_pool1d, torch.adaptive_avg_pool1d, F.avg_pool1d),
)
NEGATION = (torch.neg, Tensor.neg, Tensor.__neg__, torch.negative, Tensor.negative)
INTERPOLATION = (torch.lerp, Tensor.lerp)
CONVOLUTION = (F.conv2d, torch.conv2d, F.conv3d, torch.conv3d)
CONVOLUTION_OF_ROW = (F.conv1d, torch.conv1d)
GRID_POOLING = (F.max_pool2d, torch.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.pixel_unshuffle)
# Activations f, and their slope at 0 (for f(u)/u at u = 0, which is a gate; f(0) counts as a bias where it is not 0).
ACTIVATIONS: Mapping[Callable[..., Any], float] = {
    F.gelu: 0.5,
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu), 0.0),
    F.silu: 0.5,
    F.mish: 0.6,
    F.hardswish: 0.5,
    **dict.fromkeys((F.elu, F.celu), 1.0),
    F.selu: 1.0507009873554805,  # its scale
    F.leaky_relu: 1.0,
    **dict.fromkeys((F.relu6, F.hardtanh), 0.0),
    F.softsign: 1.0,
    **dict.fromkeys((F.tanhshrink, F.hardshrink, F.softshrink), 0.0),
    **dict.fromkeys((F.softplus, F.logsigmoid), 0.5),
}
NOT_0_AT_0 = frozenset(
    {torch.sigmoid, Tensor.sigmoid, F.sigmoid, torch.special.expit, F.hardsigmoid, F.softplus, F.logsigmoid}
)
