"""A sampler that gets its completions from an external engine: a server that loads weights and returns completions."""

import hashlib
import json
import shutil
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from grpo_jax.config import EngineOptions, GRPOConfig
from grpo_jax.data.types import pad_completions
from grpo_jax.devices import sampling_devices, to_devices, to_numpy
from grpo_jax.engines.completions import Gone, Refused, Wrong, ask, read_completion, request_body
from grpo_jax.errors import Interruption, UsageError, lacking, user_path
from grpo_jax.hosts import check_alone
from grpo_jax.models import huggingface, peft
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.models.params import Adapted, check_full_precision
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.transformer import Params
from grpo_jax.rl.interaction import interaction_of
from grpo_jax.rl.source import Sampler
from grpo_jax.sampling.sampler import Completions
from grpo_jax.sampling.stopping import Stop
from grpo_jax.tasks.task import Task

_COMPLETIONS = "/v1/completions"
_NOT_FOUND = 404
_AT_ONCE = 256  # concurrent requests, which the server batches
_SOON = 30.0  # seconds for the first answer of a server
_PAUSE = 5.0  # seconds between attempts to reach a server

SampledTokens = tuple[list[int], list[float]]  # tokens and their log-probabilities


def sampler_of(
    options: EngineOptions, pretrained: Pretrained, task: Task, config: GRPOConfig, *, note: Callable[[str], None]
) -> Sampler:
    """Returns a sampler that sends one request to the engine for each completion.

    Args:
      options: The options of the engine.
      pretrained: The trained model, whose parameters the engine loads.
      task: Supplies the vocabulary.
      config: The configuration of the run.
      note: Tells the user the reason for a delay.

    Raises:
      UsageError: No engine answers, or an engine does not support the run.
    """
    _check(pretrained, task, config)
    rounded = decoder_policy(pretrained.config).rounded

    def save(folder, params: Params) -> None:
        if isinstance(params, Adapted):
            peft.save_adapter(folder, pretrained.config, params, base=str(pretrained.folder))
        else:
            # A server that rounds to the nearest bfloat16 number then has the policy's numbers.
            params = rounded(params) if rounded else params
            huggingface.save_pretrained(folder, params, pretrained.config, source=pretrained.folder)

    engine = Engine(options, save, task.vocab_size, task.stop, note=note)
    devices, max_tokens = sampling_devices(config), config.sampling.max_tokens

    def draw(params, prompts, numbers, temperature, noise) -> Completions:
        ids, mask, numbers, temperature = to_numpy((prompts.tokens.ids, prompts.tokens.mask, numbers, temperature))
        bodies = [
            request_body(
                ids[i][mask[i]].tolist(),
                temperature=float(temperature[i, j]),
                seed=seed_of(noise, numbers[i, j]),
                max_tokens=max_tokens,
                eos_ids=task.eos_ids,
                stop=config.sampling.stop,
            )
            for i, j in np.ndindex(numbers.shape)
        ]
        answers = engine.complete(params, bodies)
        return to_devices(completions_of(answers, numbers.shape, max_tokens, task), devices)

    return Sampler(draw, devices)


def seed_of(noise: np.ndarray, number: int) -> int:
    """Returns the seed of a request, below 2³¹, which every engine accepts.

    Args:
      noise: The (seed, stream, index) of the draw.
      number: The number of the completion.
    """
    digest = hashlib.sha256(",".join(str(int(x)) for x in (*noise, number)).encode()).digest()
    return int.from_bytes(digest[:4]) >> 1


def completions_of(answers: list[SampledTokens], shape: tuple[int, int], max_tokens: int, task: Task) -> Completions:
    """Converts the answers to N·G requests to NumPy arrays, as a sampler returns them.

    Args:
      answers: The answers in the order of `[N, G]`.
      shape: (N, G).
      max_tokens: The most tokens of a completion, T.
      task: Supplies EOS and padding tokens, and stop texts.
    """
    groups = [answers[start : start + shape[1]] for start in range(0, len(answers), shape[1])]
    ids, mask = pad_completions([[completion for completion, _ in group] for group in groups], max_tokens)
    logprobs = np.zeros(ids.shape, np.float32)
    logprobs[mask] = [value for _, values in answers for value in values]
    ended = (np.isin(ids, task.eos_ids) & mask).any(-1)
    if task.stop:
        stopped = [task.stop.find_end(completion) is not None for completion, _ in answers]
        ended |= np.reshape(stopped, shape)
    ids = np.where(mask, ids, task.pad_id).astype(np.int32)
    return Completions(ids, mask, logprobs, None, ~ended)  # type: ignore[arg-type]


def _check(pretrained: Pretrained, task: Task, config: GRPOConfig) -> None:
    """Checks that an engine supports the run, before the first request."""
    check_full_precision(
        pretrained.params, "an engine samples with the original weights, so leave out quantize, or leave out engine"
    )
    if interaction_of(task).parts == "turns":
        raise UsageError("an engine samples no episodes of several turns: leave out engine, or the environment")
    sampling = config.sampling
    if task.stop and task.stop.strips and any(text.startswith(" ") for text in sampling.stop):
        raise UsageError(
            "a stop text begins with a space, which the model's tokenizer drops at the beginning of a text and servers "
            "keep: leave out the space, or leave out engine"
        )
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
        raise UsageError(
            "with top_k, top_p or min_p an engine reports probabilities after truncation, and not those of the "
            "policy: leave them out, or leave out engine"
        )
    check_alone("engines")


# ---- the server


class Engine:
    """A server, and the state of its parameters.

    Attributes:
      model: The server's name for the model.
    """

    def __init__(
        self,
        options: EngineOptions,
        save: Callable[[Path, Params], Any],
        vocab_size: int,
        stop: Stop | None = None,
        *,
        note: Callable[[str], None] = lambda words: None,
    ) -> None:
        """Connects to the server.

        Args:
          options: The options of the engine, with its address.
          save: Writes parameters to a folder that the server loads, or only the adapters if there are any.
          vocab_size: The size of the model's vocabulary.
          stop: The stop texts of all requests, or None.
          note: Tells the user the reason for a delay.

        Raises:
          UsageError: No server of the protocol answers at the address.
        """
        self._url = options.engine.rstrip("/").removesuffix("/v1")
        self._is_vllm, self._timeout = options.engine_kind == "vllm", options.engine_timeout
        self._save, self._note, self._vocab_size, self._stop = save, note, vocab_size, stop
        self._temporary = None if options.engine_folder else tempfile.TemporaryDirectory(prefix="grpo_jax_engine_")
        self._folder = user_path(self._temporary.name if self._temporary else options.engine_folder).absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._temporary:
            self._folder.chmod(0o755)  # the server may run as another user
        self._parameters: Path | None = None  # the folder with the last written parameters
        self._written: list[Any] = []  # weak references to the arrays in this folder
        self._is_told = False  # true if the server has loaded this folder
        self._adapter = ""  # the server's name for the adapters, if there are any
        try:
            models = ask(f"{self._url}/v1/models", timeout=min(self._timeout, _SOON))
            self.model = str(json.loads(models)["data"][0]["id"])
        except (Gone, Refused, ValueError, LookupError, TypeError) as error:
            raise UsageError(
                f"no engine that serves /v1/models answers at {self._url} ({error}): start it, or correct the option "
                "engine, its address"
            ) from None

    def complete(self, params: Params, bodies: Sequence[Mapping[str, Any]]) -> list[SampledTokens]:
        """Samples completions with these parameters, each as tokens and their log-probabilities.

        If the server does not answer, waits for it, sends the parameters again, and repeats the missing requests.

        Args:
          params: The parameters of the policy.
          bodies: Requests from `request_body`.

        Raises:
          Interruption: The server does not answer within its timeout, refuses a request, or gives a wrong answer.
        """
        answers: list[SampledTokens | None] = [None] * len(bodies)
        gone_since, missing = None, len(bodies)
        while True:
            try:
                self._load(params)
                self._fill(answers, bodies)
                return [answer for answer in answers if answer]
            except Gone as error:
                self._is_told = False  # a restarted server has its initial parameters
                left = answers.count(None)
                if gone_since is None or left < missing:
                    gone_since, missing = time.monotonic(), left
                    self._note(f"the engine at {self._url} does not answer ({error}): it is asked again")
                if time.monotonic() - gone_since >= self._timeout:
                    raise Interruption(
                        f"the engine at {self._url} has not answered for {self._timeout:g} s ({error}), with {left} of "
                        f"{len(bodies)} completions missing: start it again"
                    ) from None
                time.sleep(min(_PAUSE, self._timeout))

    def _fill(self, answers: list[SampledTokens | None], bodies: Sequence[Mapping[str, Any]]) -> None:
        """Sends all missing requests concurrently. After a failure, no further requests begin.

        Raises:
          Gone: The server does not answer.
          Interruption: See `complete`.
        """
        failed = threading.Event()

        def attempt(place: int) -> Exception | None:
            try:
                answers[place] = None if failed.is_set() else self._one(bodies[place])
            except (Gone, Interruption) as error:
                failed.set()
                return error
            return None

        missing = [place for place, answer in enumerate(answers) if answer is None]
        with ThreadPoolExecutor(min(_AT_ONCE, len(missing))) as pool:
            errors = [error for error in pool.map(attempt, missing) if error]
        if errors:
            raise next((error for error in errors if isinstance(error, Interruption)), errors[0])

    def _one(self, body: Mapping[str, Any]) -> SampledTokens:
        named = {"model": self.model}
        if self._adapter:
            named = {"model": self._adapter} if self._is_vllm else {"model": self.model, "lora_path": self._adapter}
        try:
            answer = self._post(_COMPLETIONS, {**named, **body})
            return read_completion(answer, body, self._vocab_size, self._stop)
        except Wrong as error:
            raise Interruption(f"the engine at {self._url} {error}: nothing was learned from it") from None

    def _post(self, path: str, body: dict[str, Any]) -> bytes:
        try:
            return ask(self._url + path, body, timeout=self._timeout)
        except Refused as error:
            if error.code == _NOT_FOUND and self._adapter and path == _COMPLETIONS:
                raise Gone(str(error)) from None  # the server was restarted, and has no adapters
            raise Interruption(
                f"the engine at {self._url} refuses {path} ({error}): start it as docs/engines.md says"
            ) from None

    # ---- parameters

    def _load(self, params: Params) -> None:
        """Makes the server load parameters, unless it already has them."""
        leaves = jax.tree.leaves(params)
        known = [x() for x in self._written]
        if len(known) != len(leaves) or any(x is not y for x, y in zip(known, leaves, strict=True)):
            self._write(params)
            self._written, self._is_told = [weakref.ref(x) for x in leaves], False
        if self._is_told:
            return
        if isinstance(params, Adapted):
            self._load_adapter()
        else:
            self._load_weights(str(self._parameters))
        self._is_told = True

    def _write(self, params: Params) -> None:
        """Writes parameters to a folder with a new name, and deletes the previous folder."""
        if self._parameters:
            shutil.rmtree(self._parameters, ignore_errors=True)
        self._parameters = self._folder / f"parameters-{uuid.uuid4().hex[:12]}"
        try:
            self._save(self._parameters, params)
        except OSError as error:
            raise Interruption(f"{self._folder} cannot take parameters ({lacking(error) or error})") from None

    def _load_weights(self, folder: str) -> None:
        if self._is_vllm:
            self._tell("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
            self._tell("/reset_prefix_cache", {})  # it holds keys and values of the previous weights
        else:
            self._tell("/update_weights_from_disk", {"model_path": folder})

    def _load_adapter(self) -> None:
        """Makes the server load adapters under a new name, since it caches prompts by the name of the adapter."""
        before, self._adapter = self._adapter, f"grpo-jax-{uuid.uuid4().hex[:12]}"
        version = "/v1" if self._is_vllm else ""
        self._tell(f"{version}/load_lora_adapter", {"lora_name": self._adapter, "lora_path": str(self._parameters)})
        if before:
            with suppress(Gone, Interruption):  # a restarted server does not know it
                self._post(f"{version}/unload_lora_adapter", {"lora_name": before})

    def _tell(self, path: str, body: dict[str, Any]) -> None:
        """Posts a command to the server, and raises if the answer reports a failure."""
        answer = self._post(path, body)
        try:
            reply = json.loads(answer)
        except ValueError:
            return  # a plain text
        if isinstance(reply, dict) and reply.get("success") is False:
            raise Interruption(
                f"the engine at {self._url} does not load parameters ({reply.get('message', 'it does not say why')}): "
                f"it must see {self._folder} under the same path: set engine_folder to a folder that both see"
            )
