"""Sections of `rollout` that concern an engine beside the model: how it is compared, corrected and built."""

from typing import Literal

from tepo_nemo.config.base import CountOrZero, LocalPath, Positive, Section


class CheckConfig(Section):
    """The engine's log-probs of a step's tokens against the trainer's own, before its updates."""

    interval: CountOrZero = 10
    """Steps between two checks; the first two steps are checked in any case."""
    warn_gap: Positive = 0.03
    """Mean absolute difference of a token's log-probs, in nats, above which a warning is logged."""
    stop_gap: Positive = 0.1
    """The same, above which the run ends."""
    warn_error: Positive = 1.05
    """Mean of exp of the absolute difference, above which a warning is logged; few large ones show here."""
    stop_error: Positive = 1.5
    """The same, above which the run ends."""


class CorrectionConfig(Section):
    """What tokens weigh whose log-probs differ; tepo_nemo/rollout/correction.py has the formulas."""

    token_weight: Literal["none", "truncated", "icepop"] = "none"
    """Weight of a token, the ratio of policy to engine: cut at truncation, or 0 outside IcePop's bounds."""
    truncation: Positive = 2.0
    """Largest weight with truncated."""
    icepop_low: Positive = 0.5
    """With icepop, the smallest ratio that counts."""
    icepop_high: Positive = 5.0
    """With icepop, the largest."""
    response_gap_limit: Positive | None = None
    """Drop responses whose mean absolute difference of log-probs is larger, in nats; null drops none."""


class TensorRTLLMConfig(Section):
    """The engine of rollout.backend=trtllm."""

    unload: bool = True
    """Give the engine's memory to training between rollouts; it is loaded again from its file."""
    engine_folder: LocalPath | None = None
    """Where engine files are while a run lasts (one that fails leaves them); null is the temporary folder."""
    time_limit: Positive = 3600.0
    """Seconds that one batch may take before the run ends."""
