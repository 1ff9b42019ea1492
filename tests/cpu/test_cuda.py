"""CUDA calls and device arguments, answered by the CPU, in ranks where the stand-ins are in place."""

from collections.abc import Callable

import pytest
import torch


def made_on_cuda(rank: int, world_size: int) -> list[tuple[str, list[float]]]:
    gpu = torch.device("cuda", 0)
    base = torch.tensor([1.0, 2.0])
    made = [
        torch.tensor([1.0, 2.0], device="cuda"),
        torch.as_tensor([1.0, 2.0], device="cuda:0"),
        torch.arange(1.0, 3.0, device=gpu),
        torch.full((2,), 1.0, device=gpu).cumsum(0),
        torch.zeros(2, device=torch.cuda.current_device()) + base,
        torch.empty_like(base, device="cuda").copy_(base),
        base.new_tensor([1.0, 2.0], device="cuda"),
        base.to("cuda"),
        base.to(gpu, torch.float32),
        base.to(device="cuda:0", dtype=torch.float32),
        base.to(0),
        base.cuda(),
        base.cuda(non_blocking=True),
        torch.nn.Linear(1, 1).to("cuda").cuda().weight.detach().new_tensor([1.0, 2.0]),
        torch.cuda.FloatTensor([1.0, 2.0]),
    ]
    return [(tensor.device.type, tensor.tolist()) for tensor in made]


def test_cuda_names_the_cpu(worlds):
    assert worlds(1, stack="nemo").run(made_on_cuda) == [[("cpu", [1.0, 2.0])] * 15]


def other_arguments(rank: int, world_size: int) -> list[object]:
    ones = torch.ones(2)
    return [
        torch.zeros(2, device="meta").device.type,
        ones.to("meta").device.type,
        str(ones.to(torch.float64).dtype),
        str(ones.to(torch.zeros(1, dtype=torch.int64)).dtype),
        str(torch.full((2,), 3).dtype),
        torch.cuda.is_available(),
    ]


def test_other_devices_and_arguments_pass_through(worlds):
    expected = ["meta", "meta", "torch.float64", "torch.int64", "torch.int64", False]
    assert worlds(1, stack="nemo").run(other_arguments) == [expected]


def type_names(rank: int, world_size: int) -> list[object]:
    values = [torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)]
    converted = torch.tensor([1.5]).type("torch.cuda.IntTensor")
    checks = [isinstance(values[0], torch.cuda.FloatTensor), isinstance(values[1], torch.cuda.FloatTensor)]
    return [[value.type() for value in values], str(converted.dtype), converted.item(), checks]


def test_types_have_their_cuda_names(worlds):
    names = ["torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor", "torch.cuda.LongTensor"]
    assert worlds(1, stack="nemo").run(type_names) == [[names, "torch.int32", 1, [True, False]]]


def replay(rank: int, world_size: int) -> list[bool]:
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    again = torch.rand(3)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(5))
    return [torch.equal(first, expected), torch.equal(again, expected)]


def test_the_cuda_generator_is_the_cpu_generator(worlds):
    assert worlds(1, stack="nemo").run(replay) == [[True, True]]


def streams(rank: int, world_size: int) -> float:
    side, event = torch.cuda.Stream(device=0, priority=-1), torch.cuda.Event(enable_timing=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = torch.ones(3, device="cuda").sum()
        event.record(side)
    torch.cuda.default_stream().wait_stream(side)
    torch.cuda.current_stream().wait_event(event)
    event.synchronize()
    side.synchronize()
    torch.cuda.synchronize()
    return total.item()


def test_streams_run_in_order(worlds):
    assert worlds(1, stack="nemo").run(streams) == [3.0]


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_reaches_the_operations(worlds, enabled):
    expected = "torch.bfloat16" if enabled else "torch.float32"
    assert worlds(1, stack="nemo").run(autocast_dtype, enabled) == [expected]


def autocast_dtype(rank: int, world_size: int, enabled: bool) -> str:
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=enabled):
        return str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)


def same_after_a_second_call(rank: int, world_size: int) -> list[bool]:
    from tepo_nemo import cpu

    before = dict(vars(torch)), dict(vars(torch.cuda)), dict(vars(torch.Tensor)), torch.autocast.__init__
    answer = cpu.install()
    after = dict(vars(torch)), dict(vars(torch.cuda)), dict(vars(torch.Tensor)), torch.autocast.__init__
    return [answer, after == before]


def test_a_second_install_changes_nothing(worlds):
    assert worlds(1, stack="nemo").run(same_after_a_second_call) == [[True, True]]


def test_only_the_host_s_small_functions_are_left_uncompiled(worlds):
    """The operator on logits is compiled on a CPU too."""
    assert worlds(1, stack="nemo").run(compilers) == [(True, True, 1)]


def compilers(rank: int, world_size: int) -> tuple[bool, bool, int]:
    import megatron.core.jit
    import nemo.collections.nlp.modules.common.megatron.utils as nemo_utils

    def double(x: torch.Tensor) -> torch.Tensor:
        return x + x

    graphs = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        graphs.append(graph)
        return graph.forward

    torch.compile(double, backend=compiler)(torch.ones(2))
    return (
        megatron.core.jit.jit_fuser(double) is double,
        nemo_utils.jit_fuser(double) is double,
        len(graphs),
    )
