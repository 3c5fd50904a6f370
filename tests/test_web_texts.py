"""What the text tab shows, without a browser: right, once, within bounds, and stoppable."""

from __future__ import annotations

import asyncio
import re
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import vitreous
from small_text_models import LONGEST, build, save_classifier, small_tokenizer
from vitreous.errors import InputError, ModelError, TargetError
from vitreous.speed.timing import one_thread
from vitreous.web import cards, downloads, text_cards
from vitreous.web.jobs import CancelledError, Job, Worker
from vitreous.web.listeners import Listeners
from vitreous.web.shelf import Shelf, TextShelf
from vitreous.web.text_studio import MOST_CHARACTERS, TextStudio, TextVisit
from vitreous.web.visitors import Visitors
from vitreous.web.wanted import Wanted

TEXT = "not a good film, unbelievably bad"
LONG = "good film " * 30  # 60 pieces, of which the model takes 22
METHODS = ("decompx", "gae")


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_classifier(tmp_path_factory.mktemp("classifier"), ("negative", "positive", "<b>neither</b>"))


@pytest.fixture(scope="module")
def shelf(model):
    return TextShelf(model)


@pytest.fixture
def studio(shelf):
    worker = Worker()
    yield TextStudio(shelf, worker)
    worker.close()


def do(studio, visit, wanted):
    """Have a text explained where the page has it done."""
    return studio.worker.submit(lambda job: studio.explain(visit, wanted, job)).future.result(timeout=120)


def test_scores_are_those_of_explain_text(studio, model, shelf):
    record = do(studio, TextVisit(TEXT, model), Wanted(METHODS, (2, 0)))
    expected = vitreous.explain_text(shelf.take(model), TEXT, METHODS, [[2, 0]])
    shown = record.explanation(METHODS, (2, 0))
    for method in METHODS:
        for number in range(2):
            assert torch.equal(shown.word_scores(method, 0, number), expected.word_scores(method, 0, number))
    assert torch.equal(shown.logits, expected.logits)
    assert record.class_names() == ["negative", "positive", "<b>neither</b>"]


def test_without_a_class_the_predicted_one_is_explained_in_one_run(studio, model, shelf):
    record = do(studio, TextVisit(TEXT, model), Wanted(METHODS))
    expected = vitreous.explain_text(shelf.take(model), TEXT, METHODS)
    assert record.predicted == expected.class_index()
    assert torch.equal(record.scores["gae", record.predicted], expected.piece_scores("gae"))
    assert studio.runs == 1


def test_nothing_is_worked_out_twice(studio, model):
    visit, wanted = TextVisit(TEXT, model), Wanted(METHODS)
    assert studio.known(visit, wanted) is None
    record = do(studio, visit, wanted)
    assert studio.known(TextVisit(TEXT, model), wanted) is record
    assert studio.known(visit, Wanted(METHODS, (record.predicted,))) is record
    do(studio, visit, wanted)
    assert studio.runs == 1
    assert studio.known(visit, Wanted((*METHODS, "ixg"))) is None
    before = record.scores["gae", record.predicted]
    do(studio, visit, Wanted((*METHODS, "ixg")))
    assert studio.runs == 2
    assert record.scores["gae", record.predicted] is before
    assert studio.known(TextVisit(TEXT + "!", model), wanted) is None


def test_what_is_remembered_is_bounded(shelf, model):
    worker = Worker()
    studio = TextStudio(shelf, worker, cache_bytes=100_000)
    for number in range(30):
        do(studio, TextVisit(f"{LONG} {number}", model), Wanted(("gae",)))
    assert 0 < len(studio.cache) < 30
    assert studio.cache.nbytes <= 100_000
    worker.close()


def test_long_texts_are_cut_with_a_note_or_explained_in_windows(studio, model, shelf):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the note is enough
        cut = do(studio, TextVisit(LONG, model), Wanted(METHODS))
        whole = do(studio, TextVisit(LONG, model, windows=True), Wanted(METHODS))
    note = f"60 word pieces, and the model takes the first {LONGEST - 2}"
    assert note in text_cards.words(cut, Wanted(METHODS), "max")
    assert note not in text_cards.words(whole, Wanted(METHODS), "max")
    expected = vitreous.explain_text(shelf.take(model), LONG, METHODS, windows=True)
    assert torch.equal(whole.scores["gae", whole.predicted], expected.piece_scores("gae"))
    assert len(cut.scores["gae", cut.predicted]) == LONGEST - 2


def test_texts_that_cannot_be_explained_are_refused_with_a_sentence(studio, model):
    for text in ("", " \n\t "):
        with pytest.raises(InputError, match=r"^Write or paste a text first\.$"):
            TextVisit(text, model)
    TextVisit("a" * MOST_CHARACTERS, model)
    with pytest.raises(InputError, match=r"has 20,001 characters, and no more than 20,000"):
        TextVisit("a" * (MOST_CHARACTERS + 1), model)
    with pytest.raises(InputError, match=r"^the text holds nothing but special tokens"):
        do(studio, TextVisit("[CLS] [SEP]", model), Wanted(METHODS))
    with pytest.raises(TargetError, match="not between 0 and 2"):
        do(studio, TextVisit(TEXT, model), Wanted(METHODS, (3,)))


def test_a_method_that_fails_does_not_take_the_others_with_it(studio, model):
    wanted = Wanted(("decompx", "vitcx", "gae:start=40"))
    record = do(studio, TextVisit(TEXT, model), wanted)
    page = text_cards.words(record, wanted, "max")
    assert page.count("<figure>") == 1
    assert "no pixels" in page
    assert "start=40" in page
    assert studio.known(TextVisit(TEXT, model), wanted) is record


def test_where_all_quick_methods_fail_the_others_are_asked(studio, model):
    record = do(studio, TextVisit(TEXT, model), Wanted(("gae:start=40", "rise:budget=4", "rise:by=drop,budget=4")))
    assert set(record.failed) == {"gae:start=40", "rise:budget=4"}  # one has no such block, one no pixels
    assert ("rise:by=drop,budget=4", record.predicted) in record.scores


def test_where_every_method_fails_the_reasons_are_shown(studio, model):
    visit = TextVisit(TEXT, model)
    do(studio, visit, Wanted(("decompx",)))
    wanted = Wanted(("vitcx", "gae:start=40"))
    page = text_cards.words(do(studio, visit, wanted), wanted, "max")
    assert "<figure>" not in page
    assert "no pixels" in page
    assert "start=40" in page


def test_scores_that_are_no_numbers_are_left_out_and_the_others_shown(studio, model):
    record = do(studio, TextVisit(TEXT, model), Wanted(METHODS))
    record.scores["gae", record.predicted][1] = float("nan")
    page = text_cards.words(record, Wanted(METHODS), "max")
    assert page.count("<figure>") == 2
    assert page.count("not shown: the scores contain NaN or infinity") == 1
    assert page.count('class="vitreous-strongest"') == 1


def test_words_are_coloured_by_score_and_nothing_of_a_visitor_becomes_markup(studio, model):
    text, wanted = "good <script>alert('film')</script> & bad", Wanted(METHODS, (0, 2))
    record = do(studio, TextVisit(text, model), wanted)
    page = text_cards.words(record, wanted, "sum") + cards.predictions(record)
    assert "<script" not in page
    assert "<b>neither" not in page
    assert page.count("<figure>") == 4  # two methods, two classes
    explanation = record.explanation(METHODS, (0, 2))
    titles = re.findall(r'title="(-?[\d.e+-]+)">', page)
    scores = [explanation.word_scores(method, 0, number, by="sum") for method in METHODS for number in range(2)]
    assert [float(title) for title in titles] == pytest.approx(torch.cat(scores).tolist(), rel=1e-3)  # four digits
    for text_and_sign in ("for the class", "against it", "methods without a sign"):
        assert text_and_sign in page
    assert page.count('class="vitreous-strongest"') == 4


@pytest.mark.parametrize("problem", ["regression", None])
def test_a_single_output_is_shown_as_what_it_is(studio, tmp_path, problem):
    build("bert", num_labels=1, problem_type=problem).float().save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    record = do(
        TextStudio(TextShelf(f"hf/{tmp_path}"), studio.worker), TextVisit(TEXT, f"hf/{tmp_path}"), Wanted(METHODS)
    )
    value = float(record.sample.logits[0, 0])
    said = f"{value:.3g}" if problem else f"{torch.tensor(value).sigmoid():.1%}"
    assert f'<span class="number">{said}</span>' in cards.predictions(record)
    assert f"Why class 0 · {said}?" in text_cards.words(record, Wanted(METHODS), "max")


def test_strongest_words_are_those_with_the_largest_scores(studio, model):
    record = do(studio, TextVisit(TEXT, model), Wanted(("decompx",), (1,)))
    explanation = record.explanation(("decompx",), (1,))
    scores = explanation.word_scores("decompx").tolist()
    found = explanation.strongest("decompx", count=3)
    assert [score for _, score in found] == sorted(scores, key=abs, reverse=True)[:3]
    assert all(scores[word] == score for word, score in found)


def test_colours_let_the_paper_through():
    assert text_cards.paint(1.0, signed=True) == "rgb(226 74 51 / calc(1.000 * var(--vitreous-strength)))"
    assert text_cards.paint(-0.25, signed=True) == "rgb(52 120 214 / calc(0.250 * var(--vitreous-strength)))"
    assert text_cards.paint(0.5, signed=False).startswith("rgb(242 158 22 / calc(0.500")


def test_the_page_that_is_taken_home(studio, model, tmp_path):
    wanted = Wanted((*METHODS, "vitcx"), (0, 1))
    file = downloads.save_words(do(studio, TextVisit(TEXT, model), wanted), wanted, "max", tmp_path)
    content = file.read_text(encoding="utf-8")
    assert content.startswith("<!DOCTYPE html>")
    assert content.count("margin: 0; white-space: pre-wrap") == 4
    failed = Wanted(("gae:start=40", "decompx"))
    record = do(studio, TextVisit(TEXT, model), failed)
    with pytest.raises(InputError, match="no explanation"):
        downloads.save_words(record, Wanted(("gae:start=40",)), "max", tmp_path)


def test_stopping_leaves_the_model_clean_and_keeps_what_was_found(studio, model, shelf):
    network, job = shelf.take(model).model, Job()
    visit, wanted = TextVisit(TEXT, model), Wanted(("gae", "integrated_gradients:steps=400"))

    def stop_soon(*_):
        if studio.runs > 20:
            job.cancel()

    hook = network.register_forward_pre_hook(stop_soon)
    with pytest.raises(CancelledError):
        studio.explain(visit, wanted, job)
    hook.remove()
    assert studio.runs < 400
    assert job.things == "texts"
    assert job.asked > 1
    assert not any(module._forward_pre_hooks for module in network.modules())
    assert studio.known(visit, Wanted(("gae",))) is not None
    assert studio.known(visit, wanted) is None


def test_visitors_read_no_other_folders(model, tmp_path):
    allowed = tmp_path / "allowed"
    kept = save_classifier(allowed / "kept", ("no", "yes", "maybe"))
    secret = save_classifier(tmp_path / "secret", ("no", "yes", "maybe"))
    (allowed / "picture").mkdir()
    (allowed / "picture" / "config.json").write_text('{"architectures": ["ViTForImageClassification"]}')
    shelf = TextShelf(model, [allowed])
    assert shelf.take(kept).class_names == ("no", "yes", "maybe")
    for name in (secret, "py/own.py:model", "hf/.."):
        with pytest.raises(ModelError, match="server"):
            shelf.take(name)
    with pytest.raises(ModelError, match="named hf/ID or hf/FOLDER"):
        shelf.take("demo")
    assert shelf.names()[:2] == [model, kept]
    assert not any("picture" in name for name in shelf.names())
    pictures = Shelf("demo", [allowed]).names()
    assert f"hf/{allowed / 'picture'}" in pictures
    assert kept not in pictures


def test_methods_for_pictures_are_not_offered_for_texts():
    offered = [name for members in cards.families(texts=True).values() for _, name in members]
    assert {"decompx", "gae", "attnlrp", "integrated_gradients"} <= set(offered)
    assert not {"vitcx", "rise"} & set(offered)
    assert "attnlrp" in cards.papers("relevance", texts=True)


def test_work_on_another_tab_stops_this_one_and_says_so():
    pytest.importorskip("gradio", reason="the web page needs Gradio (extra vitreous[web])")
    from vitreous.web.desk import Desk  # needs Gradio

    worker, visitor = Worker(), SimpleNamespace(session_hash="one")
    visitors = Visitors(worker, Listeners())
    photos, texts = (Desk(visitors, f"{name} status", f"{name} stop", Path()) for name in ("photos", "texts"))
    started = threading.Event()

    def slow(job):
        started.set()
        while True:
            job.check()
            time.sleep(0.01)

    async def follow(desk, work):
        async def steps():
            async for job, updates in desk.work(work, visitor):
                yield updates if job is None else desk.done(job.seconds)

        with visitors.listeners.listening("one"):
            return [updates async for updates in desk.guarded(steps(), visitor)]

    async def both():
        first = asyncio.create_task(follow(photos, slow))
        await asyncio.to_thread(started.wait)
        second = await follow(texts, lambda _job: "found")
        return (await first)[-1], second[-1]

    stopped, done = asyncio.run(asyncio.wait_for(both(), 60))
    worker.close()
    assert stopped["photos status"] == cards.status("Stopped.")
    assert "Done in" in done["texts status"]
