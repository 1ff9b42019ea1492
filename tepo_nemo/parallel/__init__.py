"""What the ranks of a run exchange: vocabulary, pipeline and data collectives. Process groups are arguments."""
