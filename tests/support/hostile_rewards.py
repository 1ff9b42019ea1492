"""Rewards for the workers of a grading pool, which import them by path; the response says what happens."""

import os
import sys
import time

from tepo_nemo.errors import UserError
from tepo_nemo.reward.math_answer import math_answer
from tepo_nemo.reward.result import RewardResult


def obey(prompt, response_text, gold, metadata):
    """Right where the response is the gold; other responses hang, crash, or misbehave."""
    match response_text:
        case "sleep":
            time.sleep(1000)
        case "hang in C":
            # One power, which no signal handler of Python interrupts.
            return RewardResult(float(9**9**9), "ok")
        case "eat":
            return RewardResult(float(len(bytearray(2**40))), "ok")
        case "crash":
            os._exit(7)
        case "raise":
            raise ZeroDivisionError("nothing to divide by")
        case "recurse":
            return obey(prompt, response_text, gold, metadata)
        case "user":
            raise UserError(f"gold {gold!r} is no gold")
        case "number":
            return 1.0
        case "pid":
            return RewardResult(1.0, "ok", str(os.getpid()))
        case "modules":
            return RewardResult(1.0, "ok", " ".join(sorted({name.split(".")[0] for name in sys.modules})))
        case "slow":
            time.sleep(0.05)
    return RewardResult(float(response_text == gold), "ok", response_text)


def length(prompt, response_text, gold, metadata):
    """The number of characters that the reward was given."""
    return RewardResult(float(len(response_text)), "ok")


def mathematics(prompt, response_text, gold, metadata):
    """Graded as mathematics, but for the words that `obey` knows."""
    grader = math_answer if "boxed" in response_text else obey
    return grader(prompt, response_text, gold, metadata)
