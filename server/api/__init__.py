"""What clients may ask: OpenAI's, vLLM's and Anthropic's requests, checked, and the JSON and events of answers."""
