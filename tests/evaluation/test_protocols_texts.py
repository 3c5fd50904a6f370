"""The protocols on texts: numbers against plain loops and by hand, cutting, missing rationales, and wrong company."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from tokenizers import normalizers

import vitreous
from small_data import finite, loaded
from small_reviews import probabilities, reviews, text_model, write_movies
from small_text_models import build
from vitreous.datasets import Review
from vitreous.errors import UnsupportedModelError
from vitreous.evaluation.protocols import find_protocol
from vitreous.evaluation.run import ModelChoice, RunError
from vitreous.evaluation.runner.adapters import TextAdapter
from vitreous.evaluation.runner.measure import columns_of, measure, preprocessing_of
from vitreous.evaluation.runner.prepare_run import _load
from vitreous.evaluation.tasks.task import Case, TextBatch
from vitreous.evaluation.tasks.word_masking import Erasure, Rationales, WordErasing
from vitreous.inputs.model_io import Texts
from vitreous.metrics.text import token_f1

MOVIES, RATIONALES = find_protocol("eraser-movies"), find_protocol("eraser-movies-rationales")
METHODS = ["gae", "decompx"]


def batch_of(model, texts, scores) -> TextBatch:
    """Texts with made-up scores of their words for both classes: each piece has its word's, the first piece more."""
    adapter = TextAdapter(model)
    batch = adapter.open(texts, [adapter.prepare(text) for text in texts])
    maps = {}
    for number, (passage, words) in enumerate(zip(batch.pictures, scores, strict=True)):
        pieces = torch.tensor(words, dtype=torch.float64)[passage.word_of_piece]
        inner = np.diff(passage.word_of_piece, prepend=-1) == 0
        pieces[torch.from_numpy(inner)] -= 100  # the highest piece counts, so the others change nothing
        maps[Case(number, "made up")] = {0: pieces, 1: pieces}
    return replace(batch, maps=maps)


class TestTokenF1:
    def test_by_hand(self):
        marked = np.array([True, True, False, False, True])
        text = Review("x", ("good", "unbelievably", "bad", "the", "film"), 1, marked)
        batch = batch_of(text_model(), [text], [[3.0, -1.0, 2.0, -5.0, 1.0]])
        task = Rationales(tops=(1, 2, 4), older_tops=(3,))
        (values,) = task.measure(batch, [Case(0, "made up")])
        # Highest first: good, bad, film; then unbelievably and the are both 0, and the earlier one comes first.
        assert values == {
            "token_f1_1": pytest.approx(2 * 1 / (1 + 3)),
            "token_f1_2": pytest.approx(2 * 1 / (2 + 3)),
            "token_f1_3": pytest.approx(2 * 2 / (3 + 3)),
            "token_f1_4": pytest.approx(2 * 3 / (4 + 3)),
        }
        means = np.array([[values[column] for column in task.metrics[0].columns]])
        assert task.metrics[0].combine(means)[0] == pytest.approx((1 / 2 + 2 / 5 + 6 / 7) / 3)

    def test_the_true_class_is_explained(self):
        """Its scores are those of ``explain_text``, whatever the model predicts."""
        model, texts = text_model(), reviews(4)
        rows = measure(model, texts, RATIONALES, ["decompx"])
        for text, row in zip(texts, rows, strict=True):
            words = vitreous.explain_text(model, " ".join(text.words), "decompx", text.label).word_scores("decompx")
            for top in (5, 10):
                expected = token_f1(words.clamp(min=0).numpy(), text.rationale, top)
                assert row[f"token_f1_{top}"] == pytest.approx(expected, abs=1e-12)

    def test_a_long_text_is_cut_with_its_rationale(self):
        """The model takes 22 pieces; what was marked behind them is not looked for."""
        words = ("good",) * 30
        rationale = np.array([False] * 30)
        rationale[[4, 25]] = True
        (passage,) = batch_of(text_model(), [Review("x", words, 0, rationale)], [np.arange(22.0)]).pictures
        assert len(passage.read.pieces) == 22
        assert np.flatnonzero(passage.rationale).tolist() == [4]

    def test_a_word_without_a_piece_leaves_the_marks_at_their_words(self):
        """BERT's normalizer drops control characters, of which reviews have some: that word is not read at all."""
        model = text_model()
        model.tokenizer.backend_tokenizer.normalizer = normalizers.BertNormalizer()
        text = Review("x", ("good", "\x12", "bad", "film", "story"), 0, np.array([False, False, True, False, False]))
        batch = batch_of(model, [text], [[0.0, 1.0, 0.0, 0.0]])
        (passage,) = batch.pictures
        assert [word.text for word in passage.read.words] == ["good", "bad", "film", "story"]
        assert passage.rationale.tolist() == [False, True, False, False]
        (values,) = Rationales(tops=(1,), older_tops=()).measure(batch, [Case(0, "made up")])
        assert values == {"token_f1_1": 1.0}

    def test_a_text_whose_rationale_is_cut_off_has_no_token_f1(self):
        cut = Review("x", ("good", "film") * 15, 0, np.arange(30) > 25)
        model = text_model()
        (row,) = measure(model, [cut], RATIONALES, ["gae"])
        assert "no word of the rationale" in row["error"]
        (row,) = measure(model, [cut], MOVIES, ["gae"])
        assert row["error"] is None
        assert row["token_f1_10"] is None
        assert math.isfinite(row["removed_drop_10"])


class TestOutputsOfTheLabels:
    """The reviews say NEG = 0 and POS = 1; where a model has them elsewhere, its class names tell."""

    @staticmethod
    def reordered(order, names):
        """The small model with its outputs in another order; ``None`` is a class that it never says."""
        model = text_model()
        head = model.model.classifier
        weight, bias = head.weight.detach(), head.bias.detach()
        with torch.no_grad():
            model.model.classifier = torch.nn.Linear(weight.shape[1], len(order)).double()
            for row, old in enumerate(order):
                model.model.classifier.weight[row] = 0 if old is None else weight[old]
                model.model.classifier.bias[row] = -1e9 if old is None else bias[old]
        model.model.config.num_labels = len(order)
        return replace(model, class_names=names)

    @pytest.mark.parametrize(
        ("order", "names"),
        [
            ((0, 1), None),
            ((0, 1), ("LABEL_0", "LABEL_1")),
            ((0, 1), ("0", "1")),
            ((0, 1), ("Negative", "Positive")),
            ((1, 0), ("POS", "NEG")),
            ((1, 0), ("positive", "negative")),
            ((0, None, 1), ("NEGATIVE", "NEUTRAL", "POSITIVE")),
            ((None, 1, 0), ("mixed", "pos", "neg")),
        ],
    )
    def test_numbers_do_not_depend_on_their_order(self, order, names):
        texts = reviews(4)
        expected = measure(text_model(), texts, MOVIES, METHODS)
        for one, other in zip(measure(self.reordered(order, names), texts, MOVIES, METHODS), expected, strict=True):
            for column in columns_of(MOVIES):
                # The softmax adds up in another order, and a class of probability 0 adds nothing.
                assert one[column] == pytest.approx(other[column], abs=1e-12), column

    @pytest.mark.parametrize(
        ("order", "names", "reason"),
        [
            ((0, 1), ("bad", "good"), "class names are bad, good, so it is not known which of them are NEG, POS"),
            ((0, 1), ("NEG", "other"), "class names are NEG, other"),
            ((0, None, 1), ("NEG", "POS", "positive"), "class names are NEG, POS, positive"),
            ((0, None, 1), None, "3 classes without names"),
            ((0,), None, "one output"),
        ],
    )
    def test_a_model_that_does_not_tell_is_refused_before_anything_is_measured(self, order, names, reason, tmp_path):
        model, data = self.reordered(order, names), write_movies(tmp_path / "movies.tar.gz", reviews(1))
        with pytest.raises(UnsupportedModelError, match=reason):
            vitreous.evaluate(model, data, "eraser-movies", ["gae"], out=tmp_path)
        assert all(reason in row["error"] for row in measure(model, reviews(1), RATIONALES, ["gae"]))

    def test_values_are_no_classes(self):
        model = text_model()
        model.model.config.problem_type = "regression"
        with pytest.raises(UnsupportedModelError, match=r"values \(regression\)"):
            preprocessing_of(model)

    def test_the_same_weights_with_other_names_are_another_run(self):
        usual = preprocessing_of(text_model())
        assert usual == text_model().reader.settings
        assert preprocessing_of(self.reordered((1, 0), ("POS", "NEG"))) == {**usual, "outputs": [1, 0]}


class TestWordsTakenAway:
    """Against plain loops over words and single texts without padding."""

    SCORES = (5.0, -3.0, 4.0, 4.0, 0.5, 9.0, -1.0, 2.0, 1.0, 3.0, -2.0, 0.0)

    @pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
    def test_all_numbers(self, kind):
        model = text_model(kind)
        texts = reviews(3)
        scores = [np.resize(self.SCORES, len(text.words)) + number for number, text in enumerate(texts)]
        batch = batch_of(model, texts, scores)
        cases = [Case(number, "made up") for number in range(3)]
        found = [WordErasing().measure(batch, cases), Erasure().measure(batch, cases)]
        for number, text in enumerate(texts):
            expected = self.by_hand(model, batch.pictures[number], scores[number])
            for name, value in (found[0][number] | found[1][number]).items():
                assert value == pytest.approx(expected[name], abs=1e-9), name  # batches add up in another order
            assert len(text.words) == len(batch.pictures[number].read.words)

    def by_hand(self, model, passage, scores):
        numbers, homes = list(passage.read.numbers), list(passage.word_of_piece)
        words = len(scores)
        order = sorted(range(words), key=lambda word: (-scores[word], word))
        target = int(probabilities(model, numbers).argmax())
        whole = probabilities(model, numbers)[target]

        def without(share):
            gone = order[: math.ceil(words * share / 100)]
            return probabilities(model, [n for n, home in zip(numbers, homes, strict=True) if home not in gone])[target]

        def masked(share):
            gone = order[: math.ceil(words * share / 100)]
            blank = model.tokenizer.mask_token_id
            return probabilities(model, [blank if home in gone else n for n, home in zip(numbers, homes, strict=True)])[
                target
            ]

        def alone(share):
            kept = order[: math.ceil(words * share / 100)]
            return probabilities(model, [n for n, home in zip(numbers, homes, strict=True) if home in kept])[target]

        steps, bins = range(10, 100, 10), (1, 5, 10, 20, 50)
        return {
            **{f"removed_drop_{step}": whole - without(step) for step in steps},
            **{f"masked_drop_{step}": whole - masked(step) for step in steps},
            "removed_log_odds": np.mean([np.log(without(step) / whole) for step in steps]),
            "masked_log_odds": np.mean([np.log(masked(step) / whole) for step in steps]),
            "comprehensiveness": np.mean([whole - without(step) for step in bins]),
            "sufficiency": np.mean([whole - alone(step) for step in bins]),
        }

    def test_a_model_that_does_not_read_loses_nothing(self):
        model = text_model()
        with torch.no_grad():
            model.model.classifier.weight.zero_()
        (row,) = measure(model, reviews(1), MOVIES, ["gae"])
        quantities = [name for name in columns_of(MOVIES) if "token_f1" not in name]
        assert {name: row[name] for name in quantities} == dict.fromkeys(quantities, 0.0)

    def test_without_a_mask_token_the_unknown_one_is_put_in(self):
        model = text_model(mask_token=None)
        assert model.reader.blank == model.tokenizer.unk_token_id
        assert text_model().reader.blank == model.tokenizer.convert_tokens_to_ids("[MASK]")
        assert text_model(mask_token=None, unk_token=None).reader.blank == model.tokenizer.pad_token_id

    def test_nothing_is_asked_twice_and_short_texts_cost_less(self, monkeypatch):
        model, (text,) = text_model(), reviews(1, words=20)
        batch = batch_of(model, [text], [np.arange(20.0)])
        asked = []
        forward = model.model.forward
        monkeypatch.setattr(
            model.model, "forward", lambda **parts: asked.append(parts["attention_mask"]) or forward(**parts)
        )
        case = [Case(0, "made up")]
        WordErasing().measure(batch, case)
        Erasure().measure(batch, case)
        rows = [tuple(mask.sum(dim=1).tolist()) for mask in asked]
        # 1% and 5% of 20 words are one word, and 10, 20 and 50% removed serve both: 10 removed, 9 masked, 4 alone.
        assert sum(map(len, rows)) == 10 + 9 + 4
        before = len(asked)
        WordErasing().measure(batch, case)
        assert len(asked) == before

    def test_what_stands_together_changes_nothing(self):
        model, texts = text_model(), reviews(5)
        together = measure(model, texts, MOVIES, METHODS)
        alone = [row for text in texts for row in measure(model, [text], MOVIES, METHODS)]
        for one, other in zip(together, alone, strict=True):
            assert (one["image"], one["method"]) == (other["image"], other["method"])
            for column in columns_of(MOVIES):
                # Padding adds up in another order; a word piece more or less would change far more.
                assert one[column] == pytest.approx(other[column], abs=1e-9)

    def test_special_tokens_stay(self):
        model = text_model()
        inputs = model.reader.inputs([()])
        assert isinstance(inputs, Texts)
        assert inputs.parts["input_ids"].tolist() == [[model.tokenizer.cls_token_id, model.tokenizer.sep_token_id]]
        (short,) = measure(model, [Review("x", ("good",), 0, np.array([True]))], MOVIES, ["gae"])
        assert finite(short, columns_of(MOVIES))  # with its only word removed, the special tokens are what is asked


class TestWrongCompany:
    @pytest.fixture
    def data(self, tmp_path):
        return write_movies(tmp_path / "movies.tar.gz", reviews(2))

    def test_a_protocol_on_photos_refuses_texts(self, data, tmp_path):
        with pytest.raises(RunError, match="segmentation is measured on photos, but eraser-movies holds texts"):
            vitreous.evaluate("demo", data, "chefer-2021-segmentation", ["gae"], out=tmp_path)

    def test_a_protocol_on_texts_refuses_a_model_of_photos(self, data, tmp_path):
        with pytest.raises(RunError, match="measured on texts, but the given model reads photos"):
            vitreous.evaluate(loaded(), data, "eraser-movies", ["gae"], out=tmp_path)

    def test_a_protocol_on_photos_refuses_a_model_of_texts(self):
        with pytest.raises(RunError, match="measured on photos, but the given model reads texts"):
            _load(text_model(), find_protocol("localisation"))

    def test_a_text_model_has_no_mean(self, data, tmp_path):
        choice = ModelChoice("hf/somewhere", mean=(0.5,))
        with pytest.raises(RunError, match="this protocol reads texts"):
            vitreous.evaluate(choice, data, "eraser-movies", ["gae"], out=tmp_path)

    def test_methods_that_need_pixels_are_left_out_or_refused(self, data, tmp_path):
        model = text_model()
        with pytest.raises(UnsupportedModelError, match="no pixels"):
            vitreous.evaluate(model, data, "eraser-movies-rationales", ["rise"], out=tmp_path)
        with pytest.warns(UserWarning, match="left out"):
            results = vitreous.evaluate(model, data, "eraser-movies-rationales", ["perturbation", "gae"], out=tmp_path)
        assert "rise" not in results.methods
        assert "gae" in results.measured_methods

    def test_one_output_is_not_enough(self):
        model = replace(text_model(), model=build("bert", num_labels=1))
        rows = measure(model, reviews(2), MOVIES, ["gae"])
        assert all("one output" in row["error"] for row in rows)
