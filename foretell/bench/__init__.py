"""``foretell bench``: engines side by side, on the same prompts."""
