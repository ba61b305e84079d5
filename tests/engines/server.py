"""A small server of the completions protocol, as vLLM and SGLang speak it, which samples by a function given to it."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# (parameters' folder, request) -> ids and log-probabilities
Sample = Callable[[str, dict[str, Any]], tuple[list[int], list[float]]]


class Server:
    """Serves on a port of this machine until it is stopped.

    Attributes:
      url: of it.
      asked: requests so far, as (path, body).
      tamper: what may spoil an answer: (number of the completion, from 0, answer) -> answer as JSON or bytes, an HTTP
        status, or None to hang up.
    """

    def __init__(self, sample: Sample, decode: Callable[[list[int]], str], eos_ids: tuple[int, ...], port: int = 0):
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.tamper: Callable[[int, Any], Any] = lambda number, answer: answer
        self.folder, self.adapters, self.models = "", {}, ["the-model"]
        self._sample, self._decode, self._eos_ids = sample, decode, eos_ids
        self._count, self._lock = 0, threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer({"object": "list", "data": [{"id": name} for name in outer.models]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.answer(outer.reply(self.path, body))

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
            def handle_error(self, *_):  # the client may have gone
                pass

        self._server = Quiet(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self):
        self._server.shutdown()
        self._server.server_close()

    def completions(self):
        return [body for path, body in self.asked if path == "/v1/completions"]

    def reply(self, path: str, body: dict[str, Any]) -> Any:
        with self._lock:
            self.asked.append((path, body))
            if path == "/v1/completions":
                number, self._count = self._count, self._count + 1
                return self.tamper(number, self.complete(body))
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self.folder = body["kwargs"]["weights_path"]
            return {"results": [None]}
        if path == "/update_weights_from_disk":
            self.folder = body["model_path"]
            return {"success": True, "message": "Succeeded to update model weights."}
        if path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
            self.adapters[body["lora_name"]] = body["lora_path"]
            return b"Success: LoRA adapter added successfully."
        if path in ("/v1/unload_lora_adapter", "/unload_lora_adapter"):
            del self.adapters[body["lora_name"]]
            return b"Success"
        return {} if path == "/reset_prefix_cache" else 404

    def complete(self, body: dict[str, Any]) -> Any:
        adapter = body.get("lora_path") or body["model"]
        if adapter != "the-model" and adapter not in self.adapters:
            return 404
        ids, logprobs = self._sample(self.adapters.get(adapter, self.folder), body)
        choice = {
            "index": 0,
            "text": self._decode([i for i in ids if i not in self._eos_ids]),
            "token_ids": ids,
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": logprobs, "tokens": [f"token_id:{i}" for i in ids]},
            "finish_reason": "stop" if ids[-1] in self._eos_ids else "length",
        }
        return {"object": "text_completion", "model": body["model"], "choices": [choice]}
