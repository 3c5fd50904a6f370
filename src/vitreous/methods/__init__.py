"""Methods: what is read from a tape, one file per family; importing this package fills the registry."""

from vitreous.methods import (
    attention,
    attention_gradient,
    cam,
    decomposition,
    fullgrad,
    gradient,
    gradient_relevance,
    gradtoken,
    integrated,
    integrated_attention,
    masking_cam,
    relevance,
    tokentm,
)
from vitreous.methods.options import OptionInfo
from vitreous.methods.readout import MatrixReadout, Procedure, Readout, TokenReadout
from vitreous.methods.registry import MethodInfo, list_methods, method_info, register
from vitreous.methods.view import Row, View

__all__ = [
    "MatrixReadout",
    "MethodInfo",
    "OptionInfo",
    "Procedure",
    "Readout",
    "Row",
    "TokenReadout",
    "View",
    "attention",
    "attention_gradient",
    "cam",
    "decomposition",
    "fullgrad",
    "gradient",
    "gradient_relevance",
    "gradtoken",
    "integrated",
    "integrated_attention",
    "list_methods",
    "masking_cam",
    "method_info",
    "register",
    "relevance",
    "tokentm",
]
