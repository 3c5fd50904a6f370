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
from vitreous.web import rendering
from vitreous.web.jobs import CancelledError, Job, SessionJobs, Worker
from vitreous.web.models import ModelCache, TextModelCache
from vitreous.web.requests import ExplainRequest
from vitreous.web.security import OpenStreams
from vitreous.web.text_tab import MAX_CHARACTERS, TextInput, TextService

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
def models(model):
    return TextModelCache(model)


@pytest.fixture
def service(models):
    worker = Worker()
    yield TextService(models, worker)
    worker.close()


def do(service, visit, request):
    """Have a text explained where the page has it done."""
    return service.worker.submit(lambda job: service.explain(visit, request, job)).future.result(timeout=120)


def test_scores_are_those_of_explain_text(service, model, models):
    results = do(service, TextInput(TEXT, model), ExplainRequest(METHODS, (2, 0)))
    expected = vitreous.explain_text(models.get(model), TEXT, METHODS, [[2, 0]])
    shown = results.explanation(METHODS, (2, 0))
    for method in METHODS:
        for number in range(2):
            assert torch.equal(shown.word_scores(method, 0, number), expected.word_scores(method, 0, number))
    assert torch.equal(shown.logits, expected.logits)
    assert results.class_names() == ["negative", "positive", "<b>neither</b>"]


def test_without_a_class_the_predicted_one_is_explained_in_one_run(service, model, models):
    results = do(service, TextInput(TEXT, model), ExplainRequest(METHODS))
    expected = vitreous.explain_text(models.get(model), TEXT, METHODS)
    assert results.predicted == expected.class_index()
    assert torch.equal(results.scores["gae", results.predicted], expected.piece_scores("gae"))
    assert service.texts_run == 1


def test_nothing_is_worked_out_twice(service, model):
    visit, request = TextInput(TEXT, model), ExplainRequest(METHODS)
    assert service.cached(visit, request) is None
    results = do(service, visit, request)
    assert service.cached(TextInput(TEXT, model), request) is results
    assert service.cached(visit, ExplainRequest(METHODS, (results.predicted,))) is results
    do(service, visit, request)
    assert service.texts_run == 1
    assert service.cached(visit, ExplainRequest((*METHODS, "ixg"))) is None
    before = results.scores["gae", results.predicted]
    do(service, visit, ExplainRequest((*METHODS, "ixg")))
    assert service.texts_run == 2
    assert results.scores["gae", results.predicted] is before
    assert service.cached(TextInput(TEXT + "!", model), request) is None


def test_what_is_remembered_is_bounded(models, model):
    worker = Worker()
    service = TextService(models, worker, cache_bytes=100_000)
    for number in range(30):
        do(service, TextInput(f"{LONG} {number}", model), ExplainRequest(("gae",)))
    assert 0 < len(service.cache) < 30
    assert service.cache.nbytes <= 100_000
    worker.close()


def test_long_texts_are_cut_with_a_note_or_explained_in_windows(service, model, models):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the note is enough
        cut = do(service, TextInput(LONG, model), ExplainRequest(METHODS))
        whole = do(service, TextInput(LONG, model, windows=True), ExplainRequest(METHODS))
    note = f"60 tokens; the model reads the first {LONGEST - 2}"
    assert note in rendering.text_html(cut, ExplainRequest(METHODS), "max")
    assert note not in rendering.text_html(whole, ExplainRequest(METHODS), "max")
    expected = vitreous.explain_text(models.get(model), LONG, METHODS, windows=True)
    assert torch.equal(whole.scores["gae", whole.predicted], expected.piece_scores("gae"))
    assert len(cut.scores["gae", cut.predicted]) == LONGEST - 2


def test_texts_that_cannot_be_explained_are_refused_with_a_sentence(service, model):
    for text in ("", " \n\t "):
        with pytest.raises(InputError, match=r"^Write or paste a text first\.$"):
            TextInput(text, model)
    TextInput("a" * MAX_CHARACTERS, model)
    with pytest.raises(InputError, match=r"has 20,001 characters; the limit is 20,000"):
        TextInput("a" * (MAX_CHARACTERS + 1), model)
    with pytest.raises(InputError, match=r"^the text holds nothing but special tokens"):
        do(service, TextInput("[CLS] [SEP]", model), ExplainRequest(METHODS))
    with pytest.raises(TargetError, match="not between 0 and 2"):
        do(service, TextInput(TEXT, model), ExplainRequest(METHODS, (3,)))


def test_a_method_that_fails_does_not_take_the_others_with_it(service, model):
    request = ExplainRequest(("decompx", "vitcx", "gae:start=40"))
    results = do(service, TextInput(TEXT, model), request)
    page = rendering.text_html(results, request, "max")
    assert page.count("<figure>") == 1
    assert "no pixels" in page
    assert "start=40" in page
    assert service.cached(TextInput(TEXT, model), request) is results


def test_where_all_quick_methods_fail_the_others_are_asked(service, model):
    results = do(
        service, TextInput(TEXT, model), ExplainRequest(("gae:start=40", "rise:budget=4", "rise:by=drop,budget=4"))
    )
    assert {method for method, _ in results.failed} == {
        "gae:start=40",
        "rise:budget=4",
    }  # one has no such block, one no pixels
    assert ("rise:by=drop,budget=4", results.predicted) in results.scores


def test_where_every_method_fails_the_reasons_are_shown(service, model):
    visit = TextInput(TEXT, model)
    do(service, visit, ExplainRequest(("decompx",)))
    request = ExplainRequest(("vitcx", "gae:start=40"))
    page = rendering.text_html(do(service, visit, request), request, "max")
    assert "<figure>" not in page
    assert "no pixels" in page
    assert "start=40" in page


def test_scores_that_are_no_numbers_are_left_out_and_the_others_shown(service, model):
    results = do(service, TextInput(TEXT, model), ExplainRequest(METHODS))
    results.scores["gae", results.predicted][1] = float("nan")
    page = rendering.text_html(results, ExplainRequest(METHODS), "max")
    assert page.count("<figure>") == 2
    assert page.count("not shown: the scores contain NaN or infinity") == 1
    assert page.count('class="vitreous-strongest"') == 1


def test_words_are_coloured_by_score_and_nothing_of_a_visitor_becomes_markup(service, model):
    text, request = "good <script>alert('film')</script> & bad", ExplainRequest(METHODS, (0, 2))
    results = do(service, TextInput(text, model), request)
    page = rendering.text_html(results, request, "sum") + rendering.predictions_html(results)
    assert "<script" not in page
    assert "<b>neither" not in page
    assert page.count("<figure>") == 4  # two methods, two classes
    explanation = results.explanation(METHODS, (0, 2))
    titles = re.findall(r'title="(-?[\d.e+-]+)">', page)
    scores = [explanation.word_scores(method, 0, number, by="sum") for method in METHODS for number in range(2)]
    assert [float(title) for title in titles] == pytest.approx(torch.cat(scores).tolist(), rel=1e-3)  # four digits
    for text_and_sign in ("for the class", "against it", "methods without a sign"):
        assert text_and_sign in page
    assert page.count('class="vitreous-strongest"') == 4


@pytest.mark.parametrize("problem", ["regression", None])
def test_a_single_output_is_shown_as_what_it_is(service, tmp_path, problem):
    build("bert", num_labels=1, problem_type=problem).float().save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    results = do(
        TextService(TextModelCache(f"hf/{tmp_path}"), service.worker),
        TextInput(TEXT, f"hf/{tmp_path}"),
        ExplainRequest(METHODS),
    )
    value = float(results.sample.logits[0, 0])
    said = f"{value:.3g}" if problem else f"{torch.tensor(value).sigmoid():.1%}"
    assert f'<span class="number">{said}</span>' in rendering.predictions_html(results)
    assert f"Why class 0 · {said}?" in rendering.text_html(results, ExplainRequest(METHODS), "max")


def test_strongest_words_are_those_with_the_largest_scores(service, model):
    results = do(service, TextInput(TEXT, model), ExplainRequest(("decompx",), (1,)))
    explanation = results.explanation(("decompx",), (1,))
    scores = explanation.word_scores("decompx").tolist()
    found = explanation.strongest("decompx", count=3)
    assert [score for _, score in found] == sorted(scores, key=abs, reverse=True)[:3]
    assert all(scores[word] == score for word, score in found)


def test_colours_let_the_paper_through():
    assert rendering.word_colour(1.0, signed=True) == "rgb(226 74 51 / calc(1.000 * var(--vitreous-strength)))"
    assert rendering.word_colour(-0.25, signed=True) == "rgb(52 120 214 / calc(0.250 * var(--vitreous-strength)))"
    assert rendering.word_colour(0.5, signed=False).startswith("rgb(242 158 22 / calc(0.500")


def test_the_page_that_is_taken_home(service, model, tmp_path):
    request = ExplainRequest((*METHODS, "vitcx"), (0, 1))
    file = rendering.save_text_report(do(service, TextInput(TEXT, model), request), request, "max", tmp_path)
    content = file.read_text(encoding="utf-8")
    assert content.startswith("<!DOCTYPE html>")
    assert content.count("margin: 0; white-space: pre-wrap") == 4
    failed = ExplainRequest(("gae:start=40", "decompx"))
    results = do(service, TextInput(TEXT, model), failed)
    with pytest.raises(InputError, match="no explanation"):
        rendering.save_text_report(results, ExplainRequest(("gae:start=40",)), "max", tmp_path)


def test_stopping_leaves_the_model_clean_and_keeps_what_was_found(service, model, models):
    network, job = models.get(model).model, Job()
    visit, request = TextInput(TEXT, model), ExplainRequest(("gae", "integrated_gradients:steps=400"))

    def stop_soon(*_):
        if service.texts_run > 20:
            job.cancel()

    hook = network.register_forward_pre_hook(stop_soon)
    with pytest.raises(CancelledError):
        service.explain(visit, request, job)
    hook.remove()
    assert service.texts_run < 400
    assert job.unit == "texts"
    assert job.processed > 1
    assert not any(module._forward_pre_hooks for module in network.modules())
    assert service.cached(visit, ExplainRequest(("gae",))) is not None
    assert service.cached(visit, request) is None


def test_visitors_read_no_other_folders(model, tmp_path):
    allowed = tmp_path / "allowed"
    kept = save_classifier(allowed / "kept", ("no", "yes", "maybe"))
    secret = save_classifier(tmp_path / "secret", ("no", "yes", "maybe"))
    (allowed / "picture").mkdir()
    (allowed / "picture" / "config.json").write_text('{"architectures": ["ViTForImageClassification"]}')
    models = TextModelCache(model, [allowed])
    assert models.get(kept).class_names == ("no", "yes", "maybe")
    for name in (secret, "py/own.py:model", "hf/.."):
        with pytest.raises(ModelError, match="server"):
            models.get(name)
    with pytest.raises(ModelError, match="named demo-text, hf/ID or hf/FOLDER"):
        models.get("demo")
    assert models.names()[:2] == [model, kept]
    assert not any("picture" in name for name in models.names())
    pictures = ModelCache("demo", [allowed]).names()
    assert f"hf/{allowed / 'picture'}" in pictures
    assert kept not in pictures


def test_methods_for_pictures_are_not_offered_for_texts():
    offered = [name for members in rendering.method_families(texts=True).values() for _, name in members]
    assert {"decompx", "gae", "attnlrp", "integrated_gradients"} <= set(offered)
    assert not {"vitcx", "rise"} & set(offered)
    assert "attnlrp" in rendering.papers_html("relevance", texts=True)


def test_a_job_on_another_tab_stops_this_one_and_says_so():
    pytest.importorskip("gradio", reason="the web page needs Gradio (extra vitreous[web])")
    from vitreous.web.tab_controller import TabController, Task  # needs Gradio

    worker, request, streams = Worker(), SimpleNamespace(session_hash="one"), OpenStreams()
    jobs = SessionJobs(worker)
    photos, texts = (
        TabController(jobs, streams, Path(), SimpleNamespace(pending={}, status=f"{name} status", stop=f"{name} stop"))
        for name in ("photos", "texts")
    )
    started = threading.Event()

    def slow(job):
        started.set()
        while True:
            job.check()
            time.sleep(0.01)

    async def both():
        with streams.opened("one"):
            first = asyncio.create_task(last(photos.run(request, Task(slow, lambda *_: {}))))
            await asyncio.to_thread(started.wait)
            task = Task(lambda _: "found", lambda _, seconds: texts.done(seconds))
            second = await last(texts.run(request, task))
            return await first, second

    async def last(steps):
        return [step async for step in steps][-1]

    stopped, done = asyncio.run(asyncio.wait_for(both(), 60))
    worker.close()
    assert stopped["photos status"] == rendering.status_html("Stopped.")
    assert "Done in" in done["texts status"]
