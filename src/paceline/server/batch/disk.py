"""A full disk is told apart from a broken one: somebody can make room."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.server import errors

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_STATUS = 507


@contextmanager
def full_disk_named() -> Iterator[None]:
    """Raise ApiError (507) where the block finds no space on the disk, or its user's quota used up."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            message = f"the disk is full ({error.strerror}); make room and try again"
            raise errors.ApiError(_STATUS, "server_error", message, code="disk_full") from error
        raise


def is_full(error: Exception) -> bool:
    """Whether ``full_disk_named`` raised it."""
    return isinstance(error, errors.ApiError) and error.status == _STATUS
