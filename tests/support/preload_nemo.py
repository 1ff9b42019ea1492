"""What the launcher of stack "nemo" imports once, before it forks ranks: stand-ins, then the host stack."""

from tepo_nemo import cpu

cpu.install()

import nemo.collections.nlp.models.language_modeling.megatron_gpt_model  # noqa: E402, F401
import nemo_aligner.models.nlp.gpt.megatron_gpt_reinforce_actor  # noqa: E402, F401
import torch  # noqa: E402

torch.set_num_threads(1)
