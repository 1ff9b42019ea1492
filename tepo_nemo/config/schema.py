"""The configuration of a run. Every default stands here; presets say what differs, checks.py what fits."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from tepo_nemo.config.base import Count, CountOrZero, LocalPath, NonNegative, Positive, Section
from tepo_nemo.config.layout import Layout, plan_layout
from tepo_nemo.config.model import ModelConfig
from tepo_nemo.config.rollout import CheckConfig, CorrectionConfig, TensorRTLLMConfig
from tepo_nemo.config.server import ServerConfig


class AlgorithmConfig(Section, extra="allow"):
    """The method; every further key is one of its options, and their defaults stand in its preset."""

    name: str
    """A method of tepo_nemo.objectives, or the dotted path of your own Objective class."""
    advantage: Literal["group", "mean", "rloo", "gpg", "gpg_nonzero"]
    """How rewards become advantages."""
    overlong_fraction: Annotated[float, Field(ge=0, le=1)]
    """Responses in this last share of max_response_length lose up to 1 of the reward that advantages see."""
    dynamic_sampling: bool
    """Drop groups whose rewards are all equal and sample further prompts in their place."""
    max_generation_batches: Count
    """With dynamic sampling: rollouts of prompts_per_step prompts before a step makes do with what it has."""

    @property
    def options(self) -> dict[str, Any]:
        """The method's own options."""
        return dict(self.model_extra or {})


def _group_size(value: int) -> int:
    if value < 2:
        raise ValueError(
            "must be at least 2, since a group of one has no baseline (set rollout.responses_per_prompt=8)"
        )
    return value


def _only(neutral: float, key: str) -> AfterValidator:
    """Refuse what would make the sampler another distribution than the one that is trained."""

    def check(value: float) -> float:
        if value != neutral:
            raise ValueError(
                "is refused in training rollouts, since the log-probabilities of the trainer would not be "
                "those of "
                f"the sampler (leave rollout.{key}={neutral})"
            )
        return value

    return AfterValidator(check)


class RolloutConfig(Section):
    """Sampling the responses of a step."""

    backend: Literal["megatron", "trtllm", "server"]
    """What generates: Megatron with the training weights in place, TensorRT-LLM beside it, or servers."""
    prompts_per_step: Count = 64
    """Prompts of a step, over all ranks."""
    responses_per_prompt: Annotated[int, AfterValidator(_group_size)] = 8
    """Size of a group, at least 2."""
    temperature: Positive = 1.0
    """Divides the logits in sampling and in all log-probabilities alike."""
    top_k: Annotated[int, _only(0, "top_k")] = 0
    """Must be off (0)."""
    top_p: Annotated[float, _only(1.0, "top_p")] = 1.0
    """Must be off (1)."""
    repetition_penalty: Annotated[float, _only(1.0, "repetition_penalty")] = 1.0
    """Must be off (1)."""
    max_response_length: Count = 8192
    """Tokens of a response at most, the stop token included."""
    batch_size: Count | None = None
    """Sequences that a copy of the model generates at once; null is all of the step."""
    check: CheckConfig = CheckConfig()
    """See below."""
    correction: CorrectionConfig = CorrectionConfig()
    """See below."""
    trtllm: TensorRTLLMConfig = TensorRTLLMConfig()
    """See below."""
    server: ServerConfig = ServerConfig()
    """See below."""


class OptimizerConfig(Section):
    """The optimizer; the learning rate is constant after the warm-up."""

    name: Literal["adam", "sgd", "distributed_adam"] = "adam"
    """With distributed_adam the data-parallel ranks share the optimizer state."""
    learning_rate: Positive = 1e-6
    """After the warm-up, constant."""
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Field(strict=False)
    ] = (0.9, 0.999)
    """Adam's decay rates of the first and second moment."""
    eps: Positive = 1e-8
    """Added to Adam's denominator."""
    weight_decay: NonNegative = 0.0
    """Decoupled from the gradient."""
    gradient_clip: NonNegative = 1.0
    """Largest gradient norm over the whole model; 0 never clips."""


_TIME_LIMIT = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")


def _time_limit(value: object) -> object:
    match = _TIME_LIMIT.fullmatch(value) if isinstance(value, str) else None
    if value is not None and (match is None or not any(map(int, match.groups("0")))):
        raise ValueError(
            "must be a time as SLURM writes it (HH:MM:SS or D-HH:MM:SS, in a YAML file in quotes)"
        )
    return value


class TrainerConfig(Section):
    """The training loop."""

    max_steps: Count = 72
    """Steps; a step is one rollout and its updates."""
    updates_per_rollout: Count = 8
    """Mini-batches that a rollout is split into, one optimizer update each."""
    micro_batch_tokens: Count | None = 16384
    """Tokens in one forward and backward pass of a copy of the model at most, padding included; null: any."""
    micro_batch_size: Count | None = None
    """Responses in one forward and backward pass of a copy of the model at most; null: any."""
    sequence_packing: bool = False
    """Let a micro-batch be one row without padding; needs the attention of Transformer Engine."""
    fused_output_layer: bool = True
    """Never hold the logits of a micro-batch: make them block by block, and again in the backward pass."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """See below."""
    warmup_steps: CountOrZero = 0
    """Steps over which the learning rate rises linearly."""
    save_interval: CountOrZero = 0
    """Steps between checkpoints; 0 saves at the end alone."""
    keep_last: Count = 2
    """Checkpoints that are kept, the newest ones."""
    keep_best: CountOrZero = 0
    """Further ones that are kept: those of the best evaluations or, without eval_interval, mean rewards."""
    async_save: bool = False
    """Write a checkpoint while training goes on, from a copy of the state in host memory."""
    max_time: Annotated[str | None, BeforeValidator(_time_limit)] = None
    """Stop with the state saved after HH:MM:SS or D-HH:MM:SS, counted from the start of the processes."""
    log_samples: CountOrZero = 16
    """Responses written to samples/ a step."""
    max_bad_updates: Count = 10
    """Skipped updates in a row that end the run, with no checkpoint; more than one rollout of 8 updates."""
    spike_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """An update is skipped whose gradient norm is above this many times the median of those before it."""
    spike_window: Count = 32
    """Updates of that median; until as many are made, none is skipped for it."""
    spike_rewinds: CountOrZero = 0
    """Such updates, at most, that send the run back to its newest checkpoint, with other prompts after it."""
    dump_rollouts: CountOrZero = 0
    """Steps between rollouts written for replay; 0 is none. Of skipped updates the last 4 always are."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow"]] = ["tensorboard"]
    """Where metrics are shown beside metrics.jsonl; one that fails is switched off, and the run goes on."""
    collective_timeout: Positive = 30.0
    """Minutes after which ranks that wait for another give up; the line that ends the run names it."""

    @property
    def max_seconds(self) -> float | None:
        """`max_time` in seconds."""
        if self.max_time is None:
            return None
        days, hours, minutes, seconds = map(int, _TIME_LIMIT.fullmatch(self.max_time).groups("0"))
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


class EvaluationSet(Section):
    """A benchmark."""

    name: str = Field(min_length=1)
    """What it is called in metrics and in the summary."""
    path: LocalPath
    """Its prompt set, in the form of data.train."""
    samples: Count = 1
    """Responses a prompt; the score is their average."""
    temperature: NonNegative = 0.0
    """0 takes the most likely token."""
    k: list[Count] = []
    """For pass@k and majority@k in `tepo-nemo eval`, each at most samples, which comes on top."""
    answer_form: Literal["expression", "integer", "numeric", "choice"] | None = None
    """How golds are compared, for a reward that asks; null is what the metadata of each prompt says."""


class RewardPart(Section):
    """One part of a reward that is made of several."""

    name: str = Field(min_length=1)
    """A reward of tepo_nemo.reward, or the dotted path of your own function."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Its value is multiplied by this before the values are added."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function."""


def _parts(value: object) -> object:
    if isinstance(value, str):
        return [{"name": value}]
    if not isinstance(value, list):
        raise ValueError("must be a name, or a list of parts (name, weight, options)")
    return value


class GradingConfig(Section):
    """The processes that grade responses; a reward that cannot hang is run without them."""

    workers: Count = 8
    """Processes; as many responses may hang at once without stopping the others."""
    time_limit: Positive = 10.0
    """Seconds for one response; then its worker is killed and the response is not trained on."""
    memory_limit_gib: Positive = 2.0
    """Address space of a worker."""
    max_tasks: Count = 2000
    """Responses after which a worker is replaced by a fresh one."""
    response_tail: Count = 65536
    """Characters from the end of a response that are graded."""
    alarm_fraction: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of a batch whose grading may fail before an error is logged."""


class DataConfig(Section):
    """Prompts, and how responses are graded."""

    train: LocalPath
    """The prompt set: JSON lines with id, prompt, gold and, optionally, metadata."""
    evaluation: list[EvaluationSet] = []
    """Benchmarks."""
    reward: Annotated[list[RewardPart], Field(min_length=1), BeforeValidator(_parts)] = "exact_answer"
    """The name of a reward of tepo_nemo.reward, the path of your own function, or parts to be added."""
    grading: GradingConfig = GradingConfig()
    """See below."""
    evaluate_before: bool = True
    """Evaluate before the first step."""
    evaluate_after: bool = True
    """Evaluate after the last step."""
    eval_interval: CountOrZero = 0
    """Steps between evaluations; 0 is none in between."""

    @property
    def reward_parts(self) -> str | list[tuple[str, float, dict[str, Any]]]:
        """The reward as tepo_nemo.reward.grading takes it."""
        first = self.reward[0]
        if len(self.reward) == 1 and first.weight == 1 and not first.options:
            return first.name
        return [(part.name, part.weight, part.options) for part in self.reward]


class HardwareConfig(Section):
    """The machines; one rank a device."""

    accelerator: Literal["cpu", "gpu"]
    """On cpu the same host classes run on gloo."""
    nodes: Count = 1
    """Machines."""
    devices_per_node: Count = 1
    """GPUs, or processes on a CPU."""
    device_memory_gib: Positive | None = None
    """Memory of a GPU; as the next two, read by `tepo-nemo plan` alone."""
    device_tflops: Positive | None = None
    """Its dense matrix products in bf16, a second, in 10^12 operations."""
    device_bandwidth_gb_s: Positive | None = None
    """Its memory bandwidth."""


class Config(Section):
    """Everything that a run depends on."""

    seed: CountOrZero = 1
    """Of sampling noise, data order and initial weights."""
    output: LocalPath = Path("runs/tepo")
    """The run directory: a new or an empty folder, or that of the same run, which then goes on."""
    replay: LocalPath | None = None
    """Train on rollouts of an earlier run, and generate none: a folder of its rollouts/ or bad_updates/."""
    model: ModelConfig
    algorithm: AlgorithmConfig
    data: DataConfig
    rollout: RolloutConfig
    trainer: TrainerConfig = TrainerConfig()
    hardware: HardwareConfig

    @property
    def layout(self) -> Layout:
        """How ranks and responses are shared out. Raises UserError where they do not divide."""
        return plan_layout(
            nodes=self.hardware.nodes,
            devices_per_node=self.hardware.devices_per_node,
            tensor=self.model.tensor_model_parallel_size,
            pipeline=self.model.pipeline_model_parallel_size,
            prompts_per_step=self.rollout.prompts_per_step,
            responses_per_prompt=self.rollout.responses_per_prompt,
            updates_per_rollout=self.trainer.updates_per_rollout,
        )
