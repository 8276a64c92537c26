"""Support tokens: stability margins of causal self-attention."""
