"""Who may ask: keys, and the table of what needs none."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason='needs the server: pip install ".[server]"')

from mpi_launch import running
from server_process import CHECKPOINT, scripted_server

from fastdecode.cli.main import main
from fastdecode.core.errors import ConfigError
from fastdecode.core.secret_file import exposure
from fastdecode.measure.serving.client import Endpoint
from fastdecode.server.http.app import ROUTES
from fastdecode.server.options import ServeOptions, first_key, key_hashes

EXPECTED = {
    "/": "open", "/page.css": "open", "/page.js": "open", "/icon.svg": "open", "/live": "open",
    "/health": "open", "/metrics": "key", "/status.json": "key", "/history.json": "key",
    "/version": "key",
    "/v1/models": "key", "/v1/models/": "key", "/v1/completions": "key",
    "/v1/chat/completions": "key", "/v1/responses": "key", "/tokenize": "key", "/detokenize": "key",
    "/v1/conversations/": "key",
}  # fmt: skip
KEYS = ("first-key-0001", "second-key-002")
KEY_FILE = "keys"


def test_every_route_is_in_the_table_and_protected_as_it_says() -> None:
    assert set(ROUTES) == set(EXPECTED)
    with scripted_server(FASTDECODE_API_KEYS=",".join(KEYS)) as server:
        for path, ((method, *_), _) in ROUTES.items():
            status, headers, raw = server.ask(method, path)
            assert (status == 401) is (EXPECTED[path] == "key"), path
            if status == 401:
                assert json.loads(raw)["error"]["code"] == "invalid_api_key"
                assert headers["www-authenticate"] == "Bearer"
        assert server.ask("GET", "/nothing/here")[0] == 401
        for key in KEYS:
            assert server.ask("GET", "/v1/models", authorization=f"Bearer {key}")[0] == 200
        for wrong, says in (
            (f"Basic {KEYS[0]}", "got none"),
            (KEYS[0], "got none"),
            ("Bearer", "got none"),
            ("Bearer x", "the API key is wrong"),
            (f"Bearer {KEYS[0]}x", "the API key is wrong"),
        ):
            status, _, raw = server.ask("GET", "/v1/models", authorization=wrong)
            assert status == 401 and says in json.loads(raw)["error"]["message"], wrong
        # Pages of other sites don't know a key. A client with one may use any host.
        key = f"Bearer {KEYS[0]}"
        assert server.ask("GET", "/version", authorization=key, host="a.example")[0] == 200
        assert all(each not in server.job.output() for each in KEYS)
        for process in server.job.processes():
            words = " ".join(process.cmdline())
            assert all(each not in words for each in KEYS)
        assert "FASTDECODE_API_KEYS" not in server.process("http").environ()


JSON = {"content-type": "application/json"}


def test_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl, to make a certificate")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    made = subprocess.run([*command, "-keyout", key, "-out", cert], capture_output=True, timeout=60)
    assert made.returncode == 0, made.stderr
    script = str(Path(__file__).parents[1] / "scripted_serving.py")
    options = ["--port", "0", "--tls-cert", cert, "--tls-key", key]
    with running([sys.executable, script, *options]) as job:
        job.wait_until(lambda: "listening at https://" in job.output())
        port = int(job.output().split("127.0.0.1:")[1].split()[0])
        trusting = ssl.create_default_context(cafile=cert)
        job.wait_until(lambda: _is_ready(port, trusting))
        connection = http.client.HTTPSConnection("localhost", port, timeout=30, context=trusting)
        with contextlib.closing(connection):
            connection.request("GET", "/live")
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (200, b'{"status":"ok"}')
            connection.request("POST", "/v1/completions", b" " * (9 << 20), JSON)
            assert connection.getresponse().status == 413, "as over plain HTTP"
        with contextlib.closing(http.client.HTTPConnection("localhost", port, timeout=30)) as plain:
            plain.request("GET", "/live")
            with pytest.raises((OSError, http.client.HTTPException)):
                plain.getresponse()
    assert main(["serve", str(CHECKPOINT), "--port", "0", "--tls-cert", key, "--tls-key", key]) == 2
    assert f"--tls-cert {key}, --tls-key {key} are no certificate" in capsys.readouterr().err


def _is_ready(port: int, context: ssl.SSLContext) -> bool:
    connection = http.client.HTTPSConnection("localhost", port, timeout=30, context=context)
    with contextlib.closing(connection):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200


def test_who_is_not_let_in_is_counted_and_logged(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    key = "first-key-0001"
    with scripted_server("--request-log", str(log), FASTDECODE_API_KEYS=key) as server:
        body = {"prompt": [1]}
        status, headers, _ = server.ask("POST", "/v1/completions", body, authorization="Bearer no")
        assert status == 401
        server.wait_until(lambda: log.exists() and b"\n" in log.read_bytes())
        (line,) = [json.loads(each) for each in log.read_text().splitlines()]
        assert (line["id"], line["route"]) == (headers["x-request-id"], "/v1/completions")
        assert (line["status"], line["finish"], line["key"]) == (401, "invalid_api_key", None)
        rejected = "fastdecode:rejected_requests_total"
        assert server.metric(rejected, f"Bearer {key}", reason="invalid_api_key") == 1


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.touch(mode=0o600)
    file.write_text("# ours\nfirst-key-0001\n\nsecond-key-002\n")
    options = ServeOptions(api_key_file=str(file))
    assert len(key_hashes(options, {})) == 2
    assert len(key_hashes(options, {"FASTDECODE_API_KEYS": "third-key-0003"})) == 3
    assert key_hashes(ServeOptions(), {}) == ()
    for bad in ("", "# none\n", "short\n"):
        file.write_text(bad)
        with pytest.raises(ConfigError):
            key_hashes(options, {})
    with pytest.raises(ConfigError, match="key"):
        key_hashes(ServeOptions(api_key_file=str(tmp_path / "absent")), {})
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.com"):
        with pytest.raises(ConfigError, match="a key is needed"):
            key_hashes(ServeOptions(host=host), {})
    assert key_hashes(ServeOptions(host="::1"), {}) == ()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"first-key-0001\n# ours\nshort\n", "line 3: the key is too short: give 8 characters"),
        (b"first-key-0001\n\xff\xfe\n", "line 2: it is not text"),
        (b"first-key-0001 second-key-002\n", "line 1: the key has a space"),
    ],
)
def test_an_error_in_a_key_file_names_file_and_line(
    content: bytes, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.touch(mode=0o600)
    file.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        key_hashes(ServeOptions(api_key_file=str(file)), {})
    assert f"{file}, {says}" in str(raised.value)
    assert "first-key" not in str(raised.value), "an error shows no key"
    with pytest.raises(ConfigError, match="a key in FASTDECODE_API_KEYS is too short"):
        key_hashes(ServeOptions(), {"FASTDECODE_API_KEYS": "first-key-0001,short"})


@pytest.mark.parametrize("mode", [0o644, 0o620, 0o602])
def test_a_key_file_that_others_can_read_is_refused(mode: int, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first-key-0001\n")
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {file}"):
        key_hashes(ServeOptions(api_key_file=str(file)), {})


def test_a_tls_key_that_others_can_read_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key.pem"
    key.write_text("a key")
    key.chmod(0o644)
    files = ["--tls-cert", str(key), "--tls-key", str(key)]
    assert main(["serve", str(CHECKPOINT), "--port", "0", *files]) == 2
    assert f"--tls-key {key}: others may read" in capfd.readouterr().err


def test_who_may_read_a_secret() -> None:
    def why(mode: int, owner: int) -> str:
        return exposure(os.stat_result((mode, 0, 0, 1, owner, 0, 0, 0, 0, 0)), "F")

    assert not why(0o100600, 1000) and not why(0o100400, 1000)
    assert "mode 640): chmod 600 F" in why(0o100640, 1000)
    assert not why(0o100640, 0), "as mounted secrets are: root's, for a group"
    assert why(0o100644, 0) and why(0o100660, 0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 can be reached by others"),
        (["--port", "99999"], "--port 99999 is not a whole number"),
        (["--tls-cert", "x"], "--tls-key go together"),
        (["--chat-template", "/nonexistent"], "--chat-template"),
        (["--api-key-file", "/nonexistent"], "--api-key-file"),
        (["--unix-socket", "/nonexistent/x"], "--unix-socket /nonexistent/x"),
        (["--host", "a" * 80, "--api-key-file", KEY_FILE], f"can't listen at --host {'a' * 80}"),
    ],
)
def test_options_that_are_refused(
    options: list[str], match: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / KEY_FILE).touch(mode=0o600)
    (tmp_path / KEY_FILE).write_text(KEYS[0])
    options = [str(tmp_path / each) if each == KEY_FILE else each for each in options]
    assert main(["serve", str(CHECKPOINT), "--port", "0", *options]) == 2
    said = capfd.readouterr().err
    assert match in said and "Traceback" not in said


def test_a_port_that_is_taken(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(CHECKPOINT), "--port", port]) == 2
    taken_words = "Address already in use: choose another address, or end the program"
    assert f"--port {port}: {taken_words}" in capfd.readouterr().err


def test_a_unix_socket_is_its_owners_only(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s"
    script = str(Path(__file__).parents[1] / "scripted_serving.py")
    with running([sys.executable, script, "--unix-socket", str(path)]) as job:
        job.wait_until(lambda: "listening at" in job.output())
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(path))
        connection.request("GET", "/live")
        assert connection.getresponse().status == 200
        assert main(["serve", str(CHECKPOINT), "--unix-socket", str(path)]) == 2
        assert f"--unix-socket {path}: Address already in use" in capfd.readouterr().err
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait(60, grace_s=30).exit_code == 0 and not path.exists()


PAGE = "https://chat.example"
PREFLIGHT = {
    "origin": PAGE,
    "access_control_request_method": "POST",
    "access_control_request_headers": "authorization, content-type, x-stainless-lang",
}


@pytest.mark.parametrize("allowed", [PAGE, "*"])
@pytest.mark.parametrize("key", [KEYS[0], None])
def test_pages_of_allowed_origins_may_ask(allowed: str, key: str | None) -> None:
    given = {} if key is None else {"FASTDECODE_API_KEYS": key}
    bearer = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"prompt": [1], "max_tokens": 1}
    with scripted_server("--allowed-origins", allowed, **given) as server:
        for path in ("/v1/completions", "/v1/models", "/nothing/here"):
            status, headers, _ = server.ask("OPTIONS", path, **PREFLIGHT)
            assert status == 200, "a preflight has no key"
            assert headers["access-control-allow-origin"] == allowed
            assert "POST" in headers["access-control-allow-methods"]
            assert "x-stainless-lang" in headers["access-control-allow-headers"]
        status, headers, _ = server.ask("POST", "/v1/completions", body, origin=PAGE, **bearer)
        assert (status, headers["access-control-allow-origin"]) == (200, allowed)
        assert headers["access-control-expose-headers"] == "x-request-id"
        status, headers, _ = server.ask("POST", "/v1/completions", {}, origin=PAGE, **bearer)
        assert status == 400 and "access-control-allow-origin" in headers, "a page sees errors"
        if key is not None:
            status, headers, _ = server.ask("GET", "/v1/models", origin=PAGE)
            assert status == 401 and "access-control-allow-origin" in headers
        if allowed != "*":
            other = {**PREFLIGHT, "origin": "https://other.example"}
            status, headers, _ = server.ask("OPTIONS", "/v1/completions", **other)
            assert status == 400 and "access-control-allow-origin" not in headers
            status, headers, _ = server.ask("GET", "/version", origin=other["origin"], **bearer)
            assert "access-control-allow-origin" not in headers
            assert status == (403 if key is None else 200)


def test_without_allowed_origins_no_page_of_another_site_may_ask() -> None:
    with scripted_server() as server:
        assert server.ask("OPTIONS", "/v1/completions", **PREFLIGHT)[0] == 403
        status, headers, raw = server.ask("GET", "/v1/models", origin=PAGE)
        assert status == 403 and b"--allowed-origins" in raw
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "origin", ["https://chat.example/", "chat.example", '["*"]', "", "http://"]
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="allowed_origins"):
        ServeOptions(allowed_origins=(origin,))


SECRET = "secret-key-0001"


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (f"{SECRET}\nsecond-key-002\n", SECRET),
        (f"# ours\n\n  {SECRET}  \n", SECRET),
        (f"{SECRET}\r\nsecond-key-002\r\n", SECRET),
        (SECRET, SECRET),
        ("k\n", "k"),
    ],
)
def test_a_client_sends_the_first_key_of_the_file(content: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(content.encode())
    assert first_key(tmp_path / "keys") == key


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (f"{SECRET} second-key-002\n", "has a space"),
        (f"{SECRET}é\n", "isn't printable ASCII"),
        (f"{SECRET}\x00\n", "isn't printable ASCII"),
        ("# none\n", "has no key in it"),
        ("", "has no key in it"),
    ],
)
def test_a_file_without_a_key_that_can_be_sent_is_refused(
    content: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_bytes(content.encode())
    with pytest.raises(ConfigError, match=why) as caught:
        first_key(tmp_path / "keys")
    assert "secret" not in str(caught.value)


def test_top_takes_the_servers_own_file_of_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / KEY_FILE
    file.touch(mode=0o600)
    file.write_text("# ours\n" + "\n".join(KEYS) + "\n")
    with scripted_server("--api-key-file", str(file)) as server:
        server.job.wait_until(lambda: "listening" in server.job.output())
        assert main(["top", server.url, "--once", "--api-key-file", str(file)]) == 0
    said = capsys.readouterr()
    assert all(key not in said.out + said.err for key in KEYS)


@pytest.mark.parametrize(
    "words",
    [
        ["top", "http://localhost:1", "--once", "--api-key-file", SECRET],
        ["top", f"http://user:{SECRET}@localhost:1", "--once"],
        ["serve", str(CHECKPOINT), "--api-key-file", SECRET],
        ["serve", str(CHECKPOINT), "--api-key", SECRET],
        ["bench-serve", "--base-url", f"http://{SECRET}@localhost:1"],
        ["generate", "m", "--input", "/dev/null", "--output", "/dev/null", "--key", SECRET * 3],
        ["doctor", "--r-worker", "tcp://127.0.0.1:1", "--key", (SECRET * 3)[:40]],
        ["r-worker", "--bind", "tcp://127.0.0.1:0", "--key", (SECRET * 3)[:40]],
    ],
)
def test_no_command_shows_a_key_that_was_misplaced(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert main(words) != 0
    said = capsys.readouterr()
    said_in_all = said.out + said.err
    assert said_in_all and SECRET not in said_in_all


def test_bench_serve_shows_no_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["bench-serve", "--model", "m", "--requests", "2", "--base-url"]
    monkeypatch.setenv("OPENAI_API_KEY", f"{SECRET}\nsecond-key-002")
    assert main([*load, "http://localhost:1"]) == 2
    assert "OPENAI_API_KEY has a space, or a character" in capsys.readouterr().err

    async def refused() -> str:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            body = json.dumps({"error": f"no such key: {SECRET}"}).encode()
            head = f"HTTP/1.1 401 No\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(ConfigError) as caught:
                await Endpoint(f"http://127.0.0.1:{port}", SECRET).model()
        return str(caught.value)

    told = asyncio.run(refused())
    assert SECRET not in told and "(the key)" in told
