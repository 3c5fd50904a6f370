"""Errors that a user can cause. All derive from ``VitreousError`` and have a one-line message."""


class VitreousError(Exception):
    """Base class of the errors of this package.

    Examples:
        >>> import vitreous
        >>> try:
        ...     vitreous.explain(model, "demo.jpg", "tokentn")
        ... except vitreous.errors.VitreousError as error:
        ...     print(error)
        there is no method 'tokentn'; did you mean tokentm, bi_token, gradtoken?
    """


class InputError(VitreousError, ValueError):
    """The images are not a valid input: wrong rank, channels or size, or non-finite pixels."""


class TargetError(VitreousError, ValueError):
    """The target class does not exist, or the target has the wrong shape."""


class MethodError(VitreousError, ValueError):
    """A method is unknown, has an unknown option, or combines incompatible parts."""


class ImageError(VitreousError, ValueError):
    """A file is not an image that can be read safely."""


class DataError(VitreousError, ValueError):
    """A data set or a sample is missing or damaged; the message says what, and where to obtain the data set."""


class ModelError(VitreousError, ValueError):
    """A model cannot be found or loaded, or its name is not valid."""


class UnsupportedModelError(ModelError):
    """The model lacks a part that the requested method needs."""


class RefusedMethodsError(UnsupportedModelError, MethodError):
    """Some of the requested methods do not support this model or precision.

    Attributes:
        reasons: the reason by method spelling.
    """

    def __init__(self, message: str, reasons: dict[str, str]) -> None:
        super().__init__(message)
        self.reasons = reasons


class MissingDependencyError(VitreousError, ImportError):
    """An optional dependency is not installed; the message names the extra."""


class ProtocolError(VitreousError, ValueError):
    """An evaluation protocol is unknown, or does not fit the model or the data."""


class RunError(VitreousError, ValueError):
    """An evaluation cannot be run with these options, or its stored run does not match them."""
