import pytest

from tepo_nemo.errors import UserError
from tepo_nemo.launch.scheduler import first_host, set_rank_variables

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[003-006]",
    "SLURM_JOB_ID": "123456",
}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("login", "login"),
        ("login.example.org", "login.example.org"),
        ("gpu[003-007,9],login", "gpu003"),
        ("gpu[9,003-007]", "gpu9"),
        ("gpu[12]", "gpu12"),
        ("a1,b[2-3]", "a1"),
        ("rack[1-2]node[04-05]", "rack1node04"),
        ("gpu[1-2]-ib0,gpu[3-4]-ib0", "gpu1-ib0"),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


def test_no_node_is_refused():
    with pytest.raises(UserError, match="SLURM_JOB_NODELIST=.*set MASTER_ADDR"):
        first_host("")


def test_variables_follow_from_slurm():
    environment = dict(SLURM)
    set_rank_variables(environment)
    assert {key: value for key, value in environment.items() if key not in SLURM} == {
        "RANK": "5",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu003",
        "MASTER_PORT": "23456",
    }


def test_all_tasks_of_a_step_meet_at_one_place_and_the_step_may_use_a_part_of_the_job():
    places = set()
    for task in range(4):
        environment = SLURM | {"SLURM_PROCID": str(task), "SLURM_STEP_NODELIST": "gpu[005-006]"}
        set_rank_variables(environment)
        places.add((environment["MASTER_ADDR"], environment["MASTER_PORT"]))
    assert places == {("gpu005", "23456")}


def test_what_the_user_has_set_stays():
    environment = SLURM | {"MASTER_ADDR": "mine", "MASTER_PORT": "29500"}
    set_rank_variables(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("mine", "29500")


def test_torchrun_inside_slurm_is_torchruns():
    given = SLURM | {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }
    environment = dict(given)
    set_rank_variables(environment)
    assert environment == given


def test_a_process_alone_is_rank_0_of_1():
    environment = {}
    set_rank_variables(environment)
    assert int(environment.pop("MASTER_PORT")) > 0
    assert environment == {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
