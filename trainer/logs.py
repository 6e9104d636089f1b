"""Where a run's figures go besides its own log: TensorBoard and Weights & Biases, each an extra that is imported only
where it is asked for. Only the first rank writes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from seqmesh.trainer.monitor import JsonLines, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbConfig:
    """project, entity, name: as Weights & Biases has them. mode offline: into the run folder, for `wandb sync`."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    project: str
    entity: str | None = None
    name: str | None = None
    mode: Literal["online", "offline"] = "online"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """tensorboard: write event files into the run folder's `tensorboard`. wandb: None for none."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    tensorboard: bool = False
    wandb: WandbConfig | None = None


class Sink(Protocol):
    """Takes every step's record as soon as the step is done; lines of a step may come again after a resume."""

    def write(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


def check_installed(config: LogConfig) -> None:
    """Raises ValueError naming the setting whose package is missing, and how to install it."""
    wanted = {"tensorboard": config.tensorboard, "wandb": config.wandb is not None}
    for name, on in wanted.items():
        if on and find_spec(name) is None:
            raise ValueError(f"log.{name} is set, but {name} is not installed: pip install 'seqmesh[{name}]'")


@contextmanager
def open_sinks(config: LogConfig, folder: Path, step: int, settings: dict[str, Any]) -> Iterator[list[Sink]]:
    """All that are asked for, the run's own log first; closed at the end of the block. step: steps done before.
    settings: of the whole job, to be kept with its figures."""
    with ExitStack() as stack:
        sinks: list[Sink] = []

        def add(sink: Sink) -> None:
            stack.callback(sink.close)
            sinks.append(sink)

        add(JsonLines(folder / "log.jsonl"))
        if config.tensorboard:
            add(TensorBoard(folder / "tensorboard", step))
        if config.wandb is not None:
            add(Wandb(config.wandb, folder, settings))
        yield sinks


def scalars(record: StepRecord) -> dict[str, float]:
    """A record's numbers by name; those of its phases are `seconds/<phase>`."""
    fields = asdict(record)
    phases = fields.pop("seconds")
    del fields["step"]
    return {name: float(value) for name, value in fields.items()} | {f"seconds/{name}": s for name, s in phases.items()}


class TensorBoard:
    """Event files. A resumed run has its own; it tells TensorBoard to forget what the one before had done of its steps
    and later ones, so none shows twice."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def write(self, record: StepRecord) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.step)
        self._writer.flush()  # a kill loses no step that a checkpoint has

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, the same one after a resume: its id is kept in the run folder. Steps that come again
    are dropped by the service, which takes every step once."""

    def __init__(self, config: WandbConfig, folder: Path, settings: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=config.name,
            mode=config.mode,
            dir=str(folder),
            id=_kept_id(folder / "wandb.id"),
            resume="allow",
            config=settings,
        )

    def write(self, record: StepRecord) -> None:
        self._run.log(scalars(record), step=record.step)

    def close(self) -> None:
        self._run.finish()


def _kept_id(path: Path) -> str:
    """The id in a file; a new one where there is none yet."""
    if not path.exists():
        path.write_text(uuid.uuid4().hex)
    return path.read_text().strip()
