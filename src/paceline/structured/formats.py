"""Formats of strings: those that llguidance enforces exactly, and patterns of those that it does not.

llguidance (1.9) allows a 29th of February in every year, a 60th second at any time, and digits without end.
Dates, times and durations are patterns here: RFC 3339's, with leap years and without leap seconds, with at most nine
decimals of a second and nine digits of each part of a duration.
"""

from __future__ import annotations

_31_DAYS = r"(0[13578]|1[02])-(0[1-9]|[12]\d|3[01])"
_30_DAYS = r"(0[469]|11)-(0[1-9]|[12]\d|30)"
_28_DAYS = r"02-(0[1-9]|1\d|2[0-8])"
_LEAP_YEAR = r"(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = rf"(\d{{4}}-({_31_DAYS}|{_30_DAYS}|{_28_DAYS})|{_LEAP_YEAR}-02-29)"
_HOUR_AND_MINUTE = r"([01]\d|2[0-3]):[0-5]\d"
_TIME = rf"{_HOUR_AND_MINUTE}:[0-5]\d(\.\d{{1,9}})?(Z|[+-]{_HOUR_AND_MINUTE})"

_NUMBER = r"\d{1,9}"
_TIME_SPAN = rf"T({_NUMBER}H({_NUMBER}M({_NUMBER}S)?)?|{_NUMBER}M({_NUMBER}S)?|{_NUMBER}S)"
_DATE_SPAN = rf"({_NUMBER}Y({_NUMBER}M({_NUMBER}D)?)?|{_NUMBER}M({_NUMBER}D)?|{_NUMBER}D)"
_DURATION = rf"P({_DATE_SPAN}({_TIME_SPAN})?|{_TIME_SPAN}|{_NUMBER}W)"

PATTERNS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}", "duration": _DURATION}
# names of llguidance by those of JSON schemas; every URI is a valid URI reference
FORMATS = {name: name for name in ("hostname", "ipv4", "ipv6", "uuid", "uri")} | {"uri-reference": "uri"}
