"""Work of the main rank alone, however long."""

import time

import pytest
from support.worlds import Worlds


def slow_work(rank: int, world_size: int) -> list[object]:
    """Work that takes several words; then work that takes none; what each rank got."""
    from tepo_nemo.nemo.rollout import main_rank

    main_rank._WORD_S = 0.05

    def work() -> str:
        assert rank == 0
        time.sleep(0.3)
        return "done"

    return [main_rank.by_main_rank(work), main_rank.by_main_rank(lambda: None)]


def failing_work(rank: int, world_size: int) -> None:
    from tepo_nemo.nemo.rollout.main_rank import by_main_rank

    by_main_rank(lambda: 1 / 0)


def test_every_rank_gets_the_result(worlds: Worlds) -> None:
    assert worlds(2).run(slow_work) == [["done", None]] * 2


def test_an_error_is_the_main_ranks(worlds: Worlds) -> None:
    with pytest.raises(ZeroDivisionError):
        worlds(2).run(failing_work)
