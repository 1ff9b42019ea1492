"""How long the grading pool takes: run it by hand, on an idle machine.

    PYTHONPATH=tests python tests/reward/measure_pool.py

Grades 2,000 ordinary answers, then a batch of 512 of which 5 % are hostile, and compares every verdict with
the one that the answer was made for.
"""

import random
import time

from support import hostile_rewards

from tepo_nemo.config.schema import GradingConfig
from tepo_nemo.reward.pool import PoolSettings, RewardPool

ORDINARY, BATCH, HOSTILE = 2000, 512, 0.05


def make_answer(choice):
    """A gold, a right answer and a wrong one, of the kinds that benchmarks of mathematics have."""
    a, b, c = choice.sample(range(2, 60), 3)
    return choice.choice(
        [
            (f"{a * b}", f"{a * b}", f"{a * b + 1}"),
            (f"{a}", f"\\text{{{a}}}", f"{a}.5"),
            (f"\\frac{{{a}}}{{{b}}}", f"\\dfrac{{{a}}}{{{b}}}", f"\\dfrac{{{b}}}{{{a}}}"),
            (f"{a}\\sqrt{{{b}}}", f"\\sqrt{{{b}}} \\cdot {a}", f"{a}\\sqrt{{{b + 1}}}"),
            (f"({a}, {b})", f"\\left({a},{b}\\right)", f"({b}, {a})"),
            (f"[{a}, {a + b})", f"\\left[{a}, {a + b}\\right)", f"[{a}, {a + b}]"),
            (f"{a}x^2 + {b}x + {c}", f"{c} + {b}x + {a}x^{{2}}", f"{a}x^2 - {b}x + {c}"),
            (f"\\frac{{{a}\\pi}}{{{b}}}", f"\\frac{{{a}}}{{{b}}}\\pi", f"\\frac{{{a + 1}\\pi}}{{{b}}}"),
            (f"{a}^\\circ", f"{a}", f"{b}"),
            (f"\\{{{a}, {b}, {c}\\}}", f"{b}, {c}, {a}", f"{b}, {c}"),
        ]
    )


def ordinary_items(count):
    """Items, and the value of each."""
    choice = random.Random(1)
    items, values = [], []
    for number in range(count):
        gold, right, wrong = make_answer(choice)
        values.append(float(number % 2 == 0))
        text = "We look at one case after the other. " * choice.randint(20, 200)
        items.append(("", f"{text} So it is \\boxed{{{right if values[-1] else wrong}}}.", gold, {}))
    return items, values


def hostile_responses():
    """What hangs, what eats memory or crashes, and what is deep, long, binary or full of emoji."""
    return [
        "sleep", "hang in C", "hang in C", "eat", "crash", "recurse",
        r"\boxed{5^(5^(5^(5^5)))}", r"\boxed{" + "(" * 10**5, r"\boxed{" + "1+" * 500_000 + "1}",
        "\\boxed{" * 10**5, r"\boxed{" + "\x00\ud800" * 500_000 + "}",
        r"\boxed{" + "\U0001f600" * 10**6 + "}", r"\boxed{9!!!!!!}",
    ]  # fmt: skip


def timed(pool, items):
    start = time.perf_counter()
    results = pool.grade(items)
    return time.perf_counter() - start, results


def main():
    grading = GradingConfig()
    pool = RewardPool(
        f"{hostile_rewards.__name__}.mathematics",
        PoolSettings(
            grading.workers, grading.time_limit, grading.memory_limit_gib, grading.max_tasks,
            grading.response_tail, alarm_fraction=1.0,
        ),
    )  # fmt: skip
    items, values = ordinary_items(ORDINARY)
    for turn in ("first batch, workers start", "again"):
        seconds, results = timed(pool, items)
        wrong = sum(
            (result.status, result.value) != ("ok", value)
            for result, value in zip(results, values, strict=True)
        )
        print(f"{ORDINARY} ordinary answers, {turn}: {seconds:.2f} s, {wrong} wrong verdicts")

    mixed, expected = items[:BATCH], results[:BATCH]
    hostile = hostile_responses()
    places = random.Random(2).sample(range(BATCH), round(BATCH * HOSTILE))
    for number, place in enumerate(places):
        mixed[place] = ("", hostile[number % len(hostile)], "1", {})
    seconds, results = timed(pool, mixed)
    others = [place for place in range(BATCH) if place not in places]
    changed = sum(results[place] != expected[place] for place in others)
    accepted = sum(results[place].value != 0 for place in places)
    statuses = sorted(results[place].status for place in places)
    print(
        f"{BATCH} answers, {len(places)} of them hostile, limit {grading.time_limit:g} s: {seconds:.2f} s, "
        f"{changed} other verdicts changed, {accepted} hostile answers accepted"
    )
    print("hostile:", ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)))
    pool.close()


if __name__ == "__main__":
    main()
