"""The status page in a real browser, of a phone's width: figures move, a killed
R-worker turns red, and nothing but this server is asked for anything."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from mpi_launch import FASTDECODE, running

pytest.importorskip("uvicorn", reason='needs the server: pip install ".[server]"')
pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")

from server_process import CHECKPOINT, Server, serving

DRIVER = shutil.which("chromedriver")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTH = 360
NAME = "<img src=x onerror=alert(1)>"

pytestmark = pytest.mark.skipif(
    DRIVER is None or CHROMIUM is None,
    reason="needs a browser: Debian's chromium and chromium-driver",
)


class Browser:
    """A headless browser at one page, by the WebDriver protocol."""

    def __init__(self, port: int) -> None:
        self._port = port
        options = {
            "binary": CHROMIUM,
            "args": [
                "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                f"--window-size={WIDTH},900",
            ],
            "mobileEmulation": {"deviceMetrics": {"width": WIDTH, "height": 740, "touch": True}},
        }  # fmt: skip
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        said = self._post("/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{said['sessionId']}"

    def open(self, url: str) -> None:
        self._post(f"{self._session}/url", {"url": url})

    def run(self, script: str) -> Any:
        """What a script of the page returns."""
        return self._post(f"{self._session}/execute/sync", {"script": script, "args": []})

    def text(self, element_id: str) -> str:
        return str(self.run(f"return document.getElementById('{element_id}').textContent"))

    def log(self, kind: str) -> list[dict[str, Any]]:
        """What has come since it was asked for last."""
        said: list[dict[str, Any]] = self._post(f"{self._session}/se/log", {"type": kind})
        return said

    def requests(self) -> list[str]:
        """Addresses that were asked for."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        with contextlib.closing(connection):
            headers = {"content-type": "application/json"}
            connection.request("POST", path, json.dumps(body).encode(), headers)
            answer = json.loads(connection.getresponse().read())["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer


@contextlib.contextmanager
def browsing(url: str) -> Iterator[Browser]:
    with running([str(DRIVER), "--port=0"]) as job:
        started = re.compile(r"started successfully on port (\d+)")
        job.wait_until(lambda: started.search(job.output()) is not None)
        found = started.search(job.output())
        assert found is not None
        browser = Browser(int(found[1]))
        browser.open(url)
        yield browser


@contextlib.contextmanager
def one_r_worker() -> Iterator[tuple[Server, Any]]:
    """A server, and the job that is its R-worker."""
    worker = [*FASTDECODE, "r-worker", "--threads", "1", "--kv-memory-gb", "0.01"]
    with running([*worker, "--bind", "tcp://127.0.0.1:*"]) as job:
        address = job.address()
        command = [*FASTDECODE, "serve", str(CHECKPOINT), "--port", "0", "--r-worker", address]
        with serving(command, "--served-model-name", NAME) as server:
            yield server, job


def streaming(server: Server) -> http.client.HTTPConnection:
    """A request that runs until its client leaves."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = {"prompt": [5, 6], "max_tokens": 900, "ignore_eos": True, "stream": True}
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
    assert connection.getresponse().status == 200
    return connection


def test_the_page_lives_and_shows_who_is_lost() -> None:
    with one_r_worker() as (server, r_worker), browsing(server.url + "/") as browser:
        server.wait_until(lambda: browser.text("state") == "ready")
        assert browser.text("model") == NAME and browser.run("return document.images.length") == 0
        with contextlib.closing(streaming(server)):
            server.wait_until(lambda: browser.text("tokens-per-s") not in ("–", "0.0"))
            server.wait_until(lambda: browser.text("running") == "1")
        server.wait_until(lambda: browser.text("running") == "0")
        assert "alive" in browser.text("workers") and "blocks" in browser.text("workers")
        assert server.complete(prompt=[5, 6], max_tokens=4, ignore_eos=True)[0] == 200
        for tile in ("ttft", "tpot"):
            server.wait_until(
                lambda tile=tile: re.search(r"\d m?s", browser.text(tile)) is not None
            )
        line = "return document.querySelector('#chart-tokens .line').getAttribute('d')"
        before = browser.run(line)
        assert before.startswith("M") and len(before.split()) >= 2
        browser.open(server.url + "/")
        drawn = "return document.querySelectorAll('.line').length"
        server.wait_until(lambda: browser.run(drawn) == 4)
        assert len(browser.run(line).split()) >= len(before.split()), "a reload loses nothing"
        wide = "return [document.documentElement.scrollWidth, window.innerWidth]"
        assert browser.run(wide) == [WIDTH, WIDTH], "nothing sticks out"
        r_worker.kill()
        server.wait_until(lambda: browser.run("return document.querySelectorAll('.lost').length"))
        assert "lost: " in browser.text("workers") and "no_r_worker" in browser.text("state")
        color = "return getComputedStyle(document.querySelector('.lost td')).color.match(/\\d+/g)"
        red, green, blue = map(int, browser.run(color)[:3])
        assert red > 2 * green and red > 2 * blue
        assert [entry for entry in browser.log("browser") if entry["level"] != "INFO"] == []
        asked = browser.requests()
        assert server.url + "/status.json" in asked
        assert [url for url in asked if not url.startswith((server.url + "/", "data:"))] == []
