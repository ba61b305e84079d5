"""The completions protocol with token ids and log-probabilities: requests, and checks of their answers.

POST /v1/completions takes the prompt as token ids. Nothing is encoded or decoded, so the policy trains on exactly the
sampled tokens. We ran vLLM 0.32. For SGLang we rely on its public code and documentation (November 2026):

- `return_token_ids` adds `token_ids` and `prompt_token_ids` to a choice: vLLM from 0.10.2, SGLang of 2026.
- `logprobs` 0 returns `token_logprobs` of only the sampled tokens.
- vLLM returns log-probabilities before temperature, penalties and truncation (`--logprobs-mode raw_logprobs`, its
  default), or after them with `processed_logprobs`. SGLang returns them after temperature and before truncation, unless
  its environment sets `SGLANG_RETURN_ORIGINAL_LOGPROB`.
- `seed` applies to the request in vLLM. SGLang uses it only with `--enable-deterministic-inference`.
- vLLM takes options that a request leaves out from the model's generation_config.json.
- `ignore_eos` leaves only the `stop_token_ids` in vLLM. In SGLang it leaves none.
- `prompt_logprobs` (vLLM) scores the prompt, at temperature 1.
- `stop` ends a completion after the token whose text completes one of the texts, and the tokens include it. A server
  that decodes several tokens at once may give further tokens, which are dropped here. `include_stop_str_in_output`
  (vLLM) and `no_stop_trim` (SGLang) keep the text in the answer. With `skip_special_tokens` a server would look for
  the texts in a text without special tokens, which is not the text that rewards read.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from grpo_jax.engines.http import decode_answer, without_key
from grpo_jax.errors import abbreviate
from grpo_jax.sampling.stopping import Stop

_ROUNDING = 1e-3  # a log-probability may exceed 0 by this much
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError)


SampledTokens = tuple[list[int], list[float]]  # tokens and their log-probabilities


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
    limits: Mapping[str, float] = {},
) -> dict[str, Any]:
    """Returns the request for a completion, without the name of the model.

    `limits` has the fields `top_p`, `top_k` and `min_p`, which by default do nothing.

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
        **limits,
    }


def read_completion(answer: bytes, body: Mapping[str, Any], vocab_size: int, stop: Stop | None = None) -> SampledTokens:
    """Checks an answer and returns its completion.

    Args:
      answer: The answer of the server.
      body: The request.
      vocab_size: The size of the model's vocabulary.
      stop: The stop texts of all requests that have such texts, or None.

    Returns:
      The tokens of the completion, with the token that ended it, and the log-probability of each as the server returns
      it.

    Raises:
      Wrong: A check failed.
    """
    try:
        (choice,) = decode_answer(answer)["choices"]
        ids, seen = [operator.index(i) for i in choice["token_ids"]], choice.get("prompt_token_ids")
        logprobs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
    except _UNREADABLE as error:
        raise Wrong(
            f"gave no completion with token ids and log-probabilities ({without_key(error)}): it needs a version that "
            "knows return_token_ids"
        ) from None
    if not len(ids) == len(logprobs) > 0 or not all(-math.inf < value <= _ROUNDING for value in logprobs):
        raise Wrong(f"gave {len(ids)} tokens with the log-probabilities {abbreviate(logprobs)}")
    if wrong := [i for i in ids if not 0 <= i < vocab_size]:
        raise Wrong(f"gave token {wrong[0]}, but the model has the tokens 0 to {vocab_size - 1}")
    stopped = stop.find_end(ids) if stop and "stop" in body else None
    if stopped is not None:
        ids, logprobs = ids[: stopped + 1], logprobs[: stopped + 1]
    _check_end(ids, body["stop_token_ids"], body["max_tokens"], stopped is not None)
    if seen is not None and seen != body["prompt"]:
        raise Wrong(f"completed another prompt, {abbreviate(seen)} instead of {abbreviate(body['prompt'])}")
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


# ---- texts that both the server and the trainer score


_OTHER_WEIGHTS = (
    "it may hold another model, compute in another dtype (start it with --dtype float32, or name its dtype with "
    "engine_dtype), or have kept an old tied head (start vLLM with --worker-extension-cls "
    "grpo_jax.engines.worker.PolicyWorker)"
)
OTHER_SAMPLING = (
    "it may report them before temperature and truncation: start vLLM with --logprobs-mode processed_logprobs, and "
    "SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
)


class ScoredText(NamedTuple):
    """A text, and the log-probabilities of its last tokens at a temperature."""

    ids: list[int]
    logprobs: list[float]
    temperature: float
    name: str  # of these tokens
    causes: str  # what to change if other log-probabilities were expected


Complete = Callable[[Mapping[str, Any]], bytes]  # sends a request for a completion, and returns the answer


def score_sampled(
    complete: Complete,
    *,
    read: Callable[[bytes, Mapping[str, Any]], SampledTokens],
    prompt: list[int],
    temperature: float,
    count: int,
) -> ScoredText:
    """Lets a server sample tokens, whose log-probabilities show how it processes them.

    Args:
      complete: Sends a request.
      read: (answer, request) -> the completion.
      prompt: The tokens of the prompt.
      temperature: The temperature.
      count: The number of tokens to sample.

    Raises:
      Wrong: The answer is no completion.
    """
    body = request_body(prompt, temperature=temperature, seed=0, max_tokens=count, eos_ids=()) | {"ignore_eos": True}
    ids, logprobs = read(complete(body), body)
    return ScoredText(prompt + ids, logprobs, temperature, "sampled tokens", OTHER_SAMPLING)


def score_prompt(complete: Complete, prompt: list[int]) -> ScoredText:
    """Lets a server score a prompt, whose log-probabilities show which parameters it holds.

    Raises:
      Wrong: The answer has no such log-probabilities.
    """
    body = request_body(prompt, temperature=1.0, seed=0, max_tokens=1, eos_ids=()) | {"prompt_logprobs": 0}
    try:
        (choice,) = decode_answer(complete(body))["choices"]
        tokens = zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
        logprobs = [float(candidates[str(i)]["logprob"]) for i, candidates in tokens]
    except _UNREADABLE as error:
        raise Wrong(
            f"gave no log-probabilities of a prompt ({without_key(error)}): it needs vLLM 0.32 or later"
        ) from None
    return ScoredText(prompt, logprobs, 1.0, "a prompt", _OTHER_WEIGHTS)
