import itertools
import os
import re

import pytest

from tepo_nemo.data.prompts import load_prompts
from tepo_nemo.data.toy import TOY_CHARACTERS, careless_sum, carries, split_of, write_toy_data
from tepo_nemo.errors import UserError

SPLITS = ("train", "validation", "test")
FILES = (*SPLITS, "warm_start")


def make(folder, **arguments):
    sizes = {"seed": 1, "train": 300, "validation": 50, "test": 100, "warm_start": 500}
    write_toy_data(folder, **{**sizes, **arguments})
    return {name: load_prompts(folder / f"{name}.jsonl") for name in FILES}


def operands(prompt):
    return tuple(int(number) for number in re.fullmatch(r"(\d\d)\+(\d\d)=", prompt.prompt).groups())


def test_defaults(tmp_path):
    write_toy_data(tmp_path / "toy", seed=1)
    sets = {name: load_prompts(tmp_path / "toy" / f"{name}.jsonl") for name in FILES}
    sizes = {name: len(prompts) for name, prompts in sets.items()}
    assert sizes == {"train": 4608, "validation": 256, "test": 512, "warm_start": 40_000}
    for split in SPLITS:
        for prompt in sets[split]:
            assert prompt.gold == str(sum(operands(prompt)))
            assert set(prompt.prompt + prompt.gold) <= set(TOY_CHARACTERS)
    levels = [prompt.metadata["level"] for prompt in sets["test"]]
    assert [levels.count(level) for level in (0, 1, 2)] == [
        102,
        256,
        154,
    ]  # 102.4, 256, 153.6
    assert sorted(os.listdir(tmp_path)) == ["toy"]
    assert sorted(os.listdir(tmp_path / "toy")) == sorted(f"{name}.jsonl" for name in FILES)


def test_a_known_problem(tmp_path):
    """Of 10,000 problems, 55 x 55 have no carry: 55 pairs of digits sum up to at most 9."""
    pairs = list(itertools.product(range(100), repeat=2))
    count = {split: sum(split_of(pair) == split for pair in pairs) for split in SPLITS}
    assert sum(carries(pair) == 0 for pair in pairs) == 55 * 55
    level = {pair: carries(pair) for pair in pairs}
    assert (level[37, 85], level[37, 25], level[81, 35], level[12, 34], level[95, 5]) == (2, 1, 1, 0, 2)
    assert sum(count.values()) == 10_000
    prompt = next(p for p in make(tmp_path / "toy")["train"] if p.metadata["level"] == 2)
    first, second = operands(prompt)
    assert prompt.id == f"toy-{first:02d}-{second:02d}" and first % 10 + second % 10 >= 10


@pytest.mark.parametrize(
    ("pair", "forgotten", "answer"),
    [
        ((37, 85), (False, False), 122),
        ((37, 85), (True, False), 112),  # 7+5=12, the 1 is forgotten: 3+8=11
        ((37, 85), (False, True), 22),
        ((37, 85), (True, True), 12),
        ((95, 5), (False, False), 100),
        ((95, 5), (True, False), 90),  # without the carry of the ones, the tens have none
        ((12, 34), (True, True), 46),
        ((0, 7), (True, True), 7),
    ],
)
def test_careless_sums_by_hand(pair, forgotten, answer):
    assert careless_sum(pair, forgotten) == answer


def test_the_student_forgets_four_carries_out_of_five(tmp_path):
    prompts = make(tmp_path / "toy", warm_start=20_000)["warm_start"]
    right = {level: [] for level in (0, 1, 2)}
    for prompt in prompts:
        assert split_of(operands(prompt)) == "train"
        right[prompt.metadata["level"]].append(prompt.gold == str(sum(operands(prompt))))
    shares = {level: sum(found) / len(found) for level, found in right.items()}
    # With one carry the answer is right in 1 of 5, with two in 1 of 25; four standard deviations around it.
    assert shares[0] == 1
    assert abs(shares[1] - 0.2) < 4 * (0.2 * 0.8 / len(right[1])) ** 0.5
    assert abs(shares[2] - 0.04) < 4 * (0.04 * 0.96 / len(right[2])) ** 0.5


@pytest.mark.parametrize("mixture", [{1: 1.0}, {0: 1.0, 1: 2.0, 2: 3.0}])
def test_splits_share_no_problem_and_hold_none_twice(tmp_path, mixture):
    sets = make(tmp_path / "toy", mixture=mixture, train=60, validation=10, test=20)
    problems = {}
    for split in SPLITS:
        prompts = sets[split]
        assert len({prompt.id for prompt in prompts}) == len({p.prompt for p in prompts}) == len(prompts)
        problems[split] = {tuple(sorted(operands(prompt))) for prompt in prompts}
    for one, other in itertools.combinations(SPLITS, 2):
        assert not problems[one] & problems[other]


def test_no_seed_size_or_mixture_moves_a_problem_to_another_split(tmp_path):
    """A model trained on the data of one seed may be tested on that of another."""
    trained, tested = set(), set()
    for seed, (mixture, train) in enumerate(
        [({1: 1.0}, 2000), ({1: 1.0, 2: 1.0}, 700), ({0: 0.1, 1: 1.0}, 300)]
    ):
        sets = make(tmp_path / str(seed), seed=seed, mixture=mixture, train=train, test=300)
        trained |= {
            tuple(sorted(operands(p))) for name in ("train", "validation", "warm_start") for p in sets[name]
        }
        tested |= {tuple(sorted(operands(prompt))) for prompt in sets["test"]}
    assert len(tested) > 300 and not trained & tested


def test_commuted_operands_are_in_the_same_split():
    for first, second in [(37, 85), (0, 99), (1, 10)]:
        assert split_of((first, second)) == split_of((second, first))


def test_shares_of_the_splits():
    """75, 10 and 15 % of the 5050 unordered pairs, within four standard deviations."""
    splits = [split_of(pair) for pair in itertools.combinations_with_replacement(range(100), 2)]
    for split, share in (("train", 0.75), ("validation", 0.10), ("test", 0.15)):
        deviation = (5050 * share * (1 - share)) ** 0.5
        assert abs(splits.count(split) - 5050 * share) < 4 * deviation


def test_levels_by_their_shares(tmp_path):
    """10 prompts at 1:2 are 3.33 and 6.67, so 3 and 7; 5 are 1.67 and 3.33, so 2 and 3; 7 are 2 and 5."""
    sets = make(tmp_path / "toy", mixture={2: 10.0, 1: 20.0}, train=10, validation=5, test=7)
    levels = {split: [prompt.metadata["level"] for prompt in sets[split]] for split in SPLITS}
    assert {split: (found.count(2), found.count(1)) for split, found in levels.items()} == {
        "train": (3, 7),
        "validation": (2, 3),
        "test": (2, 5),
    }


def test_levels_are_mixed_over_the_file(tmp_path):
    levels = [p.metadata["level"] for p in make(tmp_path / "toy", mixture={1: 1.0, 2: 1.0})["train"]]
    assert all(60 < levels[start : start + 150].count(2) < 90 for start in (0, 150))


def test_the_seed_decides_what_is_taken(tmp_path):
    first = make(tmp_path / "a", seed=1)
    again = make(tmp_path / "b", seed=1)
    other = make(tmp_path / "c", seed=2)
    assert first == again
    for name in FILES:
        assert (tmp_path / "a" / f"{name}.jsonl").read_bytes() == (
            tmp_path / "b" / f"{name}.jsonl"
        ).read_bytes()
        assert {p.id for p in first[name]} != {p.id for p in other[name]}


def test_a_larger_set_holds_the_smaller_one(tmp_path):
    small = make(tmp_path / "small", train=100)["train"]
    large = make(tmp_path / "large", train=1000)["train"]
    assert {p.id for p in small} < {p.id for p in large}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"test": 5000}, r"test has \d+ prompts of level 0, 1000 are asked for"),
        (
            {"mixture": {2: 1.0}, "validation": 500},
            r"validation has \d+ prompts of level 2, 500 are asked for",
        ),
        ({"mixture": {7: 1.0}}, r"level 7 is unknown; choose from \[0, 1, 2\]"),
        ({"mixture": {2: 0.0}}, "share 0.0"),
        ({"mixture": {2: 1.0, 1: -1.0}}, "share -1.0"),
        ({"mixture": {2: float("nan")}}, "share nan"),
        ({"mixture": {2: float("inf")}}, "share inf"),
        ({"mixture": {}}, "mixture is empty"),
        ({"validation": 0}, "0 validation prompts"),
        ({"warm_start": 0}, "0 warm start prompts"),
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
