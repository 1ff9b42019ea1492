"""`tepo-nemo doctor`: what this machine has, what of it will not do, and what to do about it.

Each module of this folder gathers facts of one kind and holds the checks on them. A check is a pure function
of facts. Nothing heavy is imported and nothing is started but `nvidia-smi`, so that it works on a login node.
"""
