"""A task for a chat model: sums whose answers must be JSON. It writes rows, and holds the two rewards.

python examples/json_sums.py sums.jsonl
"""

import json
import re
import sys

ANSWER = re.compile(r'\{"answer": \d+\}')  # the whole text, with nothing around it
LARGEST = 20


def strict_format(examples, completions):
    """Returns 1 for a completion that is exactly the asked JSON."""
    return [float(ANSWER.fullmatch(text) is not None) for text in completions]


def correct(examples, completions):
    """Returns 1 for a completion that is the asked JSON with the right number."""
    return [float(text == row["answer"]) for text, row in zip(completions, examples, strict=True)]


def rows():
    """Yields all sums and differences of two numbers up to 20, without negative results."""
    for a in range(1, LARGEST + 1):
        for b in range(1, LARGEST + 1):
            for question, result in ((f"{a} + {b}", a + b), (f"{a} - {b}", a - b)):
                if result >= 0:
                    prompt = f'{question} = ?\nWrite the answer as JSON: {{"answer": NUMBER}}'
                    yield {"prompt": prompt, "answer": json.dumps({"answer": result})}


if __name__ == "__main__":
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows())
