"""Settings that all libraries share, without importing one of them."""

import os

CORES = len(os.sched_getaffinity(0))
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(CORES))
OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
QUIET = {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}

BETA, CLIP, MAX_GRAD_NORM = 0.04, 0.2, 1.0
# The options of TRL's GRPOConfig that make it compute what this library computes. A plan sets the other options.
TRL_SETTINGS = {
    "bf16": False,
    "model_init_kwargs": {"dtype": "float32"},
    "num_iterations": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "beta": BETA,
    "use_bias_correction_kl": False,
    "epsilon": CLIP,
    "loss_type": "grpo",
    "scale_rewards": "group",
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": MAX_GRAD_NORM,
    "shuffle_dataset": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


def set_up() -> None:
    """Sets variables of the environment that are not set, which libraries read when they are imported."""
    os.environ |= {name: os.environ.get(name, value) for name, value in (THREADS | OFFLINE | QUIET | ON_CPU).items()}
