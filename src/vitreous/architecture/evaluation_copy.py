"""Run a model in evaluation mode without modifying it: a copy of its modules that shares its weights.

Calling ``eval()`` and ``train()`` around a run has three problems: an interrupt in between leaves the model switched,
another thread that trains the model trains without dropout meanwhile, and nested uses of one model have to be counted.
So nothing is switched. A model in evaluation mode is used as it is. The modules of any other model are copied with
``training`` set to false; parameters, buffers and other attributes stay the same objects. There is nothing to restore
when the run ends.

Intercepting functions such as dropout would not be enough: stochastic depth, distillation heads and gradient
checkpointing read ``self.training`` in Python. A thread-dependent property ``training`` on ``nn.Module`` would reach
them all, but would change torch for the whole process.

Modules also reference each other in other ways than as children: lists of modules, bound methods and partials that
replace ``forward``, closures, weak references. These are rebuilt for the copy where they refer to a module of the
model. Hooks run unchanged, with the copy as their module. References that cannot be rebuilt (a custom object that holds
a module, a global variable) are detected when an original module runs, and refused: see ``originals_of``.

Masked autoencoders (ViT-MAE of transformers) drop random patches in evaluation mode too. Their copy keeps all patches,
in order.

Compiled parts are run uncompiled, because a compiled function does not call the functions that are intercepted.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vitreous.errors import UnsupportedModelError

_Found = TypeVar("_Found")
# Dropout and stochastic depth; recomputation in the backward pass, where nothing is recorded any more.
_SWITCHES = ("training", "grad_checkpointing")
_MASKING = "random_masking"
_SHARED = frozenset({"_parameters", "_buffers", "_non_persistent_buffers_set"})
_DICTIONARIES = (dict, OrderedDict, defaultdict)
_COLLECTIONS = (list, tuple, set, frozenset)
_PLAIN = (type(None), bool, int, float, str, bytes, type, torch.dtype, torch.device)

# For every module of a copy, the modules that the whole copy was made from.
_ORIGINALS: weakref.WeakKeyDictionary[nn.Module, frozenset[nn.Module]] = weakref.WeakKeyDictionary()

# For every copy, the model that it was made from.
_ORIGINAL: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def evaluation_copy(model: nn.Module) -> nn.Module:
    """Return the model itself if it is in evaluation mode and not compiled, otherwise such a copy with shared weights.

    Raises:
        UnsupportedModelError: a scripted part is in training mode.
    """
    return _copied(model) if not_in_evaluation(model) else model


def frozen_copy(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode whose parameters want no gradient, and whose hooks are its own."""
    return _copied(model, frozen=True)


def run_in_evaluation(model: nn.Module, run: Callable[[nn.Module], _Found]) -> _Found:
    """What a function finds of a model in evaluation mode, also where another thread begins to train it meanwhile."""
    network = evaluation_copy(model)
    found = run(network)
    return run(_copied(model)) if network is model and not_in_evaluation(model) else found


def not_in_evaluation(model: nn.Module) -> bool:
    """Whether a part of the model is in training mode, checkpoints activations, drops patches, or is compiled."""
    return any(map(_is_switched, model.modules()))


def originals_of(modules: Iterable[nn.Module]) -> frozenset[nn.Module]:
    """The modules that copies were made from: one that runs in a run of a copy was reached by an unknown way."""
    return next((_ORIGINALS[module] for module in modules if module in _ORIGINALS), frozenset())


def runs_an_original(module: nn.Module) -> UnsupportedModelError:
    """What is wrong with a model of which a part runs in training mode all the same."""
    return UnsupportedModelError(
        f"the model is in training mode or compiled, and its {type(module).__name__} is called from an object that is "
        "no module, so that no copy in evaluation mode can be made: call eval() on the model first, or give the one "
        "that was compiled"
    )


def _copied(model: nn.Module, *, frozen: bool = False) -> nn.Module:
    modules = list(model.modules())
    if any(isinstance(module, torch.jit.ScriptModule) and module.training for module in modules):
        raise UnsupportedModelError(
            f"{type(model).__name__} has a scripted part in training mode: call eval() on the model first"
        )
    found: nn.Module = _Copies(modules, frozen=frozen).of(model)
    if found is not model:
        _ORIGINAL[found] = weakref.ref(model)
    return found


def original_of(model: nn.Module) -> nn.Module:
    """The model that a copy was made from, while there is one; else the model itself."""
    original = _ORIGINAL[model]() if model in _ORIGINAL else None
    return model if original is None else original


def _is_switched(module: nn.Module) -> bool:
    attributes = module.__dict__
    if isinstance(module, torch.jit.ScriptModule):
        return bool(module.training)
    return (
        _drops_patches(module)
        or any(attributes.get(name) is True for name in _SWITCHES)
        or attributes.get("_compiled_call_impl") is not None
        or "_orig_mod" in attributes["_modules"]
    )


def _drops_patches(module: nn.Module) -> bool:
    """Whether it is the part of transformers' ViT-MAE that drops and shuffles patches, also in evaluation mode."""
    return type(module).__name__ == "ViTMAEEmbeddings" and _MASKING not in module.__dict__


def _keep_all_patches(sequence: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens (batch, tokens, channels) in their order, a mask that hides none, and their places."""
    del noise
    batch, tokens = sequence.shape[:2]
    places = torch.arange(tokens, device=sequence.device).expand(batch, -1)
    return sequence, torch.zeros(batch, tokens, device=sequence.device), places


class _Copies:
    """Copies of modules that know each other, as the originals do."""

    def __init__(self, modules: list[nn.Module], *, frozen: bool) -> None:
        self._frozen = frozen
        copied = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
        # Nothing is initialised: a module is its class and its attributes.
        self._copies: dict[int, nn.Module] = {id(module): object.__new__(type(module)) for module in copied}
        self._known: dict[int, tuple[Any, Any]] = {}  # by id: a value, which has to live as long, and its new form
        for module in copied:
            original = module._modules.get("_orig_mod")  # noqa: SLF001
            if original is not None:  # a compiled wrapper: the module in it is the model as it is written
                self._copies[id(module)] = self._copies.get(id(original), original)
        originals = frozenset(copied)
        for module in copied:
            if module._modules.get("_orig_mod") is None:  # noqa: SLF001
                made = self._copies[id(module)]
                made.__dict__.update(self._attributes(module))
                if _drops_patches(module):
                    made.__dict__[_MASKING] = _keep_all_patches
                _ORIGINALS[made] = originals

    def of(self, value: Any) -> Any:
        """The value itself, or what it is for the copies where it leads to one of the modules."""
        if isinstance(value, nn.Module):
            return self._copies.get(id(value), value)
        if isinstance(value, (*_PLAIN, Tensor)):
            return value
        if id(value) not in self._known:
            self._known[id(value)] = value, value  # for values that hold themselves
            self._known[id(value)] = value, self._made_anew(value)
        return self._known[id(value)][1]

    def _attributes(self, module: nn.Module) -> dict[str, Any]:
        attributes: dict[str, Any] = {}
        for name, value in list(module.__dict__.items()):
            if name in _SHARED:
                attributes[name] = self._constants(value) if self._frozen and name == "_parameters" else value
            elif "_hooks" in name and isinstance(value, dict):
                attributes[name] = self._hooks(value)
            elif name == "_compiled_call_impl" or (name in _SWITCHES and value is True):
                attributes[name] = None if name == "_compiled_call_impl" else False
            else:
                attributes[name] = self.of(value)
        return attributes

    def _hooks(self, hooks: dict[Any, Any]) -> dict[Any, Any]:
        """Hooks are the user's own and get the module as an argument; only methods of the modules themselves change."""
        changed = {
            number: self.of(hook) for number, hook in list(hooks.items()) if isinstance(hook, MethodType | partial)
        }
        if not self._frozen and all(hook is hooks.get(number) for number, hook in changed.items()):
            return hooks
        made = copy.copy(hooks)
        made.update(changed)
        return made

    def _constants(self, parameters: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """The same numbers as parameters that want no gradient; one that is used twice stays one."""
        for parameter in list(parameters.values()):
            if parameter is not None and id(parameter) not in self._known:
                self._known[id(parameter)] = parameter, nn.Parameter(parameter.detach(), requires_grad=False)
        return {name: None if one is None else self._known[id(one)][1] for name, one in list(parameters.items())}

    def _made_anew(self, value: Any) -> Any:
        kind = type(value)
        if kind in _DICTIONARIES:
            return self._dictionary(value)
        if kind in _COLLECTIONS or (isinstance(value, tuple) and hasattr(value, "_fields")):
            items, before = [self.of(item) for item in list(value)], list(value)
            if _same(items, before):
                return value
            return kind(*items) if hasattr(value, "_fields") else kind(items)
        return self._reference(value)

    def _reference(self, value: Any) -> Any:
        if isinstance(value, MethodType):
            parts = (self.of(value.__func__), self.of(value.__self__))
            return value if _same(parts, (value.__func__, value.__self__)) else MethodType(*parts)
        if isinstance(value, weakref.ref):
            target = value()
            return value if self.of(target) is target else weakref.ref(self.of(target))
        if isinstance(value, partial):
            return self._partial(value)
        return self._function(value) if isinstance(value, FunctionType) else value

    def _dictionary(self, value: dict[Any, Any]) -> dict[Any, Any]:
        before = [part for pair in list(value.items()) for part in pair]
        parts = [self.of(part) for part in before]
        if _same(parts, before):
            return value
        made = copy.copy(value)
        made.clear()
        made.update(zip(parts[::2], parts[1::2], strict=True))
        return made

    def _partial(self, value: partial[Any]) -> partial[Any]:
        before = (value.func, value.args, value.keywords)
        func, args, keywords = (self.of(part) for part in before)
        if _same((func, args, keywords), before):
            return value
        made = type(value)(func, *args, **keywords)
        made.__dict__.update(value.__dict__)
        return made

    def _function(self, value: FunctionType) -> FunctionType:
        """A function whose closure or defaults hold one of the modules."""
        cells = tuple(map(self._cell, value.__closure__ or ()))
        defaults, named = self.of(value.__defaults__), self.of(value.__kwdefaults__)
        unchanged = _same(cells, value.__closure__ or ())
        if unchanged and defaults is value.__defaults__ and named is value.__kwdefaults__:
            return value
        made = FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells or None)
        made.__kwdefaults__ = named
        made.__dict__.update(value.__dict__)
        return made

    def _cell(self, cell: CellType) -> CellType:
        try:
            content = cell.cell_contents
        except ValueError:  # empty
            return cell
        made = self.of(content)
        return cell if made is content else CellType(made)


def _same(ones: Iterable[Any], others: Iterable[Any]) -> bool:
    return all(one is other for one, other in zip(ones, others, strict=True))
