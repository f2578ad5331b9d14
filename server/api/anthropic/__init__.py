"""Anthropic's /v1/messages on top of chat: translates requests, and builds answers as Anthropic's blocks and events."""
