"""A server in memory to which the real wandb sends runs with a history.

It has only the part of wandb's interface that such runs need. It keeps the lines of a run's history at the offsets that
wandb gives them, and answers GraphQL by the query's name.
"""

import gzip
import json
import math
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "someone"


class WandbServer:
    """Runs by id, each with the lines of its history."""

    def __init__(self) -> None:
        self.histories: dict[str, list[dict[str, Any]]] = {}
        self.deleted: list[str] = []
        #: How many more lines of history it takes. It refuses all others with 400.
        self.lines_left = math.inf
        self.unknown: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                self.reply({})

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                raw = gzip.decompress(raw) if self.headers.get("Content-Encoding") == "gzip" else raw
                if self.path.startswith("/graphql"):
                    self.reply({"data": server.query(json.loads(raw))})
                elif self.path.endswith("/file_stream"):
                    # The run's id is the last but one part of the path.
                    is_taken = server.take(self.path.split("/")[-2], json.loads(raw))
                    self.reply({}, 200 if is_taken else 400)
                else:
                    self.reply({})

            do_PUT = do_POST

            def reply(self, content: Any, code: int = 200) -> None:
                body = json.dumps(content).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def points(self, run: str) -> dict[tuple[int, str], float]:
        """Return the values of a run; each step may be there once."""
        found: dict[tuple[int, str], float] = {}
        for row in self.histories[run]:
            for tag, value in row.items():
                if not tag.startswith("_"):
                    assert (row["_step"], tag) not in found, "a step was sent twice"
                    found[row["_step"], tag] = float(value)
        return found

    def take(self, run: str, content: dict[str, Any]) -> bool:
        """Write lines of history at their offset, as the real server does. False if it takes no more."""
        part = content.get("files", {}).get("wandb-history.jsonl")
        if part is None:
            return True
        history, rows = self.histories[run], [json.loads(line) for line in part["content"]]
        if len(rows) > self.lines_left:
            rows = rows[: int(self.lines_left)]
            self.lines_left = 0
            history[part["offset"] : part["offset"] + len(rows)] = rows
            return False
        self.lines_left -= len(rows)
        history[part["offset"] : part["offset"] + len(rows)] = rows
        return True

    def query(self, request: dict[str, Any]) -> dict[str, Any]:
        text, values = request["query"], request.get("variables") or {}
        name = re.search(r"(?:query|mutation)\s+(\w+)", text)[1]
        run = values.get("name") or values.get("run") or ""
        project = {
            "id": "p",
            "name": values.get("project"),
            "entity": {"id": "e", "name": ENTITY},
            "entityName": ENTITY,
        }
        # The names are those of the queries that wandb's client sends.
        if name in ("Viewer", "GetViewer", "GetDefaultEntity"):
            return {
                "viewer": {
                    "id": "v",
                    "entity": ENTITY,
                    "username": ENTITY,
                    "email": "",
                    "flags": "{}",
                    "teams": {"edges": []},
                }
            }
        if name == "RunResumeStatus":
            return {"model": {**project, "bucket": self._bucket(run) if run in self.histories else None}}
        if name == "UpsertBucket":
            is_new = run not in self.histories
            assert run not in self.deleted, "the id of a deleted run is taken no more"
            self.histories.setdefault(run, [])
            return {"upsertBucket": {"bucket": {**self._bucket(run), "project": project}, "inserted": is_new}}
        if name == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.address}/upload"} for file in values["files"]]
            return {"createRunFiles": {"runID": run, "uploadHeaders": [], "files": files}}
        if name in ("Run", "RunHistoryKeys"):
            found = self._bucket(run) if run in self.histories else None
            return {"project": {**project, "internalId": "1", "run": found}}
        if name == "DeleteRun":
            run = values["id"]
            del self.histories[run]
            self.deleted.append(run)
            return {"deleteRun": {"clientMutationId": None}}
        self.unknown.append(f"{name} {values}")
        return {}

    def _bucket(self, run: str) -> dict[str, Any]:
        history = self.histories[run]
        return {
            "id": run,
            "name": run,
            "displayName": run,
            "description": None,
            "config": "{}",
            "sweepName": None,
            "summaryMetrics": json.dumps(history[-1] if history else {}),
            "logLineCount": 0,
            "eventsLineCount": 0,
            "historyLineCount": len(history),
            "historyTail": json.dumps([json.dumps(row) for row in history[-1:]]),
            "eventsTail": "[]",
            "tags": [],
            "notes": None,
            "wandbConfig": "{}",
            "state": "finished",
            "createdAt": "2026-11-24T00:00:00",
            "heartbeatAt": "2026-11-24T00:00:00",
            "updatedAt": "2026-11-24T00:00:00",
            "historyKeys": {"lastStep": history[-1]["_step"] if history else -1, "keys": {}},
            "user": {"name": ENTITY, "username": ENTITY},
            "projectId": "1",
            "internalId": "1",
        }
