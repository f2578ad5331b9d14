"""The OpenAI-compatible routes: schemas, checks, and the shapes of answers and streams."""
