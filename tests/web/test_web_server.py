"""The running server: right answers for many visitors at once, and nothing for those who try other things."""

import base64
import getpass
import json
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("gradio", reason="the web page needs Gradio (extra vitreous[web])")
from gradio import processing_utils, routes
from gradio_client import Client, handle_file
from gradio_client.utils import QueueError

from running_server import TINY, running_server
from vitreous.errors import ModelError
from vitreous.web import server as gradio_env
from vitreous.web.image_service import ImageService
from vitreous.web.jobs import Job
from vitreous.web.models import ModelCache
from vitreous.web.requests import ExplainRequest
from vitreous.web.security import OpenStreams, SecurityMiddleware, names_remote_file
from vitreous.web.server import Settings, start
from vitreous.web.views import predictions_of

METHODS = ("gae", "ixg")
SLOW = "waiting"  # a minute of the model, and hardly any of the processor, which the other tests need
WAITING = """
import time
from vitreous.methods.integrated import NoisyGradient
from vitreous.methods.registry import register


class Waiting(NoisyGradient):
    def noisy_inputs(self, view):
        for inputs in super().noisy_inputs(view):
            for one in inputs.split(1):
                time.sleep(0.1)
                yield one


@register("waiting", family="gradient", paper="", year=0, class_specific=True, signed=False)
def waiting():
    \"""600 passes with a pause before each.\"""
    return Waiting("pixels", "patch", 600, 0.1, 0, "magnitude")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    (folder / "allowed").mkdir()
    (folder / "secret.txt").write_text("root:secret")
    (folder / "waiting.py").write_text(WAITING)
    options = ("--plugin", str(folder / "waiting.py"), "--allow-folder", str(folder / "allowed"))
    with running_server(folder, "--max-upload-mb", "2", "--max-seconds", "600", *options) as running:
        yield running


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_server_leaves_gradio_unchanged_and_restores_the_environment(monkeypatch):
    functions = processing_utils.async_ssrf_protected_download, routes.DEFAULT_TEMP_DIR
    monkeypatch.delenv("GRADIO_TEMP_DIR", raising=False)
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "True")
    server = start(Settings(model=TINY, port=free_port()))
    try:
        folder = Path(os.environ["GRADIO_TEMP_DIR"])
        assert folder.is_dir()
        assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"
        assert (processing_utils.async_ssrf_protected_download, routes.DEFAULT_TEMP_DIR) == functions
    finally:
        server.close()
    assert "GRADIO_TEMP_DIR" not in os.environ
    assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "True"
    assert not folder.exists()


def test_the_environment_is_restored_when_the_last_page_ends(monkeypatch, tmp_path):
    monkeypatch.setenv("GRADIO_TEMP_DIR", "/of/another/app")
    first, second = tmp_path / "first", tmp_path / "second"
    gradio_env.acquire_environment(first)
    gradio_env.acquire_environment(second)
    gradio_env.release_environment(first)
    gradio_env.release_environment(first)  # closed twice
    assert os.environ["GRADIO_TEMP_DIR"] == str(second)
    gradio_env.release_environment(second)
    assert os.environ["GRADIO_TEMP_DIR"] == "/of/another/app"


def test_a_server_that_cannot_start_restores_the_environment(monkeypatch):
    monkeypatch.delenv("GRADIO_TEMP_DIR", raising=False)
    with pytest.raises(ModelError):
        start(Settings(model="timm/no_such_model", port=free_port()))
    assert "GRADIO_TEMP_DIR" not in os.environ


def photo(number):
    """A photo that no other number gives, and the model says something else of."""
    noise = np.random.default_rng(number).integers(0, 255, (12, 16, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((200, 150), Image.Resampling.NEAREST)


class PatientClient(Client):
    """A client that asks again while what an earlier test has left still fills the queue."""

    def predict(self, *arguments, **options):
        deadline = time.monotonic() + 90
        while True:
            try:
                return super().predict(*arguments, **options)
            except QueueError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)


def client_of(server):
    # What it downloaded it would leave behind, with an empty folder in the system's temporary directory for each file.
    return PatientClient(server.address, verbose=False, analytics_enabled=False, download_files=False)


def request_of(*methods, **others):
    """A request as the page's scripts write it."""
    settings = {"opacity": 0.85, "sign": "both", "threshold": 0, "smooth": True}
    return json.dumps({"methods": methods or METHODS, "questions": [], "depth": None, "settings": settings} | others)


def ask(client, file, model=TINY):
    """Upload a photo as the page does: all that the page would show."""
    first = client.predict(request_of(), model, handle_file(str(file)), api_name="/upload")
    if not any("Working" in part for part in texts(first)):
        return first  # from the cache, or an error
    return [*first, *client.predict(api_name="/run_maps")]


def texts(answer):
    return [part for part in answer if isinstance(part, str)]


def view_in(answer):
    """What the page draws, of an answer; None if there is nothing."""
    views = [json.loads(part) for part in texts(answer) if part.startswith('{"photo"')]
    return views[-1] if views else None


def scores_of(map_):
    return np.frombuffer(base64.b64decode(map_["data"]), {"f4": "<f4", "u2": "<u2"}[map_["type"]])


def get(server, path, data=None, headers=None):
    """The status and text of an answer, whatever it is; addresses are sent as they are written."""
    host, port = server.address.removeprefix("http://").rstrip("/").split(":")
    body = data or b""
    head = f"{'POST' if data is not None else 'GET'} {path} HTTP/1.0\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in ({"Host": f"{host}:{port}"} | (headers or {})).items())
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    text = answer.decode("utf-8", "replace")
    return int(text.split()[1]), text


# Ten visitors.


def test_ten_visitors_at_once_get_right_answers_in_bounded_memory(server, tmp_path):
    for number in range(10):
        photo(number).save(tmp_path / f"{number}.png")
    service = ImageService(ModelCache(TINY))
    expected = []
    for number in range(10):
        visit = service.read(tmp_path / f"{number}.png", "x.png", TINY)
        record = service.explain(visit, ExplainRequest(METHODS), Job())
        maps = [record.scores[method, record.predicted].numpy() for method in METHODS]
        expected.append((predictions_of(record), maps))
    service.close()
    assert len({str(predictions) for predictions, _ in expected}) == 10
    clients = [client_of(server) for _ in range(10)]
    ask(clients[0], tmp_path / "0.png")
    before = server.resident_bytes()
    for _ in range(2):
        with ThreadPoolExecutor(10) as visitors:
            answers = list(visitors.map(lambda n: view_in(ask(clients[n], tmp_path / f"{n}.png")), range(10)))
        for answer, (predictions, maps) in zip(answers, expected, strict=True):
            assert [one["text"] for one in answer["predictions"]] == [one["text"] for one in predictions]
            (shown,) = answer["maps"]
            for one, other in zip(shown, maps, strict=True):
                # float32, and sums in another order where the number of threads differs
                np.testing.assert_allclose(scores_of(one), other, rtol=1e-3, atol=1e-5 * np.abs(other).max())
    # Ten photos of 200 x 150 pixels and their maps are under 10 MB; a leaked run would be 20 MB each, 400 MB in all.
    assert server.resident_bytes() - before < 150 * 2**20
    for client in clients:
        client.close()


def start_slow(client, file):
    """Start a request that takes a minute."""
    client.predict(request_of(*METHODS, SLOW), TINY, handle_file(str(file)), api_name="/upload")
    return client.submit(api_name="/run_maps")


def test_a_visitor_who_leaves_frees_the_model(server, tmp_path):
    photo(50).save(tmp_path / "50.png")
    photo(51).save(tmp_path / "51.png")
    leaving = client_of(server)
    start_slow(leaving, tmp_path / "50.png")
    time.sleep(1)
    staying = client_of(server)
    staying.predict(request_of(), TINY, handle_file(str(tmp_path / "51.png")), api_name="/upload")
    waiting = staying.submit(api_name="/run_maps")
    time.sleep(1)
    assert not waiting.done()  # it waits behind 600 passes, which take a minute
    leaving.close()
    assert view_in(waiting.result(timeout=60))
    staying.close()


def test_an_answer_that_nobody_reads_keeps_nobody_waiting(server, tmp_path):
    photo(52).save(tmp_path / "52.png")
    photo(53).save(tmp_path / "53.png")
    uploading = client_of(server)
    ask(uploading, tmp_path / "52.png")  # so that the file is on the server
    uploaded = next(server.log.parent.glob("vitreous-web-*/*/52.png"))
    # This one reads the first step, so that the slow work is queued, and then nothing more.
    assert "Working" in _answer(server, str(uploaded), session="leaving", spelled=SLOW)
    status, text = _post_event(server, "run_maps", [None], "leaving")
    assert status == 200, text
    # This one never reads anything.
    status, text = _join(server, str(uploaded), spelled=SLOW)
    assert status == 200, text
    start = time.monotonic()
    answer = ask(uploading, tmp_path / "53.png")
    assert view_in(answer)
    # Nobody has read for ten seconds, then the job is not started or ends at the model's next block.
    assert time.monotonic() - start < 40
    uploading.close()


def test_a_new_request_stops_the_one_before_it(server, tmp_path):
    photo(54).save(tmp_path / "54.png")
    client = client_of(server)
    slow = start_slow(client, tmp_path / "54.png")
    time.sleep(1)
    assert not slow.done()
    answer = ask(client, tmp_path / "54.png")
    assert view_in(answer)
    assert texts(slow.result(timeout=60)) == []  # the newer request speaks for itself
    client.close()


def test_gradio_cancels_a_job(server, tmp_path):
    photo(55).save(tmp_path / "55.png")
    client = client_of(server)
    slow = start_slow(client, tmp_path / "55.png")
    time.sleep(1)
    assert not slow.done()
    slow.cancel()
    start = time.monotonic()
    assert view_in(ask(client, tmp_path / "55.png"))
    assert time.monotonic() - start < 30  # all of it takes a minute
    client.close()


def test_a_full_queue_is_refused(server, tmp_path):
    photo(56).save(tmp_path / "56.png")
    clients = [client_of(server) for _ in range(2)]
    for client in clients:  # both places in the queue for the model are taken
        start_slow(client, tmp_path / "56.png")
    time.sleep(2)
    statuses = [_post_event(server, "run_maps", [None], uuid.uuid4().hex) for _ in range(130)]
    assert statuses[0][0] == 200
    status, text = statuses[-1]
    assert status == 503
    assert "full" in text.lower()
    assert "Traceback" not in text
    for client in clients:
        client.close()
    deadline = time.monotonic() + 120
    while _post_event(server, "run_maps", [None], uuid.uuid4().hex)[0] != 200:  # the others are skipped one by one
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_a_failed_model_change_puts_the_old_choice_back(server, tmp_path):
    photo(57).save(tmp_path / "57.png")
    client = client_of(server)
    ask(client, tmp_path / "57.png")
    # Refused at once, and refused when it is loaded.
    refused = client.predict(request_of(), "py/evil.py:model", api_name="/change_model")
    assert TINY in refused
    assert "vitreous-error" in " ".join(texts(refused))
    client.predict(request_of(), "timm/no_such_model", api_name="/change_model")
    failed = client.predict(api_name="/run_maps")
    assert TINY in failed
    assert "no_such_model" in " ".join(texts(failed))
    # The page reacts to the choice that was put back, and must not hide the error by that.
    assert texts(client.predict(request_of(), TINY, api_name="/change_model")) == []
    client.close()


# Refusals.


def test_requests_that_send_too_much_are_turned_away(server):
    kind = {"Content-Type": "application/json"}
    body = json.dumps({"data": ["x" * 2**20], "fn_index": 0, "session_hash": "x"}).encode()
    try:
        status, _ = get(server, "/gradio_api/queue/join", body, kind)
    except ConnectionError:  # the server hung up before it had all of it, which may cost us its answer
        status = 413
    assert status == 413
    deadline = time.monotonic() + 90
    while _join(server, "x")[0] == 503 and time.monotonic() < deadline:  # an earlier test has filled the queue
        time.sleep(1)
    assert _join(server, "x")[0] == 200  # a small one is taken


def test_uploads_that_nobody_explains_are_bounded_in_total(server):
    for number in range(25):
        content = b"\x89PNG\r\n\x1a\n" + bytes([number]) * (2 * 2**20 - 100)
        assert _upload(server, content)[0] == 200
    time.sleep(0.5)  # files are moved after the answer
    folder = next(server.log.parent.glob("vitreous-web-*"))
    kept = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert kept <= 21 * 2**20  # ten of 2 MB, and the examples


def test_wrong_files_are_refused_with_a_sentence(server, tmp_path):
    (tmp_path / "letter.png").write_text("not a picture")
    client = client_of(server)
    answer = " ".join(texts(ask(client, tmp_path / "letter.png")))
    assert "letter.png: this is not an image in a supported format" in answer
    assert "Traceback" not in answer
    assert "/tmp" not in answer
    client.close()


def _upload(server, content):
    boundary = uuid.uuid4().hex
    body = (
        (
            f'--{boundary}\r\nContent-Disposition: form-data; name="files"; filename="large.png"\r\n'
            "Content-Type: image/png\r\n\r\n"
        ).encode()
        + content
        + f"\r\n--{boundary}--\r\n".encode()
    )
    return get(server, "/gradio_api/upload", body, {"Content-Type": f"multipart/form-data; boundary={boundary}"})


def test_large_files_are_refused(server):
    try:
        status, text = _upload(server, b"\x89PNG\r\n\x1a\n" + os.urandom(3 * 2**20))
    except ConnectionError:  # the server hung up before it had all of it, which may cost us its answer
        status, text = 413, ""
    assert status == 413
    assert "Traceback" not in text
    kept = [file for file in server.log.parent.rglob("*") if file.is_file() and file.stat().st_size > 2 * 2**20]
    assert kept == []


def test_models_outside_allowed_folders_are_refused(server, tmp_path):
    photo(60).save(tmp_path / "60.png")
    client = client_of(server)
    for model in (f"timm/test_vit@{tmp_path}/x.pt", "py/evil.py:model", f"hf/{tmp_path}", "timm/local-dir:/etc"):
        shown = ask(client, tmp_path / "60.png", model)
        answer = " ".join(texts(shown))
        assert view_in(shown) is None
        assert "server" in answer
        assert "vitreous-error" in answer
    client.close()


def test_no_file_of_the_machine_can_be_read(server, tmp_path):
    secret = server.log.parent / "secret.txt"
    places = [
        f"/gradio_api/file={secret}",
        "/gradio_api/file=/etc/passwd",
        "/gradio_api/file=../../../../../../etc/passwd",
        f"/gradio_api/file={server.log}",
        "/gradio_api/file=src/vitreous/__init__.py",
        "/gradio_api/file=%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "/gradio_api/file=..%252f..%252f..%252fetc%252fpasswd",
        "/gradio_api/file=file:///etc/passwd",
        "/gradio_api/file//etc/passwd",
        "/file=/etc/passwd",
        "/assets/../../../../../../../../etc/passwd",
        "/assets/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "/static/../../../../../../../../etc/passwd",
        "/static/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "/svelte/..%2f..%2f..%2f..%2f..%2fetc/passwd",
        "/theme.css/../../etc/passwd",
    ]
    for place in places:
        status, text = get(server, place)
        assert status in {400, 403, 404, 405, 422}, place
        assert "root:" not in text, place
        assert "Traceback" not in text


def test_no_file_of_the_machine_can_be_passed_off_as_an_upload(server):
    secret = server.log.parent / "secret.txt"
    for path in (str(secret), "/etc/passwd", str(server.log.parent / "vitreous-web" / ".." / "secret.txt")):
        text = _answer(server, path)
        assert "root:" not in text
        assert "Traceback" not in text
        assert "predictions" not in text


def test_files_named_by_a_url_are_refused():
    file = {"path": "/tmp/vitreous-web-x/photo.png", "url": "http://127.0.0.1:7860/gradio_api/file=/tmp/photo.png"}
    for allowed in (file, [file, "http://a.b/c"], {"data": [file, {"path": 3}, None]}, 3, None, "http://a.b/c"):
        assert not names_remote_file(allowed)
    for url in ("http://a.b/c.png", "HTTPS://a.b/c.png", " http://a.b", "ftp://a.b/c", "file:///etc/passwd"):
        assert names_remote_file({"data": [1, [{"path": url, "meta": {}}]]})


def test_the_server_fetches_nothing_for_a_visitor(server):
    asked = threading.Event()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(3)

        def listen():
            try:
                listener.accept()[0].close()
                asked.set()
            except TimeoutError:
                pass

        thread = threading.Thread(target=listen)
        thread.start()
        text = _answer(server, f"http://127.0.0.1:{listener.getsockname()[1]}/photo.png")
        thread.join()
    assert not asked.is_set()
    assert "predictions" not in text


@cache
def _event_number(address, name):
    config = json.load(urllib.request.urlopen(address + "config", timeout=30))
    return next(one["id"] for one in config["dependencies"] if one.get("api_name") == name)


def _post_event(server, name, data, session):
    """Trigger an event past the page; nobody reads the answer."""
    number = _event_number(server.address, name)
    body = json.dumps({"data": data, "fn_index": number, "session_hash": session}).encode()
    return get(server, "/gradio_api/queue/join", body, {"Content-Type": "application/json"})


def _join(server, path, session="nobody", spelled=""):
    """Request an explanation of a file by its path, past the page; nobody reads the answer."""
    file = {"path": path, "meta": {"_type": "gradio.FileData"}, "orig_name": "x.png"}
    asked = request_of(*METHODS, spelled) if spelled else request_of()
    data = [asked, None, None, None, TINY, file]
    return _post_event(server, "upload", data, session)


def _answer(server, path, session=None, spelled=""):
    """Request that, and return all that the server answers."""
    session = session or uuid.uuid4().hex
    status, text = _join(server, path, session, spelled)
    if status != 200:
        return text
    request = urllib.request.urlopen(f"{server.address}gradio_api/queue/data?session_hash={session}", timeout=30)
    with request as stream:
        for line in stream:
            text += line.decode()
            if "process_completed" in text or "close_stream" in text:
                break
    return text


def test_nonsense_gets_no_stack_trace(server):
    json_type = {"Content-Type": "application/json"}
    for body in (b"{", b"[]", b'{"data": 3, "fn_index": 0}', b'{"data": [], "fn_index": 99999, "session_hash": "x"}'):
        status, text = get(server, "/gradio_api/queue/join", body, json_type)
        assert status >= 400
        assert "Traceback" not in text
        assert 'File "' not in text


def test_other_pages_and_other_names_are_turned_away(server):
    """By a name that leads to this machine, any page could have read along."""
    port = server.address.rstrip("/").rpartition(":")[2]
    for headers in (
        {"Host": f"evil.example:{port}"},
        {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"},
        {"Host": f"127.0.0.1.evil.example:{port}"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Host": ""},
    ):
        for path, data in (("/config", None), ("/gradio_api/upload", b"x")):
            assert get(server, path, data, headers)[0] == 403
    for headers in (
        {},
        {"Host": f"localhost:{port}"},
        {"Host": f"LOCALHOST:{port}", "Origin": f"http://localhost:{port}"},
    ):
        assert get(server, "/config", None, headers)[0] == 200


def test_a_server_for_everybody_answers_under_any_name_but_not_to_other_pages():
    middleware = SecurityMiddleware(None, "0.0.0.0", OpenStreams(), None)
    for name, origin, foreign in (
        ("here.example", None, False),
        ("here.example:80", "http://here.example:80", False),
        ("here.example", "http://evil.example", True),
    ):
        headers = [(b"host", name.encode()), *([(b"origin", origin.encode())] if origin else [])]
        assert middleware._is_cross_origin({"headers": headers}) == foreign


def test_what_the_page_does_not_need_is_closed(server):
    for path in ("/docs", "/openapi.json", "/monitoring", "/gradio_api/vibe-edit/", "/gradio_api/proxy=https://a.b/c"):
        assert get(server, path)[0] == 404
    # By this one requests could be made whose answers nobody is known to read.
    assert get(server, "/gradio_api/call/show", b"{}", {"Content-Type": "application/json"})[0] == 404


def test_answers_forbid_other_places(server):
    _, text = get(server, "/")
    assert "content-security-policy: default-src 'self'" in text.lower()
    scripts = re.findall(r'(?:src|href)="(https?:)?//', text)
    assert scripts == []
    assert "fonts.googleapis" not in text


def test_the_server_ends_and_tidies_up(tmp_path):
    with running_server(tmp_path, forked=False) as running:
        assert list(tmp_path.glob("vitreous-web-*"))
        client = client_of(running)
        photo(70).save(tmp_path / "70.png")
        ask(client, tmp_path / "70.png")
        client.close()
    assert running.process.returncode == 0
    # Its temporary directory is this folder; torch keeps a cache of its own there.
    left = {place.name for place in tmp_path.iterdir()} - {f"torchinductor_{getpass.getuser()}"}
    assert left == {"server.log", "70.png"}
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(running.address, timeout=5)


def test_without_a_text_model_the_shipped_one_is_offered(server):
    status, page = get(server, "/config")
    assert status == 200
    assert "vitreous-text-explain" in page
    assert '"demo-text"' in page
    assert "vitreous serve --audit audits" in page  # and the audit tab says how to get one
