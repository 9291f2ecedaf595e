"""The status page: static, from this server alone, and its script shows what
the server says, as text. It is run without a browser."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason='needs the server: pip install ".[server]"')

from server_process import ROOT, scripted_server

PAGE = ROOT / "fastdecode" / "server" / "http" / "page"


def test_the_page_is_static_and_of_this_server_alone() -> None:
    with scripted_server() as server:
        for path, kind in (
            ("/", "text/html"),
            ("/page.css", "text/css"),
            ("/icon.svg", "image/svg"),
        ):
            status, headers, raw = server.ask("GET", path)
            assert status == 200 and headers["content-type"].startswith(kind)
            assert "default-src 'self'" in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff" and raw
        page = server.ask("GET", "/")[2].decode()
        assert "<script>" not in page and " on" not in re.sub(r">[^<]*<", "><", page)
        for path in re.findall(r'(?:src|href)="([^"]*)"', page):
            assert path.startswith("/") and server.ask("GET", path)[0] == 200
    script = (PAGE / "page.js").read_text()
    assert "innerHTML" not in script and "eval" not in script
    assert re.findall(r"https?://[^\"']*", script) == ["http://www.w3.org/2000/svg"]


def test_its_script_shows_what_the_server_says() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node, to run the page's script")
    with scripted_server("--step-s", "0.01") as server:
        first = server.status()
        assert server.complete(prompt=[1], max_tokens=20)[0] == 200
        server.wait_until(lambda: "r_workers" in server.status()["figures"])
        second = server.status()
    second["model"] = "<img src=x onerror=alert(1)>"
    lost = copy.deepcopy(second)
    lost["num_live_r_workers"] = 0
    lost["figures"]["r_workers"][0]["lost"] = "it gave no sign of life"
    lost["time_s"] += 1

    def shown(*answers: object) -> dict[str, Any]:
        said = "\n".join(json.dumps(answer) for answer in answers)
        script = Path(__file__).with_name("page_in_node.js")
        done = subprocess.run(
            [node, str(script), str(PAGE / "page.js")],
            input=said, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    told = shown(first, second)
    assert told["model"]["text"] == "<img src=x onerror=alert(1)>"
    assert told["state"] == {"text": "ready", "kind": "good", "kinds": []}
    assert float(str(told["tokens-per-s"]["text"])) > 0
    assert re.fullmatch(r"[0-9.]+( m?s)? / [0-9.]+ m?s", str(told["ttft"]["text"]))
    assert (told["finished"]["text"], told["failed"]["text"]) == ("1", "0")
    assert told["version"]["text"] == second["version"] and told["uptime"]["text"]
    assert told["fetched"] == ["/status.json", "/history.json", "/status.json"]
    charts = str(told["charts"]["text"])
    assert "tokens/s|130|" in charts and "200|100|0" in charts, "a scale and a number"
    assert "−10 min|−5 min|now" in charts and "KV blocks reserved|5.0%|" in charts
    *grid, area, line = told["paths"][0]
    assert len(grid) == 3 and line == "M296,95L297,95 298,15M299,35L300,35", "with its gap"
    assert area == "M296,95L297,95 298,15V100H296ZM299,35L300,35V100H299Z"
    assert str(told["workers"]["text"]).startswith("<b>r0</b>|alive|")
    told = shown(second, lost)
    assert told["state"]["kind"] == "bad" and "1 of 1 R-workers lost" in str(told["state"]["text"])
    assert told["workers"]["kinds"] == ["lost"]
    assert "lost: it gave no sign of life" in str(told["workers"]["text"])
