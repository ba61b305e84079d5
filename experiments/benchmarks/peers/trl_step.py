# mypy: ignore-errors
"""Seconds per GRPO step of TRL's GRPOTrainer on CPU, for a small Qwen2 decoder with random weights.

`python -m experiments.benchmarks.peers` starts this script with a file that describes the decoder and prompts.
"""

from experiments.benchmarks.peers import peer_common as common

common.set_up()  # before torch
SHAPE = common.shape_from_arguments(__doc__)
STEPS = len(SHAPE.prompts)

import tempfile

import torch

torch.set_num_threads(common.CORES)

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer

transformers_logging.disable_progress_bar()
UNKNOWN, PAD, EOS = SHAPE.vocabulary - 3, SHAPE.vocabulary - 2, SHAPE.vocabulary - 1
LENGTHS: list[int] = []  # of the completions of a step


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {str(i): i for i in range(SHAPE.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=str(UNKNOWN)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=str(UNKNOWN), pad_token=str(PAD), eos_token=str(EOS), padding_side="left"
    )


def make_model(folder: str) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=SHAPE.vocabulary,
        hidden_size=SHAPE.hidden,
        intermediate_size=SHAPE.ffn,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        max_position_embeddings=SHAPE.longest_prompt + SHAPE.completion,
        rms_norm_eps=common.NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": common.ROPE_THETA},
        initializer_range=SHAPE.init,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[*SHAPE.ends, EOS],
        pad_token_id=PAD,
        dtype="float32",
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    # Load from the folder, because the trainer loads the reference from the policy's path.
    return Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)


def reward(completions, completion_ids, **_):
    LENGTHS[:] = [len(ids) for ids in completion_ids]
    return [common.reward_of(ids) for ids in completion_ids]


class Timed(GRPOTrainer):
    steps: common.Steps

    def _generate_single_turn(self, *args, **kwargs):
        with self.steps.generating():
            return super()._generate_single_turn(*args, **kwargs)


class StepEnds(TrainerCallback):
    trainer: Timed

    def on_step_end(self, args, state, control, **_):
        self.trainer.steps.end(LENGTHS)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = make_model(folder), make_tokenizer()
        texts = SHAPE.texts
        config = GRPOConfig(
            output_dir=folder + "/out",
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=SHAPE.completions,
            gradient_accumulation_steps=1,
            gradient_checkpointing=False,
            num_generations=SHAPE.group,
            max_completion_length=SHAPE.completion,
            generation_kwargs={} if SHAPE.ends else {"min_new_tokens": SHAPE.completion},
            learning_rate=common.LEARNING_RATE,
            dataloader_pin_memory=False,
            logging_steps=1,
            seed=0,
            **common.TRL_SETTINGS,
        )
        trainer = Timed(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=tokenizer,
        )
        trainer.remove_callback(PrinterCallback)
        ends = StepEnds()
        ends.trainer = trainer
        trainer.add_callback(ends)
        assert trainer.ref_model not in (None, model)
        assert [ids for step in SHAPE.prompts for ids in step] == tokenizer(texts)["input_ids"]
        parameters = sum(p.numel() for p in model.parameters())
        assert parameters == SHAPE.parameters, (parameters, SHAPE.parameters)
        trainer.steps = common.Steps()
        trainer.train()


if __name__ == "__main__":
    main()
