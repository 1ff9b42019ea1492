import pytest

from tepo_nemo.reward.result import RewardResult


def test_verdicts_vote_and_failures_do_not():
    failed = {
        status: RewardResult(0.0, status).failed for status in ("ok", "unparseable", "timeout", "error")
    }
    assert failed == {"ok": False, "unparseable": False, "timeout": True, "error": True}


@pytest.mark.parametrize(
    "value, status", [(1.0, "correct"), (1.0, None), (float("nan"), "ok"), (float("inf"), "error")]
)
def test_what_is_no_reward_is_refused(value, status):
    with pytest.raises(ValueError):
        RewardResult(value, status)
