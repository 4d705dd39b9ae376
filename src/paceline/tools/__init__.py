"""Programs for people who develop models or paceline itself: benchmarks, evaluation, training."""
