"""Servers that sample with the trainer's parameters: who gets which request, and what happens when one fails.

A rollout is a list of requests, which `Engine.submit` answers. Each server first gets the parameters, and proves that
it holds them. Each group goes to one server, chosen by the group's number, since a server keeps the prompt that its
completions share. The groups of a server that fails go to the others. A request has its own seed, so the completions
do not depend on which server samples them.

Rollouts may be sampled in threads, alongside training. A server holds one version of the weights, so `Engine.turn` lets
a rollout with the next version begin only when the one before has ended. Adapters have names, so that two versions are
sampled at once.
"""

import shutil
import tempfile
import threading
import time
import uuid
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax import hosts
from grpo_jax.config import EngineOptions
from grpo_jax.data.types import hash_files, hash_values
from grpo_jax.engines.completions import Complete, SampledTokens, ScoredText, Wrong, score_sampled
from grpo_jax.engines.handover import SOON, Handover, Server, handover_of
from grpo_jax.engines.http import KEY, Failure, Gone, ask, cut, decode_answer
from grpo_jax.errors import Interruption, UsageError, lacking, user_path
from grpo_jax.models.config import Dtype
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.params.tree import Adapted
from grpo_jax.rl.beside import NO_JOURNAL, Journal

_AT_ONCE = 256  # concurrent requests to a server, which batches them
_ADAPTERS_AT_ONCE = 2  # rollouts that are sampled at once with adapters
_PAUSE, _LOOKS = 5.0, 50  # seconds between attempts to reach a server, and how often a cancellation is looked for
_KEEP_SECONDS = 0.5  # after which completions that have ended are kept
_PROOF_TOKENS, _PROOF_WIDTH = 8, 32  # that are sampled, and that are scored if there is room

# The largest average difference in nats between log-probabilities of the trainer and of a server that holds its
# parameters. In bfloat16 it is the median, since some tokens are off by several nats.
_BOUNDS: Mapping[Dtype, tuple[Callable[..., Any], float]] = {"float32": (np.mean, 1e-3), "bfloat16": (np.median, 0.1)}


class Request(NamedTuple):
    """A request for a completion."""

    group: int  # the number of its group
    body: Mapping[str, Any]  # from `request_body`
    step: int = 0
    member: int = 0
    turn: int = 1

    @property
    def digest(self) -> str:
        """The digest of the request."""
        return hash_values(self.body)

    def line(self, version: str, tokens: SampledTokens) -> dict[str, Any]:
        """Returns the line of the journal for the answer."""
        places = {"step": self.step, "group": self.group, "member": self.member, "turn": self.turn}
        return {**places, "version": version, "request": self.digest, "ids": tokens[0], "logprobs": tokens[1]}


Refs = list["weakref.ref[Any]"]  # to the leaves of parameters
# Scores of a text by the trainer: a function that waits for the log-probabilities of all tokens after the first
Scores = Callable[[], np.ndarray]
Score = Callable[[ScoredText], Scores | None]


@dataclass(eq=False)
class Parcel:
    """Parameters in a folder, which servers load. It does not keep the arrays in memory, and is needed as long as they
    are."""

    leaves: Refs
    scores: Scores | None = None  # of the text of the proof; None: not computed yet
    folder: Path | None = None  # None: not written yet
    digest: str = ""  # of the files in the folder
    writing: Any = field(default_factory=threading.Lock)

    @property
    def version(self) -> str:
        """The name of the folder."""
        assert self.folder
        return self.folder.name


class Draw(NamedTuple):
    """The completions of one call of `Engine.submit`."""

    params: Params
    parcel: Parcel
    requests: Sequence[Request]
    journal: Journal
    cancelled: threading.Event
    may_score: bool = True  # the trainer may compute scores for it


class Engine:
    """One or more servers that sample with the trainer's parameters."""

    def __init__(
        self,
        options: EngineOptions,
        *,
        save: Callable[[Path, Params], Any],
        score: Callable[[Params, list[int], float], Scores],
        read: Callable[[bytes, Mapping[str, Any]], SampledTokens],
        dtype: Dtype,
        temperature: float = 1.0,
        copy: Callable[[Params], Params] = lambda params: params,
        is_single: bool = True,
        note: Callable[[str], None] = lambda words: None,
    ) -> None:
        """Connects to the servers.

        Args:
          options: The options of the engine, with its addresses.
          save: (folder, parameters) -> None, once the folder holds them; only the adapters if there are any.
          score: (parameters, ids, temperature) -> the trainer's scores of a text.
          read: (answer, request) -> the completion: see `read_completion`.
          dtype: The dtype of the trained model.
          temperature: The temperature of the run, at which servers prove that they hold the parameters.
          copy: Copies those of the parameters that an update may change, without waiting. Default: nothing is copied.
          is_single: True if the program of `score` runs on one device, so that any thread may start it.
          note: Tells the user the reason for a delay.

        Raises:
          UsageError: No server answers, or an address has no server of the protocol.
        """
        self._timeout = options.engine_timeout
        self._dtype: Dtype = dtype if options.engine_dtype == "auto" else options.engine_dtype
        self._average, self.rounding = _BOUNDS[self._dtype]
        self._save_params, self._score, self._read = save, score, read
        self._copy, self._is_single = copy, is_single
        self._temperature, self._note = temperature, note
        self._temporary = None if options.engine_folder else tempfile.TemporaryDirectory(prefix="grpo_jax_engine_")
        self._folder = user_path(self._temporary.name if self._temporary else options.engine_folder).absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._temporary:
            self._folder.chmod(0o755)  # the server may run as another user
        self._parcels: list[Parcel] = []  # the newest last
        self._taken: tuple[Refs, Params] = [], None  # references to parameters, and the last copy of them
        self._sampling: list[str] = []  # the versions of the rollouts that are being sampled
        self._sorting = threading.Lock()  # held while one of these lists changes
        self._turns = {False: threading.Semaphore(1), True: threading.Semaphore(_ADAPTERS_AT_ONCE)}  # with adapters?
        self._cancelled = threading.Event()  # replaced by each cancellation
        self._waited = 0.0  # seconds since the last call of `pop_times`
        self._proof: tuple[Callable[[Complete], ScoredText], list[int]] | None = None  # see `Handover.proof`
        self._trainer = threading.get_ident()
        self._rollouts = ThreadPoolExecutor(_AT_ONCE)
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

    @contextmanager
    def turn(self, params: Params) -> Iterator[None]:
        """Opens a block that samples a rollout, once no request needs other weights. Adapters wait only for the rollout
        before the last.

        Args:
          params: The parameters of the policy.

        Raises:
          Interruption: The rollout was cancelled, or the parameters cannot be written.
        """
        cancelled, version = self._cancelled, self._written(params).version
        ready = time.monotonic()
        with self._turns[isinstance(params, Adapted)]:
            self._waited += time.monotonic() - ready
            _check_goes_on(cancelled)
            self._sampling.append(version)
            try:
                yield
            finally:
                self._sampling.remove(version)
                for server in self._servers:
                    self._unload(server, params)

    def submit(
        self, params: Params, requests: Sequence[Request], journal: Journal = NO_JOURNAL
    ) -> "Future[list[SampledTokens]]":
        """Begins to sample completions with these parameters.

        A server that does not answer is asked again, and loads the parameters again if it was restarted.

        Args:
          params: The parameters of the policy.
          requests: The requests.
          journal: Keeps the completions. Default: they are not kept.

        Returns:
          The future tokens of the completions and their log-probabilities, in the order of the requests. It raises an
          Interruption if no server answers within the timeout, or one refuses a request, gives a wrong answer or does
          not hold the parameters.
        """
        if self._proof is None:
            prompt = max((request.body["prompt"] for request in requests), key=len)
            self.choose_proof(prompt, requests[0].body["max_tokens"])
        return self._rollouts.submit(self._complete, params, requests, journal, self._cancelled, self._may_score())

    def choose_proof(self, prompt: list[int], max_tokens: int) -> None:
        """Chooses what servers must sample and score to prove that they hold parameters.

        Args:
          prompt: The tokens of a prompt.
          max_tokens: The largest number of tokens of a completion.
        """
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

    def _may_score(self) -> bool:
        """Returns whether this thread may start programs of the trainer. Those of several devices need one order."""
        return self._is_single or (hosts.count() == 1 and threading.get_ident() == self._trainer)

    def cancel(self) -> None:
        """Ends the rollouts that are being sampled. Their futures raise an Interruption."""
        cancelled, self._cancelled = self._cancelled, threading.Event()
        cancelled.set()
        for server in self._servers:
            cut(server.waiting)

    def pop_times(self) -> dict[str, float]:
        """Returns the seconds for which parameters waited for requests with other weights, since the last call."""
        waited, self._waited = self._waited, 0.0
        return {"version_wait_s": round(waited, 4)}

    def _complete(
        self,
        params: Params,
        requests: Sequence[Request],
        journal: Journal,
        cancelled: threading.Event,
        may_score: bool,
    ) -> list[SampledTokens]:
        parcel = self._written(params)
        kept = {place: journal.find(parcel.digest, request.digest) for place, request in enumerate(requests)}
        answers = {place: tokens for place, tokens in kept.items() if tokens is not None}
        return self._complete_missing(Draw(params, parcel, requests, journal, cancelled, may_score), answers)

    def _complete_missing(self, draw: Draw, answers: dict[int, SampledTokens]) -> list[SampledTokens]:
        """Samples the completions that have no answer yet, and returns all of them."""
        requests = draw.requests
        failures: dict[Server, Gone] = {}  # of the servers that were asked in vain since the last pause
        gone_since: float | None = None  # when the first request failed after the last completion
        while missing := [place for place in range(len(requests)) if place not in answers]:
            _check_goes_on(draw.cancelled)
            if len(failures) == len(self._servers):
                gone_since = gone_since or time.monotonic()
                if time.monotonic() - gone_since >= self._timeout:
                    server, last = failures.popitem()
                    raise Interruption(
                        f"the engine at {server.url} has not answered for {self._timeout:g} s ({last}), with "
                        f"{len(missing)} of {len(requests)} completions missing: start it again"
                    )
                for _ in range(_LOOKS):
                    if not draw.cancelled.is_set():
                        time.sleep(min(_PAUSE, self._timeout) / _LOOKS)
                failures.clear()
            shares = self._divide(requests, missing, failures)
            with ThreadPoolExecutor(len(shares)) as pool:
                draws = {server: pool.submit(self._draw, server, draw, shares[server]) for server in shares}
            for server, drawn in draws.items():
                sampled, error = drawn.result()
                if error:
                    failures[server] = error
                    if server.answers and not draw.cancelled.is_set():  # it is told once
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

    def _draw(self, server: Server, draw: Draw, places: list[int]) -> tuple[dict[int, SampledTokens], Gone | None]:
        """Samples completions with one server, by place, all of them with these parameters. Also returns its failure.

        Raises:
          Interruption: See `submit`.
        """
        try:
            if not server.model:
                self._connect(server)
            handover = handover_of(server, draw.params)
            with server.loading:
                self._load(server, handover, draw)
            sampled, failure = self._ask_all(server, handover, draw, places)
            holds = handover.holds(server, draw.parcel.version)
            if failure and not holds:
                server.forget()
            return (sampled, failure) if holds is not False else ({}, Gone("it was started again"))
        except Gone as error:
            server.forget()
            return {}, error

    def _ask_all(
        self, server: Server, handover: Handover, draw: Draw, places: list[int]
    ) -> tuple[dict[int, SampledTokens], Gone | None]:
        """Sends requests concurrently. After a failure, no further requests begin. Also returns the failure."""

        def ask_for(place: int) -> SampledTokens:
            body = draw.requests[place].body
            if draw.cancelled.is_set():
                raise Gone("the rollout was cancelled")
            try:
                answer = handover.complete(server, draw.parcel.version, body)
                return self._read(answer, body)
            except Wrong as error:
                raise Interruption(f"the engine at {server.url} {error}: nothing was learned from it") from None

        sampled: dict[int, SampledTokens] = {}
        errors: list[BaseException] = []
        with ThreadPoolExecutor(min(_AT_ONCE, len(places)) or 1) as pool:
            asked = {pool.submit(ask_for, place): place for place in places}
            left = {*asked}
            while left:
                ended, left = wait(left, _KEEP_SECONDS, FIRST_EXCEPTION)
                errors += [error for each in ended if (error := each.exception())]
                if errors and left:
                    pool.shutdown(cancel_futures=True)
                    left = {each for each in left if not each.cancelled()}
                new = {asked[each]: each.result() for each in ended if not each.exception()}
                # A server that was started again might have sampled them with other parameters.
                if new and draw.journal.keep and handover.holds(server, draw.parcel.version) is not False:
                    draw.journal.keep(
                        [draw.requests[place].line(draw.parcel.digest, tokens) for place, tokens in new.items()]
                    )
                sampled |= new
        for error in errors:
            if not isinstance(error, Gone):
                raise error
        return sampled, next((error for error in errors if isinstance(error, Gone)), None)

    # ---- parameters

    def take(self, params: Params) -> Params:
        """Copies parameters without waiting for them, so that later updates may reuse their memory.

        The trainer's scores of the text of the proof are dispatched too: later they would wait for the next update.

        Args:
          params: The parameters of the policy, as the trainer's thread has them.
        """
        source, copy = self._taken
        is_first = copy is None
        if not _are(source, params):
            copy = self._copy(params)
            self._taken = _refs(params), copy
        parcel = self._parcel(copy)
        if parcel.scores is None and self._proof:
            parcel.scores = self._score(params, self._proof[1], 1.0)
        if is_first and not self._is_single and self._may_score():  # later threads could not score
            draw = Draw(params, self._written(copy), [], NO_JOURNAL, self._cancelled)
            for server in self._servers:
                self._draw(server, draw, [])
        return copy

    def _parcel(self, params: Params) -> Parcel:
        """Returns the parcel of parameters. A new one replaces those whose parameters are gone."""
        with self._sorting:
            known = next((parcel for parcel in self._parcels if _are(parcel.leaves, params)), None)
            if known is None:
                known = Parcel(_refs(params))
                gone = [parcel for parcel in self._parcels if any(leaf() is None for leaf in parcel.leaves)]
                self._parcels = [*(parcel for parcel in self._parcels if parcel not in gone), known]
                for parcel in gone:
                    if parcel.folder:
                        shutil.rmtree(parcel.folder, ignore_errors=True)
        return known

    def _written(self, params: Params) -> Parcel:
        """Returns the parcel of parameters, and writes its folder if there is none."""
        parcel = self._parcel(params)
        with parcel.writing:
            if parcel.folder is None:
                folder = self._save("parameters", params)
                names = (str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
                parcel.digest, parcel.folder = hash_values(hash_files(folder, names)), folder
        return parcel

    def _save(self, name: str, params: Params) -> Path:
        folder = self._folder / f"{name}-{uuid.uuid4().hex[:12]}"
        try:
            self._save_params(folder, params)
        except OSError as error:
            raise Interruption(f"{self._folder} cannot take parameters ({lacking(error) or error})") from None
        return folder

    def _load(self, server: Server, handover: Handover, draw: Draw) -> None:
        """Makes a server load parameters, unless it holds them.

        Raises:
          Interruption: It does not load them.
        """
        params, parcel = draw.params, draw.parcel
        if server.version and handover.holds(server, server.version) is False:
            server.forget()  # it was started again
        if parcel.version in server.versions:
            return
        if isinstance(params, Adapted) and not server.version and draw.may_score:
            self._load_base(server, params.base)

        def score(text: ScoredText) -> Scores | None:
            if parcel.scores and self._proof and text.ids == self._proof[1]:
                return parcel.scores
            return self._score(params, text.ids, text.temperature) if draw.may_score else None

        # A server that is new also proves how it samples.
        is_enough = parcel.scores is not None and bool(server.version or not draw.may_score)
        assert parcel.folder
        self._hand_over(server, handover, parcel.folder, score, is_enough)
        server.versions = [*(server.versions if handover.unload else ()), parcel.version]
        self._unload(server, params)

    def _unload(self, server: Server, params: Params) -> None:
        """Makes a server forget the adapters that no rollout uses, except the newest."""
        if not isinstance(params, Adapted) or not (unload := handover_of(server, params).unload):
            return
        with self._sorting:
            idle = [version for version in server.versions[:-1] if version not in self._sampling]
            server.versions = [version for version in server.versions if version not in idle]
        for version in idle:
            unload(server, version)

    def _load_base(self, server: Server, base: Params) -> None:
        """Makes a server load the base of adapters, unless it holds it."""
        handover = handover_of(server, base)

        def score(text: ScoredText) -> Scores:
            return self._score(base, text.ids, text.temperature)

        if not self._difference(server, handover, "", score, False):
            return
        folder = self._save("base", base)
        try:
            self._hand_over(server, handover, folder, score, False)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _hand_over(self, server: Server, handover: Handover, folder: Path, score: Score, is_enough: bool) -> None:
        """Makes a server load parameters, and raises if it does not hold them then.

        Args:
          server, handover: The server, and the way in which it gets parameters.
          folder: The folder of the parameters.
          score: text -> the trainer's scores; None: they cannot be computed in this thread.
          is_enough: True if it is enough to score the text of the proof.
        """
        handover.send(server, folder)
        handover.finish(server, folder.name)
        if handover.holds(server, folder.name) is False:
            raise Interruption(
                f"the engine at {server.url} was told to load {folder.name}, and does not hold it: something "
                "between it and the trainer drops requests"
            )
        if difference := self._difference(server, handover, folder.name, score, is_enough):
            raise Interruption(f"the engine at {server.url} does not sample from the policy: {difference}")

    def _difference(self, server: Server, handover: Handover, version: str, score: Score, is_enough: bool) -> str:
        """Returns how log-probabilities of a server and of the trainer differ, with likely causes; "" if they agree."""
        assert self._proof
        try:
            texts = handover.proof(partial(handover.complete, server, version), *self._proof, is_enough)
        except Wrong as error:
            raise Interruption(f"the engine at {server.url} {error}") from None
        for text in texts:
            if (scored := score(text)) is None:
                continue
            scores = scored()[-len(text.logprobs) :]
            difference = self._average(np.abs(scores - text.logprobs)) if text.logprobs else 0.0
            if not difference <= self.rounding:
                return (
                    f"its log-probabilities of {text.name} differ from the trainer's by {difference:.2g} nats a token, "
                    f"where {self.rounding:g} is possible in {self._dtype}: {text.causes}"
                )
        return ""


def _refs(params: Params) -> Refs:
    return [weakref.ref(x) for x in jax.tree.leaves(params)]


def _are(refs: Refs, params: Params) -> bool:
    """Returns whether references are to the leaves of these parameters."""
    leaves = jax.tree.leaves(params)
    return len(refs) == len(leaves) and all(ref() is x for ref, x in zip(refs, leaves, strict=True))


def _check_goes_on(cancelled: threading.Event) -> None:
    if cancelled.is_set():
        raise Interruption("the rollout was cancelled")
