"""Aim's web page for this machine's own browser, behind a guard.

Aim answers every web site that a browser has open, and its search can read the environment. Here other sites
are refused, the page answers to its own names only, and its processes see no variable of the user.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from podtune.run.aim.repository import aim_folder
from podtune.run.errors import Unavailable

if TYPE_CHECKING:
    from fastapi import FastAPI

LOCAL = ("localhost", "127.0.0.1")
KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH")

Message = MutableMapping[str, Any]
App = Callable[[Message, Any, Any], Awaitable[None]]


def serve(repo: Path, host: str, port: int, names: Iterable[str] = ()) -> NoReturn:
    """Become the page's process, without this one's environment and working directory.

    Raises:
        Unavailable: the port is taken, or the address is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise Unavailable(
            f"the page cannot listen there: {error.strerror or error}",
            where=f"{host}:{port}",
            fix="give another --port (0 takes a free one), or end the process that has it",
        ) from None
    listener.set_inheritable(True)
    print(f"Open http://{host}:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    environment |= {"PYTHONSAFEPATH": "1", "AIM_UI_TELEMETRY_ENABLED": "0"}
    words = ["-m", "podtune.run.aim.ui", str(repo.resolve()), str(listener.fileno()), *LOCAL, *names]
    os.chdir(aim_folder())
    os.execve(sys.executable, [sys.executable, *words], environment)


class OwnPageOnly:
    """Refuses requests that another web site makes in the same browser."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        from starlette.responses import PlainTextResponse

        headers = {key.decode(): value.decode("latin-1") for key, value in scope.get("headers", [])}
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
        foreign = origin is not None and urlsplit(origin).netloc != headers.get("host")
        # a link to the page may be followed, a request to its API may not come from elsewhere
        of_api = scope.get("path", "").startswith("/api")
        followed = headers.get("sec-fetch-mode") == "navigate" and not of_api
        if foreign or (site not in ("same-origin", "none") and not followed):
            await PlainTextResponse("only this page's own requests are answered", 403)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def app(hosts: Sequence[str]) -> FastAPI:
    """Aim's application under the names ``hosts``, without its permission for every origin."""
    from aim.web.api import create_app
    from starlette.middleware.cors import CORSMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    page: FastAPI = create_app()
    page.user_middleware = [each for each in page.user_middleware if each.cls is not CORSMiddleware]  # type: ignore[comparison-overlap]
    page.add_middleware(OwnPageOnly)
    page.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    return page


def main() -> None:
    """Do in one process what ``aim up`` does: upgrade the database, look after the index, serve the page.

    ``aim up`` has uvicorn in processes of its own, which outlive it.
    """
    import uvicorn
    from aim.cli.utils import build_db_upgrade_command, exec_cmd
    from aim.sdk.index_manager import RepoIndexManager
    from aim.sdk.repo import Repo
    from aim.sdk.run_status_manager import RunStatusManager
    from aim.web.configs import AIM_UI_MOUNTED_REPO_PATH

    path, listener, *hosts = sys.argv[1:]
    repo = Repo.from_path(path)
    os.environ[AIM_UI_MOUNTED_REPO_PATH] = repo.path
    exec_cmd(build_db_upgrade_command(), stream_output=True)
    RepoIndexManager.get_index_manager(repo).start()
    RunStatusManager(repo).start()
    page = uvicorn.Server(uvicorn.Config(app(hosts), log_level="warning", timeout_graceful_shutdown=3))
    page.run(sockets=[socket.socket(fileno=int(listener))])


if __name__ == "__main__":
    main()
