"""Parameters, memory and time of a run, from its configuration alone; nothing here imports torch."""
