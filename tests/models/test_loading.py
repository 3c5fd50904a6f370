"""Models come by name with their weights, preprocessing and class names, or with one clear sentence."""

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf

from loading_models import error_of, same_weights
from time_limit import one_minute
from vitreous.errors import ModelError
from vitreous.models import list_models, load_model
from vitreous.models import loaded as loaded_models
from vitreous.models.hf_models import load_text_model

TINY = "test_vit"
TINY_SIZE = 160


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(1)
    return timm.create_model(TINY, num_classes=7)


def test_random_weights_are_the_same_every_time():
    one, other = load_model(f"timm/{TINY}@random"), load_model(f"timm/{TINY}@random")
    assert not one.model.training
    assert one.fingerprint == other.fingerprint
    assert len(one.fingerprint) == 64
    assert one.class_names is None
    assert one.model(torch.randn(1, 3, TINY_SIZE, TINY_SIZE)).std() > 0


@pytest.mark.parametrize("device", ["meta", "a sofa"])
def test_a_device_that_cannot_be_used_is_said(device):
    with pytest.raises(ModelError, match=f"the device {device} cannot be used"):
        load_model("demo", device=device)


def test_loading_leaves_the_random_state_alone():
    before = torch.random.get_rng_state()
    load_model(f"timm/{TINY}@random")
    assert torch.equal(before, torch.random.get_rng_state())


def test_fingerprint_tells_weights_apart(tiny, tmp_path):
    state = tiny.state_dict()
    save_file(state, tmp_path / "a.safetensors")
    save_file(state | {"head.bias": state["head.bias"] + 1e-6}, tmp_path / "b.safetensors")
    a, b = (load_model(f"timm/{TINY}@{tmp_path / name}.safetensors") for name in "ab")
    assert a.fingerprint != b.fingerprint


def test_fingerprint_follows_the_weights():
    loaded = load_model(f"timm/{TINY}@random")
    before = loaded.fingerprint
    weights = {key: value.clone() for key, value in loaded.model.state_dict().items()}
    with torch.no_grad():
        loaded.model.blocks[0].mlp.fc1.weight[0, 0] += 1
    assert loaded.fingerprint != before
    loaded.model.load_state_dict(weights)
    assert loaded.fingerprint == before


def test_runs_are_told_apart_by_what_torch_does_not_count_as_well():
    network = load_model(f"timm/{TINY}@random").model
    found = {loaded_models.fingerprint_of(network)}
    network.blocks[0].mlp.fc1.weight.data.mul_(2)
    found.add(loaded_models.fingerprint_of(network))
    network.blocks[0].attn.scale *= 2
    found.add(loaded_models.fingerprint_of(network))
    assert len(found) == 3


def test_fingerprint_is_worked_out_once(monkeypatch):
    loaded = load_model(f"timm/{TINY}@random")
    before = loaded.fingerprint
    loaded.model(torch.zeros(1, 3, TINY_SIZE, TINY_SIZE))
    monkeypatch.setattr(loaded_models, "fingerprint_of", None)  # would fail if it were asked
    assert loaded.fingerprint == replace(loaded, name="other").fingerprint == before


def test_models_made_in_inference_mode_have_a_fingerprint():
    with torch.inference_mode():
        loaded = load_model(f"timm/{TINY}@random")
    assert loaded.fingerprint == load_model(f"timm/{TINY}@random").fingerprint


def test_half_precision_models_have_a_fingerprint():
    loaded = load_model(f"timm/{TINY}@random")
    loaded.model.bfloat16()
    assert len(loaded.fingerprint) == 64


def test_safetensors_file_with_its_own_number_of_classes(tiny, tmp_path):
    save_file(tiny.state_dict(), tmp_path / "w.safetensors")
    loaded = load_model(f"timm/{TINY}@{tmp_path / 'w.safetensors'}")
    assert same_weights(tiny, loaded.model)
    assert loaded.model.num_classes == 7
    assert loaded.class_names is None
    assert loaded.name == f"timm/{TINY}@{tmp_path / 'w.safetensors'}"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3, "optimizer": {"lr": 0.1}},
        lambda state: {"model": {f"module.{key}": value for key, value in state.items()}},
        lambda state: {"model_ema": state, "model": {key: value + 1 for key, value in state.items()}},
        lambda state: {"state_dict": {f"module._orig_mod.{key}": value for key, value in state.items()}},
        lambda state: {f"_orig_mod.module.{key}": value for key, value in state.items()},
        lambda state: {"n_averaged": torch.tensor(3)} | {f"module.{key}": value for key, value in state.items()},
    ],
)
def test_torch_checkpoints_are_unwrapped(tiny, tmp_path, wrap):
    torch.save(wrap(tiny.state_dict()), tmp_path / "w.pt")
    assert same_weights(tiny, load_model(f"timm/{TINY}@{tmp_path / 'w.pt'}").model)


def test_checkpoint_that_needs_code_is_refused(tmp_path):
    torch.save({"state_dict": {"weight": print}}, tmp_path / "evil.pt")
    assert "refused" in error_of(f"timm/{TINY}@{tmp_path / 'evil.pt'}")


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("content", [b"", b"not weights at all"])
def test_damaged_weights_file(tmp_path, suffix, content):
    (tmp_path / f"w.{suffix}").write_bytes(content)
    assert "damaged" in error_of(f"timm/{TINY}@{tmp_path / f'w.{suffix}'}")


@pytest.mark.parametrize("content", [[1, 2], {}, {"epoch": 3}, {"n_averaged": torch.tensor(3)}])
def test_checkpoint_without_weights(tmp_path, content):
    torch.save(content, tmp_path / "w.pt")
    error_of(f"timm/{TINY}@{tmp_path / 'w.pt'}")


def test_missing_weights_file_and_folder(tmp_path):
    assert "no such" in error_of(f"timm/{TINY}@{tmp_path / 'gone.pt'}")
    assert "not a weights file" in error_of(f"timm/{TINY}@{tmp_path}")


def test_mismatch_names_the_keys(tiny, tmp_path):
    state = tiny.state_dict()
    state["blocks.0.surprise"] = state.pop("norm.bias")
    save_file(state, tmp_path / "w.safetensors")
    message = error_of(f"timm/{TINY}@{tmp_path / 'w.safetensors'}")
    assert "missing norm.bias" in message
    assert "unexpected blocks.0.surprise" in message
    save_file(tiny.state_dict() | {"norm.bias": torch.zeros(5)}, tmp_path / "w.safetensors")
    assert "norm.bias has shape (5,) where (64,)" in error_of(f"timm/{TINY}@{tmp_path / 'w.safetensors'}")


def test_foreign_names_go_through_timms_conversion(tmp_path):
    model = timm.create_model("test_vit2")
    original = {
        key.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): value
        for key, value in model.state_dict().items()
    }
    torch.save({"model": original}, tmp_path / "deit3.pth")
    assert "blocks.0.gamma_1" in original
    assert same_weights(model, load_model(f"timm/test_vit2@{tmp_path / 'deit3.pth'}").model)


def test_weights_for_other_patches_are_refused(tiny, tmp_path):
    state = tiny.state_dict()
    state["patch_embed.proj.weight"] = torch.randn(64, 3, 32, 32)
    state["pos_embed"] = torch.randn(1, 1 + 5 * 5, 64)  # 160 x 160 pixels in patches of 32 x 32
    save_file(state, tmp_path / "w.safetensors")
    message = error_of(f"timm/{TINY}@{tmp_path / 'w.safetensors'}")
    assert "patch_embed.proj takes patches of 16 x 16 pixels, and the weights are for 32 x 32" in message


def test_patches_stored_as_rows_are_still_converted(tiny, tmp_path):
    state = tiny.state_dict()
    state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].flatten(1)
    torch.save(state, tmp_path / "flat.pt")
    assert same_weights(tiny, load_model(f"timm/{TINY}@{tmp_path / 'flat.pt'}").model)


def test_another_image_size(tiny, tmp_path):
    save_file(tiny.state_dict(), tmp_path / "w.safetensors")
    loaded = load_model(f"timm/{TINY}@{tmp_path / 'w.safetensors'}", image_size=(96, 128))
    assert loaded.preprocessing.image_size == (96, 128)
    assert loaded.model(torch.zeros(1, 3, 96, 128)).shape == (1, 7)
    message = error_of(f"timm/{TINY}@random", image_size=100)
    assert "multiple of the patch size 16, such as 96 x 96 or 112 x 112" in message
    assert error_of(f"timm/{TINY}@random", image_size=(96, 100)).endswith("such as 96 x 96 or 96 x 112")
    assert error_of(f"timm/{TINY}@random", image_size=5).endswith("such as 16 x 16")
    assert "another image size" in error_of("timm/resnet18@random", image_size=96)


def test_overrides_of_the_normalisation():
    loaded = load_model(f"timm/{TINY}@random", mean=0.5, std=(0.1, 0.2, 0.3))
    assert loaded.preprocessing.mean == (0.5, 0.5, 0.5)
    assert loaded.preprocessing.std == (0.1, 0.2, 0.3)


@pytest.mark.shared
def test_development_weights_recognise_photos_by_name(shared):
    from vitreous.inputs.images import read_image

    loaded = load_model(
        f"timm/vit_tiny_patch16_224@{shared / 'data/vit_tiny_patch16_224.safetensors'}", mean=0.5, std=0.5
    )
    names = json.loads((shared / "data/imagenet/class_names.json").read_text())
    assert len(loaded.class_names) == len(names) == 1000
    photos = [read_image(file) for file in sorted((shared / "data/pets/seg/images").glob("Egyptian_Mau_*"))[:8]]
    with torch.inference_mode():
        predicted = loaded.model(loaded.preprocessing(photos)).argmax(1)
    assert sum(loaded.class_names[index] == "Egyptian cat" for index in predicted) >= 6


def test_timm_folder_with_its_class_names(tmp_path):
    model = timm.create_model(TINY, num_classes=2, pretrained_cfg_overlay={"num_classes": 2, "mean": (0.1, 0.2, 0.3)})
    save_for_hf(model, tmp_path, model_config={"label_names": ["cat", "dog"]})
    loaded = load_model(f"timm/local-dir:{tmp_path}")
    assert same_weights(model, loaded.model)
    assert loaded.class_names == ("cat", "dog")
    assert loaded.preprocessing.mean == (0.1, 0.2, 0.3)


def test_size_that_the_model_was_built_for_counts(tmp_path):
    name = "vit_tiny_patch16_224"
    config = {
        "architecture": name,
        "num_classes": 2,
        "model_args": {"img_size": 96},
        "pretrained_cfg": {"num_classes": 2},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(timm.create_model(name, num_classes=2, img_size=96).state_dict(), tmp_path / "model.safetensors")
    loaded = load_model(f"timm/local-dir:{tmp_path}")
    assert loaded.preprocessing.image_size == (96, 96)
    assert loaded.model(torch.zeros(1, 3, 96, 96)).shape == (1, 2)


def test_timm_folder_that_is_not_one(tmp_path):
    assert "config.json" in error_of(f"timm/local-dir:{tmp_path}")
    (tmp_path / "config.json").write_text("{}")
    error_of(f"timm/local-dir:{tmp_path}")


def test_unknown_names_suggest_close_ones():
    assert "vit_tiny_patch16_224" in error_of("timm/vit_tny_patch16_224@random")
    assert "vit_tiny_patch16_224.augreg_in21k" in error_of("timm/vit_tiny_patch16_224.augreg_in21")
    assert f"timm/{TINY}@random" in error_of(f"{TINY}@random")


@pytest.mark.parametrize("name", ["", "demo/x", "timm", "timm/", "hf/", "other/x", "timm/@random", f"timm/{TINY}@"])
def test_names_that_mean_nothing(name):
    error_of(name)


@pytest.mark.parametrize("name", [None, 3, Path("demo"), b"demo", ["demo"]])
def test_what_is_no_name(name):
    assert error_of(name) == f"a model is named by a text such as demo or hf/FOLDER, not by {type(name).__name__}"
    with pytest.raises(ModelError, match="text models are named demo-text, hf/ID or hf/FOLDER"):
        load_text_model(name)


def test_numbers_of_numpy_and_torch():
    size, mean = np.int64(96), np.float32(0.5)
    loaded = load_model(f"timm/{TINY}@random", image_size=size, mean=mean, std=np.array([0.1, 0.2, 0.3]))
    assert loaded.preprocessing.image_size == (96, 96)
    assert [type(edge) for edge in loaded.preprocessing.image_size] == [int, int]
    assert loaded.preprocessing.mean == (0.5, 0.5, 0.5)
    assert [type(value) for value in loaded.preprocessing.mean] == [float] * 3
    assert loaded.preprocessing.std == (0.1, 0.2, 0.3)
    loaded = load_model(f"timm/{TINY}@random", image_size=torch.Size([96, 128]), mean=torch.tensor(0.25))
    assert loaded.preprocessing.image_size == (96, 128)
    assert loaded.preprocessing.mean == (0.25, 0.25, 0.25)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"image_size": 160.5}, "an image size is"),
        ({"image_size": "160"}, "an image size is"),
        ({"image_size": (160, None)}, "an image size is"),
        ({"image_size": np.array([160.0, 160.0])}, "an image size is"),
        ({"mean": "grey"}, "mean takes one finite number or three"),
        ({"mean": (0.5, None, 0.5)}, "mean takes one finite number or three"),
        ({"std": [[0.5], [0.5, 0.5]]}, "std takes one finite number or three"),
        ({"std": object()}, "std takes one finite number or three"),
    ],
)
def test_options_of_the_wrong_kind(options, reason):
    assert reason in error_of(f"timm/{TINY}@random", **options)


def test_architecture_without_published_weights():
    assert "no weights" in error_of("timm/vit_giant_patch14_224")


def test_unusable_device():
    assert "device" in error_of(f"timm/{TINY}@random", device="nonsense")


def test_no_network_is_one_sentence_and_quick(tmp_path):
    pytest.importorskip("transformers")
    # A closed local port stands for the hub, so that this test is the same with and without a network.
    script = """
import time, vitreous.models, vitreous.errors, timm, transformers
for name in ("timm/vit_tiny_patch16_224", "timm/hf-hub:timm/none", "hf/google/vit-base-patch16-224"):
    start = time.monotonic()
    try:
        vitreous.models.load_model(name)
    except vitreous.errors.ModelError as error:
        assert time.monotonic() - start < 10
        print(error)
"""
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "PATH": "", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert run.stderr == ""
    assert run.stdout.count("cannot be reached") == run.stdout.count("\n") == 3


def test_list_of_models_is_json():
    listed = json.loads(json.dumps(list_models()))
    assert {"demo", "timm/NAME@FILE", "hf/FOLDER"} <= {entry["name"] for entry in listed["names"]}
    assert listed["timm_vision_transformers"] > 100


def test_a_backbone_of_timm_without_classes_is_refused():
    assert "a backbone without a classifier" in error_of("timm/vit_small_patch14_dinov2@random", image_size=56)


def test_torch_is_one_that_reads_weights_without_running_code():
    """CVE-2025-32434 was mended in 2.6, CVE-2026-24747 in 2.10."""
    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        (torch_needed,) = [each for each in tomllib.load(file)["project"]["dependencies"] if each.startswith("torch>")]
    assert tuple(map(int, torch_needed.removeprefix("torch>=").split("."))) >= (2, 10)


@pytest.mark.parametrize("size", [100_000, (8000, 20_000), 10**30])
def test_an_image_size_beyond_any_picture_is_one_sentence(size):
    assert "more than 80,000,000 pixels" in error_of("timm/test_vit@random", image_size=size)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with a name, of POSIX")
@pytest.mark.parametrize("kind", ["timm/local-dir:", "hf/"])
@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_pipe_in_a_folder_of_a_model_is_not_waited_for(tmp_path, kind, file):
    (tmp_path / "config.json").write_text('{"architecture": "test_vit", "model_type": "vit"}')
    (tmp_path / file).unlink(missing_ok=True)
    os.mkfifo(tmp_path / file)
    with one_minute():
        error_of(f"{kind}{tmp_path}")


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("hf/", "num_labels"),
        ("hf/", "num_hidden_layers"),
        ("timm/local-dir:", "num_classes"),
        ("timm/local-dir:", "depth"),
    ],
)
def test_a_network_that_could_not_be_built_is_not_begun(tmp_path, kind, key):
    """A billion labels were written down one by one before anything was refused."""
    (tmp_path / "config.json").write_text(
        json.dumps({"architecture": "test_vit", "model_type": "vit", "model_args": {key: 10**9}, key: 10**9})
    )
    with one_minute():
        assert f"{key} = 1e+09" in error_of(f"{kind}{tmp_path}")
