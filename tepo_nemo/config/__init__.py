"""The typed configuration of a run, its presets and its checks; nothing here imports torch."""
