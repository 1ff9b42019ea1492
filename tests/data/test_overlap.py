"""Overlap of two sets, from texts whose runs of 13 words are counted by hand."""

import pytest

from tepo_nemo.data.overlap import find_overlap
from tepo_nemo.data.prompts import Prompt

WORDS = [f"w{n}" for n in range(40)]


def prompt(id, text, gold="1", **metadata):
    return Prompt(id, text, gold, metadata)


def text(start, stop):
    return " ".join(WORDS[start:stop])


def test_shares_and_the_nearest_problem():
    """20 words are 8 runs; the first other shares those from 0 to 3, the second those from 3 and 4."""
    others = [prompt("x", text(0, 16) + " end", "2"), prompt("y", "start " + text(3, 17), "1")]
    (overlap,) = find_overlap([prompt("a", text(0, 20)), prompt("b", text(20, 40))], others)
    assert (overlap.id, overlap.other_id, overlap.same_gold) == ("a", "x", False)
    assert overlap.covered == pytest.approx(5 / 8)
    assert overlap.covered_by_other == pytest.approx(4 / 8)


@pytest.mark.parametrize(("words", "overlaps"), [(15, 0), (16, 1)])
def test_half_of_the_runs_decides(words, overlaps):
    """Of 8 runs, 15 words in common are 3 and 16 are 4."""
    assert len(find_overlap([prompt("a", text(0, 20))], [prompt("x", text(0, words))])) == overlaps


def test_writing_does_not_matter():
    problem = prompt("a", "Let $\\frac{W0}{w1}$ be, w2; w3 w4 w5 (w6) w7 w8\nw9, w10 w11 w12.")
    other = prompt("x", "let \\dfrac{w0}{W1} be w2 w3 w4 w5 w6 \\left( w7 w8 w9 w10 w11 w12 \\right)")
    assert [overlap.covered for overlap in find_overlap([problem], [other])] == [1.0]


def test_short_problems_are_compared_as_a_whole():
    problems = [prompt("a", "37+85="), prompt("b", "85+37="), prompt("c", "5+37=")]
    others = [prompt("x", "85+37= "), prompt("y", text(0, 20) + " 37+85=")]
    assert [(each.id, each.other_id) for each in find_overlap(problems, others)] == [("b", "x")]


def test_templates_and_instructions_around_a_problem_are_left_aside():
    frame = " ".join(f"frame{n}" for n in range(30))
    problem = prompt("a", f"{frame} {text(0, 20)}", problem=text(0, 20))
    same, other = (prompt("x", f"{frame} {words}", problem=words) for words in (text(0, 20), text(20, 40)))
    assert len(find_overlap([problem], [same])) == 1
    assert find_overlap([problem], [other]) == []
