"""Episodes: the policy takes turns, on the devices or with a server, and an environment replies on the host."""

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from grpo_jax import hosts
from grpo_jax.config import SamplingConfig
from grpo_jax.data.episodes import ENDINGS, FAILURES, MAX_CHARACTERS, Reply, episode_return
from grpo_jax.data.prompts import Prompts
from grpo_jax.data.types import Completion, Example, Span, Turn
from grpo_jax.devices import Devices, jit_on_devices, map_rows, num_hosts, to_devices, to_numpy
from grpo_jax.errors import UsageError
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.policy import Policy
from grpo_jax.models.rows.geometry import PromptTokens
from grpo_jax.rewards.reward import Rewards, place_and_reason
from grpo_jax.rl.types import Graded, Interaction, step_key
from grpo_jax.sampling.episodes import Episodes, begin_episodes, continue_episodes
from grpo_jax.sampling.sampler import Completions, limits_of
from grpo_jax.step import Array, Batch
from grpo_jax.tasks.task import Task

_RETURNS = (episode_return, f"{episode_return.__module__}:{episode_return.__name__}")

# The two compiled programs, which serve any number of turns:
# (params, prompt, numbers, temperature, noise) -> Episodes after one turn, and
# (params, episodes, replies [N, G, R], counts [N, G], continues [N, G]) -> Episodes; `episodes` is donated
EpisodePrograms = tuple[Callable[..., Episodes], Callable[..., Episodes]]


# Yields the completions after each turn, and is sent the replies [N, G, R], their lengths [N, G], and which episodes
# continue [N, G], as NumPy arrays
Turns = Generator[Completions, tuple[np.ndarray, np.ndarray, np.ndarray], None]


def check_turns(options: SamplingConfig) -> None:
    """Raises if an environment has no room for its replies.

    Raises:
      UsageError: Task and options conflict. The message says what to change.
    """
    if options.max_turns > 1 and not options.environment_tokens:
        raise UsageError(
            "environment_tokens is 0, so no episode could go on after its first turn: set it to the tokens of all "
            "replies of an episode"
        )


# ---- sampling


def make_episode_draw(
    task: Task, policy: Policy, sampling: SamplingConfig, devices: Devices
) -> tuple[Callable[..., Completions], None]:
    """Returns the function `draw` of a `Sampler`. There is no single program.

    Raises:
      UsageError: The policy cannot continue after a reply, or several hosts would sample together.
    """
    if num_hosts(devices) > 1:
        raise UsageError(
            f"environments reply on the host that samples, and {hosts.count()} hosts sample together: set "
            "sampler_devices, so that each samples its own groups, or leave out --distributed"
        )
    programs = episode_programs(policy, task, sampling, devices)

    def draw(params: Params, prompts: Prompts, numbers: Array, temperature: Array, noise: np.ndarray) -> Completions:
        turns = sample_turns(programs, params, (prompts.tokens, numbers, temperature), noise, devices)
        out = play(turns, to_numpy(numbers), noise, prompts.examples, task, sampling)
        host_arrays = {name: x for name, x in out._asdict().items() if isinstance(x, np.ndarray)}
        return out._replace(**to_devices(host_arrays, devices))

    return draw, None


def episode_programs(policy: Policy, task: Task, sampling: SamplingConfig, devices: Devices) -> EpisodePrograms:
    """Makes the programs of `begin_episodes` and `continue_episodes`, which are compiled at their first call.

    Raises:
      UsageError: The policy cannot continue after a reply.
    """
    if policy.decoder is None:
        raise UsageError(
            "this model cannot append the replies of an environment to its cache: leave out the environment, or add "
            "decoder to its Policy"
        )
    common: Any = {"max_tokens": sampling.max_tokens, **task.ends}

    def begin_rows(shared: tuple[Params, Array], prompt: PromptTokens, numbers: Array, temperature: Array) -> Episodes:
        params, noise = shared
        return begin_episodes(
            policy,
            params,
            prompt,
            numbers,
            step_key(*noise),
            environment_tokens=sampling.environment_tokens,
            temperature=temperature,
            limits=limits_of(sampling.top_k, sampling.top_p, sampling.min_p),
            pad_id=task.pad_id,
            support_size=sampling.kept_tokens,
            **common,
        )

    def first_turn(params: Params, prompt: PromptTokens, numbers: Array, temperature: Array, noise: Array) -> Episodes:
        return map_rows(begin_rows, devices)((params, noise), prompt, numbers, temperature)

    def next_turn(params: Params, episodes: Episodes, replies: Array, counts: Array, continues: Array) -> Episodes:
        def continue_rows(params: Params, *rows: Any) -> Episodes:
            return continue_episodes(policy, params, *rows, **common)

        return map_rows(continue_rows, devices)(params, episodes, replies, counts, continues)

    return jit_on_devices(first_turn, 0, devices=devices), jit_on_devices(
        next_turn, 0, devices=devices, donate_argnums=(1,)
    )


def sample_turns(
    programs: EpisodePrograms, params: Params, inputs: tuple[Any, ...], noise: np.ndarray, devices: Devices
) -> Turns:
    """Samples turns on the devices.

    Args:
      programs: The programs of `episode_programs`.
      params: The parameters of the policy.
      inputs: The prompts, numbers and temperature, on the devices.
      noise: The arguments (seed, stream, index) of `step_key`, uint32 `[3]`.
      devices: The devices that share the rows.
    """
    first_turn, next_turn = programs
    episodes = first_turn(params, *inputs, to_devices(noise, devices, axes=None))
    while True:
        replies = yield episodes.running.out
        episodes = next_turn(params, episodes, *to_devices(replies, devices))


def play(
    turns: Turns,
    numbers: np.ndarray,
    noise: np.ndarray,
    examples: Sequence[Example],
    task: Task,
    sampling: SamplingConfig,
) -> Completions:
    """Plays one episode for each completion, from the first turn until all episodes have ended.

    Args:
      turns: Samples the turns.
      numbers: The numbers of the completions, int32 `[N, G]`.
      noise: The arguments (seed, stream, index) of `step_key`, uint32 `[3]`. With the numbers of completion and turn
        they are the key of a reply.
      examples: The N examples of the prompts.
      task: Supplies the environment, and decodes completions.
      sampling: The sampling options of the run.

    Returns:
      The completions, whose rewards and endings are NumPy arrays.
    """
    assert task.environment
    out = next(turns)
    rewards = np.full((*numbers.shape, sampling.max_turns), np.nan, np.float32)
    ending = np.full(numbers.shape, -1, np.int8)
    so_far: dict[tuple[int, int], tuple[Turn, ...]] = {}
    for number in range(sampling.max_turns):
        places = [(int(i), int(j)) for i, j in np.argwhere(ending < 0)]
        sampled = _to_host(out, rewards)
        for place in places:  # read the last turn again: now it has a reply
            so_far[place] = so_far.get(place, ())[:-1] + turns_of(sampled, place, task, first=max(number, 1))
        transcripts = [so_far[place] for place in places]
        keys = [(*map(int, noise), int(numbers[place]), number) for place in places]
        replies = task.environment.ask([examples[i] for i, _ in places], transcripts, keys)
        reply_ids = np.full((*numbers.shape, max(sampling.environment_tokens, 1)), task.pad_id, np.int32)
        counts = np.zeros(numbers.shape, np.int32)
        for place, reply in zip(places, replies, strict=True):
            if reply.reward is not None:
                rewards[(*place, number)] = reply.reward
            if reply.rewards:
                rewards[place][: number + 1] = np.array(reply.rewards, np.float32)  # None becomes NaN
            prompt = examples[place[0]]["prompt"]
            end, ids = _outcome(reply, prompt, sampled, place, number, task, sampling)
            ending[place] = ENDINGS.index(end) if end else -1
            reply_ids[place][: len(ids)], counts[place] = ids, len(ids)
        task.environment.end([key for place, key in zip(places, keys, strict=True) if ending[place] >= 0])
        if (ending >= 0).all():
            break
        out = turns.send((reply_ids, counts, ending < 0))
    cut = to_numpy(out.truncated) | (ending != ENDINGS.index("done"))
    return out._replace(truncated=cut, turn_rewards=rewards, ending=ending)


def _to_host(out: Completions, rewards: np.ndarray) -> Completions:
    """Copies the tokens of episodes to the host."""
    ids, mask, turn, truncated = to_numpy((out.completion_ids, out.completion_mask, out.turn, out.truncated))
    return Completions(ids, mask, None, None, truncated, turn, rewards)  # type: ignore[arg-type]


def _outcome(
    reply: Reply,
    prompt: str,
    sampled: Completions,
    place: tuple[int, int],
    number: int,
    task: Task,
    sampling: SamplingConfig,
) -> tuple[str, Sequence[int]]:
    """Returns how a reply ends its episode ("" if it continues), and the tokens of the reply for the policy."""
    is_policy = sampled.completion_mask[place]
    if reply.failure or reply.done:
        return reply.failure or "done", ()
    if sampled.truncated[place] or is_policy.sum() >= sampling.max_tokens:
        return "policy tokens", ()
    if number + 1 >= sampling.max_turns:
        return "turns", ()
    assert task.environment
    room = sampling.environment_tokens - int(((sampled.turn[place] > 0) & ~is_policy).sum())
    if len(reply.text) > MAX_CHARACTERS:
        return "environment tokens", ()
    options = {"kwargs": getattr(prompt, "kwargs", None)}  # the row's own variables of the chat template
    options["is_open"] = sampled.completion_ids[place][is_policy][-1] not in task.eos_ids
    options = {name: value for name, value in options.items() if value}
    ids = task.environment.encode(reply.text, **options) if reply.ids is None else reply.ids
    if len(ids) > room:
        return "environment tokens", ()
    unknown = [i for i in ids if not 0 <= i < task.vocab_size]
    if unknown:
        task.environment.messages["not a reply"] = (
            f"a reply has the token {unknown[0]}, and the model's are 0 to {task.vocab_size - 1}"
        )
        return "not a reply", ()
    return "", ids


def turns_of(sampled: Completions, place: tuple[int, int], task: Task, *, first: int = 1) -> tuple[Turn, ...]:
    """Returns the turns of an episode.

    Args:
      sampled: The completions as NumPy arrays.
      place: The index of the episode in `[N, G]`.
      task: Decodes completions.
      first: The number of the first turn to return. Default: 1.
    """
    assert sampled.turn is not None
    assert task.environment
    read = task.environment.read
    turn = sampled.turn[place]
    tokens = slice(int(np.argmax(turn == first)), np.count_nonzero(turn))  # turns ascend, and are 0 after the end
    actions: dict[int, list[int]] = defaultdict(list)
    observations: dict[int, list[int]] = defaultdict(list)
    ids, mask = sampled.completion_ids[place], sampled.completion_mask[place]
    columns = (x[tokens].tolist() for x in (turn, mask, ids))
    for number, is_action, token in zip(*columns, strict=True):
        (actions if is_action else observations)[number].append(token)

    def one(number: int) -> Turn:
        reply, reward = observations.get(number), float(sampled.turn_rewards[(*place, number - 1)])
        return Turn(
            task.read(actions[number]),
            Completion(task.decode(reply), reply) if reply else None,
            None if math.isnan(reward) else reward,
            read(reply) if read and reply else None,
        )

    return tuple(one(number) for number in actions)


# ---- grading and metrics


def read_episode(task: Task, completions: Completions, content: Any, place: tuple[int, int]) -> Completion:
    """Returns the text of an episode, without EOS tokens, with its turns and its ending.

    A stop text of the last turn is cut off. Those of earlier turns remain, before the observations that follow them.
    """
    ids, turns = completions.completion_ids[place][content[place]].tolist(), turns_of(completions, place, task)
    whole, last = task.decode(ids), turns[-1].action
    text = whole[: len(whole) + len(last) - len(task.decode(last.ids))]
    ending, truncated = ENDINGS[completions.ending[place]], bool(completions.truncated[place])
    return Completion(text, ids, truncated, turns, ending)


def find_turns(
    task: Task, completions: Completions, texts: Sequence[Completion], spans: np.ndarray, rewards: Rewards
) -> np.ndarray:
    """Returns the turns of each episode as parts: object `[N, G]`, tuples of `Span` in tokens.

    The reward of a part is the environment's reward of the turn, multiplied by `turn_weight`. It is 0 if the
    environment failed, since the reward of such an episode does not add up its turns.
    """
    weight, parts = turn_weight(rewards, task.rewards), np.empty(completions.truncated.shape, object)
    for place in np.ndindex(parts.shape):
        turn = np.where(completions.completion_mask[place], completions.turn[place], 0)
        has_failed = ENDINGS[completions.ending[place]] in FAILURES
        earned = np.nan_to_num(completions.turn_rewards[place]) * (0 if has_failed else weight)
        tokens = {number: np.flatnonzero(turn == number) for number in range(1, turn.max() + 1)}
        parts[place] = tuple(
            Span(int(at[0]), int(at[-1]) + 1, float(earned[number - 1]), "tokens") for number, at in tokens.items()
        )
    return parts


def turn_weight(rewards: Rewards, task_rewards: Rewards) -> float:
    """Returns the weight with which the environment's rewards of turns are in a run's reward.

    It is that of `episode_return`. Other functions may add up the turns as well. Without `episode_return`, it is
    therefore the largest weight of a function that is also in the task's reward.

    The coin toss of a control is not in the task's reward, so rewards of turns are left out. Otherwise the control
    would learn from them, even if they cancel in the sum of an episode: the loss weighs a token by the length of its
    completion, and later turns change that length.
    """
    components, known = rewards.components.values(), [each.reward for each in task_rewards.components.values()]
    # A `Grader` has the name of its function.
    sums = [each.weight for each in components if getattr(each.reward, "spec", each.reward) in _RETURNS]
    return (
        sum(sums) if sums else max((each.weight for each in components if each.reward in known), key=abs, default=0.0)
    )


def count_episodes(
    task: Task, completions: Completions, texts: Sequence[Sequence[Completion]]
) -> dict[str, np.ndarray]:
    """Returns statistics of episodes `[N, G]`: "ending", and by the names of metrics the numbers that are averaged."""
    turn, mask = np.asarray(completions.turn), np.asarray(completions.completion_mask)
    numbers = {
        "ending": np.asarray(completions.ending),
        "turns_mean": turn.max(-1),
        "environment_tokens_mean": ((turn > 0) & ~mask).sum(-1),
    }
    assert task.environment is not None
    if task.environment.measure is None:
        return numbers
    measured: list[Mapping[str, Any]] = [task.environment.measure(text) for group in texts for text in group]
    return numbers | {
        f"environment_{name}": np.array([each[name] for each in measured]).reshape(turn.shape[:2])
        for name in measured[0]
    }


def report_episodes(task: Task, graded: Graded, step: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns metrics of episodes, and warnings.

    Metrics are means of the statistics, and the number of episodes for each ending. There is a warning for each kind of
    failure of the environment, and one if all episodes ran out of turns.

    Raises:
      UsageError: The environment failed in every episode of the first step. The message says how and where.
    """
    statistics, of_hosts = graded.statistics, hosts.gather("failures of environments", failures_of(task))
    failures = {name: sentence for each in of_hosts for name, sentence in each.items()}
    counts = np.bincount(statistics["ending"].ravel(), minlength=len(ENDINGS))
    endings = {name: int(count) for name, count in zip(ENDINGS, counts, strict=True) if count}
    if step == 0 and failures and endings.keys() <= {"raised", "not a reply", "died"}:
        raise UsageError(
            f"every episode of the first rollout ended in its environment: {next(iter(failures.values()))}"
        )
    metrics: dict[str, Any] = {name: float(x.mean()) for name, x in statistics.items() if name != "ending"}
    metrics |= {f"ended_{name.replace(' ', '_')}": count for name, count in ({"done": 0} | endings).items()}
    warnings = {
        f"environment {name}": f"{failure}; metrics.jsonl counts them as ended_{name.replace(' ', '_')}"
        for name, failure in failures.items()
    }
    if endings.keys() == {"turns"}:
        warnings["turns"] = "every episode was cut off after its last turn: raise max_turns"
    return metrics, warnings


def failures_of(task: Task) -> dict[str, str]:
    """Returns a sentence about each kind of failure of the environment so far."""
    assert task.environment
    return {
        name: f"the environment failed ({name}), which ends the episode: {place_and_reason(message)}"
        for name, message in task.environment.messages.items()
    }


def turn_columns(
    graded: Graded, number: int, completions: Completions, place: int, texts: Sequence[Completion]
) -> dict[str, Any]:
    """Returns columns of a group of episodes for people to read.

    They are the turn of each token (negative if the environment wrote it), rewards of turns, and endings.
    """
    lengths = completions.attention_mask[place].sum(-1)
    turn = np.where(completions.completion_mask[place], completions.turn[place], -completions.turn[place])
    return {
        "turns": [row[:length].tolist() for row, length in zip(turn, lengths, strict=True)],
        "turn_rewards": [[turn.reward for turn in text.turns] for text in texts],
        "endings": [text.ending for text in texts],
    }


def add_zeros(batch: Batch, sampling: SamplingConfig) -> Batch:
    """Adds the fields of episodes, as zeros, to a batch of zeros."""
    shape = batch.temperature.shape
    rewards, ending = np.zeros((*shape, sampling.max_turns), np.float32), np.zeros(shape, np.int8)
    return batch._replace(turn=np.zeros_like(batch.completion_ids), turn_rewards=rewards, ending=ending)


EPISODES = Interaction(
    "turns",
    check_turns,
    make_episode_draw,
    read_episode,
    find_turns,
    report_episodes,
    turn_columns,
    add_zeros,
    count_episodes,
    failures_of,
)
