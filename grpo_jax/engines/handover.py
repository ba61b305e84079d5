"""How parameters get to a server, and how it shows that it holds them. Each way is functions, as data.

The trainer writes parameters to a folder whose name is their version. vLLM's weights are loaded while it is paused, and
its cache of prompts is emptied before it resumes. `engines.worker` makes vLLM load them by a class of ours, which also
packs a tied head again and keeps the version next to the parameters. Adapters are loaded under the version as a name.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

from grpo_jax.engines.completions import Complete, ScoredText, score_prompt
from grpo_jax.engines.http import KEY, Connections, Failure, Gone, Refused, ask, decode_answer
from grpo_jax.errors import Interruption
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.params.tree import Adapted

COMPLETIONS = "/v1/completions"
SOON = 30.0  # seconds for an answer that needs no computation
_DENIED, _NOT_FOUND, _FAILED = (401, 403), 404, 500
_CURES = {
    "lora_adapter": "start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora, and set engine_folder to "
    "a folder that both see",
    "/v1": "start it as docs/engines.md says",
    "": "start vLLM with VLLM_SERVER_DEV_MODE=1, as docs/engines.md says",
}


@dataclass(eq=False)
class Server:
    """A server, and the parameters that it holds."""

    url: str
    kind: str  # "vllm" or "sglang"
    timeout: float  # seconds for one answer
    model: str = ""  # its name for the model that it was started with
    # the versions of the parameters that it was proven to hold, the newest last: one, or several adapters
    versions: list[str] = field(default_factory=list)
    answers: bool = True  # false after a request in vain
    has_worker: bool | None = None  # true if it runs `engines.worker`; None: unknown
    loading: Any = field(default_factory=threading.Lock)  # held while it loads parameters
    waiting: Connections = field(default_factory=WeakSet)

    @property
    def version(self) -> str:
        """The newest version that it holds; "": unknown."""
        return self.versions[-1] if self.versions else ""

    def forget(self) -> None:
        """Forgets what the server holds, since it may have been started again."""
        self.versions, self.has_worker = [], None

    def ask(self, path: str, body: Any = None) -> bytes:
        """Sends a request and returns the answer.

        Raises:
          Gone: The server does not answer now.
          Interruption: It refuses the request. The message says what to change.
        """
        timeout = min(self.timeout, SOON) if body is None else self.timeout
        try:
            return ask(self.url + path, body, timeout=timeout, waiting=self.waiting)
        except Refused as error:
            if error.code == _NOT_FOUND and path == COMPLETIONS and _names_adapter(self, body):
                raise Gone(str(error)) from None  # it was started again, and has no adapters
            raise Interruption(f"the engine at {self.url} refuses {path} ({error}): {cure_of(path, error)}") from None

    def read(self, path: str, body: Any = None) -> Any:
        """Sends a request and returns the answer as parsed JSON; None for other texts. Raises as `ask` does."""
        answer = self.ask(path, body)
        with suppress(ValueError):
            return decode_answer(answer)
        return None


def _names_adapter(server: Server, body: Mapping[str, Any]) -> bool:
    return "lora_path" in body or body["model"] != server.model


def cure_of(path: str, error: Failure) -> str:
    """Returns what to change after a server refused a request."""
    if error.code in _DENIED:
        return f"set the variable {KEY} to the server's key"
    return next(words for part, words in _CURES.items() if part in path)


class Handover(NamedTuple):
    """A way of handing parameters over, as five functions, and the fields of requests that name the parameters."""

    # (server, version) -> true if the server holds this version; None: it does not say
    holds: Callable[[Server, str], bool | None]
    # (server, folder) -> None, once the server has loaded the folder
    send: Callable[[Server, Path], None]
    # (server, version) -> None, once the server samples again
    finish: Callable[[Server, str], None]
    # (complete, sample, text, whether it is enough to score the text) -> texts that the server scored, from which it
    # follows which parameters it holds: tokens that `sample(complete)` lets it sample, and perhaps the text
    proof: Callable[[Complete, Callable[[Complete], ScoredText], list[int], bool], list[ScoredText]]
    # (server, version) -> fields of a request
    fields: Callable[[Server, str], Mapping[str, Any]]
    # (server, version) -> None, once the server forgot this older version. None: it holds one version at a time
    unload: Callable[[Server, str], None] | None = None

    def complete(self, server: Server, version: str, body: Mapping[str, Any]) -> bytes:
        """Sends a request for a completion with a version of the parameters."""
        return server.ask(COMPLETIONS, {**self.fields(server, version), **body})


# ---- proofs


Sample = Callable[[Complete], ScoredText]


def _prove_both(complete: Complete, sample: Sample, text: list[int], is_enough: bool) -> list[ScoredText]:
    # Sampling comes first, since scoring a prompt would fill the cache with it again.
    sampled = [] if is_enough else [sample(complete)]
    return [score_prompt(complete, text), *sampled]


def _prove_sampled(complete: Complete, sample: Sample, text: list[int], is_enough: bool) -> list[ScoredText]:
    return [sample(complete)]


# ---- weights in a folder


def _is_version(server: Server, version: str) -> bool:
    return _field(server.read("/weight_info"), "weight_version") == version


def _reload(server: Server, folder: Path) -> None:
    _load(server, folder, {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})


def _load(server: Server, folder: Path, body: dict[str, Any]) -> Any:
    server.ask("/pause?mode=abort", {})
    try:
        return server.read("/collective_rpc", body)
    except Gone as error:
        if error.code != _FAILED:
            raise
        raise Interruption(
            f"the engine at {server.url} failed to load {folder} ({error}): it must see this folder, so set "
            "engine_folder to one that both see, and start the server again"
        ) from None


def _reopen(server: Server, version: str) -> None:
    server.ask("/reset_prefix_cache", {})
    server.ask("/update_weight_version", {"new_version": version})
    server.ask("/resume", {})


def _name_model(server: Server, version: str) -> dict[str, Any]:
    # Otherwise vLLM also ends a completion at the end token that transformers' defaults give the family.
    return {"model": server.model, "ignore_eos": True}


def _field(answer: Any, name: str) -> Any:
    return answer.get(name) if isinstance(answer, dict) else None


VLLM = Handover(_is_version, _reload, _reopen, _prove_both, _name_model)


# ---- weights in a folder, through `engines.worker`


def _workers_hold(server: Server, version: str) -> bool:
    return {version} == set(_field(server.read("/collective_rpc", {"method": "policy_version"}), "results") or ())


def _load_policy(server: Server, folder: Path) -> None:
    reasons = _field(_load(server, folder, {"method": "load_policy", "kwargs": {"folder": str(folder)}}), "results")
    if any(reasons or ()):
        server.ask("/resume", {})
        raise Interruption(
            f"the engine at {server.url} loads no parameters ({max(reasons)}): set engine_folder to a folder that it "
            "sees under the same path"
        )


VLLM_WORKER = VLLM._replace(holds=_workers_hold, send=_load_policy)


# ---- adapters


def _lists_adapter(server: Server, version: str) -> bool:
    models = _field(server.read("/v1/models"), "data") or ()
    return version in [_field(model, "id") for model in models]


def _load_adapter(root: str, server: Server, folder: Path) -> None:
    server.ask(f"{root}/load_lora_adapter", {"lora_name": folder.name, "lora_path": str(folder)})


def _unload_adapter(root: str, server: Server, version: str) -> None:
    with suppress(Gone, Interruption):  # a restarted server does not know it
        server.ask(f"{root}/unload_lora_adapter", {"lora_name": version})


def _says_nothing(server: Server, version: str) -> None:
    return None


VLLM_ADAPTERS = Handover(
    _lists_adapter,
    partial(_load_adapter, "/v1"),
    _says_nothing,
    _prove_both,
    lambda server, version: _name_model(server, version) | {"model": version},
    partial(_unload_adapter, "/v1"),
)


# ---- SGLang


def _update_from_disk(server: Server, folder: Path) -> None:
    answer = server.read("/update_weights_from_disk", {"model_path": str(folder)})
    if _field(answer, "success") is False:
        raise Interruption(
            f"the engine at {server.url} does not load parameters ({answer.get('message', 'it does not say why')}): "
            f"it must see {folder.parent} under the same path: set engine_folder to a folder that both see"
        )


SGLANG = Handover(
    _says_nothing,
    _update_from_disk,
    _says_nothing,
    _prove_sampled,
    lambda server, version: {"model": server.model},
)
SGLANG_ADAPTERS = Handover(
    _says_nothing,
    partial(_load_adapter, ""),
    _says_nothing,
    _prove_sampled,
    lambda server, version: {"model": server.model, "lora_path": version},
    partial(_unload_adapter, ""),
)


# ---- the way of a server


def handover_of(server: Server, params: Params) -> Handover:
    """Returns the way to hand parameters over, or adapters if there are any.

    Raises:
      Gone: The server does not answer, so that it is unknown if it runs our class of workers.
    """
    if isinstance(params, Adapted):
        return VLLM_ADAPTERS if server.kind == "vllm" else SGLANG_ADAPTERS
    if server.kind == "vllm" and server.has_worker is None:
        try:
            server.ask("/collective_rpc", {"method": "policy_version"})
            server.has_worker = True
        except Gone as error:
            if error.code != _FAILED:
                raise
            server.has_worker = False
    return SGLANG if server.kind == "sglang" else VLLM_WORKER if server.has_worker else VLLM
