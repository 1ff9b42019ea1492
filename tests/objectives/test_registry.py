"""Methods by name: what is refused, and how the one line of the refusal reads."""

import math

import pytest
import yaml
from objectives.cases import PRESETS, make_case, preset, token_batch, totals

from tepo_nemo.errors import UserError
from tepo_nemo.objectives import Objective, ObjectiveOutput, build, known, register, registry

# One preset of each method.
METHODS = {
    yaml.safe_load(path.read_text())["name"]: preset(path.stem) for path in sorted(PRESETS.glob("*.yaml"))
}


class Scaled(Objective):
    """A user's own objective, outside of the package."""

    scale: float

    @property
    def needs_reference(self) -> bool:
        return True

    def __call__(self, tokens, totals):
        return ObjectiveOutput(-self.scale * tokens.logprobs.sum(), {})


@pytest.fixture
def own_methods(monkeypatch):
    known()
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))


def refusal(name, options) -> str:
    with pytest.raises(UserError) as error:
        build(name, options)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_the_methods_of_the_package_are_known_without_a_list():
    assert {"tepo", "grpo", "next_token"} <= set(known())
    assert known() == sorted(known())


def test_a_registered_class_is_built_by_its_name(own_methods):
    register("scaled")(Scaled)
    assert build("scaled", {"scale": 2.0}) == Scaled(scale=2.0)


def test_a_duplicate_name_is_refused_and_changes_nothing(own_methods):
    before = build("tepo", preset("tepo"))
    with pytest.raises(ValueError, match=r"'tepo'.*objectives\.tepo\.Tepo.*Scaled"):
        register("tepo")(Scaled)
    assert build("tepo", preset("tepo")) == before


def test_an_unknown_name_lists_the_known_ones_nearest_first():
    message = refusal("tpeo", preset("tepo"))
    assert message.startswith("algorithm.name = 'tpeo' is not a method (did you mean tepo?)")
    assert all(name in message for name in known())
    assert "did you mean" not in refusal("zzzz", {})


def test_a_dotted_path_gives_a_users_own_objective(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(
        "from tepo_nemo.objectives import Objective, ObjectiveOutput\n"
        "class Mine(Objective):\n"
        "    needs_reference = property(lambda self: True)\n"
        "    scale: float\n"
        "    def __call__(self, tokens, totals):\n"
        "        return ObjectiveOutput(-self.scale * tokens.logprobs.sum(), {})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    objective = build("my_losses.Mine", {"scale": 3.0})
    assert objective.needs_reference and not objective.needs_entropy_gradient
    case = make_case(0, 2, 3, density=1.0)
    assert objective(token_batch(case), totals(case)).loss.item() == pytest.approx(-3 * case.logprobs.sum())
    assert refusal("my_losses.Mine", {"scal": 3.0}) == (
        "algorithm.scale missing: my_losses.Mine needs a value; "
        "algorithm.scal = 3.0 is not an option of my_losses.Mine (did you mean scale?); known: scale"
    )
    assert "no class Yours" in refusal("my_losses.Yours", {})


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("no_such_package.losses.Mine", "cannot be imported: No module named 'no_such_package'"),
        ("json.loads", "json has no class loads that is an Objective"),
        ("tepo_nemo.objectives.Objective", "no class Objective that is an Objective"),
        ("tepo_nemo.objectives.", "no class  that is"),
        (".Mine", "is not a method"),
        ("a-b.Mine", "is not a method"),
        ("", "is not a method"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(name, part):
    assert part in refusal(name, {})


@pytest.mark.parametrize(
    ("method", "option", "value", "expected"),
    [
        ("tepo", "surrogate", "pop", "algorithm.surrogate = 'pop' must be 'ppo' or 'printed'"),
        ("tepo", "ratio", "sequence_geometric", "algorithm.ratio = 'sequence_geometric' must be 'token', "),
        ("tepo", "kl_mask", None, "algorithm.kl_mask = None must be 'tepo', 'all' or 'none'"),
        ("tepo", "clip_low", -0.1, "algorithm.clip_low = -0.1: it should be greater than or equal to 0"),
        ("tepo", "clip_high", math.nan, "algorithm.clip_high = nan: it should be"),
        ("tepo", "clip_high", True, "algorithm.clip_high = True: it should be a valid number"),
        ("tepo", "clip_high", "0.2", "algorithm.clip_high = '0.2': it should be a valid number"),
        ("tepo", "kl_coefficient", math.inf, "algorithm.kl_coefficient = inf: it should be a finite number"),
        (
            "tepo",
            "kl_coefficient",
            -1,
            "algorithm.kl_coefficient = -1: it should be greater than or equal to 0",
        ),
        ("tepo", "entropy_bonus", None, "algorithm.entropy_bonus = None: it should be a valid number"),
        (
            "tepo",
            "clip_hihg",
            0.1,
            "algorithm.clip_hihg = 0.1 is not an option of tepo (did you mean clip_high?)",
        ),
        ("grpo", "dual_clip", 1.0, "algorithm.dual_clip = 1.0: it should be greater than 1"),
        ("grpo", "dual_clip", "off", "algorithm.dual_clip = 'off': it should be a valid number"),
        (
            "grpo",
            "aggregation",
            "mean",
            "algorithm.aggregation = 'mean' must be 'token-mean', 'group-token-mean', ",
        ),
        ("grpo", "entropy_bonus", 0.1, "algorithm.entropy_bonus = 0.1 is not an option of grpo"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_the_key(method, option, value, expected):
    assert expected in refusal(method, preset(method) | {option: value})


@pytest.mark.parametrize("name", METHODS)
def test_a_missing_option_is_named(name):
    for option in METHODS[name]:
        rest = {key: value for key, value in METHODS[name].items() if key != option}
        assert refusal(name, rest) == f"algorithm.{option} missing: {name} needs a value"


@pytest.mark.parametrize("name", METHODS)
def test_an_option_that_the_method_ignores_is_refused(name):
    """Each option that some other method has and this one has not, and a misspelt one."""
    own = METHODS[name]
    others = {key: value for options in METHODS.values() for key, value in options.items() if key not in own}
    assert others
    for option, value in (others | {"agregation": "token-mean"}).items():
        message = refusal(name, own | {option: value})
        assert message.startswith(f"algorithm.{option} = {value!r} is not an option of {name}")
    assert "(did you mean aggregation?)" in message


def test_several_mistakes_stand_in_one_line():
    message = refusal("tepo", preset("tepo") | {"clip_low": -1, "surrogate": "x"})
    assert "algorithm.clip_low" in message and "algorithm.surrogate" in message


def test_options_cannot_be_changed_afterwards():
    objective = build("tepo", preset("tepo"))
    with pytest.raises(ValueError, match="frozen"):
        objective.clip_low = 0.3


def test_the_switches_of_an_option_are_accepted():
    objective = build("tepo", preset("tepo") | {"clip_low": math.inf, "clip_high": 1, "kl_coefficient": 0})
    assert objective.clip_low == math.inf and objective.clip_high == 1
    assert build("grpo", preset("grpo") | {"dual_clip": 3}).dual_clip == 3
