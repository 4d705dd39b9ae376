"""Log lines, for people or for machines."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from paceline.params import LogFormat

LOGGERS = ("paceline", "uvicorn")
_TEXT = "%(asctime)s %(levelname)-7s %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line; what is passed as extra={"fields": {...}} become fields of it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Time, level, message, and the fields as name=value."""

    def __init__(self) -> None:
        super().__init__(_TEXT, "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's own name)
        fields = getattr(record, "fields", {})
        tail = "".join(f" {name}={_short(value)}" for name, value in fields.items() if value is not None)
        return super().formatMessage(record) + tail


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value, default=str)


def configure(log_format: LogFormat) -> None:
    """Send paceline's and uvicorn's lines to stderr, and nowhere else."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
