"""The paper's runs: its set-up, its models and its methods."""

from itertools import product

import pytest

from tepo_nemo.config.load import load_config
from tepo_nemo.config.presets import choices, config_folder

MODELS = ["qwen2_5_7b", "qwen2_5_14b", "qwen3_14b", "r1_distill_llama_8b", "mistral_7b_instruct"]
# Rows of the paper's tables, and what the README says to put on top of an experiment.
METHODS = {
    "TEPO": "algorithm=tepo",
    "TEPO w/o KL": "algorithm=tepo_no_kl",
    "GRPO/DAPO": "algorithm=grpo_dapo",
    "Clip-Cov": "algorithm=clip_cov",
    "KL-Cov": "algorithm=kl_cov",
    "Entropy-based term": "algorithm=entropy_term",
    "GPG": "algorithm=gpg",
}


def test_these_are_the_models():
    papers = {name.removeprefix("paper_") for name in choices()["experiment"] if name.startswith("paper_")}
    assert papers == set(MODELS) == set(choices()["model"]) - {"toy"}


@pytest.mark.parametrize(("model", "method"), [*product(MODELS, METHODS)])
def test_a_run_has_the_papers_set_up(model, method):
    config = load_config([f"experiment=paper_{model}", METHODS[method]])
    rollout, trainer = config.rollout, config.trainer
    assert config.model.name == model
    assert (rollout.prompts_per_step, rollout.responses_per_prompt, trainer.updates_per_rollout) == (64, 8, 8)
    assert (rollout.temperature, rollout.max_response_length) == (1.0, 8192)
    assert config.model.encoder_seq_length == 2048 + 8192
    assert (trainer.max_steps, trainer.warmup_steps) == (72, 0)
    optimizer = trainer.optimizer
    assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.gradient_clip) == (1e-6, 0.0, 1.0)
    assert config.data.train.name == "dapo_math_17k.jsonl"
    assert [benchmark.samples for benchmark in config.data.evaluation] == [32, 32, 32, 1, 1, 1, 1]
    assert config.layout.responses_per_update == 64


@pytest.mark.parametrize("model", MODELS)
def test_the_experiment_of_a_model_is_the_common_one_with_it(model):
    assert load_config([f"experiment=paper_{model}"]) == load_config(["experiment=paper", f"model={model}"])


def test_panels_come_on_top():
    panel = load_config(["experiment=[paper_qwen2_5_7b,panel_a_beta_0_1]"])
    assert panel.model.name == "qwen2_5_7b"
    assert (panel.algorithm.options["kl_mask"], panel.algorithm.options["kl_coefficient"]) == ("all", 0.1)


def test_other_hardware_is_one_word():
    config = load_config(["experiment=paper_qwen3_14b", "hardware=h100x32"])
    assert (config.layout.world, config.layout.data) == (32, 4)


def test_the_readme_names_every_row():
    text = (config_folder() / "README.md").read_text()
    for method, word in METHODS.items():
        assert method.split("/")[0] in text
        assert word == "algorithm=tepo" or f"`{word}`" in text
