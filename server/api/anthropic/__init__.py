"""Anthropic's /v1/messages over the same chat: requests translated, answers worded in their blocks and events."""
