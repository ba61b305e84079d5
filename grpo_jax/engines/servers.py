"""Servers that sample with the trainer's parameters: who gets which request, and what happens when one fails.

A rollout is a list of requests, which `Engine.submit` answers. Each server first gets the parameters, and proves that
it holds them. Each group goes to one server, chosen by the group's number, since a server keeps the prompt that its
completions share. The groups of a server that fails go to the others. A request has its own seed, so the completions
do not depend on which server samples them.
"""

import shutil
import tempfile
import time
import uuid
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.config import EngineOptions
from grpo_jax.engines.completions import SampledTokens, ScoredText, Wrong, score_sampled
from grpo_jax.engines.handover import SOON, Handover, Server, handover_of
from grpo_jax.engines.http import KEY, Failure, Gone, ask, decode_answer
from grpo_jax.errors import Interruption, UsageError, lacking, user_path
from grpo_jax.models.config import Dtype
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.params.tree import Adapted

_AT_ONCE = 256  # concurrent requests to a server, which batches them
_PAUSE = 5.0  # seconds between attempts to reach a server
_PROOF_TOKENS, _PROOF_WIDTH = 8, 32  # that are sampled, and that are scored if there is room

# The largest average difference in nats between log-probabilities of the trainer and of a server that holds its
# parameters. In bfloat16 it is the median, since some tokens are off by several nats.
_BOUNDS: Mapping[Dtype, tuple[Callable[..., Any], float]] = {"float32": (np.mean, 1e-3), "bfloat16": (np.median, 0.1)}


class Request(NamedTuple):
    """A request for a completion."""

    group: int  # the number of its group
    body: Mapping[str, Any]  # from `request_body`


class Parcel(NamedTuple):
    """Parameters in a folder, which servers load."""

    params: Params
    folder: Path

    @property
    def version(self) -> str:
        """The name of the folder."""
        return self.folder.name


class Engine:
    """One or more servers that sample with the trainer's parameters."""

    def __init__(
        self,
        options: EngineOptions,
        *,
        save: Callable[[Path, Params], Any],
        score: Callable[[Params, list[int], float], np.ndarray],
        read: Callable[[bytes, Mapping[str, Any]], SampledTokens],
        dtype: Dtype,
        temperature: float = 1.0,
        note: Callable[[str], None] = lambda words: None,
    ) -> None:
        """Connects to the servers.

        Args:
          options: The options of the engine, with its addresses.
          save: (folder, parameters) -> None, once the folder holds them; only the adapters if there are any.
          score: (parameters, ids, temperature) -> the log-probabilities of all tokens after the first.
          read: (answer, request) -> the completion: see `read_completion`.
          dtype: The dtype of the trained model.
          temperature: The temperature of the run, at which servers prove that they hold the parameters.
          note: Tells the user the reason for a delay.

        Raises:
          UsageError: No server answers, or an address has no server of the protocol.
        """
        self._timeout = options.engine_timeout
        self._dtype: Dtype = dtype if options.engine_dtype == "auto" else options.engine_dtype
        self._average, self.rounding = _BOUNDS[self._dtype]
        self._save_params, self._score, self._read = save, score, read
        self._temperature, self._note = temperature, note
        self._temporary = None if options.engine_folder else tempfile.TemporaryDirectory(prefix="grpo_jax_engine_")
        self._folder = user_path(self._temporary.name if self._temporary else options.engine_folder).absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._temporary:
            self._folder.chmod(0o755)  # the server may run as another user
        self._written: list[Any] = []  # weak references to the arrays in the folder of the parcel
        self._parameters: Path | None = None  # the folder of the last parcel
        self._proof: tuple[Callable[..., ScoredText], list[int]] | None = None  # see `Handover.proof`
        self._rollouts = ThreadPoolExecutor(1)
        self._servers = [self._server_at(url, options.engine_kind) for url in options.engine]
        silent: list[Gone] = []
        for server in self._servers:
            try:
                self._connect(server)
            except Gone as error:
                silent.append(error)
        if len(silent) == len(self._servers):
            raise UsageError(str(silent[0]))
        for failure in silent:
            note(f"{failure}; until then the other servers sample")

    def _server_at(self, url: str, kind: str) -> Server:
        if "@" in url:  # the address is not repeated
            raise UsageError(
                f"an address in engine holds a user or a password: leave it out, and set the variable {KEY}"
            )
        return Server(url.rstrip("/").removesuffix("/v1"), kind, self._timeout)

    def _connect(self, server: Server) -> None:
        """Asks a server for the name of its model.

        Raises:
          Gone: It does not answer now.
          UsageError: It is no server of the protocol, or refuses the request.
        """
        try:
            models = decode_answer(ask(f"{server.url}/v1/models", timeout=min(self._timeout, SOON)))
            server.model = str(models["data"][0]["id"])
        except (Failure, ValueError, LookupError, TypeError) as error:
            raise (Gone if isinstance(error, Gone) else UsageError)(
                f"no engine that serves /v1/models answers at {server.url} ({error}): start it, or correct the option "
                f"engine, its address, or the variable {KEY}, its key"
            ) from None

    # ---- rollouts

    def submit(self, params: Params, requests: Sequence[Request]) -> "Future[list[SampledTokens]]":
        """Begins to sample completions with these parameters.

        A server that does not answer is asked again, and loads the parameters again if it was restarted.

        Args:
          params: The parameters of the policy.
          requests: The requests.

        Returns:
          The future tokens of the completions and their log-probabilities, in the order of the requests. It raises an
          Interruption if no server answers within the timeout, or one refuses a request, gives a wrong answer or does
          not hold the parameters.
        """
        if self._proof is None:
            prompt = max((request.body["prompt"] for request in requests), key=len)
            max_tokens = requests[0].body["max_tokens"]
            # The average over a short prompt would be noise in bfloat16.
            size = max(len(prompt), min(_PROOF_WIDTH, len(prompt) + max_tokens - 1))
            text = (prompt * _PROOF_WIDTH)[:size]
            sample = partial(
                score_sampled,
                read=self._read,
                prompt=prompt,
                temperature=self._temperature,
                count=min(_PROOF_TOKENS, max_tokens),
            )
            self._proof = sample, text
        return self._rollouts.submit(self._complete, self._write(params), requests)

    def _complete(self, parcel: Parcel, requests: Sequence[Request]) -> list[SampledTokens]:
        answers: dict[int, SampledTokens] = {}
        failures: dict[Server, Gone] = {}  # of the servers that were asked in vain since the last pause
        gone_since: float | None = None  # when the first request failed after the last completion
        while missing := [place for place in range(len(requests)) if place not in answers]:
            if len(failures) == len(self._servers):
                gone_since = gone_since or time.monotonic()
                if time.monotonic() - gone_since >= self._timeout:
                    server, last = failures.popitem()
                    raise Interruption(
                        f"the engine at {server.url} has not answered for {self._timeout:g} s ({last}), with "
                        f"{len(missing)} of {len(requests)} completions missing: start it again"
                    )
                time.sleep(min(_PAUSE, self._timeout))
                failures.clear()
            shares = self._divide(requests, missing, failures)
            with ThreadPoolExecutor(len(shares)) as pool:
                draws = {server: pool.submit(self._draw, server, parcel, requests, shares[server]) for server in shares}
            for server, draw in draws.items():
                sampled, error = draw.result()
                if error:
                    failures[server] = error
                    if server.answers:  # it is told once
                        self._note(f"the engine at {server.url} does not answer ({error}): it is asked again")
                server.answers = error is None
                gone_since = None if sampled else gone_since
                answers |= sampled
        return [answers[place] for place in range(len(requests))]

    def _divide(
        self, requests: Sequence[Request], missing: list[int], failures: Mapping[Server, Gone]
    ) -> Mapping[Server, list[int]]:
        """Returns the places of each server's requests. A group goes to its own server, unless that failed."""
        ready = [server for server in self._servers if server not in failures]
        shares = defaultdict(list)
        for place in missing:
            group = requests[place].group
            first = self._servers[group % len(self._servers)]
            shares[first if first in ready else ready[group % len(ready)]].append(place)
        return shares

    def _draw(
        self, server: Server, parcel: Parcel, requests: Sequence[Request], places: list[int]
    ) -> tuple[dict[int, SampledTokens], Gone | None]:
        """Samples completions with one server, by place, all of them with these parameters. Also returns its failure.

        Raises:
          Interruption: See `submit`.
        """
        try:
            if not server.model:
                self._connect(server)
            handover = handover_of(server, parcel.params)
            self._load(server, handover, parcel)
            sampled, failure = self._ask_all(server, handover, parcel.version, requests, places)
            holds = handover.holds(server, parcel.version)
            if failure and not holds:
                server.forget()
            return (sampled, failure) if holds is not False else ({}, Gone("it was started again"))
        except Gone as error:
            server.forget()
            return {}, error

    def _ask_all(
        self, server: Server, handover: Handover, version: str, requests: Sequence[Request], places: list[int]
    ) -> tuple[dict[int, SampledTokens], Gone | None]:
        """Sends requests concurrently. After a failure, no further requests begin. Also returns the failure."""

        def ask_for(place: int) -> SampledTokens:
            body = requests[place].body
            try:
                answer = handover.complete(server, version, body)
                return self._read(answer, body)
            except Wrong as error:
                raise Interruption(f"the engine at {server.url} {error}: nothing was learned from it") from None

        with ThreadPoolExecutor(min(_AT_ONCE, len(places))) as pool:
            draws = {place: pool.submit(ask_for, place) for place in places}
            wait(draws.values(), return_when=FIRST_EXCEPTION)
            pool.shutdown(cancel_futures=True)
        ended = {place: draw for place, draw in draws.items() if not draw.cancelled()}
        errors = [error for draw in ended.values() if (error := draw.exception())]
        for error in errors:
            if not isinstance(error, Gone):
                raise error
        sampled = {place: draw.result() for place, draw in ended.items() if not draw.exception()}
        return sampled, next((error for error in errors if isinstance(error, Gone)), None)

    # ---- parameters

    def _write(self, params: Params) -> Parcel:
        """Writes parameters to a new folder, and deletes the previous one, unless it holds these parameters."""
        leaves = jax.tree.leaves(params)
        known = [x() for x in self._written]
        if len(known) != len(leaves) or any(x is not y for x, y in zip(known, leaves, strict=True)):
            if self._parameters:
                shutil.rmtree(self._parameters, ignore_errors=True)
            self._parameters = self._save("parameters", params)
            self._written = [weakref.ref(x) for x in leaves]
        assert self._parameters
        return Parcel(params, self._parameters)

    def _save(self, name: str, params: Params) -> Path:
        folder = self._folder / f"{name}-{uuid.uuid4().hex[:12]}"
        try:
            self._save_params(folder, params)
        except OSError as error:
            raise Interruption(f"{self._folder} cannot take parameters ({lacking(error) or error})") from None
        return folder

    def _load(self, server: Server, handover: Handover, parcel: Parcel) -> None:
        """Makes a server load parameters, unless it holds them.

        Raises:
          Interruption: It does not load them.
        """
        if server.version and handover.holds(server, server.version) is False:
            server.forget()  # it was started again
        if server.version == parcel.version:
            return
        if isinstance(parcel.params, Adapted) and not server.version:
            self._load_base(server, parcel.params.base)
        self._hand_over(server, handover, parcel)
        server.version = parcel.version

    def _load_base(self, server: Server, base: Params) -> None:
        """Makes a server load the base of adapters, unless it holds it."""
        handover = handover_of(server, base)
        if not self._difference(server, handover, base, ""):
            return
        parcel = Parcel(base, self._save("base", base))
        try:
            self._hand_over(server, handover, parcel)
        finally:
            shutil.rmtree(parcel.folder, ignore_errors=True)

    def _hand_over(self, server: Server, handover: Handover, parcel: Parcel) -> None:
        """Makes a server load parameters, and raises if it does not hold them then."""
        handover.send(server, parcel.folder)
        handover.finish(server, parcel.version)
        if handover.holds(server, parcel.version) is False:
            raise Interruption(
                f"the engine at {server.url} was told to load {parcel.version}, and does not hold it: something "
                "between it and the trainer drops requests"
            )
        if difference := self._difference(server, handover, parcel.params, parcel.version):
            raise Interruption(f"the engine at {server.url} does not sample from the policy: {difference}")

    def _difference(self, server: Server, handover: Handover, params: Params, version: str) -> str:
        """Returns how log-probabilities of a server and of the trainer differ, with likely causes; "" if they agree."""
        assert self._proof
        try:
            texts = handover.proof(partial(handover.complete, server, version), *self._proof)
        except Wrong as error:
            raise Interruption(f"the engine at {server.url} {error}") from None
        for text in texts:
            scores = self._score(params, text.ids, text.temperature)[-len(text.logprobs) :]
            difference = self._average(np.abs(scores - text.logprobs)) if text.logprobs else 0.0
            if not difference <= self.rounding:
                return (
                    f"its log-probabilities of {text.name} differ from the trainer's by {difference:.2g} nats a token, "
                    f"where {self.rounding:g} is possible in {self._dtype}: {text.causes}"
                )
        return ""
