"""One small file per engine."""
