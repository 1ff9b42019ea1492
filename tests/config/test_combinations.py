"""Any model on any hardware with any method is planned, or refused with the reason."""

from itertools import product

import pytest

from tepo_nemo.config.checks import check_config
from tepo_nemo.config.load import load_config
from tepo_nemo.config.presets import choices
from tepo_nemo.errors import UserError
from tepo_nemo.planning.plan import make_plan

PAIRS = [*product(choices()["model"], choices()["hardware"])]


@pytest.fixture(scope="module")
def methods():
    """The section of each method; composed once, since groups say nothing of each other's keys."""
    return {
        name: load_config([f"algorithm={name}"], files=False).algorithm for name in choices()["algorithm"]
    }


@pytest.mark.parametrize(("model", "hardware"), PAIRS)
def test_every_method_of_a_model_on_its_hardware(methods, model, hardware):
    data = "toy" if model == "toy" else "math"
    chosen = [f"model={model}", f"hardware={hardware}", f"data={data}"]
    if model != "toy" and hardware == "cpu":
        with pytest.raises(UserError, match=r"^hardware.nodes=1 x hardware.devices_per_node=1: the"):
            load_config(chosen, files=False)
        return
    config = load_config(chosen, files=False)
    for name, algorithm in methods.items():
        candidate = config.model_copy(update={"algorithm": algorithm})
        check_config(candidate)
        assert make_plan(candidate).fits, name


@pytest.mark.parametrize("name", choices()["algorithm"])
def test_a_method_composes_the_same_beside_any_model(methods, name):
    config = load_config(["experiment=paper_qwen3_14b", f"algorithm={name}"], files=False)
    assert config.algorithm == methods[name]


def test_there_are_six_models_four_machines_and_fifteen_methods():
    assert [len(choices()[group]) for group in ("model", "hardware", "algorithm")] == [6, 4, 15]
