"""Aim's page as podtune serves it, against requests that a browser makes for other web sites, and Aim's
client against a hostile server.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
from support.launch import free_port

from podtune.run.aim.repository import aim_folder, open_repo
from podtune.run.aim.ui import serve
from podtune.run.errors import UNAVAILABLE, UserError

pytestmark = pytest.mark.filterwarnings("ignore")  # of Aim's own dependencies


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, psutil.Process]]:
    """The page of an empty repository, started where somebody left modules; its port and first process."""
    folder, port = tmp_path_factory.mktemp("ui"), free_port()
    with contextlib.chdir(folder):
        (folder / "aim.py").write_text("open(__file__ + '.run', 'w')")
        open_repo("repo")
    assert not (folder / "aim.py.run").exists(), "the migrations imported it"
    (folder / "uvicorn.py").write_text("raise SystemExit('foreign code')")
    command = "import sys; from podtune.cli import main; sys.argv = ['podtune', *sys.argv[1:]]; main()"
    words = [sys.executable, "-P", "-c", command, "aim-ui", "--repo", "repo", "--port", str(port)]
    process = subprocess.Popen(
        words, cwd=folder, env={**os.environ, "MY_API_KEY": "s3cr3t-of-mine"}, start_new_session=True
    )
    deadline = time.monotonic() + 200
    while True:
        try:
            ask(port, "GET", "/")
            break
        except OSError:
            assert process.poll() is None, "the page ended"
            assert time.monotonic() < deadline, "the page does not come up"
            time.sleep(0.2)
    yield port, psutil.Process(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def ask(port: int, method: str, path: str, **headers: str) -> tuple[int, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, headers={key.replace("_", "-"): text for key, text in headers.items()})
    response = connection.getresponse()
    return response.status, {key.lower(): text for key, text in response.getheaders()}


def test_its_own_requests_are_answered(page: tuple[int, psutil.Process]) -> None:
    port, _ = page
    assert ask(port, "GET", "/")[0] == 200
    own = {"Origin": f"http://127.0.0.1:{port}", "Sec_Fetch_Site": "same-origin"}
    status, headers = ask(port, "GET", "/api/projects/", **own)
    assert status == 200
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"},
        {"Sec_Fetch_Site": "same-site"},
        {"Host": "evil.example"},  # a name that was made to resolve to this machine
    ],
)
def test_what_other_sites_ask_is_refused(page: tuple[int, psutil.Process], headers: dict[str, str]) -> None:
    port, _ = page
    for method, path in (("DELETE", "/api/runs/x/"), ("GET", "/api/runs/search/run/"), ("OPTIONS", "/api/")):
        status, answered = ask(port, method, path, **headers)
        assert status in (400, 403), (method, path)
        assert "access-control-allow-origin" not in answered


def test_a_link_to_the_page_can_be_followed(page: tuple[int, psutil.Process]) -> None:
    assert ask(page[0], "GET", "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200


def test_no_process_of_the_page_has_the_users_environment(page: tuple[int, psutil.Process]) -> None:
    for process in (page[1], *page[1].children(recursive=True)):
        assert "s3cr3t-of-mine" not in str(process.environ())
        assert process.cwd() == str(aim_folder())  # not /, where a claim may be mounted at /aim


def test_the_page_ends_with_its_process(page: tuple[int, psutil.Process]) -> None:
    page[1].terminate()
    page[1].wait(30)
    with pytest.raises(OSError):
        ask(page[0], "GET", "/")


def test_a_port_that_is_taken_is_said_and_nothing_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="--port") as caught:
        serve(tmp_path, "127.0.0.1", taken.getsockname()[1])
    assert caught.value.code == UNAVAILABLE
    assert capsys.readouterr().err == ""


def test_an_aim_server_cannot_name_what_its_client_calls(tmp_path: Path) -> None:
    attack = {"module_name": "os", "class_name": "system", "args": json.dumps([f"touch {tmp_path}/PWNED"])}

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = json.dumps({"exception": attack, "message": attack, **attack}).encode()
            self.send_response(400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _answer

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(RuntimeError, match="the Aim server says system"):
            open_repo(f"aim://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert not (tmp_path / "PWNED").exists()
