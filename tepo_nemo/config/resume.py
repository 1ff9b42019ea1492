"""What a run may change of its configuration when it goes on: what its numbers do not depend on."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from pydantic import ValidationError

from tepo_nemo.config.flat import flat
from tepo_nemo.config.load import read_yaml
from tepo_nemo.config.messages import first_mistake, shown
from tepo_nemo.config.schema import Config
from tepo_nemo.errors import UserError

# A layout changes no number but by rounding, and the prompts themselves are compared. All other keys stay.
MAY_CHANGE = frozenset(
    {
        "output",
        "model.tensor_model_parallel_size",
        "model.pipeline_model_parallel_size",
        "model.sequence_parallel",
        "model.activations_checkpoint_granularity",
        "data.train",
        "data.grading.workers",
        "data.grading.time_limit",
        "data.grading.memory_limit_gib",
        "data.grading.max_tasks",
        "data.grading.alarm_fraction",
        "data.evaluate_before",
        "data.evaluate_after",
        "data.eval_interval",
        "rollout.batch_size",
        "rollout.check.interval",
        "rollout.check.warn_gap",
        "rollout.check.stop_gap",
        "rollout.check.warn_error",
        "rollout.check.stop_error",
        "rollout.trtllm.unload",
        "rollout.trtllm.engine_folder",
        "rollout.trtllm.time_limit",
        "rollout.server.urls",
        "rollout.server.handover_folder",
        "rollout.server.restart_command",
        "rollout.server.sleep",
        "rollout.server.requests_at_once",
        "rollout.server.attempts",
        "rollout.server.backoff",
        "rollout.server.request_time_limit",
        "rollout.server.time_limit",
        "rollout.server.load_time_limit",
        "trainer.max_steps",
        "trainer.micro_batch_tokens",
        "trainer.micro_batch_size",
        "trainer.sequence_packing",
        "trainer.fused_output_layer",
        "trainer.save_interval",
        "trainer.keep_last",
        "trainer.keep_best",
        "trainer.async_save",
        "trainer.max_time",
        "trainer.log_samples",
        "trainer.max_bad_updates",
        "trainer.dump_rollouts",
        "trainer.trackers",
        "trainer.collective_timeout",
        "hardware.accelerator",
        "hardware.nodes",
        "hardware.devices_per_node",
        "hardware.device_memory_gib",
        "hardware.device_tflops",
        "hardware.device_bandwidth_gb_s",
    }
)


def may_change(key: str) -> bool:
    """Whether a key of `flat` does, the items of a list with it."""
    return key in MAY_CHANGE or key.rpartition(".")[0] in MAY_CHANGE


def read_saved(path: Path) -> Config:
    """The configuration that a run has saved; the files that it names need not be there.

    Raises UserError where it cannot be read.
    """
    try:
        return Config.model_validate(OmegaConf.to_container(read_yaml(path)))
    except ValidationError as error:
        raise UserError(f"{path}: {first_mistake(error, Config)}") from error


def check_same_run(config: Config, saved: Config, path: Path) -> None:
    """Raises UserError where a key differs that a run keeps, with both values."""
    new, old = _kept(flat(config)), _kept(flat(saved))
    for key in {**old, **new}:
        if new.get(key) != old.get(key):
            raise UserError(
                f"{key}={shown(new.get(key))}: the run in {path} has {key}={shown(old.get(key))} and cannot "
                f"go on with another (set it to that, or choose another output)"
            )


def fingerprint(config: Config) -> str:
    """SHA-256 of the keys that a run keeps, but for those at their default: a later version may have more."""
    return sha256(json.dumps(_kept(flat(config, without_defaults=True)), sort_keys=True).encode()).hexdigest()


def _kept(keys: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if not may_change(key)}
