"""An S3 server (moto) in a thread of the tests, whose network can be cut in the middle of a transfer."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any


class ObjectStore:
    """The server. ``cut("GET", "rows")`` breaks the next GET of a path with that word in it, half-way.

    ``cut("PUT", "rows", how=503)`` answers with that status, ``how="slow"`` after a second.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        from moto.moto_server.werkzeug_app import (
            DomainDispatcherApplication,
            MotoRequestHandler,
            create_backend_app,
        )
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)  # not a line a request
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._cuts: list[tuple[str, str, str | int]] = []
        self.broken: list[str] = []  # what was cut
        self._server = make_server(host, 0, self, True, request_handler=MotoRequestHandler)
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://{host}:{self._server.server_address[1]}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def cut(self, method: str, word: str, times: int = 1, how: str | int = "half") -> None:
        """Break the next transfers."""
        self._cuts += [(method, word, how)] * times

    def mend(self) -> None:
        """Break nothing more."""
        self._cuts.clear()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        for planned in self._cuts:
            if planned[0] == method and planned[1] in path:
                self._cuts.remove(planned)
                self.broken.append(path)
                if planned[2] == "half":
                    return self._half(environ, start_response)
                if planned[2] == "slow":
                    time.sleep(1)
                    break
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start_response(f"{planned[2]} Out of order", [])
                return []
        return self._moto(environ, start_response)

    def _half(self, environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        connection: socket.socket = environ["werkzeug.socket"]
        if environ["REQUEST_METHOD"] == "GET":
            body = b"".join(self._moto(environ, start_response))
            yield body[: len(body) // 2]
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0) // 2)
        connection.shutdown(socket.SHUT_RDWR)

    def bucket(self, name: str) -> str:
        """Make a bucket; returns its URL."""
        import boto3

        os.environ.update(self.environment)
        boto3.client("s3").create_bucket(Bucket=name)
        return f"s3://{name}"

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
