"""The project's own tools; each runs as a script from the repository root."""
