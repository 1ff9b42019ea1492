"""The last box, or none."""

import pytest

from tepo_nemo.data.boxed import last_box


@pytest.mark.parametrize(
    ("response", "box"),
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"$\boxed{\frac{1}{2}}$ is it", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\fbox{3} \fboxed{4}", "4"),
        (r"\boxed {5}", "5"),
        (r"\boxed 5", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{a\\}b", "a\\\\"),
    ],
)  # fmt: skip
def test_the_last_box(response, box):
    assert last_box(response) == box


@pytest.mark.parametrize(
    "response",
    [
        "", "7", "the answer is 7", r"\boxed{7}. finally \boxed{", r"\boxed{7}. finally \boxed{8",
        r"\boxed{\frac{1}{2}",
        r"\boxed{1\}", r"\boxed", r"\boxed{7} \boxed", r"\boxedx{7}", r"boxed{7}", r"\boxed{{7}",
    ],
)  # fmt: skip
def test_an_open_box_is_no_answer_and_hides_the_earlier_ones(response):  # faults 31
    assert last_box(response) is None
