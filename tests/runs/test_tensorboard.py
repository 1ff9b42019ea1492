import math
import time

import numpy as np
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator  # of its server
from tensorboard.util.tensor_util import make_ndarray

from tepo_nemo.runs.tensorboard import TensorBoard


def read_scalars(folder):
    events = EventAccumulator(str(folder)).Reload()
    tags = events.Tags()["tensors"]
    return {
        tag: [(event.step, make_ndarray(event.tensor_proto).item()) for event in events.Tensors(tag)]
        for tag in tags
    }


def test_every_metric_is_a_scalar_at_its_step(tmp_path):
    board = TensorBoard(tmp_path / "tensorboard")
    board.add(1, {"step": 1, "reward/mean": 0.25, "tokens/trained": 1900})
    board.add(2, {"step": 2, "reward/mean": 0.5})
    board.close()
    assert read_scalars(tmp_path / "tensorboard") == {
        "reward/mean": [(1, 0.25), (2, 0.5)],
        "tokens/trained": [(1, 1900.0)],
    }


def test_steps_can_be_watched_while_the_run_goes_on(tmp_path):
    board = TensorBoard(tmp_path)
    board.add(1, {"loss": -0.5})
    board.add(2, {"loss": -0.25})  # the library flushes only the first one by itself
    assert read_scalars(tmp_path) == {"loss": [(1, -0.5), (2, -0.25)]}
    board.close()


def test_a_value_that_is_not_finite_does_no_harm(tmp_path):
    board = TensorBoard(tmp_path)
    board.add(1, {"loss": math.nan, "grad_norm": math.inf, "lr": np.float64(0.5)})
    board.close()
    scalars = read_scalars(tmp_path)
    assert (
        math.isnan(scalars["loss"][0][1])
        and scalars["grad_norm"] == [(1, math.inf)]
        and scalars["lr"] == [(1, 0.5)]
    )


def test_a_run_that_goes_on_shows_each_step_once(tmp_path):
    """It had come to step 4, and goes on after its checkpoint of step 2."""
    board = TensorBoard(tmp_path)
    for step in (1, 2, 3, 4):
        board.add(step, {"loss": float(step)})
    board.close()
    time.sleep(1.1)  # event files are read in the order of the second in their names
    board = TensorBoard(tmp_path, after=2)
    board.add(3, {"loss": 30.0})
    board.close()
    assert read_scalars(tmp_path) == {"loss": [(1, 1.0), (2, 2.0), (3, 30.0)]}
