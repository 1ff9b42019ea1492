"""`tepo-nemo bench step`: whole training steps, ours beside those of NeMo-Aligner's own REINFORCE trainer."""
