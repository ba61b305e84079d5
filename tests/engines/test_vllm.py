"""Runs and planted faults with a real vLLM on a CPU, which `.ci/engine` installs. Without it these tests are skipped.

A server takes one to three minutes to start, so the tests are ordered by server, and one server runs at a time.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from urllib.request import urlopen

import jax
import pytest
from server import Dropping
from tiny import TEMPLATE, read_lines, refused, tiny_config, write_rows, write_tokenizer

from experiments.new_models import save_new_model
from grpo_jax.commands import flags, grpo
from grpo_jax.engines import sampler
from grpo_jax.models.policy import decoder_policy
from grpo_jax.runs.folder import WAIT_SHARES, RunFolder

ROOT = Path(__file__).parents[2]
VLLM = Path(os.environ.get("VLLM", ROOT / ".venv-vllm/bin/vllm"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not VLLM.exists(), reason="needs vLLM: .ci/engine installs it")]

VOCAB_SIZE = 64
WORKER = ("--worker-extension-cls", "grpo_jax.engines.worker.PolicyWorker")
RIGHT = ("--dtype", "float32", "--logprobs-mode", "processed_logprobs")
OPTIONS = "--served-model-name the-model --enforce-eager --gpu-memory-utilization 0.1 --max-model-len 64"
OPTIONS += " --max-num-batched-tokens 16384 --enable-lora --max-lora-rank 16 --host 127.0.0.1"
VARIABLES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_CPU_KVCACHE_SPACE": "1"}
VARIABLES |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
RUN = "--num-prompts 4 --group-size 4 --max-tokens 8 --num-heldout 2 --eval-every 0"
RUN += " --eval-samples 1 --learning-rate 1e-3 --checkpoint-every 0 --engine-timeout 600"

REWARD = "def variety(examples, completions):\n    return [len({*text.split()}) / 8 for text in completions]\n"

GAME = '''
from grpo_jax.data.episodes import Reply

def add(a: int) -> int:
    """Adds one.

    Args:
        a: a number.
    """
    return a + 1

def make():
    return lambda example, transcript, key: Reply(ids=[7, 5, 9][: 1 + key[3] % 3], reward=float(key[4]))
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with rows and three models. A generation config would change every request that left an option out."""
    folder = tmp_path_factory.mktemp("vllm")
    write_rows(folder / "rows.jsonl", [{"prompt": f"t{i} t{i + 9} t{i + 20}"} for i in range(16)])
    (folder / "rewards.py").write_text(REWARD)
    (folder / "game.py").write_text(GAME)
    for seed, (name, is_tied) in enumerate({"tied": True, "untied": False, "other": True}.items()):
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
        config = tiny_config(VOCAB_SIZE, tie_word_embeddings=is_tied, **shape)
        save_new_model(folder / name, jax.jit(decoder_policy(config).init)(jax.random.key(seed)), config)
        write_tokenizer(folder / name, VOCAB_SIZE)
        defaults = {"temperature": 0.3, "top_k": 5, "repetition_penalty": 2.0, "eos_token_id": 2}  # 2 ends no row here
        (folder / name / "generation_config.json").write_text(json.dumps(defaults))
    return folder


class Running:
    """A vLLM server of a model, which can be killed and started again."""

    def __init__(self, model, *options):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._command = [VLLM, "serve", model, "--port", str(port), *OPTIONS.split(), *options]
        self._log = model.parent / f"vllm-{port}.log"
        self.start()

    def start(self):
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command, env=os.environ | VARIABLES, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self):
        for _ in range(600):
            assert self._process.poll() is None, self._log.read_text()[-2000:]
            with contextlib.suppress(OSError), urlopen(f"{self.url}/health", timeout=1):
                return self
            time.sleep(1)
        raise TimeoutError

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="module")
def serve(folder):
    """Returns the server of a model with options. Only the last one runs."""
    servers: dict = {}

    def server_of(name, *options):
        if (name, options) not in servers:
            for other in servers.values():
                other.kill()
            servers.clear()
            servers[name, options] = Running(folder / name, *options).wait()
        return servers[name, options]

    yield server_of
    for server in servers.values():
        server.kill()


def train(folder, run_dir, model, url, *options, steps=3):
    args = ["--model", folder / model, "--task", folder / "rows.jsonl", "--run-dir", run_dir, "--steps", steps]
    args += [*RUN.split(), "--reward", f"{folder}/rewards.py:variety", *(("--engine", url) if url else ()), *options]
    grpo.main(flags.parse(grpo.Config, None, list(map(str, args))))


def steps_of(run_dir):
    file = run_dir / "metrics.jsonl"
    return [line for line in read_lines(file) if line["step"]] if file.exists() else []


def tokens_of(run_dir):
    return [group["tokens"] for group in read_lines(run_dir / "rollouts.jsonl")]


SERVERS = {"tied": (*RIGHT, *WORKER), "untied": RIGHT}


@pytest.mark.parametrize("model", SERVERS)
@pytest.mark.parametrize("adapters", [(), ("--lora-rank", 4)], ids=["full", "lora"])
def test_ratios_are_1_before_each_update(folder, serve, tmp_path, model, adapters):
    train(folder, tmp_path / "run", model, serve(model, *SERVERS[model]).url, *adapters, steps=20)
    deviations = [line["first_ratio_deviation"] for line in steps_of(tmp_path / "run")]
    assert len(deviations) == 20
    assert min(line["grad_norm"] for line in steps_of(tmp_path / "run")) > 0  # so each step needs other parameters
    assert max(deviations) < 1e-4


def test_a_restarted_server_changes_no_token(folder, serve, tmp_path):
    server = serve("untied", *RIGHT)
    options = ("--rollouts-every", 1, "--temperature", 0.9)
    train(folder, tmp_path / "whole", "untied", server.url, *options, steps=12)

    def restart():
        while len(steps_of(tmp_path / "run")) < 4:
            time.sleep(0.05)
        server.kill()
        server.start()

    thread = threading.Thread(target=restart)
    thread.start()
    train(folder, tmp_path / "run", "untied", server.url, *options, steps=12)
    thread.join()
    assert tokens_of(tmp_path / "run") == tokens_of(tmp_path / "whole")


class Stop(Exception):
    """The exception that breaks a run off."""


@pytest.mark.parametrize("adapters", [(), ("--lora-rank", 4)], ids=["full", "lora"])
def test_sampling_alongside_training_changes_no_token(folder, serve, tmp_path, monkeypatch, adapters):
    """Nor does a run that breaks off between two checkpoints and is resumed."""
    url = serve("untied", *RIGHT).url
    options = (*adapters, "--rollouts-every", 1, "--staleness", 1, "--checkpoint-every", 4)
    with monkeypatch.context() as patch:
        make = sampler.sampler_of
        patch.setattr(sampler, "sampler_of", lambda *args, **kwargs: make(*args, **kwargs)._replace(at_once=0))
        train(folder, tmp_path / "turns", "untied", url, *options, steps=12)
    train(folder, tmp_path / "beside", "untied", url, *options, steps=12)
    with monkeypatch.context() as patch:
        log = RunFolder.log

        def log_until(run, phase, step, values):
            if step == 7:
                raise Stop
            return log(run, phase, step, values)

        patch.setattr(RunFolder, "log", log_until)
        with pytest.raises(Stop):
            train(folder, tmp_path / "cut", "untied", url, *options, steps=12)
    lines = (tmp_path / "cut/journal/completions.jsonl").read_text().splitlines()
    assert len(lines) >= 3 * 16  # of the rollouts that were sampled after the checkpoint
    train(folder, tmp_path / "cut", "untied", url, *options, "--resume", steps=12)
    for name in ("beside", "cut"):
        assert tokens_of(tmp_path / name) == tokens_of(tmp_path / "turns")
    assert WAIT_SHARES[0] in read_lines(tmp_path / "beside/times.jsonl")[5]


def test_episodes_learn_from_the_ids_that_were_sampled(folder, serve, tmp_path):
    server = serve("untied", *RIGHT)
    options = ("--environment", f"{folder}/game.py:make", "--max-turns", 3, "--environment-tokens", 6, "--stop", "t1")
    train(folder, tmp_path / "run", "untied", server.url, *options, "--rollouts-every", 1, "--max-tokens", 16, steps=6)
    lines = steps_of(tmp_path / "run")
    assert max(line["turns_mean"] for line in lines) > 1
    assert max(line["first_ratio_deviation"] for line in lines) < 1e-4


def test_stop_texts_end_completions_as_in_the_trainer(folder, serve, tmp_path):
    """An answer that ends where the trainer sees no stop text would end the run."""
    server = serve("untied", *RIGHT)
    train(folder, tmp_path / "run", "untied", server.url, "--stop", "t1", "t2 ", "--rollouts-every", 1, steps=6)
    texts = [text for group in tokens_of(tmp_path / "run") for text in group]
    assert any(text[-1] == " " for text in texts)  # what the stop text leaves of its token
    assert max(line["first_ratio_deviation"] for line in steps_of(tmp_path / "run")) < 1e-4


LIMITS = [("--top-p", 0.8), ("--top-k", 20), ("--min-p", 0.1), ("--top-p", 0.9, "--top-k", 20, "--min-p", 0.02)]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_supports_are_computed_as_the_server_truncates(folder, serve, tmp_path, limits):
    server = serve("untied", *RIGHT)
    train(
        folder, tmp_path / "run", "untied", server.url, *limits, "--support", "sampler", "--temperature", 0.8, steps=6
    )
    lines = steps_of(tmp_path / "run")
    assert max(line["first_ratio_deviation"] for line in lines) < 1e-3
    assert max(line["support_border"] for line in lines) < 0.1
    assert max(line["support_left_out"] for line in lines) < 1e-5


def test_replies_of_tools_continue_sampled_ids(folder, serve, tmp_path):
    """Half of the tokens are calls of a tool, so that a random model calls it."""
    model = shutil.copytree(folder / "untied", folder / "calling", dirs_exist_ok=True)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    calls = ({"name": "add", "arguments": {"a": i}} for i in range(VOCAB_SIZE))
    words = [f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls]
    tokenizer["model"]["vocab"] = {words[i] if i > VOCAB_SIZE // 2 else f"t{i}": i for i in range(VOCAB_SIZE)}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    options = ("--tools", f"{folder}/game.py:add", "--max-turns", 3, "--environment-tokens", 24, "--max-tokens", 16)
    url = serve("untied", *RIGHT).url
    train(folder, tmp_path / "run", "calling", url, *options, "--rollouts-every", 1, steps=4)
    lines = steps_of(tmp_path / "run")
    assert max(line["environment_calls"] for line in lines) > 0.2
    assert max(line["turns_mean"] for line in lines) > 1
    assert max(line["first_ratio_deviation"] for line in lines) < 1e-4


# the model, options of the run, the method or path that is dropped, and words of the refusal
DROPS = {
    "a load of plain vLLM": ("untied", (), "reload_weights", "log-probabilities of a prompt differ"),
    "a load by the worker": ("tied", (), "load_policy", "told to load .* does not hold it"),
    "an adapter": ("tied", ("--lora-rank", 4), "/v1/load_lora_adapter", "told to load .* does not hold it"),
}


@pytest.mark.parametrize("case", DROPS)
def test_dropped_loads_end_a_run_before_an_update(folder, serve, tmp_path, case):
    model, options, dropped, words = DROPS[case]
    proxy = Dropping(serve(model, *SERVERS[model]).url)
    try:
        train(folder, tmp_path / "right", model, proxy.url, *options, steps=2)
        proxy.drops = dropped
        with refused(words):
            train(folder, tmp_path / "run", model, proxy.url, *options)
    finally:
        proxy.stop()
    assert not steps_of(tmp_path / "run")


FAULTS = {
    "another model, and a head that stays stale": ("tied", (), "log-probabilities of a prompt differ .* tied head"),
    "a head that stays stale": ("other", (), "log-probabilities of a prompt differ .* tied head"),
    "another base": ("tied", ("--lora-rank", 4), "log-probabilities of a prompt differ .* another model"),
    "raw log-probabilities": ("other", ("--temperature", 0.7), "of sampled tokens differ .* processed_logprobs"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_end_a_run_before_it_learns(folder, serve, tmp_path, fault):
    model, options, words = FAULTS[fault]
    server = serve("other", "--dtype", "float32")
    with refused(words):
        train(folder, tmp_path / "run", model, server.url, *options)
    steps = steps_of(tmp_path / "run")
    assert len(steps) == (fault == "a head that stays stale")  # the first update makes the head stale


def test_an_unnamed_dtype_ends_a_run(folder, serve, tmp_path):
    server = serve("untied", "--logprobs-mode", "processed_logprobs")  # bfloat16 is vLLM's choice
    with refused("--dtype float32, or name its dtype with engine_dtype"):
        train(folder, tmp_path / "run", "untied", server.url)
    train(folder, tmp_path / "named", "untied", server.url, "--engine-dtype", "bfloat16")
    assert len(steps_of(tmp_path / "named")) == 3
    assert all("correction" in line for line in steps_of(tmp_path / "named"))  # auto is then token
