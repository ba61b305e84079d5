"""Runs as files, and their pages."""

import json
import re

from grpo_jax import report

HOSTILE = "</script><img src=x onerror=alert(1)><!-- \u2028 \ud800 \0 \r &lt; \" ' <!--run--> ]]> \u202e \U0001f600"
EPISODE = {
    "completions": ["7>a", "<b>"],
    "tokens": [["7", "", ">", "a", ""], ["<b", ">"]],
    "logprobs": [[-0.1, -0.3, 0.0, -0.5, 0.0], [-1.0, -1.0]],
    "turns": [[1, 1, -1, 2, 2], [1, 1]],
    "turn_rewards": [[0.0, 0.5], [None]],
    "turn_advantages": [[0.7, -0.2], [-0.7]],
    "endings": ["done", "policy tokens"],
    "rewards": [0.5, 0.0],
}


def group(step, *, phase="grpo", text="Tom had a cat.", size=2, **more):
    """Returns a line of rollouts.jsonl, complete."""
    tokens = [[*re.findall(r"\s?\S+|\s", text), ""] for _ in range(size)]
    return {
        "phase": phase,
        "step": step,
        "prompt": "Once",
        "columns": {"answer": "72", "level": 3},
        "completions": ["".join(row) for row in tokens],
        "rewards": [1.0, *[None] * (size - 1)],
        "components": {"answer": [1.0, *[None] * (size - 1)]},
        "advantages": [0.5 - i for i in range(size)],
        "lengths": [len(row) for row in tokens],
        "truncated": [i % 2 == 1 for i in range(size)],
        "tokens": tokens,
        "logprobs": [[-0.1 * i for i in range(len(row))] for row in tokens],
        **more,
    }


def metrics(*steps, phase="grpo", **values):
    """Returns a line of metrics.jsonl for each step."""
    return [{"phase": phase, "step": step, "reward": step / 10, **values} for step in steps]


def everywhere(text):
    """Returns a run that has `text` wherever it can."""
    lines = metrics(1, 2, phase=text, **{text: 1.0, "other": "ignored " + text})
    lines[1][text] = 2.0
    hostile = group(1, phase=text, text=text, prompt=text, columns={text: text}, components={text: [1.0, None]})
    hostile |= {"endings": [text] * 2, "spans": [[[0, 9]], []], "span_rewards": [[1.0], []]}
    results = {text: {text: 1, "word": text}, "text": text}
    return {"lines": lines, "groups": [hostile], "results": results, "config": {"model": text, text: [text]}}


def make_run(folder, lines=(), groups=(), *, config=None, results=None):
    """Writes the files of a run."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"steps": 3, "model": "tiny"} if config is None else config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if groups:
        (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in groups))
    if results is not None:
        (folder / "results.json").write_text(json.dumps(results))


def data_of(page):
    """Returns the data of a page."""
    (data,) = re.findall('<script id="run" type="application/json">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    return json.loads(data)


def write_page(folder, lines=(), groups=(), **files):
    """Writes a run and its page, and returns the page's data."""
    make_run(folder, lines, groups, **files)
    page = report.write_report(folder)
    assert page == folder / "report.html"
    assert page.stat().st_size <= report.MAX_BYTES
    return data_of(page)
