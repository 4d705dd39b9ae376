"""Programs for developers of models and of paceline: benchmarks, evaluation, training."""
