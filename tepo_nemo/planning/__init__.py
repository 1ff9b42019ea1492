"""Layout and batch arithmetic from plain numbers: no torch, no configuration objects."""
