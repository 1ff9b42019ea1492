"""An evaluation of the toy model in all ranks of a layout."""

import io
import json
from unittest.mock import patch

from tepo_nemo.config.schema import Config
from tepo_nemo.reward.result import RewardResult


class Interrupted(Exception):
    """Stands for whatever may end an evaluation half-way."""


def holds_the_digit(prompt: str, response_text: str, gold: str, metadata: dict) -> RewardResult:
    """1 for a response that holds the gold; without a digit there is nothing to read."""
    digits = [character for character in response_text if character.isdigit()]
    if not digits:
        return RewardResult(0.0, "unparseable")
    return RewardResult(float(gold in digits), "ok", extracted=digits[0])


def evaluate(rank: int, world_size: int, config: Config, batches: int | None = None) -> str:
    """Evaluate, or fail when `batches` are written down and half of the next; what the console was told."""
    from tepo_nemo.evaluation.records import RecordFile
    from tepo_nemo.nemo.evaluate import evaluate_checkpoint

    console, written, append = io.StringIO(), [], RecordFile.append

    def count(file, records):
        if len(written) == batches:
            with open(file._path, "a", encoding="utf-8") as half:
                half.write(json.dumps({"benchmark": "sampled", "id": "half"})[:-4])
            raise Interrupted
        written.append(records)
        append(file, records)

    with patch.object(RecordFile, "append", count):
        evaluate_checkpoint(config, console)
    return console.getvalue()
