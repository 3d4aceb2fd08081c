"""The server's log on stderr: a line an event, as text or as JSON."""

import json
import logging
import sys
import time
from typing import Any

FORMATS = ("text", "json")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def use_log_format(name: str) -> None:
    """Sends the log of `jaxspec` and the warnings of everything else to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if name == "json" else TextLines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("jaxspec").setLevel(logging.INFO)


class TextLines(logging.Formatter):
    """Writes time, level and message, then `name=value` for what the event carries."""

    def format(self, record: logging.LogRecord) -> str:
        """Writes one event."""
        words = [_time(record), record.levelname, record.name, record.getMessage()]
        words += [f"{name}={value}" for name, value in _extra(record).items()]
        lines = [" ".join(words)]
        if record.exc_info:
            lines.append(self.formatException(record.exc_info))
        return "\n".join(lines)


class JsonLines(logging.Formatter):
    """Writes each event as a JSON object on a line of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """Writes one event."""
        event = {"time": _time(record), "level": record.levelname, "logger": record.name, "event": record.getMessage()}
        event |= _extra(record)
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str)


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}
