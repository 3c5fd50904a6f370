"""Explanation methods, one file per family; importing this package fills the registry."""

from vitreous.methods import (
    attention,
    cam,
    controls,
    decomposition,
    gradient,
    gradtoken,
    integrated,
    integrated_attention,
    occlusion,
    relevance,
    rise,
    surrogate,
    tokentm,
    twoscale,
    vitcx,
)
from vitreous.methods.options import OptionInfo
from vitreous.methods.readout import MatrixReadout, Procedure, Readout, TokenReadout
from vitreous.methods.registry import (
    MethodInfo,
    is_control,
    list_controls,
    list_methods,
    method_info,
    own_code,
    register,
)
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
    "cam",
    "controls",
    "decomposition",
    "gradient",
    "gradtoken",
    "integrated",
    "integrated_attention",
    "is_control",
    "list_controls",
    "list_methods",
    "method_info",
    "occlusion",
    "own_code",
    "register",
    "relevance",
    "rise",
    "surrogate",
    "tokentm",
    "twoscale",
    "vitcx",
]
