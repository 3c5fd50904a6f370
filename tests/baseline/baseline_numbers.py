"""Numbers of all methods on small models of each family: how they are taken, and how they are kept in one file.

Only ``vitreous.explain``, ``vitreous.explain_text``, ``vitreous.list_methods`` and ``vitreous.errors`` are used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import baseline_models as small
import numpy as np
import torch

import vitreous
from vitreous.errors import RefusedMethodsError, VitreousError

FILE = Path(__file__).parent / "baseline.npz"
TARGET = (1, 3)  # another class for each input
REFUSED = "refused: "
# A map of at most this many numbers is kept whole; of a larger one, as many fixed projections as stated below.
_WHOLE = 24
_PROJECTIONS = 16
# What makes methods cheap that run the model often.
_CHEAP = {
    **dict.fromkeys(("iia", "dix"), "points=2"),
    **dict.fromkeys(("tam", "bi_token", "bi_head"), "steps=2"),
    "integrated_gradients": "steps=2",
    "smoothgrad": "samples=2",
    **dict.fromkeys(("rise", "hsic", "scorecam", "vitcx"), "budget=6"),
    **dict.fromkeys(("lime", "kernel_shap"), "budget=20"),
    **dict.fromkeys(("occlusion", "pami"), "window=2,stride=2"),
    "atman": "budget=6",
}
# Other rules, aggregations, layers and options that the documentation names.
VARIANTS = (
    *("raw_attention:layer=1", "raw_attention.rollout:residual=add", "rollout.propagate", "rollout:start=1"),
    *("gae.propagate", "gae.skipplus", "gae:rule=libra", "gae:rule=attnlrp", "gae:rule=conservative"),
    *("gae:rule=residual", "gae:rule=frozen", "attcam:convention=skipplus", "gradsam.propagate", "agcam.skipplus"),
    *("legrad.skipplus", "tam:steps=2,start=1", "gradtoken.skipplus", "gradtoken:rule=libra"),
    *("gradtoken:propagation=none,heads=average", "gradtoken:propagation=rollout_elementwise"),
    *("gradtoken:propagation=rollout_matrix", "gradtoken:propagation=average_elementwise,depth=1"),
    *("tokentm:rule=libra", "tokentm:gradient=logit", "tokentm:components=af_l", "tokentm:necc=rescaled"),
    *("tokentm:variant=third_party", "tokentm.rollout:depth=2", "tokentm.propagate"),
    *("gradient:rule=frozen", "ixg.skipplus", "ixg.plus:start=1", "ixg:layer=1", "ixg:rule=libra", "ixg:rule=attnlrp"),
    *("ixg:channels=l2", "attcat:rule=libra", "attixg.skipplus", "attixg:pairing=next"),
    *("fullgrad:rule=libra", "fullgrad:rule=attnlrp", "fullgrad_plus.skipplus", "fullgrad_plus:rule=libra"),
    *("integrated_gradients:at=tokens,steps=2", "integrated_gradients:resolution=pixel,steps=2"),
    *("smoothgrad:at=tokens,samples=2", "gradcam:convention=skipplus", "gradcam:layer=1", "gradcam.propagate"),
    *("xgradcam_abs:rule=libra", "transattr.propagate", "lrp_rollout:rules=orig", "plrp:weighed=gradient"),
    *("lrp:rules=ours", "abslrp:shortcut=share", "lrp:resolution=pixel"),
    *(
        "attin:heads=apart",
        "attin_residual:norm=following",
        "globenc.skipplus",
        "alti.skipplus",
        "alti:setting=original",
    ),
    *("decompx.plus", "decompx.skipplus", "decompx.skipplus.propagate", "decompx:layer=2"),
    *("decompx:bias=token", "decompx:bias=equal", "alti:setting=original"),
    *("occlusion:by=drop", "rise:by=drop,budget=6", "lime:by=drop,budget=20", "rise:resolution=pixel,budget=6"),
    "vit_recipro_cam:neighbourhood=single,score=logit",
)
Numbers = dict[str, np.ndarray | str]


def spellings() -> list[str]:
    """Every registered method, cheap, and the variants."""
    names = [info.name for info in vitreous.list_methods()]
    return [*(f"{name}:{_CHEAP[name]}" if name in _CHEAP else name for name in names), *VARIANTS]


def numbers_of(name: str, methods: Sequence[str]) -> Numbers:
    """What methods give on a model: one row of numbers each, or which error."""
    if name in small.TEXT_MODELS:
        methods = [method for method in methods if "resolution=pixel" not in method]  # no option there, for a text
        pair = (small.fill(small.TEXT_MODELS[name]()), small.tokenizer())
        return _numbers(lambda asked: _text_scores(pair, asked), methods)
    model, pictures = small.fill(small.IMAGE_MODELS[name]()), small.images(small.image_size(name))
    return _numbers(lambda asked: _image_scores(model, pictures, asked), methods)


def _image_scores(model: torch.nn.Module, pictures: torch.Tensor, methods: Sequence[str]) -> dict[str, torch.Tensor]:
    found = vitreous.explain(model, pictures, methods, TARGET).scores
    return {method: scores.flatten() for method, scores in found.items()}


def _text_scores(pair: tuple[torch.nn.Module, object], methods: Sequence[str]) -> dict[str, torch.Tensor]:
    found = vitreous.explain_text(pair, small.TEXTS, methods, TARGET).scores
    return {method: torch.cat([part.flatten() for part in scores]) for method, scores in found.items()}


def _numbers(explain: Callable[[list[str]], Mapping[str, torch.Tensor]], methods: Sequence[str]) -> Numbers:
    """Ask all methods at once; without those that are refused, again; one by one where no error says which."""
    found: Numbers = {}
    asked = list(methods)
    while asked:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found |= {method: _shortened(scores) for method, scores in explain(asked).items()}
            break
        except RefusedMethodsError as error:
            refused = [method for method in asked if method in error.reasons]
            found |= {method: REFUSED + type(error).__name__ for method in refused}
            if not refused:
                raise
            asked = [method for method in asked if method not in refused]
        except VitreousError as error:
            if len(asked) == 1:
                found[asked[0]] = REFUSED + type(error).__name__
                break
            for method in asked:
                found |= _numbers(explain, [method])
            break
    return found


def _shortened(scores: torch.Tensor) -> np.ndarray:
    values = scores.detach().double().numpy()
    if len(values) <= _WHOLE:
        return values
    directions = np.random.default_rng(len(values)).standard_normal((_PROJECTIONS, len(values)))
    return directions @ values / np.sqrt(len(values))


def save(found: Mapping[str, Numbers]) -> None:
    """Keep everything in one file: by model one row of numbers, and how many of them are whose."""
    stored: dict[str, np.ndarray] = {}
    for name, numbers in found.items():
        values = [value for value in numbers.values() if not isinstance(value, str)]
        told = [f"{method}\t{value if isinstance(value, str) else len(value)}" for method, value in numbers.items()]
        stored[f"{name}|values"] = np.concatenate(values) if values else np.zeros(0)
        stored[f"{name}|methods"] = np.array("\n".join(told))
    np.savez_compressed(FILE, **stored)


def load(names: Iterable[str]) -> dict[str, Numbers]:
    """What ``save`` kept of some models."""
    with np.load(FILE) as stored:
        return {name: _parsed(str(stored[f"{name}|methods"]), stored[f"{name}|values"]) for name in names}


def kept_names() -> list[str]:
    """The models of which numbers are kept."""
    with np.load(FILE) as stored:
        return [key.removesuffix("|methods") for key in stored.files if key.endswith("|methods")]


def _parsed(told: str, values: np.ndarray) -> Numbers:
    found: Numbers = {}
    start = 0
    for method, what in (line.split("\t") for line in told.splitlines()):
        if what.startswith(REFUSED):
            found[method] = what
        else:
            found[method] = values[start : start + int(what)]
            start += int(what)
    return found
