"""Makes golden.npz beside this file: logits of a student and its teacher, and what TRL's code computes of them.

GKD's divergence is `GKDTrainer.generalized_jsd_loss`, whose β of 0 and 1 are the forward and the reverse KL. The
truncated one is SDPO's, with a bucket for the tail. Its support are the student's likeliest tokens; ours are the
teacher's. So the two change places, and α is 1 − β. Values are of tokens, gradients those of their sum in the student's
logits, by torch's autograd in float64. Inputs are float32.

Made with torch 2.13.0 (CPU), trl 1.16.0, numpy 2.4.6. The tests that read the file need none of them.

  python tests/golden/distillation/make.py
"""

from pathlib import Path

import numpy as np
import torch
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.sdpo.loss_utils import compute_topk_self_distillation_loss

FILE = Path(__file__).with_name("golden.npz")
N, T, V, K, TEMPERATURE = 3, 4, 17, 5, 0.7
BETAS = {"forward_kl": 0.0, "jsd_0.1": 0.1, "jsd_0.5": 0.5, "jsd_0.9": 0.9, "reverse_kl": 1.0}


def make_inputs() -> dict[str, np.ndarray]:
    """Logits [N, T, V], the first near each other; none so far apart that TRL cuts the tail off, at 1e-7."""
    rng = np.random.default_rng(0)
    teacher = rng.normal(size=(N, T, V))
    distance = np.array([0.1, 1.0, 3.0])[:, None, None]
    student = teacher + distance * rng.normal(size=(N, T, V))
    return {"student": student.astype(np.float32), "teacher": teacher.astype(np.float32)}


def values_and_gradients(loss, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A divergence of tokens [N, T], and the gradient of their sum."""
    student = torch.from_numpy(inputs["student"]).double().requires_grad_()
    values = loss(student, torch.from_numpy(inputs["teacher"]).double())
    values.sum().backward()
    return {"values": values.detach().numpy(), "gradient": student.grad.numpy()}


def main() -> None:
    """Writes the file anew."""
    inputs, golden = make_inputs(), {}
    for name, beta in BETAS.items():

        def full(student, teacher, beta=beta):
            loss = GKDTrainer.generalized_jsd_loss
            return loss(student, teacher, beta=beta, temperature=TEMPERATURE, reduction="none").sum(-1)

        def truncated(student, teacher, beta=beta):
            options = {"distillation_topk": K, "distillation_alpha": 1 - beta, "distillation_add_tail": True}
            return compute_topk_self_distillation_loss(teacher / TEMPERATURE, student / TEMPERATURE, **options)

        for kind, loss in (("full", full), ("top", truncated)):
            found = values_and_gradients(loss, inputs)
            golden |= {f"{kind}.{name}.{part}": value for part, value in found.items()}
    np.savez_compressed(FILE, **{f"input.{name}": value for name, value in inputs.items()}, **golden)


if __name__ == "__main__":
    main()
