"""Loss, gradients and updates do not depend on how the work is spread: all layouts, from the same weights, on
the same rollout, in fp32; and at TP1 they are those of a float64 model written from the formulas.
"""

from collections.abc import Callable

import pytest
import torch
from support.layouts import LAYOUTS, REFERENCE, Outcome, assert_close, merge
from support.reference_model import response_statistics, tepo_loss
from support.synthetic import RESPONSES_PER_UPDATE, first_rows
from support.toy import ToyFolder
from support.updates import Case, Job, Updates, perform
from support.worlds import Worlds

LEARNING_RATE, CLIP = 0.5, 0.5
OPTIMIZERS = {
    "sgd": ["trainer.optimizer.name=sgd", f"trainer.optimizer.learning_rate={LEARNING_RATE}"],
    "adam": ["trainer.optimizer.name=adam", "trainer.optimizer.learning_rate=1e-3"],
    "production": ["trainer.optimizer.name=distributed_adam", "trainer.optimizer.learning_rate=1e-3","model.precision=bf16","model.megatron_amp_O2=true"],
    "amp_adam": ["trainer.optimizer.name=adam", "trainer.optimizer.learning_rate=1e-3","model.precision=bf16"],
    "distributed_adam": ["trainer.optimizer.name=distributed_adam", "trainer.optimizer.learning_rate=1e-3"],
}
WORLD_SECONDS = 110

Run = Callable[[str, bool], dict[str, Outcome]]


@pytest.fixture(scope="module")
def run(worlds: Worlds, toy: ToyFolder, given) -> Run:
    """`run(layout, tied)`: the outcome with each optimizer; all layouts get the same jobs."""
    outcomes: dict[tuple[str, bool], dict[str, Outcome]] = {}

    def get(layout: str, tied: bool) -> dict[str, Outcome]:
        if (layout, tied) not in outcomes:
            start = given(tied)
            jobs = {}
            for name, overrides in OPTIMIZERS.items():
                config = LAYOUTS[layout].config(
                    toy, *start.overrides, *overrides, f"trainer.optimizer.gradient_clip={CLIP}"
                )
                cases = cases_of(toy, start) if name == "sgd" else {}
                if name != "sgd":
                    cases = {"tepo": Case(start.batch, start.old, config.algorithm)}
                jobs[name] = Job(config, cases, Updates(start.batch, start.old))
            reports = worlds(LAYOUTS[layout].ranks, stack="nemo").run(
                perform, list(jobs.values()), timeout=WORLD_SECONDS
            )
            outcomes[layout, tied] = {
                name: merge(job, of_job)
                for (name, job), of_job in zip(jobs.items(), zip(*reports, strict=True), strict=True)
            }
        return outcomes[layout, tied]

    return get


def cases_of(toy: ToyFolder, start) -> dict[str, Case]:
    """Every loss at the starting weights; those named tepo... are one and the same loss."""
    tepo = toy.config().algorithm
    bonus = toy.config("algorithm.entropy_bonus=0.01").algorithm
    covariance = toy.config("algorithm.entropy_drop=covariance").algorithm
    grpo = toy.config("algorithm=grpo_dapo").algorithm
    five, five_old = first_rows(start.batch, start.old, 5)
    return {
        "tepo, micro-batch 4": Case(start.batch, start.old, tepo, micro_batch_size=4),
        "tepo, micro-batch 2": Case(start.batch, start.old, tepo, micro_batch_size=2),
        "tepo, micro-batch 1": Case(start.batch, start.old, tepo, micro_batch_size=1),
        "entropy bonus": Case(start.batch, start.old, bonus),
        "covariance": Case(start.batch, start.old, covariance),
        "grpo_dapo": Case(start.batch, start.old, grpo),
        "five responses": Case(five, five_old, tepo),
        "on policy": Case(start.batch, None, tepo),
    }


both = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
every_layout = pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != REFERENCE])


@both
@pytest.mark.timeout(900)
def test_dev(run,given,tied):
    from support.layouts import distances
    def glob(a,b):
        num=sum(float((a[k].double()-b[k].double()).square().sum()) for k in b); den=sum(float(b[k].double().square().sum()) for k in b); return (num/den)**.5
    ref=run(REFERENCE,tied)
    fp=ref["distributed_adam"]
    for l in ["tp1","tp2","pp2","dp2"]:
        try: o=run(l,tied)
        except BaseException as e: print("FAIL",l,str(e)[:300]); print(e.__notes__[0][-2500:]); continue
        for m in ["production","amp_adam"]:
            x=o[m]; y=ref[m]; z=ref["sgd"] if m=="o2_sgd" else fp
            r=fp.gradients["tepo"]; 
            d=distances(x.gradients["tepo"],r); e=distances(y.gradients["tepo"],r); b=distances(x.gradients["tepo"],y.gradients["tepo"])
            print("=====",l,m,"loss",x.losses["tepo"],fp.losses["tepo"],"norms",x.grad_norms,z.grad_norms)
            print("  grad global to fp32",glob(x.gradients["tepo"],r)," to tp1",glob(x.gradients["tepo"],y.gradients["tepo"]))
            print("  worst ratio e_L/e_1",max((d[k]/e[k],k) for k in d), "b/e1",max((b[k]/e[k],k) for k in d), "max e1",max(e.values()))
            dc=glob(x.change,z.change); 
            print("  change global to fp32",dc,"to tp1",glob(x.change,y.change), "before", glob(x.before,z.before))
