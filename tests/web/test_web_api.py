"""The JSON interface: typed answers, the same maps and limits as the page."""

import io
import json
import urllib.error
import urllib.request
import uuid

import pytest

pytest.importorskip("gradio", reason="the web page needs Gradio (extra vitreous[web])")
from PIL import Image

import vitreous
from running_server import TINY, running_server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("api"), "--max-upload-mb", "1") as running:
        yield running


@pytest.fixture
def picture():
    return Image.linear_gradient("L").convert("RGB").resize((200, 150))


def png(image):
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def call(server, path, content=None, **fields):
    """The status and the JSON of an answer."""
    boundary, body = uuid.uuid4().hex, b""
    parts = [(f'name="{name}"', str(value).encode()) for name, value in fields.items()]
    parts += [] if content is None else [('name="image"; filename="leaf.png"', content)]
    for head, value in parts:
        body += f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + value + b"\r\n"
    data = body + f"--{boundary}--\r\n".encode() if parts else None
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"} if parts else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(server.address + path, data, headers), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        return error.code, json.loads(text) if text.startswith("{") else text
    except urllib.error.URLError as error:  # the server hung up before it had all of it, which may cost us its answer
        if not isinstance(error.reason, ConnectionError):
            raise
        return 413, ""


def test_an_answer_has_predictions_scores_and_trust_and_is_cached(server, picture):
    targets = [7, {"kind": "contrast", "a": 7, "b": 3}]
    fields = {"methods": "ixg,gae", "targets": json.dumps(targets)}
    status, answer = call(server, "api/explain", png(picture), **fields, trust="true")
    assert status == 200
    assert answer["grid"] == [10, 10]
    assert answer["frame"] == pytest.approx([1 / 7, 1 / 42, 6 / 7, 41 / 42])  # the shorter side is 168, the crop 160
    expected = [(method, target) for target in targets for method in ("ixg", "gae")]
    assert [(one["method"], one["target"]) for one in answer["maps"]] == expected
    assert [one["signed"] for one in answer["maps"]] == [True, False, True, False]
    assert all(len(one["scores"]) == one["rows"] * one["columns"] == 100 for one in answer["maps"])
    assert answer["maps"][2]["label"] == "class 7 rather than class 3"
    assert len(answer["predictions"]) == 5
    assert answer["trust"]["verdict"] in {"good", "fair", "poor"}
    assert answer["seconds"] > 0
    again = call(server, "api/explain", png(picture), **fields)[1]
    assert again["seconds"] == 0
    assert [one["scores"] for one in again["maps"]] == [one["scores"] for one in answer["maps"]]


def test_methods_and_model_are_described(server):
    status, methods = call(server, "api/methods")
    assert status == 200
    by_name = {one["spelling"]: one for one in methods}
    assert by_name["gae"]["cost"] == "forward + backward"
    assert not by_name["rollout"]["class_specific"]
    status, model = call(server, "api/model")
    assert (model["model"], model["max_methods"], model["max_image_bytes"]) == (TINY, 12, 2**20)
    assert model["version"] == vitreous.__version__
    status, schema = call(server, "api/openapi.json")
    assert set(schema["paths"]) == {"/explain", "/methods", "/model"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"methods": "nonsense"}, "there is no method 'nonsense'"),
        ({"method": "gae"}, "There is no field 'method'; the fields are image, methods,"),
        ({"methods": ",".join(f"gae:start={number}" for number in range(13))}, "At most 12 methods"),
        ({"methods": "smoothgrad:samples=100000"}, "the limit of this page"),
        ({"targets": "[1001]", "methods": "gae"}, "classes"),
        ({"targets": '[{"kind": "similar"}]', "methods": "gae"}, "second photo"),
        ({"targets": "{", "methods": "gae"}, "targets must be a JSON list"),
        ({"model": "py/evil.py:model"}, "server"),
        ({"model": "hf//etc"}, "server"),
    ],
)
def test_what_the_page_refuses_is_refused_with_the_same_sentence(server, picture, fields, reason):
    status, answer = call(server, "api/explain", png(picture), **fields)
    assert status == 400
    assert reason in answer["error"]


def test_other_files_and_large_ones_are_refused(server):
    status, answer = call(server, "api/explain", b"not a picture", methods="gae")
    assert status == 400
    assert answer["error"].startswith("leaf.png: this is not an image")
    assert call(server, "api/explain", bytes(2 * 2**20), methods="gae")[0] == 413
    assert call(server, "api/explain", methods="gae")[0] == 422
    assert call(server, "api/docs")[0] == 404
