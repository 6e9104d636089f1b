from collections.abc import Callable

import pytest

from seqmesh.loader.errors import RemoteError
from seqmesh.loader.storage import retry
from seqmesh.loader.storage.retry import Patience, persist


class Answer(Exception):  # noqa: N818  # what HTTP drivers raise for one
    def __init__(self, status: int) -> None:
        super().__init__(f"answer {status}")
        self.status = status


class Clock:
    """Time passes in pauses, and as long as a request takes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses = list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(retry, "time", clock)
    monkeypatch.setattr("random.uniform", lambda low, high: (low + high) / 2)
    return clock


def failing(clock: Clock, error: Exception, seconds: float, given: list[float]) -> Callable[[float], None]:
    """Takes so long for each try, or until the time it is given is over."""

    def ask(limit: float) -> None:
        given.append(limit)
        clock.now += min(seconds, limit)
        raise error

    return ask


def test_pauses_grow_and_tries_are_few(clock: Clock) -> None:
    given = list[float]()
    with pytest.raises(RemoteError, match=r"^reading x: failed 5 times in 10.0 s, last: ConnectionError: lost; check"):
        persist(failing(clock, ConnectionError("lost"), 0.0, given), "reading x", Patience(tries=5, pause=0.25))
    assert clock.pauses == [0.25, 0.75, 2.25, 6.75]
    assert given == [30.0, 29.875, 29.5, 28.375, 50.0]  # half of what is left, all of it to the last


@pytest.mark.parametrize("seconds", [1.0, 40.0, 1e9])
def test_all_tries_together_end_at_the_deadline(clock: Clock, seconds: float) -> None:
    given = list[float]()
    with pytest.raises(RemoteError, match="TimeoutError: no answer in time"):
        persist(failing(clock, TimeoutError(), seconds, given), "reading x", Patience(seconds=60, tries=100))
    assert clock.now <= 60.001
    assert len(given) > 1


@pytest.mark.parametrize(
    ("error", "tries", "message"),
    [
        (Answer(503), 3, "failed 3 times"),
        (Answer(429), 3, "failed 3 times"),
        (Answer(400), 1, "refused: Answer: answer 400; another try would not mend it"),
        (Answer(403), 1, "refused: Answer: answer 403; check the credentials"),
        (PermissionError("no"), 1, "refused: PermissionError: no; check the credentials"),
        (type("NoCredentialsError", (Exception,), {})("none"), 1, "refused: NoCredentialsError: none"),
        (ValueError("odd"), 1, "refused: ValueError: odd; another try would not mend it"),
        (OSError(5, "Input/output error"), 3, "failed 3 times"),
        (Exception(), 3, "last: Exception; check the network"),
    ],
)
def test_what_is_tried_again(clock: Clock, error: Exception, tries: int, message: str) -> None:
    given = list[float]()
    with pytest.raises(RemoteError, match=message):
        persist(failing(clock, error, 0.0, given), "reading x", Patience(tries=3))
    assert len(given) == tries


def absent(cause: Exception | None) -> FileNotFoundError:
    error = FileNotFoundError("x")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "tries", "expected"),
    [
        (absent(None), 1, FileNotFoundError),
        (absent(KeyError("x")), 1, FileNotFoundError),
        (absent(ConnectionRefusedError()), 3, RemoteError),  # so does fsspec over HTTP
        (absent(TimeoutError()), 3, RemoteError),
        (Answer(404), 1, FileNotFoundError),
        (Answer(410), 1, FileNotFoundError),
        (IsADirectoryError("x"), 1, FileNotFoundError),
    ],
)
def test_what_is_not_there(clock: Clock, error: Exception, tries: int, expected: type[Exception]) -> None:
    given = list[float]()
    with pytest.raises(expected, match=r"^looking for x: "):
        persist(failing(clock, error, 0.0, given), "looking for x", Patience(tries=3))
    assert len(given) == tries


def test_patience_that_can_not_be() -> None:
    with pytest.raises(ValueError, match="tries is 0: must be at least 1"):
        Patience(tries=0)
    with pytest.raises(ValueError, match="seconds is 0: must be more than 0"):
        Patience(seconds=0)
