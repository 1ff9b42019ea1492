"""Option values are refused where there is no torch as the methods themselves refuse them."""

import math
import os
import subprocess
import sys
from typing import Annotated

import pytest
from pydantic import TypeAdapter, ValidationError

from tepo_nemo.config.options import OPTIONS, check_options
from tepo_nemo.config.presets import choices, config_folder
from tepo_nemo.errors import UserError
from tepo_nemo.objectives import registry

registry.known()
METHODS = {name: method for name, method in registry._METHODS.items() if method.model_fields}
PROBES = [
    None, True, "", "x", [], -math.inf, -1, -0.5, 0, 0.0, 0.5, 1, 1.0, 1.5, 2, 100, math.inf, math.nan,
    "token-mean", "k1", "tepo", "all", "none", "token", "full", "ppo", "entropy",
]  # fmt: skip


def takes(name: str, value: object) -> bool:
    try:
        check_options({name: value})
    except UserError as refusal:
        assert str(refusal).startswith(f"algorithm.{name}=")
        return False
    return True


@pytest.mark.parametrize("method", METHODS)
def test_a_value_is_taken_where_the_method_takes_it(method):
    for name, field in METHODS[method].model_fields.items():
        kind = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
        for value in PROBES:
            try:
                TypeAdapter(kind).validate_python(value, strict=True)
                taken = True
            except ValidationError:
                taken = False
            assert takes(name, value) == taken, (name, value)


def test_every_option_is_known_and_some_method_has_it():
    assert {name for method in METHODS.values() for name in method.model_fields} == set(OPTIONS)
    assert len(choices()["algorithm"]) > len(METHODS) > 5


def test_validate_refuses_a_value_without_torch(tmp_path):
    program = (
        "import sys\nsys.modules['torch'] = None\n"
        "from tepo_nemo.cli import main\nsys.exit(main(['validate', 'algorithm.kl_mask=most']))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(config_folder().parent)},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 2
    assert answer.stderr == "tepo-nemo: error: algorithm.kl_mask=most: must be one of tepo, all, none\n"


def test_an_option_of_somebody_elses_method_is_left_to_it():
    check_options({"my_option": "anything"})
