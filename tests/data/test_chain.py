import itertools
import os
import re

import pytest

from tepo_nemo.data.chain import (
    CHAIN_CHARACTERS,
    FORGOTTEN,
    LARGEST,
    OFF_BY_ONE,
    OPERANDS,
    Slip,
    chain,
    split_of,
    write_chain_data,
)
from tepo_nemo.data.prompts import load_prompts
from tepo_nemo.errors import UserError
from tepo_nemo.reward.last_answer import last_answer

SPLITS = ("train", "validation", "test")
FILES = (*SPLITS, "warm_start")


def make(folder, **arguments):
    sizes = {"seed": 1, "train": 300, "validation": 50, "test": 100, "warm_start": 500}
    write_chain_data(folder, **{**sizes, **arguments})
    return {name: load_prompts(folder / f"{name}.jsonl") for name in FILES}


def operands(prompt):
    assert re.fullmatch(r"[1-9](\+[1-9])+=", prompt.prompt)
    return tuple(int(digit) for digit in prompt.prompt[:-1].split("+"))


def steps(written):
    """(total before, operand, total after) of each step of a chain."""
    found = [re.fullmatch(r"(\d+)\+(\d)=(\d+)", step).groups() for step in written.split(";")]
    return [tuple(map(int, step)) for step in found]


def test_defaults(tmp_path):
    write_chain_data(tmp_path / "chain", seed=1)
    sets = {name: load_prompts(tmp_path / "chain" / f"{name}.jsonl") for name in FILES}
    sizes = {name: len(prompts) for name, prompts in sets.items()}
    assert sizes == {"train": 4096, "validation": 256, "test": 256, "warm_start": 40_000}
    for split in SPLITS:
        for prompt in sets[split]:
            assert prompt.gold == str(sum(operands(prompt)))
            assert prompt.metadata == {"level": len(operands(prompt))}
    lengths = [len(prompt.gold) + 1 for prompt in sets["warm_start"]]
    assert set("".join(p.prompt + p.gold for p in sets["warm_start"])) == set(CHAIN_CHARACTERS)
    # With the stop token: 3 steps of at least 5 characters (`1+1=2`, one digit before and after) and the two
    # `;` between them, 18 tokens; at most 6 (`9+1=10`) and four of 7 (`10+1=11`) and four `;`, 39.
    assert 18 <= min(lengths) and max(lengths) <= 39
    assert sorted(os.listdir(tmp_path / "chain")) == sorted(f"{name}.jsonl" for name in FILES)


@pytest.mark.parametrize(
    ("digits", "slips", "written"),
    [
        ((7, 8, 5, 9), [Slip()] * 3, "7+8=15;15+5=20;20+9=29"),
        ((7, 8, 5, 9), [Slip(forgets=True), Slip(), Slip()], "7+8=5;5+5=10;10+9=19"),
        # in the last step no carry is due, and there is nothing to forget
        ((7, 8, 5, 9), [Slip(forgets=True)] * 3, "7+8=5;5+5=0;0+9=9"),
        ((7, 8, 5, 9), [Slip(), Slip(off_by=1), Slip()], "7+8=15;15+5=21;21+9=30"),
        # one slip a step: a carry that is forgotten, or else a total off by one
        ((7, 8, 1), [Slip(forgets=True, off_by=1), Slip(forgets=True, off_by=-1)], "7+8=5;5+1=5"),
        ((9, 1, 1), [Slip(forgets=True), Slip(off_by=-1)], "9+1=0;0+1=0"),
    ],
)
def test_chains_by_hand(digits, slips, written):
    assert chain(digits, slips) == written


def test_a_chain_has_a_slip_for_each_step():
    with pytest.raises(ValueError):
        chain((1, 2, 3), [Slip()])


def test_a_chain_without_slips_earns_the_reward(tmp_path):
    for prompt in make(tmp_path / "chain")["train"]:
        digits = operands(prompt)
        written = chain(digits, [Slip()] * (len(digits) - 1))
        assert [step[2] for step in steps(written)] == list(itertools.accumulate(digits))[1:]
        assert last_answer(prompt.prompt, written, prompt.gold, {}).value == 1


def test_the_student_is_as_careless_as_stated(tmp_path):
    prompts = make(tmp_path / "chain", warm_start=10_000)["warm_start"]
    kinds = {"carry": [], "off": []}
    for prompt in prompts:
        digits = operands(prompt)
        assert split_of(digits) == "train"
        found = steps(prompt.gold)
        assert [step[1] for step in found] == list(digits[1:])
        assert [step[0] for step in found] == [digits[0], *(step[2] for step in found[:-1])]
        for before, operand, after in found:
            error = after - before - operand
            assert error in (-10, -1, 0, 1)
            if before % 10 + operand >= 10:
                kinds["carry"].append(error == -10)
            else:
                assert error != -10
            if error != -10:
                kinds["off"].append(error)
    # Four standard deviations around the stated shares.
    for found, share in ((kinds["carry"], FORGOTTEN), ([e != 0 for e in kinds["off"]], OFF_BY_ONE)):
        assert abs(sum(found) / len(found) - share) < 4 * (share * (1 - share) / len(found)) ** 0.5
    up, down = kinds["off"].count(1), kinds["off"].count(-1)
    assert abs(up - down) < 4 * (up + down) ** 0.5


def test_splits_share_no_problem_and_hold_none_twice(tmp_path):
    """Not in another order either; and not those of another seed, whose model may be tested on these."""
    one, other = make(tmp_path / "one", seed=1), make(tmp_path / "other", seed=2)
    problems = {name: {tuple(sorted(operands(p))) for p in one[name] + other[name]} for name in FILES}
    for split in SPLITS:
        assert len({prompt.prompt for prompt in one[split]}) == len(one[split])
    for split, rest in itertools.combinations(SPLITS, 2):
        assert not problems[split] & problems[rest]
    assert not problems["warm_start"] & (problems["validation"] | problems["test"])


def test_order_does_not_move_a_problem_to_another_split():
    for digits in itertools.permutations((1, 2, 7, 9)):
        assert split_of(digits) == split_of((1, 2, 7, 9))


def test_shares_of_the_splits_and_of_the_lengths(tmp_path):
    """75, 10 and 15 % of the multisets of digits, and lengths alike, within four standard deviations."""
    problems = [
        digits for size in OPERANDS for digits in itertools.combinations_with_replacement(range(1, 10), size)
    ]
    splits = [split_of(digits) for digits in problems]
    for split, share in (("train", 0.75), ("validation", 0.10), ("test", 0.15)):
        deviation = (len(problems) * share * (1 - share)) ** 0.5
        assert abs(splits.count(split) - len(problems) * share) < 4 * deviation
    levels = [prompt.metadata["level"] for prompt in make(tmp_path / "chain", train=3000)["train"]]
    for size in OPERANDS:
        assert abs(levels.count(size) - 1000) < 4 * (3000 * 2 / 9) ** 0.5


def test_the_seed_decides_what_is_taken(tmp_path):
    first = make(tmp_path / "a", seed=1)
    assert make(tmp_path / "b", seed=1) == first
    other = make(tmp_path / "c", seed=2)
    for name in FILES:
        assert {p.id for p in first[name]} != {p.id for p in other[name]}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"validation": 0}, "0 validation prompts"),
        ({"warm_start": 0}, "0 warm start prompts"),
        ({"test": LARGEST + 1}, f"ask for at most {LARGEST}"),
    ],
)
def test_a_wrong_argument_leaves_nothing(tmp_path, arguments, reason):
    with pytest.raises(UserError, match=reason):
        make(tmp_path / "chain", **arguments)
    assert os.listdir(tmp_path) == []


def test_data_is_never_overwritten(tmp_path):
    make(tmp_path / "chain")
    before = {path.name: path.read_bytes() for path in (tmp_path / "chain").iterdir()}
    with pytest.raises(UserError, match="not empty"):
        make(tmp_path / "chain", seed=2)
    assert {path.name: path.read_bytes() for path in (tmp_path / "chain").iterdir()} == before
