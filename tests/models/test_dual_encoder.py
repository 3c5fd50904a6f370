"""Dual encoders of every library score images and prompts as the model itself does; maps are its gradients."""

import pytest
import torch
from PIL import Image
from torch.nn import functional

import vitreous
from small_dual_encoders import (
    CONTEXT,
    FAMILIES,
    IMAGE,
    LikeOpenAI,
    embeddings,
    image_blocks,
    input_times_gradient,
    open_clip_model,
    own_tokens,
    prompt_tokenizer,
    save_clip,
    tokenize,
    transformers_model,
)
from vitreous.errors import InputError, ModelError, TargetError, UnsupportedModelError, VitreousError
from vitreous.models import Preprocessing
from vitreous.models.dual_encoder import find_dual_encoder, load_dual_encoder
from vitreous.targets import Prompt

EXACT = 1e-12  # float64: both sides do the same sums in another order
PROMPTS = ["a photo of a cat", "the dog .", "tabby cats"]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    model, tokenizer = FAMILIES[request.param]()
    return request.param, model, tokenizer


@pytest.fixture
def pixels():
    return torch.randn(2, 3, IMAGE, IMAGE, dtype=torch.float64)


def own_scores(family, model, tokenizer, pixels, text):
    image, texts = embeddings(model, pixels, own_tokens(family, tokenizer, text))
    cosine = functional.cosine_similarity(image, texts)
    scores = model.logit_scale.exp() * cosine
    return scores + model.logit_bias if family == "siglip" else scores


def test_scores_are_those_of_the_model(case, pixels):
    family, model, tokenizer = case
    found = find_dual_encoder((model, tokenizer)).classifier(PROMPTS)(pixels)
    for number, prompt in enumerate(PROMPTS):
        expected = own_scores(family, model, tokenizer, pixels, prompt)
        assert (found[:, number] - expected).abs().max() < EXACT


def test_scores_are_the_logits_of_transformers(pixels):
    for family in ("clip", "siglip"):
        model, tokenizer = FAMILIES[family]()
        given = tokenizer(PROMPTS, return_tensors="pt", padding="max_length", max_length=CONTEXT)
        mask = {} if family == "siglip" else {"attention_mask": given["attention_mask"]}
        expected = model(input_ids=given["input_ids"], pixel_values=pixels, **mask).logits_per_image
        found = find_dual_encoder((model, tokenizer)).classifier(PROMPTS)(pixels)
        assert (found - expected).abs().max() < EXACT


def test_maps_of_prompts_are_the_gradients_of_their_scores(case, pixels):
    family, model, tokenizer = case
    network = find_dual_encoder((model, tokenizer)).classifier(PROMPTS)
    explanation = vitreous.explain(network, pixels, "ixg:layer=0", target=[[0, 1, 2]] * 2)
    for number, prompt in enumerate(PROMPTS):
        expected = input_times_gradient(
            model, image_blocks(model)[0], lambda p=prompt: own_scores(family, model, tokenizer, pixels, p)
        )
        found = explanation.scores["ixg:layer=0"][:, number]
        assert (found - expected[:, -found.shape[1] :]).abs().max() < EXACT


def test_one_image_pass_serves_all_prompts(pixels, monkeypatch):
    model, tokenizer = FAMILIES["clip"]()
    network = find_dual_encoder((model, tokenizer)).classifier(PROMPTS)
    vitreous.explain(network, pixels, "ixg", target=[[0]] * 2)  # what is seen of the architecture is kept
    passes = []
    block = image_blocks(model)[0]
    handle = block.register_forward_hook(lambda *_: passes.append(1))
    vitreous.explain(network, pixels, "ixg", target=[[0, 1, 2]] * 2)
    handle.remove()
    assert len(passes) == 1


def test_a_prompt_is_explained_as_the_model_scores_it(case, pixels):
    family, model, tokenizer = case
    prompts = [Prompt(text) for text in PROMPTS]
    methods = ["ixg:layer=0", "decompx.skipplus", "gae", "tokentm", "grad_eclip", "transattr", "rise:budget=8"]
    explanation = vitreous.explain((model, tokenizer), pixels, methods, target=[prompts] * 2)
    network = find_dual_encoder((model, tokenizer)).classifier(PROMPTS)
    classes = vitreous.explain(network, pixels, methods, target=[[0, 1, 2]] * 2, outputs="value")
    for method in methods:
        assert (explanation.scores[method] - classes.scores[method]).abs().max() < EXACT, method
    for number, prompt in enumerate(PROMPTS):
        expected = own_scores(family, model, tokenizer, pixels, prompt)
        assert (explanation.target_values[:, number] - expected).abs().max() < EXACT
    assert [explanation.label(0, target) for target in range(3)] == PROMPTS
    assert explanation.provenance["targets"] == [f"prompt({prompt})" for prompt in PROMPTS]


def test_prompts_are_saved_and_loaded(tmp_path, pixels):
    explanation = vitreous.explain(FAMILIES["siglip"](), pixels, "gae", target=Prompt("a photo of a cat"))
    again = vitreous.Explanation.load(explanation.save(tmp_path / "saved"))
    assert again.label() == "a photo of a cat"
    assert torch.equal(again.target_values, explanation.target_values)
    assert again.targets[0].text == "a photo of a cat"
    assert torch.equal(again.targets[0].embedding, explanation.targets[0].embedding)


def test_decompx_of_a_prompt_with_biases_adds_up_to_its_score(pixels):
    """The length of the embedding is held constant, so that the shares of all tokens and biases are the cosine's."""
    model, tokenizer = FAMILIES["clip"]()
    network = find_dual_encoder((model, tokenizer)).classifier(PROMPTS)
    images = pixels[:1]
    target = vitreous.explain(network, images, "decompx", target=0, outputs="value")
    plain = vitreous.explain((model, tokenizer), images, "decompx", target=Prompt(PROMPTS[0]))
    assert (target.scores["decompx"] - plain.scores["decompx"]).abs().max() < EXACT
    # Under plain gradients the cosine does not change with the length, so the map is another one.
    free = vitreous.explain((model, tokenizer), images, "ixg", target=Prompt(PROMPTS[0]))
    assert (free.scores["ixg"] - plain.scores["decompx"]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("text", "message"), [("", "the prompt is empty: say in a few words"), (3, "a prompt is a text, not 3")]
)
def test_prompts_that_are_no_texts_are_refused(text, message):
    with pytest.raises(TargetError, match=message):
        Prompt(text)


def test_a_prompt_for_a_model_without_text_tower_is_refused():
    with pytest.raises(UnsupportedModelError, match="timm/test_vit@random has no text tower, so that no prompt can be"):
        vitreous.explain("timm/test_vit@random", torch.zeros(1, 3, 160, 160), target=Prompt("a cat"))


def test_zero_shot_classes_are_means_over_templates(case, pixels):
    _, model, tokenizer = case
    dual = find_dual_encoder((model, tokenizer))
    templates = ("a photo of a {}", "the {} .")
    network = dual.zero_shot(["cat", "dog"], templates)
    assert network.class_names == ("cat", "dog")
    image = dual.embed_images(pixels)
    for number, name in enumerate(network.class_names):
        mean = dual.embed_texts([template.format(name) for template in templates]).mean(dim=0)
        cosine = image @ (mean / mean.norm())
        expected = dual.scale * cosine + (dual.bias or 0)
        assert (network(pixels)[:, number] - expected).abs().max() < EXACT


def test_sigmoid_belongs_to_a_logit_bias():
    assert find_dual_encoder(FAMILIES["siglip"]()).outputs == "sigmoid"
    assert find_dual_encoder(FAMILIES["clip"]()).outputs == "logits"


def test_photos_are_taken_with_processor_or_transform():
    torchvision = pytest.importorskip("torchvision")
    transforms = torchvision.transforms
    compose = transforms.Compose(
        [
            transforms.Resize(IMAGE, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(IMAGE),
            transforms.ToTensor(),
            transforms.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)),
        ]
    )
    photo = Image.radial_gradient("L").convert("RGB").resize((57, 40))
    dual = find_dual_encoder((open_clip_model(), compose, tokenize))
    # Pixels are rounded to whole numbers by both; float32 has seven digits.
    assert (dual.preprocessing([photo])[0] - compose(photo)).abs().max() < 1e-6
    network = dual.loaded(dual.classifier(["a cat"]))
    assert vitreous.explain(network, photo, "gae", target=0).class_names == ("a cat",)


def test_a_folder_with_both_towers_is_loaded_whole(tmp_path, pixels):
    model, tokenizer = transformers_model("clip").float(), prompt_tokenizer()
    dual = load_dual_encoder(save_clip(tmp_path))
    expected = find_dual_encoder((model, tokenizer)).classifier(PROMPTS)(pixels.float())
    # Float32: the folder may choose another form of attention.
    assert (dual.classifier(PROMPTS)(pixels.float()) - expected).abs().max() < 1e-5
    assert dual.preprocessing.image_size == (IMAGE, IMAGE)


def test_open_clip_by_name_is_the_same_every_time():
    pytest.importorskip("open_clip")
    with pytest.raises(
        ModelError, match=r"open_clip/ViT-B-32: say which weights, as in open_clip/ViT-B-32@TAG .*openai"
    ):
        load_dual_encoder("open_clip/ViT-B-32")


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_refused(case, prompt):
    _, model, tokenizer = case
    with pytest.raises(InputError, match="prompt 0 is empty"):
        find_dual_encoder((model, tokenizer)).embed_texts([prompt])


def test_what_is_no_text_is_refused(case):
    _, model, tokenizer = case
    with pytest.raises(InputError, match="prompt 0 is not a text but int"):
        find_dual_encoder((model, tokenizer)).embed_texts([3])


def test_a_prompt_that_is_too_long_is_cut_with_a_warning():
    model, tokenizer = FAMILIES["clip"]()
    dual = find_dual_encoder((model, tokenizer))
    with pytest.warns(
        UserWarning, match="prompt 0 has 15 word pieces, of which the model takes the first 10: the rest is"
    ):
        found = dual.embed_texts(["cat " * 15])
    assert torch.equal(found, dual.embed_texts(["cat " * 10]))


def test_a_tokenizer_that_refuses_long_texts_is_quoted():
    dual = find_dual_encoder((LikeOpenAI(open_clip_model()), tokenize))
    with pytest.raises(InputError, match=r"the tokenizer cannot take .*: Input .* is too long for context length 12"):
        dual.embed_texts(["cat " * 15])


def test_open_clips_tokenizer_cuts_with_a_warning():
    open_clip = pytest.importorskip("open_clip")
    tokenizer = open_clip.SimpleTokenizer(context_length=8)
    text = {"context_length": 8, "vocab_size": 49408, "width": 8, "heads": 2, "layers": 1}
    vision = {"image_size": IMAGE, "patch_size": 8, "width": 16, "layers": 1, "head_width": 8}
    dual = find_dual_encoder((open_clip.CLIP(embed_dim=4, vision_cfg=vision, text_cfg=text).eval(), tokenizer))
    read = dual.reader.fitted("a tabbyish cat", "prompt 0")
    assert [read.words[piece.word].text for piece in read.pieces] == [
        "a", "tabbyish", "tabbyish", "tabbyish", "cat",
    ]  # fmt: skip
    with pytest.warns(UserWarning, match="prompt 0 is longer than the 6 word pieces that the model takes"):
        dual.embed_texts(["a b c d e f g h"])


def test_a_model_without_text_tower_is_refused():
    model = vitreous.load_model("timm/test_vit@random")
    with pytest.raises(UnsupportedModelError, match="timm/test_vit@random has no text tower, so that no prompt can be"):
        find_dual_encoder(model)
    with pytest.raises(VitreousError, match="VisionTransformer has no text tower"):
        find_dual_encoder(model.model)


def test_a_model_without_tokenizer_says_how_to_give_it():
    with pytest.raises(InputError, match="a prompt needs the tokenizer of CLIPModel: give"):
        find_dual_encoder(transformers_model("clip")).embed_texts(["a cat"])


@pytest.mark.parametrize(
    ("names", "templates", "message"),
    [
        ([], "a {}", "needs the names of its classes"),
        (["cat", ""], "a {}", "needs the names of its classes"),
        (["cat"], "a photo", "a template is a text with {} where"),
        (["cat"], [], "a template is a text with {} where"),
    ],
)
def test_zero_shot_without_names_or_templates_is_refused(names, templates, message):
    with pytest.raises(InputError, match=message):
        find_dual_encoder(FAMILIES["clip"]()).zero_shot(names, templates)


def test_a_preprocessing_may_be_given():
    half = (0.5, 0.5, 0.5)
    preprocessing = Preprocessing((IMAGE, IMAGE), half, half)
    assert find_dual_encoder((open_clip_model(), preprocessing, tokenize)).preprocessing is preprocessing


def test_a_model_of_images_and_texts_without_a_text_says_what_to_give(pixels):
    model, _ = FAMILIES["clip"]()
    with pytest.raises(
        UnsupportedModelError, match=r"cannot be called with images alone .* target=vitreous.targets.Prompt"
    ):
        vitreous.explain(model, pixels, "gae")
