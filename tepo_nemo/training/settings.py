"""The numbers that the training loop runs by."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainerSettings:
    """The numbers of a run; responses are counted over all ranks."""

    seed: int
    max_steps: int
    prompts_per_step: int
    responses_per_prompt: int
    updates_per_rollout: int
    micro_batch_size: int | None
    micro_batch_tokens: int | None
    sequence_packing: bool
    max_response_length: int
    advantage: str
    overlong_fraction: float
    learning_rate: float
    warmup_steps: int
    save_interval: int
    eval_interval: int
    max_bad_updates: int
    spike_factor: float | None
    spike_window: int
    spike_rewinds: int

    @property
    def responses_per_update(self) -> int:
        return self.prompts_per_step * self.responses_per_prompt // self.updates_per_rollout
