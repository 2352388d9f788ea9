"""Memory of activations: what backward reads is kept in float8, or computed again."""
