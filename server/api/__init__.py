"""The client APIs (OpenAI's, vLLM's, SGLang's, Anthropic's, Ollama's): check requests, build the JSON and events of answers."""
