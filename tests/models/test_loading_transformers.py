"""Models of the transformers library come from a folder with everything they need, and never run foreign code."""

import json
import sys
import warnings
from contextlib import suppress

import pytest
import torch
from typer.testing import CliRunner

import vitreous
from evaluations import PROTOCOL, write_photos
from loading_models import error_of, same_weights
from vitreous.cli import app
from vitreous.errors import MissingDependencyError, VitreousError
from vitreous.models import checkpoints, load_model

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "patch_size": 8}


@pytest.fixture
def hf():
    return pytest.importorskip("transformers")


def save_classifier(hf, folder, labels=None, **settings):
    labels = {} if labels is None else {"id2label": dict(enumerate(labels)), "label2id": {}}
    config = hf.ViTConfig(**SMALL, image_size=32, **labels, **settings)
    model = hf.ViTForImageClassification(config)
    model.save_pretrained(folder)
    return model


def test_folder_of_a_classifier(hf, tmp_path, photo):
    model = save_classifier(hf, tmp_path, ["cat", "dog", "bird"])
    processor = hf.ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.1] * 3)
    processor.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded = load_model(f"hf/{tmp_path}")
    assert same_weights(model, loaded.model)
    assert not loaded.model.training
    assert loaded.class_names == ("cat", "dog", "bird")
    assert loaded.preprocessing.mean == (0.1, 0.1, 0.1)
    assert loaded.model(loaded.preprocessing([photo])).logits.shape == (1, 3)


def test_a_timm_model_inside_transformers(hf, tmp_path, photo):
    """Its photos are prepared as timm does; the largest rounding is that of a pixel, 1 of 255, over the deviation."""
    prepared = {"input_size": [3, 48, 48], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "crop_pct": 0.9}
    config = hf.TimmWrapperConfig(
        architecture="vit_tiny_patch16_224",
        num_labels=3,
        model_args={"img_size": 48, "patch_size": 16, "embed_dim": 48, "depth": 2, "num_heads": 3},
        pretrained_cfg={**prepared, "interpolation": "bicubic", "crop_mode": "center", "num_classes": 3},
    )
    hf.TimmWrapperForImageClassification(config).save_pretrained(tmp_path)
    loaded = load_model(f"hf/{tmp_path}")
    assert loaded.preprocessing.image_size == (48, 48)
    found = loaded.preprocessing([photo])
    expected = hf.AutoImageProcessor.from_pretrained(tmp_path)(photo)["pixel_values"]
    torch.testing.assert_close(found, expected, atol=1.01 / 255 / 0.4, rtol=0)
    assert (found - expected).abs().mean() < 0.1 / 255
    assert vitreous.explain(loaded, [photo], "gae").scores["gae"].shape == (1, 9)
    assert "48 x 48 pixels only" in error_of(f"hf/{tmp_path}", image_size=64)


def test_folder_without_processor_falls_back_and_says_so(hf, tmp_path):
    save_classifier(hf, tmp_path, num_labels=4)
    with pytest.warns(UserWarning, match=r"mean = std = 0\.5 at 32 x 32") as caught:
        loaded = load_model(f"hf/{tmp_path}", mean=0.25)
    assert [warning.filename for warning in caught] == [__file__]  # it is the caller who can do something about it
    assert loaded.class_names is None
    assert loaded.preprocessing.image_size == (32, 32)
    assert loaded.preprocessing.mean == (0.25, 0.25, 0.25)
    assert loaded.preprocessing.std == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    "content", ['{"image_processor_type": "ViTImageProc', '{"image_processor_type": "Unheard"}'], ids=["cut", "unknown"]
)
@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
def test_a_processor_that_cannot_be_loaded_is_not_replaced(hf, tmp_path, file, content):
    save_classifier(hf, tmp_path, num_labels=4)
    (tmp_path / file).write_text(content)
    assert "its image processor cannot be loaded (" in error_of(f"hf/{tmp_path}")


def test_settings_of_a_timm_model_that_cannot_be_read_are_not_replaced(hf, tmp_path, monkeypatch):
    config = hf.TimmWrapperConfig(architecture="test_vit", num_labels=3, model_args={"img_size": 32})
    hf.TimmWrapperForImageClassification(config).save_pretrained(tmp_path)
    monkeypatch.setattr(hf.AutoImageProcessor, "from_pretrained", None)  # fails, as without a library that it needs
    assert "its image processor cannot be loaded (" in error_of(f"hf/{tmp_path}")


@pytest.fixture
def cached(hf, tmp_path, monkeypatch):
    """A repository that an earlier download left in the cache, on a machine without network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("vitreous.models.checkpoints.is_reachable", lambda: False)
    repository, commit = tmp_path / "models--some--vit", "0" * 40
    save_classifier(hf, repository / "snapshots" / commit, num_labels=4)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    absent = repository / ".no_exist" / commit
    absent.mkdir(parents=True)
    return absent


def test_offline_a_processor_is_assumed_only_if_it_is_known_that_there_is_none(cached):
    (cached / "processor_config.json").touch()
    assert "its image processor is not on this machine and the model hub" in error_of("hf/some/vit")
    (cached / "preprocessor_config.json").touch()
    with pytest.warns(UserWarning, match="no image processor is stored"):
        assert load_model("hf/some/vit").preprocessing.mean == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("answer", "absent"), [(False, True), (True, False), (OSError("the connection was reset"), False)], ids=str
)
def test_online_the_hub_tells_whether_there_is_a_processor(cached, monkeypatch, answer, absent):
    def file_exists(_repository, _name):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("huggingface_hub.file_exists", file_exists)
    assert (checkpoints.has_file("some/vit", "preprocessor_config.json", offline=False) is False) == absent


@pytest.mark.parametrize(
    "command", [("explain", "demo"), ("figure", "overlay", "demo"), ("evaluate",), ("speed", "--repeats", 1)], ids=str
)
def test_the_command_line_says_in_one_plain_line_that_a_processor_is_assumed(hf, tmp_path, command):
    save_classifier(hf, tmp_path / "vit", num_labels=37)
    out = {"figure": "figure.png", "speed": "rows.json"}.get(command[0], "out")
    rest = ("--model", f"hf/{tmp_path / 'vit'}", "--methods", "rollout", "--out", tmp_path / out)
    if command[0] == "evaluate":
        rest += ("--data", write_photos(tmp_path / "data", 1), "--protocol", PROTOCOL)
    result = CliRunner().invoke(app, [str(argument) for argument in (*command, *rest)])
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.stderr.splitlines() if "image processor" in line)
    assert line.startswith("warning: hf/")


@pytest.mark.filterwarnings("ignore:.*no image processor")
@pytest.mark.parametrize("family", ["clip", "siglip"])
@pytest.mark.parametrize("part", ["whole", "tower"])
def test_image_tower_of_a_model_that_also_reads(hf, tmp_path, family, part):
    prefix, tower_class = {
        "clip": ("CLIP", "CLIPVisionModelWithProjection"),
        "siglip": ("Siglip", "SiglipVisionModel"),
    }[family]
    vision = {**SMALL, "image_size": 32}
    text = {key: value for key, value in SMALL.items() if key != "patch_size"} | {"vocab_size": 99}
    if part == "whole":
        model = getattr(hf, f"{prefix}Model")(getattr(hf, f"{prefix}Config")(text_config=text, vision_config=vision))
    else:
        model = getattr(hf, tower_class)(getattr(hf, f"{prefix}VisionConfig")(**vision))
    model.save_pretrained(tmp_path)
    loaded = load_model(f"hf/{tmp_path}")
    assert type(loaded.model).__name__ == tower_class
    assert loaded.class_names is None
    assert loaded.preprocessing.image_size == (32, 32)
    theirs = model.state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in loaded.model.state_dict().items() if key in theirs)


def test_backbone_without_classifier_is_refused(hf, tmp_path):
    hf.ViTModel(hf.ViTConfig(**SMALL, image_size=32)).save_pretrained(tmp_path)
    assert "classifier" in error_of(f"hf/{tmp_path}")


def test_text_classifier_is_sent_to_its_own_call(hf, tmp_path):
    sizes = {key: value for key, value in SMALL.items() if key != "patch_size"}
    hf.BertForSequenceClassification(hf.BertConfig(**sizes, vocab_size=30)).save_pretrained(tmp_path)
    assert "explain_text" in error_of(f"hf/{tmp_path}")


@pytest.mark.filterwarnings("ignore:.*no image processor")
def test_image_size_of_transformers_models(hf, tmp_path):
    save_classifier(hf, tmp_path / "vit", num_labels=4)
    assert "32 x 32 pixels only" in error_of(f"hf/{tmp_path / 'vit'}", image_size=64)
    config = hf.Dinov2Config(**SMALL, image_size=32, num_labels=4)
    hf.Dinov2ForImageClassification(config).save_pretrained(tmp_path / "dinov2")
    loaded = load_model(f"hf/{tmp_path / 'dinov2'}", image_size=(64, 48))
    assert loaded.model(torch.zeros(1, 3, *loaded.preprocessing.image_size)).logits.shape == (1, 4)
    # Patches of 8 pixels: what stands over would not be seen, and the map would be stretched over it.
    message = error_of(f"hf/{tmp_path / 'dinov2'}", image_size=52)
    assert message.endswith("an image size must be a multiple of the patch size 8, such as 48 x 48 or 56 x 56")


def test_repository_code_is_never_run(hf, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "auto_map": {"AutoConfig": "evil.Evil"}}))
    (tmp_path / "evil.py").write_text("raise SystemExit('code of the repository was run')")
    assert "cannot be loaded" in error_of(f"hf/{tmp_path}")


def test_folders_that_hold_no_model(hf, tmp_path):
    assert "config.json" in error_of(f"hf/{tmp_path}")
    assert "no folder" in error_of(f"hf/{tmp_path / 'gone'}")
    (tmp_path / "config.json").write_text("{not json")
    error_of(f"hf/{tmp_path}")


def test_damaged_hf_weights(hf, tmp_path):
    save_classifier(hf, tmp_path, num_labels=4)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    error_of(f"hf/{tmp_path}")


def test_missing_transformers_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    with pytest.raises(MissingDependencyError, match=r"vitreous\[hf\]"):
        load_model("hf/anything")


@pytest.mark.parametrize("name", ["_attn_implementation", "attn_implementation", "_attn_implementation_internal"])
def test_an_unknown_attention_is_one_sentence(hf, tmp_path, photo, name):
    save_classifier(hf, tmp_path, num_labels=4)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: "unheard of"}))
    with suppress(VitreousError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        vitreous.explain(f"hf/{tmp_path}", photo, "gae")
