"""The completions protocol with token ids and log-probabilities: what is asked, and what of an answer is believed.

POST /v1/completions takes the prompt as token ids. Nothing is encoded or decoded on the way: what is learned from is
what was sampled. In the public code and documentation of both servers (November 2026; neither was run):

- `return_token_ids` gives a choice `token_ids` and `prompt_token_ids`: vLLM from 0.10.2, SGLang of 2026.
- `logprobs` 0 gives `token_logprobs` of the sampled tokens alone.
- vLLM's log-probabilities are those before temperature, penalties and truncation (`--logprobs-mode raw_logprobs`, its
  default); with `processed_logprobs` those after them. SGLang's are those after temperature and before truncation,
  unless its environment sets `SGLANG_RETURN_ORIGINAL_LOGPROB`.
- `seed` is of the request in vLLM. SGLang heeds it with `--enable-deterministic-inference` alone.
- What a request leaves out, vLLM takes from the model's generation_config.json.
"""

import http.client
import json
import math
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

_ROUNDING = 1e-3  # by which a log-probability may be above 0


class Wrong(Exception):
    """An answer is wrong. The text continues a sentence that begins with "the engine"."""


def request_body(
    prompt: list[int], *, temperature: float, seed: int, max_tokens: int, eos_ids: Sequence[int]
) -> dict[str, Any]:
    """Returns the request for a completion, without its model.

    A completion is a request of its own, with a seed of its own: one that fails is asked for again alone, and gives
    what it would have given. The server keeps the prompt that it shares with others of its group.
    """
    return {
        "prompt": prompt,
        "n": 1,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "stop_token_ids": list(eos_ids),
        "logprobs": 0,  # of the sampled token alone
        "return_token_ids": True,
        # Named, for a server takes what is not from the model's generation_config.json.
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def read_completion(answer: bytes, body: Mapping[str, Any], vocab_size: int) -> tuple[list[int], list[float]]:
    """Returns the completion in an answer, if all that can be checked of it is right.

    Args:
      answer: of the server.
      body: the request.
      vocab_size: of the model.

    Returns:
      Its tokens, with the one that ended it, and the log-probability of each after temperature.

    Raises:
      Wrong: the first thing that is not right.
    """
    choice = _choice(answer)
    logprobs = choice.get("logprobs") or {}
    if (ids := choice.get("token_ids")) is None:
        raise Wrong("gave no token ids: it needs a version that knows return_token_ids")
    _check_ids(ids, vocab_size, body["stop_token_ids"], body["max_tokens"])
    seen, prompt = choice.get("prompt_token_ids"), body["prompt"]
    if seen is not None and seen != prompt:
        raise Wrong(f"completed another prompt, of {len(seen)} tokens in place of {len(prompt)}")
    return ids, _checked_logprobs(logprobs.get("token_logprobs"), len(ids))


def _choice(answer: bytes) -> dict[str, Any]:
    """The only completion in an answer."""
    try:
        choices = json.loads(answer)["choices"]
        count = len(choices)
        choice = dict(choices[0]) if count == 1 else {}
        dict(choice.get("logprobs") or {})
    except (ValueError, TypeError, LookupError, RecursionError):
        raise Wrong("gave an answer that is not of the completions protocol") from None
    if count != 1:
        raise Wrong(f"gave {count} completions where one was asked for")
    return choice


def _check_ids(ids: Any, vocab_size: int, eos_ids: Sequence[int], max_tokens: int) -> None:
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise Wrong("gave a completion without tokens")
    if wrong := [i for i in ids if not 0 <= i < vocab_size]:
        raise Wrong(f"gave token {wrong[0]}, but the model has the tokens 0 to {vocab_size - 1}")
    if len(ids) > max_tokens:
        raise Wrong(f"gave {len(ids)} tokens where at most {max_tokens} were asked for")
    ends = [place for place, i in enumerate(ids) if i in eos_ids]
    if ends and ends[0] != len(ids) - 1:
        raise Wrong(f"went on after token {ids[ends[0]]}, which ends a completion here")
    if not ends and len(ids) < max_tokens:
        raise Wrong(
            f"ended a completion after {len(ids)} of {max_tokens} tokens by token {ids[-1]}, which ends none "
            "here: it may have less room for prompt and completion, or other tokens that end one"
        )


def _checked_logprobs(values: Any, count: int) -> list[float]:
    if not isinstance(values, list) or len(values) != count:
        num_values = len(values) if isinstance(values, list) else "no"
        raise Wrong(f"gave {num_values} log-probabilities for {count} tokens")
    for value in values:
        if type(value) not in (int, float) or not -math.inf < value <= _ROUNDING:
            raise Wrong(f"gave {value} for a log-probability")
    return [float(value) for value in values]


# A key that the server asks for.
KEY = "ENGINE_API_KEY"

_PASSING = {408, 425, 429}
_SERVERS_FAULT = 500
_LONGEST_MESSAGE = 300

# Not by a proxy, whatever the environment says: an engine is on the network of the trainer.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Gone(Exception):
    """There is no answer now, but there may be one later."""


class Refused(Exception):
    """The server answers, and refuses; asking again would not help.

    Attributes:
      code: the status; 0 where the address is none.
    """

    def __init__(self, words: str, code: int = 0) -> None:
        super().__init__(words)
        self.code = code


def ask(url: str, body: Any = None, *, timeout: float) -> bytes:
    """Asks a server and returns its answer.

    Args:
      url: of the resource.
      body: sent as JSON by POST; None: the resource is read by GET.
      timeout: seconds without a byte.

    Raises:
      Gone: it does not answer, or says that it cannot now.
      Refused: it says that it does not know such a request.
    """
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        if key := os.environ.get(KEY):
            request.add_unredirected_header("Authorization", f"Bearer {key}")  # a redirect may lead to another server
        with _OPENER.open(request, timeout=timeout) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        message = f"{error.code} {error.reason}: {_message(error)}"
        if error.code in _PASSING or error.code >= _SERVERS_FAULT:
            raise Gone(message) from None
        raise Refused(message, error.code) from None
    except TimeoutError:
        raise Gone(f"nothing came for {timeout:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise Gone(_one_line(getattr(error, "reason", "") or error)) from None
    except ValueError as error:
        raise Refused(f"{url} is no address, such as http://host:8000 ({_one_line(error)})") from None


def _message(error: urllib.error.HTTPError) -> str:
    """Returns a server's words about an error: the message of its JSON, or the beginning of its page."""
    try:
        text = error.read(2**16).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return ""
    try:
        document = json.loads(text)
        error = document.get("error", document)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        pass
    return _one_line(text)


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:_LONGEST_MESSAGE]
