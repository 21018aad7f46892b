"""The clipped sum of per-sample gradients, by the engine that costs least."""
