"""What ranks exchange: vocabulary, pipeline and data collectives. Process groups are arguments."""
