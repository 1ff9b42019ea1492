import itertools
import os
import re

import pytest

from tepo_nemo.data.prompts import load_prompts
from tepo_nemo.data.toy import LEVELS, TOY_CHARACTERS, Level, split_of, write_toy_data
from tepo_nemo.errors import UserError

SPLITS = ("train", "validation", "test")


def make(folder, **arguments):
    write_toy_data(folder, **{"seed": 1, "train": 300, "validation": 50, "test": 100, **arguments})
    return {split: load_prompts(folder / f"{split}.jsonl") for split in SPLITS}


def problem(prompt):
    """What a problem is, read from its text alone: commuted sums are the same."""
    operands = [int(number) for number in re.findall(r"\d+", prompt.prompt)]
    operator = re.search(r"[+-]", prompt.prompt)[0]
    return operator, tuple(sorted(operands) if operator == "+" else operands)


def answer(prompt):
    operator, operands = re.search(r"[+-]", prompt.prompt)[0], re.findall(r"\d+", prompt.prompt)
    total = int(operands[0])
    for operand in operands[1:]:
        total = total + int(operand) if operator == "+" else total - int(operand)
    return str(total)


def test_defaults_are_two_digit_additions(tmp_path):
    write_toy_data(tmp_path / "toy", seed=1)
    sets = {split: load_prompts(tmp_path / "toy" / f"{split}.jsonl") for split in SPLITS}
    assert {split: len(prompts) for split, prompts in sets.items()} == {
        "train": 4608,
        "validation": 256,
        "test": 512,
    }
    for prompt in itertools.chain(*sets.values()):
        assert re.fullmatch(r"\d\d\+\d\d=", prompt.prompt) and prompt.metadata == {"level": 2}
        assert prompt.gold == answer(prompt)
    assert sorted(os.listdir(tmp_path)) == ["toy"]
    assert sorted(os.listdir(tmp_path / "toy")) == ["test.jsonl", "train.jsonl", "validation.jsonl"]


def test_a_known_problem(tmp_path):
    """37+85 = 122 in the one split it belongs to, when all of that split is taken."""
    splits = {split: [] for split in SPLITS}
    for pair in itertools.product(range(100), repeat=2):
        splits[split_of(LEVELS[2], pair)].append(pair)
    sets = make(tmp_path / "toy", **{split: len(pairs) for split, pairs in splits.items()})
    prompts = {prompt.prompt: prompt for prompt in itertools.chain(*sets.values())}
    assert len(prompts) == 10_000
    assert (prompts["37+85="].id, prompts["37+85="].gold) == ("toy-add2-037-085", "122")
    assert (prompts["00+07="].id, prompts["00+07="].gold) == ("toy-add2-000-007", "7")


@pytest.mark.parametrize("mixture", [{2: 1.0}, {1: 1.0, 2: 2.0, 3: 3.0}])
def test_splits_share_no_problem_and_hold_none_twice(tmp_path, mixture):
    sets = make(tmp_path / "toy", mixture=mixture, train=60, validation=10, test=20)
    for prompts in sets.values():
        assert (
            len({prompt.id for prompt in prompts})
            == len({prompt.prompt for prompt in prompts})
            == len(prompts)
        )
    problems = {split: {problem(prompt) for prompt in prompts} for split, prompts in sets.items()}
    for one, other in itertools.combinations(SPLITS, 2):
        assert not problems[one] & problems[other]


def test_no_seed_size_or_mixture_moves_a_problem_to_another_split(tmp_path):
    """A model trained on the data of one seed may be tested on that of another."""
    trained, tested = set(), set()
    for seed, (mixture, train) in enumerate(
        [({2: 1.0}, 5000), ({2: 1.0, 3: 1.0}, 700), ({1: 0.01, 2: 1.0}, 300)]
    ):
        sets = make(tmp_path / str(seed), seed=seed, mixture=mixture, train=train, test=500)
        trained |= {problem(prompt) for prompt in sets["train"] + sets["validation"]}
        tested |= {problem(prompt) for prompt in sets["test"]}
    assert len(tested) > 500 and not trained & tested


def test_commuted_operands_are_in_the_same_split():
    for terms in (2, 3):
        addition = Level("", "+", digits=2, terms=terms)
        for operands in [(37, 85, 11)[:terms], (0, 99, 5)[:terms], (1, 10, 100)[:terms]]:
            assert len({split_of(addition, order) for order in itertools.permutations(operands)}) == 1


def test_differences_are_not_commuted():
    """a-b and b-a are two problems: over all pairs, both the same split and another one occur."""
    same = {split_of(LEVELS[3], (a, b)) == split_of(LEVELS[3], (b, a)) for a in range(20) for b in range(a)}
    assert same == {True, False}


def test_shares_of_the_splits():
    """75, 10 and 15 % of the 5050 unordered pairs, within four standard deviations."""
    splits = [split_of(LEVELS[2], pair) for pair in itertools.combinations_with_replacement(range(100), 2)]
    for split, share in (("train", 0.75), ("validation", 0.10), ("test", 0.15)):
        deviation = (5050 * share * (1 - share)) ** 0.5
        assert abs(splits.count(split) - 5050 * share) < 4 * deviation


def test_operands_are_spread_over_their_range(tmp_path):
    """The mean of an operand that is uniform over 0..99 is 49.5; 600 of them have a deviation of 1.2."""
    operands = [
        int(number) for p in make(tmp_path / "toy")["train"] for number in re.findall(r"\d+", p.prompt)
    ]
    assert min(operands) == 0 and max(operands) == 99
    assert abs(sum(operands) / len(operands) - 49.5) < 5


def test_levels_by_their_shares(tmp_path):
    """10 prompts at 1:2 are 3.33 and 6.67, so 3 and 7; 5 are 1.67 and 3.33, so 2 and 3; 7 are 2 and 5."""
    sets = make(tmp_path / "toy", mixture={3: 10.0, 2: 20.0}, train=10, validation=5, test=7)
    levels = {split: [prompt.metadata["level"] for prompt in prompts] for split, prompts in sets.items()}
    assert {split: (found.count(3), found.count(2)) for split, found in levels.items()} == {
        "train": (3, 7),
        "validation": (2, 3),
        "test": (2, 5),
    }


def test_levels_are_mixed_over_the_file(tmp_path):
    levels = [p.metadata["level"] for p in make(tmp_path / "toy", mixture={2: 1.0, 3: 1.0})["train"]]
    assert all(60 < levels[start : start + 150].count(2) < 90 for start in (0, 150))


def test_levels_are_what_they_say(tmp_path):
    sets = make(tmp_path / "toy", mixture={1: 1.0, 2: 20.0, 3: 20.0})
    forms = {1: r"\d\+\d=", 2: r"\d\d\+\d\d=", 3: r"\d\d-\d\d="}
    for prompt in itertools.chain(*sets.values()):
        assert re.fullmatch(forms[prompt.metadata["level"]], prompt.prompt)
        assert prompt.gold == answer(prompt)
        assert set(prompt.prompt + prompt.gold) <= set(TOY_CHARACTERS)
    assert any(prompt.gold.startswith("-") for prompt in sets["train"])


def test_three_terms_are_added_up(tmp_path, monkeypatch):
    """Level 4 with one digit instead of two, which has fewer problems to go through."""
    assert LEVELS[4] == Level("sum2", "+", digits=2, terms=3)
    monkeypatch.setitem(LEVELS, 4, Level("sum1", "+", digits=1, terms=3))
    for prompt in make(tmp_path / "toy", mixture={4: 1.0}, train=100)["train"]:
        assert re.fullmatch(r"\d\+\d\+\d=", prompt.prompt) and prompt.gold == answer(prompt)
        assert prompt.id == "toy-sum1-" + "-".join(f"00{digit}" for digit in re.findall(r"\d", prompt.prompt))


def test_ids_tell_the_problem(tmp_path):
    for prompt in make(tmp_path / "toy", mixture={2: 1.0, 3: 1.0})["train"]:
        first, operator, second = re.fullmatch(r"(\d\d)([+-])(\d\d)=", prompt.prompt).groups()
        assert prompt.id == f"toy-{'add2' if operator == '+' else 'sub2'}-0{first}-0{second}"


def test_the_seed_decides_what_is_taken(tmp_path):
    first = make(tmp_path / "a", seed=1)
    again = make(tmp_path / "b", seed=1)
    other = make(tmp_path / "c", seed=2)
    assert first == again
    for split in SPLITS:
        assert (tmp_path / "a" / f"{split}.jsonl").read_bytes() == (
            tmp_path / "b" / f"{split}.jsonl"
        ).read_bytes()
        assert {p.id for p in first[split]} != {p.id for p in other[split]}


def test_a_larger_set_holds_the_smaller_one(tmp_path):
    small = make(tmp_path / "small", train=100)["train"]
    large = make(tmp_path / "large", train=1000)["train"]
    assert {p.id for p in small} < {p.id for p in large}


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ({"test": 5000}, r"test has \d+ prompts of level 2, 5000 are asked for"),
        ({"mixture": {1: 1.0}}, r"train has \d+ prompts of level 1, 300 are asked for"),
        ({"mixture": {7: 1.0}}, r"level 7 is unknown; choose from \[1, 2, 3, 4\]"),
        ({"mixture": {2: 0.0}}, "share 0.0"),
        ({"mixture": {2: 1.0, 3: -1.0}}, "share -1.0"),
        ({"mixture": {2: float("nan")}}, "share nan"),
        ({"mixture": {2: float("inf")}}, "share inf"),
        ({"mixture": {}}, "mixture is empty"),
        ({"validation": 0}, "0 validation prompts"),
    ],
)
def test_a_wrong_argument_leaves_nothing(tmp_path, arguments, reason):
    with pytest.raises(UserError, match=reason):
        make(tmp_path / "toy", **arguments)
    assert os.listdir(tmp_path) == []


def test_data_is_never_overwritten(tmp_path):
    make(tmp_path / "toy")
    before = {name: (tmp_path / "toy" / name).read_bytes() for name in os.listdir(tmp_path / "toy")}
    with pytest.raises(UserError, match="not empty"):
        make(tmp_path / "toy", seed=2)
    assert {name: (tmp_path / "toy" / name).read_bytes() for name in os.listdir(tmp_path / "toy")} == before
