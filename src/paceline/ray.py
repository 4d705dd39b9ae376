"""More than one machine, on Ray: ``Answers`` for Ray Data."""

from paceline.integrations.ray import Answers

__all__ = ["Answers"]
