"""Tells a full disk from other errors, because an operator can free space."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.server import errors

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_STATUS = 507


@contextmanager
def full_disk_named() -> Iterator[None]:
    """Raise ApiError (507) if the block fails because the disk or the user's quota is full."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            message = f"the disk is full ({error.strerror}); free some space and try again"
            raise errors.ApiError(_STATUS, "server_error", message, code="disk_full") from error
        raise


def is_full(error: Exception) -> bool:
    """Return whether ``full_disk_named`` raised the error."""
    return isinstance(error, errors.ApiError) and error.status == _STATUS
