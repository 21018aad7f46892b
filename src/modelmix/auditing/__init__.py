"""Attacks on our own epsilon: lower bounds, at a stated confidence, on what a mechanism or a run really leaks."""
