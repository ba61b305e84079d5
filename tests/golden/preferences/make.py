"""Makes golden.npz beside this file: ragged pairs, and what TRL's own trainers compute of them.

Every loss comes from TRL's code: trainers without their __init__, with a stand-in for the model that gives our
log-probabilities. Losses come with their gradient in the log-probabilities of tokens, by torch's autograd in float64.
Inputs are float32, multiples of 2⁻¹², so that float32 holds their sums exactly.

Made with torch 2.13.0 (CPU), trl 1.16.0, numpy 2.4.6. The tests that read the file need none of them.

  PYTHONPATH=tests/golden python tests/golden/preferences/make.py

Where TRL differs from this library, and what is compared then:
- TRL takes the NLL in CPO and ORPO over all tokens of the batch, ours is one of each pair: one pair at a time.
- ORPO's NLL in TRL is of the prompt too: the stand-in's prompt is one token, which nothing predicts.
- ORPOTrainer casts to float32 on its way: the cast is made one to float64.
- TRL concatenates desirable and undesirable completions: the order does not matter in a mean.
"""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from peers import grid, loss_and_gradient, make_trainer, near
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

FILE = Path(__file__).with_name("golden.npz")
N, T = 5, 9
M = 16  # completions that were rated, each beside one of another prompt


def make_inputs() -> dict[str, np.ndarray]:
    """N pairs of completions of at most T tokens, and N mismatched ones; M rated ones, each with a mismatched one."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, T + 1, (N, 2))
    lengths[0], lengths[1] = (1, T), (T, 2)
    logprobs = -grid(rng.exponential(1.5, (N, 2, T)) + 1 / 4096)
    mismatched = -grid(rng.exponential(1.5, (N, T)) + 1 / 4096)
    pairs = {
        "mask": np.arange(T) < lengths[..., None],
        "logprobs": logprobs,
        "ref": near(rng, logprobs, 1.0),
        "desirable": np.array([[True, False], [True, False], [True, True], [False, False], [True, False]]),
        "mismatched_mask": np.arange(T) < rng.integers(1, T + 1, N)[:, None],
        "mismatched": mismatched,
        "mismatched_ref": mismatched - np.abs(grid(0.5 * rng.normal(size=mismatched.shape))),
    }
    rated = -grid(rng.exponential(1.5, (M, 2, T)) + 1 / 4096)
    return pairs | {
        "rated_mask": np.arange(T) < rng.integers(1, T + 1, (M, 2))[..., None],
        "rated": rated,
        "rated_ref": np.minimum(near(rng, rated, 1.0) - grid([[0.0], [0.25]]), np.float32(-1 / 4096)),
        "rated_desirable": rng.random(M) < 0.4,
    }


INPUTS = make_inputs()
GOLDEN: dict[str, np.ndarray] = {}


def tensor(name: str) -> torch.Tensor:
    """An input in float64, or a mask."""
    x = torch.from_numpy(INPUTS[name])
    return x if x.dtype == torch.bool else x.double()


MASK = tensor("mask")


def stacked(x: torch.Tensor) -> torch.Tensor:
    """[N, 2, ...] as TRL has it: all chosen ones, then all rejected ones."""
    return torch.cat([x[:, 0], x[:, 1]])


def sums(logprobs: torch.Tensor) -> torch.Tensor:
    """Returns the sums over tokens, [N, 2]."""
    return (logprobs * MASK).sum(-1)


def save(name: str, loss_of, *, of: str = "logprobs") -> None:
    """A loss, and its gradient in the log-probabilities of tokens."""
    results = loss_and_gradient(loss_of, tensor(of))
    GOLDEN.update({f"{name}.{part}": value.numpy() for part, value in results.items()})


def trainer(cls, **attributes):
    """A TRL trainer that counts nothing yet."""
    state = {"model": SimpleNamespace(training=True), "_metrics": {"train": defaultdict(list)}}
    return make_trainer(cls, **state, _total_train_tokens=0, _tp_size=1, **attributes)


def outputs(logprobs: torch.Tensor) -> SimpleNamespace:
    """Returns the output of a model of TRL, masked as it masks; none of the rest enters a loss."""
    zeros = torch.zeros_like(logprobs)
    return SimpleNamespace(log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros > 0)


def with_prompt(mask: torch.Tensor) -> torch.Tensor:
    """A prompt of one token before each completion."""
    return torch.nn.functional.pad(mask.long(), (1, 0))


def dpo(name: str, loss_type: str, *, beta: float = 0.1, label_smoothing: float = 0.0) -> None:
    """A loss of DPOTrainer."""
    mask = stacked(MASK)
    ref_chosen, ref_rejected = sums(tensor("ref")).T
    inputs = {
        "input_ids": with_prompt(mask),
        "attention_mask": torch.ones(2 * N, T + 1),
        "completion_mask": with_prompt(mask),
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    options = {"loss_types": [loss_type], "loss_weights": [1.0], "beta": beta, "label_smoothing": label_smoothing}
    others = {"ld_alpha": None, "f_divergence_type": "reverse_kl", "use_weighting": False, "precompute_ref_logps": True}

    def loss_of(x):
        self = trainer(DPOTrainer, **options, **others)
        return self._compute_loss(lambda **_: outputs(stacked(x * MASK)), inputs, False)

    save(name, loss_of)


def logits_of(logprobs: torch.Tensor) -> torch.Tensor:
    """Logits [..., T + 1, 2] of two tokens, of which number 0 has these log-probabilities."""
    pair = torch.stack([logprobs, torch.log(-torch.expm1(logprobs))], dim=-1)
    return torch.nn.functional.pad(pair, (0, 0, 0, 1))  # the last token predicts nothing


def pair_by_pair(name: str, cls, **options) -> None:
    """The whole loss of CPOTrainer or ORPOTrainer, the mean over batches of one pair."""

    def loss_of_pair(x, number):
        arrays = {}
        for side, kind in enumerate(("chosen", "rejected")):
            mask = with_prompt(MASK[number, side][None])
            arrays[f"{kind}_input_ids"] = torch.zeros_like(mask)
            attended = mask.clone()
            attended[:, 0] = 1
            arrays[f"{kind}_attention_mask"] = attended
            arrays[f"{kind}_labels"] = torch.where(mask > 0, 0, -100)
        logits = logits_of(torch.where(MASK[number], x[number], -1.0))
        self = trainer(cls, **options, pad_token_id=0, padding_value=0)
        return self.get_batch_loss_metrics(lambda *_, **__: SimpleNamespace(logits=logits), arrays)[0]

    save(name, lambda x: torch.stack([loss_of_pair(x, number) for number in range(N)]).mean())


def cpo(name: str, loss_type: str, **options) -> None:
    """A loss of CPOTrainer, without an NLL unless it is given."""
    defaults = {"cpo_alpha": 0.0, "simpo_gamma": 0.0, "label_smoothing": 0.0, "alpha": 0.0}
    pair_by_pair(name, CPOTrainer, loss_type=loss_type, **defaults | options)


def kto(name: str, **options) -> None:
    """The loss of KTOTrainer, with its estimate of the KL, of both completions of each pair."""
    mismatched_mask = tensor("mismatched_mask")
    others = tensor("mismatched"), tensor("mismatched_ref"), mismatched_mask
    ratings = stacked(MASK), stacked(sums(tensor("ref"))), stacked(tensor("desirable"))
    save(name, lambda x: loss_of_kto(stacked(x), *ratings, *others, **options))


def rated(name: str, **options) -> None:
    """Saves the same for M completions and mismatched ones; `input.rated` has both, and a gradient at one alone."""
    mask, ref = tensor("rated_mask"), tensor("rated_ref")
    ratings = mask[:, 0], (ref * mask)[:, 0].sum(-1), tensor("rated_desirable")
    save(name, lambda x: loss_of_kto(x[:, 0], *ratings, x[:, 1], ref[:, 1], mask[:, 1], **options), of="rated")


def loss_of_kto(logprobs, mask, ref_sums, desirable, others, ref_of_others, mask_of_others, **options) -> torch.Tensor:
    """Returns KTOTrainer's loss of completions and mismatched ones, from log-probabilities of their tokens."""
    padded, other = with_prompt(mask), with_prompt(mask_of_others)
    inputs = {
        "input_ids": padded,
        "attention_mask": torch.ones_like(padded),
        "completion_mask": padded,
        "KL_input_ids": other + 2,  # so that the stand-in knows them
        "KL_attention_mask": torch.ones_like(other),
        "KL_completion_mask": other,
        "label": desirable,
        "ref_logps": ref_sums,
        "ref_KL_logps": (ref_of_others * mask_of_others).sum(-1),
    }
    defaults = {"loss_type": "kto", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    options = defaults | options
    self = trainer(KTOTrainer, calculate_KL=options["loss_type"] == "kto", precompute_ref_logps=True, **options)
    own, mismatched = logprobs * mask, others * mask_of_others
    return self._compute_loss(
        lambda input_ids, **_: outputs(mismatched if (input_ids >= 2).all() else own), inputs, False
    )


def main() -> None:
    """Writes the file anew."""
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    dpo("dpo", "sigmoid")
    dpo("robust_dpo", "robust", label_smoothing=0.1)
    dpo("length_normalized_dpo", "sigmoid_norm", beta=5.0)
    dpo("ipo", "ipo")
    dpo("hinge", "hinge", beta=0.4)
    cpo("cpo", "sigmoid", beta=0.1, cpo_alpha=1.0)
    cpo("conservative_without_reference", "sigmoid", beta=0.1, label_smoothing=0.1)
    cpo("hinge_without_reference", "hinge", beta=0.1)
    cpo("ipo_without_reference", "ipo", beta=0.5)
    cpo("simpo", "simpo", beta=2.0, simpo_gamma=1.0)
    pair_by_pair("orpo", ORPOTrainer, beta=0.1)
    kto("kto")
    kto("kto_weighted", beta=0.5, desirable_weight=1.5, undesirable_weight=0.5)
    rated("kto_rated", beta=0.5, desirable_weight=1.25, undesirable_weight=0.75)
    rated("apo_zero", beta=0.5, loss_type="apo_zero_unpaired")
    np.savez_compressed(FILE, **{f"input.{name}": value for name, value in INPUTS.items()}, **GOLDEN)


if __name__ == "__main__":
    main()
