"""Aim's web page for this machine's own browser: ``aim up`` behind a guard.

Aim answers every web site that a browser has open, and its search can read the environment. Here other sites
are refused, the page answers to its own names only, and its processes see no variable of the user.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

HOSTS = "PODTUNE_AIM_UI_HOSTS"
LOCAL = ("localhost", "127.0.0.1")
KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH")

Message = MutableMapping[str, Any]
App = Callable[[Message, Any, Any], Awaitable[None]]


def serve(repo: Path, host: str, port: int, names: Iterable[str] = ()) -> NoReturn:
    """Become the page's process, without this one's environment and working directory."""
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    environment |= {"PYTHONSAFEPATH": "1", "AIM_UI_TELEMETRY_ENABLED": "0"}
    environment[HOSTS] = ",".join([*LOCAL, *names])
    words = ["-m", "podtune.run.aim.ui", "--repo", str(repo.resolve()), "--host", host, "--port", str(port)]
    os.chdir("/")  # uvicorn imports from where it is started
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


def app() -> Any:
    """Aim's application without its permission for every origin; what uvicorn serves."""
    from aim.web.api import create_app
    from starlette.middleware.cors import CORSMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    page = create_app()
    page.user_middleware = [each for each in page.user_middleware if each.cls is not CORSMiddleware]
    page.add_middleware(OwnPageOnly)
    page.add_middleware(TrustedHostMiddleware, allowed_hosts=os.environ[HOSTS].split(","))
    return page


def main() -> None:
    """``aim up``, which upgrades its database and looks after its index, with the application above."""
    from aim.cli.up import commands

    of_aim = commands.build_uvicorn_command
    commands.build_uvicorn_command = lambda _, **options: [
        *of_aim("podtune.run.aim.ui:app", **options),
        "--factory",
    ]
    commands.up()


if __name__ == "__main__":
    main()
