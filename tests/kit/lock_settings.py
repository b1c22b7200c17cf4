"""The settings of a lock with defaults, as a client passes them to `describe`."""

from __future__ import annotations

from typing import Any

PLAIN: dict[str, Any] = {
    "ttl": 30,
    "timeout": None,
    "renew": True,
    "max_hold": None,
    "reentrant": False,
    "owner": None,
    "fair": True,
    "lock_delay": 0,
    "key": None,
    "label": None,
    "command_timeout": 2.0,
}
