"""What NeMo and Megatron-core do with the stand-ins in place, on one or two ranks."""

from pathlib import Path

import pytest
import torch


def start_model_parallel(tensor: int = 1) -> None:
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)


def l2_norm(rank: int, world_size: int) -> list[float]:
    from nemo.collections.nlp.modules.common.megatron import clip_grads

    tensors = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]]), torch.tensor([-12.0])]
    overflow = torch.zeros(1, dtype=torch.int32)
    l2norm = clip_grads.amp_C.multi_tensor_l2norm
    norm, _ = clip_grads.multi_tensor_applier(l2norm, overflow, [tensors], False)
    return [norm.item(), overflow.item()]


def test_multi_tensor_norm_is_the_norm_of_all(worlds):
    assert worlds(1, stack="nemo").run(l2_norm) == [[13.0, 0.0]]  # 3, 4, 12, 13


def clipped(rank: int, world_size: int, maximum: float) -> tuple[float, list[list[float]]]:
    from nemo.collections.nlp.modules.common.megatron.clip_grads import clip_grad_norm_fp32

    start_model_parallel(world_size)
    # Each rank owns one part of a tensor-parallel weight, and a copy of a weight that all have.
    part, copy = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    part.tensor_model_parallel = True
    part.grad, copy.grad = torch.tensor([(3.0, 4.0)[rank]]), torch.tensor([12.0])
    norm = clip_grad_norm_fp32([part, copy], maximum)
    return float(norm), [part.grad.tolist(), copy.grad.tolist()]


@pytest.mark.parametrize(("maximum", "factor"), [(1.3, 0.1), (100.0, 1.0)])
def test_clipping_counts_shards_once_each_and_copies_once(worlds, maximum, factor):
    for rank, (norm, gradients) in enumerate(worlds(2, stack="nemo").run(clipped, maximum)):
        assert norm == pytest.approx(13.0, rel=1e-6)
        assert gradients[0] == pytest.approx([(3.0, 4.0)[rank] * factor], rel=1e-6)
        assert gradients[1] == pytest.approx([12.0 * factor], rel=1e-6)


def norms(
    rank: int, world_size: int, normalization: str, sequence_parallel: bool
) -> tuple[list[bool], torch.Tensor]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig, transformer_block
    from megatron.core.transformer.spec_utils import build_module

    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=2,
        normalization=normalization,
        tensor_model_parallel_size=2 if sequence_parallel else 1,
        sequence_parallel=sequence_parallel,
    )
    places = [get_gpt_layer_local_spec().submodules.input_layernorm, transformer_block.LayerNormImpl]
    built = [build_module(place, config=config, hidden_size=4, eps=0.5) for place in places]
    marks = [parameter.sequence_parallel for norm in built for parameter in norm.parameters()]
    assert config.sequence_parallel == sequence_parallel
    return marks, built[0](torch.tensor([1.0, 2.0, 3.0, 4.0])).detach()


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(("normalization", "weights"), [("RMSNorm", 2), ("LayerNorm", 4)])
def test_norms_mark_their_weights(worlds, normalization, weights, sequence_parallel):
    [(marks, output)] = worlds(1, stack="nemo").run(norms, normalization, sequence_parallel)
    assert marks == [sequence_parallel] * weights
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    if normalization == "RMSNorm":
        expected = x / (7.5 + 0.5) ** 0.5  # mean square 30/4
    else:
        expected = (x - 2.5) / (1.25 + 0.5) ** 0.5  # variance 5/4
    torch.testing.assert_close(output.double(), expected, rtol=1e-6, atol=1e-6)


def draws(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from nemo.collections.nlp.modules.common.megatron import megatron_init

    start_model_parallel(world_size)
    megatron_init._set_random_seed(seed)
    outside = torch.rand(2)
    with get_cuda_rng_tracker().fork():
        inside = torch.rand(2)
    return [outside, inside, torch.rand(2)]


def test_tracker_gives_each_tensor_rank_its_own_stream_and_leaves_the_shared_one(worlds):
    seed = 11
    shared = torch.rand(4, generator=torch.Generator().manual_seed(seed))
    for rank, (outside, inside, after) in enumerate(worlds(2, stack="nemo").run(draws, seed)):
        assert torch.equal(torch.cat([outside, after]), shared)
        own = torch.Generator().manual_seed(seed + 2718 + rank)  # Megatron-core's documented offset
        assert torch.equal(inside, torch.rand(2, generator=own))


def saved_and_loaded(rank: int, world_size: int, folder: Path) -> torch.Tensor:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    start_model_parallel(world_size)

    def state(values: torch.Tensor) -> dict[str, ShardedTensor]:
        return {"weight": ShardedTensor.from_rank_offsets("weight", values, (0, rank, world_size))}

    dist_checkpointing.save(state(torch.tensor([[1.5 + rank, -2.0]])), str(folder))
    return dist_checkpointing.load(state(torch.zeros(1, 2)), str(folder))["weight"]


def test_sharded_checkpoint_comes_back(worlds, tmp_path):
    loaded = worlds(2, stack="nemo").run(saved_and_loaded, tmp_path)
    assert [part.tolist() for part in loaded] == [[[1.5, -2.0]], [[2.5, -2.0]]]


def local_specs(rank: int, world_size: int) -> list[str]:
    from megatron.core.transformer import TransformerConfig
    from nemo.collections.nlp.models.language_modeling import megatron_gpt_model

    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    layer = megatron_gpt_model.get_specs("", config, use_te=True).submodules
    attention = layer.self_attention.submodules
    return [part.__name__ for part in (layer.mlp.submodules.linear_fc1, attention.q_layernorm)]


def test_models_are_built_of_megatron_core_layers(worlds):
    assert worlds(1, stack="nemo").run(local_specs) == [["ColumnParallelLinear", "IdentityOp"]]


def refusals(rank: int, world_size: int) -> list[str]:
    from megatron.core.extensions.transformer_engine import TENorm
    from nemo_aligner.models.nlp.gpt.megatron_gpt_reinforce_actor import GPTGenerateTRTLLM

    messages = []
    for construct in (GPTGenerateTRTLLM, TENorm):
        try:
            construct()
        except RuntimeError as refusal:
            messages.append(str(refusal))
    return messages


def test_what_needs_a_gpu_says_so_when_it_is_built(worlds):
    [[generator, norm]] = worlds(1, stack="nemo").run(refusals)
    assert generator.startswith("TensorRT-LLM generation needs a GPU")
    assert norm.startswith("TENorm needs Transformer Engine and a GPU")


def optimizer_class(rank: int, world_size: int) -> str:
    from nemo.core import optim

    return type(optim.get_optimizer("fused_adam", lr=0.5)([torch.nn.Parameter(torch.zeros(1))])).__module__


def test_nemo_finds_the_fused_adam(worlds):
    assert worlds(1, stack="nemo").run(optimizer_class) == ["tepo_nemo.cpu.optimizer"]
