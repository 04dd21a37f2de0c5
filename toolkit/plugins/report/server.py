"""The web server of `toolkit serve`: pages for one user, on a machine that many share.

Other users of the machine can reach its port, and web pages that the user visits can make a browser send requests to
it. So a request is answered only with the token of this start, to this machine's own name, and from no other page.
What it may ask for, and how large, how many and how long requests are, is bounded. Nothing is ever changed.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import socket
from collections.abc import Callable, Mapping

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from toolkit.base import logs
from toolkit.base.errors import RequestError, ToolkitError
from toolkit.base.process_limits import limits
from toolkit.files import rundir
from toolkit.files.rundir import RunDir
from toolkit.plugins.report import page
from toolkit.plugins.report.live import MOST_RUNS, SUPERVISOR, LiveRuns, log_piece

#: Also the only name that a request may use. A browser tries ::1 first for `localhost`, where another user may listen
#: at the same port, and sends a cookie of `localhost` to all that is opened by this name, another user's pages too.
HOST = "127.0.0.1"
COOKIE = "toolkit-serve"
#: Longest address and head of a request, and most connections at a time.
MOST_URL_BYTES, MOST_HEAD_BYTES, MOST_CONNECTIONS = 4096, 16384, 64
HEADERS = {
    # Only the page's own files are loaded and run, even if a text of a run were not escaped.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
    "connection": "close",  # so that the time of a connection bounds that of a request
}

log = logs.get(__name__)


class Guard:
    """Refuses each request that the user's own browser did not send to this start of the server."""

    def __init__(self, app: ASGIApp, token: str, folder: str) -> None:
        self._app = app
        self._token = token.encode()
        # A cookie goes to every port of its host, and to its folder alone. Who listens at another port cannot name it.
        self._folder = f"/{folder}/"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            await send(message)

        answer = self._answer(Request(scope)) if scope["type"] == "http" else PlainTextResponse("", 400)
        await (answer or self._app)(scope, receive, send_with_headers)

    def _answer(self, request: Request) -> Response | None:
        """Return the refusal, or the answer to the first request; None for a request of this server's pages."""
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("this page is read-only", 405, {"allow": "GET, HEAD"})
        if len(request.scope["raw_path"]) + len(request.scope["query_string"]) > MOST_URL_BYTES:
            return PlainTextResponse("the address is too long", 414)
        if sum(len(name) + len(value) for name, value in request.headers.raw) > MOST_HEAD_BYTES:
            return PlainTextResponse("the head is too long", 431)
        if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
            return PlainTextResponse("a request cannot have a body here", 413)
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or hosts[0].partition(":")[0] != HOST:
            return PlainTextResponse("this is not a name of this server", 421)
        origins = request.headers.getlist("origin")
        if any(origin != f"http://{hosts[0]}" for origin in origins):
            return PlainTextResponse("requests from another page are refused", 403)
        if "token" in request.query_params:
            if not self._is_token(request.query_params["token"]):
                return PlainTextResponse("the token is not that of this start of toolkit serve", 403)
            # The address without the token is what a browser remembers and shows.
            answer = RedirectResponse(self._folder, 303)
            answer.set_cookie(
                COOKIE, request.query_params["token"], path=self._folder, httponly=True, samesite="strict"
            )
            return answer
        if not self._is_token(request.cookies.get(COOKIE, "")):
            return PlainTextResponse("open the address that toolkit serve has printed: it holds a token", 403)
        if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return PlainTextResponse("requests from another page are refused", 403)
        return None

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self._token)


class BoundedProtocol(H11Protocol):
    """A connection that is closed after a time, whatever the other side does: one that says nothing would hold it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        self.loop.call_later(limits().page_request_s, transport.abort)


class Pages:
    """The pages by address. Each answers in a thread; what a request names is looked up, and never part of a path."""

    def __init__(self, runs: LiveRuns) -> None:
        self._runs = runs

    def routes(self) -> list[Route]:
        pages: Mapping[str, Callable[[Request], Response]] = {
            "/": self.table,
            "/runs": self.of_runs,
            "/log": self.log,
            "/page.css": lambda _: Response(page.asset("page.css"), media_type="text/css"),
            "/page.js": lambda _: Response(page.asset("page.js"), media_type="text/javascript"),
        }
        return [Route(path, _answering(answer)) for path, answer in pages.items()]

    def table(self, request: Request) -> Response:
        query = request.query_params
        asked = page.TableRequest(
            name=query.get("name", ""),
            unfinished=bool(query.get("unfinished")),
            page=max(1, _number(query.get("page", "1"))),
            sort=query.get("sort", ""),
            sweep=query.get("sweep", ""),
        )
        table = self._runs.table(asked.name, asked.unfinished, asked.page, asked.sort, asked.sweep)
        return HTMLResponse(page.table_page(table, asked, str(rundir.runs_root()), MOST_RUNS))

    def of_runs(self, request: Request) -> Response:
        titles = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 1 <= len(titles) <= MOST_RUNS:
            raise RequestError(f"select 1 to {MOST_RUNS} runs, not {len(titles)}")
        facts, unreadable = self._runs.facts([self._run(title) for title in titles])
        return HTMLResponse(page.live_page(facts, unreadable, request.query_params.get("metric", "")))

    def log(self, request: Request) -> Response:
        query = request.query_params
        name = query.get("log", "0")
        if name != SUPERVISOR:
            _number(name)
        at, attempt = _number(query.get("at", "-1")), _number(query.get("attempt", "0"))
        return JSONResponse(log_piece(self._run(query.get("run", "")), name, attempt, at))

    def _run(self, title: str) -> RunDir:
        run = self._runs.find(title)
        if run is None:
            raise RequestError("there is no such run below this folder for runs, as far as it can be read")
        return run


def _answering(answer: Callable[[Request], Response]) -> Callable[[Request], Response]:
    """Return ``answer`` with an error as a text. It is not a traceback: that may hold what is not for a page."""

    def answered(request: Request) -> Response:
        try:
            return answer(request)
        except RequestError as error:
            return PlainTextResponse(str(error), 404)
        except (ToolkitError, OSError) as error:
            log.warning("%s: %s", request.url.path, error)
            return PlainTextResponse(f"the runs cannot be read: {error}", 503)

    return answered


def _number(text: str) -> int:
    """Return a number of the address. Raises RequestError."""
    if not re.fullmatch("-?[0-9]{1,15}", text):
        raise RequestError("the address has something else where a number belongs")
    return int(text)


class PageServer:
    """The server of one start: its port is bound, and its token drawn."""

    def __init__(self, runs: LiveRuns, port: int = 0) -> None:
        """Bind a port of this machine, by default one that is free. Raises RequestError for one that is taken."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((HOST, port))
            self._socket.listen()  # so a browser that is fast waits, and is not refused
        except (OSError, OverflowError) as error:
            self._socket.close()
            raise RequestError(f"--port {port}: {error}; leave it out for a free one") from None
        self.port = self._socket.getsockname()[1]
        token = secrets.token_urlsafe(32)
        self.url = f"http://{HOST}:{self.port}/?token={token}"
        folder = secrets.token_urlsafe(16)
        middleware = [Middleware(Guard, token=token, folder=folder), Middleware(GZipMiddleware)]
        config = uvicorn.Config(
            Starlette(routes=[Mount(f"/{folder}", routes=Pages(runs).routes())], middleware=middleware),
            http=BoundedProtocol,
            h11_max_incomplete_event_size=MOST_HEAD_BYTES,
            timeout_graceful_shutdown=1,
            ws="none",
            lifespan="off",
            proxy_headers=False,  # no other machine's address is believed
            server_header=False,
            access_log=False,
            log_config=None,
        )
        # Others of this machine can send what is no request, each with a line in the user's terminal.
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        self.server = uvicorn.Server(config)

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM."""
        self.server.run(sockets=[self._socket])
