"""What may go wrong in an engine, to be switched on."""

from dataclasses import dataclass


@dataclass
class Faults:
    """Nothing is wrong by default. One object is shared by all modules of a process."""

    # building and refitting
    mpi_rank: int | None = None  # what MPI says, where it is not the rank of torch
    without_multi_block_mode: bool = False  # the runtime of TensorRT-LLM 0.13
    folded: tuple[str, ...] = ()  # weights that the engine's compiler has made constants of
    extra: tuple[str, ...] = ()  # refittable weights that nobody provides
    refit_fails: bool = False  # TensorRT says so
    stale: bool = False  # a refit that says it worked and changes nothing
    stale_layers: tuple[int, ...] = ()  # the same for some layers alone
    # generating
    error: bool = False
    hang: bool = False
    ignores_temperature: bool = False
    ignores_rope_scaling: bool = False
    ignores_seeds: bool = False  # of its rows: all get the first one's
    seeds_by_rank: bool = False  # tensor-parallel ranks draw apart
    zero_logprobs: bool = False
    longer_by: int = 0  # added to the lengths told
    bad_id: int | None = None  # put in place of the first token of the first response
