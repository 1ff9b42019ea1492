"""What the ranks of one tensor-parallel size are asked to measure, as a file between two processes."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cell:
    """One table: inputs of one size. `memory_tokens` are the sizes whose peak memory is measured, if any."""

    vocab_size: int
    tokens: int
    pairs: int
    row_seconds: float
    memory_tokens: tuple[int, ...] = ()
    hidden_size: int | None = None  # an output layer


@dataclass(frozen=True)
class Job:
    cells: tuple[Cell, ...]
    results: Path
    console: str  # environment variable with the descriptor of the terminal

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self) | {"results": str(self.results)}))

    @classmethod
    def read(cls, path: Path) -> "Job":
        fields = json.loads(path.read_text())
        cells = (Cell(**cell | {"memory_tokens": tuple(cell["memory_tokens"])}) for cell in fields["cells"])
        return cls(tuple(cells), Path(fields["results"]), fields["console"])
