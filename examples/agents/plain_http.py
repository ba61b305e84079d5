"""An agent that knows only the URL: the policy guesses a number, and hears if it is higher or lower.

grpo-jax train --model DIR --task rows.jsonl --agent examples/agents/plain_http.py:run --max-turns 6 \
    --environment-tokens 200
A row of rows.jsonl: {"most": 120, "number": 37}
"""

import json
import re
from urllib.request import Request, urlopen

ASK = "Guess a whole number from 0 to {}. Answer with the number only."


def complete(url, messages):
    """Returns the policy's message."""
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    with urlopen(Request(f"{url}/chat/completions", body)) as answer:
        return json.load(answer)["choices"][0]["message"]


def run(example, url):
    """Plays one game. The reward is 1 for the number in the last of six turns, and more for earlier turns."""
    messages = [{"role": "user", "content": ASK.format(example["most"])}]
    for turn in range(6):
        message = complete(url, messages)
        guess = re.search(r"\d+", message["content"])
        if guess and int(guess[0]) == example["number"]:
            return 2 - turn / 5
        told = "Write a number."
        if guess:
            told = "Higher." if int(guess[0]) < example["number"] else "Lower."
        messages += [message, {"role": "user", "content": told}]
    return 0
