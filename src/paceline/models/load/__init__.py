"""From a checkpoint to a model that runs here, with its adapters."""
