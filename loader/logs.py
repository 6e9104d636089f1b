"""The loader process's log: one JSON object a line, for machines, or plain lines for a terminal.

{"time": "2026-11-29T12:00:00.123+00:00", "level": "warning", "logger": "seqmesh.loader", "pid": 7, "message": "..."}
"""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime

PLAIN = "%(asctime)s %(name)s %(levelname)s %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object for each record; an exception's traceback in a field of its own."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": os.getpid(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def log_json() -> None:
    """Log to the error output as JSON, Python's own warnings, too."""
    logging.captureWarnings(True)
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def log_plain() -> None:
    """Log to the error output for people."""
    logging.basicConfig(level=logging.INFO, format=PLAIN)


def message_of(line: str) -> str:
    """What a line of a log says: its message if it is one of ours, else the whole line."""
    try:
        return str(json.loads(line)["message"])
    except (ValueError, KeyError, TypeError):
        return line
