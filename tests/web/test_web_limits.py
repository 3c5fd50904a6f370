"""The page under greed: what one visitor takes is bounded in time, memory and disk, and ends when nobody listens."""

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image

from running_server import TINY
from vitreous.errors import MethodError
from vitreous.methods import list_methods
from vitreous.web.image_service import ImageService
from vitreous.web.jobs import BudgetError, Job, Limits, Worker, release_memory, resident_bytes
from vitreous.web.models import ModelCache
from vitreous.web.requests import ExplainRequest, forward_passes
from vitreous.web.security import OpenStreams, UploadFolder, trim_folder

MB = 2**20
SLOW = "smoothgrad:samples=10000"  # a minute of the small model


@pytest.fixture(scope="module")
def models():
    return ModelCache(TINY)


@pytest.fixture
def visit(tmp_path):
    """A photo for any service."""

    def of(service):
        Image.new("RGB", (64, 48), (200, 80, 0)).save(tmp_path / "photo.png")
        return service.read(tmp_path / "photo.png", "photo.png", TINY)

    return of


def do(service, request, visit):
    job = service.worker.submit(lambda job: service.explain(visit(service), request, job))
    return job, job.future.result(timeout=120)


# Costs.


@pytest.mark.parametrize(
    "spelling",
    ["iia:points=50", "smoothgrad:samples=20000", "rise:budget=50000", "rise:cells=900,budget=10", "hsic:budget=5000"],
)
def test_the_page_takes_less_than_the_library(spelling):
    with pytest.raises(MethodError, match="the limit of this page"):
        ExplainRequest((spelling,))


def test_the_page_takes_every_method_as_it_is():
    for info in list_methods():
        ExplainRequest((info.name,))


def test_costs_are_those_of_the_options():
    assert forward_passes("rise:budget=300", 4) == 300  # all classes are read from the same answers
    assert forward_passes("smoothgrad:samples=20", 4) == 20 * 4 * 3  # forward and backward, for every class
    assert forward_passes("iia:points=5", 1) == 25 * 3
    assert forward_passes("dix:points=5", 1) == 5 * 3
    assert forward_passes("occlusion", 1) == 0  # the patches decide


@pytest.mark.parametrize(("spelling", "evaluations"), [("rise:budget=30", 30), ("iia:points=3", 9), ("tam:steps=5", 5)])
def test_as_many_images_are_run_as_expected(models, visit, spelling, evaluations):
    """The analysis of a model runs once, before its first explanation, and is not part of the cost."""
    for _ in range(2):  # the first time, the model may be new, depending on the tests before this one
        service = ImageService(models)
        do(service, ExplainRequest(("gae", spelling)), visit)
        images = service.images_run
        service.close()
    assert images == evaluations + 2  # and the run that is recorded for each method


def test_only_the_first_explanation_analyses_the_model(visit):
    """By name, two models are loaded; each is analysed once, on its own."""
    counts = []
    for _ in range(2):
        models = ModelCache(TINY)
        for _ in range(2):
            service = ImageService(models)
            do(service, ExplainRequest(("gae",)), visit)
            counts.append(service.images_run)
            service.close()
    assert counts[0] == counts[2] > counts[1] == counts[3] == 1


# Time.


def test_a_request_that_would_take_too_long_is_told_so_before_it_starts(models, visit):
    service = ImageService(models)
    do(service, ExplainRequest(("rise:budget=400",)), visit)  # tells how fast the model is
    service.worker.limits = Limits(seconds=0.5)
    asked = service.images_run
    with pytest.raises(
        BudgetError, match=r"about \d+ s, more than the limit of 0.5 s .* lower samples of smoothgrad:samples=10000"
    ):
        do(service, ExplainRequest(("rise:budget=400", SLOW)), visit)
    assert service.images_run == asked
    service.close()


def test_a_request_ends_when_its_time_is_over(models, visit, monkeypatch):
    monkeypatch.setattr(Job, "expect", lambda *_: None)  # as for methods whose cost the options do not tell
    service = ImageService(models, limits=Limits(seconds=2))
    network = models.get(TINY).model
    start = time.monotonic()
    with pytest.raises(BudgetError, match="Stopped after 2 s, the time limit of this server"):
        do(service, ExplainRequest(("gae", SLOW)), visit)
    assert time.monotonic() - start < 20  # all of it takes a minute
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())
    # What was found out until then is there, and the method is not marked as one that fails.
    results = service.cached(visit(service), ExplainRequest(("gae",)))
    assert results is not None
    assert results.failed == {}
    service.close()


# Memory.


def test_a_request_ends_when_it_takes_too_much_memory():
    worker = Worker(Limits(memory_bytes=100 * MB))

    def greedy(job):
        job.start_model()
        kept = []
        for _ in range(40):
            job.check()
            kept.append(torch.ones(10 * MB // 4))

    with pytest.raises(BudgetError, match="more than 100 MB of memory"):
        worker.submit(greedy).future.result(timeout=60)
    worker.close()


def test_memory_goes_back_to_the_system():
    worker = Worker(Limits())
    release_memory()
    before = resident_bytes()

    def heavy(_):
        # Pieces that the C library keeps for itself when they are freed, with others in between that stay.
        pieces = [torch.ones(16_000) for _ in range(8000)]
        assert resident_bytes() - before > 400 * MB
        return pieces[::400]

    kept = worker.submit(heavy).future.result(timeout=60)
    assert len(kept) == 20
    assert resident_bytes() - before < 200 * MB
    worker.close()


# Listening.


def test_who_listens_is_known():
    async def ask():
        streams = OpenStreams()
        assert not await streams.is_open("a", grace=0.1)
        with streams.opened("a"):
            with streams.opened("a"):
                assert await streams.is_open("a")
            assert await streams.is_open("a", grace=0)
            assert not await streams.is_open("b", grace=0)
        assert not await streams.is_open("a", grace=0)

    asyncio.run(ask())


# Files.


def test_files_are_bounded_in_total_and_the_oldest_go_first(tmp_path):
    example = tmp_path / "example-0.jpg"
    example.write_bytes(b"x" * 1000)
    for number in range(6):
        folder = tmp_path / f"{number:x}"
        folder.mkdir()
        (folder / "photo.png").write_bytes(b"x" * 1000)
        age = 1_000_000 + number
        os.utime(folder / "photo.png", (age, age))
    trim_folder(tmp_path, 3000, frozenset({example}))
    assert sorted(place.name for place in tmp_path.iterdir()) == ["3", "4", "5", "example-0.jpg"]


def test_room_is_made_before_a_file_comes(tmp_path):
    uploads = UploadFolder(tmp_path, max_file=1000, limit=3000)

    async def receive():
        for number in range(10):
            async with uploads.receiving():
                (tmp_path / f"{number}.png").write_bytes(b"x" * 900)
            assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 3000

    asyncio.run(receive())


# Sessions.


def test_a_session_does_not_grow_with_what_it_is_shown(tmp_path):
    pytest.importorskip("gradio", reason="the web page needs Gradio (extra vitreous[web])")
    from test_web_server import ask, client_of, free_port, photo, view_in  # they need Gradio

    from vitreous.web.server import Settings, start

    server = start(Settings(model=TINY, port=free_port()))
    try:
        client, another = client_of(server), client_of(server)
        for number in range(4):
            photo(number).save(tmp_path / f"{number}.png")
            ask(client, tmp_path / f"{number}.png")
        with ThreadPoolExecutor(2) as both:
            shown = list(both.map(lambda one: ask(one, tmp_path / "1.png"), (client, another)))
        assert all(map(view_in, shown))
        sessions = server._page.app.state_holder.session_data
        assert len(sessions) == 2
        for session in sessions.values():
            assert session.config_values == {}  # where megabytes of pictures were kept
            assert set(session.blocks_config.blocks) == set(server._page.blocks)
        client.close()
        another.close()
    finally:
        server.close()
