"""``vitreous explain-text``: coloured words, JSON, pages, and errors in one line."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from typer.testing import CliRunner

import vitreous
from small_text_models import build, save_classifier, small_tokenizer
from vitreous.cli import app
from vitreous.speed.timing import one_thread

TEXT = "not a good film, unbelievably bad"


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_classifier(tmp_path_factory.mktemp("classifier"), ("negative", "positive", "neither"), "distilbert")


def run(*arguments: str, **options):
    return CliRunner().invoke(app, ["explain-text", *arguments], **options)


def test_words_are_shown_with_the_strongest_named(model):
    result = run(TEXT, "--model", model, "--method", "decompx,gae", "--target", "positive", "--target", "0")
    assert result.exit_code == 0, result.output
    assert result.stdout.count(TEXT) == 4  # two methods, two classes
    for line in ("decompx, explained: positive", "gae, explained: negative", "strongest: "):
        assert line in result.stdout


def test_words_are_coloured_in_a_terminal(model, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    result = run(TEXT, "--model", model, "--method", "decompx")
    assert "\x1b[" in result.stdout
    assert "48;2;226;74;51" in result.stdout or "48;2;52;120;214" in result.stdout  # the strongest word, red or blue


def test_json_has_every_score_and_nothing_else(model):
    result = run(TEXT, "--model", model, "--method", "decompx", "--topk", "2", "--by", "sum", "--json")
    told = json.loads(result.stdout)
    expected = vitreous.explain_text(model, TEXT, "decompx", topk=2)
    (text,) = told["texts"]
    assert text["text"] == TEXT
    assert [word["text"] for word in text["words"]] == TEXT.split()
    for number in range(2):
        assert text["targets"][number]["index"] == expected.class_index(0, number)
        scores = text["scores"]["decompx"][number]
        assert scores["pieces"] == pytest.approx(expected.piece_scores("decompx", 0, number).tolist())
        assert scores["words"] == pytest.approx(expected.word_scores("decompx", 0, number, by="sum").tolist())
    assert text["predictions"][0]["name"] in {"negative", "positive", "neither"}


NAN = """
import torch
from vitreous.plugin import method

@method("nanny", values=("tokens",))
def nanny(view, layer):
    return torch.full_like(view.tokens(layer).sum(-1), float("nan"))
"""


@pytest.fixture
def nanny(tmp_path, registry) -> tuple[str, str]:
    (tmp_path / "nanny.py").write_text(NAN)
    return "--plugin", str(tmp_path / "nanny.py")


def test_a_method_that_gives_no_numbers_is_left_out_and_the_others_are_shown(model, nanny, tmp_path):
    page = tmp_path / "page.html"
    result = run(TEXT, "--model", model, "--method", "nanny,gae", "--html", str(page), *nanny)
    assert result.exit_code == 0, result.output
    assert "nanny, explained" in result.stdout
    for told in (result.stdout, page.read_text(encoding="utf-8")):
        assert told.count("not shown: the scores contain NaN or infinity") == 1
    assert (result.stdout.count(TEXT), result.stdout.count("strongest: ")) == (1, 1)


def test_json_is_valid_where_a_method_gives_no_numbers(model, nanny):
    result = run(TEXT, "--model", model, "--method", "nanny", "--json", *nanny)

    def refuse(constant):
        raise AssertionError(constant)

    told = json.loads(result.stdout, parse_constant=refuse)
    assert set(told["texts"][0]["scores"]["nanny"][0]["words"]) == {None}


def test_a_page_is_written_and_a_text_is_read_from_standard_input(model, tmp_path):
    page = tmp_path / "new" / "page.html"
    result = run("-", "--model", model, "--method", "gae", "--html", str(page), input="very good story")
    assert result.exit_code == 0, result.output
    assert "story</span>" in page.read_text(encoding="utf-8")
    assert "default-src 'none'" in page.read_text(encoding="utf-8")  # nothing is fetched or run
    assert "very good story" in result.stdout


def test_a_report_has_a_summary_contents_meanings_and_its_command(model, tmp_path):
    file = tmp_path / "report.html"
    texts = (
        "very good story",
        "a film that is much longer than the sixty characters that a list of contents has room for",
    )
    result = run(*texts, "--model", model, "--method", "gae", "--report", str(file))
    assert result.exit_code == 0, result.output
    page = file.read_text(encoding="utf-8")
    assert "2 texts explained by gae, model " in page
    places = [
        page.index(mark) for mark in ('href="#text-2">a film', 'id="text-2"', "What the methods mean", "<pre>vitreous")
    ]
    assert places == sorted(places)
    assert "…</a>" in page


def test_words_of_one_score_are_said_to_be_so(model, tmp_path, registry):
    (tmp_path / "flat.py").write_text(NAN.replace("nanny", "flat").replace("nan", "0.5"))
    file = tmp_path / "report.html"
    result = run(
        TEXT, "--model", model, "--method", "flat", "--report", str(file), "--plugin", str(tmp_path / "flat.py")
    )
    assert result.exit_code == 0, result.output
    for shown in (result.stdout, file.read_text(encoding="utf-8")):
        assert shown.count("All words have the same score: nothing is coloured.") == 1
    assert "strongest" not in result.stdout


def test_long_texts_are_cut_with_a_line_on_standard_error_or_explained_in_windows(model):
    long = " ".join(["good film"] * 30)
    cut = run(long, "--model", model, "--method", "ixg", "--json")
    assert "warning: text 0 has 60 word pieces" in cut.stderr
    assert len(json.loads(cut.stdout)["texts"][0]["pieces"]) == 22
    whole = run(long, "--model", model, "--method", "ixg", "--json", "--windows")
    assert "warning" not in whole.stderr
    assert len(json.loads(whole.stdout)["texts"][0]["pieces"]) == 60


def test_a_usual_method_that_the_model_does_not_allow_is_a_line_on_standard_error(tmp_path):
    name = save_classifier(tmp_path, ("negative", "positive", "neither"), "deberta")
    result = run(TEXT, "--model", name, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["methods"] == ["tokentm", "decompx.skipplus"]
    lines = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert len(lines) == 1
    assert "gradtoken is left out: its attention matrices are made of more than q and k" in lines[0]


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification", None])
def test_what_a_single_output_says(problem, tmp_path):
    model = build("bert", num_labels=1, problem_type=problem).float()
    model.save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    expected = vitreous.explain_text(f"hf/{tmp_path}", TEXT, "ixg").logits[0, 0]
    shown = run(TEXT, "--model", f"hf/{tmp_path}", "--method", "ixg").stdout.splitlines()[0]
    (said,) = json.loads(run(TEXT, "--model", f"hf/{tmp_path}", "--method", "ixg", "--json").stdout)["texts"]
    if problem == "regression":
        assert shown == f"0 {float(expected):.3g}"
        assert said["targets"] == [{"index": 0, "name": None, "probability": None, "value": float(expected)}]
    else:
        assert shown == f"0 {float(expected.sigmoid()):.1%}"
        assert said["targets"] == [{"index": 0, "name": None, "probability": float(expected.sigmoid())}]
    assert said["predictions"] == said["targets"]


def test_control_characters_do_not_reach_the_terminal(model):
    result = run("good \x1b[2J film\nbad", "--model", model, "--method", "ixg")
    assert "\x1b[2J" not in result.stdout


def test_odd_white_space_is_a_blank_and_joined_letters_stay_joined(model):
    result = run("good\tfilm\xa0می\u200cروم 👩\u200d🚀 \u202ebad", "--model", model, "--method", "ixg")
    assert "good film می\u200cروم 👩\u200d🚀 \\u202ebad" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("",), "text 0 is empty"),
        (("good \udcff film",), "text 0 is not valid Unicode"),  # a byte that is not UTF-8, as Python passes it on
        ((TEXT, "--target", "great"), "there is no class 'great'"),
        ((TEXT, "--method", "nonsense"), "there is no method"),
        ((TEXT, "--method", "vitcx"), "no pixels"),
        ((TEXT, "--target", "9"), "not between 0 and 2"),
        ((TEXT, "--html", "/dev/null/page.html"), "cannot be written"),
        ((TEXT, "--target", "1", "--topk", "2"), "cannot be combined"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(model, arguments, message):
    result = run(*arguments, "--model", model)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_model_that_is_not_there_is_one_line():
    result = run(TEXT, "--model", "demo")
    assert result.exit_code == 2
    assert "text models are named demo-text, hf/ID or hf/FOLDER" in result.stderr
