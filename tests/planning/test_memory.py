"""Memory of a GPU against counts by hand."""

import pytest

from tepo_nemo.config.load import load_config
from tepo_nemo.config.presets import choices
from tepo_nemo.errors import UserError
from tepo_nemo.objectives import registry
from tepo_nemo.planning.cost import passes_of
from tepo_nemo.planning.memory import generation_rows, micro_batch_tokens
from tepo_nemo.planning.plan import Plan, make_plan

QWEN = "experiment=paper_qwen2_5_7b"
ALONE = ["model.tensor_model_parallel_size=1", "model.sequence_parallel=false"]
H, Q, KV, F, V, LAYERS = 3584, 28 * 128, 4 * 128, 18944, 152064, 28


def plan(*overrides: str) -> Plan:
    return make_plan(load_config([QWEN, *overrides], files=False))


def test_what_is_there_all_the_time():
    """A quarter of each matrix and table, all norms; two copies of the model share the optimizer's state."""
    layer = H * (Q + 2 * KV) + (Q + 2 * KV) + Q * H + 3 * H * F
    rank = (LAYERS * layer + 2 * V * H) // 4 + (2 * LAYERS + 1) * H
    memory = plan().stages[0]
    assert (memory.weights, memory.gradients, memory.optimizer) == (2 * rank, 4 * rank, 12 * rank // 2)
    assert memory.resident == 12 * rank


@pytest.mark.parametrize(
    ("mode", "weights", "optimizer"),
    [
        (["trainer.optimizer.name=sgd"], 4, 0),
        (["trainer.optimizer.name=adam"], 4, 8),
        (["trainer.optimizer.name=distributed_adam"], 4, 8 / 2),
        (["model.precision=32", "trainer.optimizer.name=adam"], 4, 8),
    ],
)
def test_bytes_a_parameter_without_bf16_weights(mode, weights, optimizer):
    found = plan("model.megatron_amp_O2=false", *mode)
    parameters = found.shape.parameters_of_rank(0)
    memory = found.stages[0]
    assert (memory.weights, memory.gradients) == (weights * parameters, 4 * parameters)
    assert memory.optimizer == optimizer * parameters


def test_a_checkpoint_has_weights_and_optimizer_state_once():
    assert plan().checkpoint_bytes == 7_615_616_512 * (2 + 12)
    assert plan("hardware=h100x32").checkpoint_bytes == plan().checkpoint_bytes
    fp32 = plan("model.megatron_amp_O2=false", "trainer.optimizer.name=adam")
    assert fp32.checkpoint_bytes == 7_615_616_512 * (4 + 8)


def test_keys_and_values():
    """28 layers, 2 x 4 heads of 128 channels of 2 bytes, a quarter of them; 256 sequences of 10240."""
    assert plan().stages[0].key_values == 28 * 2 * 4 * 128 * 2 // 4 * 256 * 10240
    assert plan("model.pipeline_model_parallel_size=2").stages[1].key_values == 14 * 2 * 128 * 2 * 256 * 10240


def test_activations_of_a_layer_by_hand():
    """One layer on one rank, nothing recomputed: bytes of a token, times the tokens of a micro-batch."""
    norms = 2 * (2 * H + 2 * H) + 2 * H
    attention = 2 * ((Q + 2 * KV) + (Q + KV) + Q)
    feed_forward = 2 * (2 * F + F)
    overrides = ["model.num_layers=1", "model.activations_checkpoint_granularity=null", *ALONE]
    found = plan(*overrides, "trainer.micro_batch_tokens=20480")
    assert found.stages[0].activations == 20480 * (norms + attention + feed_forward)


def test_recomputing_keeps_the_input_of_each_layer_and_works_on_one():
    kept = plan("model.activations_checkpoint_granularity=null").stages[0].activations
    one_layer = kept // LAYERS
    assert plan().stages[0].activations == 16384 * LAYERS * 2 * H // 4 + one_layer


def test_tensor_parallelism_leaves_norms_whole_unless_the_sequence_is_split():
    none = "model.activations_checkpoint_granularity=null"
    alone = plan(none, *ALONE).stages[0].activations
    split = plan(none).stages[0].activations
    unsplit = plan(none, "model.sequence_parallel=false").stages[0].activations
    assert alone == 4 * split
    assert unsplit - split == 16384 * LAYERS * (10 * H - 10 * H // 4)


def test_the_first_stage_is_ahead_by_all_others():
    none = "model.activations_checkpoint_granularity=null"
    stages = plan("model.pipeline_model_parallel_size=2", none).stages
    assert stages[0].activations == 2 * stages[1].activations
    assert (stages[0].output_layer, stages[0].sampling) == (0, 0) < (stages[1].output_layer, 1)


def test_the_fused_output_layer_never_holds_the_logits():
    fused, plain = (
        plan(f"trainer.fused_output_layer={fused}").stages[0].output_layer for fused in ("true", "false")
    )
    assert plain - fused == pytest.approx(16384 * (V // 4) * 2 - V // 4 * H * 2, rel=0.2)


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        ([], 16384),
        (["trainer.micro_batch_tokens=4096"], 10240),  # a longer response stands alone
        (["trainer.micro_batch_tokens=null"], 32 * 10240),  # 64 responses for two copies
        (["trainer.micro_batch_tokens=null", "trainer.micro_batch_size=3"], 3 * 10240),
        (["trainer.micro_batch_size=1"], 10240),
        (["trainer.micro_batch_tokens=1000000"], 32 * 10240),
    ],
)
def test_tokens_of_the_largest_micro_batch(overrides, tokens):
    found = plan(*overrides)
    assert micro_batch_tokens(found.config, found.shape) == tokens


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        ([], 256),
        (["hardware=h100x32"], 64),  # 512 responses, 8 copies
        (["rollout.batch_size=100"], 100),
        (["rollout.batch_size=null"], 256),
        (["rollout.prompts_per_step=65", "trainer.updates_per_rollout=1", "rollout.batch_size=null"], 260),
    ],
)
def test_sequences_that_a_copy_generates_at_once(overrides, rows):
    assert generation_rows(plan(*overrides).config) == rows


def test_as_many_sequences_as_fit_do_and_one_more_does_not():
    fitting = plan().rows_that_fit
    assert plan(f"rollout.batch_size={fitting}", "rollout.prompts_per_step=512").fits
    assert not plan(f"rollout.batch_size={fitting + 1}", "rollout.prompts_per_step=512").fits


def test_the_fullest_stage_counts():
    """Tables of 152064 x 3584 on the ends; on the last, the next tokens are drawn."""
    found = plan("model.pipeline_model_parallel_size=4", "model.tensor_model_parallel_size=2")
    assert found.stages[1].weights == found.stages[2].weights < found.stages[0].weights
    assert found.worst == 3


VARIANTS = [[f"algorithm={name}"] for name in choices()["algorithm"]] + [
    ["algorithm=grpo", "algorithm.kl_coefficient=0.04"],
    ["algorithm=tepo", "algorithm.entropy_drop=covariance"],
    ["algorithm=tepo", "algorithm.entropy_drop=covariance", "algorithm.kl_mask=all"],
    ["algorithm=kl_cov", "algorithm.kl_coefficient=0"],
]


@pytest.mark.parametrize("overrides", VARIANTS, ids=" ".join)
def test_passes_are_those_that_the_method_declares(overrides):
    found = plan(*overrides)
    algorithm = found.config.algorithm
    objective = registry.build(algorithm.name, algorithm.options)
    passes = passes_of(algorithm, updates=8)
    assert passes.reference == objective.needs_reference
    assert passes.selection == objective.needs_minibatch_statistics
    assert passes.old == (1 if objective.shapes_advantages else 7 / 8)
    assert (found.reference_bytes > 0) == objective.needs_reference


def test_a_reference_policy_lies_in_host_memory_once_a_rank():
    with_reference, without = plan("algorithm=erpo"), plan()
    assert with_reference.stages == without.stages
    assert with_reference.reference_bytes == 8 * without.stages[0].weights


def test_an_architecture_that_only_the_checkpoint_knows_is_refused():
    with pytest.raises(UserError, match=r"^model.num_layers=null: a plan takes the architecture from the"):
        plan("model.num_layers=null")


def test_an_engine_of_its_own_has_bf16_weights_and_a_cache_of_all_layers():
    """TensorRT-LLM's ranks share layers and no pipeline: two stages are two engines, with half the rows."""
    engine = ["rollout=trtllm", "rollout.batch_size=256"]
    layer = H * (Q + 2 * KV) + (Q + 2 * KV) + Q * H + 3 * H * F
    weights = 2 * ((LAYERS * layer + 2 * V * H) // 4 + (2 * LAYERS + 1) * H)
    cache = 28 * 2 * 128 * 2 * 10240
    one = plan(*engine).stages[0]
    assert (one.engine, one.key_values, one.sampling) == (weights, 256 * cache, 0)
    assert one.rollout == one.resident + weights + 256 * cache
    assert one.update == one.resident + one.activations + one.output_layer
    for stage in plan("model.pipeline_model_parallel_size=2", *engine).stages:
        assert (stage.engine, stage.key_values) == (
            weights,
            256 * cache,
        )  # 512 responses on 1 copy, 2 engines
    kept = plan(*engine, "rollout.trtllm.unload=false").stages[0]
    assert kept.update == one.update + weights + 256 * cache


def test_what_fits_beside_an_engine():
    own, engine = plan("rollout.batch_size=8"), plan("rollout=trtllm", "rollout.batch_size=8")
    lost = engine.stages[0].engine / (28 * 2 * 128 * 2 * 10240)
    assert own.rows_that_fit > engine.rows_that_fit > own.rows_that_fit - lost - 1


def test_servers_take_nothing_of_the_gpus_that_train():
    found = plan("rollout=server")
    memory = found.stages[0]
    assert memory.rollout == memory.resident and memory.update == plan().stages[0].update
    assert found.rows_that_fit is None and [cost.rollout_s for cost in found.cost] == [0, 0]
