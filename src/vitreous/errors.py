"""Every error a user can cause has a type of its own and a one-line message; all derive from ``VitreousError``."""


class VitreousError(Exception):
    """Base of all errors that vitreous raises on purpose.

    Examples:
        >>> import vitreous
        >>> try:
        ...     vitreous.explain(model, "demo.jpg", "tokentn")
        ... except vitreous.errors.VitreousError as error:
        ...     print(error)
        'tokentn': there is no method 'tokentn'; did you mean tokentm, bi_token, gradtoken?
    """


class InputError(VitreousError, ValueError):
    """The images given are not what a model can take: wrong rank, channels, size, or non-finite pixels."""


class TargetError(VitreousError, ValueError):
    """The class to explain does not exist or has the wrong shape."""


class MethodError(VitreousError, ValueError):
    """A method spelling is unknown, has an unknown option, or combines parts that do not go together."""


class ImageError(VitreousError, ValueError):
    """A file is not an image that can be read safely."""


class DataError(VitreousError, ValueError):
    """A data set, or one item of it, is missing or damaged; the message says what and where the set comes from."""


class ModelError(VitreousError, ValueError):
    """A model cannot be found, loaded, or its name is not understood."""


class UnsupportedModelError(ModelError):
    """The model lacks a part that the requested method needs."""


class RefusedMethodsError(UnsupportedModelError, MethodError):
    """Some of the methods asked for cannot explain this model, or not in this precision.

    Attributes:
        reasons: by spelling, why.
    """

    def __init__(self, message: str, reasons: dict[str, str]) -> None:
        super().__init__(message)
        self.reasons = reasons


class MissingDependencyError(VitreousError, ImportError):
    """An optional part is not installed; the message names the extra that brings it."""


class ProtocolError(VitreousError, ValueError):
    """An evaluation protocol is unknown, or does not fit the model or the data."""


class RunError(VitreousError, ValueError):
    """An evaluation cannot be run with these options, or its stored run does not match them."""
