"""Methods: what is read from a tape, one file per family; importing this package fills the registry."""

from vitreous.methods import (
    atman,
    attention,
    decomposition,
    gradient,
    gradtoken,
    hsic,
    occlusion,
    rise,
    surrogate,
    tokentm,
    vitcx,
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
    "atman",
    "attention",
    "decomposition",
    "gradient",
    "gradtoken",
    "hsic",
    "list_methods",
    "method_info",
    "occlusion",
    "register",
    "rise",
    "surrogate",
    "tokentm",
    "vitcx",
]
