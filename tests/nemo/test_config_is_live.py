"""Each key that reaches the trainer changes the run: the trainer of a configuration, on a tiny policy."""

from contextlib import suppress

import pytest
import torch
from support.tiny_run import PROMPTS, MemorySaver, Recording, letter_reward
from support.torch_policy import TorchPolicy, spell
from support.toy import ToyFolder, build_objective
from support.worlds import Worlds

from tepo_nemo.config.load import dump_config, load_config
from tepo_nemo.config.schema import Config
from tepo_nemo.reward.result import RewardResult
from tepo_nemo.rollout.protocol import RolloutError
from tepo_nemo.rollout.scoring import Grader

BASE = (
    "trainer.max_steps=2",
    "trainer.updates_per_rollout=2",
    "trainer.micro_batch_size=null",
    "trainer.micro_batch_tokens=null",
    "trainer.optimizer.learning_rate=0.5",
    "rollout.prompts_per_step=4",
    "rollout.responses_per_prompt=4",
    "rollout.max_response_length=5",
    "algorithm.dynamic_sampling=false",
    "algorithm.kl_coefficient=0.5",
    "algorithm.max_generation_batches=3",
)
DYNAMIC = "algorithm.dynamic_sampling=true"
# A change, and what it is made on top of.
CHANGES = {
    "seed=2": (),
    "algorithm.ratio=token": (),
    "algorithm.kl_coefficient=0.1": (),
    **{f"algorithm.advantage={name}": () for name in ("mean", "rloo", "gpg", "gpg_nonzero")},
    DYNAMIC: (),
    "algorithm.max_generation_batches=1": (DYNAMIC,),
    "trainer.max_steps=1": (),
    "trainer.updates_per_rollout=4": (),
    "trainer.micro_batch_size=1": (),  # less padding
    "trainer.micro_batch_tokens=16": (),
    "trainer.optimizer.learning_rate=0.2": (),
    "trainer.warmup_steps=3": (),
    "rollout.prompts_per_step=6": (),
    "rollout.responses_per_prompt=3": (),
    "rollout.temperature=0.7": (),
    "rollout.max_response_length=3": (),
    "rollout.correction.token_weight=truncated": (),
    "rollout.correction.token_weight=icepop": (),
    "rollout.correction.response_gap_limit=1e-12": (),
    # The gap is that of float32 to float64: above such limits the run ends.
    "rollout.check.stop_gap=1e-12": ("rollout.check.warn_gap=1e-12",),
    "rollout.check.stop_error=1e-12": ("rollout.check.warn_error=1e-12",),
}


def reward_of_some(prompt: str, response_text: str, gold: str, metadata: dict) -> RewardResult:
    """Nothing for long prompts: their groups have no spread."""
    return letter_reward(prompt, response_text if len(prompt) < 3 else "", gold, metadata)


def outcomes(rank: int, world_size: int, configs: dict[str, Config]) -> dict[str, tuple[torch.Tensor, list]]:
    """Weights and metrics of each configuration's run, in a rank that has the stack."""
    from tepo_nemo.nemo.assembly import make_trainer
    from tepo_nemo.nemo.run import make_correction

    found = {}
    for name, config in configs.items():
        policy = TorchPolicy(
            build_objective(config.algorithm),
            temperature=config.rollout.temperature,
            correction=make_correction(config),
        )
        recording = Recording()
        grader = Grader(policy, reward_of_some, spell)
        saver = MemorySaver(policy)
        trainer = make_trainer(
            config,
            policy,
            policy.objective,
            grader,
            PROMPTS,
            dict,
            recording,
            saver,
            lambda: None,
            lambda: None,
            None,
        )
        with suppress(RolloutError):
            trainer.fit()
        told = [
            {key: value for key, value in row.items() if not key.startswith("time/")}
            for row in recording.metrics
        ]
        found[name] = policy.weights(), told
    return found


@pytest.fixture(scope="module")
def found(
    worlds: Worlds, toy: ToyFolder, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[torch.Tensor, list]]:
    composed = tmp_path_factory.mktemp("live") / "config.yaml"  # once: composing takes longer than the runs
    composed.write_text(dump_config(toy.config(*BASE)))
    settings = {"again": ()} | {on: on for on in CHANGES.values()}
    settings |= {change: (*on, change) for change, on in CHANGES.items()}
    configs = {str(name): load_config(changes, composed) for name, changes in settings.items()}
    (answer,) = worlds(1, stack="nemo").run(outcomes, configs)
    return answer


@pytest.mark.parametrize("change", CHANGES)
def test_a_key_changes_the_run(found: dict[str, tuple[torch.Tensor, list]], change: str) -> None:
    """Weights or metrics."""
    weights, told = found[change]
    before_weights, before_told = found[str(CHANGES[change])]
    assert not torch.equal(weights, before_weights) or repr(told) != repr(before_told)


def test_nothing_changes_without_a_change(found: dict[str, tuple[torch.Tensor, list]]) -> None:
    (weights, told), (weights_again, told_again) = found["()"], found["again"]
    assert torch.equal(weights, weights_again) and repr(told) == repr(told_again)
