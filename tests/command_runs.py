"""Inputs and arguments of short runs of every method by the command line: models, rows, a reward, an environment."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
from tiny import GOLDEN, random_params

from experiments.new_models import save_new_model
from experiments.tasks.characters import Characters
from grpo_jax.models.config import ModelConfig

TEXT = Characters("0123456789+= abcdefg")
USER_CODE = '''
def low(rows, texts):
    return [float(sum(map(text.count, "01234"))) for text in texts]


def make():
    """The environment: it answers with a digit and rewards low digits of each turn."""
    from grpo_jax.data.episodes import Reply

    def reply(example, transcript, key):
        text = transcript[-1].action
        return Reply(str(len(text) % 10), reward=float(sum(map(text.count, "01234"))))

    return reply


def chain(schedule):
    """The optimizer: its state has noise, a trace and no other moments."""
    import optax

    noise = optax.add_noise(1e-4, 0.5, 0)
    return optax.chain(optax.clip_by_global_norm(1.0), noise, optax.sgd(schedule, momentum=0.9))
'''

# With a large ε, AdamW's step is nearly proportional to the gradient, so rounding errors do not grow with the steps.
SGD = "--adam-epsilon 100 --learning-rate 10 --max-grad-norm 1e9"
STEPS = "--eval-every 0 --checkpoint-every 0 --rollouts-every 1 --eval-samples 1 --num-heldout 2"
ROLLOUTS = f"--model model --task rows.jsonl --num-prompts 4 --max-tokens 6 {STEPS}"
GRPO = f"{ROLLOUTS} --group-size 4 {SGD}"
EPISODES = f"{GRPO} --steps 1 --max-turns 3 --environment-tokens 4 --max-tokens 12"
PPO = f"--method ppo {ROLLOUTS} {SGD} --critic-learning-rate 10 --steps 2 --reward user.py:low"
FIT = "--model model --steps 2 --log-every 1 --eval-every 1 --warmup-steps 0 --learning-rate 1e-3 --max-grad-norm 1e9"
SFT = f"--method sft {FIT} --task rows.jsonl --num-rows 8 --max-tokens 8 --num-heldout 4"
DPO = f"--method dpo {FIT} --task rows.jsonl --num-pairs 8"
KTO = f"--method kto {FIT} --task rows.jsonl --num-completions 8"
REWARD_MODEL = f"--method reward-model {FIT} --task rows.jsonl --num-pairs 8"
# No command trains on online preferences, so the experiment does.
ONLINE = "--warm-steps 2 --labels 128 --rounds 2 --steps 2 --num-prompts 8 --group-size 4 --eval-every 1 --num-seeds 1"
OWN, MUON = (f"{ROLLOUTS} --group-size 4 --reward user.py:low --optimizer {x}" for x in ("user.py:chain", "muon"))
PMAP, MESH = "--parallel pmap --devices 4", "--parallel mesh --devices 8 --fsdp 2 --tensor 2"


def write_inputs(folder: Path) -> None:
    """Writes three random models with tokenizers, rows that serve every method, a reward and an environment."""
    write_model(folder / "model", hidden=32)
    write_model(folder / "teacher", hidden=48)
    shutil.copytree(GOLDEN / "qwen3_5", folder / "qwen3_5")
    TEXT.save_tokenizer(folder / "qwen3_5")
    sums = [(f"{i}+{j}=", i + j) for i in range(6) for j in range(6)]
    rows = [
        {"prompt": prompt, "completion": str(total), "chosen": str(total), "rejected": f"{total + 1}a", "answer": total}
        for prompt, total in sums
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "user.py").write_text(USER_CODE)
    shutil.copy(Path(__file__).with_name("own_presets.py"), folder / "own.py")


def write_model(folder: Path, *, hidden: int) -> None:
    """Writes a random model in Hugging Face's format, with a tokenizer of characters."""
    config = ModelConfig(TEXT.vocab_size, hidden, 2 * hidden, 2, 4, 2, hidden // 4, tie_word_embeddings=False)
    params = random_params(config, 0.2)
    # Feature 0 is nearly constant, and makes EOS likely, so that turns end.
    embedding = params["embedding"].at[:, 0].set(3)
    unembedding = params["unembedding"].at[:, 0].set(4 * (jnp.arange(TEXT.vocab_size) == TEXT.eos_id))
    save_new_model(folder, params | {"embedding": embedding, "unembedding": unembedding}, config)
    TEXT.save_tokenizer(folder)
