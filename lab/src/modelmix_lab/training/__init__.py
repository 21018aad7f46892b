"""Training as the authors' released code does it. It proves nothing."""
