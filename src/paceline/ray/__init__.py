"""More than one machine, on Ray: ``Answers`` for Ray Data."""

from paceline.ray.data import Answers

__all__ = ["Answers"]
