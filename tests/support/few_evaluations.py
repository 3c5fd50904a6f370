"""Methods with few evaluations of the model, for tests in which it does not matter how many there are."""

from __future__ import annotations

from vitreous.methods import MethodInfo, list_methods

FEW = {"budget": 12, "steps": 3, "samples": 3, "points": 2}
FEW_PASSES = {"refined": {"budget": 3}}  # its budget are passes with gradients, not masks


def runs_again(info: MethodInfo) -> bool:
    return info.make().runs_again


def few_options(info: MethodInfo) -> list[str]:
    """The options that tell a method how many evaluations it has."""
    few = FEW | FEW_PASSES.get(info.name, {})
    return [f"{option}={count}" for option, count in few.items() if option in info.options and runs_again(info)]


def spelled(info: MethodInfo) -> str:
    """The method, with few evaluations where it can be told how many."""
    options = few_options(info)
    return info.name + (f":{','.join(options)}" if options else "")


def with_few(spelling: str) -> str:
    """A spelling with few evaluations where its method can be told how many and it does not say so itself."""
    path, _, given = spelling.partition(":")
    info = next(info for info in list_methods() if info.name == path.split(".")[0])
    named = {option.split("=")[0] for option in given.split(",") if option}
    options = [*filter(None, [given]), *(o for o in few_options(info) if o.split("=")[0] not in named)]
    return f"{path}:{','.join(options)}" if options else path
