"""A real model in the folder GRPO_JAX_MODEL: ids, logits, a short run and its export, against transformers.

It needs torch, transformers and 4 GB of memory:

  GRPO_JAX_MODEL=DIR pytest -m slow -s tests/models/test_real_model.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny import DATA, row_numbers, sampler_of, states_of_texts, whole_prompts, write_rows

from grpo_jax.functional.numerics import softcapped
from grpo_jax.models.huggingface import load_pretrained
from grpo_jax.models.policy import decoder_policy
from grpo_jax.scoring import score_completion_tokens
from grpo_jax.step import Batch
from grpo_jax.tasks.task import text_task

FOLDER = os.environ.get("GRPO_JAX_MODEL", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOLDER, reason="needs GRPO_JAX_MODEL, the folder of a model")]
WIDTH = 64  # tokens of a text


@pytest.fixture(scope="module")
def texts():
    lines = (DATA / "gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines()[:200]
    return [json.loads(line)["question"] for line in lines]


@pytest.fixture(scope="module")
def model():
    return load_pretrained(FOLDER)


def test_ids_equal_those_of_transformers(model, texts):
    from transformers import AutoTokenizer

    options = {"vocab_size": model.config.vocab_size, "num_prompts": 200, "seed": 0, "heldout_share": 0.0}
    rows = [{"prompt": text} for text in texts]
    task = text_task(model.tokenizer, model.eos_ids, rows, reward=lambda rows, texts: [0.0], chat=False, **options)
    prompts, tokenizer = task.prompts(0), AutoTokenizer.from_pretrained(FOLDER)
    assert len(prompts.examples) == 200
    for ids, mask, example in zip(prompts.tokens.ids, prompts.tokens.mask, prompts.examples, strict=True):
        assert ids[mask].tolist() == tokenizer(example["prompt"]).input_ids


def difference(folder, model, texts):
    """Returns the largest difference of log-probabilities between transformers and this model, both in float32."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager")
    policy = decoder_policy(model.config)

    @jax.jit
    def logits(params, ids):
        states = states_of_texts(policy, params, ids, np.ones(ids.shape, np.int32))
        return softcapped(states @ policy.unembedding(params).T, policy.softcap)

    largest = 0.0
    for text in texts:
        ids = np.array([model.tokenizer.encode(text)[:WIDTH]], np.int32)
        padded = np.pad(ids, ((0, 0), (0, WIDTH - ids.shape[1])))
        with torch.no_grad():
            expected = reference.eval()(torch.from_numpy(ids).long()).logits.numpy()
        largest = max(largest, float(np.abs(logits(model.params, padded)[:, : ids.shape[1]] - expected).max()))
    return largest


def test_logits_equal_those_of_transformers(model, texts):
    largest = difference(FOLDER, model, texts[:20])
    print(f"\nlogits of 20 texts differ by at most {largest:.2g}")
    assert largest < 1e-2


def test_the_sampler_and_the_trainer_agree(model, texts):
    policy = decoder_policy(model.config)
    prompt = whole_prompts(np.array([model.tokenizer.encode(text)[:16] for text in texts[:2]]))
    sample = sampler_of(policy, max_tokens=16, eos_ids=model.eos_ids)
    sampled = jax.device_get(sample(model.params, prompt, row_numbers(2, 2), jax.random.key(0)))
    batch = Batch(prompt, sampled.completion_ids, sampled.completion_mask, np.ones((2, 2), np.float32))
    logprobs = jax.jit(lambda params: score_completion_tokens(policy, params, batch).logprobs)(model.params)
    largest = float(np.abs(logprobs - sampled.sampler_logprobs)[sampled.completion_mask].max())
    print(f"\nlog-probabilities of the sampler and of the trainer differ by at most {largest:.2g}")
    assert largest < 1e-3


def test_a_run_of_ten_steps_and_its_export(texts, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": " ".join(text.split()[:8])} for text in texts[:20]])
    options = f"--model {FOLDER} --task {rows} --reward length(target=4) --chat False --run-dir {tmp_path / 'run'}"
    options += " --steps 10 --num-prompts 2 --group-size 2 --max-tokens 8 --num-heldout 2 --eval-every 0 --lora-rank 4"
    options += " --param-dtype bfloat16"  # as in the files; needs less memory
    call = "from grpo_jax.commands import main; main()"
    for arguments in (f"train {options}", f"export {tmp_path / 'run'} {tmp_path / 'out'} --dtype float32"):
        subprocess.run([sys.executable, "-c", call, *arguments.split()], check=True)
    metrics = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[-1])["step"] == 10
    largest = difference(tmp_path / "out", load_pretrained(Path(tmp_path / "out")), texts[:4])
    print(f"\nlogits of the export differ by at most {largest:.2g}")
    assert largest < 1e-2
