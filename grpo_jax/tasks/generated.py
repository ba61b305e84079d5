"""Tasks whose rows are generated when a step takes them. Nothing is stored, and there is no last row."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from grpo_jax.data.generators import AnswerIn, Generator, answer_format, generate, num_levels, written_answer
from grpo_jax.data.rows import hash_of_prompt
from grpo_jax.data.text import encode_prompts
from grpo_jax.data.types import Example, Prompts, choose_widths, hash_values, pad_prompts, rng
from grpo_jax.errors import UsageError
from grpo_jax.models.chat import make_chat, prompt_writer
from grpo_jax.rewards.builtin import generator_vote
from grpo_jax.tasks.curriculum import Drawn, Window, choose_levels, number_of
from grpo_jax.tasks.task import Task, assemble_task, fill, padding_id

# The first template is a text for a base model to continue; the second is a user's message.
TEMPLATES = ("Question: {question}\n{answer_format}\nAnswer:", "{question}\n{answer_format}")
_SAMPLED = 64  # prompts of each level that decide the width
_ROUNDS = 100  # redraws of the prompts that do not fit
_HELDOUT, _SAMPLE, _TRAINING = 1, 2, 3  # streams of random numbers
_LARGEST = 2**31  # some generators take no larger index

Levels = Sequence[int | None]  # one for each generator; None: its options decide
Chosen = tuple[int, Example, np.ndarray]  # the number of the generator, the columns, the token ids


def generated_task(
    tokenizer: Any,
    eos_ids: tuple[int, ...],
    generators: Sequence[Generator],
    *,
    vocab_size: int,
    num_prompts: int,
    seed: int,
    num_heldout: int = 200,
    has_levels: bool = False,
    answer_in: AnswerIn = "tags",
    chat: bool = False,
    template: str | None = None,
    system: str | None = None,
    max_prompt_tokens: int | None = None,
    stop: Sequence[str] = (),
    tools: Any = None,
    chat_template_kwargs: Any = None,
    **fields: Any,
) -> Task:
    """Makes a task whose rows are a function of the seed, the step and, in a curriculum, the window.

    The held-out set is the same for every seed. A prompt is drawn again if it is held out, is in the step already, or
    has more tokens than `max_prompt_tokens` or than all of a sample of prompts.

    Args:
      tokenizer, eos_ids, vocab_size, num_prompts, seed, stop, chat, tools, chat_template_kwargs: See `text_task`.
      generators: The generators, as `parse_generators` returns them.
      num_heldout: The number of held-out prompts. Fewer are held out if the generators make few different prompts.
      has_levels: True for a curriculum: prompts for training then begin at the lowest level of each generator.
      answer_in: The place of the answer in a completion, which the prompt states.
      template: Replaces the default template in TEMPLATES. The columns of a row are question, answer_format, solution
        (a completion that states the generator's own answer), generator, level, index and answer_in.
      system, max_prompt_tokens: See `encode_rows`.
      fields: Other fields of `Task`, such as reward.

    Raises:
      UsageError: A generator has no levels, or there are too few prompts that fit.
    """
    writer = make_chat(tokenizer, eos_ids, chat_template_kwargs, tools)
    write, written = prompt_writer(writer, chat, system), template or TEMPLATES[chat]
    if answer_in == "stop" and not stop:
        raise UsageError("--answer-in stop needs a text that ends the answer: give --stop")
    sentence = answer_format(answer_in, *stop[:1])
    weights = np.array([generator.weight for generator in generators])

    def row(generator: Generator, level: int | None, index: int) -> dict[str, Any]:
        _, entry = generate(generator.text, level, index)
        columns = {"question": entry["question"], "answer_format": sentence, "answer_in": answer_in}
        columns |= {"generator": generator.text, "level": level, "index": index}
        answer = entry["answer"]
        return columns if answer is None else columns | {"solution": written_answer(str(answer), answer_in)}

    def choose(
        noise: np.random.Generator, count: int, levels: Levels, limit: int | None, fits: Callable[[Example], bool]
    ) -> list[Chosen]:
        """Draws different prompts of at most `limit` tokens that fit, at most `count`."""
        chosen: dict[str, Chosen] = {}
        for _ in range(_ROUNDS):
            if not (missing := count - len(chosen)):
                break
            kinds = noise.choice(len(generators), missing, p=weights / weights.sum())
            drawn = zip(kinds, noise.integers(0, _LARGEST, missing), strict=True)
            rows = [row(generators[kind], levels[kind], int(index)) for kind, index in drawn]
            prompts = [write(fill(written, columns, "a row")) for columns in rows]
            encoded = encode_prompts(writer, prompts, max_prompt_tokens=limit, others=1)
            for number, text, ids in zip(encoded.numbers, encoded.texts, encoded.token_ids, strict=True):
                example = {**rows[number], "prompt": text}
                if fits(example):
                    chosen.setdefault(text, (int(kinds[number]), example, ids))
        return list(chosen.values())

    tops = [num_levels(generator) - 1 for generator in generators] if has_levels else []
    start: Levels = [0 if has_levels else None] * len(generators)
    end: Levels = tops or start
    # At most about half of the prompts are held out, if there are few.
    base: Levels = [None] * len(generators)

    def is_low(example: Example) -> bool:
        return hash_of_prompt(example["question"]) < 0.5

    heldout = choose(rng(_HELDOUT), num_heldout, base, max_prompt_tokens, is_low)
    held = {example["prompt"] for _, example, _ in heldout}

    def is_new(example: Example) -> bool:
        return example["prompt"] not in held

    sample = choose(rng(_SAMPLE), _SAMPLED, end, max_prompt_tokens, is_new)
    sample += choose(rng(_SAMPLE), _SAMPLED, start, max_prompt_tokens, is_new) if has_levels else []
    if not heldout or not sample:
        raise UsageError("no prompt is left: set options of the generators, or raise max_prompt_tokens")
    lengths = [len(ids) for _, _, ids in sample]
    width = max(*lengths, *(len(ids) for _, _, ids in heldout))

    def padded(chosen: Sequence[Chosen]) -> Prompts:
        ids, examples = [ids for _, _, ids in chosen], [example for _, example, _ in chosen]
        return pad_prompts(ids, examples, width=width, pad_id=padding_id(tokenizer, vocab_size))

    def at_levels(step: int, levels: Levels) -> list[Chosen]:
        chosen = choose(rng(_TRAINING, seed, step), num_prompts, levels, width, is_new)
        if len(chosen) < num_prompts:
            raise UsageError(
                f"the generators made {len(chosen)} different prompts that fit, and a step takes {num_prompts}: lower "
                "num_prompts, or set other options of the generators"
            )
        return chosen

    def draw(window: Window, step: int, bound: float) -> Drawn:
        levels, rates = choose_levels(window, tops, bound)
        chosen = at_levels(step, levels)
        metrics = {f"curriculum_level_{name}": float(level) for name, level in zip(names, levels, strict=True)}
        numbers = np.array([number_of(kind, levels[kind]) for kind, _, _ in chosen])
        solved = {f"curriculum_solved_{name}": rate for name, rate in zip(names, rates, strict=True) if rate >= 0}
        return Drawn(numbers, padded(chosen), metrics | solved)

    names = [_label(generators, number) for number in range(len(generators))]
    return assemble_task(
        writer,
        eos_ids,
        vocab_size,
        stop,
        in_chat=bool(sample[0][1]["prompt"].messages),
        prompts=lambda step: padded(at_levels(step, start)),
        heldout=padded(heldout),
        answer=generator_vote,
        prompt_widths=choose_widths([*lengths, width], most=4),
        batch_widths=(width,),
        rows=hash_values(*(example for _, example, _ in sample)),  # another version makes other rows
        curriculum=draw if has_levels else None,
        **fields,
    )


def _label(generators: Sequence[Generator], number: int) -> str:
    """Returns the name of a generator in metrics."""
    name = generators[number].name
    same = [place for place, generator in enumerate(generators) if generator.name == name]
    return name if len(same) == 1 else f"{name}_{same.index(number) + 1}"
