"""More than one machine, on Ray: ``Answers`` for Ray Data, and ``paceline serve --replicas``."""

from paceline.integrations.ray.data import Answers

__all__ = ["Answers"]
