"""Texts in, explanations out: pieces, words, offsets, windows, targets, files, pages, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram, WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import ByteLevel, Metaspace

import vitreous
from small_reviews import text_model
from small_text_models import LONGEST, PAD, ask, blocks_of, build, small_tokenizer, texts
from vitreous._utils.defaults import PAPERS
from vitreous._utils.storage import StorageError
from vitreous.errors import InputError, MethodError, ModelError, TargetError, UnsupportedModelError
from vitreous.explanation.prediction import ExplanationError
from vitreous.models.hf_models import load_text_model
from vitreous.speed.timing import one_thread


def byte_pieces() -> transformers.PreTrainedTokenizerFast:
    """Bytes without any merged, as RoBERTa's tokenizer has them."""
    letters = sorted(ByteLevel.alphabet())
    names = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "Ċ", "ĉ", "Ġ", *"abdfgilmo"]
    assert set(names[5:]) <= set(letters)
    inner = Tokenizer(BPE({name: number for number, name in enumerate(names)}, [], unk_token="[UNK]"))
    inner.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return _whole(inner)


def sentence_pieces() -> transformers.PreTrainedTokenizerFast:
    """A few words with their blank in front, and one that lacks it, as SentencePiece writes them."""
    names = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "▁bad", "▁good", "film", "▁"]
    inner = Tokenizer(Unigram([(name, -float(number)) for number, name in enumerate(names)], unk_id=4))
    inner.pre_tokenizer = Metaspace()
    return _whole(inner)


def _whole(inner: Tokenizer) -> transformers.PreTrainedTokenizerFast:
    inner.post_processor = small_tokenizer().backend_tokenizer.post_processor
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "mask", "unk")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=LONGEST, **special)


class Wrapped(torch.nn.Module):
    """A classifier of the caller's own with a configuration of its own."""

    def __init__(self, model, config):
        super().__init__()
        self.model, self.config = model, config

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


TEXT = "The film,\nunbelievably, was  GOOD!"
SHORT = "not bad"


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def pair():
    return build("bert"), small_tokenizer()


@pytest.fixture(scope="module")
def folder(pair, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("model")
    pair[0].config.id2label = {0: "NEG", 1: "POS", 2: "<b>none</b>"}
    pair[0].save_pretrained(place)
    pair[1].save_pretrained(place)
    return place


def test_texts_follow_a_model_that_is_moved():
    loaded = text_model()
    assert loaded.reader.inputs([[5, 6]]).device.type == "cpu"
    loaded.model.to("meta")
    assert loaded.reader.inputs([[5, 6]]).device.type == "meta"


class TestPiecesAndWords:
    def test_offsets_lead_back_into_the_text(self, pair):
        explanation = vitreous.explain_text(pair, [TEXT, SHORT], "decompx")
        for text, pieces, words in zip(explanation.texts, explanation.pieces, explanation.words, strict=True):
            assert [text[piece.start : piece.end].lower() for piece in pieces] == [
                piece.text.removeprefix("##") for piece in pieces
            ]
            assert [word.text for word in words] == text.split()
            assert all(text[word.start : word.end] == word.text for word in words)
            for piece in pieces:
                assert words[piece.word].start <= piece.start
                assert piece.end <= words[piece.word].end

    def test_a_word_has_the_largest_or_the_sum_of_its_pieces(self, pair):
        explanation = vitreous.explain_text(pair, TEXT, "decompx")
        pieces = explanation.piece_scores("decompx").tolist()
        homes = [piece.word for piece in explanation.pieces[0]]
        assert homes == [0, 1, 1, 2, 2, 2, 2, 3, 4, 4]
        grouped = [[score for score, home in zip(pieces, homes, strict=True) if home == word] for word in range(5)]
        assert explanation.word_scores("decompx").tolist() == [max(group) for group in grouped]
        assert explanation.word_scores("decompx", by="sum").tolist() == pytest.approx([sum(group) for group in grouped])
        with pytest.raises(ExplanationError, match="by must be max or sum"):
            explanation.word_scores("decompx", by="mean")

    def test_scores_are_those_of_the_tokens(self, pair):
        model, tokenizer = pair
        explanation = vitreous.explain_text(pair, TEXT, ["gae", "ixg"], 1)
        parts = tokenizer(TEXT, return_tensors="pt")
        leaf = {}
        hook = blocks_of(model)[0].register_forward_pre_hook(lambda _, given: leaf.update(tokens=given[0]))
        logits = model(input_ids=parts["input_ids"], attention_mask=parts["attention_mask"]).logits
        hook.remove()
        (gradient,) = torch.autograd.grad(logits[0, 1], leaf["tokens"])
        expected = (leaf["tokens"] * gradient).sum(-1)[0, 1:-1].detach()  # without class token and separator
        torch.testing.assert_close(explanation.scores["ixg"][0], expected, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(explanation.logits, logits.detach(), rtol=1e-12, atol=1e-12)

    def test_a_blank_in_front_of_a_word_is_not_counted_to_its_piece(self, pair):
        """SentencePiece tokenizers give a piece the blank in front of it, or a blank a piece where they lack both."""
        pieces = vitreous.explain_text((pair[0], sentence_pieces()), "bad film good", "ixg").pieces[0]
        assert pieces == (("▁bad", 0, 3, 0), ("▁", 4, 4, 1), ("film", 4, 8, 1), ("▁good", 9, 13, 2))

    def test_white_space_belongs_to_no_word(self, pair):
        """Byte-level tokenizers (RoBERTa) give line breaks, tabs and second blanks pieces of their own."""
        text = "bad\nfilm  good\t"
        explanation = vitreous.explain_text((pair[0], byte_pieces()), text, "decompx")
        pieces = explanation.pieces[0]
        assert [piece.word for piece in pieces if text[piece.start : piece.end].isspace()] == [-1, -1, -1]
        assert [piece.text for piece in pieces if piece.word < 0] == ["Ċ", "Ġ", "ĉ"]
        assert [word.text for word in explanation.words[0]] == ["bad", "film", "good"]
        scores = explanation.piece_scores("decompx")
        for word in range(3):
            own = [score for score, piece in zip(scores.tolist(), pieces, strict=True) if piece.word == word]
            assert float(explanation.word_scores("decompx")[word]) == max(own)
            assert float(explanation.word_scores("decompx", by="sum")[word]) == pytest.approx(sum(own))
        with (
            pytest.warns(UserWarning, match="takes the first 22"),
            pytest.raises(InputError, match="the first 22 pieces of the text, which the model takes, are white space"),
        ):
            vitreous.explain_text((pair[0], byte_pieces()), "\n" * 40 + "bad", "ixg")

    def test_chinese_characters_are_words_where_the_tokenizer_takes_them_apart(self, pair):
        text = "好看的电影, film 你好!"
        for normalised, expected in ((True, [*"好看的电影", ",", "film", "你", "好", "!"]), (False, text.split())):
            tokenizer = small_tokenizer()
            if normalised:
                tokenizer.backend_tokenizer.normalizer = BertNormalizer()
            explanation = vitreous.explain_text((pair[0], tokenizer), text, "ixg")
            assert [word.text for word in explanation.words[0]] == expected
            assert all(text[word.start : word.end] == word.text for word in explanation.words[0])

    def test_texts_of_any_order_and_company_get_the_same_scores(self, pair, monkeypatch):
        monkeypatch.setattr("vitreous.text.explain._TOKENS_AT_ONCE", 20)  # several batches
        given = [TEXT, SHORT, "good", "the film was not good . not bad", "story ! ! !"]
        together = vitreous.explain_text(pair, given, ["tokentm", "attcat"])
        for number, text in enumerate(given):
            alone = vitreous.explain_text(pair, text, ["tokentm", "attcat"])
            for method in ("tokentm", "attcat"):
                torch.testing.assert_close(
                    together.scores[method][number], alone.scores[method][0], rtol=1e-9, atol=1e-12
                )


class TestUsualMethods:
    """Those that are used where none is asked for, as far as a model allows them."""

    def test_all_where_the_model_allows_them(self, pair):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            explanation = vitreous.explain_text(pair, SHORT)
        assert explanation.methods == PAPERS

    def test_one_that_the_model_does_not_allow_is_left_out_with_the_reason(self):
        pair = build("deberta"), small_tokenizer()
        with pytest.warns(UserWarning, match=r"gradtoken is left out: .*more than q and k") as told:
            explanation = vitreous.explain_text(pair, [SHORT, TEXT])
        assert [warning.filename for warning in told] == [__file__]
        assert explanation.methods == ("tokentm", "decompx.skipplus")
        assert set(explanation.signed) == set(explanation.methods)
        assert explanation.provenance["methods"] == ["tokentm", "decompx.skipplus"]
        asked = vitreous.explain_text(pair, [SHORT, TEXT], ["tokentm", "decompx.skipplus"])
        for method in asked.methods:
            for one, other in zip(explanation.scores[method], asked.scores[method], strict=True):
                assert torch.equal(one, other)
        with pytest.raises(UnsupportedModelError, match="gradtoken cannot explain"):
            vitreous.explain_text(pair, SHORT, ["tokentm", "gradtoken"])

    def test_where_none_is_left_it_is_an_error(self, monkeypatch):
        monkeypatch.setattr("vitreous.text.explain.PAPERS", ("gradtoken", "vitcx"))
        with pytest.raises(UnsupportedModelError, match="gradtoken cannot explain"):
            vitreous.explain_text((build("deberta"), small_tokenizer()), SHORT)


class TestTargets:
    def test_one_for_all_one_each_and_several(self, pair):
        given = [TEXT, SHORT]
        for target, shape in ((1, (2,)), ([0, 2], (2,)), ([[0, 2], [1, 0]], (2, 2))):
            explanation = vitreous.explain_text(pair, given, "decompx", target)
            assert explanation.target.shape == shape
            assert explanation.target.tolist() == (target if isinstance(target, list) else [target] * 2)
            assert explanation.scores["decompx"][1].shape == (*shape[1:], 2)
        several = vitreous.explain_text(pair, given, ["decompx", "rollout"], topk=3)
        assert [prediction.class_index for prediction in several.top(3, index=1)] == several.target[1].tolist()
        one = vitreous.explain_text(pair, SHORT, "decompx", int(several.target[1, 2]))
        torch.testing.assert_close(
            several.piece_scores("decompx", 1, 2), one.piece_scores("decompx"), rtol=1e-9, atol=0
        )

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"target": 3}, "not between 0 and 2"),
            ({"target": -1}, "not between 0 and 2"),
            ({"target": [0]}, r"shape \(1,\) for 2 texts"),
            ({"target": [[[0]], [[1]]]}, r"shape \(2, 1, 1\) for 2 texts"),
            ({"target": torch.zeros(2, 0, dtype=torch.int64)}, r"shape \(2, 0\) for 2 texts"),
            ({"target": 1.5}, "must be integers"),
            ({"topk": 4}, "topk=4 is not between 1 and 3"),
            ({"topk": 1, "target": 1}, "not both"),
        ],
    )
    def test_wrong_ones_are_refused(self, pair, options, message):
        with pytest.raises(TargetError, match=message):
            vitreous.explain_text(pair, [TEXT, SHORT], "ixg", **options)


class TestWhatOutputsAre:
    """One of several is right, each is right or not, or they are values: as ``problem_type`` and their number say."""

    @staticmethod
    def explained(**options):
        model = build("bert", **options)
        return model, vitreous.explain_text((model, small_tokenizer()), [TEXT, SHORT], ["tokentm", "ixg"])

    @pytest.mark.parametrize(
        "options", [{"num_labels": 1}, {"num_labels": 3, "problem_type": "multi_label_classification"}]
    )
    def test_yes_or_no(self, options):
        model, explanation = self.explained(**options)
        probabilities = explanation.logits.sigmoid()
        torch.testing.assert_close(explanation.probabilities, probabilities, rtol=0, atol=0)
        number, _, likely = explanation.top(1, index=1)[0]
        assert likely == float(probabilities[1].max()) == explanation.probability(number, 1)
        assert f"{likely:.1%}</b>" in explanation.html() or f"{likely:.1%}, " in explanation.html()
        # tokentm reads the gradient of the probability, dp = p (1 - p) dy: that of a head which is so much smaller.
        target, p = int(explanation.target[0]), float(probabilities[0, explanation.target[0]])
        with torch.no_grad():
            model.classifier.weight[target] *= p * (1 - p)
        of_logit = vitreous.explain_text((model, small_tokenizer()), TEXT, "tokentm:gradient=logit", target)
        torch.testing.assert_close(
            explanation.scores["tokentm"][0], of_logit.scores["tokentm:gradient=logit"][0], rtol=1e-9, atol=1e-12
        )

    def test_one_of_several(self):
        _, explanation = self.explained(num_labels=3, problem_type="single_label_classification")
        torch.testing.assert_close(explanation.probabilities, explanation.logits.softmax(-1), rtol=0, atol=0)

    @pytest.mark.parametrize("count", [1, 3])
    def test_values_have_no_probability(self, count, tmp_path):
        model, explanation = self.explained(num_labels=count, problem_type="regression")
        loaded = vitreous.TextExplanation.load(explanation.save(tmp_path / "values.json"))
        for one in (explanation, loaded, loaded.select(0)):
            with pytest.raises(ExplanationError, match=r"values \(regression\), which have no probability"):
                _ = one.probabilities
            number, _, likely = one.top(1)[0]
            assert number == int(explanation.logits[0].argmax())
            assert likely is None
            assert one.format_output(number) == f"{float(explanation.logits[0].max()):.3g}"
            assert f"{number} {one.format_output(number)}" in one.html()
            assert "%</b>" not in one.html()
        values = vitreous.explain_text((model, small_tokenizer()), [TEXT, SHORT], "tokentm:gradient=logit")
        for one, other in zip(values.scores["tokentm:gradient=logit"], explanation.scores["tokentm"], strict=True):
            assert torch.equal(one, other)  # what is explained of a value is the value


class TestLongTexts:
    LONG = " ".join(["good film . bad story , very unbelievably not"] * 5)

    def test_are_cut_with_a_warning(self, pair):
        with pytest.warns(UserWarning, match=f"text 1 has 55 word pieces.*the first {LONGEST - 2}") as told:
            explanation = vitreous.explain_text(pair, [SHORT, self.LONG], "ixg")
        assert [warning.filename for warning in told] == [__file__]  # the caller's line, not one of the library
        assert len(explanation.pieces[1]) == LONGEST - 2
        end = explanation.words[1][-1].end
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            short = vitreous.explain_text(pair, self.LONG[:end], "ixg")
        assert explanation.words[1] == short.words[0]

    def test_are_explained_in_windows_whose_scores_are_averaged(self, pair):
        _, tokenizer = pair
        whole = " ".join(["good film bad story very not the was"] * 7)  # a window of whole words is a text again
        explanation = vitreous.explain_text(pair, [whole, SHORT], "ixg", windows=True)
        numbers = tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"]
        capacity, step = LONGEST - 2, (LONGEST - 2) // 2
        starts = [*range(0, len(numbers) - capacity, step), len(numbers) - capacity]
        logits, total, count = [], torch.zeros(len(numbers)).double(), torch.zeros(len(numbers)).double()
        for start in starts:
            window = tokenizer.decode(numbers[start : start + capacity])
            one = vitreous.explain_text(pair, window, "ixg", int(explanation.target[0]))
            assert len(one.pieces[0]) == capacity
            total[start : start + capacity] += one.scores["ixg"][0]
            count[start : start + capacity] += 1
            logits.append(one.logits[0])
        torch.testing.assert_close(explanation.logits[0], torch.stack(logits).mean(0), rtol=1e-9, atol=1e-11)
        assert int(explanation.target[0]) == int(torch.stack(logits).mean(0).argmax())
        torch.testing.assert_close(explanation.scores["ixg"][0], total / count, rtol=1e-9, atol=1e-11)
        alone = vitreous.explain_text(pair, SHORT, "ixg")
        torch.testing.assert_close(explanation.scores["ixg"][1], alone.scores["ixg"][0], rtol=1e-9, atol=1e-11)

    @pytest.mark.parametrize("options", [{}, {"topk": 2}, {"target": [[2, 0], [1, 1]]}])
    def test_windows_of_a_very_long_text_are_run_a_few_at_a_time_with_the_same_scores(self, pair, monkeypatch, options):
        given, methods = [self.LONG, SHORT], ["ixg", "gae", "attnlrp"]
        together = vitreous.explain_text(pair, given, methods, windows=True, **options)
        monkeypatch.setattr("vitreous.text.explain._TOKENS_AT_ONCE", 2 * (LONGEST - 2))
        monkeypatch.setattr("vitreous.tape.runner.TOKENS_AT_ONCE", 2 * LONGEST)
        vitreous.explain_text(pair, given, methods, windows=True, **options)  # its architecture is found once
        sizes = []
        hook = pair[0].register_forward_pre_hook(
            lambda _, __, named: sizes.append(tuple(named["input_ids"].shape)), with_kwargs=True
        )
        try:
            apart = vitreous.explain_text(pair, given, methods, windows=True, **options)
        finally:
            hook.remove()
        assert sizes == [(1, 4), *[(2, LONGEST)] * 4]  # the short text; the four windows, for the class and explained
        assert torch.equal(apart.target, together.target)
        torch.testing.assert_close(apart.logits, together.logits, rtol=1e-12, atol=1e-12)
        for method in methods:
            for one, other in zip(apart.scores[method], together.scores[method], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)

    def test_positions_of_roberta_are_counted_from_behind_padding(self):
        model = build("roberta", max_position_embeddings=LONGEST)
        tokenizer = small_tokenizer(longest=1000)
        with pytest.warns(UserWarning, match=f"takes the first {LONGEST - 3};"):
            vitreous.explain_text((model, tokenizer), self.LONG, "ixg")

    def test_relative_positions_end_where_the_configuration_does_unless_the_tokenizer_tells(self):
        """DeBERTa runs on any length: no table of positions stops it."""
        model = build("deberta")
        assert not any("position_embeddings" in name for name, _ in model.named_modules())
        with pytest.warns(UserWarning, match=f"takes the first {LONGEST - 2};"):
            vitreous.explain_text((model, small_tokenizer(longest=int(1e30))), self.LONG, "ixg")
        told = vitreous.explain_text((model, small_tokenizer(longest=100)), self.LONG, "ixg")
        assert len(told.pieces[0]) == 55


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ("", "text 0 is empty"),
            ([SHORT, " \n"], "text 1 is empty"),
            ("[SEP]", "nothing but special tokens"),
            ("[CLS] [MASK] [SEP]", "nothing but special tokens"),
            ([], "no text was given"),
            (5, "a text or several, not int"),
            ([SHORT, None], "text 1 is not a text but NoneType"),
            ([SHORT, "good \udcff film"], "text 1 is not valid Unicode: there is half a character at place 5"),
        ],
    )
    def test_of_texts(self, pair, given, message):
        with pytest.raises(InputError, match=message):
            vitreous.explain_text(pair, given, "ixg")

    def test_a_text_of_unknown_words_is_still_a_text(self, pair):
        assert len(vitreous.explain_text(pair, "§ ¶", "ixg").pieces[0]) == 2

    def test_of_a_model_without_tokenizer(self, pair, tmp_path):
        with pytest.raises(InputError, match=r"comes with its tokenizer.*not a model alone"):
            vitreous.explain_text(pair[0], SHORT, "ixg")
        with pytest.raises(InputError, match="must be one of the transformers library, not NoneType"):
            vitreous.explain_text((pair[0], None), SHORT, "ixg")
        pair[0].save_pretrained(tmp_path)
        with pytest.raises(ModelError, match="there is no tokenizer beside the weights"):
            vitreous.explain_text(f"hf/{tmp_path}", SHORT, "ixg")
        empty = type(pair[1])(tokenizer_object=Tokenizer(WordPiece({"[UNK]": 0}, unk_token="[UNK]")), unk_token="[UNK]")
        with pytest.raises(InputError, match="every word is unknown"):
            vitreous.explain_text((pair[0], empty), SHORT, "ixg")

    @pytest.mark.parametrize("kind", ["bert", "roberta", "deberta"])
    def test_of_a_repository_without_tokenizer(self, kind, tmp_path, monkeypatch):
        """transformers makes up a tokenizer whose words are all unknown, from the hub's cache as from a folder."""
        repository = tmp_path / "models--someone--classifier"
        build(kind).save_pretrained(repository / "snapshots" / "abc")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("abc")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr("vitreous.models.checkpoints.is_reachable", lambda: False)
        with pytest.raises(ModelError, match=r"^hf/someone/classifier: there is no tokenizer beside the weights"):
            load_text_model("hf/someone/classifier")

    def test_of_tokenizers_that_do_not_fit(self, pair):
        bare = small_tokenizer()
        bare.backend_tokenizer.post_processor = None
        with pytest.raises(UnsupportedModelError, match="no class token in front"):
            vitreous.explain_text((pair[0], bare), SHORT, "ixg")
        with pytest.raises(InputError, match="CanineTokenizer does not tell where its tokens stand in a text"):
            vitreous.explain_text((pair[0], transformers.CanineTokenizer()), SHORT, "ixg")
        with pytest.raises(UnsupportedModelError, match="takes no input_ids"):
            vitreous.explain_text((torch.nn.Linear(2, 2), pair[1]), SHORT, "ixg")

    @pytest.mark.parametrize("config", [SimpleNamespace(hidden_size=24), {"hidden_size": 24}, None])
    def test_a_model_whose_configuration_is_not_that_of_transformers_has_no_class_names(self, pair, config):
        expected = vitreous.explain_text(pair, SHORT, "ixg", 1)
        explanation = vitreous.explain_text((Wrapped(pair[0], config), pair[1]), SHORT, "ixg", 1)
        assert explanation.class_names is None
        assert torch.equal(explanation.scores["ixg"][0], expected.scores["ixg"][0])

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("demo", "named demo-text, hf/ID or hf/FOLDER"),
            ("hf//no/such/folder", "there is no folder"),
            ("hf/", "named demo-text, hf/ID or hf/FOLDER"),
        ],
    )
    def test_of_names(self, name, message):
        with pytest.raises(ModelError, match=message):
            vitreous.explain_text(name, SHORT, "ixg")

    def test_without_network_in_one_sentence(self, monkeypatch, tmp_path):
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        monkeypatch.setattr("vitreous.models.checkpoints.is_reachable", lambda: False)
        with pytest.raises(ModelError, match=r"not on this machine and the model hub cannot be reached") as caught:
            load_text_model("hf/nobody/has-this-model")
        assert "\n" not in str(caught.value)

    def test_of_an_encoder_without_classifier(self, pair, tmp_path):
        pair[0].bert.save_pretrained(tmp_path)
        pair[1].save_pretrained(tmp_path)
        with pytest.raises(ModelError, match="encoder without a classifier"):
            load_text_model(f"hf/{tmp_path}")

    def test_of_an_image_classifier(self, tmp_path):
        config = transformers.ViTConfig(hidden_size=24, num_hidden_layers=1)
        transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
        with pytest.raises(ModelError, match="reads images"):
            load_text_model(f"hf/{tmp_path}")

    def test_of_methods_and_options_for_pictures(self, pair):
        with pytest.raises(UnsupportedModelError, match="no pixels"):
            vitreous.explain_text(pair, SHORT, "vitcx")
        with pytest.raises(MethodError, match="a text has no pixels"):
            vitreous.explain_text(pair, SHORT, "lrp:resolution=pixel")
        with pytest.raises(MethodError, match="there is baseline=zero, baseline=pad, baseline=mask"):
            vitreous.explain_text(pair, SHORT, "integrated_gradients:baseline=black")


class TestIntegratedGradients:
    """captum is the reference; both use Gauss-Legendre points, which captum rounds to float32 (6e-8)."""

    captum = staticmethod(lambda: pytest.importorskip("captum.attr", reason="captum is not installed"))

    @pytest.mark.parametrize("kind", ["bert", "distilbert", "electra"])
    def test_agree_with_captums_layer_form(self, kind):
        model, given = build(kind), texts((9,))
        numbers = given.parts["input_ids"]
        layer = model.base_model.embeddings if kind != "electra" else model.electra.embeddings_project
        reference = self.captum().LayerIntegratedGradients(
            lambda ids: model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits, layer
        )
        blank = numbers.masked_fill(given.content, PAD)
        expected = reference.attribute(numbers, baselines=blank, target=2, n_steps=20, method="gausslegendre")
        method = "integrated_gradients:steps=20,baseline=pad"
        found = ask(model, given, method, 2).scores[method]
        torch.testing.assert_close(
            found, expected.sum(-1)[:, 1:].detach(), rtol=1e-6, atol=1e-6 * float(found.abs().max())
        )

    def test_agree_with_captum_from_zero_and_are_complete(self):
        model, given = build("bert"), texts((9,))
        embedded = model.bert.embeddings(given.parts["input_ids"]).detach()

        def logits(tokens):
            hook = blocks_of(model)[0].register_forward_pre_hook(lambda _, arguments: (tokens, *arguments[1:]))
            try:
                return model(input_ids=given.parts["input_ids"].expand(len(tokens), -1)).logits
            finally:
                hook.remove()

        expected = (
            self.captum()
            .IntegratedGradients(logits)
            .attribute(embedded, baselines=torch.zeros_like(embedded), target=1, n_steps=50, method="gausslegendre")
        )
        found = ask(model, given, "integrated_gradients", 1).scores["integrated_gradients"]
        torch.testing.assert_close(
            found, expected.sum(-1)[:, 1:].detach(), rtol=1e-6, atol=1e-6 * float(found.abs().max())
        )


class TestLookingAndKeeping:
    def test_a_folder_is_loaded_with_class_names(self, folder):
        explanation = vitreous.explain_text(f"hf/{folder}", SHORT, "ixg", 1)
        assert explanation.label() == "POS"
        assert explanation.provenance["model"] == f"hf/{folder}"
        assert len(explanation.provenance["fingerprint"]) == 64

    def test_what_was_saved_is_loaded(self, pair, tmp_path):
        explanation = vitreous.explain_text(pair, [TEXT, SHORT], ["ixg", "gae"], topk=2)
        file = explanation.save(tmp_path / "new" / "one.json")
        loaded = vitreous.TextExplanation.load(file)
        for method in explanation.methods:
            for one, other in zip(explanation.scores[method], loaded.scores[method], strict=True):
                assert torch.equal(one, other)
                assert one.dtype == other.dtype
        assert torch.equal(loaded.logits, explanation.logits)
        assert (loaded.texts, loaded.pieces, loaded.words) == (explanation.texts, explanation.pieces, explanation.words)
        assert (loaded.signed, loaded.provenance) == (explanation.signed, explanation.provenance)
        with pytest.raises(StorageError, match="already exists"):
            explanation.save(file)
        explanation.save(file, overwrite=True)

    def test_a_link_stays_one_and_no_draft_is_left(self, pair, tmp_path):
        explanation = vitreous.explain_text(pair, SHORT, "ixg")
        link = tmp_path / "link.json"
        link.symlink_to(tmp_path / "real.json")
        explanation.save(link)
        assert link.is_symlink()
        assert vitreous.TextExplanation.load(tmp_path / "real.json").texts == explanation.texts
        unknown = dataclasses.replace(explanation, provenance={"when": object()})  # which JSON has no word for
        with pytest.raises(TypeError):
            unknown.save(link, overwrite=True)
        surrogate = dataclasses.replace(explanation, class_names=("\udc80", "b", "c"))  # which UTF-8 does not know
        surrogate.save(link, overwrite=True)
        assert vitreous.TextExplanation.load(link).class_names == surrogate.class_names
        assert {file.name for file in tmp_path.iterdir()} == {"link.json", "real.json"}

    @pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "vitreous text explanation", "schema": 1}'])
    def test_a_damaged_file_is_one_line(self, tmp_path, content):
        file = tmp_path / "one.json"
        file.write_text(content)
        with pytest.raises(StorageError) as caught:
            vitreous.TextExplanation.load(file)
        assert "\n" not in str(caught.value)

    def test_parts_that_do_not_fit_are_refused(self, pair):
        explanation = vitreous.explain_text(pair, [TEXT, SHORT], "ixg")
        fields = {field.name: getattr(explanation, field.name) for field in dataclasses.fields(explanation)}
        for wrong in ({"texts": (TEXT,)}, {"scores": {}}, {"scores": {"ixg": (torch.zeros(2), torch.zeros(2))}}):
            with pytest.raises(ExplanationError):
                vitreous.TextExplanation(**{**fields, **wrong})
        assert vitreous.TextExplanation(**fields).select(1).texts == (SHORT,)
        with pytest.raises(ExplanationError, match="this explanation has 2 texts"):
            explanation.word_scores("ixg", 2)

    def test_pages_hold_the_text_escaped_and_nothing_from_elsewhere(self, folder):
        text = "good <script>alert('film')</script> & bad"
        explanation = vitreous.explain_text(f"hf/{folder}", text, ["decompx", "gae"], topk=3)
        for page in (explanation.html(), explanation._repr_html_()):
            assert "<script" not in page
            assert "&lt;script&gt;alert(&#39;film&#39;)&lt;/script&gt;" in page
            assert "&lt;b&gt;none&lt;/b&gt;" in page  # class names come from elsewhere too
            assert "://" not in page
            assert page.count('<p dir="auto" style="margin: 0; white-space: pre-wrap"') == 2 * 3  # methods and classes

    def test_scores_that_are_no_numbers_are_left_out_and_the_others_shown(self, pair):
        whole = vitreous.explain_text(pair, TEXT, ["decompx", "gae"])
        scores = {**whole.scores, "gae": tuple(one.clone() for one in whole.scores["gae"])}
        scores["gae"][0][1] = float("nan")
        broken = dataclasses.replace(whole, scores=scores)
        assert (broken.shows("decompx"), broken.shows("gae")) == (True, False)
        with pytest.raises(ExplanationError, match="NaN or infinity"):
            broken.display_scores("gae")
        for page in (broken.html(), broken._repr_html_()):
            assert page.count("not shown: the scores contain NaN or infinity") == 1
            assert page.count('<p dir="auto"') == 1

    def test_colours_have_a_sign(self, pair):
        explanation = vitreous.explain_text(pair, TEXT, ["decompx", "gae"])
        signed, unsigned = (explanation.display_scores(method) for method in ("decompx", "gae"))
        assert float(signed.abs().max()) == 1
        assert float(signed.min()) < 0 < float(signed.max())
        assert (float(unsigned.min()), float(unsigned.max())) == (0, 1)
        assert torch.equal(signed.sign(), explanation.word_scores("decompx").sign())

    def test_json_of_the_manifest_is_plain(self, pair):
        json.dumps(dict(vitreous.explain_text(pair, SHORT, "ixg").provenance))
