"""The page under many and under greedy visitors: latency, memory and files of a running server.

    python benchmarks/page_under_load.py [--model timm/test_vit@random] [--visitors 20 100] [--photos 60] [--json FILE]

Latencies are given over that of one visitor alone, and memory in MB beyond what the server had when it was warm.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image
from rows import write_rows

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from running_server import RunningServer, running_server

MB = 2**20
TWELVE = (
    *("raw_attention", "rollout", "attcam", "gae", "gradsam", "gradient"),
    *("ixg", "cat", "attcat", "decompx", "tokentm", "gradtoken"),
)
SETTINGS = {"opacity": 0.85, "sign": "both", "threshold": 0.0, "smooth": True}


def _request(methods: Sequence[str], classes: Sequence[int] = ()) -> str:
    return json.dumps({"methods": list(methods), "questions": list(classes), "depth": 6, "settings": SETTINGS})


class Visitor:
    """One session with the server, past the browser."""

    def __init__(self, server: RunningServer, model: str) -> None:
        self._place = server.address.removeprefix("http://").rstrip("/")
        self._model, self.session = model, uuid.uuid4().hex
        self._config = json.loads(self._request("GET", "/config"))

    def explain(self, content: bytes, methods: Sequence[str], *, listen: bool = True) -> str:
        """Upload a photo and have it explained; what the page would be told."""
        boundary = uuid.uuid4().hex
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="files"; filename="photo.png"\r\n\r\n'
        body = head.encode() + content + f"\r\n--{boundary}--\r\n".encode()
        (path,) = json.loads(
            self._request("POST", "/gradio_api/upload", body, f"multipart/form-data; boundary={boundary}")
        )
        file = {"path": path, "meta": {"_type": "gradio.FileData"}, "orig_name": "photo.png"}
        data = [_request(methods), None, None, None, self._model, file]
        return self._ask("upload", data, listen=listen)

    def show(self, methods: Sequence[str], classes: Sequence[int] = ()) -> str:
        """Have other maps of the same photo shown."""
        return self._ask("show", [_request(methods, classes), None, None, None])

    def _ask(self, name: str, data: list[Any], *, listen: bool = True) -> str:
        function = next(one for one in self._config["dependencies"] if one.get("api_name") == name)
        body = {"data": data, "fn_index": function["id"], "session_hash": self.session}
        self._request("POST", "/gradio_api/queue/join", json.dumps(body).encode(), "application/json")
        if not listen:
            return ""
        told = self._listen()
        # What is not cached is queued, and the page then asks for its turn.
        return told + self._ask("run_maps", [None]) if "Working" in told else told

    def _listen(self) -> str:
        connection = http.client.HTTPConnection(self._place, timeout=600)
        connection.request("GET", f"/gradio_api/queue/data?session_hash={self.session}")
        told = ""
        for line in connection.getresponse():
            told += line.decode() if b"process_" in line else ""
            if b"close_stream" in line or b"unexpected_error" in line:
                break
        connection.close()
        return told

    def _request(self, verb: str, path: str, body: bytes | None = None, kind: str = "text/plain") -> bytes:
        connection = http.client.HTTPConnection(self._place, timeout=600)
        connection.request(verb, path, body, {"Content-Type": kind})
        answer = connection.getresponse().read()
        connection.close()
        return answer


def photo(number: int, size: tuple[int, int] = (200, 150)) -> bytes:
    """Noise that no other number gives."""
    noise = np.random.default_rng(number).integers(0, 255, (size[1] // 10, size[0] // 10, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).resize(size, Image.Resampling.NEAREST).save(stream, "PNG")
    return stream.getvalue()


def seconds(visitor: Visitor, content: bytes, methods: Sequence[str]) -> float:
    """How long a visitor waits for maps."""
    start = time.monotonic()
    told = visitor.explain(content, methods)
    assert "measureTrust" in told, told[-2000:]
    return time.monotonic() - start


def measured(
    server: RunningServer, folder: Path, model: str, counts: Sequence[int], photos: int
) -> Iterator[dict[str, object]]:
    """Everything that is measured, one after the other on one server."""
    numbers = iter(range(10**6))
    methods = ("gae", "tokentm")
    first = Visitor(server, model)
    alone = median(seconds(first, photo(next(numbers)), methods) for _ in range(10))
    for count in counts:
        visitors = [Visitor(server, model) for _ in range(count)]
        contents = [photo(next(numbers)) for _ in visitors]
        with ThreadPoolExecutor(count) as pool:
            waits = list(pool.map(lambda one: seconds(*one, methods), zip(visitors, contents, strict=True)))
        yield {"what": f"{count} visitors at once", "worst over alone": max(waits) / alone}
    for _ in range(40):  # until the memory of explained photos is full
        seconds(first, photo(next(numbers)), methods)
    warm = server.resident_bytes()

    def beyond() -> float:
        return (server.resident_bytes() - warm) / MB

    for _ in range(photos):
        seconds(first, photo(next(numbers)), methods)
    yield {"what": f"{photos} photos in one session", "MB each": beyond() / photos}
    before, content = beyond(), photo(next(numbers))
    for _ in range(20):
        visitor = Visitor(server, model)
        visitor.explain(content, TWELVE)
        visitor.show(TWELVE, (0, 1, 2, 3))
    yield {"what": "20 sessions, 12 methods x 4 classes", "MB each": (beyond() - before) / 20}
    for spelling in ("iia:points=9000", "smoothgrad:samples=2000000", "iia:points=10", "rise:budget=10000,cells=100"):
        before, start = beyond(), time.monotonic()
        told = first.explain(photo(next(numbers)), (spelling,))
        answer = "maps" if "measureTrust" in told else "refused"
        waited = (time.monotonic() - start) / alone
        yield {"what": spelling, "answer": answer, "over alone": waited, "MB after": beyond() - before}
    Visitor(server, model).explain(photo(next(numbers)), ("smoothgrad:samples=10000",), listen=False)
    yield {"what": "behind an answer nobody reads", "over alone": seconds(first, photo(next(numbers)), methods) / alone}
    for number in range(25):
        noise = np.random.default_rng(number).bytes(15 * MB)
        Visitor(server, model).explain(b"\x89PNG\r\n\x1a\n" + noise, methods, listen=False)
    kept = sum(file.stat().st_size for file in folder.glob("vitreous-web-*/**/*") if file.is_file())
    yield {"what": "25 uploads of 15 MB", "MB on disk": kept / MB}
    time.sleep(15)  # until the server has seen that nobody reads, and a little more
    seconds(first, photo(next(numbers)), methods)
    yield {"what": "at the end", "MB beyond the start": beyond()}


def _shown(key: str, value: object) -> str:
    return f"{key} {value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Print a row per measurement."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="timm/test_vit@random")
    parser.add_argument("--visitors", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--photos", type=int, default=60)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running_server(folder, "--cache-mb", "16", model=given.model) as server:
            for row in measured(server, folder, given.model, given.visitors, given.photos):
                found.append(row)
                numbers = (
                    f"{key} {value:.3g}" if isinstance(value, float) else f"{value}" for key, value in row.items()
                )
                print("  ".join(numbers), flush=True)
    write_rows(given.json, found, model=given.model, photos=given.photos)


if __name__ == "__main__":
    main()
