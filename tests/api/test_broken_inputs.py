"""Inputs that are broken at random end in a ``VitreousError`` of one line or in a result: no other exception, no hang.

The suite tries a share of them, always the same. ``make fuzz`` tries 10,000 others (VITREOUS_FUZZ, VITREOUS_FUZZ_SEED).
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from PIL import Image

import vitreous
from small_models import CLASSES, random_images, small_vit
from time_limit import one_minute
from vitreous.errors import VitreousError
from vitreous.explanation.explanation import Explanation
from vitreous.models import load_model
from vitreous.speed.timing import one_thread

INPUTS = int(os.environ.get("VITREOUS_FUZZ", "400"))
SEED = int(os.environ.get("VITREOUS_FUZZ_SEED", "0"))
PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8))


@contextmanager
def ends_well():
    """Whatever is raised inside is a ``VitreousError`` of one line, and it ends in time."""
    sentence = "it ended in a result"
    try:
        with one_minute(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except VitreousError as error:
        sentence = str(error)
    assert len(sentence.splitlines()) == 1


def fuzzed(share, *strategies):
    """A test of this share of all inputs."""
    chosen = settings(
        max_examples=max(10, round(INPUTS * share)),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: seed(SEED)(chosen(given(*strategies)(test)))


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([10**9, 10**30, -(10**30), 2**31, 2**63, 0.5, 1e-320, 1e300, float("nan"), float("inf"), -0.0]),
    st.floats(),
)
ODD = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=5), st.sampled_from(["", "7", "\ud800", "a\nb"])),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=4,
)


def places_in(value, before=()):
    """The path of everything inside of JSON values."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield (*before, key)
        yield from places_in(each, (*before, key))


@st.composite
def broken(draw, base):
    """A copy of JSON values in which up to three are others, or gone."""
    value = copy.deepcopy(base)
    for _ in range(draw(st.integers(1, 3))):
        places = sorted(places_in(value), key=str)
        if not places:
            break
        *path, last = draw(st.sampled_from(places))
        place = value
        for key in path:
            place = place[key]
        if draw(st.integers(0, 5)):
            place[last] = draw(ODD)
        elif isinstance(place, dict):
            del place[last]
    return value


def dumped(value):
    """JSON as the files of other programs have it, NaN included; a lone surrogate is an escape."""
    return json.dumps(value)


PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True,
    "size": {"height": 32, "width": 32},
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_center_crop": True,
    "crop_size": {"height": 32, "width": 32},
}
TIMM = {
    "input_size": [3, 32, 32],
    "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5],
    "interpolation": "bicubic",
    "crop_pct": 0.9,
    "crop_mode": "center",
    "num_classes": CLASSES,
    "label_names": ["a", "b", "c", "d", "e"],
    "label_descriptions": {"a": "ant"},
}
MODEL = small_vit(depth=2, dtype=torch.float32)


class Processor:
    def __init__(self, values):
        self.values = values

    def to_dict(self):
        return self.values


@fuzzed(0.2, broken(PROCESSOR))
def test_image_processors(values):
    with ends_well():
        vitreous.explain((MODEL, Processor(values)), PHOTO, "rollout")


@fuzzed(0.15, broken(TIMM))
def test_configurations_of_timm(values):
    model = copy.copy(MODEL)
    model.pretrained_cfg = values
    with ends_well():
        vitreous.explain(model, PHOTO, "rollout")


@pytest.fixture(scope="module")
def timm_folder(tmp_path_factory):
    """A folder in timm's own format."""
    folder = tmp_path_factory.mktemp("timm")
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 3, "depth": 2, "init_values": 0.5}
    config = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": CLASSES,
        "model_args": sizes,
        "pretrained_cfg": TIMM,
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(small_vit(depth=2, dtype=torch.float32).state_dict(), folder / "pytorch_model.bin")
    load_model(f"timm/local-dir:{folder}")
    return folder


TIMM_CONFIG = {
    "architecture": "vit_tiny_patch16_224",
    "num_classes": CLASSES,
    "model_args": {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 3, "depth": 2, "init_values": 0.5},
    "pretrained_cfg": TIMM,
}


@fuzzed(0.1, broken(TIMM_CONFIG))
def test_folders_of_timm(timm_folder, values):
    (timm_folder / "config.json").write_text(dumped(values))
    with ends_well():
        vitreous.explain(f"timm/local-dir:{timm_folder}", PHOTO, "rollout")


HF_CONFIG = {
    "model_type": "vit",
    "architectures": ["ViTForImageClassification"],
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "patch_size": 8,
    "image_size": 32,
    "num_channels": 3,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "qkv_bias": True,
    "id2label": {"0": "cat", "1": "dog"},
    "label2id": {"cat": 0, "dog": 1},
    "problem_type": None,
    "attn_implementation": "sdpa",
    "dtype": "float32",
    "transformers_version": "5.0.0",
}


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory):
    """A folder that transformers wrote."""
    hf = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("hf")
    hf.ViTForImageClassification(hf.ViTConfig(**HF_CONFIG)).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    load_model(f"hf/{folder}")
    return folder


@fuzzed(0.1, broken({"config.json": HF_CONFIG, "preprocessor_config.json": PROCESSOR}))
def test_folders_of_transformers(hf_folder, files):
    for name in ("config.json", "preprocessor_config.json"):
        (hf_folder / name).write_text(dumped(files.get(name)))
    with ends_well():
        vitreous.explain(f"hf/{hf_folder}", PHOTO, "rollout")


def _quantised(shape=(2, 3, 32, 32)):
    return torch.quantize_per_tensor(torch.zeros(shape), 0.1, 0, torch.quint8)


TENSORS = {
    "good": random_images,
    "meta": lambda: torch.empty(2, 3, 32, 32, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(3, 32, 32), torch.zeros(3, 16, 32)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.zeros(3, 4), torch.zeros(2, 4)], layout=torch.jagged),
    "sparse": lambda: torch.zeros(2, 3, 32, 32).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "quantised": _quantised,
    "none": lambda: torch.zeros(0),
    "half": lambda: random_images(dtype=torch.float16),
    "eight bits": lambda: torch.zeros(2, 3, 32, 32, dtype=torch.float8_e4m3fn),
    "complex": lambda: torch.zeros(2, 3, 32, 32, dtype=torch.complex64),
    "a number": lambda: torch.tensor(1),
    "two": lambda: torch.tensor([1, 2]),
    "huge": lambda: torch.tensor([2**62, 1]),
    "unsigned": lambda: torch.tensor([1, 2], dtype=torch.uint64),
    "meta target": lambda: torch.empty(2, dtype=torch.int64, device="meta"),
    "sparse target": lambda: torch.tensor([1, 2]).to_sparse(),
    "quantised target": lambda: _quantised((2,)),
    "nested target": lambda: torch.nested.nested_tensor([torch.tensor([1]), torch.tensor([2, 3])]),
    "views": lambda: torch.zeros(1).expand(2, 3, 32, 32),
}
ANY_TENSOR = st.sampled_from(sorted(TENSORS)).map(lambda name: TENSORS[name]())
OBJECTS = st.one_of(
    ODD,
    ANY_TENSOR,
    st.lists(ANY_TENSOR, max_size=2),
    st.sampled_from([object(), b"bytes", np.zeros(3), np.array(["a"]), np.array([object()]), {1, 2}, range(2), 1j]),
)
FINE = {"images": random_images(), "target": None, "topk": None, "precision": "model"}


@fuzzed(0.25, st.dictionaries(st.sampled_from(sorted(FINE)), OBJECTS, min_size=1, max_size=2), st.booleans())
def test_arguments_of_explain(given_values, known):
    values = {**FINE, **given_values}
    model = (MODEL, Processor(PROCESSOR)) if known else MODEL
    with ends_well():
        vitreous.explain(model, values.pop("images"), "gae", **values)


OWN_MODEL = """
from small_models import small_vit
import torch

def build():
    model = small_vit(depth=2, dtype=torch.float32)
    model.image_size, model.mean, model.std = 32, 0.5, 0.5
    return model
"""
ODD_WEIGHTS = st.one_of(
    ANY_TENSOR, st.none(), st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=2), st.just({})
)


@fuzzed(
    0.1,
    st.dictionaries(
        st.one_of(st.sampled_from([*MODEL.state_dict(), "model", "state_dict", "n_averaged"]), st.integers(0, 3)),
        ODD_WEIGHTS,
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(["", "module.", "model"]),
    st.booleans(),
)
def test_checkpoints(tmp_path_factory, changes, prefix, timm):
    folder = tmp_path_factory.mktemp("checkpoint")
    state = {f"{prefix}{key}": value for key, value in MODEL.state_dict().items()} | changes
    (folder / "own.py").write_text(OWN_MODEL)
    torch.save({"model": state} if prefix == "model" else state, folder / "weights.pt")
    name = "timm/test_vit" if timm else f"py/{folder}/own.py:build"
    with ends_well():
        load_model(f"{name}@{folder}/weights.pt")
    shutil.rmtree(folder)


@fuzzed(0.05, st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 7)), min_size=1, max_size=5), st.booleans())
def test_damaged_checkpoints(tmp_path_factory, flips, safe):
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("damaged")
    (folder / "own.py").write_text(OWN_MODEL)
    file = folder / ("weights.safetensors" if safe else "weights.pt")
    (save_file if safe else torch.save)(MODEL.state_dict(), file)
    content = bytearray(file.read_bytes())
    for place, bit in flips:
        content[place % min(len(content), 4000)] ^= 1 << bit  # names, shapes and offsets are at the beginning
    file.write_bytes(content)
    with ends_well():
        load_model(f"py/{folder}/own.py:build@{file}")
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved explanation."""
    folder = tmp_path_factory.mktemp("saved") / "explanation"
    vitreous.explain((MODEL, Processor(PROCESSOR)), PHOTO, ["rollout", "gae"]).save(folder)
    return folder


ARRAYS = {
    "a number": np.array(1.0),
    "texts": np.array(["a"]),
    "complex": np.zeros((1, 16), dtype=complex),
    "bool": np.zeros((1, 16), dtype=bool),
    "empty": np.zeros((0, 16)),
    "short": np.zeros((1, 3)),
    "times": np.zeros((1, 16), dtype="datetime64[s]"),
    "integers": np.zeros((1, 16), dtype=np.int8),
    "infinite": np.full((1, 16), np.inf),
    "negative": np.array([-1]),
    "large": np.array([10**6]),
}


@fuzzed(0.1, st.data())
def test_saved_folders(saved, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("forged") / "explanation"
    shutil.copytree(saved, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    files = manifest.pop("files")
    if data.draw(st.booleans()):
        manifest = data.draw(broken(manifest))
    else:
        with np.load(folder / "explanation.npz") as stored:
            arrays = dict(stored)
        forged = data.draw(st.sampled_from(sorted(arrays)))
        arrays[forged] = ARRAYS[data.draw(st.sampled_from(sorted(ARRAYS)))]
        (np.savez_compressed if data.draw(st.booleans()) else np.savez)(folder / "explanation.npz", **arrays)
        files["explanation.npz"]["sha256"] = hashlib.sha256((folder / "explanation.npz").read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({**manifest, "files": files}))
    with ends_well():
        found = Explanation.load(folder)
        found.top(2)
        for method in found.methods:
            if found.shows(method, 0, 0):
                found.overlay(method, image=PHOTO)
        found.save(folder.parent / "again")
    shutil.rmtree(folder.parent)
