"""The rollout backend of a configuration."""

from nemo.collections.nlp.models.language_modeling.megatron_gpt_model import MegatronGPTModel

from tepo_nemo.config.rollout_checks import check_engine_architecture, check_engine_vocabulary
from tepo_nemo.config.schema import Config
from tepo_nemo.nemo.rollout.megatron import MegatronRollout
from tepo_nemo.rollout.protocol import RolloutBackend


def build_rollout(model: MegatronGPTModel, config: Config, vocab_size: int) -> RolloutBackend:
    """What `rollout.backend` names, for a built model; called by all ranks.

    Args:
        vocab_size: of the true vocabulary.

    Raises:
        UserError: the model, the packages or the ranks are not what the backend needs.
    """
    stop_token, batch_size = model.tokenizer.eos_id, config.rollout.batch_size
    match config.rollout.backend:
        case "megatron":
            return MegatronRollout(model, stop_token=stop_token, vocab_size=vocab_size, batch_size=batch_size)
        case "trtllm":
            check_engine_architecture(model.cfg)
            # Rows that are no token of the tokenizer are in the engine too: it shares all of them out.
            columns = config.model.vocab_size or vocab_size
            check_engine_vocabulary(columns, config.model.tensor_model_parallel_size)
            # TensorRT-LLM starts MPI when it is imported: in no process that does not use it.
            from tepo_nemo.nemo.rollout.trtllm.backend import TensorRTLLMRollout

            return TensorRTLLMRollout(
                model,
                stop_token=stop_token,
                vocab_size=vocab_size,
                columns=columns,
                max_prompt_length=model.cfg.encoder_seq_length - config.rollout.max_response_length,
                max_response_length=config.rollout.max_response_length,
                batch_size=batch_size,
                unload=config.rollout.trtllm.unload,
                time_limit_s=config.rollout.trtllm.time_limit,
                engine_folder=config.rollout.trtllm.engine_folder,
                devices_per_node=config.hardware.devices_per_node,
            )
        case "server":
            from tepo_nemo.nemo.rollout.server import ServerRollout

            return ServerRollout(
                model,
                config.rollout.server,
                handover_folder=config.rollout.server.handover_folder or config.output / "handover",
                stop_token=stop_token,
                vocab_size=vocab_size,
                temperature=config.rollout.temperature,
            )
