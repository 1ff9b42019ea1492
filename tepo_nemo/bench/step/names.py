"""What rows are called."""

ALIGNER = "NeMo-Aligner"
OURS = "tepo_nemo"
SINGLE = "tepo_nemo, micro-batch 1"
TWICE_PROMPTS = "twice the prompts"
TWICE_RESPONSES = "twice the responses"
TWICE_LENGTHS = "twice the lengths"
SCALED = (TWICE_PROMPTS, TWICE_RESPONSES, TWICE_LENGTHS)

BALANCE = "length-balanced micro-batches"
FIRST = "first mini-batch's old pass saved"
RESPONSES_ONLY = "output layer of response tokens alone"
FUSED = "fused output layer"
COMPACTION = "ended responses leave the batch"
PREFIX = "prompts read once a group"
ALL = "all of these"
OVERLAP = "graded while generating"
LEVERS = (BALANCE, FIRST, RESPONSES_ONLY, FUSED, COMPACTION, PREFIX, ALL)
"""What is switched off in a row."""
