"""Verdicts on pairs of gold and answer; what is right is stated by mathematics and by the README's table."""

import pytest

from tepo_nemo.errors import UserError
from tepo_nemo.reward.math_answer import grade_answer, math_answer
from tepo_nemo.reward.result import RewardResult

RIGHT = r"""
numbers         | 7 | 007 ; 1000 | 1,000 ; 1000 | 1\,000 ; 14916 | 14{,}916 ; -7 | −7 ; 12 | 12.00
numbers         | 0.4 | .4 ; 1.5 | \frac{3}{2}
numbers         | 1.5 | 1 1/2 ; 2.6 | 2\frac{3}{5} ; -1.5 | -1\frac12 ; \frac{2}{4} | \frac12
numbers         | 4 | \sqrt{16} ; 3e6 | 3 \times 10^6
numbers         | 2.5e-6 | 0.0000025 ; -1./3 | -\frac{1}{3} ; 1e-3 | 10^{-3} ; 6 | 3! ; 120 | \binom{10}{3}
numbers         | 7/9 | \tfrac79
long decimals   | \frac{2}{3} | 0.666666667 ; \frac{2}{3} | 0.666666666 ; \sqrt{2} | 1.41421356
long decimals   | \pi | 3.1415926535
percent         | 50\% | 0.5 ; \frac12 | 50\% ; 28\% | 28 percent
bases           | 52_8 | 52_{8} ; 52_8 | (52)_8
huge            | 2^{2000}-1 | (2^{1000}-1)(2^{1000}+1) ; \frac{1}{99!} | \frac{100}{100!}
huge            | \frac{1}{2^{99}} | 2^{-99}
algebra         | x^2+2x+1 | (x+1)^2 ; \sin 2x | 2\sin x\cos x ; \frac{x}{\sqrt2} | \frac{\sqrt{2}x}{2}
algebra         | 3*sqrt(2)*x | 3\sqrt2 x
algebra         | \ln 4 | 2\ln 2 ; \lceil n/2\rceil | \lfloor\frac{n+1}{2}\rfloor ; |x| | \sqrt{x^2}
algebra         | i(2-i) | 1+2i
algebra         | \cos(x) | \sin(90^\circ-x) ; np.arcsin(10/13) | \arcsin\frac{10}{13} ; (-1)^n | (-1)^{n+2}
algebra         | \binom{n}{2} | \frac{n(n-1)}{2}
algebra         | \sqrt{2}+\sqrt{3} | \sqrt{5+2\sqrt{6}} ; 0 | \sqrt{2}+\sqrt{3}-\sqrt{5+2\sqrt{6}}
algebra         | \frac{\ln 7}{4} | \frac{\log 7}{4}
names           | 5 | x = 5 ; x=5 | 5 ; f(x)=2x | 2x ; (p,q)=(3,2) | (3,2) ; (p,q)=(3,2) | q=2, p=3
names           | (3,2) | p=3, q=2 ; 5 | 2+3=5
lists           | 1,2 | 2, 1 ; 1,2 | 2 \text{ and } 1 ; a=1,b=2 | b=2,a=1 ; 1\pm\sqrt2 | 1+\sqrt2,1-\sqrt2
lists           | \{1,2\} | 2,1
lists           | (1,2),(3,4) | (3,4), (1,2) ; $21,16$ or $11$ | 11, 16, 21 ; x=1\pm2, x=7 | 7, 3, -1
tuples          | (1,2,3) | [1,2,3] ; (1,2,3) | 1,2,3 ; (1,2) | \begin{pmatrix}1\\2\end{pmatrix}
tuples          | 1:2:3 | 2:4:6 ; 11:21 | \frac{11}{21}
intervals       | (1,2) | 1<x<2 ; x \ge 5 | [5,\infty) ; [-2,7] | x \in [-2,7]
intervals       | x\ne3 | (-\infty,3)\cup(3,\infty) ; (-\infty,2)\cup(3,4] | x<2 \text{ or } 3<x\le4
equations       | x+y=1 | 2=2x+2y ; y=2x+3 | 2x-y+3=0 ; x<1 | -2x > -2 ; f(2)<f(1) | f(1)>f(2)
equations       | y'=ky | y'-ky=0
units           | 5 \text{ cm} | 5 ; 5 | 5\text{ cm} ; 90^\circ | 90 ; 90^\circ | \frac{\pi}{2} ; \$10 | 10
units           | 864\mbox{ inches}^2 | 864 \text{ square inches} ; 3\mathrm{ft}/\mathrm{s} | 3 ft/s
words           | \text{(C)} | C ; \text{(C)} | (C) 12 ; \text{Evelyn} | evelyn
words           | \text{no solution} | no solution
plain text      | 2^{n+1} | 2**(n+1) ; x^{10} | x^10 ; 10^{-3} | 10^-3 ; \frac{1}{\sqrt2} | sqrt(2)/2
plain text      | \frac{1}{6} | 0.1\overline{6} ; \mathbb{R} | (-\infty,\infty) ; (2,\infty) | \{x \mid x>2\}
vectors         | \langle 1,2\rangle | (1,2) ; \{-1\}\cup\{1\} | \{1,-1\} ; f^{-1}(x)=2x | 2x
approximations  | \frac{100}{3} | x=\frac{100}{3} \approx 33.3 ; \pi | \pi \approx 3.14
alternatives    | x^2 OR 2x | 2x ; x^2 OR 2x | x \cdot x ; The least value is \boxed{6}. | 6
"""

WRONG = r"""
numbers         | 7 | 8 ; 1/2 | -1/2 ; 17.001 | 17 ; 12 | 12.000000001 ; 7 | seven ; 2.6 | 2\frac{1}{5}
numbers         | 3.83e35 | 3.83 ; 1e11 | e11 ; 0 |
short decimals  | \frac{100}{3} | 33.3 ; 33.3 | \frac{100}{3} ; \frac13 | 0.33 ; \frac13 | 0.333333334
short decimals  | \pi | 3.14 ; \pi | \frac{22}{7}
percent         | 12\% | 12 ; 12 | 12\% ; 0.80 | 75
bases           | 52_8 | 52 ; 52_8 | 42 ; 52_8 | 52_9 ; 42 | 52_8
huge            | \frac{1}{2004!} | \frac{1}{2006!} ; \frac{1}{2^{99}} | \frac{1}{2^{98}}
huge            | 2^{2013} | 2^{2013}-6036 ; 1 | 1-2^{-99} ; 100! | 101!
huge            | 2^{1006}\sqrt{2^{2010}+2}-2^{2011} | 2^{1006}\sqrt{2^{2010}+3}-2^{2011}
huge            | \frac{2^{2005}+1}{3 \cdot 2^{2006}} | \frac{1}{3 \cdot 2^{2006}}
towers          | 10^{10^{10^{10}}} | 10^{10} ; 1 | 5^{5^{5^{5^{5}}}} ; 1 | (10!)!!!
towers          | 1 | \sum_{k=1}^{10^{12}}\frac{1}{k}
algebra         | x^2+2x+1 | (x+1)^3 ; x | X ; 2k | 2n ; |x| | x ; (-1)^n | 1
algebra         | \frac{37}{4} m | \frac{37}{4} ; 288\pi | 288 ; I(0) | 0 ; \sin 45^\circ | \sin 45
algebra         | \lceil n/2\rceil | \lfloor n/2\rfloor+1 ; \frac{n}{2} | \lfloor n/2\rfloor
algebra         | \log_2 x | \log_3 x ; \sqrt{a^2+b^2} | a+b
names           | x=5 | y=5 ; 5 | x+2=5 ; 5 | x=2+4=5 ; a=1,b=2 | a=2,b=1 ; (3,2) | p=2,q=3
names           | 7=11a+c | 11a+c ; a+3z=0 | 0
lists           | 1,2 | 1 ; 1 | 1,2 ; 1,1 | 1 ; \pm 3 | 3 ; 1,2,\ldots,n | 1,3,\ldots,2n-1 ; 2,3 | 2.3
tuples          | (1,2) | (2,1) ; (1,2) | \{1,2\} ; \{1,2\} | (1,2) ; 1,2 | (1,2)
tuples          | 11,\!111,\!100 | (11, 111, 100) ; 11:21 | 21:11
tuples          | \begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&3\\2&4\end{pmatrix}
intervals       | [0,1] | (0,1) ; [0,1) | (0,1] ; x>5 | x \ge 5 ; (1,2) | 1 \le x < 2 ; x<1 | x>-1
equations       | x+y=1 | x+y=2 ; x+y=1 | x+y ; x^2+y^2=25 | 25 ; 3x+4y+14=0 | 3*x-1*y+13=0
equations       | \frac{dx}{dt}=kx-a | kx-a=0 ; y'=ky | y=ky
units           | 5\text{ cm} | 5\text{ m} ; 5\text{ km} | 5000\text{ m} ; 10 | 10 dozen ; 10 | 10 million
units           | 5 | 5 factorial ; 5 | 5 \pmod 7 ; 90 | \frac{\pi}{2}
plain text      | 3 | [3] ; 2^{n}+1 | 2^(n+1) ; 10^{-20} | 0 ; 1,000 | 1.000 ; -2 | --2
words           | C | D ; \text{(C)} | (B) 12 ; \text{even} | odd ; A | A or B ; SRMC=LRMC | SRMC=SRAC
words           | SRMC=LRMC | LRMC
approximations  | \frac{100}{3} | \approx 33.3
"""


def pairs(table):
    return list(_pairs(table))


def _pairs(table):
    for line in table.strip().splitlines():
        _, _, entries = line.partition(" | ")
        for entry in entries.split(" ; "):
            # No bar with a blank on both sides stands in an answer of these tables.
            gold, _, answer = (entry + " ").partition(" | ")
            yield pytest.param(gold.strip(), answer.strip(), id=f"{gold.strip()} ~ {answer.strip()}")


@pytest.mark.parametrize(("gold", "answer"), pairs(RIGHT))
def test_right_answers(gold, answer):  # faults 31
    assert grade_answer(gold, answer, {}).value == 1.0


@pytest.mark.parametrize(("gold", "answer"), pairs(WRONG))
def test_wrong_answers(gold, answer):  # faults 30, 31
    result = grade_answer(gold, answer, {})
    assert (result.value, result.failed) == (0.0, False)


@pytest.mark.parametrize(("gold", "answer"), [*pairs(RIGHT), *pairs(WRONG)])
def test_a_gold_is_right_against_itself_in_a_box(gold, answer):
    assert math_answer("", rf"so $\boxed{{{gold}}}$.", gold, {}).value == 1.0


@pytest.mark.parametrize(
    ("metadata", "gold", "answer", "value"),
    [
        ({"answer_form": "integer"}, "25", "025", 1),
        ({"answer_form": "integer"}, "33", "x = 33", 1),
        ({"answer_form": "integer"}, "336", r"336^\circ", 1),
        ({"answer_form": "integer"}, "1000", "1,000", 1),
        ({"answer_form": "integer"}, "-7", "-7.0", 1),
        ({"answer_form": "integer"}, "12345678901234567890123", "12345678901234567890123", 1),
        ({"answer_form": "integer"}, "12345678901234567890123", "12345678901234567890124", 0),
        ({"answer_form": "integer"}, "5", "5.5", 0),
        ({"answer_form": "numeric"}, "4.5e33", r"4.52 \times 10^{33}", 1),
        ({"answer_form": "numeric"}, "4.5e33", r"4.56 \times 10^{33}", 0),
        ({"answer_form": "numeric"}, "0.53", "0.534", 1),
        ({"answer_form": "numeric"}, "0.53", "0.536", 0),
        ({"answer_form": "numeric"}, "4e33", r"4.2 \times 10^{33}", 0),  # a digit, but more than 1 % off
        ({"answer_form": "numeric"}, "2", "1.99", 0),  # whole numbers are exact
        ({}, "0.53", "0.534", 0),
        ({"answer_form": "choice"}, "C", "C. 12", 1),
        ({"answer_form": "choice"}, "C", "12", 0),
        ({"unit": "%", "error": "1e-1"}, "4.2", r"4.2\%", 1),
        ({"unit": "%", "error": "1e-1"}, "4.2", "4.28", 1),
        ({"unit": "%", "error": "1e-1"}, "4.2", "4.31", 0),
        ({"unit": "km"}, "5", r"5\text{ km}", 1),
        ({"unit": "km"}, "5", r"5\text{ m}", 0),
        ({"is_multiple_answer": True}, "100,200", "200,100", 1),
        ({"is_multiple_answer": True}, "100,200", "100200", 0),
        ({}, "100,200", "200,100", 0),
    ],
)  # fmt: skip
def test_the_rules_of_a_set(metadata, gold, answer, value):
    assert grade_answer(gold, answer, metadata).value == value


def test_statuses():
    assert math_answer("", "no box", "1", {}) == RewardResult(0.0, "unparseable")
    assert math_answer("", r"\boxed{7} \boxed{", "7", {}) == RewardResult(0.0, "unparseable")
    assert math_answer("", r"\boxed{ }", "7", {}) == RewardResult(0.0, "unparseable", "")
    assert math_answer("", r"\boxed{8}", "7", {}) == RewardResult(0.0, "ok", "8")
    assert math_answer("", r"\boxed{x}", "7", {"answer_form": "integer"}).status == "unparseable"


def test_wrong_metadata_is_a_mistake_in_the_data():
    with pytest.raises(UserError, match="answer_form='number' of gold '7'"):
        grade_answer("7", "7", {"answer_form": "number"})
    with pytest.raises(UserError, match="gold '7.5' is not an integer"):
        grade_answer("7.5", "7", {"answer_form": "integer"})


@pytest.mark.parametrize(
    "answer",
    [
        "(" * 10**5 + "1" + ")" * 10**5, "{" * 999 + "}" * 999, r"\frac{1}{1+" * 400 + "1" + "}" * 400,
        "1+" * 500_000, "7" * 10**6, "x^{" * 200 + "}" * 200, "😀" * 2000, "".join(map(chr, range(256))),
        "\x00" * 99, "\ud800",
        r"\text{a} " * 600, "1," * 2000, "x<" * 2000, "$" * 4999, "\\" * 4999, "9**9**9**9", "9!!!!!!",
    ],
    ids=range(17),
)  # fmt: skip
def test_hostile_answers_get_a_verdict(answer):  # faults 30
    result = math_answer("", rf"\boxed{{{answer}}}", r"\frac{1}{2}", {})
    assert result.value == 0.0 and result.status in ("ok", "unparseable")
