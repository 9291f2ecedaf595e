"""OpenAI's request and answer bodies; knows no line and no socket."""
