"""A small server of the completions protocol, as vLLM and SGLang speak it, which samples by a function given to it.

vLLM's answers are those that version 0.32 gave.
"""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

# (parameters' folder, request) -> ids and log-probabilities
Sample = Callable[[str, dict[str, Any]], tuple[list[int], list[float]]]
# (parameters' folder, ids, temperature) -> log-probabilities of all ids after the first
Score = Callable[[str, list[int], float], Any]


def constant_score(folder: str, ids: list[int], temperature: float) -> list[float]:
    return [-0.5] * (len(ids) - 1)


INITIAL = "default"  # vLLM's version of the parameters with which it starts
PLAIN_VLLM = 500  # its answer to a method that its workers lack


class Server:
    """Serves on a port of this machine until it is stopped.

    Attributes:
      url: of it.
      asked: requests so far, as (path, body).
      tamper: what may spoil an answer: (number of the completion, from 0, answer) -> answer as JSON or bytes, an HTTP
        status, or None to hang up. Proofs are not counted and not spoiled.
      drops: paths of requests that something on the way answers with success.
      has_worker: true if it runs `grpo_jax.engines.worker`.
    """

    def __init__(
        self,
        sample: Sample,
        decode: Callable[[list[int]], str],
        eos_ids: tuple[int, ...],
        port: int = 0,
        *,
        score: Score = constant_score,
    ):
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.tamper: Callable[[int, Any], Any] = lambda number, answer: answer
        self.drops: set[str] = set()
        self.models, self.has_worker = ["the-model"], False
        self._sample, self._score, self._decode, self._eos_ids = sample, score, decode, eos_ids
        self._count, self._lock = 0, threading.Lock()
        self.restart()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path == "/weight_info":
                    return self.answer({"weight_version": outer.version})
                names = [*outer.models, *outer.adapters] if outer.models else []
                return self.answer({"object": "list", "data": [{"id": name} for name in names]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                try:
                    answer = outer.reply(self.path, body)
                except Exception as error:  # an answer that ends the run, which would ask again if nothing came
                    answer = repr(error).encode()
                    self.send_response(400)
                    self.send_header("Content-Length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)
                    raise
                self.answer(answer)

            def answer(self, answer):
                if answer is None:
                    self.close_connection = True
                    return
                status, answer = (answer, {"error": {"message": "so it is"}}) if type(answer) is int else (200, answer)
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        class Quiet(ThreadingHTTPServer):
            request_queue_size = 256  # a client would try again after a second, or three, or seven

            def handle_error(self, *_):  # the client may have gone
                pass

        self._server = Quiet(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def restart(self):
        """Loses all parameters that were sent."""
        self.folder, self.version, self.worker_version, self.adapters = "", INITIAL, "", {}

    def stop(self):
        self._server.shutdown()
        self._server.server_close()

    def completions(self):
        """Returns the requests for completions that are no proofs."""
        return [body for path, body in self.asked if path == "/v1/completions" and not is_proof(body)]

    def asked_paths(self, path):
        """Returns the bodies of the requests for a path."""
        return [body for asked, body in self.asked if asked == path]

    def loads(self):
        """Returns the folders that it was told to load."""
        bodies = [body for path, body in self.asked if path == "/collective_rpc"]
        return [folder for body in bodies for folder in body.get("kwargs", {}).values()]

    def reply(self, path: str, body: dict[str, Any]) -> Any:
        with self._lock:
            self.asked.append((path, body))
            if path == "/v1/completions":
                if is_proof(body):
                    return self.complete(body)
                number, self._count = self._count, self._count + 1
                return self.tamper(number, self.complete(body))
            if path in self.drops or path in ("/pause?mode=abort", "/resume", "/reset_prefix_cache"):
                return {"success": True}
        if path == "/collective_rpc":
            return self.call_workers(body["method"], **body.get("kwargs", {}))
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return {"success": True, "new_version": self.version}
        if path == "/update_weights_from_disk":
            self.folder = body["model_path"]
            return {"success": True, "message": "Succeeded to update model weights."}
        if path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
            self.adapters[body["lora_name"]] = body["lora_path"]
            return b"Success: LoRA adapter added successfully."
        if path in ("/v1/unload_lora_adapter", "/unload_lora_adapter"):
            return b"Success" if self.adapters.pop(body["lora_name"], None) else 404
        return 404

    def call_workers(self, method: str, weights_path: str = "", folder: str = "") -> Any:
        if method != "reload_weights" and not self.has_worker:
            return PLAIN_VLLM
        if method == "policy_version":
            return {"results": [self.worker_version]}
        if method == "load_policy" and not Path(folder).is_dir():
            return {"results": [f"there is no folder {folder}"]}
        if not Path(weights_path + folder).is_dir():
            return PLAIN_VLLM
        self.folder, self.worker_version = weights_path + folder, Path(folder).name
        return {"results": [None if weights_path else ""]}

    def complete(self, body: dict[str, Any]) -> Any:
        adapter = body.get("lora_path") or body["model"]
        if adapter != "the-model" and adapter not in self.adapters:
            return 404
        folder = self.adapters.get(adapter, self.folder)
        if is_proof(body):
            ids = [0] * body["max_tokens"]
            logprobs = list(map(float, self._score(folder, body["prompt"] + ids, body["temperature"])[-len(ids) :]))
        else:
            ids, logprobs = self._sample(folder, body)
        choice = {
            "index": 0,
            "text": self._decode([i for i in ids if i not in self._eos_ids]),
            "token_ids": ids,
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": logprobs, "tokens": [f"token_id:{i}" for i in ids]},
            "finish_reason": "stop" if ids[-1] in self._eos_ids else "length",
        }
        if "prompt_logprobs" in body:
            scores = zip(body["prompt"][1:], self._score(folder, body["prompt"], 1.0), strict=True)
            choice["prompt_logprobs"] = [None, *({str(i): {"logprob": float(score), "rank": 1}} for i, score in scores)]
        return {"object": "text_completion", "model": body["model"], "choices": [choice]}


class Dropping:
    """Passes requests on to a server, but answers those of a method or path itself, with success.

    Attributes:
      url: of it.
      drops: the method of workers, or the path, of these requests.
    """

    def __init__(self, url: str):
        self.drops = ""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.pass_on(None)

            def do_POST(self):
                self.pass_on(self.rfile.read(int(self.headers["Content-Length"])))

            def pass_on(self, data):
                status, answer = 200, b'{"results": [""]}'
                if outer.drops not in (self.path, json.loads(data or b"{}").get("method")):
                    try:
                        with urlopen(Request(url + self.path, data, {"Content-Type": "application/json"})) as answered:
                            answer = answered.read()
                    except HTTPError as error:
                        status, answer = error.code, error.read()
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self):
        self._server.shutdown()
        self._server.server_close()


def is_proof(body: dict[str, Any]) -> bool:
    """Returns whether a request only shows which parameters a server holds."""
    return "prompt_logprobs" in body or not body["stop_token_ids"]
