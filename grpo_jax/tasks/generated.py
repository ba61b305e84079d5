"""Tasks whose rows are generated when a step takes them. Nothing is stored, and there is no last row."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_jax.data.generators import AnswerIn, Generator, answer_format, generate, highest_level
from grpo_jax.data.prompts import Prompts, pad_prompts
from grpo_jax.data.rows import hash_of_prompt
from grpo_jax.data.types import Example, rng
from grpo_jax.errors import UsageError
from grpo_jax.rewards.builtin import generator_vote
from grpo_jax.tasks.curriculum import Window, choose_levels, number_of
from grpo_jax.tasks.task import Task, text_task

# The first template is a text for a base model to continue; the second is a user's message.
TEMPLATES = ("Question: {question}\n{answer_format}\nAnswer:", "{question}\n{answer_format}")
_HELDOUT_SHARE = 0.2  # of all questions, by their hashes; a larger share finds held-out rows faster
_SAMPLED = 128  # rows of each level whose prompts decide the width
_TRIES = 100  # rows generated for each that is taken
_LARGEST = 2**31  # some generators take no larger index
_HELDOUT, _SAMPLE, _TRAINING = range(3)  # streams of random numbers

Levels = Sequence[int | None]  # one for each generator; None: its options decide


def generated_task(
    tokenizer: Any,
    eos_ids: tuple[int, ...],
    generators: Sequence[Generator],
    *,
    num_prompts: int,
    seed: int,
    num_heldout: int = 200,
    has_levels: bool = False,
    answer_in: AnswerIn = "tags",
    stop: Sequence[str] = (),
    chat: bool = False,
    template: str | None = None,
    **options: Any,
) -> Task:
    """Makes a task whose rows are a function of the seed, the step and, in a curriculum, the window.

    The hash of a question decides whether it is held out, so it is the same for every seed, level and tokenizer. A row
    is drawn again if its question is in the step already, or if its prompt is longer than all of a sample of rows.

    Args:
      tokenizer, eos_ids, num_prompts, seed, stop, chat: See `text_task`.
      generators: The generators, as `parse_generators` returns them.
      num_heldout: The number of held-out prompts; fewer if the generators make few different questions.
      has_levels: True for a curriculum: prompts for training then begin at the lowest level of each generator.
      answer_in: The place of the answer in a completion, which the prompt states.
      template: Replaces the default template in TEMPLATES. The columns of a row are question, answer_format, solution
        (a completion that states the generator's own answer), generator, level, index and answer_in.
      options: Further arguments of `text_task`, such as vocab_size and reward.

    Raises:
      UsageError: A generator has no levels, or there are too few prompts that fit.
    """
    if answer_in == "stop" and not stop:
        raise UsageError("--answer-in stop needs a text that ends the answer: give --stop")
    shared = {"answer_format": answer_format(answer_in, *stop[:1]), "answer_in": answer_in}
    names, weights = [name for name, _ in generators], np.array([weight for _, weight in generators])

    def generate_row(kind: int, level: int | None, index: int) -> Example:
        entry = generate(names[kind], level, index)[1]
        row = {"question": entry["question"], **shared, "generator": names[kind]}
        row |= {"level": level, "index": index, "kind": kind}
        solution = "<answer>{}</answer>" if answer_in == "tags" else "{}"
        return row if entry["answer"] is None else row | {"solution": solution.format(entry["answer"])}

    def draw(stream: Sequence[int], count: int, levels: Levels, encode: Any = None) -> list[tuple[Example, Any]]:
        """Draws at most `count` rows with different questions, and with their prompts if there is `encode`."""
        noise, chosen = rng(*stream), dict[str, Any]()
        for _ in range(_TRIES * count):
            if len(chosen) == count:
                break
            kind = int(noise.choice(len(generators), p=weights / weights.sum()))
            row = generate_row(kind, levels[kind], int(noise.integers(_LARGEST)))
            is_heldout = hash_of_prompt(row["question"]) < _HELDOUT_SHARE
            prompt = encode([row]).get(0) if encode else None
            if is_heldout == (stream[0] == _HELDOUT) and (prompt or not encode):
                chosen.setdefault(row["question"], (row, prompt))
        return list(chosen.values())

    base: Levels = [None] * len(generators)
    tops = [highest_level(name) for name in names] if has_levels else []
    start: Levels = [0] * len(generators) if has_levels else base
    heldout = [row for row, _ in draw((_HELDOUT,), num_heldout, base)]
    sample = [row for levels in (tops, start) if levels for row, _ in draw((_SAMPLE,), _SAMPLED, levels)]
    if not heldout or not sample:
        raise UsageError("the generators make too few different questions: set other options")
    options |= {"heldout_rows": heldout, "template": template or TEMPLATES[chat], "chat": chat, "stop": stop}
    task = text_task(tokenizer, eos_ids, sample, num_prompts=1, seed=0, answer=generator_vote, **options)

    def prompts_at(step: int, levels: Levels) -> Prompts:
        drawn = draw((_TRAINING, seed, step), num_prompts, levels, task.encode)
        if len(drawn) < num_prompts:
            raise UsageError(f"the generators made {len(drawn)} different prompts for a step: lower num_prompts")
        prompts = [(ids, {**row, "prompt": text}) for row, (text, ids) in drawn]
        width, widths = task.heldout.tokens.width, task.heldout.tokens.widths
        return pad_prompts(*zip(*prompts, strict=True), width=width, pad_id=task.pad_id, widths=widths)

    def curriculum(window: Window, step: int, bound: float) -> tuple[Prompts, np.ndarray, dict[str, float]]:
        levels = choose_levels(window, tops, bound)
        prompts = prompts_at(step, levels)
        numbers = np.array([number_of(row["kind"], row["level"]) for row in prompts.examples])
        return prompts, numbers, dict(zip(metrics, map(float, levels), strict=True))

    metrics = [f"curriculum_level_{number}_{name.partition('?')[0]}" for number, name in enumerate(names, 1)]

    return task._replace(
        prompts=lambda step: prompts_at(step, start), curriculum=curriculum if has_levels else None, encode=None
    )
