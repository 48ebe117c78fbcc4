"""`foretell serve`: an OpenAI-compatible server that batches requests without changing a token."""
