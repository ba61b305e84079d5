"""The completions protocol with token ids and log-probabilities: requests, and checks of their answers.

POST /v1/completions takes the prompt as token ids. Nothing is encoded or decoded, so the policy trains on exactly the
sampled tokens. According to the public code and documentation of both servers (November 2026; we ran neither):

- `return_token_ids` adds `token_ids` and `prompt_token_ids` to a choice: vLLM from 0.10.2, SGLang of 2026.
- `logprobs` 0 returns `token_logprobs` of only the sampled tokens.
- vLLM returns log-probabilities before temperature, penalties and truncation (`--logprobs-mode raw_logprobs`, its
  default), or after them with `processed_logprobs`. SGLang returns them after temperature and before truncation, unless
  its environment sets `SGLANG_RETURN_ORIGINAL_LOGPROB`.
- `seed` applies to the request in vLLM. SGLang uses it only with `--enable-deterministic-inference`.
- vLLM takes options that a request leaves out from the model's generation_config.json.
- `stop` ends a completion after the token whose text completes one of the texts, and the tokens include it. A server
  that decodes several tokens at once may give further tokens, which are dropped here. `include_stop_str_in_output`
  (vLLM) and `no_stop_trim` (SGLang) keep the text in the answer. With `skip_special_tokens` a server would look for
  the texts in a text without special tokens, which is not the text that rewards read.
"""

import http.client
import json
import math
import operator
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from grpo_jax.errors import abbreviate
from grpo_jax.sampling.stopping import Stop

_ROUNDING = 1e-3  # a log-probability may exceed 0 by this much


class Wrong(Exception):
    """A wrong answer. The message continues a sentence that begins with "the engine"."""


def request_body(
    prompt: list[int],
    *,
    temperature: float,
    seed: int,
    max_tokens: int,
    eos_ids: Sequence[int],
    stop: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns the request for a completion, without the name of the model.

    Each completion is a separate request with its own seed, so that a failed request can be repeated with the same
    result. The server caches the prompt that the completions of a group share.
    """
    keeps = {"include_stop_str_in_output": True, "no_stop_trim": True, "skip_special_tokens": False}
    return ({"stop": list(stop), **keeps} if stop else {}) | {
        "prompt": prompt,
        "n": 1,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "stop_token_ids": list(eos_ids),
        "logprobs": 0,  # only of the sampled token
        "return_token_ids": True,
        # These are set because their defaults come from the model's generation_config.json.
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def read_completion(
    answer: bytes, body: Mapping[str, Any], vocab_size: int, stop: Stop | None = None
) -> tuple[list[int], list[float]]:
    """Checks an answer and returns its completion.

    Args:
      answer: The answer of the server.
      body: The request.
      vocab_size: The size of the model's vocabulary.
      stop: The stop texts of the request, or None.

    Returns:
      The tokens of the completion, with the token that ended it, and the log-probability of each as the server returns
      it.

    Raises:
      Wrong: A check failed.
    """
    try:
        (choice,) = json.loads(answer)["choices"]
        ids, seen = [operator.index(i) for i in choice["token_ids"]], choice.get("prompt_token_ids")
        logprobs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise Wrong(
            f"gave no completion with token ids and log-probabilities ({_one_line(error)}): it needs a version that "
            "knows return_token_ids"
        ) from None
    if not len(ids) == len(logprobs) > 0 or not all(-math.inf < value <= _ROUNDING for value in logprobs):
        raise Wrong(f"gave {len(ids)} tokens with the log-probabilities {abbreviate(logprobs)}")
    if wrong := [i for i in ids if not 0 <= i < vocab_size]:
        raise Wrong(f"gave token {wrong[0]}, but the model has the tokens 0 to {vocab_size - 1}")
    stopped = stop.find_end(ids) if stop else None
    if stopped is not None:
        ids, logprobs = ids[: stopped + 1], logprobs[: stopped + 1]
    _check_end(ids, body["stop_token_ids"], body["max_tokens"], stopped is not None)
    if seen is not None and seen != body["prompt"]:
        raise Wrong(f"completed another prompt, of {len(seen)} tokens in place of {len(body['prompt'])}")
    return ids, logprobs


def _check_end(ids: list[int], eos_ids: Sequence[int], max_tokens: int, is_stopped: bool) -> None:
    if len(ids) > max_tokens:
        raise Wrong(f"gave {len(ids)} tokens where at most {max_tokens} were asked for")
    ends = [place for place, i in enumerate(ids) if i in eos_ids]
    if ends and ends[0] != len(ids) - 1:
        raise Wrong(f"went on after token {ids[ends[0]]}, which ends a completion here")
    if not ends and not is_stopped and len(ids) < max_tokens:
        raise Wrong(
            f"ended a completion after {len(ids)} of {max_tokens} tokens by token {ids[-1]}, which ends none "
            "here: it may have less room for prompt and completion, or other tokens that end one"
        )


# The environment variable with the server's key.
KEY = "ENGINE_API_KEY"

_PASSING = {408, 425, 429}
_SERVERS_FAULT = 500
_LONGEST_MESSAGE = 300
_LONGEST_ANSWER = 2**25  # bytes; a token takes about a hundred
_LONGEST_ERROR = 2**16

# Ignores proxies of the environment, since an engine is on the trainer's network.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Gone(Exception):
    """The server does not answer now, but may answer later."""


class Refused(Exception):
    """The server refuses a request, so that repeating it would not help.

    Attributes:
      code: The HTTP status; 0 if the address is invalid.
    """

    def __init__(self, words: str, code: int = 0) -> None:
        super().__init__(words)
        self.code = code


def ask(url: str, body: Any = None, *, timeout: float) -> bytes:
    """Sends a request to a server and returns the answer.

    Args:
      url: The address of the resource.
      body: The body to POST as JSON. None: a GET request.
      timeout: Seconds to wait for the answer. An answer that has begun may end up to as many seconds later.

    Raises:
      Gone: The server does not answer in time, or answers that it cannot now.
      Refused: The server rejects the request or answers endlessly, or the address or the key is invalid.
    """
    data, ends, key = None if body is None else json.dumps(body).encode(), time.monotonic() + timeout, _key()
    if not (key.isascii() and key.isprintable()):
        raise Refused(f"{KEY} holds a line break or another character that no key has: set it again")
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        if key:
            request.add_unredirected_header("Authorization", f"Bearer {key}")  # a redirect may lead to another server
        with _OPENER.open(request, timeout=timeout) as answer:
            data = _read(answer, _LONGEST_ANSWER, ends)
    except urllib.error.HTTPError as error:
        reason = b""
        with suppress(OSError, http.client.HTTPException):
            reason = _read(error, _LONGEST_ERROR, ends)
        message = _one_line(f"{error.code} {error.reason}: {reason.decode(errors='replace')}")
        if error.code in _PASSING or error.code >= _SERVERS_FAULT:
            raise Gone(message) from None
        raise Refused(message, error.code) from None
    except TimeoutError:
        raise Gone(f"no answer came within {timeout:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise Gone(_one_line(getattr(error, "reason", "") or error)) from None
    except ValueError as error:
        raise Refused(f"{url} is no address, such as http://host:8000 ({_one_line(error)})") from None
    if len(data) > _LONGEST_ANSWER:
        raise Refused(f"its answer has more than {_LONGEST_ANSWER} bytes")
    return data


def _read(answer: Any, most: int, ends: float) -> bytes:
    """Reads an answer of at most `most` bytes; longer ones only in part. Raises TimeoutError after the time `ends`."""
    data = bytearray()
    while len(data) <= most and (block := answer.read1(2**16)):
        data += block
        if time.monotonic() > ends:
            raise TimeoutError
    if len(data) <= most and answer.length:  # read1 does not notice that a connection broke
        raise http.client.IncompleteRead(bytes(data), answer.length)
    return bytes(data)


def _key() -> str:
    """Returns the server's key, or "" without one."""
    return os.environ.get(KEY, "").strip()


def _one_line(text: object) -> str:
    """Returns a text in one line, shortened and without the key, which a server may repeat."""
    line, key = " ".join(str(text).split()), _key()
    return (line.replace(key, "***") if key else line)[:_LONGEST_MESSAGE]
